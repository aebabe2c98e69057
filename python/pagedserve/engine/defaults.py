"""Defaults that depend on the model: sampling parameters of its files, options of a server."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError, RequestError
from pagedserve.models.load.gguf_header import read_header
from pagedserve.models.load.sources import find_source, is_path
from pagedserve.regular_files import read_json
from pagedserve.sampling_params import SamplingParams
from pagedserve.sampling_params.options import PARAMETERS

if TYPE_CHECKING:
    from pagedserve.executor.protocol import ModelInfo

# Tokens per step with chunked prefill: with many simultaneous conversations the last first token
# comes sooner than with the engine's 512 (benches/results/2026-11-22-serving.md).
STEP_TOKENS: Final = 768

# Keys of generation_config.json by those of a GGUF file, after the prefix.
_GGUF_PREFIX: Final = "general.sampling."
_GGUF_KEYS: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def default_sampling_params(args: EngineArgs) -> SamplingParams:
    """Default sampling parameters from ``generation_config`` and ``override_generation_config``.

    Raises:
        ConfigError: A file cannot be read, or a value is invalid.
    """
    recommended: dict[str, Any] = {}
    if args.generation_config != "vllm":
        recommended = _recommended(args)
    recommended |= args.override_generation_config or {}
    given = {
        name: value
        for name, known in PARAMETERS.items()
        if known.recommended_as and (value := recommended.get(known.recommended_as)) is not None
    }
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise ConfigError(f"generation_config: {error}") from error


def public_name(args: EngineArgs) -> str | None:
    """Hub id of the model; None for a local path."""
    return None if is_path(args.model) else args.model


def _recommended(args: EngineArgs) -> dict[str, Any]:
    """Contents of ``generation_config.json``, or what a GGUF file has of it."""
    directory = Path(args.generation_config)
    if args.generation_config == "auto":
        source = find_source(args)
        if source.is_gguf:
            return _read_gguf(source.path)
        directory = source.path
    return _read(directory / "generation_config.json", args.generation_config)


def _read(path: Path, named: str) -> dict[str, Any]:
    if named == "auto" and not os.path.lexists(path):
        return {}
    try:
        config = read_json(path)
    except ValueError as error:
        raise ConfigError(f"generation_config: cannot read {path}: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"generation_config: {path} holds no JSON object")
    return dict(config)


def _read_gguf(path: Path) -> dict[str, Any]:
    try:
        fields = read_header(path).fields
    except ValueError as error:
        raise ConfigError(f"generation_config: cannot read {path}: {error}") from error
    named = {name: fields.get(f"{_GGUF_PREFIX}{key}") for key, name in _GGUF_KEYS.items()}
    return {name: value for name, value in named.items() if value is not None}


def server_defaults(args: EngineArgs, model: "ModelInfo") -> EngineArgs:
    """The engine's options with a server's defaults, where the model supports them."""
    chunks, prefixes = args.enable_chunked_prefill, args.enable_prefix_caching
    chunks = not model.sees_whole_prompts if chunks is None else chunks
    if prefixes is None:
        prefixes = not (model.sees_whole_prompts or model.keeps_states or model.encoder_decoder)
    step_tokens = args.max_num_batched_tokens
    if step_tokens is None and chunks:
        step_tokens = max(STEP_TOKENS, args.max_num_seqs or 0)
    return dataclasses.replace(
        args,
        enable_chunked_prefill=chunks,
        enable_prefix_caching=prefixes,
        max_num_batched_tokens=step_tokens,
    )

"""What stands where nothing was said: parameters of a model's makers, options of a server."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pagedserve.config import EngineArgs
from pagedserve.errors import ConfigError, RequestError
from pagedserve.executor.protocol import ModelInfo
from pagedserve.models.files import find_model_files
from pagedserve.sampling_params import SamplingParams

# Keys of generation_config.json and what they are called here.
_NAMES: Final = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}

# Tokens of a step with chunks: among many conversations that begin at once the last one's first
# token comes sooner than with the engine's 512 (benches/results/2026-11-22-serving.md).
_STEP_TOKENS: Final = 768


def default_sampling_params(args: EngineArgs) -> SamplingParams:
    """What ``generation_config`` and ``override_generation_config`` say.

    Raises:
        ConfigError: A file that cannot be read, or a value that cannot be.
    """
    recommended: dict[str, Any] = {}
    if args.generation_config != "vllm":
        recommended = _read(_directory(args) / "generation_config.json", args.generation_config)
    recommended |= args.override_generation_config or {}
    given = {
        name: recommended[key] for key, name in _NAMES.items() if recommended.get(key) is not None
    }
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise ConfigError(f"generation_config: {error}") from error


def _directory(args: EngineArgs) -> Path:
    if args.generation_config == "auto":
        return find_model_files(args).directory
    return Path(args.generation_config)


def _read(path: Path, named: str) -> dict[str, Any]:
    if named == "auto" and not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"generation_config: cannot read {path}: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"generation_config: {path} holds no JSON object")
    return dict(config)


def server_defaults(args: EngineArgs, model: ModelInfo) -> EngineArgs:
    """The engine's options with the defaults of a server, as far as the model can obey them."""
    chunks, prefixes = args.enable_chunked_prefill, args.enable_prefix_caching
    chunks = not model.sees_whole_prompts if chunks is None else chunks
    if prefixes is None:
        prefixes = not (model.sees_whole_prompts or model.keeps_states or model.encoder_decoder)
    step_tokens = args.max_num_batched_tokens
    if step_tokens is None and chunks:
        step_tokens = max(_STEP_TOKENS, args.max_num_seqs or 0)
    return dataclasses.replace(
        args,
        enable_chunked_prefill=chunks,
        enable_prefix_caching=prefixes,
        max_num_batched_tokens=step_tokens,
    )

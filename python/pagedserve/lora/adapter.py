"""Adapter files in peft's format, and their weights.

Only this module knows peft's format.  Files are read once and completely: the hashed contents are
those that are used, even if they are modified meanwhile.  The modules that an adapter changes are
those with weights in its file; ``target_modules`` and similar fields only affected training.
"""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedserve.errors import RequestError
from pagedserve.lora.patterns import NamePatterns
from pagedserve.lora.weights import LoraWeights
from pagedserve.models.load.hub import ADAPTER_FILES
from pagedserve.models.load.safetensors_header import FLOATS, as_float32, read_entries
from pagedserve.regular_files import (
    MAX_JSON_BYTES,
    expanded,
    is_file,
    parse_json,
    read_bytes,
)

CONFIG, WEIGHTS = ADAPTER_FILES
_PICKLED: Final = "adapter_model.bin"
_SHOWN_CHARACTERS: Final = 200

# Fields of the config that are used here.
_READ: Final = frozenset(
    [
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
        "bias",
    ]
)
# Fields about training, which the weights show or do not depend on.
_OF_TRAINING: Final = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",  # of the base weights, which are not merged
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    ]
)
_REFUSED: Final = {
    "use_dora": "DoRA scales the sum of base and adapter",
    "lora_bias": "biases are the base model's",
    "modules_to_save": "whole modules are not accepted, only low-rank changes",
    "alora_invocation_tokens": "an adapter changes every token of its requests",
    "layer_replication": "the layers are the base model's",
    "target_parameters": "parameters that are no module's weight are not changed",
    "trainable_token_indices": "the vocabulary is the base model's",
}
# Initializations that leave the base model's weights unchanged.
_INITS: Final = (True, False, None, "gaussian", "eva", "orthogonal")

_KEY: Final = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:embedding_)?(?P<part>[AB])(?:\.weight)?"
)
_BASE_KEY: Final = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.base_layer\.weight")


# Sizes of each module that can have an adapter: (in, out) features, for an embedding (tokens,
# features).
Shapes: TypeAlias = Mapping[str, tuple[int, int]]
# Matrices of a module, by "A" and "B".
_Pair: TypeAlias = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Contents of an adapter's files.

    Attributes:
        name: Name in errors.
        config: Contents of ``adapter_config.json``.
        weights: Contents of ``adapter_model.safetensors``.
    """

    name: str
    config: bytes
    weights: bytes

    @classmethod
    def read(cls, name: str, path: str, max_bytes: int = sys.maxsize) -> "AdapterFiles":
        """Read the files of a directory.

        Args:
            name: Name in errors.
            path: The directory.
            max_bytes: Maximum bytes of weights.

        Raises:
            RequestError: The directory has no adapter, or none in safetensors format.
        """
        try:
            directory = expanded(path)
        except ValueError as error:
            _refuse(name, f"its path {error}")
        if not is_file(directory / CONFIG):
            _refuse(name, f"{path!r} is no directory with an {CONFIG} and an {WEIGHTS}")
        if not is_file(directory / WEIGHTS):
            if is_file(directory / _PICKLED):
                _refuse(name, f"{_PICKLED} is not read, only safetensors: save it as {WEIGHTS}")
            _refuse(name, f"{path!r} has no {WEIGHTS}")
        try:
            config = read_bytes(directory / CONFIG, MAX_JSON_BYTES)
            return cls(name, config, read_bytes(directory / WEIGHTS, max_bytes))
        except ValueError as error:
            _refuse(name, str(error))

    @property
    def digest(self) -> bytes:
        """SHA-256 of the contents, without the name."""
        import hashlib  # which loads OpenSSL

        digest = hashlib.sha256(len(self.config).to_bytes(8))
        digest.update(self.config)
        digest.update(self.weights)
        return digest.digest()

    def parse(self, shapes: Shapes, max_rank: int) -> dict[str, LoraWeights]:
        """Parse the weights, float32, by the names of the model's modules.

        Args:
            shapes: Sizes of the model's modules.
            max_rank: Maximum rank.

        Raises:
            RequestError: The weights are invalid; the message lists what is accepted.
        """
        scaling = _Scaling.of(self.name, self.config)
        pairs = self._pairs(shapes)
        return {module: self._scaled(module, pairs[module], scaling, max_rank) for module in pairs}

    def _pairs(self, shapes: Shapes) -> Mapping[str, _Pair]:
        """Both matrices of each module, with checked shapes."""
        weights = self.weights
        try:
            entries = read_entries(
                WEIGHTS, len(weights), lambda first, number: weights[first : first + number]
            )
        except ValueError as error:
            _refuse(self.name, f"{WEIGHTS} cannot be read: {_shown(str(error))}")
        stored = np.frombuffer(weights, np.uint8)
        pairs: dict[str, dict[str, NDArray[np.float32]]] = {}
        for entry in entries:
            match = _KEY.fullmatch(entry.name)
            if entry.storage not in FLOATS:
                _refuse(
                    self.name,
                    f"{_shown(entry.name)} is of {entry.storage}; accepted are {', '.join(FLOATS)}",
                )
            if match is None:
                self._check_base_weight(entry.name, entry.shape, shapes)
                continue
            numbers = stored[entry.offset : entry.offset + entry.num_bytes]
            matrix = as_float32(numbers, entry.storage).reshape(entry.shape)
            pairs.setdefault(match["module"], {})[match["part"]] = matrix
        if not pairs:
            _refuse(self.name, f"{WEIGHTS} has no lora_A and lora_B of any module")
        self._check_modules(pairs, shapes)
        return pairs

    def _check_base_weight(self, key: str, shape: tuple[int, ...], shapes: Shapes) -> None:
        """Ignore the base model's embeddings, which peft saves with an adapter of them."""
        match = _BASE_KEY.fullmatch(key)
        if match is None or match["module"] not in shapes:
            _refuse(
                self.name, f"{WEIGHTS} has {_shown(key)}, which is no low-rank change of a weight"
            )
        if sorted(shape) != sorted(shapes[match["module"]]):
            _refuse(
                self.name,
                f"{_shown(key)} is {shape}; the model has "
                f"{shapes[match['module']]}: the vocabulary was changed",
            )

    def _check_modules(self, pairs: Mapping[str, _Pair], shapes: Shapes) -> None:
        unknown = [module for module in pairs if module not in shapes]
        if unknown:
            known = ", ".join(sorted({module.rpartition(".")[2] for module in shapes}))
            _refuse(
                self.name,
                f"the model has no {_shown(unknown[0])} that an adapter can change, and "
                f"{len(unknown) - 1} more; it has {known}",
            )
        for module, pair in pairs.items():
            if pair.keys() != {"A", "B"}:
                _refuse(self.name, f"{WEIGHTS} has one of lora_A and lora_B of {module!r} alone")
            a, b, (num_in, num_out) = pair["A"], pair["B"], shapes[module]
            rank = len(a) if a.ndim else 0
            if rank == 0 or a.shape != (rank, num_in) or b.shape != (num_out, rank):
                _refuse(
                    self.name,
                    f"lora_A of {module!r} is {a.shape} and lora_B {b.shape}; they "
                    f"must be (r, {num_in}) and ({num_out}, r)",
                )
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                _refuse(self.name, f"the weights of {module!r} are not all finite numbers")

    def _scaled(self, module: str, pair: _Pair, scaling: "_Scaling", max_rank: int) -> LoraWeights:
        try:
            rank, configured, factor = len(pair["A"]), scaling.rank(module), scaling.factor(module)
        except ValueError as error:
            _refuse(self.name, f"rank_pattern or alpha_pattern {error}")
        if rank != configured:
            _refuse(self.name, f"{module!r} has rank {rank}; {CONFIG} says {configured}")
        if rank > max_rank:
            _refuse(self.name, f"{module!r} has rank {rank}; max_lora_rank is {max_rank}")
        with np.errstate(over="ignore", invalid="ignore"):
            b = pair["B"] * np.float32(factor)
        if not np.isfinite(b).all():
            _refuse(
                self.name,
                f"the weights of {module!r} times lora_alpha / r = {factor:g} are infinite",
            )
        return LoraWeights(pair["A"], b)


@dataclass(frozen=True, slots=True)
class _Scaling:
    """Ranks and scaling factors of a config.

    Attributes:
        r: Default rank of modules.
        alpha: Default numerator of the factor.
        ranks: Ranks by patterns of names.
        alphas: Numerators by patterns of names.
        is_rank_stabilized: Whether the factor is ``alpha / sqrt(r)`` instead of ``alpha / r``.
    """

    r: int
    alpha: float
    ranks: NamePatterns[int]
    alphas: NamePatterns[float]
    is_rank_stabilized: bool

    @classmethod
    def of(cls, name: str, config: bytes) -> "_Scaling":
        """Parse a config.

        Raises:
            RequestError: It is invalid, or requires something unsupported.
        """
        try:
            fields = parse_json(CONFIG, config)
        except ValueError as error:
            _refuse(name, str(error))
        if not isinstance(fields, dict):
            _refuse(name, f"{CONFIG} is no JSON object")
        _check_config(name, fields)
        return cls(
            r=_number(name, "r", fields.get("r", 8)),
            alpha=_number(name, "lora_alpha", fields.get("lora_alpha", 8)),
            ranks=_patterns(name, "rank_pattern", fields.get("rank_pattern")),
            alphas=_patterns(name, "alpha_pattern", fields.get("alpha_pattern")),
            is_rank_stabilized=fields.get("use_rslora") is True,
        )

    def rank(self, module: str) -> int:
        """Rank of a module."""
        return self.ranks.find(module, self.r)

    def factor(self, module: str) -> float:
        """Scaling factor of ``b @ a`` of a module."""
        rank = self.rank(module)
        return self.alphas.find(module, self.alpha) / (
            math.sqrt(rank) if self.is_rank_stabilized else rank
        )


def _check_config(name: str, fields: Mapping[str, Any]) -> None:
    if fields.get("peft_type") != "LORA":
        _refuse(name, f"peft_type is {_shown(fields.get('peft_type'))}; it must be 'LORA'")
    if fields.get("init_lora_weights") not in _INITS:
        _refuse(
            name,
            f"init_lora_weights is {_shown(fields['init_lora_weights'])}, which changes the base "
            "model's weights too; accepted are True, False, 'gaussian', 'eva' and 'orthogonal', "
            "and what save_pretrained makes of others by path_initial_model_for_weight_conversion",
        )
    if fields.get("use_rslora") not in (True, False, None):
        _refuse(name, f"use_rslora is {_shown(fields['use_rslora'])}; it must be true or false")
    if fields.get("bias", "none") != "none":
        _refuse(name, f"bias is {_shown(fields['bias'])}; it must be 'none'")
    for field, value in fields.items():
        if field not in _READ | _OF_TRAINING and value:
            reason = _REFUSED.get(field, "it is not known here")
            _refuse(name, f"{field} is {_shown(value)}, which is not supported: {reason}")


def _number(name: str, field: str, value: object) -> Any:
    """Check a rank or a factor's numerator: a positive number in the range of float."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value <= sys.float_info.max):  # type: ignore[operator]  # a number
        _refuse(name, f"{field} is {_shown(value)}; it must be a number above 0")
    return value


def _patterns(name: str, field: str, given: object) -> NamePatterns[Any]:
    """Parse numbers by patterns: a whole name or its end after a dot, as in peft."""
    if not isinstance(given, Mapping | None):
        _refuse(name, f"{field} is {_shown(given)}; it must be an object")
    numbers = {
        pattern: _number(name, f"{field} of {_shown(pattern)}", value)
        for pattern, value in (given or {}).items()
    }
    try:
        return NamePatterns(numbers)
    except ValueError as error:
        _refuse(name, f"{field} {error}")


def _shown(value: object) -> str:
    """Format a value for an error, at most one line long."""
    shown = repr(value) if not isinstance(value, str) else repr(value[:_SHOWN_CHARACTERS])
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}..."


def _refuse(name: str, what: str) -> NoReturn:
    raise RequestError(f"adapter {name!r}: {what}", param="lora_request")

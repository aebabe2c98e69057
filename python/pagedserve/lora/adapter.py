"""An adapter's files, as peft writes them, and the weights that they hold.

Owns peft's format; nothing else here knows it.  Files are read once and as a whole: what was hashed
is what is used, whoever writes to them meanwhile.  What an adapter changes is what its file has
weights of; ``target_modules`` and its like only said where training put them.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from pagedserve.errors import RequestError
from pagedserve.lora.weights import LoraWeights
from pagedserve.models.hub import ADAPTER_FILES

T = TypeVar("T")

CONFIG, WEIGHTS = ADAPTER_FILES
_PICKLED: Final = "adapter_model.bin"

# Fields of the config that are read here.
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
# Those that say where or how it was trained, which the weights show or do not depend on.
_OF_TRAINING: Final = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",  # of the base weights, which nothing is merged into
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
    "modules_to_save": "whole modules of its own are not taken, only low-rank changes",
    "alora_invocation_tokens": "an adapter changes every token of its requests",
    "layer_replication": "the layers are the base model's",
    "target_parameters": "parameters that are no module's weight are not changed",
    "trainable_token_indices": "the vocabulary is the base model's",
}
# Starts of training that leave the base model's weights as they are.
_INITS: Final = (True, False, None, "gaussian", "eva", "orthogonal")

_KEY: Final = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:embedding_)?(?P<part>[AB])(?:\.weight)?"
)
_BASE_KEY: Final = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.base_layer\.weight")


# What each module that can be changed takes and gives: (in, out) features, of an embedding
# (tokens, features).
Shapes: TypeAlias = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The contents of an adapter's files.

    Attributes:
        name: What errors call it.
        config: Of ``adapter_config.json``.
        weights: Of ``adapter_model.safetensors``.
    """

    name: str
    config: bytes
    weights: bytes

    @classmethod
    def read(cls, name: str, path: str) -> "AdapterFiles":
        """Read the files of a directory.

        Raises:
            RequestError: There is no adapter, or not in safetensors.
        """
        directory = Path(path).expanduser()
        if not (directory / CONFIG).is_file():
            _refuse(name, f"{path!r} is no directory with an {CONFIG} and an {WEIGHTS}")
        if not (directory / WEIGHTS).is_file():
            if (directory / _PICKLED).is_file():
                _refuse(name, f"{_PICKLED} is not read, only safetensors: save it as {WEIGHTS}")
            _refuse(name, f"{path!r} has no {WEIGHTS}")
        try:
            return cls(name, (directory / CONFIG).read_bytes(), (directory / WEIGHTS).read_bytes())
        except OSError as error:
            _refuse(name, f"its files cannot be read: {error}")

    @property
    def digest(self) -> bytes:
        """SHA-256 of the contents; the name is no part of it."""
        digest = hashlib.sha256(len(self.config).to_bytes(8))
        digest.update(self.config)
        digest.update(self.weights)
        return digest.digest()

    def parse(self, shapes: Shapes, max_rank: int) -> dict[str, LoraWeights]:
        """The weights, float32, by the names of the model's modules.

        Args:
            shapes: Of the model's modules.
            max_rank: The largest rank that there is room for.

        Raises:
            RequestError: What cannot be, and what is accepted.
        """
        scaling = _Scaling.of(self.name, self.config)
        pairs = self._pairs(shapes)
        return {module: self._scaled(module, pairs[module], scaling, max_rank) for module in pairs}

    def _pairs(self, shapes: Shapes) -> dict[str, dict[str, Tensor]]:
        """Both tensors of each module, by "A" and "B"; float32, of the right shape."""
        try:
            tensors = load(self.weights)
        except SafetensorError as error:
            _refuse(self.name, f"{WEIGHTS} cannot be read: {error}")
        pairs: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            match = _KEY.fullmatch(key)
            if match is not None:
                pairs.setdefault(match["module"], {})[match["part"]] = tensor.float()
            else:
                self._check_base_weight(key, tensor, shapes)
        if not pairs:
            _refuse(self.name, f"{WEIGHTS} has no lora_A and lora_B of any module")
        self._check_modules(pairs, shapes)
        return pairs

    def _check_base_weight(self, key: str, tensor: Tensor, shapes: Shapes) -> None:
        """Pass over the base model's embeddings, which peft saves beside an adapter of them."""
        match = _BASE_KEY.fullmatch(key)
        if match is None or match["module"] not in shapes:
            _refuse(self.name, f"{WEIGHTS} has {key!r}, which is no low-rank change of a weight")
        if sorted(tensor.shape) != sorted(shapes[match["module"]]):
            _refuse(
                self.name,
                f"{key!r} is {tuple(tensor.shape)}; the model has "
                f"{shapes[match['module']]}: the vocabulary was changed",
            )

    def _check_modules(self, pairs: Mapping[str, Mapping[str, Tensor]], shapes: Shapes) -> None:
        unknown = [module for module in pairs if module not in shapes]
        if unknown:
            known = ", ".join(sorted({module.rpartition(".")[2] for module in shapes}))
            _refuse(
                self.name,
                f"the model has no {unknown[0]!r} that an adapter can change, and "
                f"{len(unknown) - 1} more; it has {known}",
            )
        for module, pair in pairs.items():
            if pair.keys() != {"A", "B"}:
                _refuse(self.name, f"{WEIGHTS} has one of lora_A and lora_B of {module!r} alone")
            a, b, (num_in, num_out) = pair["A"], pair["B"], shapes[module]
            rank = len(a) if a.dim() else 0
            if rank == 0 or a.shape != (rank, num_in) or b.shape != (num_out, rank):
                _refuse(
                    self.name,
                    f"lora_A of {module!r} is {tuple(a.shape)} and lora_B {tuple(b.shape)}; they "
                    f"must be (r, {num_in}) and ({num_out}, r)",
                )
            if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
                _refuse(self.name, f"the weights of {module!r} are not all finite numbers")

    def _scaled(
        self, module: str, pair: Mapping[str, Tensor], scaling: "_Scaling", max_rank: int
    ) -> LoraWeights:
        rank, configured = len(pair["A"]), scaling.rank(module)
        if rank != configured:
            _refuse(self.name, f"{module!r} has rank {rank}; {CONFIG} says {configured}")
        if rank > max_rank:
            _refuse(self.name, f"{module!r} has rank {rank}; max_lora_rank is {max_rank}")
        return LoraWeights(pair["A"], pair["B"] * scaling.factor(module))


@dataclass(frozen=True, slots=True)
class _Scaling:
    """What a config says of ranks and factors.

    Attributes:
        r: Rank of modules that no pattern names.
        alpha: As ``r``, the factor's numerator.
        ranks: By patterns of names.
        alphas: By patterns of names.
        is_rank_stabilized: Whether the factor is ``alpha / sqrt(r)`` and not ``alpha / r``.
    """

    r: int
    alpha: float
    ranks: Mapping[re.Pattern[str], int]
    alphas: Mapping[re.Pattern[str], float]
    is_rank_stabilized: bool

    @classmethod
    def of(cls, name: str, config: bytes) -> "_Scaling":
        """Read a config.

        Raises:
            RequestError: It asks for what is not here, or is no config.
        """
        try:
            fields = json.loads(config)
        except ValueError as error:
            _refuse(name, f"{CONFIG} is no JSON: {error}")
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
        """The rank that a module has."""
        return _matched(self.ranks, module, self.r)

    def factor(self, module: str) -> float:
        """What ``b @ a`` of a module is multiplied by."""
        rank = self.rank(module)
        return _matched(self.alphas, module, self.alpha) / (
            math.sqrt(rank) if self.is_rank_stabilized else rank
        )


def _check_config(name: str, fields: Mapping[str, Any]) -> None:
    if fields.get("peft_type") != "LORA":
        _refuse(name, f"peft_type is {fields.get('peft_type')!r}; it must be 'LORA'")
    if fields.get("init_lora_weights") not in _INITS:
        _refuse(
            name,
            f"init_lora_weights is {fields['init_lora_weights']!r}, which changes the base model's "
            "weights too; accepted are True, False, 'gaussian', 'eva' and 'orthogonal', and what "
            "save_pretrained(path_initial_model_for_weight_conversion=...) makes of others",
        )
    if fields.get("bias", "none") != "none":
        _refuse(name, f"bias is {fields['bias']!r}; it must be 'none'")
    for field, value in fields.items():
        if field not in _READ | _OF_TRAINING and value:
            reason = _REFUSED.get(field, "it is not known here")
            _refuse(name, f"{field} is {value!r}, which is not supported: {reason}")


def _number(name: str, field: str, value: object) -> Any:
    """A rank or a factor's numerator: a positive number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):  # type: ignore[operator]  # a number
        _refuse(name, f"{field} is {value!r}; it must be a number above 0")
    return value


def _patterns(name: str, field: str, given: object) -> dict[re.Pattern[str], Any]:
    """Numbers by patterns: a whole name or its end after a dot, as peft takes them."""
    if not isinstance(given, Mapping | None):
        _refuse(name, f"{field} is {given!r}; it must be an object")
    try:
        return {
            re.compile(rf"(.*\.)?({pattern})"): _number(name, field, value)
            for pattern, value in (given or {}).items()
        }
    except re.error as error:
        _refuse(name, f"{field} has a pattern that is no regular expression: {error}")


def _matched(patterns: Mapping[re.Pattern[str], T], module: str, default: T) -> T:
    """The number of the first pattern that a module's name matches."""
    found = (number for pattern, number in patterns.items() if pattern.fullmatch(module))
    return next(found, default)


def _refuse(name: str, what: str) -> NoReturn:
    raise RequestError(f"adapter {name!r}: {what}", param="lora_request")

"""What an engine is made from: one definition for Python and for the command line."""

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final, Self, get_args

from pagedserve.config import ModelConfig, ModelDtype
from pagedserve.errors import ConfigError

# Fields of these types are names; all others are counts.
_NAMES: Final = (str, ModelDtype)

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str) -> int:
    """Bytes from "1073741824", "512MiB", "2G" or "1.5GiB".

    Raises:
        argparse.ArgumentTypeError: Another form.
    """
    number = text.lower().replace(" ", "").removesuffix("b")
    unit = number.lstrip("0123456789.")
    digits = number.removesuffix(unit)
    if unit not in _UNITS or not digits.replace(".", "", 1).isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes; give e.g. 512MiB")
    return int(float(digits) * _UNITS[unit])


def _option(text: str, **argument: object) -> dict[str, object]:
    return {"help": text, **argument}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """Everything that decides how an engine is built; checked when made.

    Attributes:
        model: "smollm2", a local directory in Hugging Face format, a .gguf file, or a hub id.
        dtype: Of weights and KV cache; "auto" is float32 on the CPU, else the model's own.
        max_model_len: Tokens of a sequence, prompt and output; None is what the model allows.
        num_gpu_blocks: KV blocks; None takes what ``kv_cache_memory`` holds.
        block_size: Tokens of a KV block.
        max_num_seqs: Sequences of a step.
        max_num_batched_tokens: Tokens of a step; None is 2048 or ``max_model_len`` if more, since
            a prompt is computed in one step.
        seed: For the random numbers of requests that have no seed of their own.
        kv_cache_memory: Bytes of the KV cache; None is 1 GiB, less where less is free.

    Raises:
        ConfigError: A value that cannot be; the message says what is accepted.
    """

    model: str = field(metadata=_option("smollm2, a local directory, a .gguf file or a hub id"))
    dtype: ModelDtype = field(
        default="auto",
        metadata=_option("of weights and KV cache", choices=get_args(ModelDtype)),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=_option("tokens of a sequence, prompt and output (default: the model's)"),
    )
    num_gpu_blocks: int | None = field(
        default=None, metadata=_option("KV blocks (default: from --kv-cache-memory)")
    )
    block_size: int = field(default=16, metadata=_option("tokens of a KV block"))
    max_num_seqs: int = field(default=256, metadata=_option("sequences of a step"))
    max_num_batched_tokens: int | None = field(
        default=None, metadata=_option("tokens of a step (default: 2048, or the model length)")
    )
    seed: int = field(
        default=0, metadata=_option("for the random numbers of requests without a seed")
    )
    kv_cache_memory: int | None = field(
        default=None,
        metadata=_option(
            "bytes of the KV cache, as in 512MiB (default: 1GiB, less where less is free)",
            type=parse_bytes,
        ),
    )

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if one.type in _NAMES:
                _check_name(one.name, value)
            else:
                low = 0 if one.name == "seed" else 1
                _check_integer(one.name, value, low=low, optional=one.default is None)
        _ = self.model_config  # looks at what the names say

    @property
    def model_config(self) -> ModelConfig:
        """The part of the executor."""
        return ModelConfig(
            model=self.model, dtype=self.dtype, max_model_len=self.max_model_len, seed=self.seed
        )

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Give a parser one option for each field."""
        group = parser.add_argument_group("engine")
        for one in dataclasses.fields(cls):
            argument: dict[str, Any] = {"type": str if one.type in _NAMES else int}
            argument |= one.metadata
            if one.default is dataclasses.MISSING:
                argument["required"] = True
            else:
                argument["default"] = one.default
            if one.default not in (None, dataclasses.MISSING):
                argument["help"] += " (default: %(default)s)"
            group.add_argument(f"--{one.name.replace('_', '-')}", **argument)

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> Self:
        """The arguments that a parser with ``add_cli_args`` found."""
        return cls(**{one.name: getattr(namespace, one.name) for one in dataclasses.fields(cls)})


def _check_name(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}; it must be a string")


def _check_integer(name: str, value: object, *, low: int, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        accepted = f"an integer, at least {low}" + (", or None" if optional else "")
        raise ConfigError(f"{name} is {value!r}; it must be {accepted}")

"""``EngineArgs``: every option of an engine, each defined once.

The tables of this package, one per concern, feed the arguments of ``LLM``, the command line,
docs/options.md and the types in ``engine_options.py``.
"""

import argparse
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, Unpack

from pagedserve.attention.backends import get_backend
from pagedserve.config.cache import CacheArgs
from pagedserve.config.core_options import core_options
from pagedserve.config.lora import LoRAArgs
from pagedserve.config.model import ModelArgs
from pagedserve.config.multimodal import MultimodalArgs
from pagedserve.config.observability import ObservabilityArgs
from pagedserve.config.options import add_arguments, checked, describe, flag_of
from pagedserve.config.parallel import ParallelArgs
from pagedserve.config.precision import BYTE_QUANTIZATIONS, PrecisionArgs
from pagedserve.config.sampling import SamplingArgs
from pagedserve.config.scheduler import SchedulerArgs
from pagedserve.config.speculative import SpeculativeArgs
from pagedserve.errors import ConfigError
from pagedserve.vllm_names import (
    ENGINE_NAMES,
    add_hidden_arguments,
    own_options,
    takes_vllm_names,
)

if TYPE_CHECKING:
    from pagedserve.config.engine_options import EngineOptions

Init = TypeVar("Init", bound=Callable[..., None])


@takes_vllm_names
@dataclass(kw_only=True)
class EngineArgs(  # lists the fields of its last base first
    ObservabilityArgs,
    SamplingArgs,
    MultimodalArgs,
    LoRAArgs,
    SpeculativeArgs,
    PrecisionArgs,
    SchedulerArgs,
    CacheArgs,
    ParallelArgs,
    ModelArgs,
):
    """Every option of an engine.

    Each value is checked when it is set, by the constructor or by assignment.  Combinations of
    values are checked by the constructor and again when an engine is created, which keeps a copy.
    None leaves any option at its default.  vLLM's names of options are accepted too, with values
    that require nothing unsupported; ``pagedserve.vllm_names`` lists them.

    Raises:
        ConfigError: An invalid value, an unknown option, or options that contradict each other;
            the message says what is accepted.
    """

    if TYPE_CHECKING:  # the checks accept more types than the fields have

        def __init__(self, model: str, **options: Unpack[EngineOptions]) -> None: ...

    def __setattr__(self, name: str, value: object) -> None:
        """Check a value and hold what the check returns.

        Raises:
            ConfigError: An invalid value, or an unknown option.
        """
        known = self.__dataclass_fields__
        for own_name, given in own_options({name: value}, known.keys()).items():
            object.__setattr__(self, own_name, checked(known[own_name], given))

    def __post_init__(self) -> None:
        for reason in self._contradictions():
            raise ConfigError(reason)

    def _contradictions(self) -> Iterator[str]:
        """Why options contradict each other."""
        named = self.attention_backend
        if self.cpu_kernels == "fused" and named and get_backend(named).fused_layers != "cpu":
            yield (
                "cpu_kernels is 'fused', whose layers attend in Rust, and attention_backend is "
                f"{named!r}: give 'modules' or 'generic', or leave one of the two out"
            )
        if self.quantization is not None and self.cpu_kernels == "generic":
            yield (
                f"quantization is {self.quantization!r}, and cpu_kernels is 'generic', whose "
                "linear layers are torch's: give 'fused' or 'modules', or leave one of the two out"
            )
        if self.quantization in BYTE_QUANTIZATIONS and self.backend == "torch":
            yield (
                f"quantization is {self.quantization!r}, which the native backend computes, and "
                "backend is 'torch': give quantization='int8', or leave backend out"
            )
        if self.kv_cache_dtype != "auto" and self.block_size % 16:
            yield (
                f"block_size is {self.block_size}, and kv_cache_dtype is "
                f"{self.kv_cache_dtype!r}, whose blocks have a multiple of 16 tokens"
            )
        if self.enable_lora and self.max_loras == 0:
            yield "max_loras is 0; it must be at least 1 with enable_lora"
        if self.enable_lora and (self.max_cpu_loras or self.max_loras) < self.max_loras:
            yield (
                f"max_cpu_loras is {self.max_cpu_loras}; it must be at least max_loras, "
                f"{self.max_loras}"
            )
        if self.device == "cpu":
            self.check_without_gpu()
        if self.tensor_parallel_size > 1:
            yield from self._absent_of_ranks()

    def _absent_of_ranks(self) -> Iterator[str]:
        """Reasons why options do not work with tensor parallelism."""
        if self.load_format == "dummy":
            yield (
                f"load_format is 'dummy', and tensor_parallel_size is {self.tensor_parallel_size}, "
                "whose ranks read their shards from the model's files: save the model"
            )

    @property
    def llm_options(self) -> dict[str, Any]:
        """Arguments of ``LLM``: the value of each field."""
        return {option.name: getattr(self, option.name) for option in fields(self)}

    @property
    def scheduler_options(self) -> dict[str, Any]:
        """Arguments of ``SchedulerConfig``, without those at the core's default."""
        adapters = {"max_loras": self.max_loras} if self.enable_lora else {}
        return core_options(self, "scheduler") | adapters | {"num_lookahead_slots": self.num_drafts}

    @classmethod
    def add_cli_args(
        cls,
        parser: argparse.ArgumentParser,
        *,
        without: Collection[str] = (),
        **defaults: object,
    ) -> argparse.ArgumentParser:
        """Give a parser one option for each field, and hidden ones for vLLM's names.

        Args:
            parser: Parser of a command line.
            without: Names of fields without effect in the command, which refuses their options.
            defaults: Defaults that differ for this parser, by the names of fields.

        Returns:
            The parser.
        """
        names = {option.name for option in fields(cls)}.difference(without)
        add_arguments(parser, cls, defaults, names)
        for name in sorted(without):
            parser.add_argument(
                flag_of(name), type=_refuse, default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )
        add_hidden_arguments(parser)
        return parser

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> Self:
        """The arguments that a parser with ``add_cli_args`` found.

        Raises:
            ConfigError: An invalid value.
        """
        names = (*(option.name for option in fields(cls)), *ENGINE_NAMES)
        return cls(**{name: getattr(namespace, name) for name in names if hasattr(namespace, name)})


EngineArgs.__doc__ = f"{inspect.getdoc(EngineArgs)}\n\n{describe(EngineArgs)}"
# A class does not inherit annotations, and programs select options by them.
EngineArgs.__annotations__ = {option.name: option.type for option in fields(EngineArgs)}


def _refuse(text: str) -> NoReturn:
    """Refuse a value on a command line.

    Raises:
        argparse.ArgumentTypeError: Always.
    """
    raise argparse.ArgumentTypeError(f"{text!r} has no effect in this command; leave it out")


def takes_engine_options(init: Init) -> Init:
    """Give an ``__init__`` the signature of ``EngineArgs``, for ``help`` and ``inspect``."""
    own, options = inspect.signature(init), inspect.signature(EngineArgs)
    parameters = [own.parameters["self"], *options.parameters.values()]
    setattr(init, "__signature__", own.replace(parameters=parameters))  # noqa: B010  # mypy
    return init

"""``EngineArgs``: every option of an engine, each defined once.

The table below feeds the arguments of ``LLM``, the command line, docs/options.md and the types in
``engine_options.py``.
"""

import argparse
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    ForwardRef,
    Literal,
    Self,
    TypeAlias,
    TypeVar,
    Unpack,
    get_args,
)

import pagedserve.checks as checks
from pagedserve.attention.backends import AttentionBackendName, get_backend
from pagedserve.core_args import GPU_MEMORY_UTILIZATION, CoreArgs
from pagedserve.errors import ConfigError
from pagedserve.images import MAX_IMAGES, limit_of_images
from pagedserve.options import (
    add_arguments,
    check_options,
    core_options,
    describe,
    option,
    parse_bytes,
    parse_mapping,
)
from pagedserve.speculative_config import SpeculativeConfig
from pagedserve.vllm_names import (
    ABSENT_OPTIONS,
    ALIASES,
    HINTS,
    add_hidden_arguments,
    takes_vllm_names,
)

ModelDtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
Backend: TypeAlias = Literal["auto", "torch", "native"]
CpuKernels: TypeAlias = Literal["fused", "modules", "generic"]
Quantization: TypeAlias = Literal["int8"]

Init = TypeVar("Init", bound=Callable[..., None])

if TYPE_CHECKING:
    from pagedserve.engine_options import EngineOptions

_DTYPE_ALIASES: Final = {"half": "float16", "float": "float32"}

_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d+)?")


def _device(name: str, value: object) -> str:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        checks.refuse(name, value, "auto, cpu, cuda, cuda:0, cuda:1 and so on")
    return value


def _dtype(name: str, value: object) -> object:
    """Check a dtype: a name, or a torch dtype, which prints as ``torch.float16``."""
    word = str(value).removeprefix("torch.")
    return checks.choice(get_args(ModelDtype))(name, _DTYPE_ALIASES.get(word, word))


@takes_vllm_names
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs(CoreArgs):
    """Every option of an engine, checked on construction.

    None leaves any option at its default.  vLLM's names of options are accepted too, with values
    that require nothing unsupported; ``pagedserve.vllm_names`` lists them.

    Raises:
        ConfigError: An invalid value, an unknown option, or options that contradict each other;
            the message says what is accepted.
    """

    dtype: ModelDtype = option(
        "auto",
        _dtype,
        "Data type of weights and KV cache. auto is float32 on the CPU, else the model's own.",
        concern="precision and kernels",
        converts=Literal["half", "float"] | ForwardRef("torch.dtype"),
    )
    backend: Backend = option(
        "auto",
        checks.choice(get_args(Backend)),
        "What runs the model: torch with transformers, or native, which imports neither, on the "
        "CPU for known families of decoder-only models (docs/cpu.md). auto is torch where both "
        "are installed, else native.",
        concern="precision and kernels",
    )
    device: str = option(
        "auto",
        _device,
        "Device that runs the model: auto (the first GPU if there is one, else the CPU), cpu, cuda "
        "or cuda:N.",
        concern="precision and kernels",
    )
    quantization: Quantization | None = option(
        None,
        checks.choice((*get_args(Quantization), None)),
        "Quantization of linear layers while they are loaded, on the CPU: int8 stores one byte per "
        "weight and a scale per output feature, a quarter of float32's memory.",
        concern="precision and kernels",
        unset="none",
    )
    attention_backend: AttentionBackendName | None = option(
        None,
        checks.choice((*get_args(AttentionBackendName), None)),
        "Attention kernels: rust (on the CPU), triton (on NVIDIA GPUs; on the CPU in Triton's "
        "interpreter), torch (anywhere) or sdpa (anywhere, with no padding between sequences).",
        concern="precision and kernels",
        unset="the first of them that supports the model and the device",
    )
    cpu_kernels: CpuKernels | None = option(
        None,
        checks.choice((*get_args(CpuKernels), None)),
        "How much of the model's code Rust kernels replace on the CPU: fused replaces whole "
        "decoder layers of known families and else acts as modules, modules replaces gated MLPs, "
        "linear layers and norms, generic nothing.",
        concern="precision and kernels",
        unset="the first of them that supports the model",
    )
    cpu_instructions: str | None = option(
        None,
        checks.optional(checks.text),
        "Vector instructions of the Rust kernels, for the whole process: portable, avx2, avx512 or "
        "avx512_bf16.",
        concern="precision and kernels",
        unset="the best that this CPU supports",
    )
    enforce_eager: bool = option(
        False,
        checks.flag,
        "Capture no CUDA graphs, so that decode steps on a GPU launch each kernel.",
        concern="precision and kernels",
    )
    speculative_config: SpeculativeConfig | None = option(
        None,
        checks.optional(SpeculativeConfig.of),
        'Propose several draft tokens and verify them in one step, as {"method": "ngram"}; JSON on '
        "the command line. docs/speculation.md lists its options.",
        concern="speculative decoding",
        unset="one token per step",
        parse=parse_mapping,
        converts=Mapping[str, Any],
    )
    enable_lora: bool = option(
        False, checks.flag, "Accept requests with LoRA adapters.", concern="LoRA"
    )
    max_loras: int = option(
        4,
        checks.count(),
        "Maximum number of adapters per step, all of which are kept on the device.",
        concern="LoRA",
    )
    max_lora_rank: int = option(16, checks.count(), "Maximum rank of an adapter.", concern="LoRA")
    max_cpu_loras: int | None = option(
        None,
        checks.optional_count(),
        "Maximum number of adapters kept in host memory, at least max_loras.",
        concern="LoRA",
        unset="max_loras",
    )
    limit_mm_per_prompt: Mapping[str, int] | None = option(
        None,
        checks.optional(limit_of_images),
        'Maximum number of images per prompt, as {"image": 4}; JSON on the command line.',
        concern="multimodal input",
        unset=f'{{"image": {MAX_IMAGES}}}',
        parse=parse_mapping,
    )
    mm_processor_cache_gb: float = option(
        1.0,
        checks.real("a number of GiB, at least 0", low=0),
        "Host memory for the features of images, in GiB, kept for later requests with the same "
        "images.",
        concern="multimodal input",
    )
    seed: int = option(
        0,
        checks.count(0),
        "Seed of the random numbers of requests without a seed.",
        concern="sampling",
    )
    max_logprobs: int = option(
        -1,
        checks.integer("at least 0, or -1 for the whole vocabulary", low=-1),
        "Maximum logprobs and prompt_logprobs of a request; -1 is the whole vocabulary.",
        concern="sampling",
    )
    generation_config: str = option(
        "auto",
        checks.text,
        "Source of the default sampling parameters: auto is the model's generation_config.json, "
        "vllm is SamplingParams(), anything else is a directory with such a file.",
        concern="sampling",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        checks.optional(checks.mapping),
        "Values that override those of generation_config; JSON on the command line.",
        concern="sampling",
        unset="none",
        parse=parse_mapping,
    )
    decision_log: str | None = option(
        None,
        checks.optional(checks.text),
        "File for the scheduler's decisions, one JSON line per step, or a directory for several "
        "files. python -m pagedserve.replay repeats them. A server accepts only a directory, and "
        "creates it.",
        concern="logging and tracing",
        unset="none",
    )
    decision_log_max_bytes: int = option(
        1 << 30,
        checks.count(),
        "Maximum size of all decision logs in a directory, in bytes or as in 512MiB; the oldest "
        "files are deleted first.",
        concern="logging and tracing",
        parse=parse_bytes,
    )
    disable_log_stats: bool = option(
        False,
        checks.flag,
        "Omit the log line of statistics that is written every ten seconds at level INFO.",
        concern="logging and tracing",
    )

    if TYPE_CHECKING:  # the checks accept more types than the fields have

        def __init__(self, model: str, **options: Unpack[EngineOptions]) -> None: ...

    def __post_init__(self) -> None:
        check_options(self)
        for reason in self._contradictions():
            raise ConfigError(reason)

    def check_without_gpu(self) -> None:
        """Check the options of a model on the CPU.

        Raises:
            ConfigError: A fraction of the GPU's memory is given.
        """
        if self.gpu_memory_utilization != GPU_MEMORY_UTILIZATION:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, and the model is on the "
                "CPU, whose memory other programs use too: give kv_cache_memory instead"
            )

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
    def max_images_per_prompt(self) -> int:
        """Maximum number of images per prompt."""
        return (self.limit_mm_per_prompt or {}).get("image", MAX_IMAGES)

    @property
    def num_drafts(self) -> int:
        """Maximum number of draft tokens of a sequence per step."""
        drafts = self.speculative_config
        return 0 if drafts is None else drafts.num_speculative_tokens

    @property
    def scheduler_options(self) -> dict[str, Any]:
        """Arguments of ``SchedulerConfig``, without those at the core's default."""
        adapters = {"max_loras": self.max_loras} if self.enable_lora else {}
        return core_options(self, "scheduler") | adapters | {"num_lookahead_slots": self.num_drafts}

    @property
    def cache_options(self) -> dict[str, Any]:
        """Arguments of ``CacheConfig``, without those at the core's default."""
        return core_options(self, "cache")

    @classmethod
    def add_cli_args(
        cls, parser: argparse.ArgumentParser, **defaults: object
    ) -> argparse.ArgumentParser:
        """Give a parser one option for each field, and hidden ones for vLLM's names.

        Args:
            parser: Parser of a command line.
            defaults: Defaults that differ for this parser, by the names of fields.

        Returns:
            The parser.
        """
        add_arguments(parser, cls, defaults)
        add_hidden_arguments(parser)
        return parser

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> Self:
        """The arguments that a parser with ``add_cli_args`` found.

        Raises:
            ConfigError: An invalid value.
        """
        names = [*(option.name for option in fields(cls)), *ALIASES, *ABSENT_OPTIONS, *HINTS]
        return cls(**{name: getattr(namespace, name) for name in names if hasattr(namespace, name)})


EngineArgs.__doc__ = f"{inspect.getdoc(EngineArgs)}\n\n{describe(EngineArgs)}"


def takes_engine_options(init: Init) -> Init:
    """Give an ``__init__`` the signature of ``EngineArgs``, for ``help`` and ``inspect``."""
    own, options = inspect.signature(init), inspect.signature(EngineArgs)
    parameters = [own.parameters["self"], *options.parameters.values()]
    setattr(init, "__signature__", own.replace(parameters=parameters))  # noqa: B010  # mypy
    return init

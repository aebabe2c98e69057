"""``EngineArgs``: everything that decides how an engine is built, each option written once.

The table below feeds the arguments of ``LLM``, the command line and docs/options.md.  Options of
the scheduler and of the KV blocks are passed on to the core by their names; their defaults are
there alone, and only asked for to be shown.
"""

import argparse
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, Self, TypeAlias, get_args

import pagedserve.checks as checks
from pagedserve._core import CacheConfig, SchedulerConfig
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
from pagedserve.parallel_args import ParallelArgs
from pagedserve.speculative_config import SpeculativeConfig
from pagedserve.vllm_names import (
    ABSENT_OPTIONS,
    ALIASES,
    HINTS,
    add_hidden_arguments,
    takes_vllm_names,
)

ModelDtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
AttentionBackend: TypeAlias = Literal["rust", "torch", "triton"]
CpuKernels: TypeAlias = Literal["fused", "modules", "generic"]
Quantization: TypeAlias = Literal["int8"]
PreemptionMode: TypeAlias = Literal["recompute", "swap"]
SchedulingPolicy: TypeAlias = Literal["fcfs", "priority"]
VictimPolicy: TypeAlias = Literal["last", "least_work"]

_DTYPE_ALIASES: Final = {"half": "float16", "float": "float32"}
# Say what the core does where nobody says.
_CORE: Final = {
    "scheduler": SchedulerConfig(max_model_len=1),
    "cache": CacheConfig(block_size=1, num_gpu_blocks=1),
}
# The share of a GPU where nobody says; on the CPU it is the one that says nothing.
GPU_MEMORY_UTILIZATION: Final = 0.9

_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d+)?")


def _core_option(
    part: Literal["scheduler", "cache"],
    core_name: str,
    check: checks.Check[object],
    text: str,
    *,
    unset: str | None = None,
) -> Any:
    """An option that the core has, and whose default is there; ``unset`` says more of it."""
    shown = str(getattr(_CORE[part], core_name)) if unset is None else unset
    return option(None, check, text, unset=shown, part=part, core_name=core_name)


def _by_chunks(core_name: str, more: str = "") -> str:
    """The default of an option that depends on ``enable_chunked_prefill``."""
    chunked = SchedulerConfig(max_model_len=1, enable_chunked_prefill=True)
    return (
        f"{getattr(chunked, core_name)} with chunked prefill, else "
        f"{getattr(_CORE['scheduler'], core_name)}{more}"
    )


def _device(name: str, value: object) -> str:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        checks.refuse(name, value, "auto, cpu, cuda, cuda:0, cuda:1 and so on")
    return value


def _dtype(name: str, value: object) -> object:
    """Words, or dtypes of torch, which are written ``torch.float16``."""
    word = str(value).removeprefix("torch.")
    return checks.choice(get_args(ModelDtype))(name, _DTYPE_ALIASES.get(word, word))


@takes_vllm_names
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs(ParallelArgs):
    """Everything that decides how an engine is built; checked when made.

    None leaves any option at its default.  vLLM's names of options are taken too, as far as they
    ask for nothing that is not here; ``pagedserve.vllm_names`` lists them.

    Raises:
        ConfigError: A value that cannot be, an unknown option, or options that contradict each
            other; the message says what is accepted.
    """

    dtype: ModelDtype = option(
        "auto",
        _dtype,
        "Of weights and KV cache; auto is float32 on the CPU, else the model's own.",
    )
    device: str = option(
        "auto", _device, "auto (the first GPU if there is one, else the CPU), cpu, cuda or cuda:N."
    )
    max_model_len: int | None = option(
        None,
        checks.optional_count(2),
        "Tokens of a sequence, prompt and output together, at least 2.",
        unset="what the model allows",
    )
    num_gpu_blocks: int | None = option(
        None, checks.optional_count(), "KV blocks.", unset="what kv_cache_memory holds"
    )
    block_size: int = option(16, checks.count(), "Tokens of a KV block.", part="cache")
    max_num_seqs: int | None = _core_option(
        "scheduler", "max_num_seqs", checks.optional_count(), "Sequences of a step."
    )
    max_num_batched_tokens: int | None = _core_option(
        "scheduler",
        "max_num_batched_tokens",
        checks.optional_count(),
        "Tokens of a step; never fewer than max_num_seqs.",
        unset=_by_chunks("max_num_batched_tokens", ", or max_model_len if more"),
    )
    seed: int = option(
        0, checks.count(0), "For the random numbers of requests that have no seed of their own."
    )
    kv_cache_memory: int | None = option(
        None,
        checks.optional_count(),
        "Bytes of the KV cache; on the command line also as in 512MiB.",
        unset="1 GiB on the CPU, less where less is free; on a GPU what gpu_memory_utilization "
        "leaves",
        parse=parse_bytes,
    )
    gpu_memory_utilization: float = option(
        GPU_MEMORY_UTILIZATION,
        checks.real("a number above 0, at most 1", low=0, high=1, open_low=True),
        "Share of the GPU's whole memory that weights, activations, CUDA graphs and KV cache take "
        "together, above 0, to 1; the largest step is tried out to learn what activations need. "
        "On the CPU nothing but the default is accepted.",
    )
    enable_prefix_caching: bool | None = _core_option(
        "cache",
        "enable_prefix_caching",
        checks.optional(checks.flag),
        "Keep the KV blocks of what was computed, for later prompts that begin with the same "
        "tokens.",
    )
    enable_chunked_prefill: bool | None = _core_option(
        "scheduler",
        "enable_chunked_prefill",
        checks.optional(checks.flag),
        "Compute long prompts in parts, beside the tokens of others.",
    )
    scheduling_policy: SchedulingPolicy | None = _core_option(
        "scheduler",
        "policy",
        checks.choice((*get_args(SchedulingPolicy), None)),
        "Which request is served first: fcfs is the one that came first, priority the one whose "
        "priority is the lowest number.",
    )
    scheduler_delay_factor: float | None = _core_option(
        "scheduler",
        "delay_factor",
        checks.optional(checks.real("a number, at least 0, or None", low=0)),
        "Hold prompts back until the oldest has waited this many times the last prompt step, so "
        "that more of them run together.",
    )
    max_num_bypasses: int | None = _core_option(
        "scheduler",
        "max_num_bypasses",
        checks.optional_count(0),
        "How many requests may be admitted before the head of a queue that does not fit yet; then "
        "nobody passes it.",
        unset=_by_chunks("max_num_bypasses"),
    )
    victim_policy: VictimPolicy | None = _core_option(
        "scheduler",
        "victim_policy",
        checks.choice((*get_args(VictimPolicy), None)),
        "Who gives its KV blocks to others: last is the last of the queue, least_work the one "
        "with the fewest computed tokens.",
    )
    preemption_mode: PreemptionMode | None = _core_option(
        "scheduler",
        "preemption_mode",
        checks.choice((*get_args(PreemptionMode), None)),
        "What becomes of the KV blocks of a request that must give its place to others: recompute "
        "drops them, swap moves them to the host.",
        unset="recompute for requests of one sequence, swap for those of several",
    )
    swap_space: float | None = option(
        None,
        checks.optional(checks.real("a number of GiB, at least 0, or None", low=0)),
        "GiB of host memory for the KV blocks of preempted requests.",
        unset="as much as the KV cache holds, at most 4 and at most half of the host memory that "
        "is free",
    )
    watermark: float | None = _core_option(
        "cache",
        "watermark",
        checks.optional(checks.real("a number from 0 to 1, or None", low=0, high=1)),
        "Share of the KV blocks that stays free when a prompt is admitted.",
    )
    disable_hybrid_kv_cache_manager: bool = option(
        False,
        checks.flag,
        "Let layers with a window keep all that other layers do, in the same KV blocks.",
    )
    max_logprobs: int = option(
        -1,
        checks.integer("at least 0, or -1 for the whole vocabulary", low=-1),
        "The most logprobs and prompt_logprobs that a request may ask for; -1 is the whole "
        "vocabulary.",
    )
    generation_config: str = option(
        "auto",
        checks.text,
        "Where requests without sampling parameters have them from: auto is the model's own "
        "generation_config.json, vllm is none, so that SamplingParams() holds, anything else a "
        "directory with such a file.",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None,
        checks.optional(checks.mapping),
        "Values that take the place of those in generation_config; on the command line in JSON.",
        unset="nothing",
        parse=parse_mapping,
    )
    decision_log: str | None = option(
        None,
        checks.optional(checks.text),
        "File for the scheduler's decisions, a JSON line a step, or a directory for several files; "
        "python -m pagedserve.replay runs them again. A server takes a directory, and makes it.",
        unset="none is written",
    )
    decision_log_max_bytes: int = option(
        1 << 30,
        checks.count(),
        "Bytes of all decision logs in a directory; the oldest files make room, also as in 512MiB.",
        parse=parse_bytes,
    )
    attention_backend: AttentionBackend | None = option(
        None,
        checks.choice((*get_args(AttentionBackend), None)),
        "Who computes attention: rust (on the CPU), triton (on NVIDIA GPUs; on the CPU in Triton's "
        "interpreter) or torch (anywhere).",
        unset="the first of them that can",
    )
    cpu_kernels: CpuKernels | None = option(
        None,
        checks.choice((*get_args(CpuKernels), None)),
        "How much of the model's own code is replaced by Rust kernels on the CPU: fused is whole "
        "decoder layers where their family is known, else as modules; modules is gated layers, "
        "linear layers and norms; generic is nothing.",
        unset="the first of them that there is",
    )
    quantization: Quantization | None = option(
        None,
        checks.choice((*get_args(Quantization), None)),
        "What weights of linear layers become while they are loaded, on the CPU: int8 is one byte "
        "each with a scale an output feature, a quarter of float32's memory.",
        unset="they stay as they are",
    )
    enforce_eager: bool = option(
        False,
        checks.flag,
        "Capture no CUDA graphs; decode steps on a GPU are then launched kernel by kernel.",
    )
    async_scheduling: bool | None = option(
        None,
        checks.optional(checks.flag),
        "Decide and launch the next step while the tokens of one are still on their way, wherever "
        "nothing depends on them; a sequence that turns out to have ended runs once more for "
        "nothing.",
        unset="True on a GPU",
    )
    speculative_config: SpeculativeConfig | None = option(
        None,
        checks.optional(SpeculativeConfig.of),
        'Guess several next tokens and check them in one step, as {"method": "ngram"}; on the '
        "command line in JSON. docs/speculation.md lists its options.",
        unset="one token a step",
        parse=parse_mapping,
    )
    enable_lora: bool = option(False, checks.flag, "Take LoRA adapters with requests.")
    max_loras: int = option(
        4, checks.count(), "Adapters of a step; as many have a place on the device."
    )
    max_lora_rank: int = option(16, checks.count(), "The largest rank of an adapter.")
    max_cpu_loras: int | None = option(
        None,
        checks.optional_count(),
        "Adapters that stay in host memory though no request has them; never fewer than max_loras.",
        unset="max_loras",
    )
    limit_mm_per_prompt: Mapping[str, int] | None = option(
        None,
        checks.optional(limit_of_images),
        'The most images of a prompt, as {"image": 4}; on the command line in JSON.',
        unset=f'{{"image": {MAX_IMAGES}}}',
        parse=parse_mapping,
    )
    mm_processor_cache_gb: float = option(
        1.0,
        checks.real("a number of GiB, at least 0", low=0),
        "GiB of host memory for what the model made of images, kept for later requests with the "
        "same images.",
    )
    disable_log_stats: bool = option(
        False,
        checks.flag,
        "Leave out the line of statistics that comes to the log every ten seconds, at level INFO.",
    )
    cpu_instructions: str | None = option(
        None,
        checks.optional(checks.text),
        "Vector instructions of the Rust kernels, for the whole process: portable, avx2, avx512 or "
        "avx512_bf16.",
        unset="the best of this CPU",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.cpu_kernels == "fused" and self.attention_backend not in (None, "rust"):
            raise ConfigError(
                "cpu_kernels is 'fused', whose layers attend in Rust, and attention_backend is "
                f"{self.attention_backend!r}: give 'modules' or 'generic', or leave one of the "
                "two out"
            )
        if self.quantization is not None and self.cpu_kernels == "generic":
            raise ConfigError(
                f"quantization is {self.quantization!r}, and cpu_kernels is 'generic', whose "
                "linear layers are torch's: give 'fused' or 'modules', or leave one of the two out"
            )
        if self.enable_lora and (self.max_cpu_loras or self.max_loras) < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras is {self.max_cpu_loras}; it must be at least max_loras, "
                f"{self.max_loras}"
            )

    @property
    def max_images_per_prompt(self) -> int:
        """The most images of a prompt."""
        return (self.limit_mm_per_prompt or {}).get("image", MAX_IMAGES)

    @property
    def num_drafts(self) -> int:
        """Guesses at the next tokens of a sequence in a step, at most."""
        drafts = self.speculative_config
        return 0 if drafts is None else drafts.num_speculative_tokens

    @property
    def scheduler_options(self) -> dict[str, Any]:
        """What ``SchedulerConfig`` is told, by its names; what is left to the core is not there."""
        adapters = {"max_loras": self.max_loras} if self.enable_lora else {}
        return core_options(self, "scheduler") | adapters | {"num_lookahead_slots": self.num_drafts}

    @property
    def cache_options(self) -> dict[str, Any]:
        """What ``CacheConfig`` is told, as ``scheduler_options``."""
        return core_options(self, "cache")

    @classmethod
    def add_cli_args(
        cls, parser: argparse.ArgumentParser, **defaults: object
    ) -> argparse.ArgumentParser:
        """Give a parser one option for each field, and vLLM's names unseen.

        Args:
            parser: Of a command line.
            defaults: Those that are others there.

        Returns:
            The parser.
        """
        add_hidden_arguments(add_arguments(parser, cls, "engine", defaults))
        return parser

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> Self:
        """The arguments that a parser with ``add_cli_args`` found.

        Raises:
            ConfigError: A value that cannot be.
        """
        names = [*(option.name for option in fields(cls)), *ALIASES, *ABSENT_OPTIONS, *HINTS]
        return cls(**{name: getattr(namespace, name) for name in names if hasattr(namespace, name)})


EngineArgs.__doc__ = f"{inspect.getdoc(EngineArgs)}\n\n{describe(EngineArgs)}"

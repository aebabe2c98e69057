"""``CoreArgs``: options of the KV cache and the scheduler.

Options of the scheduler and of the KV blocks are passed to the core by its names; the core also
defines their defaults, which are read from it.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import pagedserve.checks as checks
from pagedserve._core import CacheConfig, SchedulerConfig
from pagedserve.options import Concern, option, parse_bytes
from pagedserve.parallel_args import ParallelArgs

PreemptionMode: TypeAlias = Literal["recompute", "swap"]
SchedulingPolicy: TypeAlias = Literal["fcfs", "priority"]
VictimPolicy: TypeAlias = Literal["last", "least_work"]

# Hold the core's defaults.
_CORE: Final = {
    "scheduler": SchedulerConfig(max_model_len=1),
    "cache": CacheConfig(block_size=1, num_gpu_blocks=1),
}
# The default; a model on the CPU accepts nothing else.
GPU_MEMORY_UTILIZATION: Final = 0.9


def _core_option(
    part: Literal["scheduler", "cache"],
    core_name: str,
    check: checks.Check[object],
    text: str,
    *,
    concern: Concern = "scheduling",
    unset: str | None = None,
) -> Any:
    """An option of the core, whose default is defined there; ``unset`` overrides its text."""
    shown = str(getattr(_CORE[part], core_name)) if unset is None else unset
    return option(None, check, text, concern=concern, unset=shown, part=part, core_name=core_name)


def _by_chunks(core_name: str, more: str = "") -> str:
    """The default of an option that depends on ``enable_chunked_prefill``."""
    chunked = SchedulerConfig(max_model_len=1, enable_chunked_prefill=True)
    return (
        f"{getattr(chunked, core_name)} with chunked prefill, else "
        f"{getattr(_CORE['scheduler'], core_name)}{more}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreArgs(ParallelArgs):
    """Options of ``EngineArgs`` for the KV cache and the scheduler, checked by ``EngineArgs``."""

    max_model_len: int | None = option(
        None,
        checks.optional_count(2),
        "Maximum number of tokens of a sequence, prompt and output together, at least 2.",
        concern="memory and KV cache",
        unset="the model's maximum",
    )
    kv_cache_memory: int | None = option(
        None,
        checks.optional_count(),
        "Size of the KV cache in bytes; the command line also accepts units, as in 512MiB.",
        concern="memory and KV cache",
        unset="1 GiB on the CPU, less if less is free; on a GPU what gpu_memory_utilization leaves",
        parse=parse_bytes,
    )
    gpu_memory_utilization: float = option(
        GPU_MEMORY_UTILIZATION,
        checks.real("a number above 0, at most 1", low=0, high=1, open_low=True),
        "Fraction of the GPU's total memory for weights, activations, CUDA graphs and KV cache "
        "together, above 0, at most 1. The largest step is run once to measure what activations "
        "need. On the CPU only the default is accepted.",
        concern="memory and KV cache",
    )
    num_gpu_blocks: int | None = option(
        None,
        checks.optional_count(),
        "Number of KV blocks.",
        concern="memory and KV cache",
        unset="as many as fit in kv_cache_memory",
    )
    block_size: int = option(
        16,
        checks.count(),
        "Number of tokens per KV block.",
        concern="memory and KV cache",
        part="cache",
    )
    swap_space: float | None = option(
        None,
        checks.optional(checks.real("a number of GiB, at least 0, or None", low=0)),
        "Host memory for the KV blocks of preempted requests, in GiB.",
        concern="memory and KV cache",
        unset="as much as the KV cache, at most 4 and at most half of the free host memory",
    )
    watermark: float | None = _core_option(
        "cache",
        "watermark",
        checks.optional(checks.real("a number from 0 to 1, or None", low=0, high=1)),
        "Fraction of the KV blocks that stays free when a prompt is admitted.",
        concern="memory and KV cache",
    )
    enable_prefix_caching: bool | None = _core_option(
        "cache",
        "enable_prefix_caching",
        checks.optional(checks.flag),
        "Keep computed KV blocks for later prompts with the same prefix.",
        concern="memory and KV cache",
    )
    disable_hybrid_kv_cache_manager: bool = option(
        False,
        checks.flag,
        "Store layers with a sliding window or attention chunks in the same KV blocks as "
        "full-attention layers, with as many tokens.",
        concern="memory and KV cache",
    )
    max_num_seqs: int | None = _core_option(
        "scheduler",
        "max_num_seqs",
        checks.optional_count(),
        "Maximum number of sequences per step.",
    )
    max_num_batched_tokens: int | None = _core_option(
        "scheduler",
        "max_num_batched_tokens",
        checks.optional_count(),
        "Maximum number of tokens per step, at least max_num_seqs.",
        unset=_by_chunks("max_num_batched_tokens", ", or max_model_len if larger"),
    )
    enable_chunked_prefill: bool | None = _core_option(
        "scheduler",
        "enable_chunked_prefill",
        checks.optional(checks.flag),
        "Split long prompts into chunks that run in the same steps as other requests' decode "
        "tokens.",
    )
    scheduling_policy: SchedulingPolicy | None = _core_option(
        "scheduler",
        "policy",
        checks.choice((*get_args(SchedulingPolicy), None)),
        "Order in which requests are served: fcfs by arrival, priority by the lowest priority "
        "number.",
    )
    scheduler_delay_factor: float | None = _core_option(
        "scheduler",
        "delay_factor",
        checks.optional(checks.real("a number, at least 0, or None", low=0)),
        "Delay prompts until the oldest has waited this many times the duration of the last "
        "prompt step, so that more of them run together.",
    )
    max_num_bypasses: int | None = _core_option(
        "scheduler",
        "max_num_bypasses",
        checks.optional_count(0),
        "Maximum number of later requests admitted ahead of the first waiting request while it "
        "does not fit in memory.",
        unset=_by_chunks("max_num_bypasses"),
    )
    victim_policy: VictimPolicy | None = _core_option(
        "scheduler",
        "victim_policy",
        checks.choice((*get_args(VictimPolicy), None)),
        "Which request is preempted when KV blocks run out: last is the last in the queue, "
        "least_work the one with the fewest computed tokens.",
    )
    preemption_mode: PreemptionMode | None = _core_option(
        "scheduler",
        "preemption_mode",
        checks.choice((*get_args(PreemptionMode), None)),
        "What happens to the KV blocks of a preempted request: recompute drops them, swap moves "
        "them to host memory.",
        unset="recompute for requests with one sequence, swap for those with several",
    )
    async_scheduling: bool | None = option(
        None,
        checks.optional(checks.flag),
        "Schedule and launch the next step before the tokens of the current step are known. A "
        "sequence that turns out to have ended takes part in one step more, whose token is "
        "discarded.",
        concern="scheduling",
        unset="True on a GPU",
    )

"""``SchedulerArgs``: options of the scheduler."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import pagedserve.checks as checks
from pagedserve.config.core_options import by_chunks, core_option
from pagedserve.config.options import option

PreemptionMode: TypeAlias = Literal["recompute", "swap"]
SchedulingPolicy: TypeAlias = Literal["fcfs", "priority"]
VictimPolicy: TypeAlias = Literal["last", "least_work"]


def default_step_tokens(chunked: int | None = None) -> str:
    """The default of ``max_num_batched_tokens``, in words; see ``by_chunks``."""
    more = " or max_model_len if larger; at least max_num_seqs"
    return by_chunks("max_num_batched_tokens", more, chunked)


@dataclass(kw_only=True)
class SchedulerArgs:
    """The options of ``EngineArgs`` for the scheduler."""

    max_num_seqs: int | None = core_option(
        "scheduler",
        "max_num_seqs",
        checks.optional_count(),
        "Maximum number of sequences per step.",
        concern="scheduling",
    )
    max_num_batched_tokens: int | None = core_option(
        "scheduler",
        "max_num_batched_tokens",
        checks.optional_count(),
        "Maximum number of tokens per step, at least max_num_seqs.",
        unset=default_step_tokens(),
        concern="scheduling",
    )
    enable_chunked_prefill: bool | None = core_option(
        "scheduler",
        "enable_chunked_prefill",
        checks.optional(checks.flag),
        "Split long prompts into chunks that run in the same steps as other requests' decode "
        "tokens.",
        concern="scheduling",
    )
    scheduling_policy: SchedulingPolicy | None = core_option(
        "scheduler",
        "policy",
        checks.choice((*get_args(SchedulingPolicy), None)),
        "Order in which requests are served: fcfs by arrival, priority by the lowest priority "
        "number.",
        concern="scheduling",
    )
    scheduler_delay_factor: float | None = core_option(
        "scheduler",
        "delay_factor",
        checks.optional(checks.real("a number, at least 0, or None", low=0)),
        "Delay prompts until the oldest has waited this many times the duration of the last "
        "prompt step, so that more of them run together.",
        concern="scheduling",
    )
    max_num_bypasses: int | None = core_option(
        "scheduler",
        "max_num_bypasses",
        checks.optional_count(0),
        "Maximum number of later requests admitted ahead of the first waiting request while it "
        "does not fit in memory.",
        unset=by_chunks("max_num_bypasses"),
        concern="scheduling",
    )
    victim_policy: VictimPolicy | None = core_option(
        "scheduler",
        "victim_policy",
        checks.choice((*get_args(VictimPolicy), None)),
        "Which request is preempted when KV blocks run out: last is the last in the queue, "
        "least_work the one with the fewest computed tokens.",
        concern="scheduling",
    )
    preemption_mode: PreemptionMode | None = core_option(
        "scheduler",
        "preemption_mode",
        checks.choice((*get_args(PreemptionMode), None)),
        "What happens to the KV blocks of a preempted request: recompute drops them, swap moves "
        "them to host memory.",
        unset="recompute for requests with one sequence, swap for those with several",
        concern="scheduling",
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

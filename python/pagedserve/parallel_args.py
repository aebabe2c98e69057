"""``ParallelArgs``: how many processes share a model."""

from dataclasses import dataclass

import pagedserve.checks as checks
from pagedserve.model_args import ModelArgs
from pagedserve.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelArgs(ModelArgs):
    """The options of ``EngineArgs``, which checks them, that are about several processes."""

    tensor_parallel_size: int = option(
        1,
        checks.count(),
        "Processes (ranks) that share the model, each with a device of its own, on the CPU with "
        "its share of the cores: heads and inner features are split among them.",
    )
    distributed_timeout_seconds: float = option(
        300.0,
        checks.real("a number of seconds above 0", low=0, open_low=True),
        "After so long without the end of a step the ranks count as dead.",
    )

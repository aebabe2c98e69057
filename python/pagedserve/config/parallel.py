"""``ParallelArgs``: options of tensor parallelism."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import pagedserve.checks as checks
from pagedserve.config.options import option

ExecutorBackend: TypeAlias = Literal["mp", "ray"]


def _backend(name: str, value: object) -> object:
    """Check a backend; vLLM's words for a default or a single process mean the default."""
    return checks.choice(get_args(ExecutorBackend))(name, "mp" if value in (None, "uni") else value)


@dataclass(kw_only=True)
class ParallelArgs:
    """The options of ``EngineArgs`` for tensor parallelism."""

    tensor_parallel_size: int = option(
        1,
        checks.count(),
        "Number of processes (ranks) that split the model's heads and inner features. Each has a "
        "separate device, or on the CPU an equal part of the cores.",
        concern="parallelism",
    )
    distributed_executor_backend: ExecutorBackend = option(
        "mp",
        _backend,
        "How ranks are started: mp as processes on this machine, ray on the machines of the Ray "
        "cluster at RAY_ADDRESS, or of a new one on this machine.",
        concern="parallelism",
        converts=Literal["uni"],
    )
    distributed_timeout_seconds: float = option(
        300.0,
        checks.real("a number of seconds above 0", low=0, open_low=True),
        "Seconds without a completed step after which the ranks count as dead.",
        concern="parallelism",
    )

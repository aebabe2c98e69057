"""``ParallelArgs``: how many processes share a model."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import pagedserve.checks as checks
from pagedserve.model_args import ModelArgs
from pagedserve.options import option

ExecutorBackend: TypeAlias = Literal["mp", "ray"]


def _backend(name: str, value: object) -> object:
    """Words of vLLM, of which those for no choice and for one process ask for nothing here."""
    return checks.choice(get_args(ExecutorBackend))(name, "mp" if value in (None, "uni") else value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelArgs(ModelArgs):
    """The options of ``EngineArgs``, which checks them, that are about several processes."""

    tensor_parallel_size: int = option(
        1,
        checks.count(),
        "Processes (ranks) that share the model, each with a device of its own, on the CPU with "
        "its share of the cores: heads and inner features are split among them.",
    )
    distributed_executor_backend: ExecutorBackend = option(
        "mp",
        _backend,
        "Who starts the ranks: mp, as processes of this machine; ray, over the machines of a Ray "
        "cluster, which is that of RAY_ADDRESS or one of this machine.",
    )
    distributed_timeout_seconds: float = option(
        300.0,
        checks.real("a number of seconds above 0", low=0, open_low=True),
        "After so long without the end of a step the ranks count as dead.",
    )

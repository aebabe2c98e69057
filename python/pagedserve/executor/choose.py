"""Which executor runs a model: this process alone, or with others."""

from pagedserve.config import EngineArgs
from pagedserve.executor.local import LocalExecutor
from pagedserve.executor.protocol import Executor


def make_executor(args: EngineArgs) -> Executor:
    """The executor that the options ask for, its model loaded."""
    if args.tensor_parallel_size == 1:
        return LocalExecutor(args)
    from pagedserve.executor.ranks import RankedExecutor

    return RankedExecutor(args)

"""Selection of the executor: one process, or several ranks."""

import logging
import os
import threading

import torch

from pagedserve.config import EngineArgs
from pagedserve.errors import EngineDeadError
from pagedserve.executor.local import LocalExecutor
from pagedserve.executor.protocol import Executor
from pagedserve.host_ops.threads import limit_threads

logger = logging.getLogger(__name__)

# Process that loaded the last model: this one, or one that it was forked from.
_loaded_in: list[int] = []


def _check_process() -> None:
    """Refuse to load a model in a process where its first computation would hang.

    A process that has computed has a team of OpenMP threads.  A forked child has none of them, but
    its main thread would wait for them.

    Raises:
        EngineDeadError: The process was forked; names alternatives.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if _loaded_in not in ([], [os.getpid()]) and is_main and torch.get_num_threads() > 1:
        raise EngineDeadError(
            f"this process was forked from process {_loaded_in[0]}, in which an engine was made, "
            "without its OpenMP threads, for which a model would wait here: start processes with "
            "multiprocessing's 'spawn' or 'forkserver', or fork before the first engine"
        )
    _loaded_in[:] = [os.getpid()]


def _limit_torch_threads() -> None:
    """Let torch use no more threads than the quota of CPU time of this process pays for."""
    default, limited = torch.get_num_threads(), limit_threads(torch.get_num_threads())
    if limited < default:
        logger.info("threads: %d of %d, the CPU quota of the control group", limited, default)
        torch.set_num_threads(limited)


def make_executor(args: EngineArgs) -> Executor:
    """Create the executor for the options, and load its model.

    Raises:
        EngineDeadError: This process was forked from one that has loaded a model.
    """
    _check_process()
    _limit_torch_threads()
    if args.tensor_parallel_size == 1:
        return LocalExecutor(args)
    from pagedserve.executor.ranks import RankedExecutor

    return RankedExecutor(args)

"""Selection of the executor: one process or several ranks with torch, or one process without.

torch is imported once it is chosen.
"""

import logging
import os
import threading

from pagedserve.config import EngineArgs
from pagedserve.errors import EngineDeadError, extra_needed
from pagedserve.executor.protocol import Executor
from pagedserve.native.choice import choose_backend

logger = logging.getLogger(__name__)

# Process that loaded the last model: this one, or one that it was forked from.
_loaded_in: list[int] = []


def _check_process() -> None:
    """Refuse to load a model of torch in a process where its first computation would hang.

    A process that has computed has a team of OpenMP threads.  A forked child has none of them, but
    its main thread would wait for them.

    Raises:
        EngineDeadError: The process was forked; names alternatives.
    """
    import torch

    is_main = threading.current_thread() is threading.main_thread()
    if _loaded_in not in ([], [os.getpid()]) and is_main and torch.get_num_threads() > 1:
        raise EngineDeadError(
            f"this process was forked from process {_loaded_in[0]}, in which an engine was made, "
            "without its OpenMP threads, for which a model would wait here: start processes with "
            "multiprocessing's 'spawn' or 'forkserver', or fork before the first engine"
        )
    _loaded_in[:] = [os.getpid()]


def make_executor(args: EngineArgs) -> Executor:
    """Create the executor for the options, and load its model.

    Raises:
        ConfigError: An option that the backend does not support.
        EngineDeadError: This process was forked from one that has loaded a model of torch.
        ImportError: The backend is torch, and a package that it needs is not installed.
    """
    backend = choose_backend(args)
    logger.info("backend: %s, %s", backend.name, backend.reason)
    if backend.name == "native":
        from pagedserve.native.executor import NativeExecutor

        return NativeExecutor(args)
    with extra_needed("pagedserve.LLMEngine", "engine"):
        from pagedserve.executor.local import LocalExecutor
    _check_process()
    if args.tensor_parallel_size == 1:
        return LocalExecutor(args)
    from pagedserve.executor.ranks import RankedExecutor

    return RankedExecutor(args)

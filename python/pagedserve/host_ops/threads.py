"""Number of compute threads."""

import os
import sys


def num_compute_threads() -> int:
    """Threads of a call.

    As many as torch has where it is imported, which a caller may have set; else
    ``OMP_NUM_THREADS``, else the CPUs that this process may use.
    """
    get_num_threads = getattr(sys.modules.get("torch"), "get_num_threads", None)
    if get_num_threads is not None:
        return int(get_num_threads())
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if given.isdecimal() and int(given) > 0:
        return int(given)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

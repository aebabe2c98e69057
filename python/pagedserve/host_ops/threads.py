"""Number of compute threads."""

import os


def num_compute_threads() -> int:
    """Threads of a call: ``OMP_NUM_THREADS``, else the CPUs that this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if given.isdecimal() and int(given) > 0:
        return int(given)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

"""Compute threads: their number, and what they lose to waiting."""

import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

from pagedserve._core import cpu

# Where Linux shows control groups, and those of this process.
_GROUPS: Final = Path("/sys/fs/cgroup")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")


def num_compute_threads() -> int:
    """Threads of a call.

    As many as torch has where it is imported, which a caller may have set; else
    ``OMP_NUM_THREADS``, else the CPUs of this process's affinity.  No more than a control group's
    quota of CPU time pays for: further threads would use up the quota early and stand still until
    the next period.
    """
    get_num_threads = getattr(sys.modules.get("torch"), "get_num_threads", None)
    if get_num_threads is not None:
        return limit_threads(int(get_num_threads()))
    return _requested_threads() or limit_threads(_num_cpus())


def limit_threads(num_threads: int) -> int:
    """Limit a number of threads to what a control group's quota of CPU time pays for.

    Args:
        num_threads: Threads that would be used, such as torch's.

    Returns:
        A number from 1 to ``num_threads``; that number where ``OMP_NUM_THREADS`` is set.
    """
    quota = None if _requested_threads() else cpu_quota()
    return num_threads if quota is None else max(1, min(num_threads, math.ceil(quota)))


def cpu_quota(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """CPU time per second of the clock that control groups allow this process.

    Args:
        groups: Where control groups are mounted: version 2, or version 1 with a folder per
            controller.
        membership: File with the groups of this process, as ``/proc/self/cgroup``.

    Returns:
        The smallest quota of its groups and of those around them; None without any.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = (_quota(folder) for line in lines for folder in _folders(groups, line))
    return min((quota for quota in quotas if quota is not None), default=None)


class ThreadWaits(NamedTuple):
    """What the compute threads of a process have lost to waiting.

    Attributes:
        num_calls: Calls of more than one thread.
        num_absent: Threads that took no part in a call: they slept, or had no core, until the
            others were done.
        seconds: Seconds in which callers waited for threads that still computed.
    """

    num_calls: int = 0
    num_absent: int = 0
    seconds: float = 0.0

    @classmethod
    def now(cls) -> Self:
        """Those of this process so far."""
        return cls(*cpu.thread_waits())

    @classmethod
    def total(cls, waits: Iterable[Self]) -> Self:
        """Sum over processes."""
        return cls(*map(sum, zip(cls(), *waits, strict=True)))


def _requested_threads() -> int:
    """Value of ``OMP_NUM_THREADS``; 0 if it is not set."""
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(given) if given.isdecimal() else 0


def _num_cpus() -> int:
    """CPUs of this process's affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _folders(groups: Path, line: str) -> Iterator[Path]:
    """Folders of the group that a line of ``/proc/self/cgroup`` names, and of those around it.

    A container sees its own group as the mounted one, whatever the line names.
    """
    _, controllers, path = line.split(":", 2)
    if not controllers:  # version 2; the second place is that of systems with both versions
        homes = [groups, groups / "unified"]
    elif "cpu" in controllers.split(","):
        homes = [groups / controllers, groups / "cpu"]
    else:
        homes = []
    parts = Path(path.lstrip("/")).parts
    for home in homes:
        for depth in range(len(parts) + 1):
            yield home.joinpath(*parts[:depth])


def _quota(folder: Path) -> float | None:
    """CPUs' worth of time that a group allows; None if it does not limit it."""
    try:
        if (limit := folder / "cpu.max").exists():
            quota, period = limit.read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such group, or "max"
        return None

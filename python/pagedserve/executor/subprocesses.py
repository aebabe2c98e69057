"""Ranks as processes on this machine, which inherit the shared memory of steps."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

# Seconds: to wait for the end of a process that closed its socket; to tolerate a process that a
# signal has stopped.
_ENDING: Final = 1.0
_STOPPED: Final = 5.0


class StopWatch:
    """Measures how long a signal has stopped a process of this machine."""

    def __init__(self, pid: int) -> None:
        """Watch a process."""
        self._stat = Path(f"/proc/{pid}/stat")
        self._since: float | None = None

    def stuck(self) -> str | None:
        """Reason, if the process has been stopped for too long; else None."""
        now = time.monotonic()
        self._since = (self._since or now) if self._is_stopped() else None
        if self._since is not None and now - self._since > _STOPPED:
            return f"a signal has stopped its process for {_STOPPED:.0f} s"
        return None

    def _is_stopped(self) -> bool:
        with contextlib.suppress(OSError, IndexError):
            status = self._stat.read_text(encoding="ascii")
            return status.rpartition(")")[2].split()[0] in "Tt"
        return False


class LocalProcess:
    """A process on this machine: a ``RankProcess``."""

    def __init__(self, number: int, memory: int) -> None:
        """Start it.

        Args:
            number: Rank number.
            memory: Descriptor of the shared memory of steps.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
            self._process = subprocess.Popen(  # noqa: S603  # this interpreter, and our module
                [sys.executable, "-m", "pagedserve.executor.rank", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), memory),
                env=os.environ | {"PYTHONPATH": path},
                # Ctrl-C in a terminal is for the engine only.
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.memory: str | None = f"/proc/self/fd/{memory}"
        self.device_index = number
        self.stuck = StopWatch(self._process.pid).stuck

    def ending(self) -> str:
        """How the process ended; called when it has ended, or is about to."""
        try:
            code = self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            return "it left its socket"
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with status {code}"

    def kill(self) -> None:
        """Kill it; it has ended when this returns."""
        self._process.kill()
        self._process.wait()


class LocalBackend:
    """Starts ranks on this machine: a ``Backend``."""

    host: str | None = None
    device_index: int = 0

    def __init__(self, size: int) -> None:
        """Store the number of ranks, including rank 0."""
        self._size = size

    def start(self, memory: int) -> list[LocalProcess]:
        """Start processes for ranks 1 and up, in their order; see ``Backend``."""
        return [LocalProcess(rank, memory) for rank in range(1, self._size)]

    def end(self) -> None:
        """Do nothing: there are no resources to release."""

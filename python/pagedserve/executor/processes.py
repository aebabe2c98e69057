"""``RankProcesses``: the processes of this machine that share a model with the engine's.

Owns them: it starts them, hears them, says which of them died and why, and ends them.  Each is
reached by a socket, over which no step goes: at the start it is told what to load and answers when
it has, and at the end, however its other side ends, it hears that nobody is there any more.
Invariants:

1. When this object is gone, so are they.
2. Once one has died, none of the others lives on, so that nobody waits for them in an exchange.

Costs: a thread that wakes up once a second, and for what they say.
"""

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, Literal, cast

from pagedserve.config import EngineArgs
from pagedserve.errors import ExecutorDeadError

# Seconds: between two looks at the ranks; that one which is stopped is waited for; after the first
# bad news for the cause.
_INTERVAL: Final = 1.0
_STOPPED: Final = 5.0
_SETTLING: Final = 0.1


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank is told at its start.

    Attributes:
        args: The user's.
        rank: Its number.
        size: How many there are.
        store: A path at which ranks find each other.
        memory: Descriptor of the memory of steps.
        num_threads: That torch may use.
    """

    args: EngineArgs
    rank: int
    size: int
    store: str
    memory: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank says.

    Attributes:
        kind: "done" with what was asked; "failed", of itself; "lost" another in an exchange.
        value: What came of it, or why.
    """

    kind: Literal["done", "failed", "lost"]
    value: Any = None


class _Rank:
    """One process, and this side of its socket."""

    def __init__(self, number: int, memory: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
            self.process = subprocess.Popen(  # noqa: S603  # this interpreter, and a module of ours
                [sys.executable, "-m", "pagedserve.executor.rank", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), memory),
                env=os.environ | {"PYTHONPATH": path, "LOCAL_RANK": str(number)},
                # Ctrl-C of a terminal is for the engine alone.
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.answers: deque[Any] = deque()
        self.stopped_since: float | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii")
            return status.rpartition(")")[2].split()[0] in "Tt"
        return False

    def ending(self) -> str:
        """How the process ended, which it has, or is about to."""
        try:
            code = self.process.wait(_INTERVAL)
        except subprocess.TimeoutExpired:
            return "it left its socket"
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with status {code}"


class RankProcesses:
    """Ranks 1 and up.

    Attributes:
        step: How many steps were published.
    """

    def __init__(self, args: EngineArgs, store: str, memory: int, num_threads: int) -> None:
        """Start them; they load the model as soon as all have found each other."""
        self.step = 0
        self._launched_at: float | None = None
        self._timeout = args.distributed_timeout_seconds
        self._condition = threading.Condition()
        self._dead: ExecutorDeadError | None = None
        self._is_ending = False
        self._ranks: dict[int, _Rank] = {}
        atexit.register(self.end)
        size = args.tensor_parallel_size
        try:
            for rank in range(1, size):
                self._ranks[rank] = _Rank(rank, memory)
                spec = RankSpec(args, rank, size, store, memory, num_threads)
                self._ranks[rank].connection.send(spec)
        except BaseException:
            self.end()
            raise
        threading.Thread(target=self._watch, name="pagedserve-ranks", daemon=True).start()

    def check(self) -> None:
        """Whether they live.

        Raises:
            ExecutorDeadError: One has died: which, when and why.
        """
        if self._dead is not None:
            raise self._dead

    def ask(self, what: str, *arguments: object) -> None:
        """Have each of them do something; ``answers`` waits for it."""
        for rank in self._ranks.values():
            with contextlib.suppress(OSError):  # its end is noticed by who watches
                rank.connection.send((what, arguments))

    def answers(self) -> list[Any]:
        """What came of what each was asked last, by rank.

        Raises:
            ExecutorDeadError: One has died.
        """
        with self._condition:
            for rank in self._ranks.values():
                while not rank.answers:
                    self.check()
                    self._condition.wait(_INTERVAL)
            return [rank.answers.popleft() for rank in self._ranks.values()]

    def launched(self) -> None:
        """A step is published: from now on they are to get on with it."""
        self.step += 1
        self._launched_at = time.monotonic()

    def finished(self) -> None:
        """The step has ended."""
        self._launched_at = None

    def failure(self, error: BaseException) -> ExecutorDeadError:
        """Why a step could not be computed: who died, or what went wrong in this process.

        None of them lives afterwards.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._dead is not None, 2 * _INTERVAL)
        if self._dead is None:
            self._bury(0, f"{type(error).__name__}: {error}")
        assert self._dead is not None  # noqa: S101  # just said
        return self._dead

    def end(self) -> None:
        """End them all; they keep nothing that would be lost."""
        self._is_ending = True
        atexit.unregister(self.end)
        for rank in self._ranks.values():
            rank.process.kill()
            rank.process.wait()
            with contextlib.suppress(OSError):
                rank.connection.close()

    def _watch(self) -> None:
        sockets = {rank.connection: number for number, rank in self._ranks.items()}
        while not self._is_ending and self._dead is None:
            try:
                ready = _with_news(sockets, _INTERVAL)
            except OSError:  # they are being ended
                return
            news = {sockets[connection]: self._hear(sockets[connection]) for connection in ready}
            bad = {number: why for number, why in news.items() if why is not None}
            if bad:
                self._settle(bad)
            elif (stuck := self._stuck()) is not None:
                self._bury(*stuck)

    def _hear(self, number: int) -> Answer | None:
        """Take what a rank says; gives bad news, and None for what it was asked for."""
        rank = self._ranks[number]
        try:
            answer: Answer = rank.connection.recv()
        except (EOFError, OSError):
            return Answer("failed", rank.ending())
        if answer.kind != "done":
            return answer
        with self._condition:
            rank.answers.append(answer.value)
            self._condition.notify_all()
        return None

    def _settle(self, bad: dict[int, Answer]) -> None:
        """Who lost another may be heard before the other's end: wait a little for that."""
        deadline = time.monotonic() + _SETTLING
        sockets = {rank.connection: n for n, rank in self._ranks.items() if n not in bad}
        while all(answer.kind == "lost" for answer in bad.values()) and sockets:
            ready = _with_news(sockets, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                number = sockets.pop(connection)
                if (answer := self._hear(number)) is not None:
                    bad[number] = answer
        causes = [item for item in bad.items() if item[1].kind == "failed"] or list(bad.items())
        number, answer = causes[0]
        self._bury(number, str(answer.value))

    def _stuck(self) -> tuple[int, str] | None:
        """A rank that does not get on, and why."""
        now, launched_at = time.monotonic(), self._launched_at
        for number, rank in self._ranks.items():
            rank.stopped_since = (rank.stopped_since or now) if rank.is_stopped else None
            if rank.stopped_since is not None and now - rank.stopped_since > _STOPPED:
                return number, f"a signal has stopped its process for {_STOPPED:.0f} s"
        if launched_at is not None and now - launched_at > self._timeout:
            return 0, f"no end of the step for {self._timeout:.0f} s (distributed_timeout_seconds)"
        return None

    def _bury(self, number: int, why: str) -> None:
        with self._condition:
            if self._dead is None and not self._is_ending:
                self._dead = ExecutorDeadError(
                    f"rank {number} of {len(self._ranks) + 1} died after {self.step} steps: {why}",
                    rank=number,
                    step=self.step,
                )
            self._condition.notify_all()
        for rank in self._ranks.values():
            rank.process.kill()
            rank.process.wait()


def _with_news(sockets: Iterable[Connection], timeout: float) -> list[Connection]:
    """Those over which something came, or that the other side has left."""
    return cast(list[Connection], wait(list(sockets), timeout))

"""``RankProcesses``: the ranks besides rank 0, as processes.

Starts, monitors and stops them, and reports which of them died and why.  A `Backend` creates them:
local processes, or Ray actors.  Each has a connection.  It carries the rank's configuration and the
response once the model is loaded, and closes when either side ends, for any reason.  Invariants:

1. When this object is gone, the processes are too.
2. Once one has died, all are stopped, so that none hangs in a collective operation.

Costs: a thread that wakes up once a second, and for messages.
"""

import atexit
import contextlib
import copy
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Final, Literal, Protocol, cast

from pagedserve.config import EngineArgs
from pagedserve.errors import ExecutorDeadError

# Seconds: between two checks of the ranks; after the first failure to wait for its cause.
_INTERVAL: Final = 1.0
_SETTLING: Final = 0.1


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Configuration of a rank.

    Attributes:
        args: Options of the engine.
        rank: Rank number.
        size: Number of ranks.
        store: Rendezvous of the ranks.
        memory: Path of the shared memory of steps; None if steps are sent.
        device_index: Index of its GPU among the visible ones.
        num_threads: Threads of torch.
    """

    args: EngineArgs
    rank: int
    size: int
    store: str
    memory: str | None
    device_index: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Message of a rank.

    Attributes:
        kind: "done" with a result; "failed" with an error; "lost" another rank in a collective.
        value: Result, or reason.
    """

    kind: Literal["done", "failed", "lost"]
    value: Any = None


class RankProcess(Protocol):
    """Process of a rank."""

    @property
    def connection(self) -> Connection:
        """Connection to it."""

    @property
    def memory(self) -> str | None:
        """Path under which it maps the shared memory of steps; None if it cannot."""

    @property
    def device_index(self) -> int:
        """Index of its GPU among the visible ones."""

    def stuck(self) -> str | None:
        """Why it hangs; None if it does not.  Called once a second."""

    def ending(self) -> str:
        """How the process ended; called when it has ended, or is about to."""

    def kill(self) -> None:
        """Kill it, now or soon after this returns."""


class Backend(Protocol):
    """Starts ranks as processes."""

    @property
    def host(self) -> str | None:
        """Address of this machine for other ranks; None if all are on it."""

    @property
    def device_index(self) -> int:
        """Index of rank 0's GPU."""

    def start(self, memory: int) -> Sequence[RankProcess]:
        """Start processes for ranks 1 and up, in their order.

        Args:
            memory: Descriptor of the shared memory of steps.

        Raises:
            ConfigError: Resources are missing.
        """

    def end(self) -> None:
        """Release the resources."""


@dataclass(slots=True)
class _Rank:
    """A rank, and its responses."""

    process: RankProcess
    answers: deque[Any] = field(default_factory=deque)

    def send(self, message: object) -> None:
        """Send a message; does nothing if the rank has ended, which the watcher reports."""
        with contextlib.suppress(OSError):
            self.process.connection.send(message)


class RankProcesses:
    """Ranks 1 and up.

    Attributes:
        step: Number of published steps.
    """

    def __init__(
        self, args: EngineArgs, backend: Backend, store: str, memory: int, num_threads: int
    ) -> None:
        """Start them; they load the model after rendezvous.

        Args:
            args: Options of the engine.
            backend: Starts them.
            store: Rendezvous of the ranks.
            memory: Descriptor of the shared memory of steps.
            num_threads: Threads of torch per rank.
        """
        self.step = 0
        self._pid = os.getpid()
        self._launched_at: float | None = None
        self._timeout = args.distributed_timeout_seconds
        self._condition = threading.Condition()
        self._dead: ExecutorDeadError | None = None
        self._is_ending = False
        self._ranks: dict[int, _Rank] = {}
        self._backend = backend
        self._watcher = threading.Thread(target=self._watch, name="pagedserve-ranks", daemon=True)
        atexit.register(self.end)
        _all_ranks.add(self)
        size = args.tensor_parallel_size
        try:
            for rank, process in enumerate(backend.start(memory), 1):
                self._ranks[rank] = started = _Rank(process)
                place = process.memory, process.device_index
                started.send(RankSpec(args, rank, size, store, *place, num_threads))
        except BaseException:
            self.end()
            raise
        self._watcher.start()

    @property
    def readers(self) -> list[int]:
        """Ranks that map the shared memory of steps."""
        return [n for n, rank in self._ranks.items() if rank.process.memory is not None]

    @property
    def connections(self) -> list[Connection]:
        """Connections to all of them."""
        return [rank.process.connection for rank in self._ranks.values()]

    @property
    def remote_connections(self) -> list[Connection]:
        """Connections to ranks that do not map the shared memory of steps."""
        ranks = self._ranks.values()
        return [rank.process.connection for rank in ranks if rank.process.memory is None]

    def check(self) -> None:
        """Check that all are alive.

        Raises:
            ExecutorDeadError: A rank has died: which, when and why.
        """
        if self._dead is not None:
            raise copy.copy(self._dead)  # its traceback would keep the engine alive

    @property
    def is_dead(self) -> bool:
        """Whether a rank has died, and all were stopped."""
        return self._dead is not None

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that started them."""
        return os.getpid() != self._pid

    def ask(self, what: str, *arguments: object) -> None:
        """Call a function on each of them; ``answers`` waits for the results."""
        for rank in self._ranks.values():
            rank.send((what, arguments))

    def answers(self) -> list[Any]:
        """Wait for the results of the last call, by rank.

        Raises:
            ExecutorDeadError: A rank has died.
        """
        with self._condition:
            for rank in self._ranks.values():
                while not rank.answers:
                    self.check()
                    self._condition.wait(_INTERVAL)
            return [rank.answers.popleft() for rank in self._ranks.values()]

    def launched(self) -> None:
        """Start the timeout of a published step."""
        self.step += 1
        self._launched_at = time.monotonic()

    def finished(self) -> None:
        """Stop the timeout of the step."""
        self._launched_at = None

    def failure(self, error: BaseException) -> ExecutorDeadError:
        """Why a step failed: which rank died, or the error of this process.

        Stops all of them.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._dead is not None, 2 * _INTERVAL)
        if self._dead is None:
            self._bury(0, f"{type(error).__name__}: {error}")
        assert self._dead is not None  # noqa: S101  # set above
        return copy.copy(self._dead)

    def end(self) -> None:
        """Stop all of them; they have no state to lose.  Does nothing in a forked child."""
        if self.is_inherited:
            return
        self._is_ending = True
        atexit.unregister(self.end)
        if self._dead is None:
            self._dead = ExecutorDeadError("the ranks were ended", rank=0, step=self.step)
        for rank in self._ranks.values():
            rank.process.kill()
        if self._watcher.is_alive():  # it is notified
            self._watcher.join()
        for rank in self._ranks.values():
            with contextlib.suppress(OSError):
                rank.process.connection.close()
        self._backend.end()

    def forget(self) -> None:
        """Leave them to the parent of this forked process.

        They end when their connections close, of which no child may keep a copy.
        """
        self._dead = ExecutorDeadError("the ranks are the parent's", rank=0, step=self.step)
        for rank in self._ranks.values():
            rank.process.connection.close()

    def _watch(self) -> None:
        sockets = {rank.process.connection: n for n, rank in self._ranks.items()}
        while not self._is_ending and self._dead is None:
            try:
                self._look(sockets)
            except Exception as error:  # noqa: BLE001  # a caller of answers would hang
                self._bury(0, f"the ranks cannot be watched: {type(error).__name__}: {error}")

    def _look(self, sockets: dict[Connection, int]) -> None:
        """Wait for messages up to an interval, and process them."""
        ready = _with_news(sockets, _INTERVAL)
        news = {sockets[connection]: self._hear(sockets[connection]) for connection in ready}
        bad = {number: why for number, why in news.items() if why is not None}
        if bad:
            self._settle(bad)
        elif (stuck := self._stuck()) is not None:
            self._bury(*stuck)

    def _hear(self, number: int) -> Answer | None:
        """Read a message of a rank; return it if it is a failure, None if it is a result."""
        rank = self._ranks[number]
        try:
            answer: Answer = rank.process.connection.recv()
        except (EOFError, OSError):
            return Answer("failed", rank.process.ending())
        if answer.kind != "done":
            return answer
        with self._condition:
            rank.answers.append(answer.value)
            self._condition.notify_all()
        return None

    def _settle(self, bad: dict[int, Answer]) -> None:
        """Wait briefly for the cause: a rank that lost another may report before the other ends."""
        deadline = time.monotonic() + _SETTLING
        sockets = {rank.process.connection: n for n, rank in self._ranks.items() if n not in bad}
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
        """A rank that hangs, and why."""
        for number, rank in self._ranks.items():
            if (why := rank.process.stuck()) is not None:
                return number, why
        launched_at = self._launched_at
        if launched_at is not None and time.monotonic() - launched_at > self._timeout:
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


_all_ranks: Final[weakref.WeakSet[RankProcesses]] = weakref.WeakSet()


def _forget_all() -> None:
    for ranks in list(_all_ranks):
        ranks.forget()


os.register_at_fork(after_in_child=_forget_all)


def _with_news(sockets: Iterable[Connection], timeout: float) -> list[Connection]:
    """Connections with a message, or closed by the other side."""
    return cast(list[Connection], wait(list(sockets), timeout))

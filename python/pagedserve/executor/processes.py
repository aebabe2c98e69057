"""``RankProcesses``: the processes that share a model with the engine's.

Owns them: it starts them, hears them, says which of them died and why, and ends them.  Who makes
them, and where, is a `Backend`: this machine's processes, or Ray.  Each is reached by a connection.
Over that it is told at the start what to load, and answers when it has; and at the end, however the
other side ends, it hears that nobody is there any more.  Invariants:

1. When this object is gone, so are they.
2. Once one has died, none of the others lives on, so that nobody waits for them in an exchange.

Costs: a thread that wakes up once a second, and for what they say.
"""

import atexit
import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Final, Literal, Protocol, cast

from pagedserve.config import EngineArgs
from pagedserve.errors import ExecutorDeadError

# Seconds: between two looks at the ranks; after the first bad news for the cause.
_INTERVAL: Final = 1.0
_SETTLING: Final = 0.1


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank is told at its start.

    Attributes:
        args: The user's.
        rank: Its number.
        size: How many there are.
        store: Where ranks find each other.
        memory: Path of the memory of steps; None where steps are sent.
        device_index: Of its GPU, among those that it sees.
        num_threads: That torch may use.
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
    """What a rank says.

    Attributes:
        kind: "done" with what was asked; "failed", of itself; "lost" another in an exchange.
        value: What came of it, or why.
    """

    kind: Literal["done", "failed", "lost"]
    value: Any = None


class RankProcess(Protocol):
    """A process that a rank is to run in."""

    @property
    def connection(self) -> Connection:
        """This side of what it is reached by."""

    @property
    def memory(self) -> str | None:
        """Path at which it maps the memory of steps; None where it cannot."""

    @property
    def device_index(self) -> int:
        """Of its GPU, among those that it sees."""

    def stuck(self) -> str | None:
        """Why it does not get on; None where it does.  Asked once a second."""

    def ending(self) -> str:
        """How the process ended, which it has, or is about to."""

    def kill(self) -> None:
        """End it; afterwards it is gone."""


class Backend(Protocol):
    """Who starts ranks, and where."""

    @property
    def host(self) -> str | None:
        """At which others reach this machine; None where all are on it."""

    @property
    def device_index(self) -> int:
        """Of rank 0's GPU."""

    def start(self, memory: int) -> Sequence[RankProcess]:
        """Processes for ranks 1 and up, in their order.

        Args:
            memory: Descriptor of the memory of steps, of this process.

        Raises:
            ConfigError: There is no room for them.
        """

    def end(self) -> None:
        """Give back what was needed to start them."""


@dataclass(slots=True)
class _Rank:
    """A rank, and what it has answered."""

    process: RankProcess
    answers: deque[Any] = field(default_factory=deque)


class RankProcesses:
    """Ranks 1 and up.

    Attributes:
        step: How many steps were published.
    """

    def __init__(
        self, args: EngineArgs, backend: Backend, store: str, memory: int, num_threads: int
    ) -> None:
        """Start them; they load the model as soon as all have found each other.

        Args:
            args: The user's.
            backend: Makes them.
            store: Where they find each other.
            memory: Descriptor of the memory of steps.
            num_threads: That torch may use, of each.
        """
        self.step = 0
        self._launched_at: float | None = None
        self._timeout = args.distributed_timeout_seconds
        self._condition = threading.Condition()
        self._dead: ExecutorDeadError | None = None
        self._is_ending = False
        self._ranks: dict[int, _Rank] = {}
        self._backend = backend
        self._watcher = threading.Thread(target=self._watch, name="pagedserve-ranks", daemon=True)
        atexit.register(self.end)
        size = args.tensor_parallel_size
        try:
            for rank, process in enumerate(backend.start(memory), 1):
                self._ranks[rank] = _Rank(process)
                place = process.memory, process.device_index
                process.connection.send(RankSpec(args, rank, size, store, *place, num_threads))
        except BaseException:
            self.end()
            raise
        self._watcher.start()

    @property
    def readers(self) -> list[int]:
        """Those that map the memory of steps."""
        return [n for n, rank in self._ranks.items() if rank.process.memory is not None]

    @property
    def connections(self) -> list[Connection]:
        """To those that do not."""
        ranks = self._ranks.values()
        return [rank.process.connection for rank in ranks if rank.process.memory is None]

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
                rank.process.connection.send((what, arguments))

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
        if self._dead is None:
            self._dead = ExecutorDeadError("the ranks were ended", rank=0, step=self.step)
        for rank in self._ranks.values():
            rank.process.kill()
        if self._watcher.is_alive():  # it hears of that
            self._watcher.join()
        for rank in self._ranks.values():
            with contextlib.suppress(OSError):
                rank.process.connection.close()
        self._backend.end()

    def _watch(self) -> None:
        sockets = {rank.process.connection: n for n, rank in self._ranks.items()}
        while not self._is_ending and self._dead is None:
            try:
                self._look(sockets)
            except Exception as error:  # noqa: BLE001  # who waits for answers would wait for ever
                self._bury(0, f"the ranks cannot be watched: {type(error).__name__}: {error}")

    def _look(self, sockets: dict[Connection, int]) -> None:
        """Wait a while for news, and take what there is."""
        ready = _with_news(sockets, _INTERVAL)
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
        """Who lost another may be heard before the other's end: wait a little for that."""
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
        """A rank that does not get on, and why."""
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


def _with_news(sockets: Iterable[Connection], timeout: float) -> list[Connection]:
    """Those over which something came, or that the other side has left."""
    return cast(list[Connection], wait(list(sockets), timeout))

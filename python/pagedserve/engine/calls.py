"""``Calls``: serializes calls into an ``LLM`` from any thread.

Invariants:

1. One call runs at a time.  The others wait, and run in the order of arrival.
2. The main thread runs its calls itself, so that Ctrl-C interrupts them.  Those of all other
   threads run in one thread: each thread that computes has a team of OpenMP threads, and idle
   teams slow the active one down.
3. A call made during a call, by a callback, is refused: it would deadlock.
4. However a call ends, including Ctrl-C at any moment, the next one runs.

Costs: some microseconds per call of the main thread; two thread switches per call of another
thread, whatever the number of its steps.
"""

import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial, wraps
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast

from pagedserve.engine.guard import EngineGuard
from pagedserve.errors import ConcurrentCallError

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])

_Jobs: TypeAlias = "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"

# A signal that arrives just before a wait does not interrupt it: Python handles it after the wait.
_SIGNAL_SECONDS: Final = 0.5


class Calls:
    """Queue of calls, with a thread that runs those of other threads."""

    def __init__(self, guard: EngineGuard) -> None:
        """Create an empty queue.

        Args:
            guard: Guard of the engine; refuses calls of other processes, and after its shutdown.
        """
        self._guard = guard
        self._mutex = threading.Lock()
        # One lock per running or waiting call, in their order; the first has the turn.
        self._turns: deque[threading.Lock] = deque()
        self._is_in_main = False
        self._thread: Final = CallThread()

    def __len__(self) -> int:
        """Number of running and waiting calls."""
        return len(self._turns)

    def run(self, name: str, call: Callable[[], T]) -> T:
        """Run a call when its turn comes.

        Args:
            name: Name of the called method, for errors.
            call: Function to run.

        Returns:
            Result of ``call``.

        Raises:
            ConcurrentCallError: It is called during another call.
            EngineDeadError: The engine is shut down, or belongs to the parent process.
        """
        self._guard.check()
        is_main = threading.current_thread() is threading.main_thread()
        if self._is_in_main if is_main else self._thread.is_current():
            raise ConcurrentCallError(
                f"{name} was called from within a call of the same LLM, by a callback such as a "
                "logits processor: call it afterwards, or use another LLM"
            )
        turn = threading.Lock()
        turn.acquire()
        try:
            if is_main:
                self._is_in_main = True
            self._take(turn)
            self._guard.check()
            return call() if is_main else self._thread.run(call)
        finally:
            try:
                self._end(turn, is_main=is_main)
            except BaseException:  # Ctrl-C at any point of it
                self._end(turn, is_main=is_main)
                raise

    def _take(self, turn: threading.Lock) -> None:
        """Wait for the turn."""
        with self._mutex:
            self._turns.append(turn)
            self._wake_first()
        while not turn.acquire(timeout=_SIGNAL_SECONDS):
            pass

    def _end(self, turn: threading.Lock, *, is_main: bool) -> None:
        """Leave the queue from any position; idempotent."""
        with self._mutex:
            if is_main:
                self._is_in_main = False
            if turn in self._turns:
                self._turns.remove(turn)
            self._wake_first()

    def _wake_first(self) -> None:
        if self._turns and self._turns[0].locked():
            self._turns[0].release()


class CallThread:
    """A thread that runs one call at a time for other threads; started by the first call.

    The thread holds no reference to this object, and ends with it.
    """

    def __init__(self) -> None:
        """Prepare; no thread is started yet."""
        self._jobs: _Jobs = SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None)

    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def run(self, call: Callable[[], T]) -> T:
        """Run a call in the thread with the caller's context variables, and return its result.

        Raises:
            BaseException: The call raised it.
        """
        if self._thread is None:
            # A daemon, since callers wait for the result anyway.
            thread = threading.Thread(
                target=_serve, args=(self._jobs,), name="pagedserve-calls", daemon=True
            )
            thread.start()
            self._thread = thread
        done: Future[T] = Future()
        context = contextvars.copy_context()
        self._jobs.put((done, lambda: context.run(call)))
        return done.result()


class HasCalls(Protocol):
    """An object whose methods are serialized."""

    calls: Calls


def in_turn(method: Method) -> Method:
    """Decorate a method so that it runs when its turn among the calls of its object comes."""

    @wraps(method)
    def call(owner: HasCalls, *args: Any, **kwargs: Any) -> Any:
        return owner.calls.run(method.__name__, partial(method, owner, *args, **kwargs))

    return cast(Method, call)


def _serve(jobs: _Jobs) -> None:
    """Run calls until the queue is closed."""
    while (job := jobs.get()) is not None:
        done, call = job
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  # raised in the caller
            done.set_exception(error)
        else:
            done.set_result(result)
            del result
        del job, done, call  # release references to the call

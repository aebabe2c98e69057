"""``EngineThread``: an engine in a separate thread, with a command queue.

Owns the thread.  Other threads queue commands, which run between two steps in the order in which
they were sent; outputs are delivered once per step.  Invariants:

1. Only this thread accesses the engine, except for the thread-safe methods of ``LLMEngine``.
2. The engine is created in this thread: its pool of OpenMP threads is the one that steps use.
3. A failed step is retried; after ``MAX_FAILURES`` in a row its requests end with the finish
   reason "error", and the others continue.  If the executor has died, all requests end so, and the
   thread too.
4. When the thread ends, for any reason, it shuts the engine down and calls ``on_end`` once, as its
   last action.

Costs: two lookups of an empty queue per step; two wake-ups per second of an idle engine, which
returns freed memory to the system after 2, 4, 8, ... seconds: other threads may still free some.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from pagedserve.engine.guard import EngineGuard
from pagedserve.engine.llm_engine import LLMEngine
from pagedserve.errors import EngineDeadError, ExecutorDeadError, RequestError
from pagedserve.host_ops.heap import return_freed_memory
from pagedserve.outputs import RequestOutput

logger = logging.getLogger(__name__)

# Failed steps in a row after which their requests end.
MAX_FAILURES: Final = 3
# Seconds between two checks: of the executor's liveness while idle; of readers' liveness while
# steps run.
_LOOK: Final = 0.5
# Checks of an idle engine before freed memory is returned to the system; again after twice as many.
_LOOKS_BEFORE_TRIM: Final = 4

# A command, and the outputs that it returns.
Mail: TypeAlias = Callable[[LLMEngine], list[RequestOutput]]


class EngineThread:
    """Runs the steps of an engine.

    Attributes:
        is_ready: Set once the engine is created, or creating it failed.
        engine: The engine, once it is created.
        guard: Refuses commands of forked children.
    """

    def __init__(
        self,
        make_engine: Callable[[], LLMEngine],
        *,
        on_outputs: Callable[[list[RequestOutput]], None],
        on_look: Callable[[], None],
        on_end: Callable[[BaseException], None],
    ) -> None:
        """Start the thread, which creates the engine.

        Args:
            make_engine: Called in the thread.
            on_outputs: Receives the outputs of a step, in the thread; at least one output.
            on_look: Checks whether outputs are still read: called between two steps, in the thread.
            on_end: Receives the reason why the thread ends, in the thread.
        """
        self.guard = EngineGuard()
        self.is_ready = threading.Event()
        self.engine: LLMEngine | None = None
        self._make_engine = make_engine
        self._on_outputs = on_outputs
        self._on_look = on_look
        self._look_time = time.monotonic()
        self._on_end = on_end
        self._mail: deque[Mail] = deque()
        self._has_mail = threading.Event()
        self._is_stopping = False
        self._num_failures = 0
        self._progress_time = time.monotonic()
        # A daemon: a program that omits the shutdown can still end.
        self._thread = threading.Thread(target=self._run, name="pagedserve-engine", daemon=True)
        self._thread.start()

    def send(self, mail: Mail) -> None:
        """Queue a command to run between two steps.

        It may raise only if the step that was launched ahead fails, and is then called again.

        Raises:
            EngineDeadError: This process was forked from the one that the thread runs in.
        """
        self.guard.check()
        self._mail.append(mail)
        self._has_mail.set()

    def post(self, mail: Mail) -> None:
        """Queue a command to run before the next step; takes no lock, as a finalizer must not.

        An idle engine is not woken for it.
        """
        self._mail.append(mail)

    def stop(self) -> None:
        """End the thread after the current step and all queued commands, and wait for it.

        Does nothing in a forked child.
        """
        if self.guard.is_inherited:
            return
        self._is_stopping = True
        self._has_mail.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def seconds_without_progress(self) -> float:
        """Seconds that requests have waited without a completed step; 0 without requests."""
        engine = self.engine
        if engine is None or not engine.has_unfinished_requests():
            return 0.0
        return time.monotonic() - self._progress_time

    def _run(self) -> None:
        end: BaseException = EngineDeadError("the engine was shut down")
        try:
            self.engine = self._make_engine()
            self.is_ready.set()
            while not self._is_stopping:
                self._run_once(self.engine)
            self._open_mail(self.engine)
        except BaseException as error:  # every waiting reader must get the error
            end = error
            if self.engine is not None:
                logger.exception("the engine has died")
        try:
            if self.engine is not None:
                self.engine.shutdown()
        except Exception:
            logger.exception("the engine's memory could not be freed")
        self._on_end(end)
        self.is_ready.set()

    def _run_once(self, engine: LLMEngine) -> None:
        self._has_mail.clear()
        self._open_mail(engine)
        if engine.has_unfinished_requests():
            self._give(self._step(engine))
            self._progress_time = time.monotonic()
            if self._progress_time - self._look_time >= _LOOK:
                self._look_time = self._progress_time
                self._on_look()
        elif not self._is_stopping:
            self._wait_for_mail(engine)
            self._progress_time = time.monotonic()

    def _wait_for_mail(self, engine: LLMEngine) -> None:
        num_looks, trim_at = 0, _LOOKS_BEFORE_TRIM
        while not (self._has_mail.wait(_LOOK) or self._mail):
            engine.model_executor.check()
            num_looks += 1
            if num_looks == trim_at:
                return_freed_memory()
                trim_at *= 2

    def _open_mail(self, engine: LLMEngine) -> None:
        while self._mail:
            self._give(self._open(engine, self._mail.popleft()))

    def _give(self, outputs: list[RequestOutput]) -> None:
        if outputs:
            self._on_outputs(outputs)

    def _open(self, engine: LLMEngine, mail: Mail) -> list[RequestOutput]:
        try:
            return mail(engine)
        except RequestError:  # it concerns one request only
            logger.exception("a message of a request failed")
            return []
        except Exception:
            # The wait for a step that was launched ahead failed.  It is rolled back now.
            logger.exception("a step failed")
            return mail(engine)

    def _step(self, engine: LLMEngine) -> list[RequestOutput]:
        try:
            outputs = engine.step()
        except ExecutorDeadError as error:
            self._give(engine.end_failed(error, all_requests=True))
            raise
        except Exception as error:
            self._num_failures += 1
            logger.exception("a step failed, %d of %d", self._num_failures, MAX_FAILURES)
            if self._num_failures < MAX_FAILURES:
                return []
            outputs = engine.end_failed(error)
        self._num_failures = 0
        return outputs

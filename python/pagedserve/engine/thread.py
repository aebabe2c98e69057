"""``EngineThread``: an engine in a thread of its own, and the mail that reaches it.

Owns the thread.  What others want of the engine comes as mail and is done between two steps, in
the order in which it was sent; outputs leave once a step.  Invariants:

1. Only this thread touches the engine, but for what ``LLMEngine`` lets any thread ask.
2. The engine is made in this thread: its pool of OpenMP threads is the one that steps use.
3. A step that fails is tried again; after ``MAX_FAILURES`` in a row the requests that it held end
   with the finish reason "error", and the others go on.  Where what computes has died all end so,
   and the thread with them.
4. When the thread ends, however it does, ``on_end`` is called once, as its last act.

Costs: two lookups of an empty queue a step; two wake-ups a second of an engine without requests.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from pagedserve.engine.llm_engine import LLMEngine
from pagedserve.errors import EngineDeadError, ExecutorDeadError
from pagedserve.outputs import RequestOutput

logger = logging.getLogger(__name__)

# Steps in a row that may fail before their requests are given up.
MAX_FAILURES: Final = 3
# Seconds between two looks whether what computes lives, while there is nothing to do.
_LOOK: Final = 0.5

# What is wanted of the engine; the outputs that it brings.
Mail: TypeAlias = Callable[[LLMEngine], list[RequestOutput]]


class EngineThread:
    """Runs the steps of an engine.

    Attributes:
        is_ready: Set once the engine is made, or cannot be.
        engine: The engine, once it is made.
    """

    def __init__(
        self,
        make_engine: Callable[[], LLMEngine],
        *,
        on_outputs: Callable[[list[RequestOutput]], None],
        on_end: Callable[[BaseException], None],
    ) -> None:
        """Start the thread, which makes the engine.

        Args:
            make_engine: Called in the thread.
            on_outputs: Gets what a step brought, in the thread; at least one output.
            on_end: Gets why the thread ends, in the thread.
        """
        self.is_ready = threading.Event()
        self.engine: LLMEngine | None = None
        self._make_engine = make_engine
        self._on_outputs = on_outputs
        self._on_end = on_end
        self._mail: deque[Mail] = deque()
        self._has_mail = threading.Event()
        self._is_stopping = False
        self._num_failures = 0
        self._progress_time = time.monotonic()
        # A daemon: a program that forgets to shut down can still end.
        self._thread = threading.Thread(target=self._run, name="pagedserve-engine", daemon=True)
        self._thread.start()

    def send(self, mail: Mail) -> None:
        """Have something done between two steps.

        It may raise only where the step that was launched ahead does, and is called again then.
        """
        self._mail.append(mail)
        self._has_mail.set()

    def stop(self) -> None:
        """End the thread after the step under way and all mail, and wait for it."""
        self._is_stopping = True
        self._has_mail.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def seconds_without_progress(self) -> float:
        """How long requests have waited without the end of a step; 0 while there are none."""
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
        except BaseException as error:  # whoever waits for outputs must be told
            end = error
            if self.engine is not None:
                logger.exception("the engine has died")
        self._on_end(end)
        self.is_ready.set()

    def _run_once(self, engine: LLMEngine) -> None:
        self._has_mail.clear()
        self._open_mail(engine)
        if engine.has_unfinished_requests():
            self._give(self._step(engine))
            self._progress_time = time.monotonic()
        elif not self._is_stopping:
            while not self._has_mail.wait(_LOOK):
                engine.model_executor.check()
            self._progress_time = time.monotonic()

    def _open_mail(self, engine: LLMEngine) -> None:
        while self._mail:
            self._give(self._open(engine, self._mail.popleft()))

    def _give(self, outputs: list[RequestOutput]) -> None:
        if outputs:
            self._on_outputs(outputs)

    def _open(self, engine: LLMEngine, mail: Mail) -> list[RequestOutput]:
        try:
            return mail(engine)
        except Exception:
            # A step that was launched ahead failed when it was waited for.  It is rolled back now.
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

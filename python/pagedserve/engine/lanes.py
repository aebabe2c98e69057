"""``Lanes``: background work for an event loop, where small requests do not wait for large ones.

Small and large work have one thread each.  Within a lane the requests take turns: the next is the
one that would have ended first if all had been served in slices (self-clocked fair queueing), so
that one with a thousand prompts delays another by one of them.  Equal work is done in the order of
arrival.

Costs: some 20 us for the thread switches, as with any executor.
"""

import asyncio
import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sized
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from pagedserve.engine.grammars import LazyGrammarCompiler
from pagedserve.engine.stream import call_in, set_answer
from pagedserve.errors import EngineDeadError
from pagedserve.inputs import Prompt
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import SamplingParams

T = TypeVar("T")

# Work of at most this many characters, or bytes, is small: some 10 ms of tokenization.
SMALL_COST: Final = 1 << 14
# Costs are compared in units of this many, so that usual requests keep their order.
_UNIT: Final = 1 << 12

_ENDED: Final = "the engine was shut down"


class _Work(NamedTuple):
    """A work item; the one with the earliest finish is done first.

    Attributes:
        finish: Virtual finish time, on the lane's clock.
        number: Number in the order of arrival.
        group: Request that it belongs to.
        future: Future of the result.
        make: Function that computes the result.
    """

    finish: int
    number: int
    group: Hashable
    future: "Future[Any]"
    make: Callable[[], Any]


class _Lane:
    """A thread and its work queue."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: list[_Work] = []
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._clock = 0
        self._finishes: dict[Hashable, int] = {}
        self._num_waiting: Counter[Hashable] = Counter()
        self._thread: threading.Thread | None = None
        self._is_ending = False

    def submit(self, make: Callable[[], T], cost: int, group: Hashable) -> "Future[T]":
        """Queue a function."""
        future: Future[T] = Future()
        with self._changed:
            if self._is_ending:
                raise EngineDeadError(_ENDED)
            start = max(self._clock, self._finishes.get(group, 0))
            finish = self._finishes[group] = start + 1 + cost // _UNIT
            self._num_waiting[group] += 1
            work = _Work(finish, next(self._numbers), group, future, make)
            heapq.heappush(self._waiting, work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    def shutdown(self) -> None:
        """Cancel waiting work; running work completes."""
        with self._changed:
            self._is_ending = True
            for work in self._waiting:
                work.future.cancel()
            self._waiting.clear()
            self._changed.notify()

    def _next(self) -> _Work | None:
        with self._changed:
            while not (self._waiting or self._is_ending):
                self._changed.wait()
            if self._is_ending:
                return None
            work = heapq.heappop(self._waiting)
            self._clock = work.finish
            self._num_waiting[work.group] -= 1
            if not self._num_waiting[work.group]:
                del self._num_waiting[work.group], self._finishes[work.group]
            return work

    def _run(self) -> None:
        while (work := self._next()) is not None:
            if not work.future.set_running_or_notify_cancel():
                continue
            try:
                value = work.make()
            except Exception as error:  # noqa: BLE001  # it concerns this work only
                work.future.set_exception(error)
            except BaseException as error:  # noqa: BLE001  # a panic in a Rust library
                failure = RuntimeError(f"{type(error).__name__} in a library: {error}")
                work.future.set_exception(failure)
            else:
                work.future.set_result(value)
            del work  # else it would stay alive until the next


class Lanes:
    """Two threads, for small and for large work."""

    def __init__(self, name: str) -> None:
        """Prepare; threads start with their first work.

        Args:
            name: Name of the threads.
        """
        self._small = _Lane(f"{name}-small")
        self._large = _Lane(f"{name}-large")

    def submit(self, make: Callable[[], T], *, cost: int, group: Hashable) -> "Future[T]":
        """Run a function in the background.

        Args:
            make: Function that computes the result.
            cost: Approximate number of characters or bytes that it processes.
            group: Request that it is for; work of different groups takes turns.

        Returns:
            Future of the result; cancelling it before it runs skips the work.

        Raises:
            EngineDeadError: After ``shutdown``.
        """
        lane = self._small if cost <= SMALL_COST else self._large
        return lane.submit(make, cost, group)

    async def run(self, make: Callable[[], T], *, cost: int, group: Hashable) -> T:
        """Run a function in the background, as ``submit``, and wait for its result.

        Neither the result nor an error, whose traceback refers to all that the function had, is
        part of a reference cycle: both may be large.

        Raises:
            EngineDeadError: After ``shutdown``, or ``shutdown`` cancelled the work.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        work = self.submit(make, cost=cost, group=group)
        work.add_done_callback(lambda _: call_in(loop, partial(set_answer, ended, None)))
        try:
            await ended
            if work.cancelled():  # by `shutdown`
                raise EngineDeadError(_ENDED)
            return work.result()
        finally:
            work.cancel()
            del work

    def shutdown(self) -> None:
        """Cancel waiting work; running work completes."""
        self._small.shutdown()
        self._large.shutdown()


# A bad word is tokenized twice, separately.
_WORD_COST: Final = 64


def input_cost(prompt: Prompt, params: SamplingParams | PoolingParams | None) -> int:
    """Approximate number of characters to process before a request can run.

    Its grammar is compiled already (`GrammarLanes`).  Pooling is never small: it sets the
    tokenizer's truncation, which two threads must not do.
    """
    cost = _prompt_cost(prompt)
    if isinstance(params, PoolingParams):
        return cost + SMALL_COST + 1
    if params is not None:
        cost += _WORD_COST * len(params.bad_words) + len(params.prediction or "")
    return cost


def _prompt_cost(prompt: object) -> int:
    if not isinstance(prompt, Mapping):
        return len(prompt) if isinstance(prompt, Sized) else 0
    has_media = prompt.get("multi_modal_data") is not None
    return sum(map(_prompt_cost, prompt.values()), SMALL_COST + 1 if has_media else 0)


class GrammarLanes:
    """Compiles grammars without blocking an event loop or requests without grammars."""

    def __init__(self) -> None:
        """Prepare; threads start with their first grammar."""
        self._lanes = Lanes("pagedserve-grammar")

    async def wait(self, params: object, grammars: LazyGrammarCompiler, group: object) -> None:
        """Compile the grammar of a request, if it is new.

        Args:
            params: Sampling parameters of the request.
            grammars: Compiler.
            group: The request; requests take turns with their grammars.

        Raises:
            RequestError: The grammar is invalid.
        """
        must_be = params.structured_outputs if isinstance(params, SamplingParams) else None
        if must_be is None or grammars.knows(must_be):
            return
        compiled = partial(grammars.compile, must_be)
        await self._lanes.run(compiled, cost=len(must_be.definition), group=group)

    def shutdown(self) -> None:
        """Cancel waiting compilations; a running one completes."""
        self._lanes.shutdown()

"""The order of work beside an event loop."""

import asyncio
import contextlib
import threading
import weakref
from functools import partial
from typing import Any

import pytest

from pagedserve.collector import collector_paused
from pagedserve.engine.lanes import SMALL_COST, GrammarLanes, Lanes, input_cost
from pagedserve.errors import EngineDeadError
from pagedserve.sampling_params import SamplingParams
from pagedserve.sampling_params.structured_outputs import StructuredOutputsParams


@pytest.fixture
def lanes() -> Lanes:
    return Lanes("test")


def held(lanes: Lanes, cost: int) -> threading.Event:
    """Work of another group that keeps a lane until the event is set."""
    begun, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        goes_on.wait()

    lanes.submit(wait, cost=cost, group="held")
    begun.wait()
    return goes_on


def test_small_work_passes_large_work(lanes: Lanes) -> None:
    goes_on = held(lanes, SMALL_COST + 1)
    large = lanes.submit(lambda: 1, cost=SMALL_COST + 1, group="a")
    assert lanes.submit(lambda: 2, cost=SMALL_COST, group="b").result() == 2
    assert not large.done()
    goes_on.set()
    assert large.result() == 1


def test_requests_take_turns(lanes: Lanes) -> None:
    order: list[str] = []
    goes_on = held(lanes, 1)
    many = [lanes.submit(partial(order.append, "many"), cost=1, group="many") for _ in range(100)]
    later = [
        lanes.submit(partial(order.append, name), cost=1, group=name) for name in ("b", "c", "d")
    ]
    goes_on.set()
    for future in [*many, *later]:
        future.result()
    assert order[:4] == ["many", "b", "c", "d"]


def test_equal_work_keeps_its_order(lanes: Lanes) -> None:
    order: list[int] = []
    goes_on = held(lanes, 1)
    futures = [
        lanes.submit(partial(order.append, number), cost=10 * (9 - number), group=number)
        for number in range(9)
    ]
    goes_on.set()
    for future in futures:
        future.result()
    assert order == [*range(9)]


def test_a_failure_is_that_of_its_work_alone(lanes: Lanes) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        lanes.submit(fail, cost=1, group=1).result()
    assert lanes.submit(lambda: 3, cost=1, group=1).result() == 3


class Body:
    """What a work was given."""


def test_what_failed_work_had_is_freed_without_a_collection(lanes: Lanes) -> None:
    def refuse(body: Body) -> None:
        raise ValueError(f"no {body}")

    async def ask() -> "weakref.ref[Body]":
        body = Body()
        with contextlib.suppress(ValueError):
            await lanes.run(partial(refuse, body), cost=1, group=1)
        await lanes.run(lambda: None, cost=1, group=1)  # the thread has dropped the first
        return weakref.ref(body)

    with collector_paused():
        assert asyncio.run(ask())() is None


def test_a_panic_of_a_library_is_a_failure_like_others(lanes: Lanes) -> None:
    class PanicException(BaseException):
        pass

    def panic() -> None:
        raise PanicException("index out of bounds")

    with pytest.raises(RuntimeError, match="PanicException in a library: index out of bounds"):
        lanes.submit(panic, cost=1, group=1).result()
    assert lanes.submit(lambda: 3, cost=1, group=1).result() == 3


def test_the_end_cancels_what_waits(lanes: Lanes) -> None:
    goes_on = held(lanes, 1)
    waiting = lanes.submit(lambda: 1, cost=1, group=1)
    lanes.shutdown()
    goes_on.set()
    assert waiting.cancelled()
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        lanes.submit(lambda: 1, cost=1, group=1)


def test_the_end_is_an_error_and_no_cancellation_for_a_task_that_waits(lanes: Lanes) -> None:
    async def test() -> None:
        goes_on = held(lanes, 1)
        waiting = asyncio.create_task(lanes.run(lambda: 1, cost=1, group=1))
        await asyncio.sleep(0)
        lanes.shutdown()
        goes_on.set()
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            await waiting

    asyncio.run(test())


def test_a_grammar_that_is_compiled_costs_nothing() -> None:
    schema = {"enum": ["a" * SMALL_COST]}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    assert input_cost("a prompt", params) == len("a prompt")


class Grammars:
    """Compiles in the order in which it is asked, once ``goes_on`` is set."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.order: list[str] = []

    def knows(self, must_be: StructuredOutputsParams) -> bool:
        return must_be.regex in self.order

    def compile(self, must_be: StructuredOutputsParams) -> None:
        self.begun.set()
        self.goes_on.wait()
        self.order.append(str(must_be.regex))
        assert threading.current_thread().daemon, "the process would wait for it at its end"


def test_requests_take_turns_with_their_grammars() -> None:
    grammars, lanes = Grammars(), GrammarLanes()

    async def ask() -> None:
        def waits(name: str, group: str) -> "asyncio.Task[None]":
            must_be = StructuredOutputsParams(regex=name)
            params = SamplingParams(structured_outputs=must_be)
            wait: Any = lanes.wait
            return asyncio.ensure_future(wait(params, grammars, group))

        first = waits("held", "held")
        await asyncio.to_thread(grammars.begun.wait)
        tasks = [waits(f"many-{number}", "many") for number in range(9)]
        tasks.append(waits("one", "one"))
        left = waits("left", "left")
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        grammars.goes_on.set()
        await asyncio.gather(first, *tasks)

    asyncio.run(ask())
    lanes.shutdown()
    assert grammars.order[:3] == ["held", "many-0", "one"]
    assert "left" not in grammars.order

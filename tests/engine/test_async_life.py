"""``AsyncLLMEngine`` whose event loops, readers and processes come and go."""

import asyncio
import gc
import os
import threading
import time
from typing import Any

import psutil
import pytest

import pagedserve.engine.thread as engine_thread
from pagedserve import AsyncLLMEngine, LoRARequest
from pagedserve.sampling_params import RequestOutputKind
from tests.engine.test_async_engine import PROMPT, params, run, running, tokens_of, until
from tests.support.children import child_says
from tests.support.formula import FormulaModel


async def left_running(engine: AsyncLLMEngine, kind: RequestOutputKind) -> tuple[object, object]:
    """A stream whose request runs, and its reader."""
    given = params(kind, max_tokens=100)
    stream = engine.generate({"prompt_token_ids": PROMPT}, given, "left")
    reader = asyncio.ensure_future(anext(stream))
    if kind is RequestOutputKind.FINAL_ONLY:
        await until(lambda: engine.has_begun("left"))
    else:
        await reader
    return stream, reader


@pytest.mark.parametrize(
    ("kind", "is_collected"),
    [
        (RequestOutputKind.DELTA, True),
        (RequestOutputKind.DELTA, False),
        (RequestOutputKind.FINAL_ONLY, True),
        (RequestOutputKind.FINAL_ONLY, False),
    ],
)
@pytest.mark.filterwarnings(
    # Of asyncio, for such a program: it is not to cost blocks.
    "ignore:coroutine method .* was never awaited:RuntimeWarning",
)
def test_a_stream_of_a_closed_event_loop_ends_its_request(
    formula: FormulaModel,
    kind: RequestOutputKind,
    is_collected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_thread, "_LOOK", 0.0)
    made = [formula.engine()]
    steps = threading.Semaphore(3)
    formula.executor(made[0]).before_sampling = lambda: wait_for_step(steps)
    engine = AsyncLLMEngine(lambda: made[0])
    engine.wait_until_ready()
    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(left_running(engine, kind))
    loop.close()
    if is_collected:
        del stream
        gc.collect()
    steps.release(1000)
    run(until(lambda: not made[0].has_unfinished_requests()))
    assert made[0].stats.num_generation_tokens <= 5
    # The id may be used again, and another event loop is served.
    assert asyncio.run(tokens_of(engine, "left", PROMPT)) == formula.greedy(PROMPT, 12)
    engine.shutdown()
    formula.check_idle(made[0])


def wait_for_step(steps: threading.Semaphore) -> None:
    steps.acquire()


def test_an_engine_serves_one_event_loop_after_the_other(formula: FormulaModel) -> None:
    with AsyncLLMEngine(formula.engine) as engine:
        engine.wait_until_ready()
        for number in range(3):
            name, prompt = str(number % 2), [number + 1]
            assert asyncio.run(tokens_of(engine, name, prompt)) == formula.greedy(prompt, 12)
    engine.shutdown()


def test_an_idle_engine_returns_freed_memory(formula: FormulaModel) -> None:
    process, kib = psutil.Process(), 1 << 10
    pieces = [bytearray(100 * kib) for _ in range(2000)]
    with AsyncLLMEngine(formula.engine) as engine:
        engine.wait_until_ready()
        asyncio.run(tokens_of(engine, "a", PROMPT))
        for _ in range(2):  # other threads may free memory after the engine has become idle
            held, freed = process.memory_info().rss, 50 * kib * len(pieces)
            del pieces[::2]
            deadline = time.monotonic() + 60
            while process.memory_info().rss > held - 0.8 * freed:
                assert time.monotonic() < deadline
                time.sleep(0.1)


def test_a_generator_that_is_never_iterated_costs_nothing(formula: FormulaModel) -> None:
    async def test() -> None:
        async with running(formula) as (engine, behind):
            for _ in range(3):
                engine.generate({"prompt_token_ids": PROMPT}, params(), "same")
            assert await tokens_of(engine, "same", PROMPT) == formula.greedy(PROMPT, 12)
            assert behind.stats.num_prompt_tokens == len(PROMPT)

    run(test())


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_an_id_used_again_gets_no_output_of_the_cancelled_request(
    formula: FormulaModel, kind: RequestOutputKind
) -> None:
    async def read(engine: AsyncLLMEngine, prompt: list[int], num_tokens: int) -> list[int]:
        given = params(kind, max_tokens=num_tokens)
        outputs = engine.generate({"prompt_token_ids": prompt}, given, "same")
        return [token async for output in outputs for token in output.outputs[0].token_ids]

    async def test() -> None:
        async with running(formula) as (engine, behind):
            is_in_step, may_go_on = threading.Event(), threading.Event()

            def hold() -> None:
                is_in_step.set()
                may_go_on.wait()

            formula.executor(behind).before_sampling = hold
            cancelled = asyncio.create_task(read(engine, [9, 9], 1))
            await asyncio.to_thread(is_in_step.wait)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            again = asyncio.create_task(read(engine, PROMPT, 3))
            await until(lambda: "same" in engine._streams)
            may_go_on.set()
            assert await again == formula.greedy(PROMPT, 3)

    run(test())


def test_cancellations_at_any_moment_leave_nothing(formula: FormulaModel) -> None:
    async def test() -> None:
        async with running(formula, num_gpu_blocks=40) as (engine, behind):
            staying = asyncio.create_task(tokens_of(engine, "stays", PROMPT))
            for round_ in range(40):
                names = [f"{round_}-{number}" for number in range(8)]
                tasks = [asyncio.create_task(tokens_of(engine, name, [5, 6])) for name in names]
                for number, task in enumerate(tasks):
                    if number % 2:
                        await asyncio.sleep(0)
                    task.cancel()
                    await engine.abort([names[number], "unknown"])
                await asyncio.gather(*tasks, return_exceptions=True)
            assert await staying == formula.greedy(PROMPT, 12)
            await until(lambda: not behind.has_unfinished_requests())
            assert not engine._streams

    run(test())


def test_a_forked_child_is_told_that_the_engine_is_not_its_own(formula: FormulaModel) -> None:
    async def ask(engine: AsyncLLMEngine) -> list[str]:
        lora = LoRARequest("a", 1, "nowhere")
        asked: list[Any] = [
            anext(engine.generate({"prompt_token_ids": PROMPT}, params(), "child")),
            engine.abort("a"),
            engine.check_health(),
            engine.reset_prefix_cache(),
            engine.do_log_stats(),
            engine.add_lora(lora),
        ]
        found = await asyncio.gather(*asked, return_exceptions=True)
        engine.shutdown()
        return [f"{type(error).__name__}: {error}".split(",")[0] for error in found]

    with AsyncLLMEngine(formula.engine) as engine:
        engine.wait_until_ready()
        assert asyncio.run(tokens_of(engine, "a", PROMPT))
        said = child_says(lambda: set(asyncio.run(ask(engine))))
        error = f"EngineDeadError: the engine belongs to process {os.getpid()}"
        assert said == f"returned {{{error!r}}}"
        assert asyncio.run(tokens_of(engine, "a", PROMPT)) == formula.greedy(PROMPT, 12)

"""``AsyncLLMEngine``: streams in event loops over an engine in a thread."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import pytest

from pagedserve import AsyncLLMEngine, LLMEngine, RequestOutput, SamplingParams
from pagedserve.errors import EngineDeadError, EngineStalledError, RequestError
from pagedserve.sampling_params import RequestOutputKind
from tests.support.formula import FormulaModel

PROMPT = [3, 1, 4]


@asynccontextmanager
async def running(
    formula: FormulaModel, *, stall_timeout: float = 60.0, **options: Any
) -> AsyncIterator[tuple[AsyncLLMEngine, LLMEngine]]:
    """An engine while it runs, and what is behind it; nothing of a request is left at the end."""
    made: list[LLMEngine] = []

    def make() -> LLMEngine:
        made.append(formula.engine(**options))
        return made[0]

    engine = AsyncLLMEngine(make, stall_timeout=stall_timeout)
    engine.wait_until_ready()
    try:
        yield engine, made[0]
        if engine.is_running:
            await until(lambda: not made[0].has_unfinished_requests())
    finally:
        engine.shutdown()
    if not engine.errored:
        formula.check_idle(made[0])


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that must come."""
    while not holds():  # noqa: ASYNC110  # what holds is decided in another thread
        await asyncio.sleep(0.001)


def slow_down(formula: FormulaModel, behind: LLMEngine) -> None:
    """Let a request of many tokens run for seconds, also on a busy machine."""
    formula.executor(behind).before_sampling = partial(time.sleep, 0.02)


def params(kind: RequestOutputKind = RequestOutputKind.DELTA, **given: Any) -> SamplingParams:
    chosen: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "output_kind": kind}
    return SamplingParams(**(chosen | given))


async def tokens_of(engine: AsyncLLMEngine, name: str, prompt: list[int]) -> list[int]:
    tokens: list[int] = []
    async for output in engine.generate({"prompt_token_ids": prompt}, params(), name):
        tokens += output.outputs[0].token_ids
    return tokens


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


@pytest.mark.parametrize("options", [{}, {"num_gpu_blocks": 20}, {"async_scheduling": True}])
def test_streams_bring_the_tokens_of_the_model(
    formula: FormulaModel, options: dict[str, Any]
) -> None:
    async def test() -> None:
        async with running(formula, **options) as (engine, _):
            prompts = [[7 * n + 1, n + 2, 5] for n in range(24)]
            found = await asyncio.gather(
                *(tokens_of(engine, str(n), prompt) for n, prompt in enumerate(prompts))
            )
            assert found == [formula.greedy(prompt, 12) for prompt in prompts]

    run(test())


def test_a_step_wakes_the_event_loop_once(formula: FormulaModel) -> None:
    async def test() -> None:
        async with running(formula) as (engine, behind):
            loop = asyncio.get_running_loop()
            woken: list[threading.Thread] = []
            call = loop.call_soon_threadsafe

            def counted(*given: Any, **options: Any) -> Any:
                if threading.current_thread().name == "pagedserve-engine":
                    woken.append(threading.current_thread())
                return call(*given, **options)

            loop.call_soon_threadsafe = counted  # type: ignore[method-assign,assignment]
            await asyncio.gather(*(tokens_of(engine, str(n), [n + 1]) for n in range(32)))
            assert 12 <= len(woken) <= behind.stats.num_steps

    run(test())


def test_who_does_not_read_gets_all_at_once(formula: FormulaModel) -> None:
    async def test() -> None:
        async with running(formula) as (engine, behind):
            stream = engine.generate({"prompt_token_ids": PROMPT}, params(logprobs=1), "slow")
            first = await anext(stream)
            assert await tokens_of(engine, "quick", [9]) == formula.greedy([9], 12)
            await until(lambda: not behind.has_unfinished_requests())
            # None if the first output came late enough to be the last.
            parts = [first, *[output async for output in stream]]
            assert len(parts) <= 2
            tokens = [token for part in parts for token in part.outputs[0].token_ids]
            assert tokens == formula.greedy(PROMPT, 12)
            rest = parts[-1]
            assert (rest.finished, rest.outputs[0].finish_reason) == (True, "length")
            logprobs = rest.outputs[0].logprobs
            assert logprobs is not None
            pairs = zip(rest.outputs[0].token_ids, logprobs, strict=True)
            assert all(token in entry for token, entry in pairs)

    run(test())


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
def test_whole_outputs(formula: FormulaModel, kind: RequestOutputKind) -> None:
    async def test() -> None:
        async with running(formula) as (engine, _):
            stream = engine.generate({"prompt_token_ids": PROMPT}, params(kind), "whole")
            outputs = [output async for output in stream]
            assert outputs[-1].outputs[0].token_ids == formula.greedy(PROMPT, 12)
            if kind is RequestOutputKind.FINAL_ONLY:
                assert len(outputs) == 1

    run(test())


async def leave_by_closing(engine: AsyncLLMEngine, prompt: list[int]) -> None:
    stream = engine.generate({"prompt_token_ids": prompt}, params(max_tokens=100), "left")
    await anext(stream)
    await stream.aclose()


async def leave_by_cancelling(engine: AsyncLLMEngine, prompt: list[int]) -> None:
    async def read() -> None:
        async for _ in engine.generate(
            {"prompt_token_ids": prompt}, params(max_tokens=100), "left"
        ):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def leave_before_the_first(engine: AsyncLLMEngine, prompt: list[int]) -> None:
    stream = engine.generate({"prompt_token_ids": prompt}, params(max_tokens=100), "left")
    task = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await stream.aclose()


@pytest.mark.parametrize("leave", [leave_by_closing, leave_by_cancelling, leave_before_the_first])
def test_who_leaves_frees_everything_and_disturbs_nobody(
    formula: FormulaModel,
    leave: Callable[[AsyncLLMEngine, list[int]], Coroutine[Any, Any, None]],
) -> None:
    async def test() -> None:
        async with running(formula, num_gpu_blocks=40) as (engine, behind):
            staying = asyncio.create_task(tokens_of(engine, "stays", PROMPT))
            await leave(engine, [5, 6])
            assert await staying == formula.greedy(PROMPT, 12)
            await until(lambda: not behind.has_unfinished_requests())
            assert behind.scheduler.num_free_gpu_blocks == behind.memory.num_gpu_blocks
            # The id may be used again.
            assert await tokens_of(engine, "left", PROMPT) == formula.greedy(PROMPT, 12)

    run(test())


def test_an_abort_brings_a_last_output(formula: FormulaModel) -> None:
    async def test() -> None:
        async with running(formula) as (engine, behind):
            slow_down(formula, behind)
            stream = engine.generate({"prompt_token_ids": PROMPT}, params(max_tokens=100), "named")
            await anext(stream)
            await engine.abort("named")
            outputs = [output async for output in stream]
            assert outputs[-1].outputs[0].finish_reason == "abort"
            await engine.abort(["named", "nobody"])

    run(test())


def test_a_bad_request_is_refused_alone(formula: FormulaModel) -> None:
    async def test() -> None:
        async with running(formula) as (engine, behind):
            slow_down(formula, behind)
            staying = asyncio.create_task(tokens_of(engine, "stays", PROMPT))
            with pytest.raises(RequestError, match="the prompt is empty"):
                await anext(engine.generate({"prompt_token_ids": []}, params(), "empty"))
            bad = params(stop_token_ids=[100_000])
            with pytest.raises(RequestError, match="stop_token_ids"):
                await anext(engine.generate({"prompt_token_ids": PROMPT}, bad, "bad"))
            stream = engine.generate({"prompt_token_ids": PROMPT}, params(max_tokens=50), "twice")
            first = await anext(stream)
            with pytest.raises(RequestError, match="'twice'"):
                await anext(engine.generate({"prompt_token_ids": PROMPT}, params(), "twice"))
            rest = [output async for output in stream]
            assert sum(len(output.outputs[0].token_ids) for output in (first, *rest)) == 50
            assert await staying == formula.greedy(PROMPT, 12)

    run(test())


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"request_id": 7}, "request_id is 7; it must be a string"),
        ({"request_id": ["x"]}, "request_id is .*; it must be a string"),
        ({"sampling_params": {"max_tokens": 2}}, "sampling_params is .*; it must be one Sampling"),
        ({"priority": "high"}, "priority is 'high'; it must be an integer"),
        ({"priority": 2**63}, "priority is 9.*; it must be an integer, of 64 bits"),
    ],
)
def test_arguments_of_another_type_end_no_other_request(
    formula: FormulaModel, given: dict[str, Any], refusal: str
) -> None:
    async def test() -> None:
        async with running(formula) as (engine, _):
            staying = asyncio.create_task(tokens_of(engine, "stays", PROMPT))
            usual: dict[str, Any] = {
                "sampling_params": params(),
                "request_id": "bad",
                "priority": 0,
            }
            with pytest.raises(RequestError, match=refusal):
                await anext(engine.generate({"prompt_token_ids": PROMPT}, **(usual | given)))
            with pytest.raises(RequestError, match="request_id is 5; it must be a string"):
                await engine.abort(5)  # type: ignore[arg-type]
            with pytest.raises(RequestError, match=r"pooling_params is .*; it must be one Pooling"):
                await anext(engine.encode("a", params(), "pooled"))  # type: ignore[arg-type]
            assert await staying == formula.greedy(PROMPT, 12)
            assert await tokens_of(engine, "later", PROMPT) == formula.greedy(PROMPT, 12)

    run(test())


def test_a_step_that_fails_once_changes_no_token(formula: FormulaModel) -> None:
    async def test() -> None:
        async with running(formula) as (engine, behind):
            failures = iter([1, 0, 0, 1, 1])
            executor = formula.executor(behind)
            executor.before_sampling = lambda: fail() if next(failures, 0) else None
            found = await asyncio.gather(*(tokens_of(engine, str(n), [n + 1]) for n in range(4)))
            assert found == [formula.greedy([n + 1], 12) for n in range(4)]
            await engine.check_health()

    run(test())


def wait_for(event: threading.Event) -> None:
    event.wait()


def fail() -> None:
    raise ValueError("the model fails")


def test_a_step_that_always_fails_ends_its_requests_and_not_the_engine(
    formula: FormulaModel,
) -> None:
    async def test() -> None:
        async with running(formula) as (engine, behind):
            executor = formula.executor(behind)
            executor.before_sampling = fail
            outputs: list[RequestOutput] = []
            async for output in engine.generate({"prompt_token_ids": PROMPT}, params(), "lost"):
                outputs.append(output)  # noqa: PERF401  # the last is asked about below
            (completion,) = outputs[-1].outputs
            assert completion.finish_reason == "error"
            assert "ValueError" in str(completion.stop_reason)
            executor.before_sampling = lambda: None
            assert await tokens_of(engine, "later", PROMPT) == formula.greedy(PROMPT, 12)
            assert engine.is_running

    run(test())


def test_every_stream_learns_of_the_end_of_the_engine(formula: FormulaModel) -> None:
    def die() -> None:
        raise SystemExit("unusable")

    async def test() -> None:
        async with running(formula) as (engine, behind):
            formula.executor(behind).before_sampling = die
            streams = [
                engine.generate({"prompt_token_ids": PROMPT}, params(), str(n)) for n in range(3)
            ]
            ends = await asyncio.gather(*map(anext, streams), return_exceptions=True)
            assert [type(end) for end in ends] == [EngineDeadError] * 3
            assert (engine.is_running, engine.errored) == (False, True)
            with pytest.raises(EngineDeadError, match="SystemExit"):
                await engine.check_health()
            with pytest.raises(EngineDeadError):
                await anext(engine.generate({"prompt_token_ids": PROMPT}, params(), "later"))

    run(test())


def test_health_is_progress(formula: FormulaModel) -> None:
    async def test() -> None:
        async with running(formula, stall_timeout=0.05) as (engine, behind):
            goes_on = threading.Event()
            await asyncio.sleep(0.1)
            await engine.check_health()  # nothing waits
            formula.executor(behind).before_sampling = partial(wait_for, goes_on)
            task = asyncio.create_task(tokens_of(engine, "hangs", PROMPT))
            await until(lambda: engine.snapshot().seconds_without_progress > 0.05)
            with pytest.raises(EngineStalledError, match="no step has ended"):
                await engine.check_health()
            goes_on.set()
            assert await task == formula.greedy(PROMPT, 12)
            await engine.check_health()

    run(test())


def test_shutdown_ends_streams(formula: FormulaModel) -> None:
    async def test() -> None:
        async with running(formula) as (engine, behind):
            slow_down(formula, behind)
            stream = engine.generate({"prompt_token_ids": PROMPT}, params(max_tokens=100), "runs")
            await anext(stream)
            await asyncio.get_running_loop().run_in_executor(None, engine.shutdown)
            outputs = [output async for output in stream]
            assert outputs[-1].outputs[0].finish_reason == "abort"
            assert (engine.is_running, engine.errored) == (False, False)
            with pytest.raises(EngineDeadError, match="shut down"):
                await anext(engine.generate({"prompt_token_ids": PROMPT}, params(), "later"))

    run(test())


def test_event_loops_in_several_threads_share_an_engine(formula: FormulaModel) -> None:
    found: dict[int, list[int]] = {}

    def use(engine: AsyncLLMEngine, number: int) -> None:
        found[number] = asyncio.run(tokens_of(engine, str(number), [number]))

    engine = AsyncLLMEngine(partial(formula.engine))
    threads = [threading.Thread(target=use, args=(engine, n)) for n in range(1, 5)]
    engine.wait_until_ready()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.shutdown()
    assert found == {n: formula.greedy([n], 12) for n in range(1, 5)}


def test_a_model_that_cannot_be_made_is_said_at_once() -> None:
    def make() -> LLMEngine:
        raise RequestError("no such model")

    engine = AsyncLLMEngine(make)
    with pytest.raises(RequestError, match="no such model"):
        engine.wait_until_ready()
    assert not engine.is_running


def test_neutral_arguments_of_vllm_have_no_effect(formula: FormulaModel) -> None:
    async def test() -> None:
        async with running(formula, enable_prefix_caching=True) as (engine, behind):
            assert engine.engine is behind
            engine.start_background_loop()
            neutral: dict[str, Any] = {"data_parallel_rank": None, "prompt_text": None}
            async for output in engine.generate(PROMPT, params(), "a", **neutral):
                assert output.outputs
            with pytest.raises(RequestError, match="not supported yet: data_parallel_rank=1"):
                await anext(engine.generate(PROMPT, params(), "a", data_parallel_rank=cast(Any, 1)))
            await engine.abort("a", internal=False)
            assert await engine.reset_prefix_cache(None)
            assert behind.reset_prefix_cache(True, False)
            assert not await engine.is_tracing_enabled()
            assert not await engine.is_sleeping()
            engine.shutdown(timeout=1)

    run(test())


def test_the_prefix_cache_is_reset_between_steps(formula: FormulaModel) -> None:
    async def test() -> None:
        async with running(formula, enable_prefix_caching=True) as (engine, behind):
            for name in "ab":
                assert await tokens_of(engine, name, list(range(20)))
            assert behind.scheduler.num_cached_tokens > 0
            assert await engine.reset_prefix_cache()

    run(test())

"""Adapters of many requests at once, in an engine whose adapters shift a formula."""

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedserve import (
    AsyncLLMEngine,
    ConfigError,
    EngineArgs,
    EngineDeadError,
    LoRARequest,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from pagedserve.models.load.hub import HubOptions
from pagedserve.models.load.sources import resolve_adapter
from pagedserve.regular_files import read_bytes
from tests.support.formula import FormulaModel, save_shift
from tests.support.hubs import Repository, hub_of, use_hugging_face

PARAMS = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture
def adapters(tmp_path: Path) -> list[LoRARequest]:
    return [LoRARequest(f"a{n}", n, str(save_shift(tmp_path / str(n), n))) for n in range(1, 9)]


def shift_of(adapter: LoRARequest | None) -> int:
    return 0 if adapter is None else adapter.lora_int_id


@pytest.mark.parametrize("max_loras", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_gpu_blocks": 24}, {"async_scheduling": True}, {"enable_chunked_prefill": True}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_each_request_has_its_own(
    formula: FormulaModel, adapters: list[LoRARequest], options: dict[str, Any], max_loras: int
) -> None:
    engine = formula.engine(enable_lora=True, max_loras=max_loras, max_lora_rank=1, **options)
    wanted = {str(n): random.Random(n).choice([None, *adapters]) for n in range(40)}
    for name, adapter in wanted.items():
        engine.add_request(name, [int(name) + 1, 7, 3], PARAMS, lora_request=adapter)
    found = formula.finish(engine)
    for name, adapter in wanted.items():
        tokens = formula.greedy([int(name) + 1, 7, 3], 12, shift_of(adapter))
        assert found[name].outputs[0].token_ids == tokens
    formula.check_idle(engine)


def test_an_adapter_comes_from_a_hub_once(
    formula: FormulaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in save_shift(tmp_path / "5", 5).iterdir()}
    others = {"README.md": b"x", "training_args.bin": b"x", "tokenizer.json": b"{}"}
    repository, empty = Repository({"main": files | others}), Repository({"main": others})
    engine = formula.engine(enable_lora=True, max_loras=1, max_lora_rank=1)
    with hub_of({"someone/five": repository, "someone/none": empty}) as url:
        use_hugging_face(url, tmp_path / "hub", monkeypatch)
        for name in "ab":
            five = LoRARequest("five", 5, "someone/five")
            engine.add_request(name, [1, 7, 3], PARAMS, lora_request=five)
        with pytest.raises(RequestError, match=r"'someone/none': .* no adapter_config\.json"):
            engine.add_request("c", [1], PARAMS, lora_request=LoRARequest("n", 6, "someone/none"))
        with pytest.raises(RequestError, match="adapter 'someone/no' is not a path, not in the hu"):
            engine.add_request("d", [1], PARAMS, lora_request=LoRARequest("n", 6, "someone/no"))
    assert sorted(repository.fetched) == sorted(files)
    found = formula.finish(engine)
    for name in "ab":
        assert found[name].outputs[0].token_ids == formula.greedy([1, 7, 3], 12, 5)


def test_a_step_that_fails_loads_its_adapters_again(
    formula: FormulaModel, adapters: list[LoRARequest]
) -> None:
    engine = formula.engine(enable_lora=True, max_loras=2, max_lora_rank=1)
    executor, num_calls = formula.executor(engine), 0
    launch = executor.launch

    def failing(*given: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 3 == 1:
            raise MemoryError("of the device")
        return launch(*given)

    executor.launch = failing  # type: ignore[method-assign,assignment]
    for n, adapter in enumerate(adapters):
        engine.add_request(str(n), [n + 1, 7, 3], PARAMS, lora_request=adapter)
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        try:
            found |= {output.request_id: output for output in engine.step()}
        except MemoryError:
            continue
    for n, adapter in enumerate(adapters):
        tokens = formula.greedy([n + 1, 7, 3], 12, shift_of(adapter))
        assert found[str(n)].outputs[0].token_ids == tokens
    assert num_calls > 12


def test_a_request_that_ends_lets_its_adapter_go(
    formula: FormulaModel, adapters: list[LoRARequest]
) -> None:
    engine = formula.engine(enable_lora=True, max_loras=1, max_lora_rank=1)
    host = formula.executor(engine)._adapters
    for adapter in adapters[:4]:
        engine.add_request(adapter.name, [1, 7, 3], PARAMS, lora_request=adapter)
    assert len(host._held) == 4, "each is kept by its request, though there is room for one"
    engine.abort_request("a2")
    assert len(host._held) == 3
    formula.finish(engine)
    assert len(host._held) == 1


def run_async(formula: FormulaModel, test: Callable[[AsyncLLMEngine], Any], **options: Any) -> None:
    """Run a test on an engine for event loops; nothing of a request is left at its end."""
    made = formula.engine(enable_lora=True, max_lora_rank=1, **options)
    engine = AsyncLLMEngine(lambda: made)
    engine.wait_until_ready()
    try:
        asyncio.run(asyncio.wait_for(test(engine), 60))
    finally:
        engine.shutdown()
    formula.check_idle(made)


async def tokens_of(
    engine: AsyncLLMEngine, name: str, prompt: Sequence[int], adapter: LoRARequest | None
) -> list[int]:
    tokens: list[int] = []
    async for output in engine.generate({"prompt_token_ids": prompt}, PARAMS, name, adapter):
        tokens = output.outputs[0].token_ids
    return tokens


@dataclass(frozen=True)
class SlowFiles:
    """The files of an adapter, which are read when a test lets them be."""

    adapter: LoRARequest
    is_reading: threading.Event
    may_go_on: threading.Event


@pytest.fixture
def slow_files(adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch) -> SlowFiles:
    slow = SlowFiles(adapters[0], threading.Event(), threading.Event())

    def reading(path: Path, max_bytes: int) -> bytes:
        if str(path).startswith(slow.adapter.path):
            slow.is_reading.set()
            assert slow.may_go_on.wait(30)
        return read_bytes(path, max_bytes)

    monkeypatch.setattr("pagedserve.lora.adapter.read_bytes", reading)
    return slow


def test_who_leaves_while_an_adapter_is_read_disturbs_nobody(
    formula: FormulaModel, adapters: list[LoRARequest], slow_files: SlowFiles
) -> None:
    """Nor does who names no adapter wait for it."""
    slow = slow_files.adapter

    async def test(engine: AsyncLLMEngine) -> None:
        left = asyncio.create_task(tokens_of(engine, "left", [1, 7, 3], slow))
        await asyncio.to_thread(slow_files.is_reading.wait)
        assert await tokens_of(engine, "plain", [2, 7, 3], None) == formula.greedy([2, 7, 3], 12)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        slow_files.may_go_on.set()
        other = adapters[1]
        expected = formula.greedy([3, 7, 3], 12, shift_of(other))
        assert await tokens_of(engine, "other", [3, 7, 3], other) == expected
        expected = formula.greedy([4, 7, 3], 12, shift_of(slow))
        assert await tokens_of(engine, "left", [4, 7, 3], slow) == expected

    run_async(formula, test)


def test_the_download_of_an_adapter_delays_no_request_with_a_known_one(
    formula: FormulaModel, adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, known = adapters[:2]
    is_loading, is_loaded = threading.Event(), threading.Event()

    def resolve(path: str, hub: HubOptions) -> Path:
        if path == remote.path:
            is_loading.set()
            assert is_loaded.wait(30)
        return resolve_adapter(path, hub)

    monkeypatch.setattr("pagedserve.engine.adapters.resolve_adapter", resolve)

    async def test(engine: AsyncLLMEngine) -> None:
        await engine.add_lora(known)
        waiting = asyncio.create_task(tokens_of(engine, "remote", [1, 7, 3], remote))
        await asyncio.to_thread(is_loading.wait)
        try:
            answer = asyncio.wait_for(tokens_of(engine, "known", [2, 7, 3], known), 20)
            assert await answer == formula.greedy([2, 7, 3], 12, shift_of(known))
        finally:
            is_loaded.set()
        assert await waiting == formula.greedy([1, 7, 3], 12, shift_of(remote))

    run_async(formula, test, max_loras=2)


def test_an_abort_while_an_adapter_is_read_ends_that_request_alone(
    formula: FormulaModel, slow_files: SlowFiles
) -> None:
    slow = slow_files.adapter

    async def test(engine: AsyncLLMEngine) -> None:
        both = [
            asyncio.create_task(tokens_of(engine, name, [1, 7, 3], slow))
            for name in ("aborted", "stays")
        ]
        await asyncio.to_thread(slow_files.is_reading.wait)
        await engine.abort("aborted")
        slow_files.may_go_on.set()
        assert await both[0] == []
        assert await both[1] == formula.greedy([1, 7, 3], 12, shift_of(slow))

    run_async(formula, test)


def test_a_removal_while_an_adapter_is_read_does_not_block_the_event_loop(
    formula: FormulaModel, adapters: list[LoRARequest], slow_files: SlowFiles
) -> None:
    other = adapters[1]

    async def test(engine: AsyncLLMEngine) -> None:
        await engine.add_lora(other)
        reading = asyncio.create_task(engine.add_lora(slow_files.adapter))
        await asyncio.to_thread(slow_files.is_reading.wait)
        removing = asyncio.create_task(engine.remove_lora(other.lora_int_id))
        await asyncio.sleep(0)
        slow_files.may_go_on.set()
        assert await removing
        assert await reading
        assert await engine.list_loras() == {slow_files.adapter.lora_int_id}

    run_async(formula, test)


def test_a_shutdown_while_an_adapter_is_read_waits_for_no_file(
    formula: FormulaModel, adapters: list[LoRARequest], slow_files: SlowFiles
) -> None:
    async def test(engine: AsyncLLMEngine) -> None:
        reading = asyncio.create_task(tokens_of(engine, "reading", [1, 7, 3], slow_files.adapter))
        await asyncio.to_thread(slow_files.is_reading.wait)
        waiting = asyncio.create_task(tokens_of(engine, "waiting", [1, 7, 3], adapters[1]))
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            await waiting
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            await engine.add_lora(adapters[2])
        assert not reading.done()
        slow_files.may_go_on.set()
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            await reading

    run_async(formula, test)


# Far more steps than any of the requests below takes, and than a batch of them takes its turn in.
PATIENCE = 300


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(3, 9), min_size=2, max_size=9), is_chunked=st.booleans())
def test_an_adapter_gets_its_turn_though_others_are_always_wanted(
    formula: FormulaModel, adapters: list[LoRARequest], lengths: list[int], *, is_chunked: bool
) -> None:
    """The next request of each of two adapters comes before the last one ends, for two slots."""
    options = {"max_num_seqs": 4, "enable_chunked_prefill": is_chunked}
    engine = formula.engine(enable_lora=True, max_loras=2, max_lora_rank=1, **options)
    lengths_of_all, numbers = itertools.cycle(lengths), itertools.count()
    left: dict[str, tuple[LoRARequest, int]] = {}
    for step in range(PATIENCE):
        if step == 1:  # both have their slots
            engine.add_request("rare", [9, 7, 3], PARAMS, lora_request=adapters[2])
        for adapter in adapters[:2]:
            if not any(of is adapter and num_tokens > 1 for of, num_tokens in left.values()):
                name, num_tokens = str(next(numbers)), next(lengths_of_all)
                params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
                engine.add_request(name, [1, 7, 3], params, lora_request=adapter)
                left[name] = (adapter, num_tokens)
        for output in engine.step():
            token_ids = output.outputs[0].token_ids
            if output.request_id == "rare":
                if output.finished:
                    assert token_ids == formula.greedy([9, 7, 3], 12, shift_of(adapters[2]))
                    return
            elif output.finished:
                del left[output.request_id]
            else:
                adapter, num_tokens = left[output.request_id]
                left[output.request_id] = (adapter, num_tokens - 1)
    pytest.fail(f"the third adapter did not get a slot in {PATIENCE} steps")


def test_an_adapter_that_is_removed_ends_with_its_requests(
    formula: FormulaModel, adapters: list[LoRARequest]
) -> None:
    adapter = adapters[4]

    async def test(engine: AsyncLLMEngine) -> None:
        assert await engine.add_lora(adapter)
        stream = engine.generate({"prompt_token_ids": [1, 7, 3]}, PARAMS, "runs", adapter)
        last = await anext(stream)
        assert await engine.remove_lora(adapter.lora_int_id)
        assert await engine.list_loras() == set()
        async for output in stream:  # none if the first was the last
            last = output
        assert last.outputs[0].token_ids == formula.greedy([1, 7, 3], 12, shift_of(adapter))

    run_async(formula, test)


def test_options_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="max_cpu_loras is 2; it must be at least max_loras, 3"):
        EngineArgs("a", enable_lora=True, max_loras=3, max_cpu_loras=2)
    with pytest.raises(ConfigError, match="max_loras is 0; it must be at least 1 with enable_lora"):
        EngineArgs("a", enable_lora=True, max_loras=0)

"""Calls into one ``LLM`` from threads, callbacks and forked children, and after its shutdown."""

import copy
import gc
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from pagedserve import (
    LLM,
    ConcurrentCallError,
    EngineDeadError,
    RequestError,
    SamplingParams,
    TokensPrompt,
)
from pagedserve.config.precision import Backend
from pagedserve.executor.protocol import StepInput
from tests.support.children import child_says
from tests.support.tiny import save_tiny_llama

PROMPTS = [TokensPrompt(prompt_token_ids=[number, 2 * number]) for number in range(3, 7)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def load(directory: Path, backend: Backend = "auto") -> LLM:
    return LLM(str(directory), backend=backend, num_gpu_blocks=64, use_tqdm_on_load=False)


@pytest.fixture(scope="module")
def shared(directory: Path) -> LLM:
    return load(directory)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """An LLM that a test leaves usable, without requests."""
    yield shared
    engine = shared.llm_engine
    assert engine.get_num_unfinished_requests() == 0
    assert engine.scheduler.num_free_gpu_blocks == engine.memory.num_gpu_blocks
    assert len(tokens(shared)) == len(PROMPTS)


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def in_thread(call: Callable[[], Any]) -> Any:
    """What a call returns or raises in a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001  # it is what is asked about
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def directly(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:  # noqa: BLE001  # it is what is asked about
        return error


def with_processor(processor: Callable[..., Any], **given: Any) -> SamplingParams:
    chosen: dict[str, Any] = {"temperature": 0, "max_tokens": 3} | given
    return SamplingParams(**chosen, logits_processors=[processor])


def test_calls_of_several_threads_are_served_one_after_the_other(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, running, computing = llm.llm_engine.model_executor, [0], set()
    launch = executor.launch

    def watched(step: StepInput) -> Any:
        running[0] += 1
        assert running == [1]
        computing.add(threading.get_ident())
        launched = launch(step)
        running[0] -= 1
        return launched

    wanted = tokens(llm)
    monkeypatch.setattr(executor, "launch", watched)
    found: list[Any] = []

    def call() -> None:
        found.extend(tokens(llm) for _ in range(5))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        assert tokens(llm) == wanted
    for thread in threads:
        thread.join()
    assert found == [wanted] * 20
    # The main thread, and one that computes for all others: each has a team of OpenMP threads.
    assert len(computing) == 2
    assert threading.get_ident() in computing


def test_calls_get_their_turn_in_the_order_in_which_they_came(llm: LLM) -> None:
    order: list[int] = []
    goes_on = threading.Event()

    def wait(_: object, logits: Any) -> Any:
        goes_on.wait()
        return logits

    def call(number: int, params: SamplingParams) -> None:
        llm.generate(PROMPTS[0], params, use_tqdm=False)
        order.append(number)

    threads = []
    for number in range(6):
        params = with_processor(wait) if number == 0 else GREEDY
        threads.append(threading.Thread(target=call, args=(number, params)))
        threads[-1].start()
        while len(llm.calls) <= number:
            time.sleep(0.001)
    goes_on.set()
    call(6, GREEDY)  # the main thread's comes last as well
    for thread in threads:
        thread.join()
    assert order == list(range(7))


@pytest.mark.parametrize("run", [directly, in_thread])
@pytest.mark.parametrize(
    "call",
    [
        tokens,
        LLM.shutdown,
        LLM.reset_prefix_cache,
        lambda llm: llm.llm_engine.step(),
        lambda llm: llm.llm_engine.abort_request("generate-0-0"),
        lambda llm: llm.llm_engine.add_request("a", "b"),
    ],
)
def test_a_call_from_within_a_call_is_refused(
    llm: LLM, run: Callable[..., Any], call: Callable[[LLM], Any]
) -> None:
    errors: list[Any] = []

    def processor(_: object, logits: Any) -> Any:
        errors.append(directly(lambda: call(llm)))
        return logits

    wanted = tokens(llm, SamplingParams(temperature=0, max_tokens=3))
    assert run(lambda: tokens(llm, with_processor(processor))) == wanted
    assert {type(error) for error in errors} == {ConcurrentCallError}
    assert "from within a call" in str(errors[0])


@pytest.mark.parametrize("run", [directly, in_thread])
def test_what_a_callback_raises_reaches_its_own_caller(llm: LLM, run: Callable[..., Any]) -> None:
    def failing(*_: object, **__: object) -> Any:
        raise ZeroDivisionError("of the user")

    def interrupting(_: object, __: object) -> Any:
        raise KeyboardInterrupt

    assert isinstance(run(lambda: llm.generate([], GREEDY)), RequestError)
    assert isinstance(
        run(lambda: llm.generate(PROMPTS, GREEDY, use_tqdm=failing)), ZeroDivisionError
    )
    assert isinstance(run(lambda: tokens(llm, with_processor(interrupting))), KeyboardInterrupt)
    [output] = run(lambda: llm.generate(PROMPTS[0], with_processor(failing), use_tqdm=False))
    assert output.outputs[0].finish_reason == "error"
    assert "of the user" in str(output.outputs[0].stop_reason)


def test_another_thread_in_the_engine_is_refused_and_loses_nothing(llm: LLM) -> None:
    errors = []

    def processor(_: object, logits: Any) -> Any:
        errors.append(in_thread(llm.llm_engine.step))
        return logits

    wanted = tokens(llm, SamplingParams(temperature=0, max_tokens=3))
    assert tokens(llm, with_processor(processor)) == wanted
    assert {type(error) for error in errors} == {ConcurrentCallError}
    assert "by another thread" in str(errors[0])


def test_outputs_that_another_caller_took_end_the_call(llm: LLM) -> None:
    def bar(**_: object) -> Any:
        llm.llm_engine.abort_request([request.request_id for request in llm.llm_engine._requests])
        return tqdm(disable=True)

    with pytest.raises(ConcurrentCallError, match="outputs of 4 requests went to another caller"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=bar)


def test_requests_of_another_caller_are_not_lost(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("own", PROMPTS[0], GREEDY)
    with pytest.raises(ConcurrentCallError, match="1 unfinished requests of add_request"):
        tokens(llm)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.request_id for output in outputs if output.finished] == ["own"]


# A signal that another thread takes, or that comes just before the wait, does not wake the wait up.
@pytest.mark.parametrize("wakes_main", [True, False])
def test_ctrl_c_ends_a_call_that_waits_for_its_turn(llm: LLM, *, wakes_main: bool) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def wait(_: object, logits: Any) -> Any:
        begun.set()
        goes_on.wait()
        return logits

    def interrupt() -> None:
        while len(llm.calls) < 2:
            time.sleep(0.001)
        thread = threading.main_thread() if wakes_main else threading.current_thread()
        assert thread.ident is not None
        signal.pthread_kill(thread.ident, signal.SIGINT)

    other = threading.Thread(target=tokens, args=(llm, with_processor(wait)))
    other.start()
    begun.wait()  # or the main thread's call could be the first, which waits for nothing
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            tokens(llm)
        assert len(llm.calls) == 1
    finally:
        goes_on.set()
        interrupting.join()
        other.join()


def test_an_llm_that_a_thread_made_serves_the_main_thread(directory: Path, llm: LLM) -> None:
    made: LLM = in_thread(lambda: load(directory))
    assert tokens(made) == tokens(llm) == in_thread(lambda: tokens(made))


def test_an_llm_without_references_ends_with_its_call_and_its_thread(directory: Path) -> None:
    made = [load(directory)]
    wanted = tokens(made[0])
    alive, thread = weakref.ref(made[0]), in_thread(lambda: calls_thread(made[0]))
    begun, goes_on = threading.Event(), threading.Event()

    def wait(_: object, logits: Any) -> Any:
        begun.set()
        goes_on.wait()
        return logits

    found: list[Any] = []
    params = with_processor(wait, max_tokens=12, ignore_eos=True)
    caller = threading.Thread(target=lambda: found.append(tokens(made.pop(), params)))
    caller.start()
    begun.wait()
    gc.collect()
    assert made == []
    goes_on.set()
    caller.join()
    gc.collect()
    assert found == [wanted]
    assert alive() is None
    thread.join()


def calls_thread(llm: LLM) -> threading.Thread:
    """The thread that runs the calls of all but the main thread."""
    found: list[threading.Thread] = []

    def note(_: object, logits: Any) -> Any:
        found.append(threading.current_thread())
        return logits

    tokens(llm, with_processor(note))
    return found[0]


@pytest.mark.parametrize(
    "call",
    [
        tokens,
        lambda llm: llm.chat(
            [{"role": "user", "content": "a"}],
            chat_template="{{ 3 }}",
        ),
        LLM.reset_prefix_cache,
        lambda llm: llm.llm_engine.step(),
        lambda llm: llm.llm_engine.add_request("a", PROMPTS[0]),
        lambda llm: llm.llm_engine.abort_request("a"),
        lambda llm: llm.llm_engine.restart(),
    ],
)
def test_a_forked_child_is_told_that_the_engine_is_not_its_own(
    llm: LLM, call: Callable[[LLM], Any]
) -> None:
    assert tokens(llm)
    said = child_says(lambda: call(llm))
    assert said.startswith(f"EngineDeadError: the engine belongs to process {os.getpid()}, and")
    assert "spawn" in said


def test_a_forked_child_that_shuts_down_disturbs_nothing(llm: LLM) -> None:
    def shut_down() -> None:
        llm.shutdown()
        llm.llm_engine.shutdown()

    assert child_says(shut_down) == "returned None"


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_shutdown_gives_the_memory_back_and_may_be_repeated(
    directory: Path, backend: Backend
) -> None:
    with load(directory, backend) as llm:
        assert tokens(llm)
        executor: Any = llm.llm_engine.model_executor
        if backend == "torch":
            held = executor.worker.loaded.model, executor.worker.cache
        else:
            held = executor.loaded.model, executor._pools
        model, cache = map(weakref.ref, held)
        del held
    assert (model(), cache()) == (None, None)
    llm.shutdown()
    llm.llm_engine.shutdown()
    for call in (
        lambda: tokens(llm),
        lambda: in_thread(lambda: tokens(llm)),
        llm.reset_prefix_cache,
        llm.llm_engine.step,
        lambda: llm.llm_engine.add_request("a", PROMPTS[0]),
    ):
        error = directly(call)
        assert isinstance(error, EngineDeadError)
        assert str(error) == "the engine was shut down; make another"


def test_shutdown_waits_for_the_calls_before_it_and_refuses_those_behind(directory: Path) -> None:
    llm = load(directory)
    wanted = tokens(llm)
    goes_on = threading.Event()

    def wait(_: object, logits: Any) -> Any:
        goes_on.wait()
        return logits

    params = with_processor(wait, max_tokens=12, ignore_eos=True)
    found: list[Any] = []
    calls = [lambda: tokens(llm, params), llm.shutdown, llm.shutdown, lambda: tokens(llm)]
    threads = []
    for number, call in enumerate(calls):
        threads.append(threading.Thread(target=lambda call=call: found.append(directly(call))))
        threads[-1].start()
        while len(llm.calls) <= number:
            time.sleep(0.001)
    goes_on.set()
    for thread in threads:
        thread.join()
    assert wanted in found
    assert found.count(None) == 2
    [error] = [item for item in found if isinstance(item, Exception)]
    assert isinstance(error, EngineDeadError)


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_an_llm_is_neither_pickled_nor_copied(llm: LLM, take: Callable[[Any], Any]) -> None:
    for owner in (llm, llm.llm_engine):
        with pytest.raises(TypeError, match=r"cannot be pickled or copied.*process that uses it"):
            take(owner)


def test_a_forked_child_that_makes_another_is_told_why_it_cannot(directory: Path) -> None:
    llm = load(directory, "torch")
    assert tokens(llm)

    def make(num_threads: int) -> Any:
        torch.set_num_threads(num_threads)
        return tokens(load(directory, "torch"))

    said = child_says(lambda: make(2))
    assert said.startswith(f"EngineDeadError: this process was forked from process {os.getpid()},")
    assert "OpenMP" in said
    assert child_says(lambda: make(1)) == f"returned {tokens(llm)}"


def test_a_forked_child_makes_another_without_torch(directory: Path) -> None:
    llm = load(directory, "native")
    assert tokens(llm)
    said = child_says(lambda: tokens(load(directory, "native")))
    assert said == f"returned {tokens(llm)}"

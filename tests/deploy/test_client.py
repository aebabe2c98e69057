"""``ReplicatedEngine`` without a cluster: state requests, aborts, and requests on replicas."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pagedserve import EngineArgs, RequestOutputKind, SamplingParams
from pagedserve.errors import EngineDeadError, RequestError
from pagedserve.lora.request import LoRARequest
from pagedserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tests.support.formula import FormulaModel

PROMPT: Any = {"prompt_token_ids": [1, 2, 3]}

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"  # of pydantic, about Ray Serve
)


def test_health_checks_of_one_moment_start_one_watch() -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    from pagedserve.deploy.client import ReplicatedEngine

    def results(**options: object) -> list[object]:
        del options
        time.sleep(0.2)
        return []

    def broadcast(method: str) -> SimpleNamespace:
        assert method == "state"
        return SimpleNamespace(results=results)

    deployed: Any = SimpleNamespace(handle=SimpleNamespace(broadcast=broadcast))

    async def check() -> list[str]:
        checks = [asyncio.ensure_future(engine.check_health()) for _ in range(3)]
        await asyncio.sleep(0.05)
        engine.snapshot()
        for found in await asyncio.gather(*checks, return_exceptions=True):
            assert isinstance(found, EngineDeadError), "no replica has answered"
        return [task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}]

    engine = ReplicatedEngine(lambda: deployed, lambda _: None)
    engine.wait_until_ready()
    assert len(asyncio.run(check())) == 1
    engine.shutdown()


class Said:
    """Outputs of a replica as Ray Serve returns them."""

    def __init__(self, outputs: AsyncGenerator[RequestOutput | None, None]) -> None:
        self._outputs = outputs

    async def __anext__(self) -> RequestOutput | None:
        return await anext(self._outputs)

    def cancel(self) -> None:
        pass


class Replica:
    """A replica of one request for three choices, which ends the first by itself."""

    def __init__(self, *, answers_abort: bool) -> None:
        self._answers_abort = answers_abort
        self._aborted = asyncio.Event()

    def options(self, **options: object) -> Any:
        del options
        return SimpleNamespace(generate=SimpleNamespace(remote=self._said))

    def broadcast(self, method: str, request_id: str) -> Any:
        assert (method, request_id) == ("abort", "a")
        loop = asyncio.get_running_loop()

        def results(**options: object) -> list[object]:  # the call is sent here, as by Ray Serve
            del options
            if self._answers_abort:
                loop.call_soon_threadsafe(self._aborted.set)
            return []

        return SimpleNamespace(results=results)

    def _said(self, request: object) -> Any:
        del request
        return Said(self._outputs())

    async def _outputs(self) -> AsyncGenerator[RequestOutput | None, None]:
        yield None
        yield output_of((0, "one", "stop"), (1, "two", None))
        await self._aborted.wait()
        yield output_of((1, "!", "abort"), (2, "three", "abort"), finished=True)


def output_of(*choices: tuple[int, str, Any], finished: bool = False) -> RequestOutput:
    return RequestOutput(
        request_id="a",
        prompt=None,
        prompt_token_ids=[5],
        prompt_logprobs=None,
        outputs=[
            CompletionOutput(index=index, text=text, token_ids=[7], finish_reason=reason)
            for index, text, reason in choices
        ],
        finished=finished,
        metrics=RequestMetrics(0.0),
    )


@pytest.mark.parametrize("answers_abort", [True, False])
def test_an_abort_ends_each_choice_once(
    monkeypatch: pytest.MonkeyPatch, *, answers_abort: bool
) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    from pagedserve.deploy import client

    if not answers_abort:
        monkeypatch.setattr(client, "_ABORT_PATIENCE", 0.0)

    async def read() -> list[tuple[int, str]]:
        deployed: Any = SimpleNamespace(handle=Replica(answers_abort=answers_abort))
        engine = client.ReplicatedEngine(lambda: deployed, lambda _: None)
        engine.wait_until_ready()
        params = SamplingParams(n=3, output_kind=RequestOutputKind.DELTA)
        texts: dict[int, str] = {}
        ends = []
        async for output in engine.generate({"prompt_token_ids": [5]}, params, "a"):
            for choice in output.outputs:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                if choice.finish_reason is not None:
                    ends.append((choice.index, str(choice.finish_reason)))
            await engine.abort("a")
        engine.shutdown()
        expected = ["one", "two!", "three"] if answers_abort else ["one", "two", ""]
        assert [texts[index] for index in range(3)] == expected
        return ends

    assert asyncio.run(read()) == [(0, "stop"), (1, "abort"), (2, "abort")]


class Handle:
    """A handle of replicas in this process, which take requests in turn.

    Attributes:
        requests: Requests so far.
        num_given: Tokens after which a replica dies, by the number of the request.
        is_connected: Whether the requests of such a replica end.
    """

    def __init__(self, *replicas: Any) -> None:
        self._replicas = replicas
        self.requests: list[Any] = []
        self.num_given: dict[int, int] = {}
        self.is_connected = True
        self._left: list[object] = []

    def options(self, **options: object) -> Any:
        del options
        return SimpleNamespace(generate=SimpleNamespace(remote=self._said))

    def _said(self, request: Any) -> Any:
        number = len(self.requests)
        self.requests.append(request)
        outputs = self._replicas[number % len(self._replicas)].generate(request)
        num_given = self.num_given.get(number)
        return Said(outputs if num_given is None else self._until_death(outputs, num_given))

    async def _until_death(
        self, outputs: AsyncGenerator[RequestOutput | None, None], num_left: int
    ) -> AsyncGenerator[RequestOutput | None, None]:
        from ray.exceptions import RayActorError

        yield await anext(outputs)
        while num_left:
            output = await anext(outputs)
            assert output is not None
            (completion,) = output.outputs
            completion.token_ids = completion.token_ids[:num_left]
            completion.finish_reason, output.finished = None, False
            num_left -= len(completion.token_ids)
            yield output
        if self.is_connected:
            await outputs.aclose()
        self._left.append(outputs)
        raise RayActorError


Replicated = Callable[..., tuple[Any, Handle]]


@pytest.fixture
def replicated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replicated]:
    """Makes engines of replicas, each with its handle."""
    pytest.importorskip("ray", reason="ray is not installed")
    from pagedserve.deploy import client, replica

    monkeypatch.setattr(replica, "LLMEngine", lambda _, **__: FormulaModel().engine())
    made = []

    def make(num_replicas: int = 2) -> tuple[Any, Handle]:
        args = EngineArgs(model="formula")
        replicas = [replica.Replica(args, 60.0) for _ in range(num_replicas)]
        handle = Handle(*replicas)
        deployed: Any = SimpleNamespace(handle=handle)
        engine = client.ReplicatedEngine(lambda: deployed, lambda _: None)
        engine.wait_until_ready()
        made.append(engine)
        return engine, handle

    yield make
    for engine in made:
        engine.shutdown()


async def tokens_of(engine: Any, request_id: str, params: SamplingParams) -> list[int]:
    """The tokens of a request's deltas."""
    outputs = [output async for output in engine.generate(PROMPT, params, request_id)]
    assert {output.request_id for output in outputs} == {request_id}
    return [token for output in outputs for token in output.outputs[0].token_ids]


DRAWN = SamplingParams(
    temperature=1.0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)


async def two_of(engine: Any) -> list[list[int]]:
    return [await tokens_of(engine, name, DRAWN) for name in ("a", "b")]


def test_requests_without_a_seed_have_their_random_numbers(replicated: Replicated) -> None:
    engine, _ = replicated()
    expected = asyncio.run(two_of(engine))
    assert expected[0] != expected[1], "replicas draw differently"
    engine, handle = replicated()
    handle.num_given = {1: 5}
    assert asyncio.run(two_of(engine)) == expected, "as if no replica had died"
    assert len(handle.requests) == 3


@pytest.mark.parametrize("num_given", [0, 5])
def test_a_stream_with_prompt_logprobs_resumes(replicated: Replicated, num_given: int) -> None:
    engine, handle = replicated()
    handle.num_given = {0: num_given}
    params = SamplingParams(
        temperature=0, max_tokens=24, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA
    )

    async def ask() -> list[RequestOutput]:
        return [output async for output in engine.generate(PROMPT, params, "a")]

    outputs = asyncio.run(ask())
    assert len(outputs[0].prompt_logprobs or ()) == 3
    tokens = [token for output in outputs for token in output.outputs[0].token_ids]
    assert tokens == FormulaModel().greedy([1, 2, 3], 24)


def test_a_request_is_sent_again_to_a_replica_that_still_has_it(replicated: Replicated) -> None:
    engine, handle = replicated(num_replicas=1)
    handle.num_given, handle.is_connected = {0: 0}, False
    tokens = asyncio.run(tokens_of(engine, "a", DRAWN))
    assert len(tokens) == 24
    assert len({request.request_id for request in handle.requests}) == 2


def test_replicas_that_are_shut_down_are_no_deaths(replicated: Replicated) -> None:
    engine, handle = replicated(num_replicas=5)
    *ended, _ = handle._replicas
    for replica in ended:
        replica.__del__()  # as Ray Serve calls it
    tokens = asyncio.run(tokens_of(engine, "a", DRAWN))
    assert (len(tokens), len(handle.requests)) == (24, 5)


def test_a_stream_that_cannot_resume_names_the_end_of_its_replica(replicated: Replicated) -> None:
    engine, handle = replicated(num_replicas=1)
    handle._replicas[0].__del__()
    kind = RequestOutputKind.CUMULATIVE
    params = SamplingParams(prompt_logprobs=1, output_kind=kind)
    with pytest.raises(EngineDeadError, match="a replica has ended"):
        asyncio.run(tokens_of(engine, "a", params))


def test_a_stream_that_a_shutdown_cuts_off_names_it(replicated: Replicated) -> None:
    engine, handle = replicated(num_replicas=1)

    async def cut_off() -> None:
        async for _ in engine.generate(PROMPT, DRAWN, "a"):
            engine.shutdown()
            handle._replicas[0].__del__()

    with pytest.raises(EngineDeadError, match="the replicas are shut down"):
        asyncio.run(cut_off())


def test_calls_of_all_replicas_ignore_those_that_died(
    replicated: Replicated, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, handle = replicated(num_replicas=1)
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    task_error: Any = RayTaskError
    found: dict[str, list[Any]] = {}
    called = []

    def broadcast(method: str, *given: object) -> Any:
        called.append((method, *given))
        return SimpleNamespace(results=lambda **_: found[method])

    monkeypatch.setattr(handle, "broadcast", broadcast, raising=False)
    found["reset_prefix_cache"] = [True, RayActorError()]
    assert asyncio.run(engine.reset_prefix_cache())
    for found["reset_prefix_cache"] in ([RayActorError()], [True, GetTimeoutError()]):
        with pytest.raises(EngineDeadError, match=r"no replica answers|GetTimeoutError"):
            asyncio.run(engine.reset_prefix_cache())
    # An adapter that one replica refuses is on none.
    found |= {
        "add_lora": [True, task_error("add_lora", "", RequestError("no rank"))],
        "remove_lora": [True, False],
    }
    with pytest.raises(RequestError, match="no rank"):
        asyncio.run(engine.add_lora(LoRARequest("pirate", 7, "pirate")))
    assert called[-1] == ("remove_lora", 7)

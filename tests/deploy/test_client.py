"""``ReplicatedEngine`` without a cluster: state requests and aborts."""

import asyncio
import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from pagedserve import RequestOutputKind, SamplingParams
from pagedserve.errors import EngineDeadError
from pagedserve.outputs import CompletionOutput, RequestMetrics, RequestOutput


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pydantic, about Ray Serve
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

    engine = ReplicatedEngine(lambda: deployed, lambda: None)
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pydantic, about Ray Serve
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
        engine = client.ReplicatedEngine(lambda: deployed, lambda: None)
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

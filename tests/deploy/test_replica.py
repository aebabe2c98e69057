"""``Replica`` without a cluster."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from pagedserve import EngineArgs, SamplingParams
from tests.support.formula import FormulaModel

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"  # of pydantic, about Ray Serve
)


def test_a_client_may_disconnect_before_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pagedserve.deploy import replica

    formula = FormulaModel()
    engine = formula.engine()
    may_run = threading.Event()

    def wait() -> None:
        may_run.wait()

    formula.executor(engine).before_sampling = wait
    monkeypatch.setattr(replica, "LLMEngine", lambda *_, **__: engine)
    served = replica.Replica(EngineArgs(model="formula"), 60.0)
    prompt: Any = {"prompt_token_ids": [1, 2, 3]}
    request = replica.ReplicaRequest(
        keys=(),
        prompt=prompt,
        params=SamplingParams(max_tokens=9),
        request_id="a",
        lora_request=None,
        priority=0,
        arrival_time=None,
    )

    async def disconnect() -> None:
        outputs = served.generate(request)
        assert await anext(outputs) is None, "a step has started it"
        await outputs.aclose()
        assert not served._engine.has_begun("a")

    try:
        asyncio.run(disconnect())
    finally:
        may_run.set()
        served._engine.shutdown()
    formula.check_idle(engine)


def test_each_replica_has_its_decision_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from pagedserve.deploy import replica

    monkeypatch.setattr(
        replica,
        "LLMEngine",
        lambda args, **_: FormulaModel().engine(decision_log=args.decision_log),
    )
    args = EngineArgs(model="formula", decision_log=str(tmp_path / "new" / "decisions"))
    for served in [replica.Replica(args, 60.0) for _ in range(2)]:
        served._engine.shutdown()
    assert len(list((tmp_path / "new" / "decisions").iterdir())) == 2

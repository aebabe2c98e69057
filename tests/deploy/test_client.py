"""``ReplicatedEngine`` without a cluster: how often it requests the states of its replicas."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from pagedserve.errors import EngineDeadError


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

"""The Serve application without a cluster: what is asked of Ray."""

import threading
from typing import Any

import pytest

from pagedserve import EngineArgs
from pagedserve.deploy.options import DeployArgs
from pagedserve.errors import ConfigError

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"  # of pydantic, about Ray Serve
)


@pytest.mark.parametrize(("given", "address"), [(None, "local"), ("auto", "auto")])
def test_without_an_address_the_cluster_is_new(
    monkeypatch: pytest.MonkeyPatch, given: str | None, address: str
) -> None:
    from pagedserve.deploy import application

    asked: dict[str, Any] = {}
    monkeypatch.setattr("ray.init", asked.update)
    application._connect(given)
    assert asked["address"] == address, "None would be that of RAY_ADDRESS"


@pytest.mark.parametrize("address", [None, "auto"])
def test_a_process_that_exits_at_once_leaves_no_application(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    from pagedserve.deploy import application

    asked: list[Any] = []
    never: Any = threading.Event()
    monkeypatch.setattr(application, "_start", lambda *_: never.wait())
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.shutdown", lambda: asked.append("shutdown"))
    monkeypatch.setattr("ray.serve.delete", lambda name, **given: asked.append((name, given)))
    monkeypatch.setattr("ray.serve.shutdown", lambda: None)
    monkeypatch.setattr("ray.serve.status", lambda: asked.append("status"))
    deploy_args = DeployArgs(ray_address=address, app_name="app")
    engine = application.deploy(EngineArgs(model="formula"), deploy_args)
    assert engine.is_loading
    engine.abandon()
    never.set()
    deleted = [("app", {"_blocking": False}), "status", "shutdown"]
    assert asked == ([] if address is None else deleted)
    engine.shutdown()


def test_replicas_have_the_options_of_the_call() -> None:
    from pagedserve.deploy.application import deploy, replicas

    args = EngineArgs(model="formula", load_format="dummy")
    application: Any = replicas(args, DeployArgs())
    args.tensor_parallel_size = 2
    (bound, _) = application._bound_deployment.init_args
    assert bound == EngineArgs(model="formula", load_format="dummy")
    for build in (replicas, deploy):
        with pytest.raises(ConfigError, match="load_format is 'dummy', and tensor_parallel_size"):
            build(args, DeployArgs())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_replicas": 4}, "4, which need 4 CPUs by replica_num_cpus; this machine has 2"),
        ({"replica_num_gpus": 0.5}, "1, which need 0.5 GPUs by replica_num_gpus; this machine has"),
        ({"min_replicas": 4, "replica_num_cpus": 0.5}, None),
        ({"min_replicas": 4, "ray_address": "auto"}, None),
    ],
)
def test_replicas_that_this_machine_cannot_hold_are_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str | None
) -> None:
    from pagedserve.deploy import application

    monkeypatch.setattr(application, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(application, "_connect", lambda _: None)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr("ray.serve.start", fail)
    with pytest.raises(ConfigError if message else NotImplementedError, match=message):
        application._start(EngineArgs(model="formula"), DeployArgs(**options), 60.0)


def fail(**_: object) -> None:
    raise NotImplementedError

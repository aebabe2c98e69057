"""The Serve application without a cluster: what is asked of Ray."""

from typing import Any

import pytest

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

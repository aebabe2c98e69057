"""The queries of dashboards, vLLM's and ours, asked of a real Prometheus that scrapes a server."""

import json
import math
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Serve, Served

PROMETHEUS = shutil.which("prometheus")

EXAMPLES = Path(__file__).parents[2] / "examples"
VLLM = json.loads((Path(__file__).parent / "vllm_dashboards.json").read_text())
OURS = json.loads((EXAMPLES / "grafana" / "pagedserve.json").read_text())
# What Grafana puts in the place of its variables.
VARIABLES = {
    "$__rate_interval": "10s",
    "$__range": "10s",
    "$model_name": "formula",
    "$Deployment_id": "formula",
}


class Prometheus:
    """A Prometheus of its own, with the configuration of the examples, in a hurry."""

    def __init__(self, folder: Path, server: Served) -> None:
        assert PROMETHEUS is not None
        config = folder / "prometheus.yml"
        hurried = (EXAMPLES / "prometheus.yml").read_text().replace("interval: 5s", "interval: 1s")
        config.write_text(hurried.replace("127.0.0.1:8000", server.http.base_url.netloc.decode()))
        log = folder / "log"
        options = (f"--config.file={config}", f"--storage.tsdb.path={folder}/data")
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [PROMETHEUS, *options, "--web.listen-address=127.0.0.1:0"], stderr=stderr
            )
        while not (found := re.search(r"Listening on.* address=(\S+)", log.read_text())):
            assert self.process.poll() is None, log.read_text()
            time.sleep(0.02)
        self._http = httpx.Client(base_url=f"http://{found[1]}/api/v1", timeout=30)

    def end(self) -> None:
        self._http.close()
        self.process.kill()
        self.process.wait()

    def ask(self, path: str, **params: str) -> Any:
        answer = self._http.get(path, params=params)
        assert answer.status_code in {200, 503}, answer.text  # 503: it is still starting
        return answer.json()["data"] if answer.is_success else None

    def values(self, query: str) -> list[float]:
        """The values that a query finds now."""
        found = self.ask("/query", query=query)
        return [float(sample["value"][1]) for sample in found["result"]] if found else []

    def wait_for_scrapes(self, number: int) -> None:
        while self.values("count_over_time(up[1m])") < [number]:
            time.sleep(0.1)


@contextmanager
def traffic(served: Served) -> Iterator[None]:
    """Requests one after the other, whole and streamed, until the end."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.wait(0.02):
            for streams in (False, True):
                served.complete(prompt=list(range(1, 13)), max_tokens=8, stream=streams)

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield
    finally:
        is_over.set()
        client.join()


@pytest.fixture
def prometheus(serve: Serve, tmp_path: Path) -> Iterator[Prometheus]:
    with serve({"enable_prefix_caching": True}) as served, traffic(served):
        running = Prometheus(tmp_path, served)
        try:
            running.wait_for_scrapes(4)
            yield running
        finally:
            running.end()


def made(query: str) -> str:
    """A query as Grafana sends it."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query
    return query


def queries_of_vllm() -> Iterator[str]:
    for dashboard in VLLM["dashboards"].values():
        for query in dashboard["queries"]:
            yield from (query.replace("$q", str(quantile)) for quantile in VLLM["quantiles"])


def queries_of_ours() -> Iterator[str]:
    for panel in OURS["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def variables() -> Iterator[str]:
    for dashboard in VLLM["dashboards"].values():
        yield from dashboard["variables"]
    entries = OURS["templating"]["list"]
    yield from (entry["definition"] for entry in entries if entry["type"] == "query")


@pytest.mark.skipif(PROMETHEUS is None, reason="there is no Prometheus here")
def test_every_query_of_every_dashboard_finds_data(prometheus: Prometheus) -> None:
    asked = {made(query) for query in (*queries_of_vllm(), *queries_of_ours())}
    found = {query: prometheus.values(query) for query in asked}
    # A quotient that is no number counted nothing below the line.
    bad = [query for query, values in found.items() if not values or any(map(math.isnan, values))]
    assert len(asked) > 60
    assert not bad
    for name in ("prompt", "generation"):
        rate = f'rate(vllm:{name}_tokens_total{{model_name="formula"}}[10s])'
        assert found[rate][0] > 0
    for name in variables():
        metric, _, label = name.removeprefix("label_values(").removesuffix(")").rpartition(",")
        match = {"match[]": metric} if metric else {}
        assert prometheus.ask(f"/label/{label}/values", **match) == ["formula"]

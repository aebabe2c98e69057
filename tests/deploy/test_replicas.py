"""Replicas on a Ray cluster of this machine: they are killed, and their streams go on."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.deploy.conftest import (
    NUM_TEXTS,
    NUM_TOKENS,
    REQUESTS,
    body,
    deployed,
    one_is_killed,
    read_all,
    replicas,
    skip_unless_ray_starts,
)
from tests.server.conftest import Process

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.ray

COUNTED = ("prefix_cache_hits", "prompt_tokens")


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("deploy") / "log"
    options = ["--min-replicas", "2", "--replica-num-cpus", "0.5"]
    with deployed(directory, log, *options) as process:
        assert len(replicas(process)) == 2
        yield process


def test_they_answer_as_one_engine_does(server: Process, wanted: list[str]) -> None:
    assert asyncio.run(read_all(server)) == wanted


@pytest.mark.parametrize("attempt", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_streams_outlive_the_replica_that_made_them(
    server: Process, wanted: list[str], attempt: int
) -> None:
    del attempt
    with one_is_killed(server):
        assert asyncio.run(read_all(server, kill=replicas(server)[:1])) == wanted


@pytest.mark.slow
def test_a_whole_answer_outlives_it_too(server: Process, wanted: list[str]) -> None:
    async def ask() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            asked = [
                asyncio.ensure_future(client.post("/v1/completions", json=body(number)))
                for number in range(len(REQUESTS))
            ]
            await asyncio.sleep(0.15)
            os.kill(replicas(server)[-1].pid, signal.SIGKILL)
            answers = await asyncio.gather(*asked)
        return [choice["text"] for answer in answers for choice in answer.json()["choices"]]

    with one_is_killed(server):
        assert asyncio.run(ask()) == wanted


def test_errors_are_those_of_the_request(server: Process) -> None:
    for change, message in (
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"prompt": [1] * 100_000}, "has 100000 tokens"),
    ):
        answer = httpx.post(f"{server.url}/v1/completions", json=body(0) | change, timeout=60)
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"]


def test_who_leaves_leaves_nothing_behind(server: Process) -> None:
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json=body(0, stream=True, max_tokens=400),
        timeout=60,
    ) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 20
    while True:
        metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
        lines = [line for line in metrics.splitlines() if "vllm:num_requests_running{" in line]
        if all(line.endswith(" 0.0") for line in lines):
            return
        assert time.monotonic() < deadline, metrics
        time.sleep(0.2)


@pytest.mark.slow
def test_sums_of_all_replicas_are_in_the_metrics(server: Process, wanted: list[str]) -> None:
    def generated() -> float:
        metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
        (line,) = [
            line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total")
        ]
        return float(line.split()[-1])

    time.sleep(3)  # what was done before is in the metrics by then
    before = generated()
    assert asyncio.run(read_all(server)) == wanted
    deadline = time.monotonic() + 20
    after = before + NUM_TOKENS * NUM_TEXTS
    while generated() != after:
        assert time.monotonic() < deadline, (before, generated())
        time.sleep(0.5)
    with one_is_killed(server):
        os.kill(replicas(server)[0].pid, signal.SIGKILL)
        for _ in range(10):
            assert generated() == after, "what it had done is not forgotten"
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
            time.sleep(0.5)


def by_replica(server: Process, name: str) -> Counter[str]:
    """A metric of each replica, once none is at work."""
    time.sleep(1.5)  # metrics are up to a second old
    while True:
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        (running,) = re.findall(r"^vllm:num_requests_running{.*} (.*)", text, re.MULTILINE)
        pattern = rf'^pagedserve:replica_{name}{{.*replica="(.*?)".*}} (.*)'
        found = re.findall(pattern, text, re.MULTILINE)
        if float(running) == 0:
            return Counter({replica: int(float(value)) for replica, value in found})
        time.sleep(0.5)


async def ask(server: Process, prompts: Sequence[list[int]]) -> None:
    """Send prompts at one moment, and wait for the answers."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        asked = [
            client.post("/v1/completions", json=body(0, prompt=prompt, max_tokens=8))
            for prompt in prompts
        ]
        answers = await asyncio.gather(*asked)
    assert {answer.status_code for answer in answers} == {200}


@pytest.mark.slow
def test_prompts_that_begin_alike_go_where_their_beginning_is(server: Process) -> None:
    # Six beginnings of seven blocks of 16 tokens, and another end each time.
    begins = [[(place * (number + 5) + number) % 89 for place in range(112)] for number in range(6)]
    hits, prompts = (by_replica(server, f"{name}_total") for name in COUNTED)
    for number in range(5):
        asyncio.run(ask(server, [[*begin, number + 1, number + 2] for begin in begins]))
    hits, prompts = (
        by_replica(server, f"{name}_total") - before
        for name, before in zip(COUNTED, (hits, prompts), strict=True)
    )
    assert sum(hits.values()) == 6 * 4 * 112, "every time but the first it was there"
    assert sorted(prompts.values()) == [3 * 5 * 114] * 2, "they are shared out evenly"


@pytest.mark.slow
def test_a_beginning_that_many_have_spreads(server: Process) -> None:
    prompts = by_replica(server, "prompt_tokens_total")
    begin = [(7 * place + 1) % 83 for place in range(112)]
    asyncio.run(ask(server, [[*begin, number] for number in range(1, 33)]))
    prompts = by_replica(server, "prompt_tokens_total") - prompts
    assert len(prompts) == 2
    assert sum(prompts.values()) == 32 * 113
    assert min(prompts.values()) >= 8 * 113


@pytest.mark.slow
def test_replicas_are_exchanged_while_no_request_is_refused(
    server: Process, directory: Path, wanted: list[str]
) -> None:
    before = {replica.pid for replica in replicas(server)}
    options = ["--min-replicas", "2", "--replica-num-cpus", "0.5", "--max-num-seqs", "64"]
    command = [sys.executable, "-m", "pagedserve", "deploy", str(directory), *options, "--update"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as update:
        num_rounds = 0
        while update.poll() is None:
            assert asyncio.run(read_all(server)) == wanted
            num_rounds += 1
        said = update.stderr.read() if update.stderr else ""
    assert update.returncode == 0, said
    assert num_rounds > 2
    assert asyncio.run(read_all(server)) == wanted
    assert not before & {replica.pid for replica in replicas(server)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--replica-num-cpus", "0.5", "--max-model-len", "999999"],
            "ConfigError: max_model_len is 999999",
        ),
        (
            ["--replica-num-cpus", "0", "--distributed-executor-backend", "ray"],
            "replica_num_cpus and replica_num_gpus are 0; one must be above 0",
        ),
    ],
)
def test_options_that_cannot_work_are_named(
    directory: Path, options: list[str], message: str
) -> None:
    skip_unless_ray_starts()
    command = [sys.executable, "-m", "pagedserve", "deploy", str(directory), *options]
    command += ["--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]

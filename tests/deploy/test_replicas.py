"""Replicas on a Ray cluster of this machine: they are killed, and their streams go on."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pagedserve import LLM, RequestOutputKind, SamplingParams
from tests.server.conftest import Process
from tests.support.families import save_family

pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.ray

NUM_TOKENS = 300
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 4},
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "min_tokens": 100},
]
REQUESTS = [(list(range(1, 4 + number)), WAYS[number % 3]) for number in range(9)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("deploy") / "model", "llama")


@pytest.fixture(scope="module")
def ray_starts() -> None:
    """Skips where Ray by itself does not start: it gives its parts 30 s to appear."""
    start = "import ray; ray.init(num_cpus=2, include_dashboard=False); ray.shutdown()"
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", start], capture_output=True, check=False)
        if done.returncode == 0:
            return
    pytest.skip(f"Ray does not start here: {done.stderr.decode()[-300:]}")


@pytest.fixture(scope="module")
def deployed(
    ray_starts: None, directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("deploy") / "log"
    options = ["--min-replicas", "2", "--replica-num-cpus", "0.5", "--num-gpu-blocks", "512"]
    for attempt in range(3):  # what starts mostly does not always
        process = Process(log, str(directory), *options, command="deploy")
        try:
            process.wait_until_healthy()
            break
        except (AssertionError, httpx.HTTPError):
            process.end(signal.SIGKILL)
            if attempt == 2:
                raise
    parts = psutil.Process(process.process.pid).children(recursive=True)
    assert len(replicas(process)) == 2
    yield process
    assert process.end() == 0, process.log
    _, alive = psutil.wait_procs(parts, timeout=20)
    assert alive == [], "what was started ends with it"


@pytest.fixture(scope="module")
def wanted(directory: Path) -> list[str]:
    """What one engine answers."""
    llm = LLM(str(directory), num_gpu_blocks=512, use_tqdm_on_load=False)
    prompts: Any = [{"prompt_token_ids": token_ids} for token_ids, _ in REQUESTS]
    params = [
        SamplingParams(
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **way,
        )
        for _, way in REQUESTS
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def replicas(process: Process) -> list[psutil.Process]:
    children = psutil.Process(process.process.pid).children(recursive=True)
    return [child for child in children if "ServeReplica" in title(child)]


def title(process: psutil.Process) -> str:
    try:
        return str(process.cmdline()[0])
    except (psutil.Error, IndexError):  # it has just ended
        return ""


def wait_for_replicas(process: Process, number: int) -> None:
    deadline = time.monotonic() + 60
    while len(replicas(process)) < number:
        assert time.monotonic() < deadline, process.log
        time.sleep(0.2)


def body(number: int, **more: Any) -> dict[str, Any]:
    token_ids, way = REQUESTS[number]
    given = {"prompt": token_ids, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return given | way | more


async def read(client: httpx.AsyncClient, number: int, begun: asyncio.Semaphore) -> str:
    """The text of a stream; it tells when its first token has come."""
    text = ""
    async with client.stream("POST", "/v1/completions", json=body(number, stream=True)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                if not text:
                    begun.release()
                event = json.loads(line.removeprefix("data: "))
                text += event["choices"][0]["text"]
    return text


async def read_all(process: Process, *, kill: bool) -> list[str]:
    async with httpx.AsyncClient(base_url=process.url, timeout=120) as client:
        begun = asyncio.Semaphore(0)
        streams = [
            asyncio.ensure_future(read(client, number, begun)) for number in range(len(REQUESTS))
        ]
        if kill:
            for _ in REQUESTS:
                await begun.acquire()
            os.kill(replicas(process)[0].pid, signal.SIGKILL)
            assert not all(stream.done() for stream in streams), "in the middle of them"
        return await asyncio.gather(*streams)


def test_they_answer_as_one_engine_does(deployed: Process, wanted: list[str]) -> None:
    assert asyncio.run(read_all(deployed, kill=False)) == wanted


@pytest.mark.parametrize("attempt", range(2))
def test_streams_outlive_the_replica_that_made_them(
    deployed: Process, wanted: list[str], attempt: int
) -> None:
    del attempt
    wait_for_replicas(deployed, 2)
    assert asyncio.run(read_all(deployed, kill=True)) == wanted


def test_a_whole_answer_outlives_it_too(deployed: Process, wanted: list[str]) -> None:
    wait_for_replicas(deployed, 2)

    async def ask() -> list[str]:
        async with httpx.AsyncClient(base_url=deployed.url, timeout=120) as client:
            asked = [
                asyncio.ensure_future(client.post("/v1/completions", json=body(number)))
                for number in range(len(REQUESTS))
            ]
            await asyncio.sleep(0.15)
            os.kill(replicas(deployed)[-1].pid, signal.SIGKILL)
            answers = await asyncio.gather(*asked)
        return [answer.json()["choices"][0]["text"] for answer in answers]

    assert asyncio.run(ask()) == wanted


def test_errors_are_those_of_the_request(deployed: Process) -> None:
    for change, message in (
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"prompt": [1] * 100_000}, "has 100000 tokens"),
    ):
        answer = httpx.post(f"{deployed.url}/v1/completions", json=body(0) | change)
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"]


def test_who_leaves_leaves_nothing_behind(deployed: Process) -> None:
    wait_for_replicas(deployed, 2)
    with httpx.stream(
        "POST", f"{deployed.url}/v1/completions", json=body(0, stream=True, max_tokens=400)
    ) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 20
    while True:
        metrics = httpx.get(f"{deployed.url}/metrics").text
        lines = [line for line in metrics.splitlines() if "vllm:num_requests_running{" in line]
        if all(line.endswith(" 0.0") for line in lines):
            return
        assert time.monotonic() < deadline, metrics
        time.sleep(0.2)


def test_sums_of_all_replicas_are_in_the_metrics(deployed: Process, wanted: list[str]) -> None:
    def generated() -> float:
        metrics = httpx.get(f"{deployed.url}/metrics").text
        (line,) = [
            line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total")
        ]
        return float(line.split()[-1])

    wait_for_replicas(deployed, 2)
    generated()
    time.sleep(3)
    before = generated()
    assert asyncio.run(read_all(deployed, kill=False)) == wanted
    deadline = time.monotonic() + 20
    after = before + NUM_TOKENS * len(REQUESTS)
    while generated() != after:
        assert time.monotonic() < deadline, (before, generated())
        time.sleep(0.5)
    os.kill(replicas(deployed)[0].pid, signal.SIGKILL)
    wait_for_replicas(deployed, 2)
    for _ in range(10):
        assert generated() == after, "what it had done is not forgotten"
        assert httpx.get(f"{deployed.url}/health").status_code == 200
        time.sleep(0.5)


def test_replicas_are_exchanged_while_no_request_is_refused(
    deployed: Process, directory: Path, wanted: list[str]
) -> None:
    wait_for_replicas(deployed, 2)
    before = {replica.pid for replica in replicas(deployed)}
    program = "import sys; from pagedserve.cli import main; sys.exit(main())"
    options = ["--min-replicas", "2", "--replica-num-cpus", "0.5", "--max-num-seqs", "64"]
    command = [sys.executable, "-c", program, "deploy", str(directory), *options, "--update"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as update:
        num_rounds = 0
        while update.poll() is None:
            assert asyncio.run(read_all(deployed, kill=False)) == wanted
            num_rounds += 1
        said = update.stderr.read() if update.stderr else ""
    assert update.returncode == 0, said
    assert num_rounds > 2
    assert asyncio.run(read_all(deployed, kill=False)) == wanted
    assert not before & {replica.pid for replica in replicas(deployed)}


def test_options_that_cannot_work_are_named(ray_starts: None, directory: Path) -> None:
    program = "import sys; from pagedserve.cli import main; sys.exit(main())"
    options = ["--port", "0", "--replica-num-cpus", "0.5", "--max-model-len", "999999"]
    command = [sys.executable, "-c", program, "deploy", str(directory), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "ConfigError: max_model_len is 999999" in done.stderr.splitlines()[-1]

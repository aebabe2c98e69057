"""Replicas on a Ray cluster of this machine, and streams that are read from them."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pagedserve import LLM, RequestOutputKind, SamplingParams
from tests.server.conftest import Process
from tests.support.families import save_family

NUM_TOKENS = 300
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 4},
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "min_tokens": 100},
    {"temperature": 1.0, "seed": 6, "n": 3},
]
REQUESTS = [(list(range(1, 4 + number)), WAYS[number % 4]) for number in range(8)]
NUM_TEXTS = sum(way.get("n", 1) for _, way in REQUESTS)


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("deploy") / "model", "llama")


def skip_unless_ray_starts() -> None:
    """Skip where Ray by itself does not start: it gives its parts 30 s to appear."""
    start = "import ray; ray.init(num_cpus=2, include_dashboard=False); ray.shutdown()"
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", start], capture_output=True, check=False)
        if done.returncode == 0:
            return
    pytest.skip(f"Ray does not start here: {done.stderr.decode()[-300:]}")


@contextmanager
def deployed(directory: Path, log: Path, *options: str) -> Iterator[Process]:
    """A server and its replicas, which leave nothing."""
    for attempt in range(3):  # what starts mostly does not always
        process = Process(
            log, str(directory), *options, "--num-gpu-blocks", "512", command="deploy"
        )
        try:
            process.wait_until_healthy()
            break
        except (AssertionError, httpx.HTTPError):
            process.end(signal.SIGKILL)
            if attempt == 2:
                raise
            skip_unless_ray_starts()
    parts = psutil.Process(process.process.pid).children(recursive=True)
    yield process
    assert process.end() == 0, process.log
    _, alive = psutil.wait_procs(parts, timeout=20)
    assert alive == [], "what was started ends with it"


@pytest.fixture(scope="session")
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
    return [completion.text for output in outputs for completion in output.outputs]


def children(process: Process, name: str) -> list[psutil.Process]:
    """The processes below it whose titles have a name in them."""
    below = psutil.Process(process.process.pid).children(recursive=True)
    return [child for child in below if name in title(child)]


def replicas(process: Process) -> list[psutil.Process]:
    return children(process, "ServeReplica")


def title(process: psutil.Process) -> str:
    try:
        return str(process.cmdline()[0])
    except (psutil.Error, IndexError):  # it has just ended
        return ""


def wait_for_names(process: Process, is_enough: Callable[[set[str]], bool]) -> set[str]:
    """The names of the replicas that answered last, once they are as wanted."""
    pattern = re.compile(r'^pagedserve:replica_prompt_tokens_total{.*replica="(.*?)"', re.MULTILINE)
    deadline = time.monotonic() + 120
    while True:
        metrics = httpx.get(f"{process.url}/metrics", timeout=60).text
        if is_enough(names := set(pattern.findall(metrics))):
            return names
        assert time.monotonic() < deadline, process.log
        time.sleep(0.2)


@contextmanager
def one_is_killed(process: Process) -> Iterator[None]:
    """Returns when another answers in the place of the replica that is killed within."""
    before = wait_for_names(process, lambda names: len(names) > 0)
    yield
    wait_for_names(process, lambda now: len(now) == len(before) and now != before)


def body(number: int, **more: Any) -> dict[str, Any]:
    token_ids, way = REQUESTS[number]
    given = {"prompt": token_ids, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return given | way | more


async def read(client: httpx.AsyncClient, number: int, begun: asyncio.Semaphore) -> list[str]:
    """The texts of a stream; it tells when the first token has come."""
    texts: defaultdict[int, str] = defaultdict(str)
    async with client.stream("POST", "/v1/completions", json=body(number, stream=True)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                if not texts:
                    begun.release()
                event = json.loads(line.removeprefix("data: "))
                assert "choices" in event, event
                [choice] = event["choices"]
                texts[choice["index"]] += choice["text"]
    return [texts[index] for index in sorted(texts)]


async def read_all(process: Process, kill: Sequence[psutil.Process] = ()) -> list[str]:
    """The texts of all streams; in the middle of them some processes are killed."""
    async with httpx.AsyncClient(base_url=process.url, timeout=120) as client:
        begun = asyncio.Semaphore(0)
        streams = [
            asyncio.ensure_future(read(client, number, begun)) for number in range(len(REQUESTS))
        ]
        if kill:
            for _ in REQUESTS:
                await begun.acquire()
            for victim in kill:
                victim.kill()
            assert not all(stream.done() for stream in streams), "in the middle of them"
        return list(chain.from_iterable(await asyncio.gather(*streams)))

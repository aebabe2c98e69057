"""Ten times the load that the server can carry, by clients of all kinds."""

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil
import pytest

from tests.server.conftest import Process

SECONDS = 60
OVERLOAD = 10
MAX_NUM_SEQS = 16
GROWTH_BYTES = 64 << 20
URL = {True: "/v1/chat/completions", False: "/v1/completions"}
# What is no request, and how it is answered.
BAD_BODIES: list[tuple[Any, int]] = [
    ({"prompt": []}, 400),
    ({"prompt": "a", "temperature": -1}, 400),
    ({"prompt": [10**9]}, 400),
    ({"prompt": "a", "model": "other"}, 404),
    ({"prompt": "a", "no_such_field": 1}, 400),
    ({"messages": "text"}, 400),
    ([1, 2], 400),
]


def bodies() -> list[dict[str, Any]]:
    """Requests of all kinds, whose answers a quiet server gives first."""
    topics = ("rivers", "the moon", "old trains", "soup", "chess", "whales", "glass", "winter")
    found: list[dict[str, Any]] = []
    for number, topic in enumerate(topics):
        text = f"Say in a few words what is beautiful about {topic}, and what is not so much."
        drawn = {"temperature": 0.8, "seed": number, "top_p": 0.9}
        common = {"max_tokens": 8 + 4 * (number % 3), "ignore_eos": True}
        found += [
            {"messages": [{"role": "user", "content": text}], "temperature": 0} | common,
            {"prompt": text} | drawn | common,
            {"prompt": text, "n": 2} | drawn | common,
            {"prompt": [text, topic], "temperature": 0, "logprobs": 2} | common,
        ]
    return found


@pytest.fixture(scope="module")
def server(model_package: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("storm") / "log"
    # Few blocks: sequences give their place away, and are computed again or swapped.
    options = ["--max-num-seqs", str(MAX_NUM_SEQS), "--num-gpu-blocks", "64"]
    options += ["--max-num-queued-reqs", str(4 * MAX_NUM_SEQS)]
    process = Process(log, "smollm2", *options)
    process.wait_until_healthy()
    yield process
    assert process.end() == 0, process.log


@dataclass
class Storm:
    """Clients of one server, and what became of them."""

    session: aiohttp.ClientSession
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)

    async def texts(self, body: dict[str, Any], *, streams: bool) -> list[str] | int:
        """The text of each choice; the status where that is not 200."""
        more = {"stream": True} if streams else {}
        async with self.session.post(URL["messages" in body], json=body | more) as answer:
            if answer.status != 200:
                await self.check_refusal(answer)
                return answer.status
            if not streams:
                choices = (await answer.json())["choices"]
                return [text_of(choice, "message") for choice in choices]
            texts: dict[int, str] = {}
            raw = (await answer.read()).decode()
            *events, done = raw.strip().split("\n\n")
            assert done == "data: [DONE]"
            for event in events:
                for choice in json.loads(event.removeprefix("data: "))["choices"]:
                    texts.setdefault(choice["index"], "")
                    texts[choice["index"]] += text_of(choice, "delta")
            return [texts[index] for index in sorted(texts)]

    async def check_refusal(self, answer: aiohttp.ClientResponse) -> None:
        """A refusal says when to come again."""
        error = (await answer.json())["error"]
        assert answer.status == 503, error
        assert 1 <= int(answer.headers["Retry-After"]) <= 60
        assert error["type"] == "ServiceUnavailableError"

    async def stay(self, body: dict[str, Any], wanted: list[str], *, streams: bool) -> None:
        """A client that waits for its whole answer."""
        texts = await self.texts(body, streams=streams)
        self.outcomes["refused" if isinstance(texts, int) else "answered"] += 1
        if not isinstance(texts, int) and texts != wanted:
            self.wrong.append((body, texts, wanted))

    async def leave(self, body: dict[str, Any], after: float, *, streams: bool) -> None:
        """A client that goes away."""
        try:
            async with asyncio.timeout(after):
                await self.texts(body, streams=streams)
        except TimeoutError:
            self.outcomes["left"] += 1

    async def send_nonsense(self, body: Any, status: int) -> None:
        """A client that does not know what it wants."""
        path = URL[isinstance(body, dict) and "messages" in body]
        async with self.session.post(path, json=body) as answer:
            if answer.status != status:  # what is looked at once there is a place for it
                await self.check_refusal(answer)
            assert (await answer.json())["error"]["message"]
        self.outcomes["nonsense"] += 1

    async def gauges(self) -> dict[str, float]:
        """What is in use, by name."""
        async with self.session.get("/metrics") as answer:
            text = await answer.text()
        names = r"num_requests_(?:running|waiting|swapped)|[gc]pu_cache_usage_perc"
        lines = re.findall(rf"^vllm:({names})\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in lines}


def text_of(choice: dict[str, Any], part: str) -> str:
    text: str = choice["text"] if "text" in choice else choice[part].get("content", "")
    return text


async def quiet_run(storm: Storm) -> tuple[list[list[str]], float]:
    """The answers to all bodies, and how many requests a second the server carries."""
    started = time.monotonic()
    answers = await asyncio.gather(*(storm.texts(body, streams=False) for body in bodies()))
    seconds = time.monotonic() - started
    assert all(isinstance(texts, list) for texts in answers)
    return [texts for texts in answers if isinstance(texts, list)], len(answers) / seconds


async def blow(storm: Storm, process: Process) -> list[int]:
    """The storm itself; the server's memory at the end of each second, in bytes."""
    wanted, _ = await quiet_run(storm)
    again, rate = await quiet_run(storm)  # at the pace of a server that is warm
    assert again == wanted
    rng, memory = random.Random(0), []
    server = psutil.Process(process.process.pid)
    async with asyncio.TaskGroup() as clients:
        for _ in range(SECONDS):
            for _ in range(round(rate * OVERLOAD)):
                number = rng.randrange(len(wanted))
                body, streams = bodies()[number], rng.random() < 0.5
                kind = rng.random()
                if kind < 0.1:
                    clients.create_task(storm.send_nonsense(*rng.choice(BAD_BODIES)))
                elif kind < 0.1 + 1 / 3:
                    seconds = rng.uniform(0, 3)
                    clients.create_task(storm.leave(body, seconds, streams=streams))
                else:
                    clients.create_task(storm.stay(body, wanted[number], streams=streams))
            async with storm.session.get("/health") as answer:
                assert answer.status == 200, await answer.text()
            memory.append(server.memory_info().rss)
            await asyncio.sleep(1)
    return memory


async def in_a_storm(process: Process) -> tuple[Storm, list[int], dict[str, float]]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(process.url, connector=connector, timeout=timeout) as session:
        storm = Storm(session)
        memory = await blow(storm, process)
        await asyncio.sleep(5)
        return storm, memory, await storm.gauges()


@pytest.mark.slow
def test_a_storm_loses_and_leaves_nothing(server: Process) -> None:
    storm, memory, gauges = asyncio.run(in_a_storm(server))
    assert storm.wrong == []
    assert storm.outcomes["answered"] > SECONDS
    for kind in ("refused", "left", "nonsense"):
        assert storm.outcomes[kind] > 0
    assert gauges.keys() >= {"num_requests_running", "gpu_cache_usage_perc"}
    assert set(gauges.values()) == {0.0}, gauges
    # Connections and their buffers come with the first seconds.
    assert max(memory[10:]) - memory[10] < GROWTH_BYTES

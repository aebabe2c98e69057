"""The stress itself: random members of the kinds against a server, with victims beside.

Each request is made from the seed and its number alone, so that one can be sent again by itself.
"""

import asyncio
import os
import re
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import psutil

from tests.hostile.client import CLOSED, SILENT, Target
from tests.hostile.kinds import Kind
from tests.hostile.model import save_adapters, save_byte_llama
from tests.hostile.victims import Findings, Victims
from tests.server.conftest import Process

# Of the server: more sequences than run at once find no place, and few blocks are shared by many.
OPTIONS: Final = (
    "--enable-admin-routes", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8",
    "--tool-call-parser", "hermes", "--num-gpu-blocks", "1024", "--max-num-seqs", "64",
    "--shutdown-timeout", "5",
)  # fmt: skip
_GAUGES: Final = r"^vllm:(num_requests_\w+|gpu_cache_usage_perc)\{[^}]*\} (\S+)$"
# Seconds after which what is still in use counts as lost.
_PATIENCE: Final = 60.0
_MAX_FAULTS: Final = 50


@dataclass(slots=True)
class Tally:
    """What became of the requests of one kind.

    Attributes:
        outcomes: How many by status.
        slowest: Seconds of the slowest one.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0


@dataclass(slots=True)
class Storm:
    """Attackers of one server, and what became of their requests.

    Attributes:
        target: The server.
        kinds: That are drawn from.
        seed: Of all requests.
        num_clients: Requests under way at once.
        niceness: Of the thread that sends them, beside that of this process.
        is_alive: Whether the server's process is.
        tallies: By the kinds' names.
        faults: What never may happen, in words.
        last: The last requests that were begun.
    """

    target: Target
    kinds: Sequence[Kind]
    seed: int
    num_clients: int
    niceness: int
    is_alive: Callable[[], bool]
    tallies: dict[str, Tally] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=100))

    async def send(self, numbers: Sequence[int], on_sent: Callable[[], object]) -> None:
        """Send the requests of these numbers."""
        left = iter(numbers)

        async def client() -> None:
            for number in left:
                if not self.is_alive() or len(self.faults) > _MAX_FAULTS:
                    return
                await self._send_one(number)
                on_sent()

        async with asyncio.TaskGroup() as group:
            for _ in range(self.num_clients):
                group.create_task(client())

    async def _send_one(self, number: int) -> None:
        kind, rng = draw(self.kinds, self.seed, number)
        tally = self.tallies.setdefault(kind.name, Tally())
        self.last.append(f"{number} {kind.name}")
        began = time.monotonic()
        outcome = SILENT
        with suppress(TimeoutError):
            async with asyncio.timeout(self.target.patience):
                try:
                    outcome = await kind.attack(self.target, rng)
                except ConnectionRefusedError:
                    outcome = "no connection"
                except ConnectionError:
                    outcome = CLOSED
        tally.outcomes[outcome] += 1
        tally.slowest = max(tally.slowest, time.monotonic() - began)
        if kind.is_fault(outcome):
            self.faults.append(f"request {number}, {kind.name}: {outcome}")


@dataclass(slots=True)
class Report:
    """What the stress found.

    Attributes:
        storm: The requests.
        alone: What victims saw without it.
        beside: What victims saw of it.
        memory: Resident bytes of the server's processes: warm, and at the end.
        seconds: Of the requests after the warm ones.
        num_measured: How many these are.
        faults: What never may happen, in words; empty is success.
    """

    storm: Storm
    alone: Findings
    beside: Findings
    memory: tuple[int, int]
    seconds: float
    num_measured: int
    faults: list[str]


def draw(kinds: Sequence[Kind], seed: int, number: int) -> tuple[Kind, Random]:
    """Draw the kind of a request; return it and the generator that makes the request."""
    rng = Random(f"{seed}:{number}")
    (kind,) = rng.choices(kinds, [kind.weight for kind in kinds])
    return kind, rng


def resident_bytes(pid: int) -> int:
    """Memory of a process and of those that it started."""
    process = psutil.Process(pid)
    total = 0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += each.memory_info().rss
    return total


def in_use(url: str) -> dict[str, float]:
    """Requests and the share of KV blocks that are in use, without those that are zero."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=_PATIENCE) as answer:  # noqa: S310
        found = re.findall(_GAUGES, answer.read().decode(), re.MULTILINE)
    assert found
    return {name: float(value) for name, value in found if float(value)}


def wait_until_idle(url: str) -> list[str]:
    """Wait until nothing is in use; else what is after a long time."""
    deadline = time.monotonic() + _PATIENCE
    try:
        while left := in_use(url):
            if time.monotonic() > deadline:
                return [f"still in use after {_PATIENCE:.0f} s: {left}"]
            time.sleep(0.1)
    except OSError as error:
        return [f"/metrics: {error!r}"]
    return []


def wait_until_settled(url: str, seconds: float) -> list[str]:
    """As `wait_until_idle`, and until freed memory is returned."""
    faults = wait_until_idle(url)
    time.sleep(seconds)
    return faults


def run_storm(
    directory: Path,
    kinds: Sequence[Kind],
    *,
    numbers: Sequence[int],
    seed: int,
    num_clients: int,
    quiet_seconds: float,
    settle_seconds: float,
    niceness: int,
    on_sent: Callable[[], object] = lambda: None,
) -> Report:
    """Start a server, attack it, and look what is left of it.

    Args:
        directory: An empty one, for the model and the log.
        kinds: Of requests.
        numbers: Of requests; those of the first tenth warm the server up.
        seed: Of all requests.
        num_clients: Requests under way at once.
        quiet_seconds: For which the victims run alone.
        settle_seconds: From when the server is idle until its memory is measured.
        niceness: Of the thread that sends the requests.
        on_sent: Called after each request.
    """
    model, adapters = save_byte_llama(directory / "model"), save_adapters(directory / "adapters")
    traced = {"PYTHONFAULTHANDLER": "1"}  # the log says where a process died
    process = Process(directory / "log", str(model), *OPTIONS, environment=traced)
    try:
        process.wait_until_healthy()
        target = Target(int(process.url.rpartition(":")[2]), adapters)
        storm = Storm(
            target, kinds, seed, num_clients, niceness, lambda: process.process.poll() is None
        )
        waits = (quiet_seconds, settle_seconds)
        report = _attack(storm, process, numbers, waits, on_sent)
        if storm.is_alive() and (status := process.end()):
            report.faults.append(f"after SIGTERM the server ended with {status}")
    finally:
        process.process.kill()
        process.process.wait()
    return report


def _attack(
    storm: Storm,
    process: Process,
    numbers: Sequence[int],
    waits: tuple[float, float],
    on_sent: Callable[[], object],
) -> Report:
    quiet_seconds, settle_seconds = waits
    victims = Victims(storm.target.port)
    time.sleep(quiet_seconds)
    alone = victims.stop()
    num_warm = len(numbers) // 10
    _send(storm, numbers[:num_warm], on_sent)
    if not storm.is_alive():
        faults = [*_death(storm, process), *storm.faults]
        return Report(storm, alone, Findings(), (0, 0), 0.0, 0, faults)
    faults = wait_until_settled(process.url, settle_seconds)
    warm = resident_bytes(process.process.pid)
    victims, began = Victims(storm.target.port), time.monotonic()
    _send(storm, numbers[num_warm:], on_sent)
    seconds = time.monotonic() - began
    beside = victims.stop()
    memory = (warm, 0)
    if storm.is_alive():
        faults += wait_until_settled(process.url, settle_seconds)
        memory = (warm, resident_bytes(process.process.pid))
    faults += [*_death(storm, process), *judge(alone, beside), *storm.faults]
    return Report(storm, alone, beside, memory, seconds, len(numbers) - num_warm, faults)


def _send(storm: Storm, numbers: Sequence[int], on_sent: Callable[[], object]) -> None:
    """Send requests from a thread whose niceness is theirs."""

    def send() -> None:
        os.nice(storm.niceness)  # of this thread alone
        asyncio.run(storm.send(numbers, on_sent))

    with ThreadPoolExecutor(1) as attackers:
        attackers.submit(send).result()


def _death(storm: Storm, process: Process) -> list[str]:
    if storm.is_alive():
        return []
    last = ", ".join(storm.last)
    return [f"the server ended with {process.process.poll()}; the last requests: {last}"]


def judge(alone: Findings, beside: Findings) -> list[str]:
    """What is wrong with what victims saw."""
    faults = [*alone.faults, *beside.faults]
    for number, (texts, expected) in enumerate(zip(beside.texts, alone.texts, strict=True)):
        if len(expected) != 1:
            faults.append(f"victim {number} alone: {len(expected)} texts of one request")
        elif texts != expected:
            faults.append(f"victim {number}: {texts} instead of {expected}")
    if not beside.num_streams:
        faults.append("no victim came to its end")
    return faults

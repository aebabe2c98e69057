"""The loads that `scheduler_options.py` compares configurations on, each with its limits.

chat is the Azure chat half-hour, samples every second of its requests with four samples each.
documents is the Mooncake hour with 16 tokens an id instead of 512, prompts shorter in proportion,
and an eighth of its outputs.  Two are made here.  turns: conversations that share a few system
prompts and come back with all that was said.  mixed: short requests, and now and then a prompt that
takes most of the cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from simulation import Costs, Load, token_at
from trace_files import AZURE_CONV, MOONCAKE, azure, scaled_mooncake, trace

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """A load and the machine that serves it."""

    make: Callable[[Path], Load]
    num_gpu_blocks: int
    costs: Costs
    max_model_len: int = 16_384
    num_chunk_tokens: int | None = None  # tokens of a step where prompts are cut, else whole ones
    num_cpu_blocks: int = 0
    preemption_mode: Literal["swap"] | None = None
    prefix_caching: bool = False


@dataclass(frozen=True, slots=True)
class Turns:
    """How the synthetic conversations look."""

    num_conversations: int = 1200
    num_systems: int = 4
    system_len: int = 1500
    rate: float = 1.2  # conversations that begin in a second
    pause: float = 30.0  # seconds from turn to turn, on average
    asked_twice: int = 8  # one turn in so many is sent two times at once


def conversations(turns: Turns, seed: int = 0) -> Load:
    """Each turn's prompt holds everything before it, answers included.

    Arrivals are planned: a turn comes after its pause whether or not the last one has ended.
    """
    random = np.random.default_rng(seed)
    systems = random.integers(0, 1 << 20, (turns.num_systems, turns.system_len), dtype=np.int32)
    planned: list[tuple[float, int, int]] = []
    begin = 0.0
    for conversation in range(turns.num_conversations):
        begin += random.exponential(1 / turns.rate)
        when = begin
        for turn in range(int(random.integers(2, 9))):
            planned.append((when, conversation, turn))
            when += 5 + random.exponential(turns.pause)
    planned.sort()
    said = {index: systems[index % turns.num_systems] for index in range(turns.num_conversations)}
    arrivals: list[float] = []
    prompts: list[NDArray[np.int32]] = []
    outputs: list[int] = []
    for when, conversation, _ in planned:
        question = random.integers(0, 1 << 20, int(random.integers(20, 200)), dtype=np.int32)
        prompt = np.concatenate((said[conversation], question))
        num_answer = int(random.integers(50, 250))
        request = np.array([len(prompts)], dtype=np.int64)
        answer = token_at(request, np.arange(1, num_answer, dtype=np.int64))
        said[conversation] = np.concatenate((prompt, answer))
        for _ in range(2 if len(prompts) % turns.asked_twice == 0 else 1):
            arrivals.append(when)
            prompts.append(prompt)
            outputs.append(num_answer)
    return Load(np.array(arrivals), prompts, np.array(outputs, dtype=np.int64))


def chat(folder: Path) -> Load:
    """The Azure chat half-hour."""
    return azure(trace(folder, AZURE_CONV))


def samples(folder: Path) -> Load:
    """Every second of its requests, four samples each."""
    load = azure(trace(folder, AZURE_CONV))
    return Load(load.arrivals[::2], load.prompts[::2], load.num_outputs[::2], num_samples=4)


def documents(folder: Path) -> Load:
    """The Mooncake hour, prompts at a scale of 1/32."""
    path = trace(folder, MOONCAKE)
    return scaled_mooncake(path, tokens_per_id=BLOCK_SIZE, output_scale=8)


def turns(folder: Path) -> Load:
    """The conversations."""
    del folder
    return conversations(Turns())


def mixed(folder: Path) -> Load:
    """Half an hour of eight short requests a second, and a huge one every ten seconds."""
    del folder
    random = np.random.default_rng(0)
    num_requests = 14_400
    is_huge = random.random(num_requests) < 1 / 80
    huge = random.integers(12_000, 16_000, num_requests)
    short = random.integers(50, 400, num_requests)
    lengths = np.where(is_huge, huge, short)
    zeros = np.zeros(16_000, dtype=np.int32)
    return Load(
        arrivals=np.cumsum(random.exponential(1 / 8, num_requests)),
        prompts=[zeros[:length] for length in lengths],
        num_outputs=random.integers(20, 300, num_requests),
    )


# A token of the scaled hour stands for 32.
SCALED = Costs(token=0.000_6)
SHORT = Costs(token=0.000_02)

WORKLOADS = {
    "chat": Workload(chat, 2500, Costs()),
    "chat, chunks": Workload(chat, 2500, Costs(), num_chunk_tokens=2048),
    "chat, swap": Workload(chat, 2500, Costs(), num_cpu_blocks=4000, preemption_mode="swap"),
    "samples": Workload(samples, 2500, Costs(), num_cpu_blocks=4000),
    "mixed": Workload(mixed, 1500, SHORT),
    "mixed, chunks": Workload(mixed, 1500, SHORT, num_chunk_tokens=2048),
    "documents": Workload(documents, 20_000, SCALED, max_model_len=4096, prefix_caching=True),
    "documents, tight": Workload(documents, 600, SCALED, max_model_len=4096, prefix_caching=True),
    "documents, tight, chunks": Workload(
        documents, 600, SCALED, max_model_len=4096, num_chunk_tokens=512, prefix_caching=True
    ),
    "turns, room": Workload(turns, 20_000, SHORT, prefix_caching=True),
    "turns": Workload(turns, 1500, SHORT, prefix_caching=True),
    "turns, chunks": Workload(turns, 1500, SHORT, num_chunk_tokens=2048, prefix_caching=True),
    "turns, swap": Workload(
        turns, 1500, SHORT, num_cpu_blocks=4000, preemption_mode="swap", prefix_caching=True
    ),
}

"""Scenarios: requests, aborts and planned outputs, read from JSON and checked.

The format is that of the recorded decisions under ``tests/golden`` (its README describes it).
Tokens are computed by a formula, so that a file stays small.
"""

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedserve.errors import ConfigError, reason

# Tokens of prompts and outputs are numbers below a prime, from 10 on.
_PRIME = 31991
_FIRST_TOKEN = 10


class ScenarioError(ConfigError):
    """A scenario or golden file that cannot be read as one."""


@dataclass(frozen=True, slots=True)
class ScenarioConfig:
    """Scheduler and cache configuration of a scenario; fields as in vLLM 0.6.2."""

    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    watermark: float
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    sliding_window: int | None
    delay_factor: float
    preemption_mode: Any  # checked by SchedulerConfig
    max_loras: int | None
    policy: Any = "fcfs"


@dataclass(frozen=True, slots=True)
class ScenarioRequest:
    """A request of a scenario: arrival, prompt and planned output.

    Attributes:
        prompt: int32 token ids.
        output_lens: planned output length of each branch; the last is used for all further ones.
        beam_period: a beam group forks where (output length + ordinal) is a multiple of it.
    """

    id: str
    ordinal: int
    step: int
    arrival_time: float
    prompt: NDArray[np.int32]
    out_seed: int
    best_of: int
    use_beam_search: bool
    beam_period: int
    lora_int_id: int
    priority: int
    output_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Events of a run, step by step.

    Attributes:
        aborts: ids to abort before a step.
        last_step: the last step with an event before it.
    """

    name: str
    config: ScenarioConfig
    requests: tuple[ScenarioRequest, ...]
    aborts: Mapping[int, tuple[str, ...]]
    records_queues: bool

    @property
    def last_step(self) -> int:
        """The last step with a request or an abort before it; -1 if there is none."""
        return max([*(request.step for request in self.requests), *self.aborts], default=-1)


def read_text(path: Path) -> str:
    """Read a text file, decompressing it if its name ends in .gz.

    Raises:
        ScenarioError: The file cannot be read or decompressed.
    """
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ScenarioError(f"{path} cannot be read: {reason(error)}") from error


def load_scenario(path: Path) -> Scenario:
    """Read a scenario.

    Raises:
        ScenarioError: The file cannot be read, is truncated, or lacks a field.
    """
    try:
        return _scenario(json.loads(read_text(path)))
    except json.JSONDecodeError as error:
        raise ScenarioError(f"{path} is not a whole JSON document: {error}") from error
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ScenarioError(f"{path} is not a scenario: {error!r}") from error


def output_token(out_seed: int, branch: int, position: int) -> int:
    """Token at ``position`` of the output of a branch."""
    spread = branch * 1299709 + position * 15485863 + position * position * 17
    return _FIRST_TOKEN + (out_seed * 7919 + spread + 5) % _PRIME


def _scenario(data: Any) -> Scenario:
    if data["format"] != 1:
        raise ValueError(f"the format is {data['format']!r}; 1 is understood")
    config = {key: value for key, value in data["config"].items() if key != "block_manager"}
    aborts: dict[int, tuple[str, ...]] = {}
    for abort in data["aborts"]:
        step = index(abort["step"])
        aborts[step] = (*aborts.get(step, ()), abort["id"])
    return Scenario(
        name=data["name"],
        config=ScenarioConfig(**config),
        requests=tuple(
            _request(request, ordinal) for ordinal, request in enumerate(data["requests"])
        ),
        aborts=aborts,
        records_queues=data.get("record_queues", True),
    )


def _request(data: Any, ordinal: int) -> ScenarioRequest:
    segments = [_segment(segment) for segment in data["prompt"]]
    request = ScenarioRequest(
        id=data["id"],
        ordinal=ordinal,
        step=index(data["step"]),
        arrival_time=float(data["arrival_time"]),
        prompt=np.concatenate(segments).astype(np.int32),
        out_seed=index(data["out_seed"]),
        best_of=index(data["best_of"]),
        use_beam_search=data.get("use_beam_search", False),
        beam_period=index(data.get("beam_period", 3)),
        lora_int_id=index(data.get("lora_int_id", 0)),
        priority=index(data.get("priority", 0)),
        output_lens=tuple(map(index, data["output_lens"])),
    )
    if not request.output_lens or min(request.best_of, request.beam_period) < 1:
        raise ValueError(f"{request.id!r} has no output_lens, or best_of or beam_period below 1")
    return request


def _segment(data: Any) -> NDArray[np.int64]:
    if "token_ids" in data:
        return np.array(data["token_ids"], dtype=np.int64)
    if "out_seed" in data:
        tokens = [output_token(data["out_seed"], data["branch"], p) for p in range(data["len"])]
        return np.array(tokens, dtype=np.int64)
    start = data.get("offset", 0)
    places = np.arange(start, start + data["len"], dtype=np.int64)
    mixed: NDArray[np.int64] = data["seed"] * 7919 + places * 104729 + places * places * 31
    return _FIRST_TOKEN + mixed % _PRIME

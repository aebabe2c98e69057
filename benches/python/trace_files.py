"""Public request traces as loads: the Azure hours, the Mooncake hour.

The files are those of a `shared/traces` folder; its README says where they come from.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from simulation import Load

AZURE_CODE = "azure_llm_2023_code.csv.gz"
AZURE_CONV = "azure_llm_2023_conv_part1.csv.gz"
MOONCAKE = "mooncake_conversation.jsonl.gz"
# Tokens that one id of the Mooncake trace stands for.
TOKENS_PER_ID = 512


@dataclass(frozen=True, slots=True)
class MooncakeRequest:
    """A line of the trace; equal ids mean an equal prefix up to there."""

    arrival: float
    input_length: int
    output_length: int
    ids: NDArray[np.int32]


def trace(folder: Path, name: str) -> Path:
    """The path of a trace.

    Raises:
        SystemExit: It is not there.
    """
    path = folder / name
    if not path.exists():
        raise SystemExit(f"{path} is not there; --traces names the folder that holds {name}")
    return path


def azure(path: Path) -> Load:
    """Lengths and arrivals of an Azure hour; the prompts are all zeros, their contents unknown."""
    with gzip.open(path, "rt") as lines:
        rows = [line.strip().split(",") for line in lines][1:]
    # Seven digits of a second are one too many for datetime.
    times = [datetime.fromisoformat(stamp[:26]) for stamp, _, _ in rows]
    lengths = [int(length) for _, length, _ in rows]
    zeros = np.zeros(max(lengths), dtype=np.int32)
    return Load(
        arrivals=np.array([(time - times[0]).total_seconds() for time in times]),
        prompts=[zeros[:length] for length in lengths],
        num_outputs=np.array([int(output) for _, _, output in rows], dtype=np.int64),
    )


def mooncake(path: Path) -> Iterator[MooncakeRequest]:
    """The requests of the Mooncake hour, in order."""
    with gzip.open(path, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            yield MooncakeRequest(
                arrival=row["timestamp"] / 1e3,
                input_length=row["input_length"],
                output_length=row["output_length"],
                ids=np.array(row["hash_ids"], dtype=np.int32),
            )


def scaled_mooncake(path: Path, *, tokens_per_id: int, output_scale: int) -> Load:
    """The Mooncake hour with fewer tokens an id and shorter outputs."""
    requests = list(mooncake(path))
    offsets = np.arange(tokens_per_id, dtype=np.int32)
    prompts = []
    for request in requests:
        tokens = (request.ids[:, None] * tokens_per_id + offsets).ravel()
        prompts.append(tokens[: -(-request.input_length * tokens_per_id // TOKENS_PER_ID)])
    return Load(
        arrivals=np.array([request.arrival for request in requests]),
        prompts=prompts,
        num_outputs=np.array([-(-request.output_length // output_scale) for request in requests]),
    )

"""Traces of recorded traffic: lengths of prompts and outputs, and arrival times.

The format of a file is detected by its columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from pagedserve.bench.files import Record, read_records
from pagedserve.errors import RequestError


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace.

    Attributes:
        num_input_tokens: Tokens of its prompt.
        num_output_tokens: Tokens of its output.
        time_s: Arrival time, in seconds since any epoch; None if the trace has no times.
        block_ids: Names of the blocks of its prompt, equal for equal prefixes; () if the trace has
            none.
    """

    num_input_tokens: int
    num_output_tokens: int
    time_s: float | None = None
    block_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Format:
    """Columns of a publisher's format, and how its times are parsed."""

    inputs: str
    outputs: str
    time: str | None = None
    seconds: Callable[[Any], float] = float
    blocks: str | None = None

    def columns(self) -> set[str]:
        return {name for name in (self.inputs, self.outputs, self.time) if name is not None}

    def row(self, record: Record) -> TraceRow:
        return TraceRow(
            num_input_tokens=int(record[self.inputs]),
            num_output_tokens=int(record[self.outputs]),
            time_s=None if self.time is None else self.seconds(record[self.time]),
            block_ids=() if self.blocks is None else _block_ids(record.get(self.blocks, ())),
        )


def _seconds_of_date(text: str) -> float:
    # Any time zone: only differences matter, and UTC has no repeated hours.
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def _block_ids(given: Sequence[object]) -> list[int]:
    block_ids = [block_id for block_id in given if isinstance(block_id, int) and block_id >= 0]
    if len(block_ids) != len(given):
        raise ValueError("block ids are integers, 0 or more")
    return block_ids


_FORMATS = {
    "Azure LLM inference": _Format(
        "ContextTokens", "GeneratedTokens", time="TIMESTAMP", seconds=_seconds_of_date
    ),
    "Mooncake": _Format(
        "input_length",
        "output_length",
        time="timestamp",
        seconds=lambda milliseconds: float(milliseconds) / 1000,
        blocks="hash_ids",
    ),
    "Vidur": _Format("num_prefill_tokens", "num_decode_tokens"),
}


def read_trace(path: Path, *, max_rows: int) -> list[TraceRow]:
    """Read the first rows of a trace, sorted by their times.

    Args:
        path: A file in one of the known formats (see ``read_records`` for its name).
        max_rows: Maximum number of rows.

    Raises:
        RequestError: The file cannot be read, has an unknown format, or has no rows.
    """
    records = list(islice(read_records(path), max_rows))
    if not records:
        raise RequestError(f"--dataset-path {path} has no requests")
    known = _format_of(path, records[0])
    rows = [_row(path, number, record, known) for number, record in enumerate(records, start=1)]
    return sorted(rows, key=lambda row: row.time_s or 0.0)


def _row(path: Path, number: int, record: Record, known: _Format) -> TraceRow:
    try:
        return known.row(record)
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(f"--dataset-path {path}: request {number}: {error!r}") from error


def _format_of(path: Path, record: Record) -> _Format:
    for known in _FORMATS.values():
        if known.columns() <= record.keys():
            return known
    accepted = "; ".join(
        f"{name}: {', '.join(sorted(known.columns()))}" for name, known in _FORMATS.items()
    )
    raise RequestError(
        f"--dataset-path {path} has the columns {', '.join(record)}; known are {accepted}"
    )

"""Files of benchmarks: requests and results.

Requests are CSV with a header or one JSON object per line, optionally gzipped.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from pagedserve.errors import ConfigError, RequestError

Record = dict[str, Any]


def read_records(path: Path) -> Iterator[Record]:
    """Read the records of a file, one by one.

    Args:
        path: A file whose name ends in .csv, .jsonl, .csv.gz or .jsonl.gz.

    Raises:
        RequestError: The file has another suffix, cannot be read, or has invalid contents.
    """
    name = path.name.removesuffix(".gz")
    if not name.endswith((".csv", ".jsonl")):
        raise RequestError(f"--dataset-path {path} ends in neither .csv nor .jsonl (nor .gz)")
    is_csv = name.endswith(".csv")
    open_text = gzip.open if path.name.endswith(".gz") else open
    try:
        with open_text(path, "rt", encoding="utf-8-sig", newline="") as lines:
            yield from (_csv_records if is_csv else _json_records)(path, lines)
    except OSError as error:
        raise RequestError(f"cannot read --dataset-path {path}: {error}") from error
    except (csv.Error, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise RequestError(f"--dataset-path {path} is damaged: {error}") from error


def _csv_records(path: Path, lines: TextIO) -> Iterator[Record]:
    for number, record in enumerate(csv.DictReader(lines), start=1):
        if None in record:
            text = f"request {number} has more fields than the header has columns"
            raise RequestError(f"--dataset-path {path}: {text}")
        yield record


def _json_records(path: Path, lines: TextIO) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"--dataset-path {path}: line {number}: {error}") from error
        if not isinstance(record, dict):
            raise RequestError(f"--dataset-path {path}: line {number} is no JSON object")
        yield record


def write_json(path: Path, fields: Record, *, append: bool = False) -> None:
    """Write results to a file, whose directory is created; or append them, as a further line.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error

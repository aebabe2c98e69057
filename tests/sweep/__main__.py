"""Runs every causal architecture of transformers here: ``make sweep``.

    python -m tests.sweep [--results FILE] [PATTERN ...]

Each architecture runs in a process of its own, so that a crash ends only that.  FILE keeps the
outcomes from one run to the next; when all are there, docs/models.md gets its table.
"""

import json
import os
import re
import sys
from argparse import ArgumentParser
from collections import defaultdict
from fnmatch import fnmatch
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import transformers
from tqdm import tqdm
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.sweep.outcome import Outcome, run_architecture

_PAGE: Final = Path(__file__).parents[2] / "docs" / "models.md"
_BEGIN, _END = "<!-- sweep -->\n", "<!-- end of sweep -->\n"
_SECONDS: Final = 60
_MODEL_TYPES: Final = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_FAULTS: Final = ("wrong", "crashed")


def main() -> int:
    """Run what is asked for; the exit status is 1 where anything is wrong or crashed."""
    parser = ArgumentParser(description="every causal architecture of transformers, tiny")
    parser.add_argument("patterns", nargs="*", default=["*"], help="of model types; all of them")
    parser.add_argument("--results", type=Path, default=Path("target/sweep.json"))
    arguments = parser.parse_args()
    results: Path = arguments.results
    outcomes = _read(results)
    wanted = [name for name in _MODEL_TYPES if any(fnmatch(name, p) for p in arguments.patterns)]
    for model_type in (bar := tqdm(wanted, unit="architecture")):
        bar.set_postfix_str(model_type)
        outcomes[model_type] = run_apart(model_type)
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(list(outcomes.values()), indent=1), encoding="utf-8")
    sys.stdout.write(table(list(outcomes.values())))
    if set(_MODEL_TYPES) <= outcomes.keys():
        _write_page(table(list(outcomes.values())))
    return int(any(outcome.kind in _FAULTS for outcome in outcomes.values()))


def run_apart(model_type: str) -> Outcome:
    """Run an architecture in a process of its own."""
    context = get_context("fork")  # what is imported here is imported there
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(model_type, sending))
    process.start()
    sending.close()
    try:
        if receiving.poll(_SECONDS):
            return Outcome(*receiving.recv())
        process.kill()
        return Outcome(model_type, "crashed", f"no answer in {_SECONDS} s")
    except EOFError:
        process.join()
        return Outcome(model_type, "crashed", f"its process ended with {process.exitcode}")
    finally:
        process.join()


def table(outcomes: list[Outcome]) -> str:
    """Counts and lists by outcome, as Markdown."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for outcome in sorted(outcomes):
        groups[outcome.kind, _kind_of_reason(outcome)].append(outcome.model_type)
    kinds = ("exact", "refused", "wrong", "crashed", "not built")
    rows = [
        f"| {kind} | {len(names)} | {reason} | {', '.join(names)} |"
        for (kind, reason), names in sorted(
            groups.items(), key=lambda item: (kinds.index(item[0][0]), -len(item[1]))
        )
    ]
    counts = ", ".join(
        f"{sum(outcome.kind == kind for outcome in outcomes)} {kind}" for kind in kinds
    )
    title = f"transformers {transformers.__version__}, {len(outcomes)} architectures: {counts}."
    head = "| outcome | number | reason | architectures |\n|---|---|---|---|"
    return "\n".join([title, "", head, *rows, ""])


def _kind_of_reason(outcome: Outcome) -> str:
    """What a refusal says, without the architecture's name and numbers."""
    said = outcome.reason.split("cannot be run: ")[-1].split(";")[0].split(" (accepted")[0]
    if outcome.kind == "refused" and "differ from its own" in said:
        return "logits differ from its own"
    return re.sub(r"\d+", "N", said).replace("|", "/")


def _send(model_type: str, connection: Connection) -> None:
    with Path(os.devnull).open("w") as nowhere:  # what models say would tear the progress bar
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    connection.send(tuple(run_architecture(model_type)))


def _read(results: Path) -> dict[str, Outcome]:
    if not results.is_file():
        return {}
    listed = json.loads(results.read_text(encoding="utf-8"))
    return {fields[0]: Outcome(*fields) for fields in listed}


def _write_page(found: str) -> None:
    page = _PAGE.read_text(encoding="utf-8")
    before, rest = page.split(_BEGIN)
    after = rest.split(_END)[1]
    _PAGE.write_text(f"{before}{_BEGIN}{found}{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

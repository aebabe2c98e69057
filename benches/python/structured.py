"""Decode steps of rows that keep to a JSON schema, beside the same steps of rows that need not.

Runs of both kinds take turns; a ratio is that of the medians of one round.
"""

import argparse
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

from measuring import report_table

from pagedserve import LLM, SamplingParams

ITEM = {
    "type": "object",
    "properties": {
        "sku": {"type": "string"},
        "price": {"type": "number"},
        "stock": {"type": "boolean"},
    },
    "required": ["sku", "price", "stock"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "items": {"type": "array", "items": ITEM},
    },
    "required": ["title", "tags", "items"],
    "additionalProperties": False,
}
NUM_TOKENS = 80
# Steps with prompts, and those behind the first text that ends, are left out.
NUM_WARM_UP = 5


def step_ms(llm: LLM, num_rows: int, ways: dict[str, Any]) -> float:
    """The median of a decode step of all rows, in milliseconds."""
    engine = llm.llm_engine
    for row in range(num_rows):
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=row, **ways)
        engine.add_request(str(row), f"Item {row}: write a record as JSON:\n", params)
    seconds = []
    while engine.has_unfinished_requests():
        is_whole = len(engine.scheduler.running) == num_rows
        started = perf_counter()
        engine.step()
        if is_whole:
            seconds.append(perf_counter() - started)
    return 1e3 * median(seconds[NUM_WARM_UP:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    options = parser.parse_args(arguments)
    llm = LLM(options.model, dtype=options.dtype, max_num_seqs=options.rows, max_model_len=512)
    bound = {"structured_outputs": {"json": SCHEMA}}
    rows = []
    for name, ways in (("greedy", {"temperature": 0}), ("drawn", {"temperature": 0.8})):
        step_ms(llm, options.rows, ways | bound)  # the vocabulary is read
        pairs = [
            (
                step_ms(llm, options.rows, ways | {"ignore_eos": True}),
                step_ms(llm, options.rows, ways | bound),
            )
            for _ in range(options.rounds)
        ]
        free, kept = (median(column) for column in zip(*pairs, strict=True))
        ratio = median(kept / free for free, kept in pairs)
        row = {"rows": options.rows, "sampling": name, "free_ms": free, "schema_ms": kept}
        rows.append(row | {"median_ratio": ratio})
    report_table("decode step", rows, as_json=options.json)


if __name__ == "__main__":
    main()

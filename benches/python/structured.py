"""Decode steps of rows that keep to a JSON schema, beside the same steps of rows that need not.

Steps of both kinds take turns; a ratio is that of the medians of one round.
"""

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

from measuring import report_table
from turns import steps_in_turn

from pagedserve import LLM, LLMEngine, SamplingParams

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


def compare(engines: Sequence[LLMEngine], num_rows: int, ways: Sequence[dict[str, Any]]) -> float:
    """Seconds of the second engine's decode steps of all rows over those of the first's."""
    for engine, way in zip(engines, ways, strict=True):
        for row in range(num_rows):
            params = SamplingParams(max_tokens=NUM_TOKENS, seed=row, **way)
            engine.add_request(str(row), f"Item {row}: write a record as JSON:\n", params)
    seconds: list[list[float]] = [[], []]
    for place, spent, outputs in steps_in_turn(engines):
        if len(outputs) == num_rows:
            seconds[place].append(spent)
    free, kept = (median(steps[NUM_WARM_UP:]) for steps in seconds)
    return kept / free


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    options = parser.parse_args(arguments)
    given: dict[str, Any] = {"dtype": options.dtype, "max_num_seqs": options.rows}
    given |= {"max_model_len": 512, "use_tqdm_on_load": False, "disable_log_stats": True}
    pair = [LLM(options.model, **given).llm_engine for _ in range(2)]
    bound = {"structured_outputs": {"json": SCHEMA}}
    rows = []
    for name, way in (("greedy", {"temperature": 0}), ("drawn", {"temperature": 0.8})):
        ways = way | {"ignore_eos": True}, way | bound
        compare(pair, options.rows, ways)  # warms up, and the vocabulary is read
        # Each engine is once the first, so what is theirs alone cancels out.
        ratios = [
            compare(pair[:: (-1) ** turn], options.rows, ways) for turn in range(options.rounds)
        ]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        row = {"rows": options.rows, "sampling": name, "schema/free": median(ratios)}
        rows.append(row | {"spread": spread})
    report_table("decode step", rows, as_json=options.json)


if __name__ == "__main__":
    main()

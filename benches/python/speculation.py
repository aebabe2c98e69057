"""Whole answers with guessed tokens beside the same without, in turn, and their tokens compared.

A ratio is that of the medians of one run; above 1 the guesses are faster.
"""

import argparse
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

from measuring import report_table

from pagedserve import LLM, SamplingParams, TokenLookup

CODE = """def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius * shape.radius
    if shape.kind == "square":
        return shape.side * shape.side
    if shape.kind == "triangle":
        return 0.5 * shape.base * shape.height
    raise ValueError(shape.kind)
"""
CITIES = (
    "Berlin 3.6 million, Hamburg 1.8 million, Munich 1.5 million, Cologne 1.1 million, "
    "Frankfurt 0.8 million, Stuttgart 0.6 million, Leipzig 0.6 million"
)
MAIL = (
    "From: Ada Brown <ada.brown@example.org>\nTo: Tom Field <tom.field@example.org>\n"
    "Subject: Delivery of order 48-1273\n\nDear Tom, the 24 oak chairs and the 6 walnut tables of "
    "order 48-1273 leave our workshop in Leeds on 14 March and arrive in Bristol on 16 March."
)
WORK: dict[str, list[str]] = {
    "edit": [
        f"Rewrite this Python function with the name `surface` and change nothing else.\n\n{CODE}",
        f"Copy this Python code and add a comment above the first line.\n\n{CODE}",
    ],
    "extract, repeat": [
        f"Repeat the following list exactly: {CITIES}.",
        f"Write the sentence of this mail that says what is delivered, word by word.\n\n{MAIL}",
    ],
    "chat": [
        "Why is the sky blue?",
        "Write a short story about a lighthouse keeper.",
        "How do I get better at chess?",
    ],
}
NUM_TOKENS = 160


def conversations(kind: str, num_rows: int) -> list[list[dict[str, str]]]:
    """So many prompts of a kind."""
    texts = WORK[kind]
    return [[{"role": "user", "content": texts[row % len(texts)]}] for row in range(num_rows)]


def run(llm: LLM, chats: Any, params: SamplingParams) -> tuple[float, list[list[int]], str]:
    """Seconds, the tokens, and how many guesses were right."""
    started = perf_counter()
    outputs = llm.chat(chats, params, use_tqdm=False)
    seconds = perf_counter() - started
    metrics = [output.metrics for output in outputs]
    drafted = sum(entry.num_draft_tokens for entry in metrics)
    accepted = sum(entry.num_accepted_tokens for entry in metrics)
    return seconds, [list(o.outputs[0].token_ids) for o in outputs], f"{accepted}/{drafted}"


def lookup_us(num_tokens: int) -> float:
    """Microseconds to take a token in and ask, in a text of so many."""
    lookup = TokenLookup(min_match=2, max_match=16)
    lookup.extend([(7 * place * place + place // 3) % 997 for place in range(num_tokens)])
    seconds = []
    for place in range(2000):
        started = perf_counter()
        lookup.extend([place * 31 % 997])
        lookup.propose(8)
        seconds.append(perf_counter() - started)
    return 1e6 * median(seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    config = {"method": args.method, "num_speculative_tokens": args.num_speculative_tokens}
    given: dict[str, Any] = {"dtype": args.dtype, "num_gpu_blocks": 2048, "max_num_seqs": 64}
    given |= {"use_tqdm_on_load": False, "disable_log_stats": True}
    plain, guessing = LLM(args.model, **given), LLM(args.model, speculative_config=config, **given)
    rows = []
    for num_rows in args.rows:
        for kind in WORK:
            for way in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.95, "seed": 1}):
                params = SamplingParams(max_tokens=NUM_TOKENS, **way)
                pair = compare((plain, guessing), kind, num_rows, params, args.rounds)
                rows.append(pair)
    report_table("speculation", rows, as_json=args.json)
    print(f"lookup in 8,192 tokens: {lookup_us(8192):.1f} us a row")


def compare(
    pair: tuple[LLM, LLM], kind: str, num_rows: int, params: SamplingParams, rounds: int
) -> dict[str, object]:
    """Runs without guesses and with them in turn; one prompt after the other for one row."""
    size = len(WORK[kind]) if num_rows == 1 else num_rows
    chats = conversations(kind, size)
    batches = [[chat] for chat in chats] if num_rows == 1 else [chats]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    num_different, said = 0, ""
    for turn in range(rounds + 1):
        took = {False: 0.0, True: 0.0}
        for batch in batches:
            tokens = {}
            for is_guessed, llm in zip((False, True), pair, strict=True):
                spent, tokens[is_guessed], said = run(llm, batch, params)
                took[is_guessed] += spent
            pairs = zip(tokens[False], tokens[True], strict=True)
            num_different += sum(one != other for one, other in pairs)
        if turn:  # the first warms up
            for is_guessed, spent in took.items():
                seconds[is_guessed].append(spent)
    without, with_ = median(seconds[False]), median(seconds[True])
    return {
        "rows": num_rows,
        "work": kind,
        "temperature": params.temperature,
        "without s": round(without, 2),
        "with s": round(with_, 2),
        "ratio": round(without / with_, 2),
        "right/guessed (last)": said,
        "different": num_different,
    }


if __name__ == "__main__":
    main()

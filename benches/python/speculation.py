"""Steps with guessed tokens beside steps without, in turn until all have answered; tokens compared.

A ratio is that of the seconds of all steps of a round, above 1 the drafts are faster: its median
over the rounds and its spread.  `--method off` compares an engine with another like it.
"""

import argparse
import sys
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

from measuring import report_table
from turns import steps_in_turn

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


def prompts(llm: LLM, kind: str, num_rows: int) -> list[str]:
    """So many of a kind."""
    texts = WORK[kind]
    chats = [[{"role": "user", "content": texts[row % len(texts)]}] for row in range(num_rows)]
    render = llm.get_tokenizer().apply_chat_template
    return [str(render(chat, tokenize=False, add_generation_prompt=True)) for chat in chats]


class Round:
    """One batch on both engines: seconds, tokens, and how many draft tokens were accepted."""

    def __init__(self, pair: Sequence[LLM], batch: Sequence[str], params: SamplingParams) -> None:
        engines = [llm.llm_engine for llm in pair]
        for engine in engines:
            for row, prompt in enumerate(batch):
                engine.add_request(str(row), prompt, params)
        self.seconds = [0.0, 0.0]
        self.tokens: list[dict[str, list[int]]] = [{}, {}]
        self.drafted = self.accepted = 0
        for place, seconds, outputs in steps_in_turn(engines):
            self.seconds[place] += seconds
            for output in outputs:
                if output.finished:
                    self.tokens[place][output.request_id] = list(output.outputs[0].token_ids)
                    self.drafted += output.metrics.num_draft_tokens
                    self.accepted += output.metrics.num_accepted_tokens

    @property
    def num_different(self) -> int:
        """Texts that differ with drafts."""
        without, with_ = self.tokens
        return sum(tokens != with_[request] for request, tokens in without.items())


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
    drafts: dict[str, Any] = {} if args.method == "off" else {"speculative_config": config}
    pair = LLM(args.model, **given), LLM(args.model, **drafts, **given)
    rows = []
    for num_rows in args.rows:
        for kind in WORK:
            for way in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.95, "seed": 1}):
                params = SamplingParams(max_tokens=NUM_TOKENS, **way)
                rows.append(compare(pair, kind, num_rows, params, args.rounds))
                print(rows[-1], file=sys.stderr, flush=True)
    report_table("speculation", rows, as_json=args.json)
    print(f"lookup in 8,192 tokens: {lookup_us(8192):.1f} us a row")


def compare(
    pair: Sequence[LLM], kind: str, num_rows: int, params: SamplingParams, rounds: int
) -> dict[str, object]:
    """Rounds of a kind of work; one prompt after the other for one row."""
    texts = prompts(pair[0], kind, len(WORK[kind]) if num_rows == 1 else num_rows)
    batches = [[text] for text in texts] if num_rows == 1 else [texts]
    seconds: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        done = [Round(pair, batch, params) for batch in batches]
        without, with_ = (
            sum(times) for times in zip(*(turn.seconds for turn in done), strict=True)
        )
        seconds.append((without, with_))
    del seconds[0]  # it warms up
    ratios = [without / with_ for without, with_ in seconds]
    accepted, drafted = sum(turn.accepted for turn in done), sum(turn.drafted for turn in done)
    return {
        "rows": num_rows,
        "work": kind,
        "temperature": params.temperature,
        "without s": round(median(without for without, _ in seconds), 2),
        "with s": round(median(with_ for _, with_ in seconds), 2),
        "ratio": round(median(ratios), 3),
        "spread": f"{min(ratios):.3f} to {max(ratios):.3f}",
        "right/guessed (last)": f"{accepted}/{drafted}",
        "different (last)": sum(turn.num_different for turn in done),
    }


if __name__ == "__main__":
    main()

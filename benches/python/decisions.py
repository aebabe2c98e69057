"""Typed decisions: the time of several questions about one state, against that of one question.

Each round times both, one directly after the other, on states that were never seen before, so that
nothing is cached.  The bar is 1.5 times the time of one question for eight over 512 tokens.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

from pagedserve import LLM, Question

QUESTION: Question = {
    "type": "choice",
    "instructions": "Who takes request {}?",
    "criteria": {"refunds": None, "shipping": None, "sales": None},
}


def questions_of(number: int) -> dict[str, Question]:
    """That many questions, all different."""
    return {
        str(index): {**QUESTION, "instructions": str(QUESTION["instructions"]).format(index)}
        for index in range(number)
    }


def state_of(llm: LLM, seed: int, num_tokens: int) -> str:
    """A text of that many tokens which begins differently for each seed."""
    text = f"{seed}: " + "The parcel was sent to another town and came back unopened. " * num_tokens
    tokenizer = llm.get_tokenizer()
    return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:num_tokens]))


def seconds_of(llm: LLM, state: str, number: int) -> float:
    """Seconds of a decision with that many questions."""
    questions = questions_of(number)
    started = time.perf_counter()
    llm.decide(state, questions)
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the ratio of each round's times, and of their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--state-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--enable-prefix-caching", action="store_true")
    options = parser.parse_args(arguments)
    llm = LLM(
        options.model,
        enable_prefix_caching=options.enable_prefix_caching,
        use_tqdm_on_load=False,
    )
    rounds = []
    for number in range(-2, options.rounds):  # the first two warm up
        states = [state_of(llm, 2 * number + part, options.state_tokens) for part in range(2)]
        one, several = (
            seconds_of(llm, state, count)
            for state, count in zip(states, (1, options.questions), strict=True)
        )
        if number >= 0:
            rounds.append((one, several))
    one, several = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratios = [after / before for before, after in rounds]
    print(
        f"{options.questions} questions over {options.state_tokens} tokens: "
        f"{several * 1000:.1f} ms, one {one * 1000:.1f} ms, ratio of the medians "
        f"{several / one:.2f}, of rounds {min(ratios):.2f} to {max(ratios):.2f}; "
        f"{1 / several:.2f} decisions/s"
    )


if __name__ == "__main__":
    main()

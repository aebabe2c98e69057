"""Those who guess next tokens, right or wrong, and engines that ask them whatever it costs."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from pagedserve import LLM, LLMEngine
from pagedserve.drafts.load import StepTimes
from pagedserve.drafts.proposer import DraftedText
from tests.support.tiny import VOCAB_SIZE

MOST = 5
NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": MOST}


class FlatTimes(StepTimes):
    """Every step takes as long, so that every guess is worth its time."""

    def is_known(self, num_tokens: int) -> bool:
        return num_tokens > 0

    def seconds(self, num_tokens: int) -> float:
        return 1.0 + 0 * num_tokens


class Guesser:
    """Guesses so many right tokens of known answers and wrong ones behind them; or anything."""

    def __init__(self, answers: Mapping[tuple[int, ...], list[list[int]]], num_right: int) -> None:
        self._answers = answers
        self._num_right = num_right

    def propose(self, texts: Sequence[DraftedText], most: Sequence[int]) -> list[list[int]]:
        return [self._propose(text, number) for text, number in zip(texts, most, strict=True)]

    def end(self, text: DraftedText) -> None:
        assert text.token_ids is not None

    def _propose(self, text: DraftedText, most: int) -> list[int]:
        said = list(text.token_ids)
        answers = self._answers[tuple(text.prompt_token_ids)]
        futures = [answer[len(said) :] for answer in answers if answer[: len(said)] == said]
        future = futures[0] if futures else []  # only the best of several were told
        right = future[: self._num_right]
        wrong = [(token + 1) % VOCAB_SIZE for token in future[len(right) :]]
        return [*right, *wrong][:most]


class Noise(Guesser):
    """Guesses anything, now and then nothing."""

    def _propose(self, text: DraftedText, most: int) -> list[int]:
        rng = random.Random(repr((list(text.token_ids), most)))
        return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, most))]


def drafting(llm: LLM, proposer: Any = None) -> LLM:
    """An engine that drafts whatever it costs, by a proposer of the test's."""
    draft_always(llm.llm_engine, proposer)
    return llm


def draft_always(engine: LLMEngine, proposer: Any = None) -> None:
    """Have an engine draft whatever it costs, by a proposer of the test's."""
    drafter = engine._loop._drafter
    assert drafter is not None
    drafter._times = FlatTimes()
    if proposer is not None:
        drafter._proposer = proposer

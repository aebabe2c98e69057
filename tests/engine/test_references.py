"""Whether what transformers answered when it was recorded still stands.

The weights must be those it was asked about.  Asking again takes minutes, so that is nightly; where
transformers or torch changed an answer, `make references` records it again, and the difference
is to be looked at.
"""

from typing import Any

import pytest

from pagedserve import LLM
from tests.support import beams, greedy, logprobs, references

NAMES = (greedy.NAME, beams.NAME, logprobs.NAME)
# Records are rounded to 1e-6; another build of torch sums in another order.
TOLERANCE = 1e-4


def test_they_are_of_the_weights_in_use(model_package: None) -> None:
    used = references.weights_hash()
    recorded = {name: references.read(name)["made_with"]["weights_sha256"] for name in NAMES}
    assert recorded == dict.fromkeys(NAMES, used)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_greedy_tokens_are_what_transformers_says(smollm2: LLM, peer: Any) -> None:
    now = greedy.ask(peer, smollm2.get_tokenizer())
    recorded = references.read(greedy.NAME)["answers"]
    assert len(now) == len(recorded)
    for asked, kept in zip(now, recorded, strict=True):
        assert asked | {"gaps": None} == kept | {"gaps": None}
        assert asked["gaps"] == pytest.approx(kept["gaps"], abs=TOLERANCE)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("width", beams.RECORDED_GRID.ways)
def test_beams_are_what_transformers_says(smollm2: LLM, peer: Any, width: int) -> None:
    tokenizer = smollm2.get_tokenizer()
    now = beams.ask_live(peer, tokenizer, beams.RECORDED_GRID, width)
    recorded = beams.recorded(width)
    assert (now.prompts, now.eos_token_id) == (recorded.prompts, recorded.eos_token_id)
    for (way, asked), (same_way, kept) in zip(now.answers, recorded.answers, strict=True):
        assert way == same_way
        for found, expected in zip(asked, kept, strict=True):
            for answer, kept_answer in zip(found, expected, strict=True):
                assert answer.token_ids == kept_answer.token_ids
                tolerance = way.tolerance(len(answer.token_ids))
                assert answer.score == pytest.approx(kept_answer.score, abs=tolerance)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_log_probabilities_are_what_transformers_says(peer: Any) -> None:
    recorded = logprobs.recorded()
    for token_ids in logprobs.recorded_sequences():
        now = logprobs.ask_one(peer, token_ids)
        for asked, kept in zip(now, recorded(token_ids), strict=True):
            assert asked.next_logprob == pytest.approx(kept.next_logprob, abs=TOLERANCE)
            best = list(kept.best.values())
            assert list(asked.best.values()) == pytest.approx(best, abs=TOLERANCE)
            for token in asked.best.keys() & kept.best.keys():
                assert asked.best[token] == pytest.approx(kept.best[token], abs=TOLERANCE)

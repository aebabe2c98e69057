"""Times of a transcript: the rules are those of transformers, which masks random logits alike."""

import pytest
import torch
from transformers import GenerationConfig, WhisperTimeStampLogitsProcessor

from pagedserve.inputs.speech import TokenRules
from pagedserve.inputs.timestamps import Segment, TimeTokens

# As in Whisper: text, the token that ends a transcript, other special tokens, then times.
END, LANGUAGE, DISABLED, FIRST, VOCAB_SIZE = 40, 41, 45, 46, 60
SUPPRESSED = (3, 9)


def times(latest_start: int | None = None) -> TimeTokens:
    return TimeTokens(
        first=FIRST,
        step=0.5,
        disabled=DISABLED,
        no_speech=DISABLED - 1,
        end=END,
        latest_start=latest_start,
    )


@pytest.mark.parametrize("latest_start", [None, 2])
def test_random_logits_are_masked_as_by_transformers(latest_start: int | None) -> None:
    generator = torch.Generator().manual_seed(5)
    rules = TokenRules(first=((LANGUAGE,),), suppressed=SUPPRESSED, times=times(latest_start))
    config = GenerationConfig(
        eos_token_id=END,
        no_timestamps_token_id=DISABLED,
        max_initial_timestamp_index=latest_start,
    )
    known = WhisperTimeStampLogitsProcessor(config, begin_index=1)
    num_forced = 0
    for _ in range(300):
        token_ids = [LANGUAGE]
        for _ in range(int(torch.randint(0, 8, (1,), generator=generator))):
            is_time = torch.rand(1, generator=generator) < 0.5
            low, high = (max([FIRST, *token_ids]), VOCAB_SIZE) if is_time else (0, END)
            token_ids.append(int(torch.randint(low, high, (1,), generator=generator)))
        logits = torch.randn(VOCAB_SIZE, generator=generator) * 3
        logits[FIRST:] -= 2 * torch.rand(1, generator=generator)
        suppressed = logits.clone()
        suppressed[list(SUPPRESSED)] = -torch.inf
        written = [token >= FIRST for token in token_ids[1:]]
        is_within_segment = len(written) > 1 and written[-2:] != [False, True]
        if is_within_segment and max(token_ids) + 1 < VOCAB_SIZE:
            suppressed[END] = -torch.inf
        expected = known(torch.tensor([token_ids]), suppressed[None])[0]
        assert torch.equal(rules.keep_times(token_ids, logits.clone()), expected), token_ids
        behind = TokenRules(
            suppressed=SUPPRESSED, times=times(latest_start), written=tuple(token_ids[1:3])
        )
        assert torch.equal(behind.keep_times(token_ids[3:], logits.clone()), expected), token_ids
        num_forced += bool(len(token_ids) > 1 and expected[:FIRST].isinf().all())
    assert 30 < num_forced < 270


def test_segments_are_between_their_times() -> None:
    written = [FIRST, 5, 6, FIRST + 4, FIRST + 5, 7, END]
    assert times().segments(written, begin=10, seconds=3) == [
        Segment(start=10, end=12, token_ids=(5, 6)),
        Segment(start=12.5, end=13, token_ids=(7,)),
    ]
    assert times().segments([FIRST, FIRST + 9, END], begin=0, seconds=3) == []
    (whole,) = times().segments([FIRST + 1, 5, FIRST + 9, END], begin=0, seconds=3)
    assert (whole.start, whole.end) == (0.5, 3)  # the audio ends there

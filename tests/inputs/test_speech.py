"""Prompts of the decoders of speech models."""

import pytest
from transformers import GenerationConfig

from pagedserve.errors import RequestError
from pagedserve.inputs.speech import SpeechRules

# As in Whisper: the token that ends a transcript, the first of other special tokens, and times.
END, START, PREVIOUS, NO_TIMESTAMPS, FIRST_TIME = range(50, 55)


@pytest.mark.parametrize("special", [END, START, PREVIOUS, NO_TIMESTAMPS, FIRST_TIME, 59])
def test_previous_transcripts_have_no_special_tokens(special: int) -> None:
    config = GenerationConfig(no_timestamps_token_id=NO_TIMESTAMPS, prev_sot_token_id=PREVIOUS)
    rules = SpeechRules.of(START, config, ends=(END,), vocab_size=60, max_seconds=30)
    assert rules.behind([5, 49]) == [PREVIOUS, 5, 49, START]
    with pytest.raises(RequestError, match="prompt must be text without special tokens"):
        rules.behind([5, special, 6])


def test_a_model_of_one_language_accepts_english() -> None:
    config = GenerationConfig(no_timestamps_token_id=NO_TIMESTAMPS)
    rules = SpeechRules.of(START, config, ends=(END,), vocab_size=60, max_seconds=30)
    assert rules.choices("en") == rules.choices() == [(NO_TIMESTAMPS,)]
    with pytest.raises(RequestError, match=r"language is 'de'; accepted are en$"):
        rules.choices("de")

"""Prompts of the decoders of speech models."""

from typing import Final

import pytest
from transformers import GenerationConfig

from pagedserve.errors import RequestError
from pagedserve.inputs.speech import NOTHING_REQUESTED, RequestedSpeech, SpeechRules

# As in Whisper: the token that ends a transcript, the first of other special tokens, and times.
END, START, PREVIOUS, NO_TIMESTAMPS, FIRST_TIME = range(50, 55)
ENGLISH = RequestedSpeech(language="en")
TIMED = RequestedSpeech(language="en", has_timestamps=True)
SIZES: Final = {"max_seconds": 30, "num_times": 1500}


@pytest.mark.parametrize("special", [END, START, PREVIOUS, NO_TIMESTAMPS, FIRST_TIME, 59])
def test_previous_transcripts_have_no_special_tokens(special: int) -> None:
    config = GenerationConfig(no_timestamps_token_id=NO_TIMESTAMPS, prev_sot_token_id=PREVIOUS)
    rules = SpeechRules.of(START, config, ends=(END,), vocab_size=60, **SIZES)
    assert rules.behind([5, 49]) == [PREVIOUS, 5, 49, START]
    with pytest.raises(RequestError, match="prompt must be text without special tokens"):
        rules.behind([5, special, 6])


def test_a_model_of_one_language_accepts_english() -> None:
    config = GenerationConfig(no_timestamps_token_id=NO_TIMESTAMPS)
    rules = SpeechRules.of(START, config, ends=(END,), vocab_size=60, **SIZES)
    assert rules.choices(ENGLISH) == rules.choices(NOTHING_REQUESTED) == [(NO_TIMESTAMPS,)]
    with pytest.raises(RequestError, match=r"language is 'de'; accepted are en$"):
        rules.choices(RequestedSpeech(language="de"))


def test_a_prompt_that_names_no_task_has_no_rules_of_times() -> None:
    tasks = {"transcribe": PREVIOUS}
    config = GenerationConfig(no_timestamps_token_id=NO_TIMESTAMPS, task_to_id=tasks)
    rules = SpeechRules.of(START, config, ends=(END,), vocab_size=60, **SIZES)
    assert rules.rules_after([START], ()).times is None
    assert rules.rules_after([START, PREVIOUS], ()).times == rules.times is not None


def test_timestamps_need_tokens_of_times() -> None:
    config = GenerationConfig(no_timestamps_token_id=NO_TIMESTAMPS)
    rules = SpeechRules.of(START, config, ends=(END,), vocab_size=FIRST_TIME, **SIZES)
    with pytest.raises(RequestError, match="the model has no timestamps: its vocabulary names no"):
        rules.choices(TIMED)
    rules = SpeechRules.of(START, config, ends=(END,), vocab_size=60, **SIZES)
    assert rules.choices(TIMED) == []

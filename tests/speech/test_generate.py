"""Whisper writes down what ``transformers.generate`` makes of each sound alone."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedserve import LLM, RequestOutput, SamplingParams
from pagedserve.errors import ModelLoadError, RequestError
from tests.speech.conftest import MakeListener
from tests.support.tiny import save_tiny_llama
from tests.support.whisper import (
    ENGLISH,
    GERMAN,
    NO_TIMESTAMPS,
    PREVIOUS,
    START,
    TRANSCRIBE,
    TRANSLATE,
    Sound,
    save_whisper,
    sounds,
)

GREEDY = SamplingParams(temperature=0, max_tokens=20)
BEAMS = SamplingParams(
    use_beam_search=True, temperature=0, best_of=4, max_tokens=12, length_penalty=1.0
)
IN_GERMAN = "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"
GERMAN_IDS = [START, GERMAN, TRANSCRIBE, NO_TIMESTAMPS]


def heard(sound: Sound, prompt: str = "") -> Any:
    return {"prompt": prompt, "multi_modal_data": {"audio": sound}}


def written(outputs: list[RequestOutput]) -> list[list[int]]:
    """All that a decoder has, its prompt included."""
    return [[*(output.prompt_token_ids or ()), *output.outputs[0].token_ids] for output in outputs]


def generate(llm: LLM, given: Any, params: Any) -> list[list[int]]:
    return written(llm.generate(given, params, use_tqdm=False))


@pytest.mark.parametrize("backend", ["rust", "torch", "sdpa"])
def test_sounds_together_are_written_as_each_alone(listener: MakeListener, backend: str) -> None:
    model, given = listener(), sounds(8)
    expected = [
        model.oracle.generate(sound, 20, language="de", task="transcribe") for sound in given
    ]
    assert len({str(answer) for answer in expected}) > 4  # the sound tells
    llm = model.load(attention_backend=backend)
    assert generate(llm, [heard(sound, IN_GERMAN) for sound in given], GREEDY) == expected


@pytest.mark.slow
def test_ranks_write_as_one_process(listener: MakeListener) -> None:
    model, given = listener(), sounds(8)
    expected = [
        model.oracle.generate(sound, 20, language="de", task="transcribe") for sound in given
    ]
    llm = model.load(tensor_parallel_size=2)
    try:
        assert generate(llm, [heard(sound, IN_GERMAN) for sound in given], GREEDY) == expected
    finally:
        llm.llm_engine.shutdown()


def test_the_language_is_found_where_none_is_named(listener: MakeListener) -> None:
    model, given = listener(), sounds(8)
    languages = [model.oracle.language(sound) for sound in given]
    assert set(languages) == {ENGLISH, GERMAN}
    names = {ENGLISH: "en", GERMAN: "de"}
    expected = [
        model.oracle.generate(sound, 17, language=names[language], task="transcribe")
        for sound, language in zip(given, languages, strict=True)
    ]
    prompts = [heard(sound) for sound in given]
    found = model.load().generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in found] == [[START]] * 8
    assert written(found) == expected
    assert all("<|" not in output.outputs[0].text for output in found)


def test_a_model_of_one_language_is_not_asked_for_it(listener: MakeListener) -> None:
    model, sound = listener(languages=False), sounds(1)[0]
    assert generate(model.load(), heard(sound), GREEDY) == [model.oracle.generate(sound, 20)]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_beams_are_those_of_transformers_through_preemptions(
    listener: MakeListener, mode: str
) -> None:
    model, given = listener(), sounds(8)
    options = {"language": "de", "task": "transcribe"}
    # What is suppressed has no probability here, as in OpenAI's own search.
    beams = {"num_beams": 4, "renormalize_logits": True}
    expected = [
        model.oracle.generate(sound, 12, **beams, **options)
        if place % 2
        else model.oracle.generate(sound, 20, **options)
        for place, sound in enumerate(given)
    ]
    params = [BEAMS if place % 2 else GREEDY for place in range(len(given))]
    llm = model.load(num_gpu_blocks=120, preemption_mode=mode, swap_space=0.05)
    assert generate(llm, [heard(sound, IN_GERMAN) for sound in given], params) == expected
    assert llm.llm_engine.snapshot().num_preemptions > 0
    assert llm.llm_engine.scheduler.num_free_gpu_blocks == 120


@pytest.mark.parametrize("options", [{}, {"enable_chunked_prefill": True}])
def test_prompts_for_both_sides(listener: MakeListener, options: dict[str, Any]) -> None:
    model, given = listener(), sounds(3)
    begun = [[START, GERMAN, TRANSLATE, NO_TIMESTAMPS], [PREVIOUS, 5, 6, *GERMAN_IDS], GERMAN_IDS]
    pairs: list[Any] = [
        {"encoder_prompt": heard(sound), "decoder_prompt": begin}
        for sound, begin in zip(given, (begun[0][1:], begun[1], IN_GERMAN), strict=True)
    ]
    expected = [
        model.oracle.generate(given[0], 20, language="de", task="translate"),
        model.oracle.generate(
            given[1],
            20,
            language="de",
            task="transcribe",
            prompt_ids=torch.tensor([PREVIOUS, 5, 6]),
        ),
        model.oracle.generate(given[2], 20, language="de", task="transcribe"),
    ]
    llm = model.load(max_num_batched_tokens=8 if options else None, max_num_seqs=4, **options)
    outputs = llm.generate(pairs, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == begun
    assert [output.encoder_prompt_token_ids for output in outputs] == [None] * 3
    assert written(outputs) == expected


def test_samples_share_a_sound_through_preemptions(listener: MakeListener) -> None:
    model = listener()
    given = [heard(sound, IN_GERMAN) for sound in sounds(6)]
    params = SamplingParams(n=3, seed=5, max_tokens=20)
    expected = [output.outputs for output in model.load().generate(given, params, use_tqdm=False)]
    llm = model.load(num_gpu_blocks=90, preemption_mode="swap", swap_space=0.05)
    found = [output.outputs for output in llm.generate(given, params, use_tqdm=False)]
    assert found == expected
    assert llm.llm_engine.snapshot().num_preemptions > 0


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_other_sampling_rates_sound_alike(listener: MakeListener, rate: int) -> None:
    def tone(rate: int) -> Sound:
        times = np.arange(rate) / rate
        return (np.sin(2 * np.pi * 440 * times) * np.hanning(rate) / 2).astype(np.float32), rate

    llm = listener().load()
    prompts = [heard(tone(rate), IN_GERMAN), heard(tone(16_000), IN_GERMAN)]
    first, second = generate(llm, prompts, GREEDY)
    assert first == second


def test_half_precision_and_arrays_of_other_kinds(listener: MakeListener) -> None:
    samples, rate = sounds(1)[0]
    llm = listener().load(dtype="bfloat16")
    doubles, tensor = samples.astype(np.float64), torch.tensor(samples)
    kinds: list[Any] = [(samples, rate), (doubles, np.int64(rate)), (tensor, rate)]
    first, second, third = generate(llm, [heard(sound, IN_GERMAN) for sound in kinds], GREEDY)
    assert first == second == third
    listed: Any = {"prompt": IN_GERMAN, "multi_modal_data": {"audio": [(samples, rate)]}}
    assert generate(llm, listed, GREEDY) == [first]


def test_a_missing_package_is_named(
    listener: MakeListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(ImportError, match=r"needs soxr, .* pip install .*'soxr"):
        listener().load().generate(heard((np.zeros(99, np.float32), 8000)), GREEDY)


@pytest.mark.parametrize(
    ("prompt", "refusal"),
    [
        ("w5", "the prompt has no audio for the encoder"),
        (heard((np.zeros(32_001, np.float32), 16_000)), "has 2.00 seconds; the model accepts at"),
        (heard((np.zeros((2, 9), np.float32), 16_000)), r"has shape \[2, 9\] and type float32"),
        (heard((np.zeros(9, np.int16), 16_000)), "type int16; it must be one channel"),
        (heard((np.zeros(0, np.float32), 16_000)), "has no samples; it must"),
        (heard((np.full(9, np.nan, np.float32), 16_000)), "no finite numbers"),
        (heard((np.full(999, 1e30, np.float32), 16_000)), "is too loud"),
        (heard((np.zeros(9, np.float32), 0)), "rate of the audio of the prompt is 0; it must"),
        ({"prompt": "", "multi_modal_data": {"audio": b"RIFF"}}, "audio of the prompt is of type"),
        ({"encoder_prompt": heard(sounds(1)[0], "w5"), "decoder_prompt": None}, "audio alone"),
        ({"encoder_prompt": "w5", "decoder_prompt": heard(sounds(1)[0])}, "no audio for the enc"),
        ({"encoder_prompt": heard(sounds(1)[0]), "decoder_prompt": [97]}, "token 0 of the prompt"),
        (heard(sounds(1)[0]) | {"speech_task": "sing"}, "speech_task of the prompt is 'sing'"),
        (
            heard(sounds(1)[0], IN_GERMAN) | {"speech_task": "translate"},
            "decoder_prompt sets the task: leave it out",
        ),
    ],
)
def test_prompts_that_cannot_be_are_refused(
    listener: MakeListener, prompt: Any, refusal: str
) -> None:
    with pytest.raises(RequestError, match=refusal):
        listener().load().generate(prompt, GREEDY, use_tqdm=False)


def test_a_language_is_not_found_for_several_sequences(listener: MakeListener) -> None:
    with pytest.raises(RequestError, match="names no language, which is detected for one sequence"):
        listener().load().generate(heard(sounds(1)[0]), BEAMS, use_tqdm=False)


def test_a_language_is_not_found_for_a_text_that_must_be_something(listener: MakeListener) -> None:
    bound = SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(RequestError, match="names no language, which would be the first token of"):
        listener().load().generate(heard(sounds(1)[0]), bound, use_tqdm=False)


def test_models_of_text_hear_nothing(tmp_path: Path) -> None:
    llm = LLM(str(save_tiny_llama(tmp_path)), num_gpu_blocks=16, use_tqdm_on_load=False)
    with pytest.raises(RequestError, match="has audio, and the model does not accept audio"):
        llm.generate(heard(sounds(1)[0], "w5"), GREEDY, use_tqdm=False)


def test_a_model_without_its_feature_extractor_is_refused(tmp_path: Path) -> None:
    directory = save_whisper(tmp_path)
    (directory / "preprocessor_config.json").unlink()
    with pytest.raises(ModelLoadError, match="no feature extractor that transformers can load"):
        LLM(str(directory), num_gpu_blocks=64, use_tqdm_on_load=False)


def test_speech_is_translated_whatever_its_language(listener: MakeListener) -> None:
    model, given = listener(), sounds(4)
    names = {ENGLISH: "en", GERMAN: "de"}
    languages = [names[model.oracle.language(sound)] for sound in given]
    assert len(set(languages)) == 2
    expected = [
        model.oracle.generate(sound, 17, language=language, task="translate")
        for sound, language in zip(given, languages, strict=True)
    ]
    prompts = [heard(sound) | {"speech_task": "translate"} for sound in given]
    begun = heard(given[0], "<|startoftranscript|>") | {"speech_task": "translate"}
    assert generate(model.load(), [*prompts, begun], GREEDY) == [*expected, expected[0]]

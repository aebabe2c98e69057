"""Whisper base hears a sentence that is known."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from pagedserve import LLM, EngineArgs, LLMEngine, SamplingParams
from pagedserve.engine.defaults import server_defaults
from pagedserve.server.options import ServerArgs
from tests.server.conftest import Served

SENTENCE = " Never tried, ever failed. No matter. Try again. Fail again. Fail better."
FILE = Path(__file__).parent / "beckett.wav"
GREEDY = SamplingParams(temperature=0, max_tokens=64, logprobs=0)


class Oracle:
    """What transformers makes of one sound at a time."""

    def __init__(self, directory: Path) -> None:
        self._extract: Any = WhisperFeatureExtractor.from_pretrained(directory)
        self._model: Any = WhisperForConditionalGeneration.from_pretrained(
            directory, dtype=torch.float32
        )

    def _features(self, samples: Any, rate: int) -> Any:
        return self._extract(samples, sampling_rate=rate, return_tensors="pt").input_features

    @torch.inference_mode()
    def tokens(self, samples: Any, rate: int, **options: Any) -> list[int]:
        """Those of the text alone."""
        features = self._features(samples, rate)
        found: list[int] = self._model.generate(features, language="en", **options)[0].tolist()
        return found

    @torch.inference_mode()
    def no_speech(self, samples: Any, rate: int) -> float:
        """Logarithm of the probability that a sound is no speech."""
        start, no_speech = torch.tensor([[50258]]), 50362
        logits = self._model(self._features(samples, rate), decoder_input_ids=start).logits[0, 0]
        return float(logits.log_softmax(-1)[no_speech])


@pytest.fixture(scope="module")
def engine_args(whisper_base: Path) -> EngineArgs:
    return EngineArgs(str(whisper_base), kv_cache_memory=1 << 28, use_tqdm_on_load=False)


def test_the_sentence_is_written_beside_a_part_of_it(
    engine_args: EngineArgs, whisper_base: Path
) -> None:
    samples, rate = soundfile.read(FILE, dtype="float32")
    parts = [samples, samples[: 4 * rate]]
    llm = LLM(engine_args.model, kv_cache_memory=1 << 28, use_tqdm_on_load=False)
    audio = [
        {"multi_modal_data": {"audio": (part, rate)}} for part in (*parts, samples[3 * rate :])
    ]
    prompts: list[Any] = [{"prompt": "", **part} for part in audio[:2]]
    timed: list[Any] = [{"prompt": "", "speech_timestamps": True, **part} for part in audio]
    named: Any = {"prompt": "<|startoftranscript|><|en|><|transcribe|>", **audio[2]}
    quiet: Any = {"prompt": "", "multi_modal_data": {"audio": (0 * samples, rate)}}
    timed.append(quiet | {"speech_timestamps": True, "speech_language": "en"})
    outputs = llm.generate([*prompts, *timed, named], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].text == SENTENCE
    found = [output.outputs[0].token_ids for output in outputs]
    oracle = Oracle(whisper_base)
    # transformers leaves out what a transcript begins and ends with.
    english, transcribe, no_timestamps, end = 50259, 50359, 50363, 50257
    text = oracle.tokens(parts[1], rate)
    assert found[1] == [english, transcribe, no_timestamps, *text, end]
    # Where transformers does not stop within a segment, to begin there again.
    expected = oracle.tokens(samples[3 * rate :], rate, return_timestamps=True)
    assert found[4] == [english, transcribe, *expected, end]
    assert found[6] == [*expected, end]
    for output, given in zip(outputs[4:6], (samples[3 * rate :], 0 * samples), strict=True):
        wanted = [oracle.no_speech(given, rate)]
        assert output.outputs[0].label_logprobs == pytest.approx(wanted, abs=1e-3)
    assert outputs[2].outputs[0].text.endswith("Fail again. Fail better.")  # after its stop there


@pytest.fixture(scope="module")
def client(engine_args: EngineArgs) -> Iterator[openai.OpenAI]:
    args = ServerArgs(port=0, uvicorn_log_level="warning")
    with (
        Served(lambda: LLMEngine(engine_args, choose=server_defaults), args) as served,
        openai.OpenAI(base_url=f"{served.http.base_url}/v1", api_key="none") as client,
    ):
        yield client


def test_segments_and_subtitles_have_times(client: openai.OpenAI, tmp_path: Path) -> None:
    samples, rate = soundfile.read(FILE, dtype="float32")
    pause = np.zeros(12 * rate, np.float32)
    file = tmp_path / "twice.wav"
    soundfile.write(file, np.concatenate([samples, pause, samples, pause[: 4 * rate]]), rate)
    second = (len(samples) + len(pause)) / rate

    def create(form: Any, **options: Any) -> Any:
        model = client.models.list().data[0].id
        transcribe = client.audio.transcriptions.create
        return transcribe(model=model, file=file, response_format=form, **options)

    answer = create("verbose_json", timestamp_granularities=["segment", "word"])
    words = re.findall("[a-z]+", answer.text.lower())
    assert words == 2 * re.findall("[a-z]+", SENTENCE.lower())
    segments = answer.segments
    assert "".join(segment.text for segment in segments).strip() == answer.text
    assert all(segment.start < segment.end <= answer.duration for segment in segments)
    starts = [segment.start for segment in segments]
    assert starts == sorted(starts)
    # The times of the second window are behind the first, which ends in the pause.
    again = next(segment for segment in segments[1:] if segment.text.startswith(" Never"))
    assert len(samples) / rate < again.start < second + 1 < again.end
    assert all(-1 < segment.avg_logprob < 0 for segment in segments)
    assert all(0 < segment.no_speech_prob < 0.5 for segment in segments)
    assert {segment.id for segment in segments} == set(range(len(segments)))
    cues = create("srt", language="en").split("\n\n")
    assert [cue.splitlines()[2] for cue in cues] == [segment.text.strip() for segment in segments]
    assert cues[0].startswith("1\n00:00:00,000 --> 00:00:0")
    subtitles = create("vtt").split("\n\n")
    assert subtitles[0] == "WEBVTT"
    assert len(subtitles) == len(cues) + 1
    assert "." in subtitles[1].splitlines()[0]

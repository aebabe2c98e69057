"""Speech over HTTP: what ``LLM`` writes down of it, as OpenAI's clients ask."""

import asyncio
import io
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from pagedserve import LLM, EngineArgs, LLMEngine, SamplingParams
from pagedserve.engine.defaults import server_defaults
from pagedserve.inputs.audio import Audio, audio_of_file
from pagedserve.server.options import ServerArgs
from tests.server.conftest import Process, Served
from tests.support.described import Description
from tests.support.whisper import Sound, save_whisper, sounds

GREEDY = SamplingParams(temperature=0, max_tokens=None)
IN_GERMAN = "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"
TRANSCRIBE = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    return save_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def offline(whisper: Path) -> LLM:
    return LLM(str(whisper), num_gpu_blocks=256, use_tqdm_on_load=False)


@pytest.fixture(scope="module")
def hearing(whisper: Path) -> Iterator[Served]:
    """A server of the tiny Whisper in this process."""
    name = ("whisper-1",)
    args = ServerArgs(port=0, uvicorn_log_level="warning", log_prompts=True, served_model_name=name)
    engine_args = EngineArgs(str(whisper), num_gpu_blocks=256, use_tqdm_on_load=False)
    with Served(lambda: LLMEngine(engine_args, choose=server_defaults), args) as served:
        served.check_answers()
        yield served
        served.wait_until_idle()


def file_of(sound: Sound, kind: str = "WAV") -> bytes:
    """A file that holds it exactly, where the format can."""
    file = io.BytesIO()
    subtype = {"WAV": "FLOAT", "FLAC": "PCM_24"}.get(kind)
    soundfile.write(file, *sound, format=kind, subtype=subtype)
    return file.getvalue()


def written(
    llm: LLM, sound: Sound, prompt: str = "", params: SamplingParams = GREEDY, **more: Any
) -> str:
    given: Any = {"prompt": prompt, "multi_modal_data": {"audio": sound}, **more}
    (output,) = llm.generate(given, params, use_tqdm=False)
    return output.outputs[0].text.strip()


def post(served: Served, content: bytes, path: str = TRANSCRIBE, **fields: Any) -> httpx.Response:
    return served.http.post(path, files={"file": ("a.wav", content)}, data=fields)


def told(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    message: str = answer.json()["error"]["message"]
    return message


@pytest.fixture(params=["here", pytest.param("process", marks=pytest.mark.slow)])
def url(
    request: pytest.FixtureRequest, whisper: Path, hearing: Served, tmp_path: Path
) -> Iterator[str]:
    """The address of a server, in this process or as users start it."""
    if request.param == "here":
        yield str(hearing.http.base_url)
        return
    process = Process(tmp_path / "log", str(whisper), "--served-model-name", "whisper-1")
    process.wait_until_healthy()
    yield process.url
    assert process.end() == 0, process.log


def test_openais_client(url: str, offline: LLM) -> None:
    sound = sounds(1)[0]
    file, in_german = ("a.wav", file_of(sound)), written(offline, sound, IN_GERMAN)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        create = client.audio.transcriptions.create
        assert create(model="whisper-1", file=file).text == written(offline, sound)
        text: Any = create(model="whisper-1", file=file, language="de", response_format="text")
        assert text == f"{in_german}\n"
        verbose = create(model="whisper-1", file=file, response_format="verbose_json")
        assert (verbose.language, verbose.text) == ("en", written(offline, sound))
        assert verbose.duration == pytest.approx(len(sound[0]) / sound[1], abs=1e-3)
        *deltas, last = create(model="whisper-1", file=file, language="de", stream=True)
        assert len(deltas) > 1  # a busy server sends several tokens as one
        assert {event.type for event in deltas} == {"transcript.text.delta"}
        assert "".join(getattr(event, "delta", "") for event in deltas) == in_german
        chunks = [event.model_extra["choices"][0]["delta"]["content"] for event in deltas]
        assert "".join(chunks) == in_german
        assert (last.type, getattr(last, "text", "")) == ("transcript.text.done", in_german)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # OpenAI prefers another route
            translated = client.audio.translations.create(model="whisper-1", file=file).text
        assert translated == written(offline, sound, speech_task="translate")
        with pytest.raises(openai.BadRequestError, match="cannot be decoded"):
            create(model="whisper-1", file=b"no audio")
        with pytest.raises(openai.BadRequestError, match="no audio for the encoder"):
            client.completions.create(model="whisper-1", prompt="x")


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_files_are_written_down_as_offline(hearing: Served, offline: LLM, kind: str) -> None:
    for sound in sounds(2):
        content = file_of(sound, kind)
        samples, rate = soundfile.read(io.BytesIO(content), dtype="float32")
        answer = post(hearing, content, language="de").json()
        assert answer["text"] == written(offline, (samples, rate), IN_GERMAN)
        seconds = len(samples) / rate
        assert answer["usage"] == {"type": "duration", "seconds": round(seconds, 3)}


def test_channels_are_averaged(hearing: Served, offline: LLM) -> None:
    samples, rate = sounds(1)[0]
    stereo = np.stack([samples, samples / 2], axis=1)
    answer = post(hearing, file_of((stereo, rate)), language="de").json()
    assert answer["text"] == written(offline, (samples * np.float32(0.75), rate), IN_GERMAN)


def test_languages_are_found_and_said(hearing: Served, offline: LLM) -> None:
    found = set()
    for sound in sounds(2):
        answer = post(hearing, file_of(sound), response_format="verbose_json").json()
        assert answer["text"] == written(offline, sound)
        assert answer["task"] == "transcribe"
        found.add(answer["language"])
    assert found == {"en", "de"}


def test_translations(hearing: Served, offline: LLM) -> None:
    sound = sounds(1)[0]
    answer = post(hearing, file_of(sound), "/v1/audio/translations").json()
    assert answer["text"] == written(offline, sound, speech_task="translate")
    assert answer["text"] != written(offline, sound)


def test_sampling_parameters_are_those_of_completions(hearing: Served, offline: LLM) -> None:
    sound = sounds(1)[0]
    given: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "seed": 3,
    }
    answer = post(hearing, file_of(sound), language="de", **given).json()
    params = SamplingParams(max_tokens=GREEDY.max_tokens, **given)
    assert answer["text"] == written(offline, sound, IN_GERMAN, params)
    assert answer["text"] != written(offline, sound, IN_GERMAN)


def test_what_was_said_before_is_heeded(hearing: Served, offline: LLM) -> None:
    sound = sounds(1)[0]
    begun = f"<|startofprev|> w5 w6{IN_GERMAN}"
    answer = post(hearing, file_of(sound), language="de", prompt="w5 w6").json()
    assert answer["text"] == written(offline, sound, begun)
    assert answer["text"] != written(offline, sound, IN_GERMAN)


def long_sound() -> Sound:
    """Longer than two prompts may be, with pauses."""
    parts = [samples for samples, _ in sounds(8)]
    pause = np.zeros(4000, np.float32)
    return np.concatenate([piece for part in parts for piece in (part, pause)]), 16_000


def test_long_audio_is_cut_where_it_is_quiet(hearing: Served, offline: LLM) -> None:
    samples, rate = long_sound()
    windows = Audio(samples, rate).windows(2.0)
    assert np.array_equal(np.concatenate([window.samples for window in windows]), samples)
    assert len(windows) > 3
    assert all(0 < window.seconds <= 2 for window in windows)
    expected = "".join(
        f" {written(offline, (window.samples, rate), IN_GERMAN)}" for window in windows
    )
    content = file_of((samples, rate))
    assert post(hearing, content, language="de").json()["text"] == expected.strip()
    answer = post(hearing, content, language="de", stream="true")
    Description.of(hearing.http).check_events(answer)
    streamed = answer.text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(event.get("delta", "") for event in events) == expected.strip()
    assert events[-1]["text"] == expected.strip()
    assert events[-1]["usage"]["output_tokens"] > 0


def test_chunks_are_those_of_vllm_if_they_have_usage(hearing: Served) -> None:
    content, more = file_of(long_sound()), {"language": "de", "stream_include_usage": "True"}
    text = post(hearing, content, language="de").json()["text"]
    for is_continuous in (False, True):
        given = more | {"stream": "True", "stream_continuous_usage_stats": str(is_continuous)}
        answer = post(hearing, content, **given)
        Description.of(hearing.http).check_events(answer)
        *lines, done = [line[6:] for line in answer.text.splitlines() if line]
        *chunks, last = map(json.loads, lines)
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == text
        assert {chunk["object"] for chunk in chunks} == {"transcription.chunk"}
        assert ["usage" in chunk for chunk in chunks] == [is_continuous] * len(chunks)
        assert (last["choices"], done) == ([], "[DONE]")
        assert last["usage"]["completion_tokens"] > 0
    assert "stream_include_usage is given without stream" in told(post(hearing, content, **more))


def test_a_limit_of_new_tokens_holds_for_each_segment(hearing: Served) -> None:
    stream = {"language": "de", "stream": "true"}
    numbers = []
    for limit in ({}, {"max_completion_tokens": "1"}, {"max_completion_tokens": "9999"}):
        answer = post(hearing, file_of(sounds(1)[0]), **stream, **limit)
        *_, last = [json.loads(line[6:]) for line in answer.text.splitlines() if "done" in line]
        numbers.append(last["usage"]["output_tokens"])
    assert numbers[0] == numbers[2] > numbers[1] == 1


def test_a_cut_is_in_a_pause() -> None:
    rng = np.random.default_rng(0)
    samples = rng.normal(0, 0.3, 40 * 16_000).astype(np.float32)
    samples[int(20.3 * 16_000) : int(20.5 * 16_000)] *= 0.01
    first, second = Audio(samples, 16_000).windows(30)
    assert 20.3 < first.seconds < 20.5
    assert first.seconds + second.seconds == 40


@pytest.mark.parametrize(
    ("content", "fields", "refusal"),
    [
        (b"", {}, "the file of 0 bytes cannot be decoded"),
        (b"RIFF no audio", {}, "the file of 13 bytes cannot be decoded"),
        (file_of((np.zeros(0, np.float32), 16_000)), {}, "the file has no samples"),
        (file_of((np.full(9, np.nan, np.float32), 16_000)), {}, "no finite numbers"),
        (file_of((np.zeros(9, np.float32), 100)), {}, "sampling rate of the file is 100"),
        (file_of((np.zeros(7_300_000, np.float32), 1_000), "FLAC"), {}, "the file is too long"),
        (file_of(sounds(1)[0]), {"language": "xx"}, "language is 'xx'; accepted are de, en"),
        (file_of(sounds(1)[0]), {"response_format": "xml"}, 'response_format is "xml"; it must be'),
        (file_of(sounds(1)[0]), {"response_format": "srt"}, "the model has no timestamps"),
        (file_of(sounds(1)[0]), {"temperature": "-1"}, "temperature is -1"),
        (
            file_of(sounds(1)[0]),
            {"response_format": "verbose_json", "stream": "true"},
            "'verbose_json' with stream; it is for whole answers",
        ),
        (file_of(sounds(1)[0]), {"prompt": "<|de|>"}, "prompt must be text without special"),
        (file_of(sounds(1)[0]), {"prompt": "w2"}, "prompt must be text without special"),  # its end
        (file_of(sounds(1)[0]), {"timestamp_granularities[]": "word"}, "'segment' is acc"),
        (file_of(sounds(1)[0]), {"languag": "de"}, "did you mean language?"),
        (file_of(sounds(1)[0]), {"truncate_prompt_tokens": "3"}, "is no field of this request"),
    ],
    # A file's header holds the second it was made in: workers would collect different names.
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else None,
)
def test_requests_that_cannot_be_are_refused(
    hearing: Served, content: bytes, fields: dict[str, Any], refusal: str
) -> None:
    assert refusal in told(post(hearing, content, **fields))


def test_the_field_of_a_prompt_that_is_too_long_is_named(hearing: Served) -> None:
    answer = post(hearing, file_of(sounds(1)[0]), prompt="w" * 2_000)
    assert "the prompt has 2001 characters; at most 1024" in told(answer)
    assert answer.json()["error"]["param"] == "prompt"


def test_bodies_that_are_no_forms_are_refused(hearing: Served) -> None:
    answer = hearing.http.post(TRANSCRIBE, json={"file": "x"})
    assert answer.status_code == 415
    assert "it must be multipart/form-data" in answer.json()["error"]["message"]
    assert "file is missing; it is" in told(hearing.http.post(TRANSCRIBE, files={"f": b"x"}))
    assert post(hearing, b"x", model="other").status_code == 404
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    broken = hearing.http.post(TRANSCRIBE, content=b"--x\r\nno form", headers=headers)
    assert broken.status_code == 400


def test_a_server_of_text_hears_nothing(shared: Served) -> None:
    assert "the model does not accept audio" in told(post(shared, file_of(sounds(1)[0])))


def test_a_missing_package_is_named(hearing: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, file in ("soundfile", file_of(sounds(1)[0])), ("av", b"\0\0\0\x18ftypM4A "):
        monkeypatch.setitem(sys.modules, package, None)
        answer = post(hearing, file)
        assert answer.status_code == 501
        said = f"an audio file needs {package}, which is not installed: pip install 'av>="
        assert answer.json()["error"]["message"].startswith(said)


def test_a_file_that_cannot_be_touches_no_other(hearing: Served, offline: LLM) -> None:
    sound = sounds(1)[0]
    expected = written(offline, sound, IN_GERMAN)

    async def all_at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=hearing.http.base_url, timeout=30) as http:
            contents = [file_of(sound), b"no audio", file_of(sound), b""]
            data = {"language": "de"}
            return await asyncio.gather(
                *(http.post(TRANSCRIBE, files={"file": each}, data=data) for each in contents)
            )

    answers = asyncio.run(all_at_once())
    assert [answer.status_code for answer in answers] == [200, 400, 200, 400]
    assert [answers[place].json()["text"] for place in (0, 2)] == [expected] * 2


@pytest.mark.parametrize("path", [TRANSCRIBE, "/v1/audio/translations"])
def test_a_form_that_is_parsed_is_no_open_body(
    hearing: Served, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    num_open: list[int] = []

    def heard(content: bytes) -> Audio:
        num_open.append(hearing.context.num_open_body_bytes)
        return audio_of_file(content)

    monkeypatch.setattr("pagedserve.server.speech.job.audio_of_file", heard)
    content = file_of(sounds(1)[0]) + bytes(200_000)
    assert post(hearing, content, path).status_code == 200
    assert num_open == [0]


def test_a_client_that_leaves_ends_its_request(hearing: Served) -> None:
    content = file_of(long_sound())
    with suppress(httpx.ReadTimeout):
        hearing.http.post(TRANSCRIBE, files={"file": content}, timeout=0.05)
    hearing.wait_until_idle()


def test_a_deadline_is_an_answer(hearing: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    step = LLMEngine.step

    def slow(engine: LLMEngine) -> Any:
        hearing.wait_until(lambda: any(job.is_aborted for job in hearing.context.jobs.values()))
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", slow)
    answer = post(hearing, file_of(sounds(1)[0]), timeout="0.05")
    assert answer.status_code == 503
    assert "aborted before the transcript was complete" in answer.json()["error"]["message"]


def test_no_more_than_its_limits(whisper: Path) -> None:
    args = ServerArgs(port=0, uvicorn_log_level="warning", max_num_queued_reqs=0)
    engine_args = EngineArgs(
        str(whisper), num_gpu_blocks=256, max_num_seqs=2, use_tqdm_on_load=False
    )
    with Served(lambda: LLMEngine(engine_args, choose=server_defaults), args) as served:
        refused = told(post(served, file_of(long_sound())))
        assert "sequences; at most 2 are accepted" in refused
        assert post(served, file_of(sounds(1)[0])).status_code == 200
        served.wait_until_idle()


def test_the_log_and_the_metrics(hearing: Served, caplog: pytest.LogCaptureFixture) -> None:
    before = hearing.metrics()
    with caplog.at_level(logging.INFO):
        answer = post(hearing, file_of(sounds(1)[0]), language="de")
        hearing.wait_until(lambda: "trsc-" in caplog.text)
    assert "prompts 1, prompt 4 tokens" in caplog.text
    assert 'prompt "{\\"file\\": \\"a.wav\\"' in caplog.text
    assert answer.json()["text"] in caplog.text
    after = hearing.metrics()
    name = "vllm:request_success_total"
    assert after[name] == before[name] + 1
    assert after["vllm:prompt_tokens_total"] == before["vllm:prompt_tokens_total"] + 4

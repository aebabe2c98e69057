"""`pagedserve run-batch` as a user starts it, with models whose answers are known offline."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from pagedserve import LLM, SamplingParams
from tests.hostile.model import save_byte_llama

ROOT = Path(__file__).parents[2]
PROGRAM = "from pagedserve.cli import run; run()"
GREEDY = SamplingParams(temperature=0, max_tokens=24)

Answer: TypeAlias = dict[str, Any]


@pytest.fixture(scope="module")
def byte_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_llama(tmp_path_factory.mktemp("byte_llama"))


@pytest.fixture(scope="module")
def offline(byte_llama: Path) -> Iterator[LLM]:
    """The same model in this process."""
    with LLM(str(byte_llama), backend="native", use_tqdm_on_load=False) as llm:
        yield llm


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def completion(custom_id: str, prompt: str) -> dict[str, Any]:
    return request(custom_id, prompt=prompt, temperature=0, max_tokens=GREEDY.max_tokens)


def chat(custom_id: str, text: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    common = {"messages": messages, "temperature": 0, "max_tokens": GREEDY.max_tokens}
    return request(custom_id, "/v1/chat/completions", **common | body)


class Files:
    """A batch of the tiny model: its input, its output, and runs of it."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.input = directory / "in.jsonl"
        self.output = directory / "out.jsonl"
        self._model = model

    def write(self, lines: Sequence[dict[str, Any] | str]) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.input.write_text("".join(f"{text}\n" for text in texts))

    def start(
        self, *options: str, source: str | None = None, program: str = PROGRAM, **more: Any
    ) -> "subprocess.Popen[str]":
        files = ("-i", source or str(self.input), "-o", str(self.output))
        command = (sys.executable, "-c", program, "run-batch", str(self._model), *files)
        return subprocess.Popen(
            [*command, "--backend", "native", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},
            **more,
        )

    def run(self, *options: str, **more: Any) -> tuple[str, str]:
        """Run to the end; what it prints on stdout and stderr."""
        process = self.start(*options, **more)
        out, err = process.communicate()
        assert process.returncode == 0, err
        return out, err

    def wait_for(self, num_lines: int, process: "subprocess.Popen[str]") -> None:
        """Until the output has so many lines, or the process has ended."""
        while self.num_lines < num_lines and process.poll() is None:
            time.sleep(0.005)

    @property
    def num_lines(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    @property
    def answers(self) -> list[Answer]:
        return [json.loads(line) for line in self.output.read_bytes().splitlines()]

    @property
    def texts(self) -> dict[str, str]:
        """Texts of completions by their ids, each of which is there once."""
        answers = self.answers
        found = {
            answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"]
            for answer in answers
        }
        assert len(found) == len(answers)
        return found


@pytest.fixture
def files(byte_llama: Path, tmp_path: Path) -> Files:
    return Files(byte_llama, tmp_path)


def texts_of(llm: LLM, prompts: Sequence[str]) -> list[str]:
    outputs = llm.generate(list(prompts), GREEDY, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def test_lines_of_all_kinds_are_answered_as_offline(files: Files, offline: LLM) -> None:
    files.write(
        [
            completion("text", "once upon"),
            chat("chat", "Who are you?"),
            "",
            chat("chat", "again"),
            "nonsense",
            chat("stream", "x", stream=True),
            request("embedding", "/v1/embeddings", input="x"),
            request("other", "/v1/rerank", query="x", documents=["y"]),
            request("wrong", prompt="x", temperature=-1),
            request("unknown", prompt="x", model="gpt-4"),
            request("named", prompt="once upon", model="mine", temperature=0, max_tokens=24),
            request("many", prompt=["a", "b", "c"], n=2, temperature=0, max_tokens=24),
            request(
                *("response", "/v1/responses"),
                input="Who are you?",
                temperature=0,
                max_output_tokens=24,
            ),
        ]
    )
    out, _ = files.run("--served-model-name", "mine", "also")
    assert out.startswith("5 lines answered, 7 errors, ")
    answers = {answer["id"]: answer for answer in files.answers}
    assert [
        answers[f"batch_req_{number}"]["custom_id"] for number in range(1, 14) if number != 3
    ] == [
        *("text", "chat", None, None, "stream", "embedding", "other", "wrong", "unknown"),
        *("named", "many", "response"),
    ]
    by_id = {answer["custom_id"]: answer for answer in answers.values()}

    def body(custom_id: str) -> dict[str, Any]:
        answer = by_id[custom_id]
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        found: dict[str, Any] = answer["response"]["body"]
        assert custom_id == "response" or answer["response"]["request_id"] in found["id"]
        return found

    (expected,) = texts_of(offline, ["once upon"])
    assert body("text")["choices"][0]["text"] == expected
    assert body("named")["choices"][0]["text"] == expected
    messages = [{"role": "user", "content": "Who are you?"}]
    (reply,) = offline.chat(messages, GREEDY, use_tqdm=False)
    assert body("chat")["choices"][0]["message"]["content"] == reply.outputs[0].text
    assert body("chat")["model"] == "mine"
    (message,) = body("response")["output"]
    assert message["content"][0]["text"] == reply.outputs[0].text
    texts = [choice["text"] for choice in body("many")["choices"]]
    assert texts == [text for text in texts_of(offline, "abc") for _ in range(2)]
    codes = {
        custom_id: (answer["error"]["code"], (answer["response"] or {}).get("status_code"))
        for custom_id, answer in by_id.items()
        if custom_id is not None and answer["error"]
    }
    assert codes == {
        "stream": ("BadRequestError", 400),
        "embedding": ("BadRequestError", 400),
        "other": ("invalid_url", None),
        "wrong": ("BadRequestError", 400),
        "unknown": ("NotFoundError", 404),
    }
    told = by_id["stream"]["response"]["body"]["error"]
    assert told["param"] == "stream"
    assert told["message"] == by_id["stream"]["error"]["message"]
    assert answers["batch_req_4"]["error"]["code"] == "duplicate_custom_id"
    assert answers["batch_req_5"]["error"]["code"] == "invalid_json_line"

    before = files.output.read_bytes()
    out, err = files.run("--served-model-name", "mine")
    assert files.output.read_bytes() == before
    assert "resuming: 12 lines are answered\n" in err
    assert out.startswith("5 lines answered, 7 errors, ")


def test_the_example_is_answered(stand_in: Path, tmp_path: Path) -> None:
    files = Files(stand_in, tmp_path)
    files.input = ROOT / "examples" / "batch.jsonl"
    out, err = files.run("--served-model-name", "smollm2")
    assert out.startswith("3 lines answered, 0 errors, ")
    assert err == f"loading {stand_in}\n"


def test_embeddings_are_those_of_embed(files: Files, byte_llama: Path) -> None:
    texts = ["one", "another", "a third"]
    model = str(byte_llama)
    with LLM(model, runner="pooling", backend="native", use_tqdm_on_load=False) as llm:
        expected = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
    files.write(
        [
            request("both", "/v1/embeddings", input=texts[:2]),
            request("one", "/v1/embeddings", input=texts[2]),
            completion("text", "x"),
        ]
    )
    out, _ = files.run("--runner", "pooling")
    assert out.startswith("2 lines answered, 1 errors, ")
    found = {answer["custom_id"]: answer for answer in files.answers}
    data = [
        item["embedding"]
        for custom_id in ("both", "one")
        for item in found[custom_id]["response"]["body"]["data"]
    ]
    assert data == [pytest.approx(vector, abs=1e-5) for vector in expected]
    assert found["text"]["response"]["status_code"] == 400


def test_a_run_that_is_killed_loses_and_repeats_no_line(files: Files, offline: LLM) -> None:
    dice = random.Random(36)
    prompts = [f"{number}: {dice.getrandbits(40):x}" for number in range(300)]
    # The first of an id is answered late, its double is refused at once.
    files.write([*(completion(prompt, prompt) for prompt in prompts), completion(prompts[-1], "")])
    num_killed = 0
    for part in range(4):
        least = dice.randrange(1 + 70 * part, 70 * (part + 1))
        process = files.start("--max-num-seqs", "8")
        files.wait_for(least, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        num_killed += process.returncode == -signal.SIGKILL
        if part == 2:
            with files.output.open("ab") as output:
                output.write(b'{"id": "batch_req_9999", "custom_id": "')
    assert num_killed > 0
    out, err = files.run()
    assert "lines are answered" in err
    assert out.startswith("300 lines answered, 1 errors, ")
    doubles = [answer for answer in files.answers if answer["custom_id"] is None]
    assert [answer["id"] for answer in doubles] == ["batch_req_301"]
    answered = [
        line for line in files.output.read_bytes().splitlines() if b': null, "resp' not in line
    ]
    files.output.write_bytes(b"\n".join(answered))
    assert files.texts == dict(zip(prompts, texts_of(offline, prompts), strict=True))


def test_lines_of_a_pipe_are_answered_before_it_ends(files: Files, offline: LLM) -> None:
    process = files.start(source="-", stdin=subprocess.PIPE)
    assert process.stdin is not None
    prompts = ["first", "second"]
    for number, prompt in enumerate(prompts, start=1):
        process.stdin.write(json.dumps(completion(prompt, prompt)) + "\n")
        process.stdin.flush()
        files.wait_for(number, process)
        assert process.poll() is None
    process.communicate()
    assert process.returncode == 0
    assert files.texts == dict(zip(prompts, texts_of(offline, prompts), strict=True))


def test_ctrl_c_ends_a_run_that_waits_for_its_input(files: Files) -> None:
    process = files.start(source="-", stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(json.dumps(completion("a", "a")) + "\n")
    process.stdin.flush()
    files.wait_for(1, process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130  # while the pipe is still open
    _, err = process.communicate()
    assert err.endswith("pagedserve: interrupted\n")


def _small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))


def test_a_disk_that_is_full_ends_a_run_that_is_resumed(files: Files, offline: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    files.write([completion(prompt, prompt) for prompt in prompts])
    process = files.start(preexec_fn=_small_files)
    _, err = process.communicate()
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("pagedserve: error: [Errno 27] File too large: ")
    assert files.output.stat().st_size == 3000
    _, err = files.run()
    assert "; its last line was incomplete and is cut off\n" in err
    assert files.texts == dict(zip(prompts, texts_of(offline, prompts), strict=True))


# Runs an engine that dies of an error in its 60th step.
MORTAL = """
from pagedserve.engine.llm_engine import LLMEngine
step, num_steps = LLMEngine.step, 0
def mortal(engine):
    global num_steps
    num_steps += 1
    if num_steps == 60:
        raise SystemExit("a bug")
    return step(engine)
LLMEngine.step = mortal
"""


def test_an_engine_that_dies_ends_a_run_without_errors_in_its_output(
    files: Files, offline: LLM
) -> None:
    prompts = [f"prompt {number}" for number in range(40)]
    files.write([completion(prompt, prompt) for prompt in prompts])
    process = files.start("--max-num-seqs", "8", program=MORTAL + PROGRAM)
    _, err = process.communicate()
    assert process.returncode == 1
    assert err.endswith("pagedserve: error: the engine has died: SystemExit\n")
    assert files.num_lines < len(prompts)
    files.run()
    assert files.texts == dict(zip(prompts, texts_of(offline, prompts), strict=True))

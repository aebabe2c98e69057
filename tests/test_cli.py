import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pagedserve
from pagedserve import LLM, ModelLoadError
from pagedserve.cli import main
from pagedserve.engine.defaults import STEP_TOKENS

MODEL = ("generate", "--model", "smollm2")
CLOSING_WORDS = ("prompt ", "tokens/s, generation ", "KV blocks at the peak", "preemptions")


@pytest.fixture
def loaded(smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The model is there already; what the command line asks for is kept."""
    asked: dict[str, Any] = {}

    def make(**arguments: Any) -> LLM:
        asked.update(arguments)
        return smollm2

    monkeypatch.setattr(pagedserve, "LLM", make)
    return asked


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a bad command line says: one line on stderr, after what had begun."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *begun, said = captured.err.splitlines()
    assert len(begun) <= 1
    assert all(line.startswith("loading ") for line in begun)
    assert said.startswith("pagedserve: error: ")
    return said


@pytest.mark.usefixtures("loaded")
def test_each_prompt_comes_with_its_text_and_a_closing_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = ("The capital of France is", "Two plus two is")
    assert main([*MODEL, "--prompt", prompts[0], "--prompt", prompts[1], "--max-tokens", "5"]) == 0
    out = capsys.readouterr().out
    assert out.index(f"prompt: {prompts[0]}") < out.index("Paris") < out.index(prompts[1])
    assert all(words in out.splitlines()[-1] for words in CLOSING_WORDS)


@pytest.mark.usefixtures("loaded")
def test_json_is_one_object_a_line_and_nothing_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("The capital of France is\r\n\n日本の首都は\n", encoding="utf-8")
    assert main([*MODEL, "--prompts-file", str(file), "--json", "--max-tokens", "5"]) == 0
    captured = capsys.readouterr()
    objects = [json.loads(line) for line in captured.out.splitlines()]
    assert [answer["prompt"] for answer in objects] == ["The capital of France is", "日本の首都は"]
    assert set(objects[0]) == {"prompt", "outputs"}
    (output,) = objects[0]["outputs"]
    assert set(output) == {"text", "token_ids", "finish_reason", "stop_reason"}
    assert output["text"].startswith(" Paris")
    assert (len(output["token_ids"]), output["finish_reason"]) == (5, "length")
    assert all(words in captured.err for words in CLOSING_WORDS)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    "option", [("--top-p", "0.9"), ("--top-k", "50"), ("--min-p", "0.01"), ("--top-n-sigma", "2")]
)
def test_who_says_how_to_draw_is_drawn_for(
    capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    # After these words no token has a probability of more than 0.15, whatever the option leaves.
    argv = [*MODEL, "--json", "--prompt", "My name is", *option, "--max-tokens", "4"]
    assert main([*argv, "--n", "4"]) == 0
    drawn = json.loads(capsys.readouterr().out)["outputs"]
    assert len({str(output["token_ids"]) for output in drawn}) > 1
    assert main([*argv, "--prompt", "My name is", "--temperature", "0"]) == 0
    greedy = capsys.readouterr().out.splitlines()
    assert len(greedy) == 2
    assert greedy[0] == greedy[1]


@pytest.mark.usefixtures("loaded")
def test_a_reader_who_has_enough_gets_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main([*MODEL, "--prompt", "The capital of France is", "--max-tokens", "2"]) == 141
    assert "Traceback" not in capsys.readouterr().err


def generated(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*MODEL, "--prompt", "The capital of France is", "--json", *argv]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.usefixtures("loaded")
def test_several_outputs_are_sampled_without_a_word_about_temperature(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outputs = generated(capsys, "--n", "3", "--max-tokens", "6")["outputs"]
    assert len(outputs) == 3
    assert len({tuple(output["token_ids"]) for output in outputs}) > 1


@pytest.mark.usefixtures("loaded")
def test_a_beam_width_searches_and_the_best_comes_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outputs = generated(capsys, "--beam-width", "3", "--n", "2", "--max-tokens", "4")["outputs"]
    sums = [output["cumulative_logprob"] for output in outputs]
    assert len(sums) == 2
    assert sums == sorted(sums, reverse=True)


@pytest.mark.usefixtures("loaded")
def test_logprobs_and_stops_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (output,) = generated(capsys, "--logprobs", "2", "--stop", ".")["outputs"]
    assert (output["text"], output["stop_reason"]) == (" Paris", ".")
    (first, _) = output["logprobs"]
    assert {logprob["decoded_token"] for logprob in first.values()} >= {" Paris"}
    argv = [*MODEL, "--prompt", "The capital of France is", "--logprobs", "2", "--stop", "."]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "' Paris'" in shown
    assert shown.count(" | ") == 2  # a line a token


@pytest.mark.usefixtures("loaded")
def test_chat_applies_the_models_template(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*MODEL, "--chat", "--json", "--prompt", "What is the capital of France?"]
    assert main([*argv, "--max-tokens", "40"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["prompt"] == "What is the capital of France?"
    assert "Paris" in answer["outputs"][0]["text"]
    assert answer["outputs"][0]["finish_reason"] == "stop"


def test_options_reach_the_engine(loaded: dict[str, Any]) -> None:
    options = ["--num-gpu-blocks", "70", "--dtype", "float32", "--seed", "3", "--block-size", "8"]
    sampling = ["--temperature", "0.5", "--top-p", "0.9", "--top-k", "5", "--max-tokens", "1"]
    assert main([*MODEL, "--prompt", "a", *options, *sampling, "--kv-cache-memory", "1MiB"]) == 0
    expected = {
        "model": "smollm2",
        "num_gpu_blocks": 70,
        "dtype": "float32",
        "seed": 3,
        "block_size": 8,
        "kv_cache_memory": 1 << 20,
    }
    assert expected.items() <= loaded.items()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "arguments are required: {generate,serve,run-batch"),
        (["serv"], "invalid choice: 'serv' (choose from 'generate', 'serve', "),
        (["serv"], "; did you mean serve?"),
        (["generate", "--prompt", "a"], "no model: give --model"),
        ([*MODEL, "--max-token", "3"], "did you mean --max-tokens?"),
        (["generate", "--no-such-option"], "unrecognized arguments: --no-such-option"),
        (MODEL, "no prompts: give --prompt or --prompts-file"),
        ([*MODEL, "--prompt", "a", "--prompts-file", "b"], "are both given"),
        ([*MODEL, "--prompts-file", "/no/such/file"], "No such file or directory"),
        ([*MODEL, "--prompts-file", "/"], "Is a directory"),
        ([*MODEL, "--prompt", "a", "--temperature", "-1"], "temperature is -1.0"),
        ([*MODEL, "--prompt", "a", "--temperature", "warm"], "invalid float value: 'warm'"),
        ([*MODEL, "--prompt", "a", "--top-p", "2"], "top_p is 2.0"),
        ([*MODEL, "--prompt", "a", "--max-tokens", "0"], "max_tokens is 0"),
        ([*MODEL, "--prompt", "a", "--n", "2", "--temperature", "0"], "would all be equal"),
        ([*MODEL, "--prompt", "a", "--beam-width", "2", "--best-of", "2"], "are both given"),
        ([*MODEL, "--prompt", "a", "--beam-width", "1"], "--beam-width is 1; it must be"),
        ([*MODEL, "--prompt", "a", "--beam-width", "4", "--n", "8"], "at least --n, 8"),
        (
            [*MODEL, "--prompt", "a", "--beam-width", "2", "--top-k", "3"],
            "--top-k and --beam-width",
        ),
        ([*MODEL, "--prompt", "a", "--stop", ""], "stop"),
        ([*MODEL, "--prompt", "a", "--swap-space", "-1"], "swap_space is -1.0"),
        ([*MODEL, "--prompt", "a", "--preemption-mode", "drop"], "invalid choice: 'drop'"),
        ([*MODEL, "--prompt", "a", "--num-gpu-blocks", "0"], "num_gpu_blocks is 0"),
        ([*MODEL, "--prompt", "a", "--dtype", "int8"], "invalid choice: 'int8'"),
        ([*MODEL, "--prompt", "a", "--kv-cache-memory", "much"], "no number of bytes"),
        (["generate", "--model", "./none", "--prompt", "a"], "no such file or directory"),
        ([*MODEL, "--max-tokens", "5", "--max-tokens", "5"], "--max-tokens is given twice"),
        ([*MODEL, "--seed", "1", "--seed=2"], "--seed is given twice"),
        (
            [*MODEL, "--enable-prefix-caching", "--no-enable-prefix-caching"],
            "--enable-prefix-caching and --no-enable-prefix-caching are both given",
        ),
        (
            [*MODEL, "--num-gpu-blocks", "5", "--num-gpu-blocks-override", "6", "--prompt", "a"],
            "are the same option",
        ),
        (["serve", "a", "--model", "b"], "MODEL and --model are both given"),
        (["serve", "a", "--port", "0", "--port", "1"], "--port is given twice"),
        (["bench", "serve", "--seed", "1", "--seed", "2"], "--seed is given twice"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert message in refusal(capsys, *argv)


def test_help_says_a_default_once_and_a_servers_own(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for command in ("generate", "serve"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        shown[command] = " ".join(capsys.readouterr().out.split())
        assert ") (default: " not in shown[command]
    chunks = "run in the same steps as other requests' decode tokens. (default: {})"
    assert chunks.format(False) in shown["generate"]
    assert chunks.format(True) in shown["serve"]
    tokens = "at least max_num_seqs. (default: {} with chunked prefill, else 2048 or max_model_len"
    assert tokens.format(512) in shown["generate"]
    assert tokens.format(STEP_TOKENS) in shown["serve"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "has no prompt"), (b" \n\n", "has no prompt"), (b"\xff\xfe", "is not UTF-8")],
)
def test_a_prompts_file_without_prompts_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    assert message in refusal(capsys, *MODEL, "--prompts-file", str(file))


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "pagedserve: interrupted\n"),
        (ModelLoadError("two\nlines"), 2, "pagedserve: error: two lines\n"),
        (ImportError("needs torch"), 1, "pagedserve: error: needs torch\n"),
    ],
)
def test_what_ends_a_run_early_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    said: str,
) -> None:
    def fail(**_: Any) -> LLM:
        raise error

    monkeypatch.setattr(pagedserve, "LLM", fail)
    assert main([*MODEL, "--prompt", "a"]) == status
    assert capsys.readouterr().err == f"loading smollm2\n{said}"


@pytest.mark.parametrize(
    ("option", "said"), [("--version", pagedserve.__version__), ("--help", "generate")]
)
def test_help_and_version_load_no_heavy_package(option: str, said: str) -> None:
    code = (
        "import sys; from pagedserve.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, option], check=True, capture_output=True, text=True
    )
    assert said in ran.stdout
    loaded = ran.stderr.split()
    assert "pagedserve" in loaded
    assert not {"torch", "transformers", "triton", "tqdm"} & set(loaded)


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "pagedserve", "--version"]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    assert ran.stdout == f"pagedserve {pagedserve.__version__}\n"


def test_the_program_says_nothing_after_its_last_line(model_package: None) -> None:
    words = [*MODEL, "--prompt", "A", "--max-tokens", "1"]
    code = f"from pagedserve.cli import main; raise SystemExit(main({words}))"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert all(words in ran.stdout.splitlines()[-1] for words in CLOSING_WORDS)
    # Where bindings of libraries are left to the system's end, they report leaks there.
    assert "leaked" not in ran.stderr


def test_a_process_ends_with_its_status_after_what_runs_at_the_exit() -> None:
    program = (
        "import atexit, sys; atexit.register(print, 'left'); sys.argv[1:] = ['generate']\n"
        "from pagedserve.cli import run; run()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "left\n")
    assert "no model: give --model" in done.stderr

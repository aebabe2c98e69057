"""``pagedserve chat`` and ``complete``: quick, from a pipe, and in a terminal."""

import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest

from pagedserve.cli import main
from pagedserve.cli.dialogue import _talk
from tests.server.conftest import Serve, Served
from tests.server.test_completions import text_after
from tests.server.test_life import slowly
from tests.support.formula import FormulaModel
from tests.support.openai_server import DONE, MODEL, Reply, chat, completion, serving

# Its own end of the terminal becomes the one whose Ctrl-C it hears.
PROGRAM = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from pagedserve.cli import main
sys.exit(main(sys.argv[1:]))
"""
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """The command line in a terminal of its own."""

    def __init__(self, *argv: str) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *argv],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(slave)
        self._shown = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    def until(self, text: str) -> str:
        """Read until a text is shown; all that came before it."""
        while text.encode() not in self._shown:
            self._shown += os.read(self._master, 4096)
        before, _, self._shown = self._shown.partition(text.encode())
        return before.decode(errors="replace")

    def type(self, keys: str) -> None:
        """Type once the program waits: a signal just before it does is seen at the next key."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.001)
        os.write(self._master, keys.encode())

    def end(self) -> int:
        self.type(CTRL_D)
        return self._process.wait()


def address(served: Served) -> str:
    return f"{served.http.base_url}/v1"


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("pagedserve: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.fixture
def greedy(shared: Served) -> tuple[str, ...]:
    return ("--url", address(shared), "--temperature", "0", "--max-tokens", "6")


def test_one_message(
    capsys: pytest.CaptureFixture[str], greedy: tuple[str, ...], formula: FormulaModel
) -> None:
    answer = text_after(formula, "u:Hello|a:", 6)
    assert said(capsys, "chat", "-q", "Hello", *greedy) == f"{answer}\n"
    answer = text_after(formula, "s:Be brief;u:Hello|a:", 6)
    assert said(capsys, "chat", "-q", "Hello", *greedy, "--system-prompt", "Be brief") == (
        f"{answer}\n"
    )


def test_each_line_of_a_pipe_is_a_prompt(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    greedy: tuple[str, ...],
    formula: FormulaModel,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\r\n\nBye"))
    answers = [text_after(formula, prompt, 6) for prompt in ("Hello", "Bye")]
    assert said(capsys, "complete", *greedy) == "".join(f"{answer}\n" for answer in answers)


def test_a_server_is_sent_what_was_asked_and_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    monkeypatch.setattr(sys, "stdin", io.StringIO("One\nTwo\n"))
    options = ("--top-p", "0.5", "--seed", "7", "--stop", "a", "--stop", "b")
    answers = ["Ürst", "second"]

    def answer(number: int, _: object) -> Reply:
        first, rest = answers[number][:1], answers[number][1:]
        return Reply(
            [
                chat(role="assistant", content=""),
                chat(content=first),
                chat("stop", content=rest),
                DONE,
            ]
        )

    with serving(answer) as server:
        url = ("--url", f"{server.url}/v1/")
        assert said(capsys, "chat", *url, *options, "--system-prompt", "Be") == "Ürst\nsecond\n"
    first, second = server.received
    assert first.path == "/v1/chat/completions"
    assert first.headers["authorization"] == "Bearer of-the-environment"
    given = {"model": MODEL, "stream": True, "top_p": 0.5, "seed": 7, "stop": ["a", "b"]}
    asked = [{"role": "system", "content": "Be"}, {"role": "user", "content": "One"}]
    assert first.body == {**given, "messages": asked}
    heard = [{"role": "assistant", "content": "Ürst"}, {"role": "user", "content": "Two"}]
    assert second.body == {**given, "messages": [*asked, *heard]}


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(['{"error": {"message": "no such\\nmodel"}}'], 404), "404: no such model"),
        (Reply(["busy"], 503, {"Retry-After": "7"}), "503: busy (Retry-After: 7)"),
        (Reply(["a"], 500, {"Content-Length": "2"}, cut=True), "responded with 500: Reason"),
        (Reply([completion("a")], cut=True), "cut off"),
        (Reply([completion("a"), DONE]), "cut off"),
        (Reply([completion("a", "abort"), DONE]), "cut off"),
        (Reply([{"error": {"message": "out of luck"}}, DONE]), "the server failed: out of luck"),
        (Reply(["nonsense"]), "none of OpenAI's: b'nonsense'"),
        (Reply(["[1]"]), "none of OpenAI's: b'[1]'"),
    ],
)
def test_what_a_server_does_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str], reply: Reply, words: str
) -> None:
    with serving(lambda _number, _request: reply) as server:
        assert words in refusal(capsys, "complete", "-q", "a", "--url", f"{server.url}/v1")


@pytest.mark.parametrize("choice", [{"delta": [1]}, {"delta": {"content": 5}}])
def test_a_chat_without_text_is_one_line(
    capsys: pytest.CaptureFixture[str], choice: dict[str, object]
) -> None:
    reply = Reply([{"choices": [{"delta": None}]}, {"choices": [choice]}, DONE])
    with serving(lambda _number, _request: reply) as server:
        message = refusal(capsys, "chat", "-q", "a", "--url", f"{server.url}/v1")
    assert f"none of OpenAI's: {json.dumps({'choices': [choice]}).encode()!r}" in message


def test_a_line_that_is_no_text_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter([b"\xff", b"Hello"])

    def read(_: str) -> str:
        try:
            return next(lines).decode()
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    prompts: list[str] = []
    _talk(prompts.append)
    assert prompts == ["Hello"]
    assert capsys.readouterr().err.startswith("pagedserve: error: stdin is not UTF-8 text: ")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        # Port 1 is nobody's: those below 1024 are given to known services alone.
        (("--url", "http://127.0.0.1:1/v1"), "no server responds at http://127.0.0.1:1/v1"),
        (("--url", "http://localhost:1/v\xe4"), "/v\xe4/models: 'ascii' codec can't"),
        (("--url", "http://.localhost:1/v1"), "http://.localhost:1/v1/models: encoding with"),
        (("--url", "http://[::1"), "http://[::1/models: Invalid IPv6 URL"),
        (("--url", "localhost:8000"), "--url is 'localhost:8000'; it must be a URL"),
        (("--api-key", "se\ncret"), "the API key has characters that no HTTP header has"),
        (("--max-tokens", "many"), "invalid int value: 'many'"),
    ],
)
def test_a_bad_command_line_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str
) -> None:
    message = refusal(capsys, "chat", "-q", "a", *argv)
    assert words in message
    assert "cret" not in message


def test_a_terminal_goes_on_after_ctrl_c_and_errors() -> None:
    replies = [
        Reply([chat(content="never"), *[chat(content=".")] * 1000], gap_s=0.05),
        Reply(["full"], 503),
        Reply([chat("stop", content="at last"), DONE]),
    ]

    with ExitStack() as stack:
        server = stack.enter_context(serving(lambda number, _request: replies[number]))
        terminal = stack.enter_context(Terminal("chat", "--url", f"{server.url}/v1"))
        assert f"{MODEL} at {server.url}/v1" in terminal.until("> ")
        terminal.type("One\n")
        terminal.until("never")
        terminal.type(CTRL_C)
        terminal.until("\n> ")
        terminal.type("Two\n")
        assert "error: " in terminal.until("503: full")
        terminal.until("> ")
        terminal.type(f"half a line{CTRL_C}")
        terminal.until("\n> ")
        terminal.type("Three\n")
        terminal.until("at last")
        terminal.until("> ")
        assert terminal.end() == 0
    said = [message["content"] for message in server.received[-1].body["messages"]]
    assert said[0] == "One"
    assert said[1].startswith("never")  # what came of an answer was said
    assert said[2:] == ["Three"]  # what was refused was not


def test_ctrl_c_ends_the_request_too(serve: Serve) -> None:
    with serve() as served:
        slowly(served, 0.02)
        with Terminal("complete", "--url", address(served), "--max-tokens", "100") as terminal:
            for num_requests in (1, 2):
                terminal.until("> ")
                terminal.type("Hello\n")
                served.wait_until(lambda: len(served.context.jobs) > 0)
                terminal.type(CTRL_C)
                served.wait_until_idle()
                found = re.search(
                    r'finished_reason="abort".*} (.*)', served.http.get("/metrics").text
                )
                assert found is not None
                assert float(found[1]) == num_requests
            assert served.engine.stats.num_generation_tokens < 150
            assert terminal.end() == 0


def test_talking_needs_no_extra() -> None:
    code = (
        "import sys; from pagedserve.cli import main\n"
        "main(['chat', '-q', 'a', '--url', 'http://127.0.0.1:1'])\n"
        "print([name for name in ('torch', 'numpy', 'aiohttp', 'fastapi') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout == "[]\n"

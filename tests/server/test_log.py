"""What a server writes to its log: a line a request, and what users wrote only if asked for."""

import json
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagedserve.cli import main
from pagedserve.cli.main import make_parser
from pagedserve.server.log import JsonFormatter
from pagedserve.server.options import ServerArgs
from tests.server.conftest import TEMPLATE, Process, Serve, Served
from tests.server.test_completions import PROMPT, text_after
from tests.server.test_life import leave, slowly, wait_for
from tests.support.formula import FormulaModel

TIMES = ("queue_seconds", "ttft_seconds", "e2e_seconds")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[Served, int], list[dict[str, Any]]]:
    """So many lines of requests, as JSON has them; also readable ones are there."""
    caplog.set_level(logging.INFO, "pagedserve.server")

    def found(served: Served, number: int) -> list[dict[str, Any]]:
        def records() -> list[logging.LogRecord]:
            return [record for record in caplog.records if hasattr(record, "fields")]

        served.wait_until(lambda: len(records()) >= number)  # a line comes after its answer
        objects = [json.loads(JsonFormatter().format(record)) for record in records()]
        assert len(objects) == number
        for entry, record in zip(objects, records(), strict=True):
            assert record.getMessage().startswith(f"{entry['request_id']}: ")
        return objects

    return found


def test_a_line_says_what_a_request_was(
    serve: Serve, lines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with serve({"enable_prefix_caching": True}) as served:
        for stream in (False, True):
            headers = {"X-Request-Id": f"mine-{stream}"}
            body = {"prompt": "Hello, all of you", "max_tokens": 9, "stream": stream}
            assert served.http.post("/v1/completions", json=body, headers=headers).is_success
        whole, streamed = lines(served, 2)
    assert (whole["request_id"], whole["model"]) == ("cmpl-mine-False", "formula")
    counts = ("status", "num_prompts", "prompt_tokens", "completion_tokens", "num_preemptions")
    for line in (whole, streamed):
        assert [line[name] for name in counts] == [200, 1, 17, 9, 0]
        assert (line["finish_reasons"], line["client_gone"], line["error"]) == (
            ["length"],
            False,
            None,
        )
        assert 0 <= line["queue_seconds"] <= line["ttft_seconds"] <= line["e2e_seconds"]
        assert 0 < line["tpot_seconds"] * 8 <= line["e2e_seconds"]
        assert (line["level"], line["logger"]) == ("INFO", "pagedserve.server.http.request_log")
    assert (whole["cached_tokens"], streamed["cached_tokens"]) == (0, 16)
    assert "cmpl-mine-True: prompts 1, prompt 17 tokens, cached 16, new 9, " in caplog.text
    assert ", preemptions 0, length\n" in caplog.text


def test_nobody_reads_what_users_wrote(
    serve: Serve, lines: Any, caplog: pytest.LogCaptureFixture, formula: FormulaModel
) -> None:
    secrets = {"prompt": "my secret", "stop": "other secret", "user": "secret name"}
    with serve() as served:
        served.complete(**secrets, max_tokens=9)
        lines(served, 1)  # or that of a refusal may come before it
        served.complete(**secrets, temperature="secret warm")
        served.complete(**secrets, bad_words=["secret"] * 3, n=10**6)
        served.http.post("/v1/completions?key=secret", content=b"secret")
        served.complete(prompt="secret " * 30)
        assert [line["status"] for line in lines(served, 5)] == [200, 400, 400, 415, 400]
        assert lines(served, 5)[-1]["error"] == "BadRequestError"
        caplog.set_level(logging.DEBUG)
        served.complete(**secrets, max_tokens=9)
        said = str(lines(served, 6)) + caplog.text
    assert "secret" not in said
    assert text_after(formula, secrets["prompt"], 9) not in said


def test_what_users_wrote_is_there_if_asked_for(
    serve: Serve, lines: Any, formula: FormulaModel, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"log_prompts": True, "max_log_len": 7, "chat_template": TEMPLATE}
    with serve(**options) as served:
        for stream in (False, True):
            served.complete(prompt="Hello, you", max_tokens=9, n=2, stream=stream)
        chat = {"messages": [{"role": "user", "content": "Ä"}], "max_tokens": 2}
        assert served.http.post("/v1/chat/completions", json=chat).is_success
        *completions, talk = lines(served, 3)
    answer = text_after(formula, "Hello, you", 9)[:7]
    for line in completions:
        assert line["prompt"] == "Hello, "
        assert set(line["outputs"]) == {answer}
    assert talk["prompt"] == '[{"role'
    assert 'prompt "Hello, ", outputs ["' in caplog.text


def test_no_text_makes_a_line_of_its_own(
    serve: Serve, lines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(log_prompts=True) as served:
        served.http.post(
            "/v1/completions",
            content=b'{"prompt": "a\\nERROR all is lost \\ud800", "max_tokens": 1}',
            headers={"Content-Type": "application/json"},
        )
        (line,) = lines(served, 1)
    assert line["prompt"] == "a\nERROR all is lost \ud800"
    assert 'prompt "a\\nERROR all is lost ?", outputs []' in caplog.text


def test_who_left_and_who_was_refused_have_a_line(serve: Serve, lines: Any) -> None:
    with serve({"max_num_seqs": 1}, max_num_queued_reqs=0, api_key=("key",)) as served:
        served.http.headers["Authorization"] = "Bearer key"
        slowly(served)
        served.http.get("/health")
        served.http.get("/metrics")
        served.http.get("/v1/models", headers={"Authorization": "Bearer other"})
        served.http.get("/no where")
        served.complete(prompt=PROMPT, max_tokens=-1)
        refused, nowhere, bad = lines(served, 3)
        assert (refused["status"], refused["path"]) == (401, "/v1/models")
        assert (nowhere["status"], nowhere["method"], nowhere["path"]) == (
            404,
            "GET",
            "/no%20where",
        )
        assert (bad["status"], bad["path"]) == (400, "/v1/completions")


def test_a_client_that_left_is_said_to_have(serve: Serve, lines: Any) -> None:
    with serve() as served:
        slowly(served)
        leave(served, 0)
        (line,) = lines(served, 1)
        assert (line["status"], line["client_gone"], line["finish_reasons"]) == (499, True, [])
        assert (line["ttft_seconds"], line["num_preemptions"]) == (None, None)
        assert (line["prompt_tokens"], line["completion_tokens"]) == (None, None)  # none was sent


@pytest.mark.usefixtures("impatient")
def test_a_client_that_left_a_stream_without_events_is_said_to_have(
    serve: Serve, formula: FormulaModel, lines: Any
) -> None:
    with serve(sse_keep_alive_interval=1e-9) as served:
        has_left = threading.Event()
        formula.executor(served.engine).before_sampling = partial(wait_for, has_left)
        leave(served, 100, stream=True)
        (line,) = lines(served, 1)
        has_left.set()
        served.wait_until_idle()
        assert (line["status"], line["client_gone"], line["finish_reasons"]) == (499, True, [])
        assert (line["ttft_seconds"], line["completion_tokens"]) == (None, None)


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_is_set_changes_no_duration(
    serve: Serve, lines: Any, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    with serve() as served:
        wall_clock = time.time
        monkeypatch.setattr(time, "time", lambda: wall_clock() + jump)
        created = served.complete(prompt=PROMPT, max_tokens=9).json()["created"]
        (line,) = lines(served, 1)
        served.wait_until_idle()
        metrics = served.metrics()
    assert abs(created - wall_clock() - jump) < 600
    for name in TIMES:
        assert 0 <= line[name] < 600
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert 0 <= metrics[f"vllm:{name}_seconds_sum"] < 600


def test_requests_need_no_line(serve: Serve, lines: Any) -> None:
    with serve(enable_log_requests=False) as served:
        served.complete(prompt=PROMPT)
        served.complete(prompt=PROMPT, max_tokens=-1)
        served.wait_until_idle()
        assert lines(served, 0) == []


def test_a_failure_says_why(serve: Serve, formula: FormulaModel, lines: Any) -> None:
    with serve() as served:
        executor = formula.executor(served.engine)

        def fail() -> None:
            raise RuntimeError("a loose wire")

        executor.before_sampling = fail
        answer = served.complete(prompt=PROMPT)
        (line,) = lines(served, 1)
    assert (line["status"], answer.status_code) == (500, 500)
    assert line["error"] == answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), True),
        (("--enable-log-requests",), True),
        (("--no-enable-log-requests",), False),
        (("--disable-log-requests",), False),
    ],
)
def test_the_names_that_vllm_has_for_it(argv: tuple[str, ...], expected: bool) -> None:
    options = make_parser().parse_args(["serve", "smollm2", *argv])
    assert ServerArgs.from_cli_args(options).enable_log_requests is expected


def test_both_names_at_once_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "a", "--enable-log-requests", "--disable-log-requests"]) == 2
    assert "are both given" in capsys.readouterr().err


def test_json_is_an_object_a_line(endless: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ("--log-format", "json", "--uvicorn-log-level", "info")
    process = Process(log, endless, "--load-format", "dummy", *options)
    assert httpx.get(f"{process.url}/v1/models").status_code == 503
    assert process.end() == 0
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert {entry["logger"] for entry in entries} >= {"uvicorn", "pagedserve.server.run"}
    assert all(entry.keys() >= {"time", "level", "logger"} for entry in entries)
    (models,) = [entry for entry in entries if entry.get("path") == "/v1/models"]
    assert (models["method"], models["status"]) == ("GET", 503)
    assert "message" not in models

"""``pagedserve bench serve`` as people call it, on a real server on loopback."""

import gc
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedserve.cli import main
from tests.support.openai_server import (
    DONE,
    MODEL,
    FakeServer,
    Received,
    Reply,
    chat,
    serving,
    text_events,
    usage,
)

SMALL = ("--num-prompts", "12", "--random-input-len", "9", "--random-output-len", "4")


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(autouse=True)
def still_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests load stays frozen, or each run would traverse it at its beginning."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


def good(_number: int, request: Received) -> Reply:
    """As many tokens as were asked for, a little apart; the prompt is counted."""
    return Reply(
        text_events(request.body["max_tokens"], prompt_tokens=len(request.body["prompt"])),
        gap_s=0.002,
    )


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(good) as request:
        yield request


def bench(server: FakeServer, *argv: str) -> int:
    return main(["bench", "serve", "--base-url", server.url, "--disable-tqdm", *argv])


def measured(
    capsys: pytest.CaptureFixture[str], server: FakeServer, *argv: str, status: int = 0
) -> dict[str, Any]:
    assert bench(server, "--json", *argv) == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_counts_and_totals(capsys: pytest.CaptureFixture[str], server: FakeServer) -> None:
    result = measured(capsys, server, *SMALL, "--goodput", "ttft:60000", "e2el:60000")
    assert (result["completed"], result["failed"], result["unfinished"]) == (12, 0, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (12 * 9, 12 * 4)
    assert (result["model_id"], result["backend"], result["num_prompts"]) == (MODEL, "openai", 12)
    assert (result["request_rate"], result["counted_by_chunks"]) == ("inf", 0)
    duration = result["duration"]
    assert duration >= 4 * 0.002 * 0.9
    rates = {
        "request_throughput": 12,
        "request_goodput": 12,
        "output_throughput": 48,
        "total_token_throughput": 12 * 13,
    }
    for name, count in rates.items():
        assert result[name] == pytest.approx(count / duration)
    for key in ("ttft", "tpot", "itl", "e2el"):
        figures = [f"{figure}_{key}_ms" for figure in ("p50", "p90", "p99")]
        found = [result[name] for name in figures]
        assert found == sorted(found)
        assert found[0] == result[f"median_{key}_ms"]
        assert found[0] > 0


def test_figures_are_those_of_the_times_of_the_requests(
    capsys: pytest.CaptureFixture[str], server: FakeServer
) -> None:
    result = measured(capsys, server, *SMALL, "--save-detailed", "--metric-percentiles", "25,99.9")
    itls = result["itls"]
    samples = {
        "ttft": result["ttfts"],
        "itl": np.concatenate(itls),
        "e2el": result["latencies"],
        "tpot": np.subtract(result["latencies"], result["ttfts"]) / 3,
    }
    assert [len(request) for request in itls] == [3] * 12
    assert (result["input_lens"], result["output_lens"]) == ([9] * 12, [4] * 12)
    for key, seconds in samples.items():
        milliseconds = np.asarray(seconds) * 1000
        assert result[f"mean_{key}_ms"] == pytest.approx(milliseconds.mean())
        assert result[f"std_{key}_ms"] == pytest.approx(milliseconds.std())
        assert result[f"p25_{key}_ms"] == pytest.approx(np.percentile(milliseconds, 25))
        assert result[f"p99.9_{key}_ms"] == pytest.approx(np.percentile(milliseconds, 99.9))
    starts, ends = result["start_times"], np.add(result["start_times"], result["latencies"])
    most = max(
        sum(start <= at < end for start, end in zip(starts, ends, strict=True)) for at in starts
    )
    assert result["max_concurrent_requests"] == most


def test_what_is_sent(capsys: pytest.CaptureFixture[str], server: FakeServer) -> None:
    argv = ("--api-key", "secret", "--header", "X-One=1", "X-Two=a=b")
    measured(capsys, server, *SMALL, *argv, "--extra-body", '{"temperature": 0}')
    assert len(server.received) == 12
    request = server.received[0]
    assert request.path == "/v1/completions"
    assert request.headers["authorization"] == "Bearer secret"
    assert (request.headers["x-one"], request.headers["x-two"]) == ("1", "a=b")
    prompt = request.body.pop("prompt")
    assert len(prompt) == 9
    assert all(0 <= token_id < 32000 for token_id in prompt)
    assert request.body == {
        "model": MODEL,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0,
    }


def test_a_given_model_and_endpoint_are_taken(
    capsys: pytest.CaptureFixture[str], server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-outside")
    argv = ("--model", "another", "--endpoint", "/v2/completions", "--no-ignore-eos")
    assert measured(capsys, server, *SMALL, *argv)["model_id"] == "another"
    request = server.received[0]
    assert (request.path, request.body["model"]) == ("/v2/completions", "another")
    assert "ignore_eos" not in request.body
    assert request.headers["authorization"] == "Bearer from-outside"


def test_options_of_vllm_decide_what_is_sent(
    capsys: pytest.CaptureFixture[str], server: FakeServer
) -> None:
    names = ("--model", "org/model", "--served-model-name", "short", "--tokenizer", "org/other")
    sampling = ("--temperature", "0.5", "--top-p", "0.9", "--top-k", "7", "--min-p", "0.1")
    penalties = ("--repetition-penalty", "1.1", "--extra-body", '{"top_k": 8}')
    more = ("--request-id-prefix", "mine-", "--trust-remote-code", "--tokenizer-mode", "auto")
    result = measured(capsys, server, *SMALL, *names, *sampling, *penalties, *more)
    assert (result["model_id"], result["tokenizer_id"]) == ("org/model", "org/other")
    body = server.received[0].body
    expected: dict[str, object] = {"temperature": 0.5, "top_p": 0.9, "top_k": 8, "min_p": 0.1}
    expected |= {"repetition_penalty": 1.1, "model": "short"}
    assert {name: body[name] for name in expected} == expected
    assert "frequency_penalty" not in body
    ids = {request.headers["x-request-id"] for request in server.received}
    assert ids == {f"mine-{index}" for index in range(12)}


@pytest.mark.parametrize(
    ("backend", "path"), [("openai-embeddings", "/v1/embeddings"), ("vllm-pooling", "/pooling")]
)
def test_pooling_models(capsys: pytest.CaptureFixture[str], backend: str, path: str) -> None:
    answer = {"data": [], "usage": {"prompt_tokens": 8}}
    with serving(lambda _number, _request: Reply([answer], is_whole=True)) as server:
        result = measured(capsys, server, *SMALL, "--backend", backend)
    assert (result["completed"], result["counted_by_chunks"]) == (12, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (12 * 8, 0)
    assert result["mean_e2el_ms"] > 0
    assert "mean_ttft_ms" not in result
    request = server.received[0]
    assert request.path == path
    assert request.body.keys() == {"model", "input", "truncate_prompt_tokens"}
    assert len(request.body["input"]) == 9


def test_a_server_that_starts_is_waited_for(
    capsys: pytest.CaptureFixture[str], server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedserve.bench.serve._READY_CHECK_SECONDS", 0.0)
    server.num_not_ready = 2
    result = measured(capsys, server, *SMALL, "--ready-check-timeout-sec", "600")
    assert (result["completed"], server.num_not_ready) == (12, 0)
    server.num_not_ready = 1
    assert bench(server, *SMALL, "--model", MODEL) == 2
    assert f"the server at {server.url} is not ready: status 503" in capsys.readouterr().err


def test_chat(capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        chat(role="assistant", content=""),
        chat(content="a"),
        chat(content="b"),
        chat("stop"),
    ]
    with serving(lambda _number, _request: Reply([*events, usage(20, 3), DONE])) as server:
        result = measured(capsys, server, *SMALL, "--backend", "openai-chat")
    assert result["completed"] == 12
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (12 * 20, 12 * 3)
    request = server.received[0]
    (message,) = request.body["messages"]
    assert (request.path, message["role"]) == ("/v1/chat/completions", "user")
    assert len(message["content"].split()) == 9


def test_an_open_loop_sends_whatever_the_server_does(capsys: pytest.CaptureFixture[str]) -> None:
    # No request is answered before all have come: a client that waited for one would hang.
    def answer(_number: int, _request: Received) -> Reply:
        return Reply(text_events(2), wait_for=12)

    with serving(answer) as server:
        argv = ("--request-rate", "200", "--burstiness", "2")
        result = measured(capsys, server, *SMALL, *argv, "--save-detailed")
    assert (result["completed"], server.most_at_once) == (12, 12)
    assert (result["request_rate"], result["burstiness"]) == (200, 2)
    assert min(result["queue_times"]) >= 0
    assert result["duration"] >= 12 / 200 * 0.99
    assert result["p99_client_queue_time_ms"] >= result["median_client_queue_time_ms"] >= 0


def test_a_closed_loop_keeps_its_concurrency(capsys: pytest.CaptureFixture[str]) -> None:
    # None is answered before three have come, so three are on their way whatever the machine does.
    def answer(_number: int, _request: Received) -> Reply:
        return Reply(text_events(2), gap_s=0.002, wait_for=3)

    with serving(answer) as server:
        result = measured(capsys, server, *SMALL, "--max-concurrency", "3")
    assert (result["completed"], result["max_concurrency"]) == (12, 3)
    assert server.most_at_once == 3
    assert result["max_concurrent_requests"] <= 3
    assert "mean_client_queue_time_ms" not in result


def test_warm_ups_are_sent_before_and_not_measured(
    capsys: pytest.CaptureFixture[str], server: FakeServer
) -> None:
    result = measured(capsys, server, *SMALL, "--num-warmups", "5")
    assert (result["completed"], len(server.received)) == (12, 17)
    prompts = [tuple(request.body["prompt"]) for request in server.received]
    assert len(set(prompts)) == 17


def mixed(number: int, request: Received) -> Reply:
    """Every third is refused, every third breaks off; of the first kind one has no such model."""
    if number == 0:
        return Reply([{"error": {"message": "what?"}}], 400)
    if number % 3 == 0:
        return Reply(["busy"], 503, {"Retry-After": "1"})
    if number % 3 == 1:
        return Reply(text_events(4)[:2], cut=True)
    return good(number, request)


def test_errors_are_counted_by_kind_and_end_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(mixed) as server:
        result = measured(capsys, server, *SMALL, "--save-detailed")
    assert (result["completed"], result["failed"]) == (4, 8)
    assert result["failed_by_kind"] == {"broken_stream": 4, "refused": 3, "status_400": 1}
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (4 * 9, 4 * 4)
    kinds = [error.partition(":")[0] for error in result["errors"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {"": 4, **result["failed_by_kind"]}
    assert len(server.received) == 12  # nothing was sent again


def test_the_table_says_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(mixed) as server:
        assert bench(server, *SMALL, "--goodput", "ttft:60000") == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.partition(":")[0].strip(): line.split()[-1] for line in lines if ":" in line}
    assert lines[0].strip("=").strip() == "Serving Benchmark Result"
    assert (found["Successful requests"], found["Failed requests"]) == ("4", "8")
    assert (found["refused"], found["broken_stream"]) == ("3", "4")
    assert any("Retry-After: 1" in line for line in lines)
    for words in ("Request goodput (req/s)", "P90 TTFT (ms)", "P99 E2EL (ms)", "Mean ITL (ms)"):
        assert float(found[words]) > 0
    assert len({len(line) for line in lines if line.endswith(("---", "==="))}) == 1


def test_who_counts_no_tokens_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda _number, _request: Reply(text_events(5, prompt_tokens=None))) as server:
        assert bench(server, *SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("without usage" in line and line.endswith(" 12") for line in lines)
    assert any(
        line.startswith("Total generated tokens:") and line.endswith(" 60") for line in lines
    )


def test_a_run_without_an_answer_is_reported_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda _number, _request: Reply(["no"], 500)) as server:
        assert bench(server, *SMALL) == 2
    captured = capsys.readouterr()
    assert "status_500:" in captured.out
    assert "Mean TTFT (ms):                              -" in captured.out
    assert captured.err == "pagedserve: error: none of 12 requests was answered in full\n"


def test_ctrl_c_ends_the_run_and_reports(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def answer(number: int, request: Received) -> Reply:
        if number < 5:
            return good(number, request)
        if number == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return Reply(text_events(2), gap_s=600.0)

    with serving(answer) as server:
        argv = ("--max-concurrency", "3", "--save-result", "--result-dir", str(tmp_path))
        result = measured(capsys, server, *SMALL, *argv, status=130)
    assert (result["completed"], result["failed"], result["unfinished"]) == (5, 0, 7)
    assert result["total_output_tokens"] == 5 * 4
    (saved,) = tmp_path.iterdir()
    assert json.loads(saved.read_text(encoding="utf-8")) == result


def test_ctrl_c_while_warming_up_reports_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(_number: int, _request: Received) -> Reply:
        os.kill(os.getpid(), signal.SIGINT)
        return Reply(text_events(2), gap_s=600.0)

    with serving(answer) as server:
        assert bench(server, *SMALL, "--num-warmups", "1") == 130
    assert capsys.readouterr().out == ""


def test_a_trace_is_sent_at_its_times(
    capsys: pytest.CaptureFixture[str], server: FakeServer, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 40 * index, "input_length": 30 + index, "output_length": 3}
        for index in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    argv = ("--dataset-name", "trace", "--dataset-path", str(path), "--save-detailed")
    result = measured(capsys, server, *argv)
    assert (result["completed"], result["request_rate"]) == (4, "trace")
    assert sorted(len(request.body["prompt"]) for request in server.received) == [30, 31, 32, 33]
    assert {request.body["max_tokens"] for request in server.received} == {3}
    assert all(start >= 0.04 * index for index, start in enumerate(sorted(result["start_times"])))


def test_a_file_with_fewer_requests_says_so(
    capsys: pytest.CaptureFixture[str], server: FakeServer, tmp_path: Path
) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text('{"prompt": "a b"}\n' * 3, encoding="utf-8")
    assert bench(server, "--dataset-name", "custom", "--dataset-path", str(path)) == 0
    assert "has 3 requests, fewer than --num-prompts" in capsys.readouterr().err


def test_a_result_is_saved_under_its_name(
    capsys: pytest.CaptureFixture[str], server: FakeServer, tmp_path: Path
) -> None:
    argv = ("--save-result", "--result-dir", str(tmp_path / "new"))
    result = measured(capsys, server, *SMALL, *argv, "--max-concurrency", "4")
    (made,) = (tmp_path / "new").iterdir()
    assert made.name == f"openai-infqps-concurrency4-some-model-{result['date']}.json"
    assert json.loads(made.read_text(encoding="utf-8")) == result
    measured(capsys, server, *SMALL, *argv, "--result-filename", "mine.json")
    assert (tmp_path / "new" / "mine.json").exists()


def test_results_are_appended_with_their_label_and_metadata(
    capsys: pytest.CaptureFixture[str], server: FakeServer, tmp_path: Path
) -> None:
    argv = ("--append-result", "--result-dir", str(tmp_path), "--result-filename", "all.json")
    more = ("--label", "mine", "--metadata", "tp=1", "--save-detailed")
    results = [measured(capsys, server, *SMALL, *argv, *more) for _ in range(2)]
    text = (tmp_path / "all.json").read_text(encoding="utf-8")
    assert [json.loads(line) for line in text.splitlines()] == results
    assert text.endswith("}\n")
    assert (results[0]["label"], results[0]["tp"]) == ("mine", "1")
    assert results[0]["generated_texts"] == [" w0 w1 w2 end"] * 12
    measured(capsys, server, *SMALL, "--save-result", "--label", "a", "--result-dir", str(tmp_path))
    assert len(list(tmp_path.glob("a-infqps-some-model-*.json"))) == 1

"""What befalls a server: clients that leave, too many of them, steps that fail, the end."""

import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagedserve.replay.__main__ import main as replay_main
from tests.server.conftest import QUICK_START, Process, Serve, Served
from tests.server.test_completions import PROMPT, events, text_after, texts
from tests.support.formula import FormulaModel


def slowly(served: Served, seconds: float = 0.005) -> None:
    """Let every step take so long."""
    executor: Any = served.engine.model_executor
    executor.before_sampling = lambda: time.sleep(seconds)


def leave(served: Served, after: int, **body: Any) -> None:
    """Send a request and close the connection after so many bytes of the answer."""
    port = served.http.base_url.port
    content = json.dumps({"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True} | body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + content)
        received = 0
        while received < after:
            received += len(connection.recv(after - received))
        served.wait_until(lambda: len(served.context.jobs) > 0)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"stream": True},
        {"n": 4, "temperature": 1.0, "stream": True},
        {"prompt": [PROMPT, "Bye", "Or"]},
        {"use_beam_search": True, "best_of": 4},
    ],
)
@pytest.mark.parametrize("after", [0, 300])
def test_a_client_that_leaves_costs_nothing_a_moment_later(
    serve: Serve, formula: FormulaModel, body: dict[str, Any], after: int
) -> None:
    with serve() as served:
        slowly(served)
        if after and not body.get("stream"):
            after = 0
        leave(served, after, **body)
        served.wait_until_idle()
        num_tokens = served.engine.stats.num_generation_tokens
        assert num_tokens < 390
        assert served.metrics()["vllm:generation_tokens_total"] == num_tokens
        answer = served.complete(prompt=PROMPT, max_tokens=4).json()
        assert answer["choices"][0]["text"] == text_after(formula, PROMPT, 4)


def test_who_leaves_while_waiting_is_forgotten(serve: Serve) -> None:
    with serve(engine={"max_num_seqs": 1}) as served, ThreadPoolExecutor() as pool:
        slowly(served)
        running = pool.submit(partial(served.complete, prompt=PROMPT, max_tokens=60))
        served.wait_until(lambda: served.engine.scheduler.num_running == 1)
        leave(served, 0)
        served.wait_until(lambda: served.context.admission.num_seqs == 1)
        served.wait_until(lambda: served.engine.scheduler.num_waiting == 0)
        assert running.result().json()["usage"]["completion_tokens"] == 60
        served.wait_until_idle()


def test_a_full_queue_refuses_and_says_when_to_come_again(serve: Serve) -> None:
    options = {"engine": {"max_num_seqs": 2}, "max_num_queued_reqs": 1}
    with serve(**options) as served, ThreadPoolExecutor(16) as pool:
        slowly(served)
        body = partial(served.complete, prompt=PROMPT, max_tokens=40)
        answers = [future.result() for future in [pool.submit(body) for _ in range(16)]]
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 503}
        assert statuses.count(200) >= 3
        for answer in answers:
            if answer.status_code == 503:
                assert 1 <= int(answer.headers["retry-after"]) <= 60
                assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        assert served.metrics()["vllm:admission_rejections_total"] == statuses.count(503)
        too_many = served.complete(prompt=[PROMPT] * 4)
        assert "at most 3" in too_many.json()["error"]["message"]
        assert too_many.status_code == 400
        served.wait_until_idle()


@pytest.mark.parametrize(("max_num_seqs", "most"), [(1, 2049), (256, 2304), (1024, 5120)])
def test_a_queue_has_places_for_a_data_set_by_default(
    serve: Serve, max_num_seqs: int, most: int
) -> None:
    with serve({"max_num_seqs": max_num_seqs}) as served:
        assert served.context.admission.most == most


def test_a_queue_is_bounded_in_tokens_too(serve: Serve) -> None:
    options = {"engine": {"max_num_seqs": 1}, "max_num_queued_tokens": 40}
    with serve(**options) as served, ThreadPoolExecutor(3) as pool:
        slowly(served)
        running = pool.submit(partial(served.complete, prompt=[1] * 100, max_tokens=20))
        served.wait_until(lambda: served.engine.scheduler.num_running == 1)
        # What runs is no part of the queue: there is room for 40 tokens, of texts about as many.
        waiting = pool.submit(partial(served.complete, prompt="a" * 90, max_tokens=1))
        served.wait_until(lambda: served.engine.scheduler.num_waiting == 1)
        refused = served.complete(prompt=[[1] * 10, [2] * 10], max_tokens=1)
        assert refused.status_code == 503
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["message"] == (
            "23 prompt tokens wait; at most 40 are accepted, and the request has about 20"
        )
        assert served.metrics()["vllm:admission_rejections_total"] == 1
        also_waiting = pool.submit(partial(served.complete, prompt=[1] * 17, max_tokens=1))
        for answer in (running, waiting, also_waiting):
            assert answer.result().status_code == 200
        # A prompt longer than the queue waits in an empty one.
        assert served.complete(prompt=[1] * 60, max_tokens=1).status_code == 200
        served.wait_until_idle()


def test_a_timeout_ends_a_request_with_what_there_is(serve: Serve) -> None:
    with serve() as served:
        slowly(served, 0.02)
        answer = served.complete(prompt=PROMPT, max_tokens=100, timeout=0.2).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "abort"
        assert 0 < answer["usage"]["completion_tokens"] < 100
        found = events(served.complete(prompt=PROMPT, max_tokens=100, timeout=0.2, stream=True))
        assert found[-1]["choices"][0]["finish_reason"] == "abort"
        served.wait_until_idle()


def test_an_abort_before_the_first_token_echoes_the_prompt(serve: Serve) -> None:
    with serve(engine={"max_num_seqs": 1}) as served, ThreadPoolExecutor() as pool:
        slowly(served, 0.02)
        running = pool.submit(partial(served.complete, prompt=PROMPT, max_tokens=60))
        served.wait_until(lambda: served.engine.scheduler.num_running == 1)
        answer = served.complete(prompt=PROMPT, echo=True, logprobs=1, timeout=0.05)
        assert answer.status_code == 200
        (choice,) = answer.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "abort")
        assert choice["logprobs"]["token_logprobs"] == [None] * len(PROMPT)
        assert running.result().status_code == 200


# Without special tokens a prompt is made before the engine hears of the request.
@pytest.mark.parametrize("special", [True, False])
def test_an_abort_reaches_a_request_that_is_still_being_tokenised(
    serve: Serve, special: bool
) -> None:
    with serve() as served:
        slowly(served)
        held, goes_on = threading.Event(), threading.Event()
        processor = served.engine.input_processor
        encode = processor.tokenizer.__class__.__call__

        def slow(*given: Any, **options: Any) -> Any:
            held.set()
            goes_on.wait()
            return encode(*given, **options)

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
            patch.setattr(processor.tokenizer.__class__, "__call__", slow)
            body = {"prompt": PROMPT, "max_tokens": 100, "timeout": 0.05}
            body["add_special_tokens"] = special
            running = pool.submit(partial(served.complete, **body))
            held.wait()
            time.sleep(0.2)
            goes_on.set()
            answer = running.result().json()
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert answer["usage"]["completion_tokens"] == 0
        served.wait_until_idle()


def test_others_are_answered_while_a_text_is_made_of_tokens(serve: Serve) -> None:
    with serve() as served, pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool:
        held, goes_on = threading.Event(), threading.Event()
        tokenizer = served.engine.input_processor.tokenizer.__class__
        decode = tokenizer.decode

        def slow(*given: Any, **options: Any) -> Any:
            held.set()
            goes_on.wait()
            return decode(*given, **options)

        patch.setattr(tokenizer, "decode", slow)
        body = {"tokens": [1, 2, 3]}
        running = pool.submit(partial(served.http.post, "/detokenize", json=body))
        held.wait()
        try:
            assert served.http.get("/health", timeout=10).status_code == 200
        finally:
            goes_on.set()
        assert running.result().json()["prompt"]


def test_two_requests_may_have_one_name(serve: Serve) -> None:
    with serve(enable_admin_routes=True) as served, ThreadPoolExecutor() as pool:
        slowly(served)
        body = {"prompt": PROMPT, "request_id": "dup"}
        long = pool.submit(partial(served.complete, **body, max_tokens=100, ignore_eos=True))
        assert served.complete(**body, max_tokens=2).status_code == 200
        ids = {"request_ids": ["cmpl-dup"]}
        served.wait_until(lambda: len(served.context.jobs) == 1)
        answer = served.http.post("/abort_requests", json=ids).json()
        assert answer == {"aborted": ["cmpl-dup"]}
        assert long.result().json()["choices"][0]["finish_reason"] == "abort"


def test_an_answer_can_be_aborted_by_its_id(serve: Serve) -> None:
    with serve(enable_admin_routes=True) as served, ThreadPoolExecutor() as pool:
        slowly(served, 0.02)
        body = {"prompt": PROMPT, "max_tokens": 100, "request_id": "mine"}
        running = pool.submit(partial(served.complete, **body))
        served.wait_until(lambda: len(served.context.jobs) == 1)
        ids = {"request_ids": ["cmpl-mine", "other"]}
        assert served.http.post("/abort_requests", json=ids).json() == {"aborted": ["cmpl-mine"]}
        assert running.result().json()["choices"][0]["finish_reason"] == "abort"


def wait_for(event: threading.Event) -> None:
    event.wait()


def fail_after(event: threading.Event) -> None:
    event.wait()
    fail()


def fail() -> None:
    raise ValueError("/secret/path at 0x7f0011223344")


def test_a_model_that_fails_once_changes_nothing(serve: Serve, formula: FormulaModel) -> None:
    with serve() as served:
        failures = iter([0, 1, 0, 1, 1])
        executor = formula.executor(served.engine)
        executor.before_sampling = lambda: fail() if next(failures, 0) else None
        answer = served.complete(prompt=PROMPT, max_tokens=8).json()
        assert answer["choices"][0]["text"] == text_after(formula, PROMPT, 8)


def test_a_model_that_fails_again_and_again_ends_requests_with_an_error(
    serve: Serve, formula: FormulaModel
) -> None:
    with serve() as served:
        executor = formula.executor(served.engine)
        executor.before_sampling = fail
        answer = served.complete(prompt=PROMPT)
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert "ValueError" in error["message"]
        assert "secret" not in error["message"]
        assert "0x7f" not in error["message"]
        # After the first bytes of a stream it is an event.
        begun, successes = threading.Event(), iter([1, 1])
        executor.before_sampling = lambda: None if next(successes, 0) else fail_after(begun)
        port, body = served.http.base_url.port, {"prompt": PROMPT, "stream": True}
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, json=body) as answer:
            begun.set()
            answer.read()
        *parts, done, _ = answer.text.split("\n\n")
        assert (answer.status_code, done) == (200, "data: [DONE]")
        assert json.loads(parts[-1].removeprefix("data: "))["error"]["code"] == 500
        executor.before_sampling = lambda: None
        assert served.complete(prompt=PROMPT).status_code == 200
        assert served.http.get("/health").status_code == 200
        served.wait_until_idle()


def test_a_slow_request_can_be_traced_to_its_steps(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve({"decision_log": str(tmp_path)}) as served:
        answer = served.complete(prompt=[1, 2, 3], max_tokens=4, ignore_eos=True)
        served.wait_until_idle()
    assert replay_main([str(tmp_path)]) == 0
    capsys.readouterr()
    assert replay_main([str(tmp_path), "--request", answer.json()["id"]]) == 0
    came, *steps = capsys.readouterr().out.splitlines()
    assert came.endswith(": added with 3 tokens")
    assert [step.split(" s: ")[1] for step in steps] == [
        "prefill of 3 tokens, 1 rows",
        *["decode, 1 tokens, 1 rows"] * 3,
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_ends_the_decision_log_alone(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    with serve({"decision_log": "/dev/full"}) as served:
        for _ in range(3):
            answer = served.complete(prompt=[1, 2, 3], max_tokens=4, ignore_eos=True)
            assert answer.json()["usage"]["completion_tokens"] == 4
        served.wait_until_idle()
    messages = [record.message for record in caplog.records if "decision log" in record.message]
    assert len(messages) == 1
    assert "No space left on device" in messages[0]


def test_health_says_the_truth(serve: Serve, formula: FormulaModel) -> None:
    with serve(stall_timeout=0.2) as served, ThreadPoolExecutor() as pool:
        goes_on = threading.Event()
        executor = formula.executor(served.engine)
        executor.before_sampling = partial(wait_for, goes_on)
        running = pool.submit(partial(served.complete, prompt=PROMPT))
        served.wait_until(lambda: served.http.get("/health").status_code == 503)
        assert "no step has ended" in served.http.get("/health").json()["error"]["message"]
        assert served.metrics()["pagedserve:seconds_since_step"] > 0.2
        goes_on.set()
        assert running.result().status_code == 200
        assert served.http.get("/health").status_code == 200


def test_a_dead_engine_is_told_to_everybody(serve: Serve, formula: FormulaModel) -> None:
    def die() -> None:
        raise SystemExit

    with serve() as served, ThreadPoolExecutor() as pool:
        slowly(served)
        running = [
            pool.submit(partial(served.complete, prompt=PROMPT, max_tokens=100)) for _ in range(3)
        ]
        served.wait_until(lambda: len(served.context.jobs) == 3)
        formula.executor(served.engine).before_sampling = die
        statuses = [future.result().status_code for future in running]
        assert statuses == [503] * 3
        for route, body in {
            "/v1/embeddings": {"input": "a"},
            "/v1/score": {"text_1": "a", "text_2": "b"},
            "/v1/rerank": {"query": "a", "documents": ["b"]},
        }.items():
            assert served.http.post(route, json=body).status_code == 503, route


def test_a_reader_that_stalls_is_let_go(serve: Serve, formula: FormulaModel) -> None:
    with serve(stall_timeout=0.3, engine={"max_model_len": 4096, "num_gpu_blocks": 2000}) as served:
        port = served.http.base_url.port
        body = {"prompt": PROMPT, "max_tokens": 4000, "stream": True, "logprobs": 20}
        content = json.dumps(body | {"ignore_eos": True, "temperature": 0}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", port))
            connection.sendall(head.encode() + content)
            answer = served.complete(prompt=PROMPT, max_tokens=4).json()
            assert answer["choices"][0]["text"] == text_after(formula, PROMPT, 4)
            served.wait_until_idle()


def test_many_at_once_get_the_tokens_of_each(served: Served, formula: FormulaModel) -> None:
    prompts = [[number + 1, 7, number % 5] for number in range(60)]

    def stream(prompt: list[int]) -> str:
        return texts(events(served.complete(prompt=prompt, max_tokens=9, stream=True)), 1)[0]

    with ThreadPoolExecutor(60) as pool:
        assert list(pool.map(stream, prompts)) == [text_after(formula, p, 9) for p in prompts]


@pytest.mark.usefixtures("model_package")
class TestProcess:
    """A server in a process of its own, of the real model."""

    def ends_after_sigterm(self, log: Path, max_tokens: int, *options: str) -> str:
        """How a stream ends that runs when the signal comes; the process ends well."""
        process = Process(log, "smollm2", *QUICK_START, "--num-gpu-blocks", "64", *options)
        assert httpx.get(f"{process.url}/health").status_code in (200, 503)
        assert httpx.get(f"{process.url}/ping").status_code in (200, 503)
        process.wait_until_healthy()
        body = {"prompt": "One", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        assert process.process.wait() == 0
        last = json.loads(rest[-4].removeprefix("data: "))
        return str(last["choices"][0]["finish_reason"])

    def test_sigterm_lets_running_streams_end(self, tmp_path: Path) -> None:
        assert self.ends_after_sigterm(tmp_path / "log", 20) == "length"

    @pytest.mark.slow
    def test_sigterm_without_time_aborts_them(self, tmp_path: Path) -> None:
        end = self.ends_after_sigterm(tmp_path / "log", 900, "--shutdown-timeout", "0")
        assert end == "abort"

    def test_a_second_signal_ends_it_at_once(self, tmp_path: Path) -> None:
        options = (*QUICK_START, "--num-gpu-blocks", "64", "--shutdown-timeout", "1000")
        process = Process(tmp_path / "log", "smollm2", *options)
        process.wait_until_healthy()
        body = {"prompt": "One", "max_tokens": 900, "stream": True, "ignore_eos": True}
        url = f"{process.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.process.send_signal(signal.SIGTERM)
            while "draining, new requests are refused" not in process.log:
                time.sleep(0.02)
            assert process.end() == 0
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)

"""Requests that do not arrive, or not as they should: no stream waits for them, and they end."""

import contextlib
import json
import logging
import re
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest

from pagedserve.server.http.connection import (
    MAX_CHUNKS,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    PROGRESS_BYTES,
    BoundedProtocol,
    default_max_connections,
)
from tests.server.conftest import QUICK_START, Process, Serve, Served
from tests.server.test_completions import PROMPT
from tests.server.test_life import slowly
from tests.support.tiny import save_tiny_llama

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@contextlib.contextmanager
def connected(served: Served) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", served.http.base_url.port or 0)) as connection:
        connection.settimeout(60)
        yield connection


def read(file: BinaryIO) -> tuple[int, dict[str, Any]]:
    """The status and the content of the next answer."""
    status = int(file.readline().split()[1])
    length = 0
    while (line := file.readline()) != b"\r\n":
        if line.lower().startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return status, json.loads(file.read(length))


def answered(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """The status and the error of the next answer."""
    with connection.makefile("rb") as file:
        status, content = read(file)
        return status, content["error"]


def push(connection: socket.socket, *chunks: bytes) -> None:
    """Send as much as the server takes."""
    with contextlib.suppress(OSError):
        for chunk in chunks:
            connection.sendall(chunk)


def test_http_1_0_gets_a_stream_without_chunks(served: Served) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 5, "request_id": "a"}
    for more in ({"stream": True}, {}, {"stream": True, "max_tokens": 0}):
        response = served.complete(**body | more)
        content = json.dumps({"temperature": 0} | body | more).encode()
        with connected(served) as connection, connection.makefile("rb") as file:
            start = POST.replace(b"HTTP/1.1", b"HTTP/1.0")
            connection.sendall(b"%bContent-Length: %d\r\n\r\n%b" % (start, len(content), content))
            head, _, found = file.read().partition(b"\r\n\r\n")
        assert int(head.split()[1]) == response.status_code
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        assert (b"content-length" in head.lower()) == ("content-length" in response.headers)
        texts = [
            b"".join(re.findall(rb'"text": ?"(.*?)"', each)) for each in (found, response.content)
        ]
        assert texts[0] == texts[1]
        assert found.endswith((b"}", b"data: [DONE]\n\n"))


def test_a_header_is_bounded(served: Served) -> None:
    start = b"GET /version HTTP/1.1\r\nHost: x\r\n"
    fits = b"X: " + b"a" * (MAX_HEADER_BYTES - 200) + b"\r\nConnection: close\r\n\r\n"
    with connected(served) as connection:
        push(connection, start, fits)
        assert connection.recv(12) == b"HTTP/1.1 200"
    long_line = [b"X: ", *[b"a" * 65536] * 64]
    whole = b"X: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n"
    lines = b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n"
    for hostile in (long_line, [whole], [lines], [b"X: y\r\n" * 100_000]):
        with connected(served) as connection:
            push(connection, start, *hostile)
            status, error = answered(connection)
        assert (status, error["code"]) == (431, 431)
        assert f"at most {MAX_HEADER_BYTES} bytes and {MAX_HEADERS} lines" in error["message"]
    assert served.complete(prompt=PROMPT, max_tokens=1).status_code == 200


def test_a_trailer_is_bounded(served: Served) -> None:
    with connected(served) as connection:
        push(connection, POST, b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
        push(connection, *[b"X: " + b"a" * 8192 + b"\r\n"] * 20)
        assert answered(connection)[0] == 431


def test_the_chunks_of_a_body_are_bounded(served: Served) -> None:
    with connected(served) as connection:
        push(connection, POST, b"Transfer-Encoding: chunked\r\n\r\n")
        push(connection, *[b"1\r\n \r\n" * 1024] * (MAX_CHUNKS // 1024 + 1))
        status, error = answered(connection)
    assert (status, error["type"]) == (413, "RequestTooLargeError")
    assert f"more than {MAX_CHUNKS} chunks" in error["message"]


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("num_first", [0, 5])
def test_an_offer_of_another_protocol_is_ignored(
    served: Served, num_first: int, is_chunked: bool
) -> None:
    # As Java's client sends every request.
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAA\r\nUpgrade: h2c\r\n"
    body = json.dumps({"prompt": PROMPT, "max_tokens": 2}).encode()
    head = POST + offer + b"Content-Length: %d\r\n\r\n" % len(body)
    if is_chunked:
        head = POST + offer + b"Transfer-Encoding: chunked\r\n\r\n"
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with connected(served) as connection, connection.makefile("rb") as file:
        push(connection, head + body[:num_first])
        served.wait_until(lambda: any(at.is_receiving for at in served.connections))
        push(connection, body[num_first:], (head + body) * 20)
        for _ in range(21):
            status, content = read(file)
            assert (status, content["usage"]["completion_tokens"]) == (200, 2)


def test_what_is_no_http_gets_an_error_of_the_api(served: Served) -> None:
    with connected(served) as connection:
        push(connection, b"GET /version SMTP/1.1\r\n\r\n")
        status, error = answered(connection)
        assert (status, error["message"]) == (400, "the request is not valid HTTP/1.1")
        assert connection.recv(1) == b""
    assert served.complete(prompt=PROMPT, max_tokens=1).status_code == 200


def test_a_refused_header_before_what_is_no_http_is_refused_once(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(served) as connection:
        lines = b"".join(b"X-%d: a\r\n" % number for number in range(MAX_HEADERS + 44))
        push(connection, b"GET /version HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\ngarbage\r\n\r\n")
        status, error = answered(connection)
        assert (status, "the header is too large" in error["message"]) == (431, True)
        assert connection.recv(1) == b""
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_length_of_thousands_of_digits_is_too_large(served: Served) -> None:
    with connected(served) as connection:
        push(connection, POST, b"Content-Length: " + b"0" * 5000 + b"2\r\n\r\n{}")
        status, error = answered(connection)
    assert (status, error["type"]) == (413, "RequestTooLargeError")


@pytest.mark.parametrize(
    ("sent", "what"),
    [
        (b"GET /version HT", "header"),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nX: ", "header"),
        (POST + b"Content-Length: 50\r\n\r\n", "body"),
        (POST + b"Content-Length: 50\r\n\r\n{", "body"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n", "body"),
    ],
)
def test_a_request_that_does_not_arrive_ends(serve: Serve, sent: bytes, what: str) -> None:
    with serve(receive_timeout=0.2) as served:
        with connected(served) as connection:
            push(connection, sent)
            status, error = answered(connection)
        assert (status, error["type"]) == (408, "RequestTimeoutError")
        assert error["message"] == f"the {what} did not arrive within 0.2 s"
        with connected(served) as connection:  # that asks nothing is told nothing
            assert connection.recv(1) == b""
        served.wait_until(lambda: served.context.num_open == 0)


@pytest.mark.parametrize("length", [50, 1 << 30])
def test_a_request_is_answered_once(serve: Serve, length: int) -> None:
    with serve(receive_timeout=0.5, api_key=["key"]) as served, connected(served) as connection:
        push(connection, POST, b"Content-Length: %d\r\n\r\n" % length)
        push(connection, *[b" " * (length // 5 if length < 100 else PROGRESS_BYTES)] * 4)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                said += part
        assert said.count(b"HTTP/1.1 ") == 1
        served.wait_until(lambda: not served.connections)


def test_each_mib_of_a_body_has_its_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    start, num_received = BoundedProtocol._start_deadline, []

    def started(protocol: BoundedProtocol) -> None:
        num_received.append(protocol._num_body_bytes // PROGRESS_BYTES)
        start(protocol)

    monkeypatch.setattr(BoundedProtocol, "_start_deadline", started)
    with serve() as served:
        body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode() + b" " * 4 * PROGRESS_BYTES
        headers = {"Content-Type": "application/json"}
        answer = served.http.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 200
    assert {*num_received} == {0, 1, 2, 3, 4}


def test_an_answer_may_take_longer_than_its_request(serve: Serve) -> None:
    with serve(receive_timeout=0.1) as served:
        slowly(served, 0.02)
        answer = served.complete(prompt=PROMPT, max_tokens=20, ignore_eos=True)
        assert answer.json()["usage"]["completion_tokens"] == 20


def test_bodies_that_arrive_are_bounded_together(serve: Serve) -> None:
    bounds = {"max_body_bytes": 400_000, "max_open_body_bytes": 500_000}
    with serve(**bounds) as served, contextlib.ExitStack() as stack:
        head = POST + b"Content-Length: 390000\r\n\r\n"
        first = stack.enter_context(connected(served))
        push(first, head, b" " * 389_999)
        served.wait_until(lambda: served.context.num_open_body_bytes > 300_000)
        second = stack.enter_context(connected(served))
        push(second, head, b" " * 389_999)
        status, error = answered(second)
        assert (status, error["type"]) == (503, "ServiceUnavailableError")
        assert "at most 500000 are accepted" in error["message"]
        # Small ones are always let in.
        assert served.complete(prompt=PROMPT, max_tokens=1).status_code == 200
        first.close()
        served.wait_until(lambda: served.context.num_open_body_bytes == 0)


def test_a_connection_idles_longer_than_in_pools_of_clients(served: Served) -> None:
    assert served._server.config.timeout_keep_alive == 75  # more than 60 s, as proxies have
    pool = httpx.Limits(keepalive_expiry=None)  # the default is 5 s
    with httpx.Client(base_url=served.http.base_url, limits=pool) as client:
        assert client.get("/health").status_code == 200
        (connection,) = served.connections
        time.sleep(5.5)
        assert client.get("/health").status_code == 200
        assert served.connections == {connection}


def test_connections_are_bounded(serve: Serve) -> None:
    with serve(max_connections=4) as served, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(served)) for _ in range(4)]
        served.wait_until(lambda: len(served.connections) == 4)
        with connected(served) as connection:
            status, error = answered(connection)
        assert (status, error["message"]) == (503, "4 connections are open; no more are accepted")
        idle.pop().close()
        served.wait_until(lambda: len(served.connections) == 3)
        assert served.complete(prompt=PROMPT, max_tokens=1).status_code == 200


def test_clients_that_do_not_read_leave_their_connections(serve: Serve) -> None:
    body = {"prompt": PROMPT, "max_tokens": 400, "stream": True, "logprobs": 20}
    content = json.dumps(body | {"ignore_eos": True, "temperature": 0}).encode()
    get = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n"
    requests = [
        POST + b"Content-Length: %d\r\n\r\n" % len(content) + content,
        get + b"Connection: close\r\n\r\n",
        (get + b"\r\n") * 4,
    ]
    with serve(stall_timeout=0.2, max_connections=3) as served, contextlib.ExitStack() as stack:
        served._listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for request in requests:
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", served.http.base_url.port))
            push(connection, request)
        served.wait_until(lambda: len(served.connections) == 3)
        served.wait_until(lambda: not served.connections)
        assert served.complete(prompt=PROMPT, max_tokens=1).status_code == 200


def test_connections_leave_descriptors_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((16, 8), (128, 64), (1024, 768), (1 << 20, 10_000)):
        monkeypatch.setattr("resource.getrlimit", lambda _, soft=soft: (soft, soft))
        assert default_max_connections() == most


def test_half_sent_requests_stop_no_stream(serve: Serve) -> None:
    with serve() as served, contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        slowly(served)
        body = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}
        victim = pool.submit(partial(served.complete, **body))
        served.wait_until(lambda: served.engine.scheduler.num_running == 1)
        for sent in [b"GET / HTTP/1.1\r\nX: ", POST + b"Content-Length: 9\r\n\r\n{"] * 50:
            push(stack.enter_context(connected(served)), sent)
        assert victim.result().json()["usage"]["completion_tokens"] == 100


def test_half_sent_requests_do_not_lengthen_the_end(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path)
    options = [str(model), *QUICK_START, "--shutdown-timeout", "1000", "--num-gpu-blocks", "64"]
    process = Process(tmp_path / "log", *options)
    process.wait_until_healthy()
    port = int(process.url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        for sent in [b"GET / HTTP/1.1\r\nX: ", POST + b"Content-Length: 9\r\n\r\n{"] * 5:
            connection = socket.create_connection(("127.0.0.1", port))
            push(stack.enter_context(connection), sent)
        assert process.end(signal.SIGTERM) == 0  # long before the time that requests have


def test_a_client_that_leaves_with_requests_behind_one_another_is_no_error(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": PROMPT, "stream": True, "max_tokens": 200, "ignore_eos": True}
    content = json.dumps(body).encode()
    request = POST + b"Content-Length: %d\r\n\r\n" % len(content) + content
    with serve() as served:
        slowly(served)
        with connected(served) as connection:
            push(connection, request + request)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            reset = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        served.wait_until(lambda: not served.engine.has_unfinished_requests())
        assert served.http.get("/health").status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

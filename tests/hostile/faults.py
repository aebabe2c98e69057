"""Faults of processes: too little of everything, and signals; each on a server of its own.

A fault is a function of a model and an empty directory.  It raises ``AssertionError`` where the
server does not do what docs/faults.md says.
"""

import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

import psutil

from tests.hostile.client import request
from tests.hostile.storm import in_use
from tests.server.conftest import Process

Fault: TypeAlias = Callable[[Path, Path], None]

_BODY: Final = {"prompt": "abc", "temperature": 0, "ignore_eos": True}
_PATIENCE: Final = 120.0


def _connect(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(url.removeprefix("http://"), timeout=_PATIENCE)


def _post(url: str, **fields: Any) -> tuple[int, bytes]:
    """Status and body of a completion."""
    content = json.dumps(_BODY | fields)
    with closing(_connect(url)) as connection:
        connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()


def _text(url: str, num_tokens: int = 20) -> str:
    status, answer = _post(url, max_tokens=num_tokens)
    assert status == http.client.OK, answer
    text: str = json.loads(answer)["choices"][0]["text"]
    return text


def _is_healthy(url: str) -> bool:
    connection = _connect(url)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it has not come about in time"
        time.sleep(0.05)


class _Stream:
    """A stream under way, of which the first part has come."""

    def __init__(self, url: str, num_tokens: int, **fields: Any) -> None:
        self._connection = _connect(url)
        body = json.dumps(_BODY | {"max_tokens": num_tokens, "stream": True} | fields)
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", body, headers)
        self._answer = self._connection.getresponse()
        assert self._answer.status == http.client.OK
        self._first = self._answer.readline()

    def close(self) -> None:
        """Leave it."""
        self._answer.close()
        self._connection.close()

    def text(self) -> str:
        """All of it."""
        lines = [self._first, *self._answer]
        self._connection.close()
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        assert lines[-2] == b"data: [DONE]\n", lines[-3:]
        return "".join(event["choices"][0]["text"] for event in events)


@contextmanager
def _served(model: Path, directory: Path, *options: str, **more: Any) -> Iterator[Process]:
    """A server that takes requests, and is killed at the end."""
    process = Process(directory / "log", str(model), "--num-gpu-blocks", "256", *options, **more)
    try:
        process.wait_until_healthy()
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def little_address_space(model: Path, directory: Path) -> None:
    """Memory that is refused ends requests, and not the server."""
    with _served(model, directory) as server:
        expected, stream = _text(server.url), _Stream(server.url, 400)
        pid = server.process.pid
        most = psutil.Process(pid).memory_info().vms + (24 << 20)
        resource.prlimit(pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        for _ in range(5):
            with suppress(OSError, http.client.HTTPException):
                # Without memory for it an error has no body.
                status, _answer = _post(server.url, prompt="a" * (30 << 20), max_tokens=1)
                assert status in {400, 413, 500, 503}, status
        assert len(stream.text()) > 0
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        assert _text(server.url) == expected
        assert not in_use(server.url)
        assert server.end() == 0, server.log


def few_descriptors(model: Path, directory: Path) -> None:
    """Connections beyond the limit wait or are refused; those that were there go on."""
    with _served(model, directory, prefix=("prlimit", "--nofile=64:64")) as server:
        expected = _text(server.url)
        stream = _Stream(server.url, 400)
        port = int(server.url.rpartition(":")[2])
        with ExitStack() as stack:
            for _ in range(200):
                with suppress(OSError):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            assert len(stream.text()) > 0
        _wait_until(lambda: _is_healthy(server.url))
        assert _text(server.url) == expected
        assert server.end() == 0, server.log


def full_disk(model: Path, directory: Path) -> None:
    """A log, a log of decisions and a cache that cannot be written stop no request."""
    decisions = directory / "decisions"
    cache = directory / "cache"
    cache.touch()  # no directory can be made there, not by root either
    options = ("--decision-log", str(decisions))
    environment = {"PAGEDSERVE_CACHE": str(cache)}
    with _served(model, directory, *options, environment=environment) as server:
        expected = _text(server.url)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (100, 100))
        for _ in range(5):
            assert _text(server.url) == expected
        assert _is_healthy(server.url)
        assert server.end() == 0, server.log


def unread_outputs(model: Path, directory: Path) -> None:
    """A server whose log nobody reads any more serves on, and ends with 0."""
    del directory
    reading, writing = os.pipe()
    os.close(reading)
    try:
        _serve_unlogged(model, (), stdout=writing, stderr=writing)
    finally:
        os.close(writing)


def closed_outputs(model: Path, directory: Path) -> None:
    """A server that was started without standard streams serves, and ends with 0."""
    del directory
    _serve_unlogged(model, ("/bin/sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh"))


def _serve_unlogged(model: Path, prefix: Sequence[str], **streams: Any) -> None:
    """Serve without a log that says where."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "pagedserve", "serve", str(model), "--port", str(port)]
    process = subprocess.Popen([*prefix, *command], stdin=None, **streams)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until(lambda: _is_healthy(url) or process.poll() is not None)
        assert process.poll() is None, process.returncode
        assert _text(url)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()


def stopped(model: Path, directory: Path, seconds: float = 10.0) -> None:
    """A server that is stopped for longer than its stall timeout goes on where it was."""
    with _served(model, directory, "--stall-timeout", str(seconds / 2)) as server:
        expected = _text(server.url, 400)
        stream = _Stream(server.url, 400)
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        server.process.send_signal(signal.SIGCONT)
        assert stream.text() == expected
        assert _is_healthy(server.url)
        assert server.end() == 0, server.log


def two_interrupts(model: Path, directory: Path) -> None:
    """The second SIGINT ends the server at once, whatever it does."""
    with _served(model, directory, "--shutdown-timeout", "100000") as server:
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as half_sent:
            half_sent.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9")
            streams = [_Stream(server.url, 400) for _ in range(5)]
            server.process.send_signal(signal.SIGINT)
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            assert server.end(signal.SIGINT) == 0, server.log
        for stream in streams:
            stream.close()
        assert "Traceback" not in server.log


def killed_and_restarted(model: Path, directory: Path) -> None:
    """A server that was killed under load can be started again at its port at once."""
    with _served(model, directory) as server:
        port, expected = int(server.url.rpartition(":")[2]), _text(server.url)
        streams = [_Stream(server.url, 400) for _ in range(5)]
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        with _served(model, directory, port=port) as again:
            assert _text(again.url) == expected
            assert again.end() == 0, again.log
        for stream in streams:
            stream.close()


def slow_readers(model: Path, directory: Path) -> None:
    """A client that takes nothing is let go after the stall timeout, and its blocks with it."""
    body = _BODY | {"max_tokens": 400, "stream": True, "n": 4, "temperature": 1, "logprobs": 20}
    with _served(model, directory, "--stall-timeout", "2") as server, ExitStack() as stack:
        port = int(server.url.rpartition(":")[2])
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(("127.0.0.1", port))
            client.sendall(request("/v1/completions", body))
        _wait_until(lambda: server.log.count("request_log: cmpl-") == 4)
        _wait_until(lambda: not in_use(server.url))
        assert server.end() == 0, server.log


def idle_connections(model: Path, directory: Path, number: int = 3000) -> None:
    """Thousands of connections on which nothing comes leave room for those that ask."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with _served(model, directory, prefix=("prlimit", f"--nofile=1024:{hard}")) as server:
        expected = _text(server.url)
        port = int(server.url.rpartition(":")[2])
        with ExitStack() as stack:
            for _ in range(min(number, hard - 200)):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            assert _is_healthy(server.url)
            assert _text(server.url) == expected
            assert server.end() == 0, server.log


FAULTS: Final[tuple[Fault, ...]] = (
    little_address_space,
    few_descriptors,
    full_disk,
    unread_outputs,
    closed_outputs,
    stopped,
    two_interrupts,
    killed_and_restarted,
    slow_readers,
    idle_connections,
)

"""Processes that are killed: clients at random moments, and the server."""

import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.conftest import Process, Serve
from tests.server.test_completions import PROMPT
from tests.server.test_life import slowly
from tests.support.formula import FormulaModel

NUM_KILLS = 200
# A client without anything that takes long to load.
CLIENT = """
import socket, sys
body = sys.argv[2].encode()
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    head = "POST /v1/completions HTTP/1.1\\r\\nHost: a\\r\\nContent-Type: application/json\\r\\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n".encode())
    for byte in body:
        connection.sendall(bytes([byte]))
    while connection.recv(64):
        pass
"""
BODIES = [
    '{"prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": true, "stream": true}',
    '{"prompt": [[1, 2, 3], [4, 5]], "n": 3, "seed": 1, "max_tokens": 100, "ignore_eos": true}',
    '{"prompt": "some text", "max_tokens": 3}',
]


def test_clients_that_are_killed_leave_nothing(serve: Serve, formula: FormulaModel) -> None:
    rng, longest = random.Random(0), 0.25

    def kill_a_client(number: int) -> None:
        command = [sys.executable, "-I", "-S", "-c", CLIENT, port, BODIES[number % len(BODIES)]]
        client = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0, longest))
        client.kill()
        client.wait()

    with serve({"max_num_seqs": 8}) as served, ThreadPoolExecutor(8) as pool:
        port = str(served.http.base_url.port)
        slowly(served, 0.002)
        while served.metrics().get("vllm:request_success_total", 0) <= NUM_KILLS / 10:
            list(pool.map(kill_a_client, range(NUM_KILLS)))  # until some were killed once they ran
            served.wait_until_idle()
            longest *= 2
        answer = served.complete(prompt=PROMPT, max_tokens=8)
        assert answer.json()["usage"]["completion_tokens"] == 8


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_nothing(model_package: None, tmp_path: Path) -> None:
    server = Process(tmp_path / "log", "smollm2")
    server.wait_until_healthy()
    about = Path(f"/proc/{server.process.pid}")
    # Whatever outlives a process is another process, or a file that it shares its memory through.
    children = {(task / "children").read_text() for task in (about / "task").iterdir()}
    assert children == {""}
    maps = (about / "maps").read_text().splitlines()
    # A file without a name, such as the lock of progress bars, goes with the process.
    assert not [line for line in maps if "/shm/" in line and not line.endswith("(deleted)")]
    assert not [line for line in maps if "memfd:" in line]
    assert server.end(signal.SIGKILL) == -signal.SIGKILL

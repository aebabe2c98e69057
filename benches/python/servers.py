"""Servers that benches start: pagedserve's and vLLM's, of the same model and memory."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pagedserve.models.load.convert import converted_directory
from pagedserve.models.load.sources import resolve_model

START_SECONDS = 600
KV_CACHE_BYTES = 4 << 30


def server_command(
    model: str, port: int, vllm_python: Path | None = None, dtype: str = "float32"
) -> list[str]:
    """Command of a server: pagedserve's, or vLLM's for the interpreter that has it."""
    listen = ["--port", str(port), "--dtype", dtype]
    if vllm_python is None:
        command = [sys.executable, "-m", "pagedserve", "serve", model, *listen]
        return [*command, "--kv-cache-memory", str(KV_CACHE_BYTES)]
    source = resolve_model(model)
    weights = converted_directory(source.path) if source.is_gguf else source.path
    command = [str(vllm_python), "-m", "vllm.entrypoints.openai.api_server"]
    return [*command, "--model", str(weights), "--max-model-len", "2048", *listen]


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[None]:
    """A server from its first healthy answer until its end."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_BYTES >> 30)}
    environment |= {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not is_healthy(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(log.read().decode()[-3000:])
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait()


def is_healthy(port: int) -> bool:
    """Whether a server at this port takes requests."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)  # noqa: PLR2004  # of HTTP
    except OSError:
        return False


def free_port() -> int:
    """A port of this machine that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

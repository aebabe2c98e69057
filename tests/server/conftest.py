"""Servers on loopback: of a formula in this process, and of the real model in one of its own."""

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeAlias

import httpx
import pytest

import pagedserve.server.run
from pagedserve import AsyncLLMEngine, LLMEngine, SamplingParams
from pagedserve.server.collector import IdleCollector
from pagedserve.server.context import make_context
from pagedserve.server.http import answer
from pagedserve.server.http.listen import listen
from pagedserve.server.options import ServerArgs
from pagedserve.server.run import Server
from pagedserve.server.start import make_tracer
from tests.support.described import Description
from tests.support.formula import FormulaModel


class SparingCollector(IdleCollector):
    """A server's collector that leaves frozen what was there before the server.

    A server of its own process freezes itself and unfreezes everything at its end: the next full
    collection would traverse all that tests load, for seconds.
    """

    def start(self) -> None:
        gc.collect()
        self._last = time.monotonic()

    def stop(self) -> None:
        gc.set_threshold(*self._thresholds)


class Served:
    """A server in this process, and the engine behind it."""

    def __init__(self, make_engine: Callable[[], LLMEngine], args: ServerArgs) -> None:
        gc.collect()
        gc.freeze()
        self.client = AsyncLLMEngine(make_engine, stall_timeout=args.stall_timeout)
        default_params: Future[SamplingParams] = Future()
        default_params.set_result(SamplingParams())
        self.context = make_context(
            self.client,
            args.served_model_name or ("formula",),
            args,
            default_params=default_params,
            tracer=make_tracer(args.otlp_traces_endpoint),
            chat_template=args.chat_template,
        )
        self._listener = listen(args)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pagedserve.server.run, "IdleCollector", SparingCollector)
            self._server = Server(self.context, self.client, self._listener)
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait_until(lambda: self._server.started and self.context.admission.max_num_seqs > 0)
        self.http = httpx.Client(base_url=self._listener.address, timeout=30)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join()
        self.client.shutdown()

    @property
    def engine(self) -> LLMEngine:
        engine = self.client._thread.engine
        assert engine is not None
        return engine

    @property
    def connections(self) -> set[Any]:
        return self._server.server_state.connections

    def wait_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            assert self._thread.is_alive()
            time.sleep(0.002)

    def wait_until_idle(self) -> None:
        """Nothing of any request is left: in the server, the engine, or the core."""
        self.wait_until(lambda: not self.context.jobs and not self.engine.has_unfinished_requests())
        # A job ends a moment before the event loop frees what it was admitted with.
        self.wait_until(lambda: self.context.admission.num_seqs == 0)
        free = self.engine.scheduler.num_free_gpu_blocks
        assert free == self.engine.memory.num_gpu_blocks
        gauges = self.metrics()
        for name in ("num_requests_running", "num_requests_waiting", "num_requests_swapped"):
            assert gauges[f"vllm:{name}"] == 0

    def metrics(self) -> dict[str, float]:
        """Gauges and counters by name, summed over their labels."""
        lines = re.findall(
            r"^([a-z0-9_:]+)(?:\{[^}]*\})? (\S+)$", self.http.get("/metrics").text, re.MULTILINE
        )
        sums: dict[str, float] = {}
        for name, value in lines:
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def check_answers(self) -> None:
        """Compare each answer from now on with what ``/openapi.json`` says of it."""
        self.http.event_hooks = {"response": [Description.of(self.http).check]}

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"temperature": 0} | body)


Serve: TypeAlias = Callable[..., AbstractContextManager[Served]]


@pytest.fixture
def formula() -> FormulaModel:
    return FormulaModel()


@pytest.fixture
def serve(formula: FormulaModel) -> Serve:
    """Starts a server of the formula: its own options, and the engine's as ``engine``."""

    @contextmanager
    def serving(engine: dict[str, Any] | None = None, **options: Any) -> Iterator[Served]:
        args = ServerArgs(port=0, uvicorn_log_level="warning", **options)
        with Served(lambda: formula.engine(**(engine or {})), args) as served:
            yield served

    return serving


@pytest.fixture
def served(serve: Serve) -> Iterator[Served]:
    with serve() as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams look for silence all the time."""
    monkeypatch.setattr(answer, "_PULSE_SECONDS", 0.001)


# Shows roles, the last message, a variable, and what begins an answer.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if not loop.last %};{% endif %}"
    "{% endfor %}{{ mood }}{% if add_generation_prompt %}|a:{% endif %}"
)


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """A server of the formula for all tests of a file, with a chat template."""
    args = ServerArgs(port=0, uvicorn_log_level="warning", chat_template=TEMPLATE)
    with Served(FormulaModel().engine, args) as running:
        running.check_answers()
        yield running
        running.wait_until_idle()


class Process:
    """``pagedserve serve`` as a user starts it, or another command that serves."""

    def __init__(
        self,
        log: Path,
        *options: str,
        command: str = "serve",
        port: int = 0,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        started = [sys.executable, "-m", "pagedserve", command, *options, "--port", str(port)]
        self._log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [*prefix, *started],
                stderr=stderr,
                env={**os.environ, "OMP_WAIT_POLICY": "passive", **environment},
            )
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", self.log)):
            assert self.process.poll() is None, self.log
            time.sleep(0.02)
        self.url = found[0]

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_until_healthy(self) -> None:
        while httpx.get(f"{self.url}/health").status_code != 200:
            assert self.process.poll() is None, self.log
            time.sleep(0.05)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait()


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A model whose load takes ten seconds and more: its hub takes requests and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield "nobody/endless"


# The native backend starts in a fifth of the time: it imports neither torch nor transformers.
QUICK_START = ("--backend", "native")


@pytest.fixture(scope="session")
def smollm2_server(
    model_package: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    """A server of the real model."""
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--enable-prefix-caching", "--enable-chunked-prefill")
    process = Process(log, "smollm2", *QUICK_START, *options)
    process.wait_until_healthy()
    yield process
    assert process.end() == 0, process.log

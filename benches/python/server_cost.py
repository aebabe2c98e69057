"""What a streamed token costs the server in processor time, beside an engine that costs nothing.

The engine is made up: every few milliseconds it has a token for each stream, and wakes the event
loop once.  Its own time is taken off.  The rest is the server's: from the wake-up to the socket.
With --bare the peer is measured: an ASGI application that sends the same bytes, ready made.
A token costs twice as much where the processor falls asleep and its caches cool down between two
steps, so the steps are those of a server under load.

    python benches/python/server_cost.py
    python benches/python/server_cost.py --layers 1
    python benches/python/server_cost.py --bare
"""

import argparse
import asyncio
import contextlib
import gc
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import uvicorn
from measuring import report, report_table
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedserve import RequestOutput, SamplingParams
from pagedserve.config import EngineArgs
from pagedserve.engine.stats import EngineSnapshot
from pagedserve.engine.stream import Stream
from pagedserve.errors import RequestError
from pagedserve.executor.protocol import ModelInfo
from pagedserve.inputs import Prompt
from pagedserve.lora.request import LoRARequest
from pagedserve.models.tokenizer.loader import load_tokenizer
from pagedserve.outputs import CompletionOutput, RequestMetrics
from pagedserve.pooling_params import PoolingParams
from pagedserve.sampling_params import RequestOutputKind
from pagedserve.server.app import build_app
from pagedserve.server.context import SWITCH_SECONDS, make_context
from pagedserve.server.options import ServerArgs
from pagedserve.tokenizer import Tokenizer

MODEL = ModelInfo(
    vocab_size=1000, max_model_len=4096, eos_token_ids=(0,), device_type="cpu", backends="none"
)

# An event as the server sends it.
EVENT = (
    b'data: {"id":"cmpl-9d3bd8f0a1f04a7eb3f4a7e7c7f0a3b1","object":"text_completion",'
    b'"created":1700000000,"model":"model","choices":[{"index":0,"text":" word",'
    b'"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
)


class Layer:
    """One more ASGI layer around the server, which does nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand everything on."""

        async def sends(message: Message) -> None:
            await send(message)

        await self._app(scope, receive, sends)


class Bare:
    """Sends ready made bytes for each token: what uvicorn and the socket cost alone."""

    def __init__(self, client: "MadeUpEngine", max_tokens: int) -> None:
        self._client = client
        self._params = SamplingParams(max_tokens=max_tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer any request with a stream."""
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async for _ in self._client.generate("", self._params, str(id(scope))):
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class MadeUpEngine:
    """An ``EngineClient`` that has a token for every stream each few milliseconds."""

    is_running, errored = True, False
    dead_error: BaseException = RuntimeError("it lives")

    def __init__(self, num_streams: int, step_seconds: float) -> None:
        self._tokenizer = load_tokenizer(EngineArgs("smollm2"))
        self._num_streams = num_streams
        self._step_seconds = step_seconds
        self._streams: dict[str, tuple[Stream, int]] = {}
        threading.Thread(target=self._run, daemon=True).start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | None,
        request_id: str,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        output_token_ids: Sequence[int] = (),
    ) -> AsyncGenerator[RequestOutput, None]:
        """Deltas of one token each, after all streams have come."""
        del prompt, lora_request, priority, arrival_time, output_token_ids
        stream = Stream(asyncio.get_running_loop())
        stream.request = SimpleNamespace(output_kind=RequestOutputKind.DELTA)  # type: ignore[assignment]
        max_tokens = 1
        if isinstance(sampling_params, SamplingParams):
            max_tokens = sampling_params.max_tokens or 1
        self._streams[request_id] = (stream, max_tokens)
        is_finished = False
        while not is_finished:
            output = await stream.get()
            is_finished = output.finished
            yield output

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """There are none."""
        raise RequestError(f"no adapters: {lora_request}")

    async def remove_lora(self, lora_id: int) -> bool:
        """There are none."""
        del lora_id
        return False

    def _run(self) -> None:
        while len(self._streams) < self._num_streams:
            time.sleep(self._step_seconds)
        started, own_started, number, num_tokens = time.process_time(), time.thread_time(), 0, 0
        while self._streams:
            time.sleep(self._step_seconds)
            number += 1
            delivery = [
                (stream, made_up_output(request_id, number, is_last=number == max_tokens))
                for request_id, (stream, max_tokens) in self._streams.items()
            ]
            num_tokens += len(delivery)
            loop = delivery[0][0].loop
            loop.call_soon_threadsafe(partial(deliver, delivery))
            if delivery[0][1].finished:
                self._streams.clear()
        own_seconds = time.thread_time() - own_started
        time.sleep(1)  # the last tokens are on their way
        seconds = time.process_time() - started - own_seconds
        print(json.dumps({"us_per_token": seconds / num_tokens * 1e6}), flush=True)

    def has_begun(self, request_id: str) -> bool:
        """Always."""
        return request_id in self._streams

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Nobody leaves."""

    async def check_health(self) -> None:
        """It is well."""

    @property
    def tokenizer(self) -> Tokenizer:
        """That of the real model, which nothing is asked of."""
        return self._tokenizer

    async def get_tokenizer(self) -> Tokenizer:
        """That of the real model, which nothing is asked of."""
        return self._tokenizer

    async def get_model_config(self) -> ModelInfo:
        """Of no model."""
        return MODEL

    async def reset_prefix_cache(self) -> bool:
        """There is none."""
        return True

    def snapshot(self) -> EngineSnapshot:
        """Nobody asks."""
        raise NotImplementedError


def made_up_output(request_id: str, number: int, *, is_last: bool) -> RequestOutput:
    """A delta of one token."""
    completion = CompletionOutput(
        index=0,
        text=" word",
        token_ids=[number],
        finish_reason="length" if is_last else None,
    )
    return RequestOutput(
        request_id=request_id,
        prompt="a",
        prompt_token_ids=[1],
        prompt_logprobs=None,
        outputs=[completion],
        finished=is_last,
        metrics=RequestMetrics(0.0),
        num_cached_tokens=0,
    )


def deliver(delivery: Sequence[tuple[Stream, RequestOutput]]) -> None:
    """Hand a step's tokens to their readers."""
    for stream, output in delivery:
        stream.put(output)


def serve(options: argparse.Namespace) -> None:
    """Serve the made up engine at a socket that is open already, until killed."""
    args = ServerArgs(enable_log_requests=False)
    client = MadeUpEngine(options.streams, options.step_ms / 1e3)
    default_params: Future[SamplingParams] = Future()
    default_params.set_result(SamplingParams())
    context = make_context(client, ("model",), args, default_params=default_params)
    context.admission.max_num_seqs = options.streams
    context.text.max_model_len = MODEL.max_model_len
    app = Bare(client, options.tokens) if options.bare else build_app(context)
    for _ in range(options.layers):
        app = Layer(app)
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    uvicorn.run(app, fd=options.fd, log_level="warning", access_log=False, lifespan="off")


def read_streams(port: int, options: argparse.Namespace) -> None:
    """Ask for all streams at once and read them to their ends.

    It looks every 100 ms: a reader that is woken for each token, on this machine, costs the server
    what no reader elsewhere costs it.
    """
    body = json.dumps({"prompt": [1], "max_tokens": options.tokens, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    request = f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    unfinished = [socket.create_connection(("127.0.0.1", port)) for _ in range(options.streams)]
    for connection in unfinished:
        connection.sendall(request)
        connection.setblocking(False)
    while unfinished:
        time.sleep(0.1)
        unfinished = [connection for connection in unfinished if not read_all(connection)]


def read_all(connection: socket.socket) -> bool:
    """Read what is there; whether that was the end."""
    with contextlib.suppress(BlockingIOError):
        while connection.recv(1 << 16):
            pass
        return True
    return False


def measure(options: argparse.Namespace) -> dict[str, float]:
    """One run: a server in a process of its own, its clients in this one."""
    with socket.create_server(("127.0.0.1", 0), backlog=options.streams) as listener:
        command = [sys.executable, __file__, "--fd", str(listener.fileno())]
        for name in ("streams", "tokens", "step_ms", "layers"):
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        command += ["--bare"] if options.bare else []
        server = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[listener.fileno()])
        try:
            read_streams(listener.getsockname()[1], options)
            found: dict[str, float] = json.loads(server.stdout.readline() if server.stdout else "")
        finally:
            server.kill()
            server.wait()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure some runs, and print their median."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=4, help="between two tokens of a stream")
    parser.add_argument("--layers", type=int, default=0, help="further ASGI layers")
    parser.add_argument("--bare", action="store_true", help="measure ready made bytes instead")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="write one JSON object a line")
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.fd is not None:
        serve(options)
        return
    runs = []
    for number in range(1, options.repeat + 1):
        runs.append(measure(options)["us_per_token"])
        report("run", {"run": number, "us_per_token": runs[-1]}, as_json=options.json)
    row = {"streams": options.streams, "layers": options.layers, "bare": options.bare}
    row |= {"us_per_token": statistics.median(runs), "least": min(runs)}
    report_table("median", [row], as_json=options.json)


if __name__ == "__main__":
    main()

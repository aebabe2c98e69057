"""A small HTTP server on loopback that answers as a test says, in OpenAI's formats."""

import asyncio
import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MODEL = "org/some-model"
DONE = "[DONE]"


@dataclass(frozen=True)
class Reply:
    """One answer.

    Attributes:
        events: The data of server-sent events, of objects their JSON; with another status than 200
            the first is the whole body.
        status: Of HTTP.
        headers: Beside those of the format.
        gap_s: Seconds before each event.
        cut: The connection is closed behind the events, as if the server had died.
        wait_for: So many requests must have come before this one is answered.
        is_whole: The first event is the whole body, as with another status than 200.
    """

    events: Sequence[object] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    gap_s: float = 0.0
    cut: bool = False
    wait_for: int = 0
    is_whole: bool = False


@dataclass
class Received:
    """One request that came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


def text_events(
    num_tokens: int, *, prompt_tokens: int | None = 7, completion_tokens: int | None = None
) -> list[object]:
    """A completion of one token an event, with usage unless ``prompt_tokens`` is None."""
    events: list[object] = [completion(f" w{index}") for index in range(num_tokens - 1)]
    events.append(completion(" end", "length"))
    if prompt_tokens is not None:
        events.append(usage(prompt_tokens, completion_tokens or num_tokens))
    return [*events, DONE]


def completion(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    """A chunk of /v1/completions."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def chat(finish_reason: str | None = None, **delta: object) -> dict[str, Any]:
    """A chunk of /v1/chat/completions."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The chunk behind the answer."""
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {"choices": [], "usage": counts}


class FakeServer:
    """Answers ``/v1/models`` itself, and each other request with what ``answer`` says of it.

    Attributes:
        url: Where it listens.
        num_not_ready: So many further requests of ``/v1/models`` have status 503.
        received: The requests that it was asked to answer, in the order in which they came.
        most_at_once: How many of them were being answered at one moment, at most.
    """

    def __init__(self, answer: Callable[[int, Received], Reply]) -> None:
        self.url = ""
        self.num_not_ready = 0
        self.received: list[Received] = []
        self.most_at_once = 0
        self._answer = answer
        self._num_running = 0
        self._arrived = asyncio.Condition()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until either side closes it."""
        try:
            while (request := await _read(reader)) is not None:
                if request.path == "/v1/models" and self.num_not_ready:
                    self.num_not_ready -= 1
                    writer.write(_head(503, {"Content-Length": "0"}))
                elif request.path == "/v1/models":
                    models = json.dumps({"data": [{"id": MODEL}]}).encode()
                    writer.write(_head(200, {"Content-Length": str(len(models))}) + models)
                elif not await self._reply(request, writer):
                    break
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has gone, or the server goes: nobody waits for this task
        finally:
            writer.close()

    async def _reply(self, request: Received, writer: asyncio.StreamWriter) -> bool:
        """Answer; whether the connection can be used again."""
        self.received.append(request)
        reply = self._answer(len(self.received) - 1, request)
        self._num_running += 1
        self.most_at_once = max(self.most_at_once, self._num_running)
        try:
            async with self._arrived:
                self._arrived.notify_all()
                await self._arrived.wait_for(lambda: len(self.received) >= reply.wait_for)
            return await _write(reply, writer)
        finally:
            self._num_running -= 1


async def _read(reader: asyncio.StreamReader) -> Received | None:
    """The next request of a connection; None where there is none."""
    line = await reader.readline()
    if not line:
        return None
    headers = {}
    while header := (await reader.readline()).decode().strip():
        name, _, value = header.partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Received(line.decode().split()[1], headers, json.loads(body) if body else {})


async def _write(reply: Reply, writer: asyncio.StreamWriter) -> bool:
    if reply.status != 200 or reply.is_whole:
        body = _text(reply.events[0]).encode() if reply.events else b""
        writer.write(
            _head(reply.status, {"Content-Length": str(len(body)), **reply.headers}) + body
        )
        return not reply.cut
    form = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
    writer.write(_head(200, {**form, **reply.headers}))
    for event in reply.events:
        await asyncio.sleep(reply.gap_s)
        data = f"data: {_text(event)}\n\n".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await writer.drain()
    if not reply.cut:
        writer.write(b"0\r\n\r\n")
    return not reply.cut


def _text(event: object) -> str:
    return event if isinstance(event, str) else json.dumps(event)


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Reason", *(f"{key}: {value}" for key, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@contextmanager
def serving(answer: Callable[[int, Received], Reply]) -> Iterator[FakeServer]:
    """A server in a thread of its own.

    Args:
        answer: What to answer to a request, by its number from 0 and what it says.
    """
    server = FakeServer(answer)
    stop = asyncio.Event()
    running: queue.SimpleQueue[asyncio.AbstractEventLoop] = queue.SimpleQueue()

    async def run() -> None:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        _, port = listener.sockets[0].getsockname()
        server.url = f"http://127.0.0.1:{port}"
        running.put(asyncio.get_running_loop())
        await stop.wait()
        listener.close()  # connections end with their tasks, which asyncio.run cancels

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    loop = running.get()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()

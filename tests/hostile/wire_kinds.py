"""Connections: what is sent slowly, half, twice, not as HTTP, or not read."""

import asyncio
import json
from random import Random
from typing import Any, Final

from tests.hostile.client import CLOSED, LEFT, SILENT, Target, completion, request
from tests.hostile.junk import size, text

_LINE: Final = b"POST /v1/completions HTTP/1.1\r\n"
_STREAM: Final[dict[str, Any]] = {
    "prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": True,
}  # fmt: skip


def _head(*lines: str) -> bytes:
    return _LINE + "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n"


async def big_headers(target: Target, rng: Random) -> str:
    """One header of up to megabytes, or very many of them, sent as fast as they are taken."""
    length = size(rng, 2_000_000)
    kind = rng.randrange(3)
    if kind == 0:
        lines = b"X: " + b"a" * length + b"\r\n"
    elif kind == 1:
        lines = b"X-A: b\r\n" * (length // 8)
    else:
        return await target.ask(b"GET /" + b"a" * length + b" HTTP/1.1\r\n\r\n")
    return await target.ask(b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n" + lines + b"\r\n")


async def half_heads(target: Target, rng: Random) -> str:
    """A head that does not end; the client waits a while, and goes."""
    head = _head("Host: x", "Content-Type: application/json", "Content-Length: 50")
    async with target.connect() as connection:
        await connection.send(head[: rng.randrange(1, len(head) - 1)])
        return await _wait(connection.status(), rng.uniform(0, target.pause))


async def slow_heads(target: Target, rng: Random) -> str:
    """A head that comes a byte at a time."""
    async with target.connect() as connection:
        for _ in range(rng.randrange(30)):
            await connection.send(b"a")
            await asyncio.sleep(target.pause / 30)
        return LEFT


async def unfinished_bodies(target: Target, rng: Random) -> str:
    """A body of up to the largest length that is accepted, and not all of it."""
    length = size(rng, 30 << 20)
    sent = b" " * min(length - 1, size(rng, 1 << 20))
    head = _head("Host: x", "Content-Type: application/json", f"Content-Length: {length}")
    async with target.connect() as connection:
        await connection.send(head, sent)
        if rng.random() < 0.3:
            connection.reset()
            return LEFT
        return await _wait(connection.status(), rng.uniform(0, target.pause))


async def odd_framing(target: Target, rng: Random) -> str:
    """Lengths and chunks that contradict each other, as smugglers send them."""
    heads = (
        ("Content-Length: 5", "Content-Length: 6"),
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked, chunked",),
        ("Transfer-Encoding: xchunked",),
        ("Content-Length: -1",),
        ("Content-Length: " + "9" * size(rng, 5000),),
        ("Content-Length: +5",),
        ("Transfer-Encoding: chunked",),
        ("Expect: 100-continue", "Content-Length: 5"),
        ("Connection: upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: a", "Content-Length: 5"),
        ("Content-Length : 5",),
        (" folded: a", "Content-Length: 5"),
    )
    bodies = (b"0\r\n\r\n", b"ffffffffffffffff\r\na", b"-5\r\nabc", b"5;" + b"a" * 5000, b"{}   ")
    head = _head("Host: x", "Content-Type: application/json", *rng.choice(heads))
    async with target.connect() as connection:
        await connection.send(head, rng.choice(bodies))
        return await _wait(connection.status(), rng.uniform(0, target.pause))


async def no_http(target: Target, rng: Random) -> str:
    """Bytes of other protocols, or of none."""
    sent = rng.choice(
        (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
            b"SSH-2.0-x\r\n",
            b"GET /\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"\x00" * 1000,
            b"\r\n" * 1000,
            rng.randbytes(size(rng, 100_000)),
            b"GET / HTTP/1.1\rHost: x\r\r",
        )
    )
    async with target.connect() as connection:
        await connection.send(sent)
        return await _wait(connection.status(), rng.uniform(0, target.pause))


async def pipelined(target: Target, rng: Random) -> str:
    """Many requests at once on one connection, some of which nobody waits for."""
    path, body = completion()
    one = (
        request(path, body, keep=True)
        if rng.random() < 0.5
        else request("/health", keep=True, method="GET")
    )
    async with target.connect() as connection:
        await connection.send(one * size(rng, 200))
        if rng.random() < 0.3:
            connection.reset()
            return LEFT
        return await connection.status()


async def cut_short(target: Target, rng: Random) -> str:
    """A good request whose last bytes never come."""
    whole = request("/v1/completions", completion(stop=text(rng).replace("\ud800", ""))[1])
    async with target.connect() as connection:
        await connection.send(whole[: rng.randrange(1, len(whole))])
        connection.writer.write_eof()
        return await _wait(connection.status(), target.patience, CLOSED)


async def vanishing(target: Target, rng: Random) -> str:
    """A client that is killed, anywhere between its request and the end of a stream."""
    async with target.connect() as connection:
        body = _STREAM | {
            "n": rng.choice((1, 1, 3)),
            "stream": rng.random() < 0.7,
            "temperature": 1,
        }
        await connection.send(request("/v1/completions", body))
        await asyncio.sleep(rng.uniform(0, target.pause / 5))
        if rng.random() < 0.5:
            connection.reset()
        return LEFT


async def slow_readers(target: Target, rng: Random) -> str:
    """A client that reads of a stream a little at a time, and leaves before its end."""
    async with target.connect(receive_buffer=4096) as connection:
        await connection.send(request("/v1/completions", _STREAM | {"logprobs": 5}))
        for _ in range(rng.randrange(8)):
            if not await connection.reader.read(100):
                break
            await asyncio.sleep(target.pause / 8)
        return LEFT


async def idle(target: Target, rng: Random) -> str:
    """A connection on which nothing is sent, or nothing after an answer."""
    async with target.connect() as connection:
        if rng.random() < 0.5:
            await connection.send(request("/health", method="GET", keep=True))
            await connection.status()
        await asyncio.sleep(rng.uniform(0, target.pause))
        return LEFT


async def slow_bodies(target: Target, rng: Random) -> str:
    """A good body, chunk by chunk; it is answered in the end."""
    body = json.dumps(completion()[1]).encode()
    async with target.connect() as connection:
        lines = ("Host: x", "Content-Type: application/json", "Transfer-Encoding: chunked")
        await connection.send(_head(*lines, "Connection: close"))
        step = rng.randrange(1, len(body))
        for start in range(0, len(body), step):
            chunk = body[start : start + step]
            await connection.send(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            await asyncio.sleep(target.pause / len(body))
        await connection.send(b"0\r\n\r\n")
        return await connection.status()


async def _wait(answer: Any, seconds: float, otherwise: str = LEFT) -> str:
    """An answer that may not be owed; ``otherwise`` after so long."""
    try:
        async with asyncio.timeout(seconds):
            found: str = await answer
            return found
    except TimeoutError:
        return SILENT if otherwise == CLOSED else otherwise

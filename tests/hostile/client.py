"""A client that sends what no library would: bytes over a socket, and only the status is kept."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# What an answer's head may be at most.
_MAX_HEAD: Final = 1 << 20
_PIECE: Final = 1 << 16
# Of a connection that the server closed without an answer.
CLOSED: Final = "closed"
# Of a connection that the client left as it was meant to.
LEFT: Final = "left"
# Of an answer that has not come within the client's patience.
SILENT: Final = "silent"


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection to the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *parts: bytes) -> None:
        """Hand bytes to the socket; waits only for a client's own buffer."""
        for part in parts:
            self.writer.write(part)
        await asyncio.sleep(0)

    async def status(self) -> str:
        """The status of the next answer, without its body."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return CLOSED
        words = head.split(b" ", 2)
        return words[1].decode() if len(words) > 1 else "no status"

    async def rest(self) -> None:
        """Read and forget everything up to the end of the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(_PIECE):
                pass

    def reset(self) -> None:
        """End the connection at once, as a client does that is killed."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@dataclass(frozen=True, slots=True)
class Target:
    """The server that is attacked.

    Attributes:
        port: On loopback.
        adapters: A directory with directories of adapters.
        patience: Seconds that a client waits for an answer; long, as other programs may take the
            processors.
        pause: Seconds of what a slow client does.
    """

    port: int
    adapters: Path
    patience: float = 300.0
    pause: float = 1.0

    @asynccontextmanager
    async def connect(self, *, receive_buffer: int | None = None) -> AsyncIterator[Connection]:
        """A connection that is closed at the end.

        Args:
            receive_buffer: Bytes that the kernel keeps for a client that reads slowly.
        """
        raw = socket.socket()
        raw.setblocking(False)
        if receive_buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self.port))
            limit = _MAX_HEAD if receive_buffer is None else receive_buffer
            reader, writer = await asyncio.open_connection(sock=raw, limit=limit)
        except BaseException:
            raw.close()
            raise
        try:
            yield Connection(reader, writer)
        finally:
            writer.transport.abort()

    async def ask(self, *parts: bytes) -> str:
        """Send bytes, read to the end of the connection; the first status."""
        async with self.connect() as connection:
            await connection.send(*parts)
            status = await connection.status()
            await connection.rest()
            return status


def request(
    path: str,
    body: bytes | object = b"",
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    keep: bool = False,
) -> bytes:
    """The bytes of a request; a body that is no bytes is sent as JSON.

    Args:
        path: As it is written into the first line.
        body: Bytes, or what JSON can say.
        method: As it is written into the first line.
        headers: Further ones.
        keep: Whether the connection stays open.
    """
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {
        "Host": "x",
        "Connection": "keep-alive" if keep else "close",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
    }
    lines.update(headers or {})
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("utf-8", "surrogateescape") + content


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    """The path and body of a short completion with further fields."""
    return "/v1/completions", {"prompt": "a", "max_tokens": 4} | fields


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    """The path and body of a short chat with further fields."""
    return "/v1/chat/completions", {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 4,
    } | fields

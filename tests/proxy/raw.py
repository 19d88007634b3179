"""Raw HTTP: what a client library would tidy up.

`exchange` sends the bytes of a request and reads the answer. `Tiny` is an upstream that keeps the very bytes it was sent and
answers with the very bytes it is told, for what the simulated engine is too tidy for.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Message:
    """A request or an answer as it stood on the wire."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes = b""

    def of(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def plain(self, *without: str) -> list[tuple[str, str]]:
        """Headers that are to arrive as they were: not those of one connection, nor the date."""
        gone = {"connection", "keep-alive", "transfer-encoding", "date", "host", "te", "trailer", "upgrade", *without}
        return sorted((key.lower(), value) for key, value in self.headers if key.lower() not in gone)


async def read_message(reader: asyncio.StreamReader, *, answers: str = "") -> Message:
    """Read one HTTP message; `answers` is the method that an answer answers."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *lines = head[:-4].split("\r\n")
    message = Message(line, [(name, value.strip()) for name, _, value in (at.partition(":") for at in lines)])
    bare = answers == "HEAD" or re.search(r" (100|204|304) ", line)
    if message.of("transfer-encoding") == ["chunked"] and not bare:
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            message.body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readuntil(b"\r\n")
    elif message.of("content-length") and not bare:
        message.body = await reader.readexactly(int(message.of("content-length")[0]))
    elif answers and not bare:
        message.body = await reader.read()
    return message


async def exchange(url: str, request: bytes) -> Message:
    """Send the bytes of one request, read its answer."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(request)
        await writer.drain()
        method = request.split(b" ", 1)[0].decode()
        answer = await read_message(reader, answers=method)
        return answer if " 100 " not in answer.line else await read_message(reader, answers=method)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@dataclass
class Tiny:
    """An upstream that answers requests for `/t…` with `answer`'s bytes, and everything else (the probe) with 404."""

    answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    seen: list[Message] = field(default_factory=list)
    pieces: Any = None
    """If set: called with a StreamWriter, in place of `answer`."""

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            request = await read_message(reader)
            if request.line.split(" ")[1].startswith("/t") and "/tokenize" not in request.line:
                self.seen.append(request)
                if self.pieces is not None:
                    await self.pieces(writer)
                else:
                    head, blank, body = self.answer.partition(b"\r\n\r\n")
                    writer.write(head + blank + (b"" if request.line.startswith("HEAD ") else body))
            else:
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    @contextlib.asynccontextmanager
    async def serve(self):
        server = await asyncio.start_server(self._client, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            await server.wait_closed()

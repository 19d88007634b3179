"""One connection of the load generator: it sends requests and records when the first and the last byte of each answer arrived.

It parses only what marks the end of an answer. An answer of a known length ends there, a chunked one at its last chunk.
"""

import asyncio
import re
import time
from typing import NamedTuple

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_NUMBER = re.compile(rb'"content": ?"(\d{8})')
_SENT = re.compile(rb'"mock_sent": ?(\d+)')
_LAST_CHUNK = b"0\r\n\r\n"


class Answer(NamedTuple):
    """CLOCK_MONOTONIC in nanoseconds. `pause`: the longest time between two arrivals; `sent`: when the mock wrote the last event, or 0."""

    status: int
    first: int
    ended: int
    pause: int
    sent: int
    number: bytes
    error: str = ""


class Connection(asyncio.Protocol):
    """A connection that carries one call at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Answer] | None = None

    @classmethod
    async def open(cls, port: int, source: str) -> "Connection":
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(cls, "127.0.0.1", port, local_addr=(source, 0) if source else None)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    @property
    def usable(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def call(self, head: bytes, body: bytes) -> "asyncio.Future[Answer]":
        assert self.transport is not None  # noqa: S101 - `open` returns connected ones only
        self._got = bytearray()
        self._first = self._last = self._pause = 0
        self._end = self._start = -1
        self._waiting = asyncio.get_running_loop().create_future()
        self.transport.writelines([head, body])
        return self._waiting

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if self._waiting is None:
            return
        self._got += data
        if self._start < 0:
            found = self._got.find(b"\r\n\r\n")
            if found < 0:
                return
            self._start = found + 4
            length = _LENGTH.search(self._got, 0, self._start)
            self._end = self._start + int(length[1]) if length else -1
        if self._first:
            self._pause = max(self._pause, now - self._last)
        elif len(self._got) > self._start:
            self._first = now
        self._last = now
        if len(self._got) >= self._end if self._end >= 0 else self._got.endswith(_LAST_CHUNK):
            self._finish(now)

    def _finish(self, now: int) -> None:
        status = int(self._got[9:12])
        number, sent = _NUMBER.search(self._got, self._start), _SENT.search(self._got, max(0, len(self._got) - 400))
        error = "" if status == 200 and number else bytes(self._got[self._start : self._start + 300]).decode(errors="replace")
        answer = Answer(status, self._first, now, self._pause, int(sent[1]) if sent else 0, number[1] if number else b"", error)
        self._settle(answer)

    def connection_lost(self, reason: Exception | None) -> None:
        now = time.monotonic_ns()
        self._settle(Answer(0, now, now, 0, 0, b"", f"connection lost: {reason or 'closed'}"))

    def _settle(self, answer: Answer) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

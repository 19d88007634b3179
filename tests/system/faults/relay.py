"""A chaos relay between harnesses and proxies: it cuts connections, stalls them, and lets them overtake each other.

Harnesses that send one call per connection meet one *fault* per call, in an order that the seed decides:

`request-cut`    the connection breaks in the middle of the request
`request-sent`   it breaks when the request was sent, and before the reply
`reply-cut`      it breaks in the middle of the reply
`reply-lost`     it breaks after the proxy sent all of the reply, and before its last byte arrives
`overtaken`      it breaks at once, and its request reaches the proxy after the harness's repetition of the call was answered
`request-stall`  its request waits until another call was answered, or the harness gives it up (then it is `overtaken`)
`reply-stall`    its reply stops in the middle, for as long

Nothing here waits for the clock; each wait is for something that the relay sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import TYPE_CHECKING

from tests.system.faults.pipe import Pipe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FAULTS = ("request-cut", "request-sent", "reply-cut", "reply-lost", "overtaken", "request-stall", "reply-stall")
_HEAD = b"\r\n\r\n"
_LONGEST = 3000
"""Bytes after which a reply is cut at the latest. Shorter ones are cut before their end."""


class ChaosRelay(Pipe):
    """Each connection leads to a random port of `to`. `each`: how often each fault happens; without any, all connections are calm.

    `begun` says whether a proxy serves a call now. `happened` counts the faults.
    """

    def __init__(self, to: Sequence[int], *, seed: int = 0, each: int = 0, begun: Callable[[], bool] = lambda: True) -> None:
        super().__init__(to[0])
        self._ports, self._rng, self._begun = to, random.Random(seed), begun
        self._ahead = [*FAULTS, *[""] * len(FAULTS)] * each
        self._rng.shuffle(self._ahead)
        self.happened: Counter[str] = Counter()
        self._answered: Counter[bytes] = Counter()
        self._news = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def idle(self) -> bool:
        """Whether nothing waits here, or is under way."""
        return not self._carrying

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault = self._ahead.pop() if self._ahead else ""
        self.happened.update([fault] * bool(fault))
        request = await self._request(reader, self._rng.random() if fault == "request-cut" else 1.0)
        if fault == "overtaken":
            writer.transport.abort()
        body = request.partition(_HEAD)[2]
        if fault == "overtaken":
            await self._until_another_is_answered(body)
        elif fault == "request-stall":
            await self._until_another_is_answered()
        behind, towards = await asyncio.open_connection("127.0.0.1", self._rng.choice(self._ports))
        self._writers.add(towards)
        try:
            towards.write(request)
            await towards.drain()
            if fault == "request-sent":
                await self._until_begun(behind)
            elif reader.at_eof() or writer.transport.is_closing():
                await behind.readuntil(_HEAD)  # as by a gateway that reads a reply which it cannot deliver
            elif fault != "request-cut":
                await self._reply(fault, reader, behind, writer, body)
        finally:
            towards.transport.abort()
            self._writers.discard(towards)

    async def _request(self, reader: asyncio.StreamReader, part: float) -> bytes:
        """Read the request, or this part of it."""
        head = await reader.readuntil(_HEAD)
        whole = head + await reader.readexactly(_length(head) or 0)
        return whole[: int(len(whole) * part)]

    async def _reply(
        self, fault: str, reader: asyncio.StreamReader, behind: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes
    ) -> None:
        """Pass the reply to this request on, as far as the fault permits."""
        gone = asyncio.create_task(reader.read())  # returns when the harness hangs up
        reading = asyncio.create_task(self._pass(fault, behind, writer, body))
        await asyncio.wait([gone, reading], return_when=asyncio.FIRST_COMPLETED)
        for task in (gone, reading):
            task.cancel()
        await asyncio.gather(gone, reading, return_exceptions=True)

    async def _pass(self, fault: str, behind: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
        head = await behind.readuntil(_HEAD)
        length, passed, last = _length(head), 0, b""
        at = self._rng.randrange(_LONGEST if length is None else length) if fault in {"reply-cut", "reply-stall"} else -1
        writer.write(head)
        over = False
        while not over:
            data = await behind.read(65536)
            last = (last + data)[-5:]
            over = not data or (last == b"0" + _HEAD if length is None else passed + len(data) >= length)
            if fault == "reply-lost" and over:
                writer.write(data[:-1])
                await writer.drain()
                return
            if 0 <= at < passed + len(data) or (at >= 0 and over):
                before = min(max(at - passed, 0), len(data) - 1)
                writer.write(data[:before])
                await writer.drain()
                if fault == "reply-cut":
                    return
                await self._until_another_is_answered()
                data, at = data[before:], -1
            writer.write(data)
            if over:  # note it at once: the harness may hang up now
                self._answered[body] += 1
                self._news.set()
                self._news = asyncio.Event()
            await writer.drain()
            passed += len(data)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def _until_another_is_answered(self, body: bytes = b"") -> None:
        """Wait until a call was answered whole; with a body, one whose request had that."""
        answered = Counter(self._answered)
        while self._answered[body] == answered[body] if body else self._answered == answered:
            waits = [asyncio.create_task(event.wait()) for event in (self._news, self._over)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if self._over.is_set():
                raise ConnectionAbortedError

    async def _until_begun(self, behind: asyncio.StreamReader) -> None:
        """Wait until the call has begun: a proxy serves one, or it was answered already."""
        answered = asyncio.create_task(behind.read(1))
        while not answered.done() and not await asyncio.to_thread(self._begun):
            await asyncio.wait([answered], timeout=0.01)
        answered.cancel()


def _length(head: bytes) -> int | None:
    """The content length in the head of a message; `None` if its body is in chunks, and for a request without a body."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return None

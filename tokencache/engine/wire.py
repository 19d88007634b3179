r"""Wire: a stream's pieces are looked at where they arrive, and most of them wake nobody.

aiohttp puts what arrives into a reader; that wakes a task, which takes it out and writes it to the next connection. A third of what
a bare aiohttp relay spends on a token is spent on that way (decision 0022). But nearly all that arrives is one event in one chunk of
HTTP (RFC 9112, 7.1), as vLLM's server writes it:

    1a3\r\n  data: {…}\n\n  \r\n

A wire stands before the connection's own protocol, and of such a chunk it asks at once whether its event is settled. If so the protocol
need not see it: between two chunks its parser stands where it would stand behind any number of them. All else goes its usual way.

That the parser does stand between two chunks is known from what it did last: it was given bytes that end as a chunk does that ends with
an event, and what came out ended with the event. So it took the line break for the chunk's end, and not for a part of it.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self, cast

import aiohttp

_ENDED = b"\n\n\r\n"
"""The end of a chunk that ends with an event."""


class StreamProtocol(asyncio.Protocol):
    """What comes of one streamed answer, as long as the context is open.

    `settles` is asked of each event that arrives as a chunk of its own while somebody waits in `next`; true says that it need not be
    waited for. It is called between tasks: what it raises, `next` raises.
    """

    def __init__(self, answer: aiohttp.ClientResponse, settles: Callable[[bytes], bool]) -> None:
        self._content, self._settles = answer.content, settles
        self._tail = b""  # of what the protocol was given last
        self._whole = False  # what was read last ended with an event
        self._waiter: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._protocol: asyncio.Protocol
        connection = answer.connection
        if connection is not None and connection.transport is not None:  # else all has come already
            self._transport, self._protocol = connection.transport, cast("asyncio.Protocol", connection.protocol)

    def __enter__(self) -> Self:
        """Stand before the connection's protocol."""
        if self._transport is not None:
            self._transport.set_protocol(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, trace: TracebackType | None) -> None:
        """Go out of the way, if the stream's end has not done it."""
        self._leave()

    async def next(self) -> bytes:
        """Wait for what is not settled: any number of bytes of the stream, `b""` at its end.

        Raises:
            aiohttp.ClientError: the connection broke.
        """
        came = self._content.read_nowait()
        if not came and self._whole and self._tail == _ENDED and self._transport is not None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        came = came or await self._content.readany()
        self._whole = came.endswith(b"\n\n")
        return came

    def data_received(self, data: bytes) -> None:
        """Ask about an event; give everything else to the protocol."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            try:
                settled = self._settled(data)
            except Exception as why:  # noqa: BLE001 - it is for whoever waits
                waiter.set_exception(why)
            else:
                if settled:
                    self._waiter = waiter
                    return
                waiter.set_result(None)
        self._tail = data[-len(_ENDED) :]
        self._protocol.data_received(data)
        if self._content.is_eof():  # the connection is the pool's again, and perhaps soon another call's
            self._leave()

    def _settled(self, data: bytes) -> bool:
        at = data.find(b"\r\n") + 2
        event = data[at:-2]
        return data.endswith(_ENDED) and data.startswith(b"%x\r\n" % len(event)) and self._settles(event)

    def eof_received(self) -> bool | None:
        """See `asyncio.Protocol`."""
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        self._protocol.connection_lost(exc)
        if not self._content.is_eof() and self._content.exception() is None:  # of bytes that are no HTTP aiohttp (3.14) tells no reader
            self._content.set_exception(aiohttp.ClientPayloadError("what came is not HTTP"))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._protocol.resume_writing()

    def _leave(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None and transport.get_protocol() is self:  # else another call has it already, and a wire of its own
            transport.set_protocol(self._protocol)

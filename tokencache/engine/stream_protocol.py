r"""Processes the events of a streamed answer directly when they arrive on the connection, mostly without waking a task.

aiohttp puts arriving bytes into a reader. That wakes a task, which reads them and writes them to the next connection: a third of the time
that a bare aiohttp relay spends on a token (decision 0022). But nearly always, one event arrives in one HTTP chunk (RFC 9112, 7.1), as
vLLM's server writes it:

    1a3\r\n  data: {…}\n\n  \r\n

`StreamProtocol` replaces the connection's own protocol, and calls a function with the event of each such chunk at once. If the function
settles the event, which means that the event needs no further processing, the own protocol never gets the chunk. That is safe while its
parser is between two chunks, because it would be in the same state after any number of complete chunks. Everything else is passed to the
own protocol.

The parser is between two chunks if the last bytes that it got ended like a chunk with an event, and its last output ended with the event:
then it parsed the line break as the end of the chunk, and not as a part of it.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self, cast

import aiohttp

from tokencache.engine.connections import Answer

_CHUNK_END = b"\n\n\r\n"
"""The end of a chunk that ends with an event."""


class StreamProtocol(asyncio.Protocol):
    """Receives one streamed answer while the context is open.

    Before each `next`, a task awaits the future that `arrival` returns, if there is one. In the meantime `settle` is called from the event
    loop with each event that arrives as a chunk of its own. It returns whether the event needs no further processing. The future raises any
    exception that it raises. A coroutine in its place would be kept in memory for as long as the stream, and resumed with each event.
    """

    __slots__ = ("_after_event", "_arrived", "_content", "_own", "_settle", "_tail", "_transport", "_waiter")

    def __init__(self, answer: Answer, settle: Callable[[bytes], bool]) -> None:
        self._content, self._settle = answer.content, settle
        self._tail = b""  # the end of the last bytes for the own protocol
        self._after_event = False  # the last bytes that were read ended with an event
        self._arrived = b""  # the bytes that the next `next` returns
        self._waiter: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._own: asyncio.Protocol
        connection = answer.connection
        if connection is not None and (transport := connection.transport) is not None:  # otherwise the whole answer has arrived already
            self._transport, self._own = transport, cast("asyncio.Protocol", connection.protocol)

    def __enter__(self) -> Self:
        """Replace the connection's own protocol."""
        if self._transport is not None:
            self._transport.set_protocol(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, trace: TracebackType | None) -> None:
        """Restore the connection's own protocol, unless the end of the stream did so."""
        self._restore()

    def arrival(self) -> "asyncio.Future[None] | None":
        """Return a future that is done when bytes have arrived that were not settled; `None` if `next` must be called at once.

        Raises:
            aiohttp.ClientError: the connection broke.
        """
        self._arrived = self._arrived or self._content.read_nowait()
        if self._arrived or not self._after_event or self._tail != _CHUNK_END or self._transport is None:
            return None
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    async def next(self) -> bytes:
        """Wait for bytes of the stream; `b""` at its end.

        Raises:
            aiohttp.ClientError: the connection broke.
        """
        data, self._arrived = self._arrived or await self._content.readany(), b""
        self._after_event = data.endswith(b"\n\n")
        return data

    def data_received(self, data: bytes) -> None:
        """Settle an event, or pass the bytes to the own protocol."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            event = data[data.find(b"\r\n") + 2 : -2]
            try:
                settled = data.endswith(_CHUNK_END) and data.startswith(b"%x\r\n" % len(event)) and self._settle(event)
            except Exception as why:  # noqa: BLE001 - `next` raises it
                waiter.set_exception(why)
            else:
                if settled:
                    self._waiter = waiter
                    return
                waiter.set_result(None)
        self._tail = data[-len(_CHUNK_END) :]
        self._own.data_received(data)
        if self._content.is_eof():  # the connection is back in the pool, and may soon serve another call
            self._restore()

    def eof_received(self) -> bool | None:
        """See `asyncio.Protocol`."""
        return self._own.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        self._own.connection_lost(exc)
        if not self._content.is_eof() and self._content.exception() is None:  # aiohttp (3.14) does not report bytes that are not HTTP
            self._content.set_exception(aiohttp.ClientPayloadError("the engine sent bytes that are not HTTP"))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._own.pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self._own.resume_writing()

    def _restore(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None and transport.get_protocol() is self:  # otherwise another call has replaced it already
            transport.set_protocol(self._own)

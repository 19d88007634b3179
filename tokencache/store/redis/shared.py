"""Sends the two commands of each call, that it begins and that it ends, over one connection that all calls share.

redis-py opens the connection, with all that its options say (TLS, AUTH, Sentinels), and hiredis reads the answers. What one round
of the event loop asks for is written at once, and answers come in the order of their commands. That costs 6 entries of Python functions
for a command instead of the 172 of redis-py's pool.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

import hiredis
from redis import exceptions
from redis.asyncio import Connection

_UNFINISHED = object()
"""What hiredis returns while an answer is not complete. Its default is a value that an answer may have, too."""


class ConnectFailedError(exceptions.ConnectionError):
    """No connection could be made, or it was closed first, so nothing was sent."""


class SharedConnection:
    """One connection at a time, opened when it is needed.

    Args:
        make: makes a connection of redis-py that is not open yet.
    """

    def __init__(self, make: Callable[[], Connection]) -> None:
        self._make = make
        self._opening = asyncio.Lock()
        self._open: Pipelined | None = None

    def run(self, *command: bytes | str | int) -> Awaitable[Any]:
        """Send a command and return its answer to come. If the caller is cancelled, its answer is dropped when it comes.

        The answer raises:
            ConnectFailedError: nothing was sent.
            redis.exceptions.RedisError: the connection was lost, or the answer is an error.
        """
        opened = self._open
        return self._connect_and_send(command) if opened is None or opened.transport.is_closing() else opened.send(command)

    async def _connect_and_send(self, command: tuple[bytes | str | int, ...]) -> Any:
        return await (await self._connect()).send(command)

    async def reset(self) -> None:
        """Close the connection: it may be out of step, or lead to a server that is no longer the primary. What is unanswered is lost."""
        if self._open is not None:
            opened, self._open = self._open, None
            await opened.close()

    async def _connect(self) -> "Pipelined":
        async with self._opening:
            if self._open is None or self._open.transport.is_closing():
                await self.reset()
                connection = self._make()
                try:
                    await connection.connect()  # type: ignore[no-untyped-call]
                except BaseException:
                    await connection.disconnect(nowait=True)
                    raise
                self._open = Pipelined(connection)
                if self._open.transport.is_closing():
                    raise ConnectFailedError("Connection closed by server.")
            return self._open


class Pipelined(asyncio.Protocol):
    """An open connection. It takes the transport from redis-py's reader, which has read all that it asked for.

    Args:
        connection: is open, and used for nothing else from now on.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.transport = cast("asyncio.StreamWriter", connection._writer).transport  # noqa: SLF001 - redis-py does not give it
        self.transport.set_protocol(self)
        self._loop = asyncio.get_running_loop()
        errors = connection._parser.parse_error  # noqa: SLF001 - the exceptions that redis-py raises
        self._reader = hiredis.Reader(replyError=errors, notEnoughData=_UNFINISHED)
        self._unsent: list[bytes] = []
        self._unanswered = deque[asyncio.Future[Any]]()

    def send(self, command: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Send a command at the end of this round of the event loop. Returns its answer to come."""
        packed = hiredis.pack_command(command)
        if not self._unsent:
            self._loop.call_soon(self._write)
        self._unsent.append(packed)
        answer = self._loop.create_future()
        self._unanswered.append(answer)
        return answer

    async def close(self) -> None:
        """Close it at once."""
        self._abort("Connection closed.")
        await self._connection.disconnect(nowait=True)

    def data_received(self, data: bytes) -> None:
        """Pass answers on, in the order of their commands."""
        try:
            self._reader.feed(data)
            while (found := self._reader.gets()) is not _UNFINISHED:
                answer = self._unanswered.popleft()
                if answer.done():  # its caller was cancelled
                    continue
                if isinstance(found, Exception):
                    answer.set_exception(found)
                else:
                    answer.set_result(found)
        except hiredis.ProtocolError as error:
            self._abort(f"Connection closed: {error}")
        except IndexError:
            self._abort("Connection closed: an answer without a command.")

    def connection_lost(self, _why: Exception | None) -> None:
        """Fail what is unanswered."""
        self._fail("Connection closed by server.")

    def _write(self) -> None:
        if self._unsent:  # else the connection was lost since
            self.transport.writelines(self._unsent)
            self._unsent.clear()

    def _abort(self, why: str) -> None:
        self.transport.abort()
        self._fail(why)

    def _fail(self, why: str) -> None:
        sent = len(self._unanswered) - len(self._unsent)
        for place, answer in enumerate(self._unanswered):
            if not answer.done():
                answer.set_exception(exceptions.ConnectionError(why) if place < sent else ConnectFailedError(why))
        self._unanswered.clear()
        self._unsent.clear()

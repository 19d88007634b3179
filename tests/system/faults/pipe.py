"""A TCP relay that can be slow, cut or redirected; it runs in a thread of its own, so that tests may block.

It takes the place of a load balancer's or a failover's address: one address to connect to, whatever server is behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Self

from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    from types import TracebackType


class Pipe:
    """Use it with `with`. `to` is the port that new connections lead to; `delay` the seconds that everything is delayed, each way."""

    def __init__(self, to: int) -> None:
        self.to, self.delay = to, 0.0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._listens: Future[int] = Future()
        self._over: asyncio.Event
        self._writers: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        self._thread.start()
        self.port = self._listens.result(PATIENCE)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(PATIENCE)

    def cut(self) -> None:
        """Closes all connections; new ones are accepted."""
        self._loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._listens.set_result(server.sockets[0].getsockname()[1])
        await self._over.wait()
        server.close()
        self._abort()
        await asyncio.gather(*self._carrying)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)
        self._writers.add(writer)
        with contextlib.suppress(OSError, EOFError):
            await self._relay(reader, writer)
        writer.transport.abort()
        self._writers.discard(writer)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, towards = await asyncio.open_connection("127.0.0.1", self.to)
        self._writers.add(towards)
        await asyncio.gather(self._carry(reader, towards), self._carry(behind, writer))
        self._writers.discard(towards)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await asyncio.sleep(self.delay)
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

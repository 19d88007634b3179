"""The client for asyncio: `AsyncClient` and `AsyncSession`. `Client` and `Session` document their methods."""

import asyncio
import dataclasses
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Self, Unpack, cast, overload

import httpx2

from tokencache.client.access import Access, access_to
from tokencache.client.errors import NotFoundError
from tokencache.client.operations import (
    FetchedTrajectory,
    Operations,
    Request,
    ServerResponse,
    SessionOptions,
    Steps,
    T,
    check_deletion,
    check_names,
    missing,
)
from tokencache.session_url import printable_url
from tokencache.trajectories.lengths import LengthOptions
from tokencache.trajectories.values import EngineState, SessionState, Trajectory


class _Transport:
    """Runs operations over a connection pool."""

    def __init__(self, url: str, admin_key: str | None, timeout: float) -> None:
        self.url = printable_url(url)
        self._admin_key = admin_key
        self.http = httpx2.AsyncClient(base_url=url, timeout=timeout)

    async def run(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                if isinstance(step, Request):
                    step = steps.send(await self._send(step))
                else:
                    await asyncio.sleep(step.seconds)
                    step = next(steps)
        except StopIteration as done:
            return cast("T", done.value)

    async def _send(self, request: Request) -> ServerResponse:
        try:
            response = await self.http.request(
                request.method, request.path, params=request.params, content=request.body, headers=request.headers(self._admin_key)
            )
        except httpx2.TransportError as error:
            return ServerResponse(0, f"{type(error).__name__}: {error}".encode(), self.url)
        return ServerResponse(response.status_code, response.content, self.url, response.headers.get("location", ""))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncSession(Access):
    """`Session` for asyncio."""

    _transport: _Transport = dataclasses.field(repr=False)
    _operations: Operations = dataclasses.field(repr=False)

    async def state(self) -> SessionState:
        """See `Session.state`."""
        return await self._transport.run(self._operations.state(self.id))

    async def wait(self, *, turns: int = 0, sealed: bool = False, timeout: float = 60.0) -> SessionState:  # noqa: ASYNC109 - as `Session`'s
        """See `Session.wait`."""
        return await self._transport.run(self._operations.wait(self.id, turns=turns, sealed=sealed, timeout=timeout))

    async def seal(self) -> None:
        """See `Session.seal`."""
        await self._transport.run(self._operations.seal(self.id))

    @overload
    async def fetch(self, format: Literal["native"] = "native", *, drift: str = "", **lengths: Unpack[LengthOptions]) -> Trajectory: ...
    @overload
    async def fetch(self, format: str, *, drift: str = "", **lengths: Unpack[LengthOptions]) -> Any: ...
    async def fetch(self, format: str = "native", *, drift: str = "", **lengths: Unpack[LengthOptions]) -> Any:  # noqa: A002 - the name of the query parameter
        """See `Session.fetch`."""
        return await self._transport.run(self._operations.fetch(self.id, format, drift, lengths))

    async def fetch_json(self, format: str = "native", *, drift: str = "", **lengths: Unpack[LengthOptions]) -> bytes:  # noqa: A002 - the name of the query parameter
        """See `Session.fetch_json`."""
        return await self._transport.run(self._operations.fetch_json(self.id, format, drift, lengths))

    async def delete(self) -> None:
        """See `Session.delete`."""
        await self._transport.run(self._operations.delete(self.id))

    async def revoke(self) -> None:
        """See `Session.revoke`."""
        await self._transport.run(self._operations.revoke(self))


class AsyncClient:
    """`Client` for asyncio."""

    def __init__(self, url: str, admin_key: str | None = None, *, timeout: float = 60.0, adapters: Path | None = None) -> None:
        self._operations = Operations(url, adapters)
        self._transport = _Transport(self._operations.url, admin_key, timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.http.aclose()

    async def create(self, name: str | None = None, **options: Unpack[SessionOptions]) -> AsyncSession:
        """See `Client.create`."""
        return self._session(await self._transport.run(self._operations.create(name, **options)))

    def session(self, name: str) -> AsyncSession:
        """See `Client.session`."""
        return self._session(access_to(self._operations.url, name))

    async def sessions(self, prefix: str = "") -> list[SessionState]:
        """See `Client.sessions`."""
        return await self._transport.run(self._operations.sessions(prefix))

    async def engines(self) -> list[EngineState]:
        """See `Client.engines`."""
        return await self._transport.run(self._operations.engines())

    async def add_engine(self, url: str) -> EngineState:
        """See `Client.add_engine`."""
        return await self._transport.run(self._operations.add_engine(url))

    async def drain_engine(self, url: str) -> EngineState:
        """See `Client.drain_engine`."""
        return await self._transport.run(self._operations.drain_engine(url))

    async def remove_engine(self, url: str, *, force: bool = False) -> None:
        """See `Client.remove_engine`."""
        await self._transport.run(self._operations.remove_engine(url, force=force))

    @overload
    def iterate(
        self,
        names: Iterable[str] | None = None,
        *,
        seal: bool = True,
        delete: bool = True,
        timeout: float = 60.0,
        concurrency: int = 8,
        **lengths: Unpack[LengthOptions],
    ) -> AsyncIterator[Trajectory]: ...
    @overload
    def iterate(
        self,
        names: Iterable[str] | None = None,
        *,
        format: str,
        seal: bool = True,
        delete: bool = True,
        timeout: float = 60.0,
        concurrency: int = 8,
        **lengths: Unpack[LengthOptions],
    ) -> AsyncIterator[Any]: ...
    def iterate(
        self,
        names: Iterable[str] | None = None,
        *,
        format: str = "native",  # noqa: A002 - the name of the query parameter
        seal: bool = True,
        delete: bool = True,
        timeout: float = 60.0,
        concurrency: int = 8,
        **lengths: Unpack[LengthOptions],
    ) -> AsyncIterator[Any]:
        """See `Client.iterate`. The order is that in which the sessions finish.

        At most `concurrency` sessions are processed at a time, so at most as many trajectories are in memory.

        Raises:
            NotFoundError: see `Client.iterate`.
            ValueError: `delete` without `seal`, or `concurrency` is less than 1.
        """
        check_names(names)
        check_deletion(seal=seal, delete=delete)
        if concurrency < 1:
            raise ValueError(f"concurrency: {concurrency} is less than 1")
        take = functools.partial(self._operations.take, form=format, lengths=lengths, seal=seal, timeout=timeout)
        return self._iterate(names, delete, concurrency, take)

    async def _iterate(
        self, names: Iterable[str] | None, delete: bool, concurrency: int, take: Callable[[str], Steps[FetchedTrajectory]]
    ) -> AsyncIterator[Any]:
        left = iter(await self._transport.run(self._operations.finished()) if names is None else names)
        absent = []
        running: dict[asyncio.Task[FetchedTrajectory], str] = {}
        try:
            while True:
                for name in itertools.islice(left, concurrency - len(running)):
                    running[asyncio.create_task(self._transport.run(take(name)))] = name
                if not running:
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                task = next(iter(done))  # other finished tasks stay in `running`, which limits the trajectories in memory
                name = running.pop(task)
                try:
                    taken = task.result()
                except NotFoundError:
                    absent.append(name)
                    continue
                yield taken.trajectory
                if delete and taken.idle:
                    await self._transport.run(self._operations.delete_if_present(name))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if absent and names is not None:
            raise missing(absent)

    def _session(self, access: Access) -> AsyncSession:
        given = {field.name: getattr(access, field.name) for field in dataclasses.fields(access)}
        return AsyncSession(**given, _transport=self._transport, _operations=self._operations)

"""The client for asyncio: `AsyncClient`, `AsyncSession` and `AsyncDelivery`. Their methods are those of `sync_client`, awaited."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self, Unpack

from tokencache.client import collecting, operations, session_operations, weight_operations
from tokencache.client.access import Access, access_to, members_of
from tokencache.client.collecting import FollowOptions
from tokencache.client.operations import ForkOptions, ProxyAddress, SessionOptions
from tokencache.client.transport import AwaitedTransport, awaited, awaited_iterator
from tokencache.client.weight_operations import OwnUpdate, UpdateOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncSession(Access):
    """`Session` for asyncio."""

    _transport: AwaitedTransport = dataclasses.field(repr=False)

    state = awaited(session_operations.state)
    wait = awaited(session_operations.wait)
    finish = awaited(session_operations.finish)
    set_reward = awaited(session_operations.set_reward)
    rewards = awaited(session_operations.rewards)
    changes = awaited(session_operations.changes)
    score = awaited(session_operations.score)
    label = awaited(session_operations.label)
    seal = awaited(session_operations.seal)
    trajectory = awaited(session_operations.trajectory)
    fetch = awaited(session_operations.fetch)
    fetch_json = awaited(session_operations.fetch_json)
    media = awaited(session_operations.media)
    medium = awaited(session_operations.medium)
    delete = awaited(session_operations.delete)
    revoke = awaited(session_operations.revoke)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncDelivery(collecting.DeliveryData):
    """`Delivery` for asyncio."""

    _transport: AwaitedTransport = dataclasses.field(repr=False)

    acknowledge = awaited(collecting.acknowledge)
    release = awaited(collecting.release)
    extend = awaited(collecting.extend)


class AsyncClient(ProxyAddress):
    """`Client` for asyncio."""

    def __init__(self, url: str, admin_key: str | None = None, *, timeout: float = 60.0, adapters: Path | None = None) -> None:
        super().__init__(url, adapters)
        self._transport = AwaitedTransport(self.url, admin_key, timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.http.aclose()

    async def create(self, name: str | None = None, **options: Unpack[SessionOptions]) -> AsyncSession:
        """See `Client.create`."""
        return self._session(await self._transport.run(operations.create(self, name, **options)))

    async def fork(self, session: str, turn: str, name: str | None = None, **options: Unpack[ForkOptions]) -> AsyncSession:
        """See `Client.fork`."""
        return self._session(await self._transport.run(operations.fork(self, session, turn, name, **options)))

    def session(self, name: str) -> AsyncSession:
        """See `Client.session`."""
        return self._session(access_to(self.url, name))

    async def follow(self, consumer: str, **options: Unpack[FollowOptions]) -> AsyncIterator[AsyncDelivery]:
        """See `Client.follow`."""
        async for taken in self._transport.iterate(collecting.follow(self, consumer, **options)):
            yield AsyncDelivery(**members_of(taken), _transport=self._transport)

    @contextlib.asynccontextmanager
    async def update_weights(self, version: int | str, **options: Unpack[UpdateOptions]) -> AsyncIterator[OwnUpdate]:
        """See `Client.update_weights`."""
        update = weight_operations.planned(version, options)
        try:
            await self._transport.run(weight_operations.begin(self, update))
            yield update
            await self._transport.run(weight_operations.finish(self, update))
        except BaseException as error:
            await self._transport.run(weight_operations.cancel(self, update, error))
            raise

    weights = awaited(weight_operations.weights)
    set_weights = awaited(weight_operations.set_weights)
    sessions = awaited(operations.sessions)
    page = awaited(operations.page)
    runs = awaited(operations.runs)
    report = awaited(operations.report)
    iterate = awaited_iterator(collecting.iterate)
    as_completed = awaited_iterator(collecting.as_completed)
    queue = awaited(collecting.queue)
    engines = awaited(operations.engines)
    capacity = awaited(operations.capacity)
    conditions = awaited(operations.conditions)
    add_engine = awaited(operations.add_engine)
    drain_engine = awaited(operations.drain_engine)
    remove_engine = awaited(operations.remove_engine)

    def _session(self, access: Access) -> AsyncSession:
        return AsyncSession(**members_of(access), _transport=self._transport)

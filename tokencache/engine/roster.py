"""The roster: which engines there are, as all replicas of the proxy know it.

Engines come from `--upstream`, and from whoever adds, drains or removes them while the proxy runs. What was asked of one replica stands
in the store; the others read it every `POLL_SECONDS` seconds and do the same. A removed engine leaves an entry for an hour, so that its
absence is not mistaken for a store that lost its entries: what a store lost, the replicas that know of it write again.

The calls under way on an engine are counted by each process for itself. While the engine is being drained, each process reports its
number to the store.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Literal, NamedTuple

from tokencache.engine.health import Watch
from tokencache.engine.pool import Pool
from tokencache.errors import HarnessError
from tokencache.store.base import EngineEntry, Store, StoreError

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0
"""Seconds between two looks at the store: by then each replica has done what was asked of another one."""
_REPORT_SECONDS = 60.0
"""For how long the report of a replica counts that gives no newer one."""
_REMOVED_SECONDS = 3600.0
_CONFLICT, _NOT_FOUND = 409, 404

State = Literal["serving", "draining"]


class Member(NamedTuple):
    """An engine in the roster: `calls` are under way on it, as far as this replica knows; `drained`: on no replica is there any."""

    watch: Watch
    state: State
    calls: int
    drained: bool


class Roster:
    """Adds, drains and removes the engines of a pool, together with all replicas that share the store; this one is named `replica`."""

    def __init__(self, pool: Pool, store: Store, replica: str) -> None:
        self._pool, self._store = pool, store
        self._configured = frozenset(watch.url for watch in pool.watches)
        self._replica = replica
        self._lock = asyncio.Lock()
        self._store_failed = False

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Do what other replicas were asked to do, while the context is open."""
        await self._try_to_agree()
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._try_to_agree()

    async def _try_to_agree(self) -> None:
        """Go on with the engines that are known while the store does not answer; that is logged once."""
        try:
            await self.agree()
        except StoreError as why:
            if not self._store_failed:
                log.warning("engines that other replicas add or remove are not known until the store answers: %s", why)
            self._store_failed = True
        else:
            self._store_failed = False

    async def members(self) -> list[Member]:
        """The engines there are.

        Raises:
            StoreError: the store does not answer.
        """
        entries = await self.agree()
        return [self._member(watch, entries) for watch in self._pool.watches]

    async def add(self, url: str) -> Member:
        """Let an engine take calls, on all replicas.

        Raises:
            StoreError: the store does not answer; nothing was changed.
        """
        return await self._want(url, "serving")

    async def drain(self, url: str) -> Member:
        """Let an engine take no new calls, on all replicas.

        Raises:
            HarnessError: there is no such engine.
            StoreError: the store does not answer; nothing was changed.
        """
        await self._existing(url)
        return await self._want(url, "draining")

    async def remove(self, url: str, *, force: bool) -> None:
        """Take an engine out, on all replicas. Calls under way on it run to their end.

        Raises:
            HarnessError: there is no such engine, it is named by `--upstream`, or it is not drained and it is not forced.
            StoreError: the store does not answer; nothing was changed.
        """
        member = await self._existing(url)
        if url in self._configured:
            said = f"the engine {url} is named by --upstream, so it can be drained and not removed"
            raise HarnessError(said, status=_CONFLICT, kind="engine_configured")
        if not member.drained and not force:
            said = (
                f"the engine {url} is not drained yet ({member.calls} calls are under way): POST /tokencache/v1/engines/drain, and wait "
                "until GET /tokencache/v1/engines says drained; or DELETE it with force=true: calls under way run to their end all the same"
            )
            raise HarnessError(said, status=_CONFLICT, kind="engine_in_use")
        await self._store.put_engine(EngineEntry(url, "removed", time.time()))
        await self.agree()

    async def agree(self) -> list[EngineEntry]:
        """Do what the store says, and write to it what it lost; returns what it says.

        Raises:
            StoreError: the store does not answer.
        """
        async with self._lock:
            entries = await self._store.engines()
            wanted = {entry.url: entry for entry in entries if not entry.replica}
            for entry in wanted.values():
                await self._do(entry)
            for watch in list(self._pool.watches):
                if watch.url not in wanted and watch.url not in self._configured:
                    await self._store.put_engine(EngineEntry(watch.url, _state(watch), time.time()))
            await self._report(entries)
            await self._pool.close_removed()
            return entries

    async def _do(self, entry: EngineEntry) -> None:
        if entry.state == "serving":
            await self._pool.add(entry.url)
        elif entry.state == "draining" or entry.url in self._configured:
            self._pool.drain(entry.url)
        else:
            await self._pool.remove(entry.url)
            if time.time() - entry.at > _REMOVED_SECONDS:
                await self._store.drop_engine(entry.url)

    async def _report(self, entries: Sequence[EngineEntry]) -> None:
        """Report the calls under way on engines that are being drained, and drop reports that say nothing any more."""
        for watch in self._pool.watches:
            if watch.draining:
                calls = watch.engine.upstream.under_way
                await self._store.put_engine(EngineEntry(watch.url, "draining", time.time(), self._replica, calls))
        draining = {watch.url for watch in self._pool.watches if watch.draining}
        for entry in entries:
            if entry.replica and (entry.url not in draining or time.time() - entry.at > _REPORT_SECONDS):
                await self._store.drop_engine(entry.url, entry.replica)

    async def _want(self, url: str, state: State) -> Member:
        await self._store.put_engine(EngineEntry(url, state, time.time()))
        return await self._existing(url)

    async def _existing(self, url: str) -> Member:
        entries = await self.agree()
        watch = self._pool.find(url)
        if watch is None:
            said = f"there is no engine {url}; GET /tokencache/v1/engines lists them"
            raise HarnessError(said, status=_NOT_FOUND, kind="not_found_error")
        return self._member(watch, entries)

    def _member(self, watch: Watch, entries: Sequence[EngineEntry]) -> Member:
        now, own = time.time(), watch.engine.upstream.under_way
        elsewhere = sum(
            entry.calls
            for entry in entries
            if entry.url == watch.url and entry.replica not in {"", self._replica} and now - entry.at < _REPORT_SECONDS
        )
        since = next((entry.at for entry in entries if entry.url == watch.url and not entry.replica), now)
        drained = watch.draining and now - since > 2 * POLL_SECONDS and not own + elsewhere
        return Member(watch, _state(watch), own + elsewhere, drained)


def _state(watch: Watch) -> State:
    return "draining" if watch.draining else "serving"

"""Shares the list of engines between all replicas of the proxy.

Engines come from `--upstream`, and from API requests that add, drain or remove them while the proxy runs. The replica that receives such a
request writes it to the store. The others read the store every `POLL_SECONDS` seconds and do the same. The entry of a removed engine stays
for an hour. So a missing entry means that the store lost it, and the replicas that know the engine write it again.

The store also has the stop ids that replies showed and a probe cannot find (`model.Model.observe`), so that a proxy that starts later
knows them.

Each process counts its own calls under way on an engine. While the engine is drained, each process reports this number to the store. Each
also reports the tokens that its sessions hold on each engine, so that all place new sessions by the same loads (`placement`).
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from typing import Literal, NamedTuple

import msgspec

from tokencache.background import repeat
from tokencache.engine.admission import Admission
from tokencache.engine.health import EngineMonitor
from tokencache.engine.placement import Footprint
from tokencache.engine.pool import Pool
from tokencache.errors import HarnessError
from tokencache.store.base import LEARNED, EngineEntry, Store, StoreError
from tokencache.store.clock import RECORD_CLOCK
from tokencache.wakeup import end

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0
"""Seconds between two reads of the store. After that, every replica has followed a request to another one."""
_FIRST_CHECK_SECONDS = 10.0
"""Longest wait for the first check of an engine that is added."""
_REPORT_SECONDS = 60.0
"""Seconds for which the report of a replica is valid."""
_REMOVED_SECONDS = 3600.0

MemberState = Literal["serving", "draining"]


class EngineMember(NamedTuple):
    """An engine in the list. `calls` is the number under way, as far as this replica knows; `drained` means none on any replica."""

    monitor: EngineMonitor
    state: MemberState
    calls: int
    drained: bool


class EngineMembership:
    """Adds, drains and removes engines of a pool, on all replicas that share the store; `replica` is the name of this one."""

    def __init__(self, pool: Pool, store: Store, replica: str, admission: Admission) -> None:
        self._pool, self._store, self._admission = pool, store, admission
        self._configured = frozenset(monitor.url for monitor in pool.monitors)
        self._replica = replica
        self._lock = asyncio.Lock()
        self._store_failed = False

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow the requests to other replicas while the context is open."""
        await self._try_to_synchronize()
        task = asyncio.create_task(repeat("engines", self._try_to_synchronize, POLL_SECONDS))
        try:
            yield
        finally:
            await end(task)

    async def _try_to_synchronize(self) -> None:
        """Synchronize. While the store does not answer, keep the known engines; that is logged once."""
        try:
            await self.synchronize()
        except StoreError as why:
            if not self._store_failed:
                log.warning("engines that other replicas add or remove are not known until the store answers: %s", why)
            self._store_failed = True
        else:
            self._store_failed = False

    async def members(self) -> list[EngineMember]:
        """List the engines.

        Raises:
            StoreError: the store does not answer.
        """
        entries = await self.synchronize()
        return [self._member(monitor, entries) for monitor in self._pool.monitors]

    async def add(self, url: str) -> EngineMember:
        """Add an engine, or let a drained engine take calls again, on all replicas. Wait for its first check here, at most 10 seconds.

        Raises:
            StoreError: the store does not answer; nothing was changed.
        """
        member = await self._set(url, "serving")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_CHECK_SECONDS):
                await member.monitor.checked.wait()
        return member

    async def drain(self, url: str) -> EngineMember:
        """Send no new calls to an engine, on all replicas.

        Raises:
            HarnessError: there is no such engine.
            StoreError: the store does not answer; nothing was changed.
        """
        await self._existing(url)
        return await self._set(url, "draining")

    async def remove(self, url: str, *, force: bool) -> None:
        """Remove an engine, on all replicas. Calls under way on it run to their end.

        Raises:
            HarnessError: there is no such engine, it is named by `--upstream`, or it is not drained and `force` is not set.
            StoreError: the store does not answer; nothing was changed.
        """
        member = await self._existing(url)
        if url in self._configured:
            message = f"the engine {url} is named by --upstream, so it can be drained and not removed"
            raise HarnessError(message, status=HTTPStatus.CONFLICT, kind="engine_configured")
        if not member.drained and not force:
            message = (
                f"the engine {url} is not drained yet ({member.calls} calls are under way): POST /tokencache/v1/engines/drain, and wait "
                "until GET /tokencache/v1/engines says drained; or DELETE it with force=true: calls under way run to their end all the same"
            )
            raise HarnessError(message, status=HTTPStatus.CONFLICT, kind="engine_in_use")
        await self._store.put_engine(EngineEntry(url, "removed", RECORD_CLOCK.now()))
        await self.synchronize()

    async def synchronize(self) -> list[EngineEntry]:
        """Apply the store's entries, write entries that it lost, and return the entries.

        Raises:
            StoreError: the store does not answer.
        """
        async with self._lock:
            entries = await self._store.engines()
            wanted = {entry.url: entry for entry in entries if not entry.replica}
            for entry in wanted.values():
                await self._apply(entry)
            for monitor in list(self._pool.monitors):
                if monitor.url not in wanted and monitor.url not in self._configured:
                    await self._store.put_engine(EngineEntry(monitor.url, _state(monitor), RECORD_CLOCK.now()))
            await self._share_stops([entry for entry in entries if entry.replica == LEARNED])
            await self._report([entry for entry in entries if entry.url and entry.replica != LEARNED])
            await self._share_loads([entry for entry in entries if not entry.url])
            await self._pool.close_removed()
            return entries

    async def _apply(self, entry: EngineEntry) -> None:
        if entry.state == "serving":
            await self._pool.add(entry.url, entry.at)
        elif entry.state == "draining" or entry.url in self._configured:
            self._pool.drain(entry.url)
        else:
            await self._pool.remove(entry.url)
            if RECORD_CLOCK.now() - entry.at > _REMOVED_SECONDS:
                await self._store.drop_engine(entry.url)
                await self._store.drop_engine(entry.url, LEARNED)

    async def _share_stops(self, entries: Sequence[EngineEntry]) -> None:
        """Take over the stop ids that other replicas have learned, and write those that only this one knows."""
        stored = {entry.url: {model: set(tokens) for model, tokens in entry.stops} for entry in entries}
        for monitor in self._pool.monitors:
            others = stored.get(monitor.url, {})
            monitor.engine.learn(others)
            if any(not tokens <= others.get(model, set()) for model, tokens in monitor.engine.learned.items()):
                stops = tuple((model, tuple(sorted(tokens))) for model, tokens in sorted(monitor.engine.learned.items()) if tokens)
                await self._store.put_engine(EngineEntry(monitor.url, at=RECORD_CLOCK.now(), replica=LEARNED, stops=stops))

    async def _report(self, entries: Sequence[EngineEntry]) -> None:
        """Report the calls under way on engines that are drained, and drop reports that are no longer valid."""
        draining = [monitor for monitor in self._pool.monitors if monitor.draining]
        for monitor in draining:
            calls = monitor.engine.upstream.under_way
            await self._store.put_engine(EngineEntry(monitor.url, "draining", RECORD_CLOCK.now(), self._replica, calls))
        urls = {monitor.url for monitor in draining}
        for entry in entries:
            if entry.replica and (entry.url not in urls or RECORD_CLOCK.now() - entry.at > _REPORT_SECONDS):
                await self._store.drop_engine(entry.url, entry.replica)

    async def _share_loads(self, entries: Sequence[EngineEntry]) -> None:
        """Report loads and footprint of this replica if they have changed, take over those of the others, and drop old reports."""
        now, clock, placement, admission = RECORD_CLOCK.now(), time.monotonic(), self._pool.placement, self._admission
        reports = list[EngineEntry]()
        for entry in entries:
            if now - entry.at > _REPORT_SECONDS:
                await self._store.drop_engine("", entry.replica)
            elif entry.replica != self._replica:
                reports.append(entry)
        others = Counter[str]()
        for entry in reports:
            others.update(dict(entry.loads))
        placement.others, placement.other_footprints = others, [Footprint(entry.ended, entry.footprint) for entry in reports]
        admission.others = [since for entry in reports for since in entry.waiting]
        admission.other_claims = sum(entry.claims for entry in reports)
        known = next((entry for entry in entries if entry.replica == self._replica), EngineEntry("", replica=self._replica))
        ended, footprint = placement.own_footprint
        report = msgspec.structs.replace(
            known,
            loads=tuple(sorted(placement.own_loads(clock).items())),
            ended=ended,
            footprint=footprint,
            claims=admission.claims(clock),
            waiting=tuple(admission.waiting(clock).values()),
        )
        if report != known or (known.at and now - known.at > _REPORT_SECONDS / 2):
            await self._store.put_engine(msgspec.structs.replace(report, at=now))

    async def _set(self, url: str, state: MemberState) -> EngineMember:
        await self._store.put_engine(EngineEntry(url, state, RECORD_CLOCK.now()))
        return await self._existing(url)

    async def _existing(self, url: str) -> EngineMember:
        entries = await self.synchronize()
        monitor = self._pool.find(url)
        if monitor is None:
            message = f"there is no engine {url}; GET /tokencache/v1/engines lists them"
            raise HarnessError(message, status=HTTPStatus.NOT_FOUND, kind="not_found_error")
        return self._member(monitor, entries)

    def _member(self, monitor: EngineMonitor, entries: Sequence[EngineEntry]) -> EngineMember:
        now, own = RECORD_CLOCK.now(), monitor.engine.upstream.under_way
        elsewhere = sum(
            entry.calls
            for entry in entries
            if entry.url == monitor.url and entry.replica not in {"", self._replica} and now - entry.at < _REPORT_SECONDS
        )
        since = next((entry.at for entry in entries if entry.url == monitor.url and not entry.replica), now)
        drained = monitor.draining and now - since > 2 * POLL_SECONDS and not own + elsewhere
        return EngineMember(monitor, _state(monitor), own + elsewhere, drained)


def _state(monitor: EngineMonitor) -> MemberState:
    return "draining" if monitor.draining else "serving"

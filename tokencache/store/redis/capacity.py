"""Checks in the background whether the database has capacity for new sessions, so that no call waits for the check.

A full Redis refuses every write or, with an evicting `maxmemory-policy`, deletes sessions in use. Both lose tokens. So there is a lower
limit: above it, new sessions are refused and existing ones continue. Every second the proxy queries the memory use and the number of keys
of each primary, and reads its clock: if that was set, sessions may be gone. It counts sessions with `SCAN` only if there are at least as
many keys as allowed sessions, and for at most a twentieth of the time. So a limit can be exceeded by the sessions that begin within a
second. If sessions must be counted, it can be exceeded by those that begin within twenty times the time of one count (measured: 0.4 s for
50,000).
"""

import asyncio
import contextlib
import logging
import time
from functools import partial
from typing import Any

from redis import exceptions

from tokencache.background import repeat
from tokencache.store.base import StoreError, StoreUsage
from tokencache.store.clock import NOTICED, RECORD_CLOCK, TOLERANCE, ClockWatch, monotonic
from tokencache.store.redis.answers import check
from tokencache.store.redis.connections import Backend, Run
from tokencache.store.redis.retries import RetryingClient
from tokencache.wakeup import end

log = logging.getLogger(__name__)

SECONDS = 1.0
COUNTING_SHARE = 20
PAGE = 1000
_SAFE = 0.9
_CLOCK_EFFECT = "Redis deletes by it what was not used for --store-ttl: sessions in use may be gone (docs/store.md)"
_ADVICE = "Set maxmemory-policy noeviction, or --store-may-evict if sessions may be lost (docs/store.md)"


class CapacityWatch:
    """Watches the capacity of a database.

    Args:
        client: sends operations.
        backend: connections to the database.
        pattern: matches the keys of sessions.
        max_sessions: largest number of sessions. 0 sets no limit.
        max_bytes: largest number of bytes that a server may use. 0 means nine tenths of its `maxmemory`, if set.
        may_evict: accept a server that evicts keys.

    Attributes:
        full: why new sessions are refused; empty if they are accepted.
        usage: how full the database was when it was checked last. Sessions count once there are as many keys as allowed sessions.
    """

    def __init__(
        self, client: RetryingClient, backend: Backend, pattern: bytes, *, max_sessions: int, max_bytes: int, may_evict: bool
    ) -> None:
        self.full = ""
        self.usage = StoreUsage(0, None)
        self._client, self._backend, self._pattern = client, backend, pattern
        self._max_sessions, self._max_bytes, self._may_evict = max_sessions, max_bytes, may_evict
        self._sessions, self._count_at = 0, 0.0
        self._warned: set[str] = set()
        self._clocks: dict[int, ClockWatch] = {}
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Check once, and start to watch. Raises `StoreError` if the server does not respond, or evicts sessions."""
        evicting = await self.check()
        if evicting and not self._may_evict:
            raise StoreError(f"redis: {evicting}. {_ADVICE}")
        self._task = asyncio.create_task(repeat("store-capacity", self._try_to_check, SECONDS))

    async def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            await end(self._task)

    async def check(self) -> str:
        """Check once. Returns why a server may evict sessions; empty if none does. Raises `StoreError` if the server does not respond."""
        primaries = await self._client.call("capacity", lambda _: self._backend.primaries())
        for number, run in enumerate(primaries):
            await self._check_clock(number, run)
        memory = [one for run in primaries if (one := await self._info(run))]
        evicting = next(filter(None, map(_evicts, memory)), "")
        if evicting:
            self._warn(f"SESSIONS MAY BE LOST: {evicting}. {_ADVICE}")
        self.full = next(filter(None, map(self._over, memory)), "")
        if self._max_sessions and not self.full:
            await self._count(primaries)
            if self._sessions >= self._max_sessions:
                self.full = f"there are {self._sessions} sessions, and --max-sessions is {self._max_sessions}"
        self.usage = self._usage(memory)
        return evicting

    async def _try_to_check(self) -> None:
        with contextlib.suppress(StoreError):
            await self.check()

    async def _check_clock(self, number: int, run: Run) -> None:
        """Compare the steps of a primary's clock with those of this process's. The clock of a server that takes over may be another one."""
        started = monotonic()
        seconds, micros = await self._client.call("capacity", partial(_ask, "TIME", run))
        reading, took = seconds + micros / 1e6, monotonic() - started  # it was read at any time between
        if took < TOLERANCE / 2:
            self._clocks.setdefault(number, ClockWatch("redis", _CLOCK_EFFECT)).check(reading, started)
        if number == 0 and took < NOTICED / 2:
            RECORD_CLOCK.follow(reading, started)

    async def _info(self, run: Run) -> dict[str, Any]:
        reply = await self._client.call("capacity", lambda _: _info(run, "memory"))
        if isinstance(reply, dict):
            return reply
        self._warn(
            f"SESSIONS MAY BE LOST UNNOTICED: the store does not report its memory use ({reply}). Make sure that its maxmemory-policy is "
            "noeviction and that it never gets full; --max-store-bytes has no effect"
        )
        return {}

    def _usage(self, memory: list[dict[str, Any]]) -> StoreUsage:
        each = [StoreUsage.of(*self._bytes(one), self._sessions, self._max_sessions) for one in memory]
        shares = [one.share for one in each if one.share is not None]
        return StoreUsage(sum(one.used for one in each), max(shares, default=None))

    def _bytes(self, memory: dict[str, Any]) -> tuple[int, int]:
        """Return how many bytes a server uses, and how many it may use; 0 if there is no limit."""
        used = _figure(memory, "used_memory") - _figure(memory, "mem_not_counted_for_evict")
        return used, self._max_bytes or int(_figure(memory, "maxmemory") * _SAFE)

    def _over(self, memory: dict[str, Any]) -> str:
        used, allowed = self._bytes(memory)
        if not allowed or used < allowed:
            return ""
        limit = _figure(memory, "maxmemory")
        rule = f"--max-store-bytes is {allowed}" if self._max_bytes else f"the limit is nine tenths of its maxmemory, {limit}"
        return f"Redis uses {used} bytes, and {rule}"

    async def _count(self, primaries: list[Run]) -> None:
        keys = [await self._client.call("capacity", partial(_ask, "DBSIZE", run)) for run in primaries]
        started = time.monotonic()
        if sum(keys) < self._max_sessions:
            self._sessions = 0
        elif started >= self._count_at:
            self._sessions = sum([await self._count_on(run) for run in primaries])
            ended = time.monotonic()
            self._count_at = ended + COUNTING_SHARE * (ended - started)

    async def _count_on(self, run: Run) -> int:
        cursor, found = 0, set[bytes]()
        while True:
            page = await self._client.call("capacity", partial(scan, run, cursor, self._pattern, PAGE))
            cursor = int(page[0])
            found.update(page[1])
            if not cursor:
                return len(found)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message)


def _figure(memory: dict[str, Any], name: str) -> int:
    """Return a figure of the report; 0 if it has none. Raises `StoreError` if the value is not a number."""
    value = memory.get(name, 0)
    if not isinstance(value, int):
        raise StoreError(f"redis: capacity: the server answered something else than a number for {name}")
    return value


def _evicts(memory: dict[str, Any]) -> str:
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    if not _figure(memory, "maxmemory") or policy == "noeviction":
        return ""
    return f"its maxmemory-policy is {policy}: when its memory is full it deletes sessions that are in use"


async def scan(run: Run, cursor: int, pattern: bytes, count: int, _lost: bool = False) -> Any:
    """Read a page of about `count` session keys that match a pattern, without tombstones: the next cursor, and the keys."""
    return check("SCAN", await run("SCAN", cursor, "MATCH", pattern, "COUNT", count, "TYPE", "hash"))


async def run_id(run: Run) -> bytes:
    """Read the id of a server's process; `b""` if the server does not report it."""
    reply = await _info(run, "server")
    return str(reply.get("run_id", "")).encode() if isinstance(reply, dict) else b""


async def _ask(command: str, run: Run, _lost: bool) -> Any:
    return check(command, await run(command))


async def _info(run: Run, section: str) -> Any:
    try:
        return check("INFO", await run("INFO", section))
    except exceptions.ResponseError as why:
        if isinstance(why, exceptions.NoPermissionError) or "unknown command" in str(why):
            return str(why)
        raise

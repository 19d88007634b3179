"""Room: may new sessions begin? Asked in the background, so that no call waits for it.

Redis that is full refuses every write, or, with an evicting `maxmemory-policy`, drops sessions that are in use: both lose tokens. So
there is a bound below: at it new sessions are refused, and those that are there go on. Each second every primary is asked
how much memory it uses, and how many keys it holds; only where there are more keys than sessions allowed are the sessions
counted, by `SCAN`, for at most a twentieth of the time. So a bound is overstepped by what begins within a second, or, where
sessions must be counted, within twenty times what the counting takes (measured: 0.4 s for 50,000).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable
from functools import partial
from typing import Any

from redis import exceptions

from tokencache.store.base import StoreError
from tokencache.store.redis.asking import Asker
from tokencache.store.redis.connecting import Link, Run

log = logging.getLogger(__name__)

SECONDS = 1.0
COUNTING_SHARE = 20
PAGE = 1000
_SAFE = 0.9
_HELP = "set maxmemory-policy noeviction, or say --store-may-evict if sessions may be lost (docs/store.md)"


class Room:
    """Watches a database.

    Args:
        asker: asks it.
        link: leads to it.
        pattern: of the keys of sessions.
        max_sessions: how many sessions there may be; 0: no bound.
        max_bytes: how many bytes a server may use; 0: nine tenths of its `maxmemory`, where it has one.
        may_evict: whether an evicting server is taken.

    Attributes:
        full: why there is no room for new sessions; empty where there is.
    """

    def __init__(self, asker: Asker, link: Link, pattern: bytes, *, max_sessions: int, max_bytes: int, may_evict: bool) -> None:
        self.full = ""
        self._asker, self._link, self._pattern = asker, link, pattern
        self._max_sessions, self._max_bytes, self._may_evict = max_sessions, max_bytes, may_evict
        self._sessions, self._count_at = 0, 0.0
        self._warned: set[str] = set()
        self._watch: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Look, and go on looking.

        Raises:
            StoreError: the server cannot be asked, or may drop sessions.
        """
        evicting = await self.look()
        if evicting and not self._may_evict:
            raise StoreError(f"redis: {evicting}: {_HELP}")
        self._watch = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """Stop to look."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    async def look(self) -> str:
        """Look once. Returns why sessions may be dropped, if they may.

        Raises:
            StoreError: the server cannot be asked.
        """
        primaries = await self._asker.ask("room", lambda _: self._link.primaries())
        memory = [one for run in primaries if (one := await self._info(run))]
        evicting = next(filter(None, map(_evicts, memory)), "")
        if evicting:
            self._warn(f"SESSIONS MAY BE LOST: {evicting}: {_HELP}")
        self.full = next(filter(None, map(self._over, memory)), "")
        if self._max_sessions and not self.full:
            await self._count(primaries)
            if self._sessions >= self._max_sessions:
                self.full = f"there are {self._sessions} sessions, and --max-sessions is {self._max_sessions}"
        return evicting

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(SECONDS)
            with contextlib.suppress(StoreError):
                await self.look()

    async def _info(self, run: Run) -> dict[str, Any]:
        answer = await self._asker.ask("room", partial(_memory, run))
        if isinstance(answer, dict):
            return answer
        self._warn(
            f"NOBODY KNOWS WHETHER SESSIONS MAY BE LOST: the store's memory cannot be asked for ({answer}): see to it that its "
            "maxmemory-policy is noeviction, and that it never is full; bounds of bytes are not kept"
        )
        return {}

    def _over(self, memory: dict[str, Any]) -> str:
        limit = int(memory.get("maxmemory", 0))
        bound = self._max_bytes or int(limit * _SAFE)
        used = int(memory.get("used_memory", 0)) - int(memory.get("mem_not_counted_for_evict", 0))
        if not bound or used < bound:
            return ""
        said = f"--max-store-bytes is {bound}" if self._max_bytes else f"the bound is nine tenths of its maxmemory, {limit}"
        return f"Redis uses {used} bytes, and {said}"

    async def _count(self, primaries: list[Run]) -> None:
        keys = [await self._asker.ask("room", partial(_size, run)) for run in primaries]
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
            page = await self._asker.ask("room", partial(scan, run, cursor, self._pattern))
            cursor = int(page[0])
            found.update(page[1])
            if not cursor:
                return len(found)

    def _warn(self, words: str) -> None:
        if words not in self._warned:
            self._warned.add(words)
            log.warning(words)


def _evicts(memory: dict[str, Any]) -> str:
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    if not int(memory.get("maxmemory", 0)) or policy == "noeviction":
        return ""
    return f"its maxmemory-policy is {policy}: when its memory is full it drops sessions that are in use"


def scan(run: Run, cursor: int, pattern: bytes, _lost: bool) -> Awaitable[Any]:
    """Ask for a page of the sessions whose keys fit a pattern, and of no tombstones: the next cursor, and the keys."""
    return run("SCAN", cursor, "MATCH", pattern, "COUNT", PAGE, "TYPE", "hash")


def _size(run: Run, _lost: bool) -> Awaitable[Any]:
    return run("DBSIZE")


async def _memory(run: Run, _lost: bool) -> Any:
    try:
        return await run("INFO", "memory")
    except exceptions.ResponseError as why:
        if isinstance(why, exceptions.NoPermissionError) or "unknown command" in str(why):
            return str(why)
        raise

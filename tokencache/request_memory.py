"""Bounds the bytes that requests hold in memory: heads that are incomplete, bodies, fetched media, and replies that are read whole.

A request takes bytes before it keeps them (`Holding.take`). It gives all of them back when it has ended, however it ended. A request that
would pass a limit is refused with 503. All requests together have a limit. A tenant has half of it, and a session without a tenant less:
nobody's requests refuse those of all others.

What a request holds is a few times as much as is counted: a body is parsed, and written again for the engine. So the default limit is an
eighth of the memory.
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from aiohttp import web

from tokencache import metrics
from tokencache.errors import MemoryFullError

MEMORY_PART = 8
"""The default limit is this part of the memory."""
OWNER_PART = 2
"""One tenant or session may hold this part of the limit."""
MOST_OF_SESSION = 512 * 2**20
"""One session may hold no more than this, in bytes: an agent and its sub-agents make few calls at a time."""
What = Literal["head", "body", "media", "reply"]


class Owner(msgspec.Struct, frozen=True):
    """Whose request it is: a tenant's, or a session's that has none; `""` if the session is not known."""

    name: str = ""
    is_tenant: bool = False


class RequestMemory:
    """Counts the bytes that the requests of this process hold.

    Attributes:
        most: limit of all requests.
        total: what all requests hold now.
    """

    def __init__(self, most: int, *, least: int = 0) -> None:
        """Set the limits. A single request may always hold `least` bytes (`--max-body`)."""
        self.most = max(most, least)
        self.total = 0
        self._of_tenant = max(self.most // OWNER_PART, least)
        self._of_session = max(min(self.most // OWNER_PART, MOST_OF_SESSION), least)
        self._by_owner = defaultdict[Owner, int](int)

    def of(self, owner: Owner) -> int:
        """Return what the requests of one owner hold now."""
        return self._by_owner.get(owner, 0)

    def share(self, owner: Owner) -> int:
        """Return what they may hold."""
        return self._of_tenant if owner.is_tenant else self._of_session

    def add(self, owner: Owner, what: What, size: int) -> None:
        """Count bytes.

        Raises:
            MemoryFullError: they would pass a limit; nothing was counted.
        """
        if self.total + size > self.most:
            raise _refused(what, f"all requests together hold {self.total} of {self.most} bytes")
        before, share = self._by_owner.get(owner, 0), self._of_tenant if owner.is_tenant else self._of_session
        if before + size > share:
            raise _refused(what, f"the requests of this {'tenant' if owner.is_tenant else 'session'} hold {before} of {share} bytes")
        self.total += size
        self._by_owner[owner] = before + size
        metrics.REQUEST_MEMORY[what].add(size)

    def remove(self, owner: Owner, what: What, size: int) -> None:
        """Count bytes no more."""
        self.total -= size
        self._by_owner[owner] -= size
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        metrics.REQUEST_MEMORY[what].add(-size)

    def move(self, old: Owner, new: Owner, size: int) -> None:
        """Count bytes for another owner.

        Raises:
            MemoryFullError: they would pass its limit; nothing was changed.
        """
        self.remove(old, "body", size)
        try:
            self.add(new, "body", size)
        except MemoryFullError:
            self.add(old, "body", size)
            raise


def _refused(what: What, why: str) -> MemoryFullError:
    metrics.counter(metrics.REQUEST_MEMORY_REFUSED, what).inc()
    return MemoryFullError(f"{why} in memory, as many as --request-memory allows")


class Holding(msgspec.Struct, eq=False):
    """The bytes that one request holds. They are given back when all tasks that `keep` was given have ended.

    Attributes:
        memory: counts the bytes of all requests.
        owner: whose request it is; `belong_to` sets it.
        body: the body of the request, once it was read. It replaces the body on the connection, which can be read only once.
    """

    memory: RequestMemory
    owner: Owner = Owner()
    body: bytes | None = None
    _tasks: int = 0
    _sizes: dict[What, int] = {}

    def take(self, what: What, size: int) -> None:
        """Count bytes before they are kept.

        Raises:
            MemoryFullError: they would pass a limit; nothing was counted.
        """
        if size:
            self.memory.add(self.owner, what, size)
            self._sizes[what] = self._sizes.get(what, 0) + size

    def give(self, what: What, size: int) -> None:
        """Give some bytes back before the request ends."""
        if size:
            self.memory.remove(self.owner, what, size)
            self._sizes[what] -= size

    def give_all(self) -> None:
        """Give everything back: aiohttp keeps a request until the next one arrives on its connection."""
        self.body = None
        for what, size in self._sizes.items():
            self.memory.remove(self.owner, what, size)
        self._sizes.clear()

    def belong_to(self, owner: Owner) -> None:
        """Set the owner, once it is known.

        Raises:
            MemoryFullError: the bytes would pass its limit.
        """
        if owner != self.owner:
            if self._sizes:
                self.memory.move(self.owner, owner, sum(self._sizes.values()))
            self.owner = owner

    def keep(self, task: "asyncio.Task[Any]") -> None:
        """Hold the bytes until a task has ended, too."""
        self._tasks += 1
        task.add_done_callback(self._end)

    def _end(self, _: "asyncio.Task[Any]") -> None:
        self._tasks -= 1
        if not self._tasks:
            self.give_all()


REQUEST_MEMORY = web.AppKey("request_memory", RequestMemory)
"""The count of an application."""
_HOLDING = web.RequestKey("holding", Holding)


def holding_of(request: web.Request) -> Holding:
    """Return what a request holds. The first call must be in the task that serves the request, which also sends its response."""
    try:
        return request[_HOLDING]
    except KeyError:
        found = request[_HOLDING] = Holding(request.app[REQUEST_MEMORY])
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - aiohttp runs each request in one
    found.keep(task)
    return found


def machine_memory(root: Path = Path("/")) -> int:
    """Return the memory in bytes that this process may use: the machine's, or that of its control group if it is less."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group_limits(root)])


def _group_limits(root: Path) -> Iterator[int]:
    """Yield the limits of this process's control groups and of those around them (Linux, cgroups(7): v2, and v1's memory controller)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            try:
                written = top.joinpath(*parts[:depth], name).read_text().strip()
            except OSError:
                continue
            if written.isdecimal():  # otherwise "max"
                yield int(written)

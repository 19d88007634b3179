"""The campaign's disasters: each breaks something in a deployment, lets calls run into it, and repairs it.

A disaster is over when all replicas are ready again, the attempts that it may have hit have ended, and no replica has anything to write
that it could not. So disasters do not overlap, and an unnamed hole is the fault of the last one. (Two at once, a dead store and then a dead
replica, lose both the replica that knew of a hole and the place where it would have been noted: see docs/faults.md.)
"""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

import redis

from tests.support.redis_server import RealRedis
from tests.support.waiting import PATIENCE, until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.system.faults.pipe import Pipe
    from tests.system.faults.processes import Process
    from tests.system.faults.stack import Stack
    from tests.system.faults.timeline import Timeline

P = TypeVar("P", bound="Process")
REQUESTS: dict[str, dict[str, Any]] = {
    "engine-429": {"kind": "status", "status": 429},
    "engine-500": {"kind": "status", "status": 500},
    "engine-503": {"kind": "status", "status": 503},
    "engine-hung": {"kind": "hang"},
    "engine-silent": {"kind": "stall"},
    "engine-truncated": {"kind": "truncated"},
    "engine-no-done": {"kind": "cut", "after": 4},
    "engine-error-event": {"kind": "error_event", "after": 4, "body": "CUDA error"},
    "engine-torn-down": {"kind": "close", "after": 4},
    "engine-torn-down-at-once": {"kind": "close"},
}
"""Faults of one request, as the simulated engine accepts them (`tokencache.testing.faults`)."""


class Disasters:
    """Breaks and repairs a stack whose replicas reach Redis over a pipe.

    `seed` decides which replica or engine is hit. `passing` waits until this many more turns were made, or given up; `attempts_over` until
    all attempts that are under way have ended; `frozen` is how many seconds Redis freezes.
    """

    def __init__(
        self,
        stack: Stack,
        server: RealRedis,
        wire: Pipe,
        timeline: Timeline,
        seed: int,
        *,
        passing: Callable[[int], Awaitable[None]],
        attempts_over: Callable[[], Awaitable[None]],
        frozen: float,
    ) -> None:
        self._stack, self._server, self._wire, self._rng = stack, server, wire, random.Random(seed)
        self._passing, self._attempts_over, self._frozen, self._note = passing, attempts_over, frozen, timeline.note
        self._heirs: list[RealRedis] = []
        self.all: dict[str, Callable[[], Awaitable[None]]] = {
            "proxy-killed": self._kill_proxy, "proxy-stopped": self._stop_proxy, "redis-killed": self._kill_redis,
            "redis-frozen": self._freeze_redis, "redis-full": self._fill_redis, "redis-read-only": self._demote_redis,
            "redis-slow": self._slow_down, "redis-too-slow": self._slow_down_too_much, "redis-cut-off": self._cut,
            "redis-failed-over": self._fail_over, "engine-killed": self._kill_engine, "engine-frozen": self._freeze_engine,
            **{name: lambda fault=fault: self._spoil(fault) for name, fault in REQUESTS.items()},
        }  # fmt: skip

    async def inject(self, name: str) -> None:
        """Runs one disaster, and waits until it is over."""
        self._note(f"{name} begins")
        await self.all[name]()
        self._note(f"{name} is repaired")
        await asyncio.to_thread(self._stack.ready)
        self._note(f"{name}: all are ready; not saved yet: {self._unsaved}")
        await self._attempts_over()
        self._note(f"{name}: the attempts of that time have ended; not saved yet: {self._unsaved}")
        await asyncio.to_thread(self._stack.saved)
        self._note(f"{name} is over")

    @property
    def _unsaved(self) -> str:
        return ", ".join(f"{proxy.name} {proxy.gauge('unsaved')}" for proxy in self._stack.proxies)

    def _pick(self, processes: list[P]) -> P:
        picked = self._rng.choice(processes)
        self._note(f"it hits {picked.name}")
        return picked

    def close(self) -> None:
        for heir in self._heirs:
            heir.__exit__(None, None, None)

    async def _kill_proxy(self) -> None:
        proxy = self._pick(self._stack.proxies)
        proxy.kill()
        await self._passing(3)
        proxy.start()

    async def _stop_proxy(self) -> None:
        proxy = self._pick(self._stack.proxies)
        proxy.stop()
        assert await asyncio.to_thread(proxy.ended) == 0
        proxy.start()

    async def _kill_redis(self) -> None:
        self._server.kill()
        await self._passing(3)
        await asyncio.to_thread(self._server.start)

    async def _freeze_redis(self) -> None:
        self._server.pause()
        try:
            await asyncio.sleep(self._frozen)
        finally:
            self._server.resume()

    async def _fill_redis(self) -> None:
        with closing(self._client()) as client:
            client.config_set("maxmemory", 1)
            await self._passing(5)
            client.config_set("maxmemory", 0)

    async def _demote_redis(self) -> None:
        with closing(self._client()) as client:
            client.replicaof("127.0.0.1", 1)
            await self._passing(5)
            client.replicaof("NO", "ONE")

    async def _slow_down(self) -> None:
        self._wire.delay = 0.03
        await self._passing(10)
        self._wire.delay = 0.0

    async def _slow_down_too_much(self) -> None:
        self._wire.delay = 1.0
        await self._passing(5)
        self._wire.delay = 0.0

    async def _cut(self) -> None:
        for _ in range(5):
            self._wire.cut()
            await self._passing(2)

    async def _fail_over(self) -> None:
        """A planned failover: writes wait until the replica has everything (an unplanned one loses what it does not have yet)."""
        old = self._server
        heir = RealRedis("--appendonly", "yes")
        await asyncio.to_thread(heir.__enter__)
        self._heirs.append(heir)
        with closing(self._client(heir)) as new, closing(self._client()) as client:
            new.replicaof("127.0.0.1", str(old.port))
            await until(lambda: new.info("replication")["master_link_status"] == "up", "the replication")
            client.execute_command("FAILOVER", "TO", "127.0.0.1", str(heir.port))
            await until(lambda: new.info("replication")["role"] == "master", "the failover")
        await self._passing(3)
        self._server, self._wire.to = heir, heir.port
        self._wire.cut()
        old.kill()

    async def _kill_engine(self) -> None:
        engine = self._pick(self._stack.engines)
        engine.kill()
        await self._passing(2)
        engine.start()

    async def _freeze_engine(self) -> None:
        engine = self._pick(self._stack.engines)
        engine.freeze()
        try:
            await asyncio.sleep(1.0)
        finally:
            engine.thaw()

    async def _spoil(self, fault: dict[str, Any]) -> None:
        body = json.dumps({"error": {"message": "not now", "type": "ServerError", "param": None, "code": fault.get("status", 0)}})
        engine = self._pick(self._stack.engines)
        engine.order_fault("#", **({"body": body} | fault))
        await self._passing(4)
        engine.clear_faults()

    def _client(self, server: RealRedis | None = None) -> redis.Redis:
        return redis.Redis(port=(server or self._server).port, socket_timeout=PATIENCE)

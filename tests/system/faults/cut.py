"""Cuts the network: proxy, Redis and engine each in a network of its own, with a link between each two that can go down.

Run as root of a new user and network namespace: `unshare -rn python -m tests.system.faults.cut redis FOLDER`. The proxy and its harness are
here; Redis and the engine each run in a namespace behind a pair of virtual interfaces. A cut link gives no signal: no connection is refused
or reset, packets are just lost. The results are printed as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.support.redis_server import find_binary
from tests.support.waiting import block_until, until
from tests.system.faults.conftest import QUICK
from tests.system.faults.dialects import DIALECTS
from tests.system.faults.harness import Agent
from tests.system.faults.processes import Engine, Process
from tests.system.faults.stack import Stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.system.faults.checker import Findings

REDIS, ENGINE = 1, 2
"""The numbers of the two networks: 10.77.<number>.0/24, with this side at .1 and the other at .2."""


def ip(*words: str, within: list[str] = []) -> None:  # noqa: B006 - never changed
    subprocess.run([*within, "ip", *words], check=True, capture_output=True)


class Network:
    """A namespace at the other end of a link."""

    def __init__(self, number: int) -> None:
        self.address = f"10.77.{number}.2"
        self._holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
        self.within = ["nsenter", "-t", str(self._holder.pid), "-n"]
        own = Path("/proc/self/ns/net").readlink()
        block_until(lambda: Path(f"/proc/{self._holder.pid}/ns/net").readlink() != own, "the namespace")
        self._there = f"there{number}"
        ip("link", "add", f"here{number}", "type", "veth", "peer", "name", self._there)
        ip("link", "set", self._there, "netns", str(self._holder.pid))
        ip("addr", "add", f"10.77.{number}.1/24", "dev", f"here{number}")
        ip("addr", "add", f"{self.address}/24", "dev", self._there, within=self.within)
        ip("link", "set", f"here{number}", "up")
        ip("link", "set", "lo", "up", within=self.within)
        self.plug()

    def plug(self) -> None:
        ip("link", "set", self._there, "up", within=self.within)

    def pull(self) -> None:
        ip("link", "set", self._there, "down", within=self.within)

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


class Apart(Stack):
    """A stack whose Redis and engine are in other namespaces."""

    def __init__(self, folder: Path, redis: Network, engine: Network) -> None:
        super().__init__(folder, replicas=1, store=f"redis://{redis.address}:6379/0", options=QUICK)
        words = ["--bind", redis.address, "--protected-mode", "no", "--port", "6379", "--save", "", "--dir", str(folder)]
        self._server = Process("redis", [str(find_binary()), *words], folder, within=redis.within)
        pace = ("--token-delay", "0.01")
        self.engines = [Engine("engine", folder, self.ground_truth, *pace, host=engine.address, port=8000, within=engine.within)]

    @contextlib.contextmanager
    def running(self) -> Iterator[Apart]:
        self._server.start()
        try:
            with self:
                yield self
        finally:
            self._server.kill()


async def cut_from_redis(stack: Stack, wire: Network, http: aiohttp.ClientSession) -> Findings:
    """The link to Redis goes down in the middle of replies, and calls continue."""
    agents = [Agent(f"cut-{dialect.name}", dialect, http, stack.urls, watch=_at(4, wire.pull)) for dialect in DIALECTS]
    for agent in agents:
        watch, agent.watch = agent.watch, lambda _: None
        assert await agent.turn()
        agent.watch = watch
    assert all(await asyncio.gather(*(agent.turn() for agent in agents))), "its reply does not wait for the link"
    for agent in agents:
        agent.watch = lambda _: None
        assert await agent.turn()
    wire.plug()
    await asyncio.to_thread(stack.recovered)
    for agent in agents:
        assert await agent.turn()
    return await asyncio.to_thread(stack.check, agents)


async def cut_from_engine(stack: Stack, wire: Network, http: aiohttp.ClientSession) -> Findings:
    """The link to the engine goes down in the middle of replies: their harnesses give up; the next call waits for the link."""
    agents = [Agent(f"cut-{dialect.name}", dialect, http, stack.urls) for dialect in DIALECTS]
    pulled = asyncio.Event()

    def pull() -> None:
        wire.pull()
        pulled.set()

    for agent in agents:
        assert await agent.turn()
        agent.watch = _at(4, pull)
    given_up = [asyncio.create_task(agent.turn()) for agent in agents]
    await pulled.wait()
    for call in given_up:
        assert call.cancel()
    await asyncio.wait(given_up)
    await until(lambda: stack.proxies[0].gauge("calls_in_flight") == 0, "the end of these calls")
    for agent in agents:
        agent.watch = lambda _: None
    asking = [asyncio.create_task(agent.turn()) for agent in agents]
    await until(lambda: stack.proxies[0].gauge("calls_in_flight") == len(agents), "the next calls")
    assert not any(task.done() for task in asking)
    wire.plug()
    assert all(await asyncio.gather(*asking))
    return await asyncio.to_thread(stack.check, agents)


def _at(event: int, do: Callable[[], None]) -> Callable[[int], None]:
    def watch(events: int) -> None:
        if events == event:
            do()

    return watch


async def _run(which: str, folder: Path) -> dict[str, Any]:
    ip("link", "set", "lo", "up")
    with contextlib.ExitStack() as stack:
        networks = [stack.enter_context(contextlib.closing(Network(number))) for number in (REDIS, ENGINE)]
        apart = stack.enter_context(Apart(folder, *networks).running())
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
            if which == "redis":
                found = await cut_from_redis(apart, networks[0], http)
            else:
                found = await cut_from_engine(apart, networks[1], http)
    return vars(found) | {"clean": found.clean}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_run(sys.argv[1], Path(sys.argv[2])))))

"""Consumers, proxies and Redis are killed while sessions finish and are consumed: each session is acknowledged exactly once."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import pytest

from tests.support.waiting import block_until
from tests.system.faults import consumer
from tests.system.faults.dialects import DIALECTS
from tests.system.faults.harness import Agent
from tests.system.faults.processes import Program, ask
from tokencache.client import AsyncClient, ClientError

API = "/tokencache/v1"
GROUP = 2
LOGGED = ("--appendonly", "yes", "--appendfsync", "always")


class Consumer(Program):
    """`tests.system.faults.consumer`, and the steps that it noted."""

    def __init__(self, name, folder, url):
        self.file = folder / f"{name}.steps"
        super().__init__(name, consumer.main, [url, name, str(self.file), str(GROUP)], folder)

    def steps(self):
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [(step, delivery, names.split(",")) for _, step, delivery, names in map(str.split, lines)]


def problems(steps):
    """What is wrong with the steps of all consumers: sessions that several deliveries acknowledged, and groups that were not whole."""
    acknowledged = defaultdict(set)
    found = []
    for step, delivery, names in steps:
        if len(names) != GROUP:
            found.append(f"delivery {delivery} has {len(names)} sessions")
        for name in names:
            if step == "acknowledged":
                acknowledged[name].add(delivery)
    return found + [f"{name} was acknowledged by {len(ids)} deliveries" for name, ids in acknowledged.items() if len(ids) > 1]


def test_the_checker_finds_what_is_wrong():
    steps = [("taken", "d1", ["a", "b"]), ("acknowledged", "d1", ["a", "b"]), ("acknowledged", "d2", ["a", "c"]), ("taken", "d3", ["d"])]
    assert problems(steps[:2]) == []
    assert problems(steps) == ["delivery d3 has 1 sessions", "a was acknowledged by 2 deliveries"]


async def finished(urls, name, chance):
    """Finish a session, on any replica, as often as needed."""
    while True:
        async with AsyncClient(chance.choice(urls), timeout=5.0) as client:
            try:
                prefix, _, n = name.rpartition("-")
                await client.session(name).finish(0.5, group=f"{prefix}-{int(n) // GROUP}")
            except ClientError:
                await asyncio.sleep(0.05)  # the replica or Redis is being started again
            else:
                return


@pytest.mark.parametrize("sessions", [12, pytest.param(24, marks=pytest.mark.whole)])
async def test_each_session_is_consumed_exactly_once(started, http, tmp_path, sessions):
    stack = started(redis=LOGGED, replicas=2)
    chance = random.Random(1)
    consumers = [Consumer(f"consumer-{n}", tmp_path, stack.urls[n % 2]).start() for n in range(3)]
    try:
        agents = [Agent(f"queue-{sessions}-{n}", DIALECTS[n % len(DIALECTS)], http, stack.urls) for n in range(sessions)]
        for n, agent in enumerate(agents):
            assert await agent.turn()
            finishing = asyncio.create_task(finished(stack.urls, agent.session, chance))
            match n % 6:
                case 1 | 4:
                    one = chance.choice(consumers)
                    one.kill()
                    one.start()
                case 3:
                    proxy = chance.choice(stack.proxies)
                    proxy.kill()
                    await asyncio.to_thread(proxy.start().ready)
                case 5:
                    stack.redis.kill()
                    await asyncio.to_thread(stack.redis.start)
            await finishing
        consumers[0].kill()  # for good: its deliveries go to the others when their leases end

        def empty():
            for one in consumers[1:]:
                assert one.alive, f"{one.name} ended: {one.output()[-4000:]}"
            status, counts = ask(f"{stack.urls[1]}{API}/queue")
            gone = status == 200 and counts["candidates"] == counts["taken"] == 0
            return gone and all(stack.info(agent.session) is None for agent in agents)  # deleted with the acknowledgement

        await asyncio.to_thread(block_until, empty, "an empty queue")
    finally:
        for one in consumers:
            one.kill()
    steps = [step for one in consumers for step in one.steps()]
    assert problems(steps) == []
    assert {name for step, _, names in steps if step == "taken" for name in names} == {agent.session for agent in agents}

"""Consumers, proxies and Redis are killed while sessions finish and are consumed: each session is acknowledged exactly once."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import pytest

from tests.support.waiting import block_until
from tests.system.faults import consumer
from tests.system.faults.conftest import PATIENT
from tests.system.faults.dialects import DIALECTS
from tests.system.faults.harness import Agent
from tests.system.faults.processes import Program, ask
from tokencache.client import AsyncClient, ClientError, TooManyReadyError

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


async def test_what_consumers_asked_for_and_parts_of_groups_survive(started):
    """A limit of 2, and groups of 2. What replicas know of groups is in the store, so it does not matter which one is killed."""
    stack = started(redis=LOGGED, replicas=2, options=(*PATIENT, "--max-ready", "2"))

    def again(replica, *, redis=False):
        stack.proxies[replica].kill()
        if redis:
            stack.redis.kill()
            stack.redis.start()
        stack.proxies[replica].start().ready()

    async def deliveries(replica, **part):
        async with AsyncClient(stack.urls[replica], timeout=5.0) as client:
            return [one async for one in client.follow("trainer", group_size=2, timeout=0, **part)]

    async def create(replica, name, group, *, finish=True):
        async with AsyncClient(stack.urls[replica], timeout=5.0) as client:
            session = await client.create(name, group=group)
            if finish:
                await session.finish(failed="sandbox")

    assert await deliveries(0) == []
    for n in range(3):  # more than the limit, and nobody can take one of them
        await asyncio.to_thread(again, n % 2, redis=n == 1)
        await create(1 - n % 2, f"{n}-0", f"g{n}")
    await create(1, "0-1", "g0")
    for replica in (0, 1):
        await asyncio.to_thread(again, replica)
        with pytest.raises(TooManyReadyError, match="2 finished sessions are ready and not taken"):
            await create(replica, "new", "new")
    await create(0, "1-1", "g1", finish=False)

    part = {"min_group": 1, "group_timeout": 0.01}
    taken = await deliveries(1, **part)
    assert [(one.group, one.missing, one.valid) for one in taken] == [("g0", 0, []), ("g1", 1, []), ("g2", 1, [])]
    await asyncio.to_thread(again, 1, redis=True)
    async with AsyncClient(stack.urls[1], timeout=5.0) as client:
        await client.session("1-1").finish()
    repeated = await deliveries(0, **part)
    late = [one for one in repeated if one.id not in {one.id for one in taken}]
    assert {(one.id, one.missing, one.attempt) for one in repeated if one not in late} == {(one.id, one.missing, 2) for one in taken}
    assert [([state.session for state in one.sessions], one.missing) for one in late] == [(["1-1"], 1)]
    async with AsyncClient(stack.urls[1], timeout=5.0) as client:
        async for one in client.follow("trainer", group_size=2, timeout=0, **part):
            await one.acknowledge()
        state = await client.queue()
    assert (state.candidates, state.taken, state.groups) == (0, 0, [])

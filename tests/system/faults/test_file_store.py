"""Proxies over one file, without Redis: a proxy that is killed and started again, and two that share the file."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest

from tests.system.faults.conftest import PATIENT
from tests.system.faults.dialects import DIALECTS
from tests.system.faults.harness import Agent
from tests.system.faults.stack import Stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stack")
    with Stack(folder, store=f"file:{folder}/sessions.db", options=PATIENT, engine=("--token-delay", "0.01")) as made:
        yield made
    gc.collect()  # broken connections: if their finalizers run while Python 3.11 compiles a module, compiling fails


async def test_killed_and_started_again_in_mid_stream(stack, http):
    """Each agent has a call in progress when its proxy is killed. All continue at a new process over the same file."""
    first = stack.proxies[0]
    agents = [Agent(f"mid-{dialect.name}", dialect, http, [first.url]) for dialect in DIALECTS]
    assert all(await asyncio.gather(*(agent.turn() for agent in agents)))

    def kill(events):
        if events == 4 and first.alive:
            first.kill()

    for agent in agents:
        agent.watch = kill
    assert not all(await asyncio.gather(*(agent.turn() for agent in agents)))
    for agent in agents:
        agent.watch = lambda _: None
    first.start().ready()
    assert all(await asyncio.gather(*(agent.turn() for agent in agents)))
    found = stack.check(agents)
    assert found.clean, found.words
    assert found.marked, "replies in progress are missing"


@pytest.mark.whole
async def test_proxies_that_share_a_file_are_killed_in_turns(stack, http):
    chance = random.Random(3)
    left = 0

    def count(_events):
        nonlocal left
        left -= 1
        if left == 0:
            victim.kill()

    agents = [Agent(f"turns-{n}", DIALECTS[n % len(DIALECTS)], http, stack.urls) for n in range(4)]
    for agent in agents:
        agent.watch = count
    for proxy in stack.proxies:
        victim, left = proxy, chance.randrange(1, 20)  # killed after so many events of all replies
        await asyncio.gather(*(agent.turn() for agent in agents))
        assert not victim.alive
        victim.start().ready()
    assert all(await asyncio.gather(*(agent.turn() for agent in agents)))
    found = stack.check(agents)
    assert found.clean, found.words

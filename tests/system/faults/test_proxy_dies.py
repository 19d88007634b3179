"""A replica is killed, or stopped: the others continue, and what it had not recorded is reported as missing."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.support.waiting import until
from tests.system.faults.conftest import usually
from tests.system.faults.dialects import DIALECTS
from tests.system.faults.harness import Agent
from tests.system.faults.processes import ask

SLOW = ("--token-delay", "0.01")


@pytest.fixture
def stack(started):
    made = started(engine=SLOW)
    for proxy in made.proxies:
        if not proxy.alive:
            proxy.start()
        proxy.ready()
    return made


def matches(stack, session):
    return [turn["match"] for sequence in stack.export(session)["sequences"] for turn in sequence["turns"]]


@usually("responses")
async def test_killed_in_mid_stream(stack, http, dialect):
    first, second = stack.proxies
    agent = Agent(f"midstream-{dialect.name}", dialect, http, [first.url])
    assert await agent.turn()

    def kill(events):
        if events == 4:
            first.kill()

    agent.watch = kill
    assert await agent.turn() is None
    agent.replicas = [second.url]
    assert await agent.turn()
    assert await agent.turn()
    found = stack.check([agent])
    assert found.clean, found.words
    assert list(found.marked) == [agent.session], "the reply in progress on the replica that died is missing"
    assert matches(stack, agent.session)[-1] == "continue"


async def test_killed_while_a_whole_reply_is_sampled(stack, http):
    first, second = stack.proxies
    agent = Agent("whole", DIALECTS[0], http, [first.url], streams=False)
    assert await agent.turn()
    before = stack.ground_truth.stat().st_size
    asking = asyncio.create_task(agent.turn())
    await until(lambda: stack.ground_truth.stat().st_size > before, "tokens to be sampled")
    first.kill()
    assert await asking is None
    agent.replicas = [second.url]
    assert await agent.turn()
    found = stack.check([agent])
    assert found.clean, found.words
    assert list(found.marked) == [agent.session]


async def test_killed_before_a_lost_harness_is_noticed(stack, http):
    first, second = stack.proxies
    limits = {"session": "lost", "silent_for": 1.0}
    assert ask(f"{first.url}/tokencache/v1/sessions", limits)[0] == 201
    agent = Agent("lost", DIALECTS[0], http, [first.url])
    assert await agent.turn()
    first.kill()
    await until(lambda: stack.info("lost")["state"] == "finished", "the other replica to finish the session")
    info = stack.info("lost")
    assert (info["outcome"], info["complete"], info["valid"]) == ("timeout", True, False)
    agent.replicas = [second.url]
    assert await agent.turn() is None
    assert "late-call" in {incident["kind"] for incident in stack.info("lost")["incidents"]}


async def test_killed_between_a_failure_and_its_record(stack, http):
    first, second = stack.proxies
    agent = Agent("unrecorded", DIALECTS[0], http, [first.url])
    assert await agent.turn()
    stack.engine.order_fault(agent.session, kind="hang")
    asking = asyncio.create_task(agent.turn())
    await until(stack.engine.faults_happened, "the call to reach the engine")
    first.freeze()
    stack.engine.kill()  # the failure, which the frozen replica cannot record
    first.kill()
    stack.engine.start().ready()
    assert await asking is None
    session = f"{second.url}/tokencache/v1/sessions/{agent.session}"
    assert ask(f"{session}/finish", {"reward": 0.0, "group": "g"})[1]["valid"] is False

    def taken():
        return ask(f"{second.url}/tokencache/v1/queue/take", {"consumer": "c", "group": "g"})[1]["deliveries"]

    await until(taken, "the call of the killed replica to be closed")
    info = stack.info(agent.session)
    assert (info["outcome"], info["complete"], [one["kind"] for one in info["incidents"]]) == ("engine", False, ["replica-lost"])


async def test_killed_between_turns(stack, http):
    first, second = stack.proxies
    agents = [Agent(f"between-{dialect.name}", dialect, http, [first.url]) for dialect in DIALECTS]
    for _ in range(2):
        assert all(await asyncio.gather(*(agent.turn() for agent in agents)))
    first.kill()
    for agent in agents:
        agent.replicas = [second.url]
    assert all(await asyncio.gather(*(agent.turn() for agent in agents)))
    found = stack.check(agents)
    assert found.clean, found.words
    assert found.marked == {}
    for agent in agents:
        assert matches(stack, agent.session) == ["root", "continue", "continue"]


@pytest.mark.whole
async def test_a_stopped_replica_finishes_calls_in_progress(stack, http):
    first, second = stack.proxies
    kinds = [(dialect, streams) for dialect in DIALECTS for streams in (True, False)]
    agents = [Agent(f"drained-{dialect.name}-{streams}", dialect, http, [first.url], streams) for dialect, streams in kinds]
    assert all(await asyncio.gather(*(agent.turn() for agent in agents)))

    def stop(events):
        if events == 3:
            first.signal(signal.SIGTERM)

    agents[0].watch = stop
    before = stack.ground_truth.stat().st_size
    asking = [asyncio.create_task(agent.turn()) for agent in agents[1:]]
    await until(lambda: stack.ground_truth.stat().st_size > before, "tokens to be sampled")
    received = await asyncio.gather(agents[0].turn(), *asking)
    assert all(received), [agent.asked[-1].ends for agent in agents]
    assert await asyncio.to_thread(first.ended) == 0
    assert ask(f"{first.url}/healthz")[0] == 0
    for agent in agents:
        agent.watch, agent.replicas = lambda _: None, [second.url]
    assert all(await asyncio.gather(*(agent.turn() for agent in agents)))
    for agent in agents:
        assert matches(stack, agent.session) == ["root", "continue", "continue"]
    found = stack.check(agents)
    assert found.clean, found.words
    assert found.marked == {}

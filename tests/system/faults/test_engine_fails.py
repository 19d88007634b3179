"""Engine failures: killed in mid-stream, frozen, refusing, breaking off. No partial reply counts as whole, and the hole is marked."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.support.waiting import block_until, until
from tests.system.faults.conftest import usually
from tests.system.faults.dialects import DIALECTS
from tests.system.faults.harness import Agent
from tests.system.faults.processes import ask
from tokencache.engine.pool import preference
from tokencache.testing.ground_truth import read_ground_truth

KINDS = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)


@pytest.fixture
def stack(started):
    made = started(replicas=1, engine=("--token-delay", "0.005"))
    if not made.engine.alive:
        made.engine.start()
    made.engine.ready().clear_faults()
    made.proxies[0].ready()
    return made


@pytest.fixture
def pair(started):
    """Two engines with derender that have the same weights: each continues the replies of the other."""
    engine = ("--token-delay", "0.005", "--enable-scale-out", "--seed", "0")
    made = started(replicas=1, engines=2, engine=engine, options=("--placement", "hash"))
    for one in made.engines:
        if not one.alive:
            one.start()
    for one in made.engines:
        one.ready()
    block_until(lambda: serve(made) == [True, True], "both engines to serve")
    return made


def serve(stack):
    return [engine["serves"] for engine in ask(f"{stack.urls[0]}/tokencache/v1/engines")[1]["engines"]]


async def give_up(agent, condition):
    """The harness makes a call, and disconnects as soon as the condition holds."""
    call = asyncio.create_task(agent.turn())
    await until(condition)
    call.cancel()
    assert await asyncio.gather(call, return_exceptions=True) != [None]
    assert agent.asked[-1].received is None


def status(code):
    body = {"error": {"message": "not now", "type": "ServiceUnavailableError", "param": None, "code": code}}
    return {"kind": "status", "status": code, "body": json.dumps(body)}


@usually("messages")
async def test_killed_in_mid_stream(stack, http, dialect):
    agent = Agent(f"killed-{dialect.name}", dialect, http, stack.urls)
    assert await agent.turn()

    def kill(events):
        if events == 5:
            stack.engine.kill()

    agent.watch = kill
    assert await agent.turn() is None
    agent.watch = lambda _: None
    stack.engine.start()
    assert await agent.turn(), "it is queued until the engine is back"
    found = stack.check([agent])
    assert found.clean, found.words
    assert found.marked == {agent.session: ["upstream-broke"]}


@usually("chat")
async def test_killed_in_mid_stream_and_continued(pair, http, dialect):
    agent = Agent(f"continued-{dialect.name}", dialect, http, pair.urls)
    assert await agent.turn()
    home, other = (pair.engines[place] for place in preference(agent.session, [engine.url for engine in pair.engines]))

    def kill(events):
        if events == 8:
            home.kill()

    agent.watch = kill
    assert await agent.turn(), "the harness receives the whole reply"
    assert await agent.turn()
    found = pair.check([agent])
    assert found.clean, found.words
    assert (found.recorded, found.continued, found.marked) == (3, 1, {})
    _, cut, _ = [turn for sequence in pair.export(agent.session)["sequences"] for turn in sequence["turns"]]
    assert [(piece["engine"], piece["ended"]) for piece in cut["pieces"]] == [(home.url, "lost"), (other.url, cut["finish_reason"])]


@KINDS
async def test_frozen_in_mid_stream_until_the_harness_gives_up(stack, http, dialect):
    agent = Agent(f"frozen-{dialect.name}", dialect, http, stack.urls)
    assert await agent.turn()

    frozen = []

    def freeze(events):
        if events == 5:
            stack.engine.freeze()
            frozen.append(events)

    agent.watch = freeze
    try:
        await give_up(agent, lambda: frozen)
    finally:
        stack.engine.thaw()
    agent.watch = lambda _: None
    assert await agent.turn()
    found = stack.check([agent])
    assert found.clean, found.words
    assert found.marked == {}, "the part that the harness received is recorded as a reply that was cut short"
    marks = [set(turn["marks"]) for sequence in stack.export(agent.session)["sequences"] for turn in sequence["turns"]]
    assert {"aborted"} in marks


@KINDS
@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
async def test_hung(stack, http, dialect, streams):
    agent = Agent(f"hung-{dialect.name}-{streams}", dialect, http, stack.urls, streams)
    assert await agent.turn()
    stack.engine.order_fault(agent.session, kind="hang")
    await give_up(agent, stack.engine.faults_happened)
    assert await agent.turn()
    found = stack.check([agent])
    assert found.clean, found.words


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
async def test_hung_and_retried(stack, http, streams):
    """A retry must not wait for a reply that never arrives, and the hung call must not stay open forever."""
    agent = Agent(f"again-{streams}", DIALECTS[0], http, stack.urls, streams, tries=100, timeout_s=1.0)
    assert await agent.turn()
    stack.engine.order_fault(agent.session, kind="hang")
    assert await agent.turn(), agent.asked[-1].ends
    found = stack.check([agent])
    assert found.clean, found.words
    assert stack.info(agent.session)["open_calls"] == []


@KINDS
@pytest.mark.parametrize("code", [429, 503])
async def test_refused_temporarily(stack, http, dialect, code):
    agent = Agent(f"refused-{dialect.name}-{code}", dialect, http, stack.urls)
    assert await agent.turn()
    stack.engine.order_fault(agent.session, **status(code))
    assert await agent.turn(), "it is retried: an engine that answers 'not now' has sampled nothing"
    found = stack.check([agent])
    assert found.clean, found.words
    assert found.marked == {}


@KINDS
async def test_500(stack, http, dialect):
    agent = Agent(f"broken-{dialect.name}", dialect, http, stack.urls)
    assert await agent.turn()
    stack.engine.order_fault(agent.session, **status(500))
    assert await agent.turn() is None
    assert agent.asked[-1].ends == ["500"], "an engine that broke may have sampled: only its harness can decide whether to retry"
    assert await agent.turn()
    found = stack.check([agent])
    assert found.clean, found.words


BREAKS = {
    "no-done": {"kind": "cut", "after": 5},
    "nothing-and-no-done": {"kind": "cut", "after": 0},
    "error-event": {"kind": "error_event", "after": 5, "body": "CUDA error"},
    "torn-down": {"kind": "close", "after": 5},
    "torn-down-at-once": {"kind": "close", "after": 0},
}


@KINDS
@pytest.mark.parametrize("fault", BREAKS.values(), ids=BREAKS)
async def test_a_stream_that_breaks_off(stack, http, dialect, fault):
    agent = Agent(f"{fault['kind']}-{fault['after']}-{dialect.name}", dialect, http, stack.urls)
    assert await agent.turn()
    stack.engine.order_fault(agent.session, **fault)
    assert await agent.turn() is None
    assert await agent.turn()
    found = stack.check([agent])
    assert found.clean, found.words
    assert list(found.marked) == [agent.session], "the engine may have sampled more than arrived"


@KINDS
async def test_a_stream_that_stalls(stack, http, dialect):
    agent = Agent(f"silent-{dialect.name}", dialect, http, stack.urls)
    assert await agent.turn()
    stack.engine.order_fault(agent.session, kind="stall")

    def sampled():
        ends = [entry.finish_reason for entry in read_ground_truth(stack.ground_truth) if entry.session == agent.session]
        return len(ends) == 2 and ends[1]

    await give_up(agent, sampled)
    assert await agent.turn()
    found = stack.check([agent])
    assert found.clean, found.words


@KINDS
async def test_truncated_json(stack, http, dialect):
    agent = Agent(f"truncated-{dialect.name}", dialect, http, stack.urls, streams=False)
    assert await agent.turn()
    stack.engine.order_fault(agent.session, kind="truncated")
    assert await agent.turn() is None
    assert await agent.turn()
    found = stack.check([agent])
    assert found.clean, found.words
    assert list(found.marked) == [agent.session]

"""Trainers, replicas, engines and Redis fail while weights change: nothing stays held, and no turn names a version that is not certain."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys

import pytest

from tests.support.waiting import block_until, until
from tests.system.faults.conftest import QUICK
from tests.system.faults.dialects import DIALECTS
from tests.system.faults.harness import Agent
from tests.system.faults.processes import ask
from tokencache.client import Client, WeightsConflictError

CHAT = next(dialect for dialect in DIALECTS if dialect.name == "chat")
WEIGHTS = "/tokencache/v1/weights"
TRAINER = """
import sys, time
from tokencache.client import Client
with Client(sys.argv[1]) as client, client.update_weights(9, mode="keep", timeout=float(sys.argv[2])):
    print("updating", flush=True)
    time.sleep(600)
"""
FSYNC = ("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture
def stack(started):
    made = started(engine=("--dev-mode", "--token-delay", "0.005"), redis=FSYNC, options=QUICK)
    for process in (made.engine, *made.proxies):
        if not process.alive:
            process.start()
    made.ready()
    return made


@pytest.fixture
def client(stack):
    """Each replica knows that something is announced, so it reads what holds before each call."""
    with Client(stack.urls[0]) as made:
        made.set_weights("first")
        assert [version(stack, replica) for replica in range(len(stack.urls))] == ["first"] * len(stack.urls)
        yield made


def paused(stack):
    return ask(f"{stack.engine.url}/is_paused")[1]["is_paused"]


def phase(stack, replica=1):
    return ask(stack.urls[replica] + WEIGHTS)[1]["phase"]


def version(stack, replica=1):
    return ask(stack.urls[replica] + WEIGHTS)[1]["version"]


def engine_serves(stack, replica=0):
    (engine,) = ask(f"{stack.urls[replica]}/tokencache/v1/engines")[1]["engines"]
    return engine["serves"]


def spans(stack, session):
    """The versions of each turn of a session."""
    turns = [turn for sequence in stack.export(session)["sequences"] for turn in sequence["turns"]]
    return [[span["version"] for span in turn["weight_versions"]] for turn in turns]


@contextlib.contextmanager
def trainer(stack, seconds, replica=0):
    """A trainer's process in the middle of an update; killed at the end."""
    words = [sys.executable, "-c", TRAINER, stack.urls[replica], str(seconds)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "updating\n"
        try:
            yield process
        finally:
            process.kill()


def test_set_twice_set_back_and_set_by_two_trainers(stack, client):
    first = client.set_weights("7")
    assert client.set_weights("7").update == first.update, "the same again changes nothing"
    back = [client.set_weights("8"), client.set_weights("7")]
    assert back[-1].update > first.update, "set back, it is another state of the weights"
    with client.update_weights("9", owner="one"), pytest.raises(WeightsConflictError, match="'one' is updating"):
        client.set_weights("10", owner="two")
    assert version(stack) == "9"


def test_a_trainer_that_is_killed_holds_nothing_after_its_timeout(stack, client):
    client.set_weights("7")
    with trainer(stack, 5) as process:
        assert paused(stack)
        process.send_signal(signal.SIGKILL)
        block_until(lambda: phase(stack) == "unknown", "the end of the update")
    block_until(lambda: not paused(stack), "the engine to be resumed")


def test_a_replica_that_is_killed_in_an_update_is_replaced_by_another(stack):
    with trainer(stack, 5):
        stack.proxies[0].kill()
        block_until(lambda: phase(stack) == "unknown", "the end of the update")
        block_until(lambda: not paused(stack), "the engine to be resumed")
    stack.proxies[0].start().ready()


def sampling(agent):
    """Start a call of an agent. Returns the task, and an event that is set when some tokens are there."""
    begun = asyncio.Event()
    agent.watch = lambda events: begun.set() if events == 5 else None
    return asyncio.create_task(agent.turn()), begun


async def test_a_call_in_mid_stream_and_one_that_begins_meanwhile(stack, http, client):
    client.set_weights("7")
    frozen, held = (Agent(f"weights-{name}", CHAT, http, stack.urls) for name in ("frozen", "held"))
    call, begun = sampling(frozen)
    await begun.wait()
    with client.update_weights("8", mode="keep"):
        waiting = asyncio.create_task(held.turn())
        await until(lambda: (stack.info(held.session) or {}).get("open_calls"), "the call to begin")
    assert await call
    assert await waiting
    assert spans(stack, frozen.session) == [["mixed"]]
    assert spans(stack, held.session) == [["8"]]
    assert stack.check([frozen, held]).clean


async def test_redis_is_away_while_the_version_changes(stack, http, client):
    """The trainer's announcement fails until the store is back; a turn of that time does not name the version before."""
    client.set_weights("7")
    agent = Agent("weights-redis", CHAT, http, stack.urls[:1])
    assert await agent.turn()
    call, begun = sampling(agent)
    await begun.wait()
    stack.redis.kill()
    assert ask(stack.urls[0] + WEIGHTS, {"version": "8"}, "PUT")[0] == 503
    assert await call
    stack.redis.start()
    await asyncio.to_thread(stack.recovered)
    assert client.set_weights("8").version == "8"
    agent.watch = lambda _: None
    assert await agent.turn()
    assert spans(stack, agent.session)[-1] == ["8"]
    assert "7" not in [name for turn in spans(stack, agent.session)[1:] for name in turn]
    assert stack.check([agent]).clean


async def test_an_engine_that_comes_back_has_no_version(stack, http, client):
    client.set_weights("7")
    agent = Agent("weights-engine", CHAT, http, stack.urls[:1])
    assert await agent.turn()
    stack.engine.kill()
    await until(lambda: not engine_serves(stack), "the proxy to notice that the engine is down")
    stack.engine.start().ready()
    assert await agent.turn()
    assert spans(stack, agent.session) == [["7"], []]
    client.set_weights("8")
    assert await agent.turn()
    assert spans(stack, agent.session)[-1] == ["8"]


async def test_a_replica_that_is_drained_ends_its_calls_under_the_right_version(stack, http, client):
    client.set_weights("7")
    agent = Agent("weights-drain", CHAT, http, stack.urls[1:])
    call, begun = sampling(agent)
    await begun.wait()
    stack.proxies[1].stop()
    client.set_weights("8")
    assert await call
    assert stack.proxies[1].ended() == 0
    assert spans(stack, agent.session) == [["mixed"]]
    stack.proxies[1].start().ready()

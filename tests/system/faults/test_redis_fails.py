"""Redis dies, freezes, is full, slow or read-only, fails over, restarts empty: harnesses see no error, and no hole is hidden."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import redis

from tests.support.material import require
from tests.support.redis_server import RealRedis, find_binary
from tests.support.waiting import PATIENCE, until
from tests.system.faults.checker import UNKNOWN
from tests.system.faults.conftest import QUICK
from tests.system.faults.dialects import DIALECTS
from tests.system.faults.harness import Agent
from tests.system.faults.pipe import Pipe
from tests.system.faults.processes import ask
from tests.system.faults.stack import Stack

PACE = ("--token-delay", "0.005")
LOGGED = {
    "always": ("--appendonly", "yes", "--appendfsync", "always"),
    "everysec": ("--appendonly", "yes", "--appendfsync", "everysec"),
}


def agents_of(name, http, urls, **more):
    return [Agent(f"{name}-{dialect.name}", dialect, http, urls, **more) for dialect in DIALECTS]


def labels(stack, session):
    return [(turn["match"], turn["reason"]) for sequence in stack.export(session)["sequences"] for turn in sequence["turns"]]


@contextlib.contextmanager
def client(server):
    with redis.Redis(port=server.port, socket_timeout=PATIENCE) as made:
        yield made


async def take(agents, turns=1):
    for _ in range(turns):
        assert all(await asyncio.gather(*(agent.turn() for agent in agents))), [agent.asked[-1].ends for agent in agents]


async def well(stack):
    """Waits until every replica can write to the store, and has done so."""
    await asyncio.to_thread(stack.recovered)


@pytest.mark.parametrize("fsync", ["always", pytest.param("everysec", marks=pytest.mark.whole)])
async def test_killed_and_started_again_with_its_log(started, http, fsync):
    stack = started(options=QUICK, redis=LOGGED[fsync], engine=PACE)
    agents = agents_of(f"logged-{fsync}", http, stack.urls)
    await take(agents, 3)
    with client(stack.redis) as server:  # a busy disk makes `everysec` write later than it confirms
        await until(lambda: server.info("persistence")["aof_buffer_length"] == 0, "the log to be written")
    stack.redis.kill()
    stack.redis.start()
    await take(agents, 2)
    found = stack.check(agents)
    assert found.clean, found.words
    assert found.marked == {}
    for agent in agents:
        assert labels(stack, agent.session) == [("root", "")] + [("continue", "")] * 4


async def test_calls_while_it_is_dead(started, http):
    stack = started(options=QUICK, redis=LOGGED["always"], engine=PACE)
    agents = agents_of("dead", http, stack.urls)
    away = agents_of("away", http, stack.urls)
    await take([*agents, *away], 2)
    stack.redis.kill()
    await take(agents)
    stack.redis.start()
    await well(stack)
    await take([*agents, *away], 2)
    found = stack.check([*agents, *away])
    assert found.clean, found.words
    assert found.marked == {agent.session: ["store-error"] for agent in agents}, "sessions without calls in that time are complete"
    for agent in agents:
        assert ("continue", UNKNOWN) in labels(stack, agent.session), "turns of that time are not known, and not guessed"


async def test_an_engine_that_fails_while_it_is_dead(started, http):
    stack = started(options=QUICK, redis=LOGGED["always"], engine=PACE)
    agent = Agent("both", DIALECTS[0], http, stack.urls)
    assert await agent.turn()
    stack.engine.order_fault(agent.session, kind="hang")
    asking = asyncio.create_task(agent.turn())
    await until(stack.engine.faults_happened, "the call to reach the engine")
    stack.redis.kill()
    stack.engine.kill()
    assert await asking is None
    stack.redis.start()
    stack.engine.start()
    await well(stack)
    status, state = ask(f"{stack.urls[0]}/tokencache/v1/sessions/{agent.session}/finish", {"reward": 0.0})
    assert (status, state["outcome"], state["valid"]) == (200, "engine", False)


@pytest.mark.whole
async def test_killed_during_replies(started, http):
    stack = started(options=QUICK, redis=LOGGED["always"], engine=PACE)
    agents = agents_of("underway", http, stack.urls)
    await take(agents, 2)
    killed = []

    def kill(events):
        if events == 4 and not killed:
            killed.append(events)
            stack.redis.kill()

    for agent in agents:
        agent.watch = kill
    assert all(await asyncio.gather(*(agent.turn() for agent in agents))), "a harness does not fail because the store does"
    stack.redis.start()
    await well(stack)
    await take(agents, 2)
    found = stack.check(agents)
    assert found.clean, found.words
    assert sorted(found.marked) == sorted(agent.session for agent in agents)


@pytest.mark.whole
async def test_frozen(started, http):
    stack = started(options=QUICK, redis=LOGGED["always"], engine=PACE)
    before, during = agents_of("frozen-before", http, stack.urls), agents_of("frozen", http, stack.urls)
    await take([*before, *during], 2)
    frozen = []

    def freeze(events):
        if events == 4 and not frozen:
            frozen.append(events)
            stack.redis.pause()

    for agent in before:
        agent.watch = freeze
    try:
        assert all(await asyncio.gather(*(agent.turn() for agent in before)))
        await take(during)
    finally:
        stack.redis.resume()
    await well(stack)
    await take([*before, *during], 2)
    found = stack.check([*before, *during])
    assert found.clean, found.words
    late = {agent.session for agent in during}  # what was written before, the server finds when it goes on: those turns may be there
    assert late <= set(found.marked) <= late | {agent.session for agent in before}


@pytest.mark.whole
async def test_full(started, http):
    stack = started(options=QUICK, redis=LOGGED["always"], engine=PACE)
    agents = agents_of("full", http, stack.urls)
    await take(agents, 2)
    with client(stack.redis) as server:
        server.config_set("maxmemory-policy", "noeviction")
        server.config_set("maxmemory", 1)
        await take(agents)
        server.config_set("maxmemory", 0)
        await well(stack)
    await take(agents, 2)
    found = stack.check(agents)
    assert found.clean, found.words
    assert found.marked == {agent.session: ["store-error"] for agent in agents}


@pytest.mark.whole
async def test_read_only(started, http):
    stack = started(options=QUICK, redis=LOGGED["always"], engine=PACE)
    agents = agents_of("readonly", http, stack.urls)
    await take(agents, 2)
    with client(stack.redis) as server:
        server.replicaof("127.0.0.1", 1)
        await take(agents)
        server.replicaof("NO", "ONE")
    await well(stack)
    await take(agents, 2)
    found = stack.check(agents)
    assert found.clean, found.words
    assert sorted(found.marked) == sorted(agent.session for agent in agents)


@pytest.fixture(scope="module")
def started_on_wire(tmp_path_factory):
    require("redis-server", find_binary())
    folder = tmp_path_factory.mktemp("stack")
    with RealRedis() as server, Pipe(server.port) as wire, Stack(folder, options=QUICK, store=wire.url) as stack:
        yield stack, server, wire


@pytest.fixture
def wired(started_on_wire):
    """A stack whose replicas reach a Redis without a log over a pipe."""
    stack, server, wire = started_on_wire
    stack.recovered()
    yield stack, server, wire
    server.kill()  # another one may have taken over
    server.start()
    wire.delay, wire.to = 0.0, server.port
    wire.cut()


@pytest.mark.whole
async def test_killed_and_started_again_empty(wired, http):
    stack, server, _ = wired
    agents = agents_of("empty", http, stack.urls)
    away = agents_of("gone", http, stack.urls)
    await take([*agents, *away], 3)
    server.kill()
    server.start()
    await well(stack)
    await take(agents, 3)
    found = stack.check([*agents, *away], memory_lost=True)
    assert found.clean, found.words
    assert sorted(found.gone) == sorted(agent.session for agent in away), "they do not exist: no trainer mistakes them for complete"
    assert sorted(found.beheaded) == sorted(agent.session for agent in agents)
    assert found.marked == {agent.session: ["session-lost"] for agent in agents}
    for agent in agents:
        assert labels(stack, agent.session)[0] == ("plain", UNKNOWN), "a new epoch begins, and reports that one preceded it"
        assert labels(stack, agent.session)[1][0] == "continue"


async def test_replicas_agree_after_it_restarted_empty(wired, http):
    """What was lost is lost; but all replicas find what is recorded from then on, including a replica that starts later."""
    stack, server, _ = wired
    server.kill()
    server.start()
    later, old = stack.proxies
    later.kill()
    later.start()
    await well(stack)
    agents = agents_of("agreed", http, [old.url])
    await take(agents, 2)
    for agent in agents:
        agent.replicas = [later.url]
    await take(agents)
    for agent in agents:
        assert [match for match, _ in labels(stack, agent.session)] == ["root", "continue", "continue"]


async def test_failing_over_to_a_replica(wired, http):
    """An address that moves: the primary is killed, its replica promoted, and the pipe redirected to it."""
    stack, server, wire = wired
    agents = agents_of("failover", http, stack.urls)
    with RealRedis("--replicaof", "127.0.0.1", str(server.port)) as heir, client(server) as primary, client(heir) as replica:
        await until(lambda: replica.info("replication")["master_link_status"] == "up", "the replication")
        await take(agents, 3)
        assert primary.wait(1, int(PATIENCE * 1000)) == 1  # replication is asynchronous: what had not arrived would be lost
        server.kill()
        wire.to = heir.port
        wire.cut()
        await take(agents)  # not promoted yet: it is read-only
        replica.replicaof("NO", "ONE")
        await well(stack)
        await take(agents, 2)
        found = stack.check(agents)
    assert found.clean, found.words
    assert sorted(found.marked) == sorted(agent.session for agent in agents)


@pytest.mark.whole
@pytest.mark.parametrize("during", [False, True], ids=["between-replies", "during-replies"])
async def test_failing_over_to_a_replica_that_was_behind(wired, http, during):
    """The turns that had not reached it are lost. The proxy still has them in memory, but nothing that it records refers to them."""
    stack, server, wire = wired
    agents = agents_of(f"behind-{during}", http, stack.urls[:1])
    with RealRedis("--replicaof", "127.0.0.1", str(server.port)) as heir, client(server) as primary, client(heir) as replica:
        await until(lambda: replica.info("replication")["master_link_status"] == "up", "the replication")
        await take(agents, 2)
        assert primary.wait(1, int(PATIENCE * 1000)) == 1
        replica.replicaof("NO", "ONE")
        await take(agents)

        def fail_over(events):
            if events == 4 and wire.to != heir.port:
                server.kill()
                wire.to = heir.port
                wire.cut()

        for agent in agents:
            agent.watch = fail_over
        if during:
            await take(agents)
        fail_over(4)
        for agent in agents:
            agent.start_over()
        await take(agents, 2)
        found = stack.check(agents)
        after = {agent.session: labels(stack, agent.session) for agent in agents}
    assert not found.false, found.words
    assert found.marked == {agent.session: ["session-lost"] for agent in agents}
    assert after == {agent.session: [("root", ""), ("continue", "")] * 2 for agent in agents}
    assert len(found.unnamed) == len(agents), "the lost turns; a reply whose parent is lost is named"


async def test_a_connection_that_is_cut_loses_nothing(wired, http):
    stack, _, wire = wired
    agents = agents_of("cut", http, stack.urls)
    for _ in range(4):
        await take(agents)
        wire.cut()
    found = stack.check(agents)
    assert found.clean, found.words
    assert found.marked == {}


@pytest.mark.whole
async def test_slow(wired, http):
    """A slow store is not a failed one: all is recorded. Slower than the limit counts as failed, and is reported."""
    stack, _, wire = wired
    slow, slower = agents_of("slow", http, stack.urls), agents_of("slower", http, stack.urls)
    await take([*slow, *slower])
    wire.delay = 0.05
    await take(slow, 2)
    wire.delay = 1.2
    await take(slower)
    wire.delay = 0.0
    await well(stack)
    await take([*slow, *slower])
    found = stack.check([*slow, *slower])
    assert found.clean, found.words
    assert sorted(found.marked) == sorted(agent.session for agent in slower)


def test_slow_while_a_replica_starts(started):
    """It ends, and says why; a supervisor starts it again."""
    stack = started(options=QUICK, redis=LOGGED["always"], engine=PACE)
    late = stack.replica("late")
    stack.redis.pause()
    try:
        assert late.start().ended() != 0
    finally:
        stack.redis.resume()
    late.ready().kill()
    wrong = stack.replica("wrong", "--placement", "nowhere").start()
    assert wrong.ended() != 0
    with pytest.raises(RuntimeError, match="wrong ended"):
        wrong.ready()

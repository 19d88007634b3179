"""A server that took over lacks what had not reached it: nothing is recorded that could not be read, and nothing is lost in silence."""

import pytest
from redis import exceptions

from tests.store.conformance import build, record
from tokencache.core.incidents import Incident
from tokencache.store.base import TurnLostError

pytestmark = pytest.mark.redis
SESSION = "tokencache:{s}"


@pytest.fixture
def store(emptied_redis_store):
    return emptied_redis_store


@pytest.mark.parametrize("extends", [True, False], ids=["parent", "base"])
async def test_a_turn_on_top_of_a_lost_one_is_refused(store, redis, extends):
    root = build("root", keys=(b"c1",))
    lost = build("lost", root)
    await record(store, "s", root, lost)
    begun = await store.begin("s", "k", [])
    await redis.hdel(SESSION, "#lost", "H2", "T2", "L2")
    await redis.hset(SESSION, "turns", 1)
    with pytest.raises(TurnLostError):
        await store.commit("s", begun.epoch, "k", [build("next", lost, extends=extends, call="k").entry], [Incident("x")])
    assert await store.turns("s") == [root.turn], "nothing was written"
    assert (await store.session("s")).incidents == ()
    await store.commit("s", begun.epoch, "k", [build("after", root, call="k").entry])
    assert [turn.id for turn in await store.turns("s")] == ["root", "after"]


@pytest.fixture
async def begun(store, redis, monkeypatch):
    """A call of which the server knows nothing any more at the second attempt to end it."""
    await record(store, "s", build("root"))
    begun = await store.begin("s", "k", [])
    run, sent = store._backend.run_shared, []

    async def died(*command):
        sent.append(command)
        if len(sent) == 1:
            await redis.hset(SESSION, "open", "")
            raise exceptions.ConnectionError("the primary died before it replied, and its replica did not have the call")
        return await run(*command)

    monkeypatch.setattr(store._backend, "run_shared", died)
    return begun


async def test_a_commit_that_is_sent_again_to_a_server_without_its_call_is_written(store, begun):
    await store.commit("s", begun.epoch, "k", [build("next", call="k").entry], [Incident("x")])
    assert [turn.id for turn in await store.turns("s")] == ["root", "next"]
    assert (await store.session("s")).incidents == (Incident("x"),)


@pytest.mark.parametrize("documents", [{}, {"d": b"data"}], ids=["settle", "documents"])
async def test_incidents_of_a_call_without_turns_are_written_to_a_server_without_its_call(store, begun, documents):
    if documents:
        await store.commit("s", begun.epoch, "k", [], [Incident("x"), Incident("x")], documents=documents)
    else:
        await store.settle("s", begun.epoch, "k", [Incident("x"), Incident("x")])
    assert (await store.session("s")).incidents == (Incident("x"), Incident("x"))
    assert await store.documents("s", list(documents)) == list(documents.values())


async def test_incidents_of_a_call_without_turns_are_written_once(store, monkeypatch):
    """Only the reply to the first attempt is lost, though many others end calls meanwhile."""
    begun = [await store.begin("s", f"k{n}", []) for n in range(20)]
    run, sent = store._backend.run_shared, []

    async def lost(*command):
        answer = await run(*command)
        sent.append(command)
        if len(sent) == 1:
            for n in range(1, 15):
                await store.settle("s", begun[n].epoch, f"k{n}", [Incident("other")])
            await store.add_incidents("s", [Incident("other")])
            raise exceptions.ConnectionError("the reply is lost")
        return answer

    monkeypatch.setattr(store._backend, "run_shared", lost)
    await store.settle("s", begun[0].epoch, "k0", [Incident("x")])
    info = await store.session("s")
    assert [incident.kind for incident in info.incidents] == ["x", *["other"] * 15]
    assert [call.call for call in info.open_calls] == [f"k{n}" for n in range(15, 20)]

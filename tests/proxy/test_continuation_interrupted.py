"""A reply is cut and waits for an engine to continue it, and something else happens meanwhile: still one turn, one reply, no lost token."""

import asyncio
import secrets

import pytest

from tests.proxy.kit import CHAT, HEADER, proxied
from tests.proxy.test_continuation import ALL, ASK, EXPECTED, STREAMS, problems, recorded, said
from tests.proxy.test_retries import another, incidents, open_calls, send, settled, wanted
from tests.support.material import require
from tests.support.plugin_engine import PluginEngine
from tests.support.redis_server import RealRedis, find_binary
from tests.support.waiting import PATIENCE, until
from tokencache.store.memory import MemoryStore
from tokencache.store.redis import RedisStore
from tokencache.testing import Fault, SimulatedEngine

API = "/tokencache/v1"
CUT = 9
"""Tokens before the cut."""
REFUSALS = 100_000


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr("tokencache.proxy.dispatch.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("tokencache.proxy.dispatch.LONGEST_PAUSE", 0.02)


@pytest.fixture(scope="module")
def redis_server():
    require("redis-server", find_binary())
    with RealRedis() as server:
        yield server


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def rig(request):
    store = MemoryStore()
    if request.param == "redis":
        store = RedisStore(request.getfixturevalue("redis_server").url, prefix=secrets.token_hex(8))
    async with proxied(SimulatedEngine(episodes=ALL, seed=7, derenders=True), store=store, hold=PATIENCE) as found:
        yield found


async def cut(rig, *, stream=False, url=None, **headers):
    """A call whose reply is cut; it waits, because the engine takes nothing until `resume`."""
    rig.engine.faults.extend([Fault.abort(CUT), *[Fault.answer(503, "{}")] * REFUSALS])
    call = asyncio.create_task(send(rig, {"model": "sim", **ASK, "stream": stream}, url=url, **headers))
    await refused(rig)
    return call


async def refused(rig, *, left=REFUSALS):
    """Wait until the engine has refused a request, and fewer refusals than these are left."""

    async def some():
        return len(rig.engine.faults) < left

    await until(some)


async def announced(rig, version):
    """Announce weights, and wait until no request is on its way that the proxy sent before."""
    await announce(rig, version)
    await refused(rig, left=len(rig.engine.faults) - 1)


def resume(rig):
    rig.engine.faults.clear()


async def whole_turn(rig):
    """The session's only turn is the whole reply, in two pieces, and the engine sampled nothing else."""
    turn, *tokens = await recorded(rig)
    assert not problems(turn, *tokens, rig.ground_truth())
    assert turn.pieces[0].ended == "abort"
    assert ("continued" in turn.marks, turn.finish_reason, len(rig.ground_truth())) == (True, "tool_calls", 2)
    return turn


@pytest.mark.parametrize("headers", [{}, {"x-stainless-retry-count": "1"}], ids=["bare", "marked"])
async def test_the_client_leaves_and_asks_again(rig, headers):
    """It has received nothing: the call goes on without it, and who asks again gets the reply."""
    call = await cut(rig)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)

    async def orphaned():
        return any(one.orphaned for one in await open_calls(rig))

    await until(orphaned)
    again = asyncio.create_task(send(rig, {"model": "sim", **ASK, "stream": False}, **headers))
    await wanted(rig)
    resume(rig)
    status, answer = await again
    await settled(rig)
    assert (status, said(answer, stream=False)) == (200, EXPECTED)
    await whole_turn(rig)
    assert await incidents(rig) == {"retry-joined": 1, "held": 1}


@STREAMS
async def test_another_call_like_it_gets_the_same_reply(rig, stream):
    first = await cut(rig, stream=stream)
    second = asyncio.create_task(send(rig, {"model": "sim", **ASK, "stream": stream}))
    await wanted(rig)
    resume(rig)
    answers = [await first, await second]
    assert [said(answer, stream=stream) for _, answer in answers] == [EXPECTED] * 2
    await whole_turn(rig)
    third = await send(rig, {"model": "sim", **ASK, "stream": stream}, **{"x-stainless-retry-count": "1"})
    assert said(third[1], stream=stream) == EXPECTED
    await whole_turn(rig)


@pytest.mark.redis
@pytest.mark.parametrize("rig", ["redis"], indirect=True)
async def test_a_retry_through_another_replica_waits_for_the_continuation(rig):
    async with another(rig) as url:
        first = await cut(rig)
        second = asyncio.create_task(send(rig, {"model": "sim", **ASK, "stream": False}, url=url))
        await wanted(rig)
        resume(rig)
        for status, answer in (await first, await second):
            assert (status, said(answer, stream=False)) == (200, EXPECTED)
    await whole_turn(rig)


async def test_a_client_that_leaves_a_stream_ends_the_reply_where_it_is(rig):
    """It has received a part: the turn is that part, and nobody waits for an engine any more."""
    rig.engine.faults.extend([Fault.abort(CUT), *[Fault.answer(503, "{}")] * REFUSALS])
    async with rig.http.post(rig.url + CHAT, json={"model": "sim", **ASK, "stream": True}, headers={HEADER: "s"}) as answer:
        await answer.content.readuntil(b"\n\n")
        await refused(rig)
    await settled(rig)
    resume(rig)
    turn, *tokens = await recorded(rig)
    assert (turn.completion_tokens, "aborted" in turn.marks, len(rig.ground_truth())) == (CUT, True, 1)
    assert not problems(turn, *tokens, rig.ground_truth())


@STREAMS
@pytest.mark.parametrize("step", ["finish", "seal?force=true"])
async def test_the_trainer_finishes_or_seals_the_session(rig, stream, step):
    """The harness has its whole reply. A session that is only finished has the turn, too; one that is sealed says what is missing."""
    call = await cut(rig, stream=stream)
    async with rig.http.post(f"{rig.url}{API}/sessions/s/{step}") as answer:
        assert answer.status == 200
    resume(rig)
    status, body = await call
    await settled(rig)
    exported = await rig.exported()
    if step == "finish":
        assert (status, said(body, stream=stream)) == (200, EXPECTED)
        await whole_turn(rig)
        assert exported["complete"]
    else:
        assert not exported["complete"]


async def test_the_session_is_deleted(rig):
    """The harness has its reply, and the session stays away."""
    call = await cut(rig)
    async with rig.http.delete(f"{rig.url}{API}/sessions/s") as answer:
        assert answer.status == 200
    resume(rig)
    await call
    async with rig.http.get(f"{rig.url}{API}/sessions/s") as answer:
        assert answer.status == 404


async def test_a_budget_that_is_used_up_on_the_way_ends_the_next_call(rig):
    async with rig.http.post(f"{rig.url}{API}/keys", json={"session": "s", "budget": {"tokens": 1}}) as answer:
        assert answer.status < 300
    call = await cut(rig)
    resume(rig)
    status, answer = await call
    assert (status, said(answer, stream=False)) == (200, EXPECTED)
    await whole_turn(rig)
    sampled = len(rig.ground_truth())
    more = {"messages": [*ASK["messages"], answer["choices"][0]["message"], {"role": "user", "content": "More."}]}
    status, _ = await send(rig, {"model": "sim", **ASK, **more})
    assert (status, len(rig.ground_truth())) == (200, sampled)
    assert (await incidents(rig))["budget-spent"] == 1


@STREAMS
async def test_the_engine_that_continues_uses_another_prompt(rig, stream):
    """Its tokens are not taken: a reply that the harness has in part is broken off, another one is sampled anew."""
    call = await cut(rig, stream=stream)
    rig.engine.honours_ids = False
    resume(rig)
    _, answer = await call
    first, *others = await rig.store.turns("s")
    assert (first.completion_tokens, "the engine used other ids" in first.again) == (CUT, True)
    assert len(others) == (0 if stream else 1)
    if stream:
        assert "error" in answer.pop()
        assert not any(chunk["choices"][0]["finish_reason"] for chunk in answer)
        assert "upstream-broke" in first.marks
    else:
        assert said(answer, stream=False) == EXPECTED


@STREAMS
async def test_a_cut_before_the_first_token(rig, stream):
    """There is nothing to continue: the call is made again."""
    rig.engine.faults.append(Fault.abort(0))
    status, answer = await send(rig, {"model": "sim", **ASK, "stream": stream})
    assert (status, said(answer, stream=stream)) == (200, EXPECTED)
    turns = [turn for turn in await rig.store.turns("s") if turn.completion_tokens]
    assert [(turn.pieces, turn.finish_reason) for turn in turns] == [((), "tool_calls")]


async def test_the_weights_change_while_the_reply_waits():
    """Each piece has the version of the engine that sampled it, and the salt of that version."""
    engine = SimulatedEngine(episodes=ALL, seed=7, derenders=True, dev_mode=True)
    async with proxied(engine, hold=PATIENCE) as rig:
        await announce(rig, 7)
        call = await cut(rig)
        await announced(rig, 8)
        resume(rig)
        assert said((await call)[1], stream=False) == EXPECTED
        turn = await whole_turn(rig)
        assert [(span["version"], span["start"]) for span in turn.versions] == [("7", 0), ("8", CUT)]
        salts = [body["cache_salt"] for body in engine.requests if "EPISODE:all" in str(body)]
        assert salts[0] != salts[-1]


@STREAMS
async def test_each_piece_has_the_version_in_the_head_of_its_own_answer(stream):
    engine = PluginEngine(episodes=ALL, seed=7, derenders=True, weight_versions="header")
    async with proxied(engine, hold=PATIENCE) as rig:
        engine.weights.label = "old"
        call = await cut(rig, stream=stream)
        engine.weights.label = "new"
        resume(rig)
        assert said((await call)[1], stream=stream) == EXPECTED
        turn = await whole_turn(rig)
        spans = [(span["version"], span["start"], span["end"]) for span in turn.versions]
        assert spans == [("old", 0, CUT), ("new", CUT, turn.completion_tokens)]


async def test_the_weights_change_while_a_call_waits_for_its_first_engine():
    """It is a call of the version with which it is sampled."""
    engine = SimulatedEngine(episodes=ALL, seed=7, dev_mode=True)
    async with proxied(engine, hold=PATIENCE) as rig:
        await announce(rig, 7)
        rig.engine.faults.extend([Fault.answer(503, "{}")] * (REFUSALS + 1))
        call = asyncio.create_task(send(rig, {"model": "sim", **ASK}))
        await refused(rig)
        await announced(rig, 8)
        resume(rig)
        assert (await call)[0] == 200
        turn, *_ = await recorded(rig)
        assert [(span["version"], span["start"], span["end"]) for span in turn.versions] == [("8", 0, turn.completion_tokens)]
        assert (turn.prompt_version, turn.marks) == ("8", ())
        await send(rig, {"model": "sim", **ASK}, session="later")
        salts = [body["cache_salt"] for body in engine.requests if "EPISODE:all" in str(body)]
        assert salts[-1] == salts[-2] != salts[0]


async def announce(rig, version):
    async with rig.http.put(f"{rig.url}{API}/weights", json={"version": version}) as answer:
        assert answer.status == 200

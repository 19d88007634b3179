"""Forks of a session: the prompts go on exactly, each sampled token is trained once in the tree, and the session may go first."""

import itertools
import secrets

import aiohttp
import msgspec
import pytest

from tests.proxy.kit import CHAT, TOOLS, echo, proxied, results, user
from tests.store.conformance import build, record
from tests.store.conformance.forks import fork as fork_of
from tokencache.client import AsyncClient, ExistsError, NotFoundError, Trajectory
from tokencache.core.session import Budget
from tokencache.core.turn import TurnMark
from tokencache.store.file import FileStore
from tokencache.store.memory import MemoryStore
from tokencache.store.redis import RedisStore
from tokencache.testing import SimulatedEngine
from tokencache.trajectories.formats.registry import FORMATS
from tokencache.trajectories.verify import verify


@pytest.fixture(params=["memory", "file", pytest.param("redis", marks=pytest.mark.redis)])
async def rig(request, tmp_path):
    match request.param:
        case "memory":
            store = MemoryStore()
        case "file":
            store = FileStore(f"file:{tmp_path}/sessions.db")
        case _:
            store = RedisStore(request.getfixturevalue("redis_server").url, prefix=secrets.token_hex(8))
    async with proxied(store=store) as made:
        yield made


async def converse(rig, session, messages, turns=1, key=""):
    """Some turns of a harness; returns its history."""
    headers = {"Authorization": f"Bearer {key}"} if key else {"X-Tokencache-Session": session}
    for _ in range(turns):
        body = {"model": "sim", "messages": messages, "tools": TOOLS}
        async with aiohttp.ClientSession(headers=headers) as http, http.post(rig.url + CHAT, json=body) as answer:
            assert answer.status == 200, await answer.text()
            reply = (await answer.json())["choices"][0]["message"]
        messages = [*messages, echo(reply), *results(reply)]
    return messages


def trained(trajectory):
    """The trained completions, by turn."""
    return {
        turn.turn: tuple(sequence.token_ids[slice(*turn.completion)])
        for sequence in trajectory.sequences
        for turn in sequence.turns
        if any(sequence.loss_mask[slice(*turn.completion)])
    }


async def test_a_tree_is_trained_once(rig):
    start = [user("EPISODE:demo")]
    left = await converse(rig, "root", start, 2)
    await converse(rig, "root", left, 2)
    async with AsyncClient(rig.url) as client:
        turns = [turn["turn"] for turn in await rig.turns("root")]
        forks = [await client.fork("root", turns[1], f"fork-{n}", group="tree", tags=["deep"]) for n in range(2)]
        for fork in forks:
            await converse(rig, fork.id, left, 1, key=fork.key)
        deeper = await client.fork("fork-0", (await rig.turns("fork-0"))[-1]["turn"])
        sessions = ["root", "fork-0", "fork-1", deeper.id]
        found = [await client.session(name).trajectory() for name in sessions]
        assert {one.group for one in found} == {"", "tree"}
        for form in FORMATS:
            await client.session("fork-0").fetch(form)
    for name, one in zip(sessions, found, strict=True):
        assert one.complete, name
        assert not verify(one), name
    own = [trained(one) for one in found]
    assert [len(one) for one in own] == [4, 1, 1, 0]
    everything = list(itertools.chain.from_iterable(own))
    assert len(everything) == len(set(everything))
    sampled = [tuple(entry.completion_ids) for entry in rig.engine.ground_truth if entry.session in sessions]
    assert sorted(sampled) == sorted(tokens for one in own for tokens in one.values())
    for one in found[1:]:
        (sequence,) = one.sequences
        shared = [turn for turn in sequence.turns if TurnMark.SHARED in turn.marks]
        end = shared[-1].completion[1]
        assert not any(sequence.loss_mask[:end])
        assert not any(sequence.logprobs[:end])
        assert [turn.match for turn in sequence.turns] == ["root"] + ["continue"] * (len(sequence.turns) - 1)


@pytest.mark.parametrize("state", ["open", "sealed", "deleted"])
async def test_the_session_may_go_first(rig, state):
    left = await converse(rig, "root", [user("EPISODE:demo")], 2)
    async with AsyncClient(rig.url) as client:
        before = (await client.session("root").trajectory()).sequences[0]
        if state == "sealed":
            await client.session("root").seal(force=True)
        fork = await client.fork("root", before.turns[-1].turn)
        if state == "deleted":
            await client.session("root").delete()
        await converse(rig, fork.id, left, 1, key=fork.key)
        found = await fork.trajectory()
        (sequence,) = found.sequences
        assert sequence.token_ids[: len(before.token_ids)] == before.token_ids
        assert sequence.turns[-1].match == "continue"
        assert not verify(found)
        assert sum(sequence.loss_mask) == sequence.turns[-1].completion_tokens
        assert (await fork.changes())[-1].against == 1


async def test_a_fork_after_an_earlier_turn_does_not_have_the_later_ones(rig):
    start = [user("EPISODE:demo")]
    await converse(rig, "root", await converse(rig, "root", start, 1), 2)
    async with AsyncClient(rig.url) as client:
        fork = await client.fork("root", (await rig.turns("root"))[0]["turn"])
        assert (await fork.state()).turns == 1


async def test_what_is_refused(rig):
    await converse(rig, "root", [user("EPISODE:demo")], 1)
    turn = (await rig.turns("root"))[0]["turn"]
    async with AsyncClient(rig.url) as client:
        with pytest.raises(NotFoundError, match="there is no session 'other'"):
            await client.fork("other", turn)
        with pytest.raises(NotFoundError, match="session 'root' has no turn 'none'"):
            await client.fork("root", "none", "made")
        with pytest.raises(ExistsError):
            await client.fork("root", turn, "root")
        with pytest.raises(NotFoundError):
            await client.session("made").state()


async def test_a_fork_keeps_the_settings_and_its_budget_counts_what_it_shares(rig):
    async with AsyncClient(rig.url) as client:
        made = await client.create("root", sampling={"temperature": 1.0}, budget=Budget(calls=2))
        left = await converse(rig, "root", [user("EPISODE:demo")], 1, key=made.key)
        fork = await client.fork("root", (await rig.turns("root"))[0]["turn"])
        left = await converse(rig, fork.id, left, 1, key=fork.key)
        assert (await rig.turns(fork.id))[-1]["sampling"]["temperature"] == 1.0
        sampled = len(rig.engine.ground_truth)
        await converse(rig, fork.id, left, 1, key=fork.key)
        assert len(rig.engine.ground_truth) == sampled, "the budget of two calls is spent"


def test_a_claim_on_shared_tokens_is_found():
    span = {"turn": "t", "prompt": [0, 1], "completion": [1, 2], "prompt_tokens": 1, "completion_tokens": 1, "match": "root"}
    sequence = {"id": "t", "token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -0.5], "start": "root", "weight": 1.0}
    sequence |= {"turns": [span | {"marks": ["shared"]}]}
    figures = dict.fromkeys(("calls", "turns", "sequences", "trainable_tokens"), 1) | {"masked_tokens": 1, "untrainable_tokens": 0}
    figures |= {"matches": {"root": 1}, "forgiven": {}, "incidents": {}}
    made = msgspec.convert({"session": "s", "complete": True, "sequences": [sequence], "figures": figures}, Trajectory)
    assert any(failure.check == "trained" for failure in verify(made))


async def test_only_records_and_keys_of_a_fork_are_stored(tmp_path):
    root = build("a", tail=range(5000), keys=(b"ca",))
    memory, file = MemoryStore(), FileStore(f"file:{tmp_path}/sessions.db")
    await file.open()
    for store in (memory, file):
        await record(store, "root", root)
        before = (await store.usage()).used
        for _ in range(20):
            await fork_of(store, "root", root.turn)
        assert (await store.usage()).used - before < 20 * 4096
        await store.delete("root")
    await file.close()


@pytest.mark.redis
async def test_what_forks_share_ends_with_the_last_one(redis, redis_server):
    store = RedisStore(redis_server.url, ttl_seconds=100)
    await store.open()
    root = build("a", tail=range(5000), keys=(b"ca",))
    epoch = await record(store, "root", root)
    forks = [await fork_of(store, "root", root.turn) for _ in range(2)]
    assert all([await redis.memory_usage(f"tokencache:{{{fork}}}") < 2000 for fork in forks])
    await redis.pexpire("tokencache:{root}", 1000)
    await store._forks.keep()
    assert await redis.pttl("tokencache:{root}") > 100_000, "it lives longer than a fork that is used now"
    await store.delete("root")
    kept = f"tokencache:{{root}}:{epoch}"
    assert await redis.exists(kept)
    assert (await store.page(b"", 100)).sessions != []
    assert {info.id async for info in store.sessions()} == set(forks)
    await store.delete(forks[0])
    assert (await store.prefix(forks[1], "a")).ids == root.prefix
    await redis.delete(f"tokencache:{{{forks[1]}}}")  # as if it had expired
    await store._forks.keep()
    assert not await redis.exists(kept)
    assert not await redis.exists("tokencache:forks")
    await store.close()


@pytest.mark.redis
async def test_a_session_that_is_deleted_after_its_forks_leaves_nothing(redis, redis_server):
    store = RedisStore(redis_server.url, ttl_seconds=100)
    await store.open()
    epoch = await record(store, "root", build("a"))
    fork = await fork_of(store, "root", build("a").turn)
    for name in (fork, "root"):
        await store.delete(name)
    assert not await redis.exists(f"tokencache:{{root}}:{epoch}")
    await store.close()


@pytest.mark.redis
async def test_a_fork_costs_the_same_however_many_there_are(redis, redis_server):
    store = RedisStore(redis_server.url, ttl_seconds=100)
    await store.open()

    async def commands():
        sent = await redis.info("commandstats")
        return sum(
            sent.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval", "hvals", "hget", "hset", "hdel", "unlink")
        )

    async def made_and_deleted(number):
        await record(store, f"root {number}", build("a"))
        fork = await fork_of(store, f"root {number}", build("a").turn)
        before = await commands()
        await store.delete(fork)
        return await commands() - before

    first = await made_and_deleted(0)
    for number in range(1, 20):
        await record(store, f"root {number}", build("a"))
        await fork_of(store, f"root {number}", build("a").turn)
    assert await made_and_deleted(20) == first
    await store.close()


async def test_a_session_that_expires_leaves_its_tokens_to_forks(tmp_path):
    store = FileStore(f"file:{tmp_path}/sessions.db", ttl_seconds=100)
    await store.open()
    root, now = build("a"), store.now()
    await record(store, "root", root)
    forks = [await fork_of(store, "root", root.turn) for _ in range(2)]
    store.now = lambda: now + 60
    for fork in forks:
        await store.begin(fork, "k", [])
    store.now = lambda: now + 150
    await record(store, "other", build("x"))  # which deletes what has expired
    assert await store.session("root") is None
    for fork in forks:
        assert (await store.prefix(fork, "a")).ids == root.prefix
    await store.close()


SAME_WORDS = {"y": ["<think>\nSame words.\n</think>\n\nThe very same words of a reply.", "Done."]}


async def test_a_retry_that_the_fork_does_not_share_casts_no_doubt_on_the_reply_that_it_shares():
    """Both have the same words, in different tokens, and the second one is stored as what it adds to the first one."""
    async with proxied(SimulatedEngine(episodes=SAME_WORDS, seed=5), dedup="off") as rig, AsyncClient(rig.url) as client:
        asked = [user("EPISODE:y " + "a long question " * 20)]
        await rig.say("s", asked)
        reply = await rig.say("s", asked)
        discarded, kept = await rig.store.turns("s")
        assert (kept.base, discarded.served) == (discarded.id, kept.served)
        assert discarded.completion_hash != kept.completion_hash
        await client.fork("s", kept.id, "f")
        await rig.say("f", [*asked, echo(reply), user("Go on.")])
        shared, _, own = await rig.store.turns("f")
        assert shared.marks == (TurnMark.SHARED, TurnMark.NOT_IN_HISTORY)
        assert (own.match, own.parent) == ("continue", kept.id)

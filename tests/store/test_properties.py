"""For random turns and operations, Redis returns what the memory store returns."""

import asyncio

import fakeredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tokencache.core.incidents import Incident
from tokencache.core.invariants import audit
from tokencache.core.lineage import sequences
from tokencache.store.base import Entry, SessionDeletedError, SessionGoneError, SessionSealedError
from tokencache.store.conformance import build
from tokencache.store.memory import MemoryStore
from tokencache.store.redis import RedisStore

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4)
KEYS = st.lists(st.one_of(st.sampled_from([b"c1", b"c2", b"r1", b"r2"]), st.binary(min_size=1, max_size=17)), max_size=3)


@st.composite
def trees(draw):
    """Entries without a base, or that continue an earlier one, or that share its first tokens."""
    built = []
    for n in range(draw(st.integers(1, 8))):
        base = draw(st.sampled_from([None, *built]))
        extends = base is not None and draw(st.booleans())
        shared = None if base is None or extends else draw(st.integers(0, len(base.prefix) // 4))
        keys = tuple(draw(KEYS))
        built.append(build(f"t{n}", base, draw(IDS), draw(IDS), shared=shared, extends=extends, keys=keys, call=f"k{n}"))
    return built


async def write(store, built):
    for one in built:
        begun = await store.begin("s", one.turn.call, [])
        incidents = [Incident(one.turn.id)] if len(one.prefix) % 3 == 0 else []
        await store.commit("s", begun.epoch, one.turn.call, [Entry(one.turn, one.entry.tokens, one.entry.keys)], incidents)


async def read(store, built):
    keys = [key for one in built for key in one.entry.keys] + [b"c1", b"c2", b"r1", b"r2", b"nothing"]
    turns = await store.turns("s")
    tokens = await store.tokens("s", [turn.id for turn in turns])
    info = await store.session("s")
    return {
        "turns": turns,
        "tokens": tokens,
        "prefixes": [await store.prefix("s", one.turn.id) for one in built],
        "found": await store.find("s", keys),
        "begun": (await store.begin("s", "last", keys)).hits,
        "sequences": sequences(turns, tokens),
        "state": (info.turns, info.sealed, info.incidents, info.open_calls),
    }


async def compare(store, built):
    memory = MemoryStore()
    await store.delete("s", reuse=True)
    for one in (memory, store):
        await write(one, built)
    wanted, got = await read(memory, built), await read(store, built)
    for what in wanted:
        assert got[what] == wanted[what], what
    assert [prefix.ids for prefix in got["prefixes"]] == [one.prefix for one in built]
    assert audit(got["turns"], got["tokens"]) == []


NAMES = st.sampled_from(["s", "t"])
CALLS = st.sampled_from(["k1", "k2", "k3", "k4"])
JOINS = st.sampled_from(["never", "orphaned", "any"])
STEPS = st.one_of(
    st.tuples(st.just("begin"), NAMES, CALLS, st.sampled_from([b"", b"x" * 16, b"y" * 16]), JOINS),
    st.tuples(st.sampled_from(["mark_orphaned", "settle", "commit"]), NAMES, CALLS),
    st.tuples(st.sampled_from(["delete", "reuse", "lift_tombstone", "seal", "add_incidents"]), NAMES),
)


async def step(store, epochs, what, session, *rest):
    """Run one operation. Returns its result without times and epochs."""
    try:
        match what:
            case "begin":
                call, fingerprint, join = rest
                begun = await store.begin(session, call, [b"c1"], fingerprint=fingerprint, replica=f"r {call}", join=join)
                epochs[session, call] = begun.epoch
                return replace(begun, epoch="", created=0.0, duplicate=begun.duplicate and replace(begun.duplicate, since=0.0))
            case "commit" | "settle":
                epoch, entry = epochs.get((session, rest[0]), "none"), build("a", keys=(b"c1",)).entry
                return await (store.commit(session, epoch, rest[0], [entry]) if what == "commit" else store.settle(session, epoch, rest[0]))
            case "reuse":
                return await store.delete(session, reuse=True)
            case "add_incidents":
                return await store.add_incidents(session, [Incident("x")])
            case _:
                return await getattr(store, what)(session, *rest)
    except (SessionSealedError, SessionGoneError, SessionDeletedError) as why:
        return type(why)


async def state(store, session):
    info = await store.session(session)
    return info and (info.sealed, info.turns, info.incidents, [replace(call, since=0.0) for call in info.open_calls])


async def run_steps(stores, steps):
    """Run the same operations on the memory store and, in turns, on clients of one database. All results must be equal."""
    memory, epochs, other_epochs = MemoryStore(), {}, {}
    for session in ("s", "t"):
        await stores[0].delete(session, reuse=True)
    for n, one in enumerate(steps):
        assert await step(stores[n % len(stores)], other_epochs, *one) == await step(memory, epochs, *one), one
        for session in ("s", "t"):
            assert await state(stores[-1 - n % len(stores)], session) == await state(memory, session), one


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(steps=st.lists(STEPS, max_size=25))
def test_operations_on_fakeredis_are_as_in_memory(fake_store, steps):
    async def run():
        server = fakeredis.FakeServer()
        stores = [fake_store(server), fake_store(server)]
        await run_steps(stores, steps)
        for store in stores:
            await store.close()

    asyncio.run(run())


@pytest.mark.redis
@settings(derandomize=True, deadline=None, max_examples=60, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEPS, max_size=40))
def test_operations_on_redis_are_as_in_memory(redis_server, steps):
    async def run():
        stores = [RedisStore(redis_server.url, prefix="lives") for _ in range(2)]
        await run_steps(stores, steps)
        for store in stores:
            await store.close()

    asyncio.run(run())


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(built=trees())
def test_turns_in_fakeredis_are_as_in_memory(fake_store, built):
    async def run():
        store = fake_store()
        await compare(store, built)
        await store.close()

    asyncio.run(run())


@pytest.mark.redis
@settings(derandomize=True, deadline=None, max_examples=60, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(built=trees())
def test_turns_in_redis_are_as_in_memory(redis_server, built):
    async def run():
        store = RedisStore(redis_server.url, prefix="properties")
        await store.open()
        await compare(store, built)
        await store.close()

    asyncio.run(run())

"""Whatever tree of turns is written, Redis gives back what memory gives back."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokencache.core.invariants import audit
from tokencache.core.lineage import sequences
from tokencache.store.conformance import build
from tokencache.store.contract import Entry, Incident
from tokencache.store.memory import MemoryStore
from tokencache.store.redis import RedisStore

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4)
KEYS = st.lists(st.one_of(st.sampled_from([b"c1", b"c2", b"r1", b"r2"]), st.binary(min_size=1, max_size=17)), max_size=3)


@st.composite
def trees(draw):
    """Entries, each on top of nothing, of one before it (continued), or of the first tokens of one before it."""
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
        await store.commit("s", begun.life, one.turn.call, [Entry(one.turn, one.entry.tokens, one.entry.keys)], incidents)


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
    await store.delete("s")
    for one in (memory, store):
        await write(one, built)
    wanted, got = await read(memory, built), await read(store, built)
    for what in wanted:
        assert got[what] == wanted[what], what
    assert [prefix.ids for prefix in got["prefixes"]] == [one.prefix for one in built]
    assert audit(got["turns"], got["tokens"]) == []


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(built=trees())
def test_fakeredis_is_as_memory(fake_store, built):
    async def run():
        store = fake_store()
        await compare(store, built)
        await store.close()

    asyncio.run(run())


@pytest.mark.redis
@settings(derandomize=True, deadline=None, max_examples=60, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(built=trees())
def test_redis_is_as_memory(redis_server, built):
    async def run():
        store = RedisStore(redis_server.url, prefix="properties")
        await store.open()
        await compare(store, built)
        await store.close()

    asyncio.run(run())

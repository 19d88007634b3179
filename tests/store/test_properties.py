"""For random turns and operations, a file and Redis return what the memory store returns."""

import asyncio
import contextlib
import secrets

import fakeredis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.store.conformance import build
from tests.store.conftest import OTHERS
from tests.support.invariants import audit
from tests.support.profiles import examples
from tokencache.core.incidents import Incident
from tokencache.core.lineage import sequences
from tokencache.core.outcome import Outcome
from tokencache.core.session import LabelChanges, Labels, Reward, SessionSettings
from tokencache.store.base import (
    Entry,
    OutcomeConflictError,
    SessionDeletedError,
    SessionExistsError,
    SessionFinishedError,
    SessionGoneError,
    SessionSealedError,
    SettingsChangedError,
    SettingsConflictError,
)
from tokencache.store.file import FileStore
from tokencache.store.memory import MemoryStore
from tokencache.store.redis import RedisStore

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4)
KEYS = st.lists(st.one_of(st.sampled_from([b"c1", b"c2", b"r1", b"r2"]), st.binary(min_size=1, max_size=17)), max_size=3, unique=True)


@contextlib.asynccontextmanager
async def clients(request, kind, number):
    """Several clients of one empty database."""
    match kind:
        case "file":
            url = f"file:{request.getfixturevalue('tmp_path_factory').mktemp('properties')}/sessions.db"
            made = [FileStore(url) for _ in range(number)]
        case "fakeredis":
            server = fakeredis.FakeServer()
            made = [request.getfixturevalue("fake_store")(server) for _ in range(number)]
        case _:
            url, prefix = request.getfixturevalue("redis_server").url, secrets.token_hex(8)
            made = [RedisStore(url, prefix=prefix) for _ in range(number)]
    for store in made:
        await store.open()
    yield made
    for store in made:
        await store.close()


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
SETTINGS = [SessionSettings(), SessionSettings("codex", sampling={"temperature": 1.0}), SessionSettings(tenant="me")]
DELIVERIES = st.sampled_from(["d1", "d2", "d3"])
ERRORS = (
    OutcomeConflictError,
    SessionSealedError,
    SessionFinishedError,
    SessionGoneError,
    SessionDeletedError,
    SessionExistsError,
    SettingsConflictError,
    SettingsChangedError,
)


def operation(name, *args, **options):
    """Calls of a method with drawn arguments, each argument a strategy or a constant, and one of some sets of options."""
    drawn = [arg if isinstance(arg, st.SearchStrategy) else st.just(arg) for arg in args]
    return st.tuples(st.just(name), st.tuples(*drawn), st.sampled_from(options.get("options", [{}])))


STEPS = st.one_of(
    st.tuples(
        st.just("begin"),
        st.tuples(NAMES, CALLS, st.sampled_from([b"", b"x" * 16, b"y" * 16]), JOINS, st.sampled_from(SETTINGS)),
        st.just({}),
    ),
    *(operation(name, NAMES, CALLS) for name in ("mark_orphaned", "settle", "commit")),
    operation("delete", NAMES, options=[{}, {"reuse": True}]),
    *(operation(name, NAMES) for name in ("finish", "settings")),
    operation("add_incidents", NAMES, [Incident("x")]),
    operation("seal", NAMES, options=[{}, {"force": True, "at": 1.5}]),
    operation("define", NAMES, st.sampled_from(SETTINGS), Labels("defined"), options=[{}, {"exist_ok": True}, {"adopt": True}]),
    operation("set_labels", NAMES, st.sampled_from([LabelChanges("g"), LabelChanges(tags=("x", "y")), LabelChanges("", {"a": 1})])),
    operation("add_reward", NAMES, st.sampled_from([Reward(1.0), Reward(None, {"x": 0.5}, at=1.5)])),
    operation("finish", NAMES, st.sampled_from([Outcome("ok"), Outcome("sandbox", "why")])),
    operation("offer", NAMES, st.sampled_from(["e1", "e2"]), 1.0),
    operation("withdraw", NAMES, st.sampled_from(["e1", "e2"])),
    operation("lease", st.sampled_from([("s",), ("t",), ("s", "t")]), DELIVERIES, "consumer", 600),
    operation("extend", DELIVERIES, 600),
    *(operation(name, DELIVERIES) for name in ("release", "remove")),
)


async def step(store, epochs, what, args, options):
    """Run one operation. Returns its result without times and epochs, or its error."""
    try:
        match what:
            case "begin":
                session, call, fingerprint, join, used = args
                begun = await store.begin(
                    session, call, [b"c1"], fingerprint=fingerprint, replica=f"r {call}", join=join, settings=used.digest
                )
                epochs[session, call] = begun.epoch
                return replace(begun, epoch="", age=0.0, duplicate=begun.duplicate and replace(begun.duplicate, since=0.0))
            case "commit" | "settle":
                session, call = args
                entries = [[build("a", keys=(b"c1",)).entry]] if what == "commit" else []
                return await getattr(store, what)(session, epochs.get(args, "none"), call, *entries)
            case _:
                return await getattr(store, what)(*args, **options)
    except ERRORS as why:
        return type(why), getattr(why, "settings", None), getattr(why, "members", None)


async def state(store, session):
    """Return the state of a session, its rewards and the queue, without times and epochs."""
    info, queue = await store.session(session), [replace(entry, until=0.0) for entry in await store.queue()]
    calls = [replace(call, since=0.0) for call in info.open_calls] if info else []
    comparable = info and replace(info, created=0.0, used=0.0, finished=info.finished and 1.0, epoch="", open_calls=tuple(calls))
    return comparable, await store.rewards(session), queue, await store.queue_length()


async def run_steps(stores, steps):
    """Run the same operations on the memory store and, in turns, on clients of one database. All results must be equal."""
    memory, epochs, other_epochs = MemoryStore(), {}, {}
    for n, one in enumerate(steps):
        assert await step(stores[n % len(stores)], other_epochs, *one) == await step(memory, epochs, *one), one
        for session in ("s", "t"):
            assert await state(stores[-1 - n % len(stores)], session) == await state(memory, session), one


@pytest.mark.parametrize("kind", OTHERS)
@settings(max_examples=examples(100))
@given(steps=st.lists(STEPS, max_size=40))
def test_operations_are_as_in_memory(request, kind, steps):
    async def run():
        async with clients(request, kind, 2) as stores:
            await run_steps(stores, steps)

    asyncio.run(run())


@pytest.mark.parametrize("kind", OTHERS)
@settings(max_examples=examples(100))
@given(built=trees())
def test_turns_are_as_in_memory(request, kind, built):
    async def run():
        async with clients(request, kind, 1) as (store,):
            await compare(store, built)

    asyncio.run(run())

"""Checks of isolation, concurrency, long sessions, large turns, and several replicas."""

import asyncio

from tests.store.conformance.support import (
    LONG,
    build,
    continued,
    ids_of,
    info_of,
    name_of,
    raises,
    record,
    same,
)
from tokencache.core.incidents import Incident
from tokencache.core.session import LabelChanges, Labels, Reward, SessionSettings
from tokencache.store.base import (
    Binding,
    RemoveOutcome,
    SessionFinishedError,
    SessionGoneError,
    SessionSealedError,
    SettingsChangedError,
    Store,
)


async def check_isolation(store: Store) -> None:
    """Sessions share nothing: neither lookup keys, nor turns of the same id, nor their deletion."""
    one, other = name_of("one"), name_of("other")
    a, b = build("t", keys=(b"c",)), build("t", tail=(5,), keys=(b"c", b"r"))
    await record(store, one, a)
    epoch = await record(store, other, b)
    same((await store.turns(one), await store.turns(other)), ([a.turn], [b.turn]), "turns")
    same([(await store.prefix(one, "t")).ids, (await store.prefix(other, "t")).ids], [a.prefix, b.prefix], "prefixes")
    same(ids_of(await store.find(one, [b"c", b"r"])), [["t"], []], "hits")
    async with raises(SessionGoneError, "a commit with the epoch of another session"):
        await store.commit(one, epoch, "k", [build("u").entry])
    await store.delete(one)
    same(await store.turns(other), [b.turn], "turns of the remaining session")


async def check_concurrency(store: Store) -> None:
    """Concurrent calls share one epoch, and every commit is recorded, all of them continuations of one turn."""
    session, many = name_of("concurrent"), 25
    root = build("root", keys=(b"croot",))
    children = [build(f"t{n}", root, tail=(n,), keys=(b"csame", b"r%d" % n), call=f"k{n}") for n in range(many)]
    lives = {begun.epoch for begun in await asyncio.gather(*(store.begin(session, f"k{n}", []) for n in range(many)))}
    same(len(lives), 1, "epochs")
    epoch = lives.pop()
    await store.begin(session, "k", [])
    await store.commit(session, epoch, "k", [root.entry])
    await asyncio.gather(*(store.commit(session, epoch, c.turn.call, [c.entry], [Incident(c.turn.id)]) for c in children))
    names = sorted(child.turn.id for child in children)
    recorded = [turn.id for turn in await store.turns(session)]
    same(sorted(recorded[1:]), names, "turns")
    found = await store.find(session, [b"csame", *(b"r%d" % n for n in range(many))])
    same([hit.turn.id for hit in found[0]], recorded[1:], "turns under a shared key, in the order recorded")
    same(ids_of(found[1:]), [[f"t{n}"] for n in range(many)], "turns under keys that differ")
    same(await continued(store, session, b"croot"), [True], "continued")
    info = await info_of(store, session)
    same((info.turns, info.open_calls), (many + 1, ()), "state")
    same(sorted(incident.kind for incident in info.incidents), names, "incidents")
    for child in children:
        same((await store.prefix(session, child.turn.id)).ids, child.prefix, "prefix")


async def check_long_session(store: Store) -> None:
    """A long session with one growing history: each token is stored once, and every turn is found."""
    session, last, built = name_of("long"), None, []
    for n in range(LONG):
        last = build(f"t{n}", last, tail=range(n, n + 40), reply=range(n, n + 20), keys=(b"c%d" % n, b"r%d" % n), call=f"k{n}")
        built.append(last)
    await record(store, session, *built)
    turns = await store.turns(session)
    same([turn.id for turn in turns], [one.turn.id for one in built], "turns in order")
    tokens = await store.tokens(session, [turn.id for turn in turns])
    stored = sum(len(own.delta) + len(own.completion) for own in tokens.values())
    same(stored, len(built[-1].prefix), "bytes of ids stored for all turns, compared with the last prefix")
    for one in (built[0], built[LONG // 2], built[-1]):
        same((await store.prefix(session, one.turn.id)).ids, one.prefix, f"prefix of {one.turn.id}")
    keys = [key for n in range(LONG - 1, -1, -1) for key in (b"c%d" % n, b"r%d" % n)]
    same(ids_of(await store.find(session, keys)), [[f"t{n}"] for n in range(LONG - 1, -1, -1) for _ in "cr"], "all keys")
    missing = [b"c-%d" % n for n in range(LONG)]
    begun = await store.begin(session, "k", [*missing, *keys])
    same(ids_of(begun.hits), [[]] * LONG + [[f"t{LONG - 1}"]] + [[]] * (2 * LONG - 1), "the deepest key")
    await store.add_incidents(session, [Incident(str(n)) for n in range(3 * LONG)])
    same([incident.kind for incident in (await info_of(store, session)).incidents], [str(n) for n in range(3 * LONG)], "incidents")


async def check_large_turn(store: Store) -> None:
    """A turn of a hundred thousand tokens is stored and read like any other."""
    session = name_of("large")
    one = build("a", tail=range(100_000), reply=range(30_000))
    two = build("b", one, tail=range(10))
    await record(store, session, one, two)
    same((await store.prefix(session, "b")).ids == two.prefix, True, "prefix")
    same((await store.tokens(session, ["a"]))["a"] == one.entry.tokens, True, "tokens")


async def check_replicas(store: Store, other: Store) -> None:
    """Two stores over one database: each reads at once what the other has written, and both may write."""
    session = name_of("replicas")
    a = build("a", keys=(b"ca",))
    b, c = build("b", a, keys=(b"cb",), call="kb"), build("c", a, tail=(9,), keys=(b"cb",), call="kc")
    epoch = (await store.begin(session, "call", [])).epoch
    same((await other.begin(session, "kb", [])).epoch, epoch, "the epoch, seen by the other store")
    await other.commit(session, epoch, "call", [a.entry], documents={"d": b"one"})
    same(ids_of((await store.begin(session, "kc", [b"ca"])).hits), [["a"]], "hits of what the other store has written")
    await asyncio.gather(store.commit(session, epoch, "kb", [b.entry]), other.commit(session, epoch, "kc", [c.entry]))
    for reader in (store, other):
        same({turn.id for turn in await reader.turns(session)}, {"a", "b", "c"}, "turns")
        same((await reader.prefix(session, "c")).ids, c.prefix, "prefix")
        same(await continued(reader, session, b"ca"), [True], "continued")
    await store.bind_key(session, Binding(session))
    same(await other.binding_of_key(session), Binding(session), "a key bound by the other store")
    same(await other.documents(session, ["d"]), [b"one"], "a document stored by the other store")
    await other.add_reward(session, Reward(1.0))
    await other.set_labels(session, LabelChanges("g"))
    info = await info_of(store, session)
    same((info.reward, info.labels.group), (Reward(1.0), "g"), "what the other store noted")
    await other.define(f"{session}-2", SessionSettings("h"), Labels())
    async with raises(SettingsChangedError, "begin without the settings that the other store defined"):
        await store.begin(f"{session}-2", "k", [])
    await other.finish(session)
    async with raises(SessionFinishedError, "begin in a session that the other store finished"):
        await store.begin(session, "k", [])
    await other.offer(session, epoch, 1.0)
    same(await store.lease([session], session, "one", 600), True, "lease of a session that the other store offered")
    same(await other.lease([session], f"{session}-2", "two", 600), False, "lease of a session that the other store's consumer has")
    same(await store.remove(session), RemoveOutcome.REMOVED, "remove of a delivery")
    same(await other.remove(session), RemoveOutcome.REPEATED, "remove of a delivery that the other store removed")
    await other.seal(session, force=True)
    async with raises(SessionSealedError, "begin in a session that the other store sealed"):
        await store.begin(session, "k", [])
    await other.delete(session)
    async with raises(SessionGoneError, "commit into a session that the other store deleted"):
        await store.commit(session, epoch, "k", [build("d").entry])

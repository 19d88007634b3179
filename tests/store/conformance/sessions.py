"""Checks of calls, incidents, documents, session names, API keys and engine entries and announced weights."""

import secrets

import msgspec

from tests.store.conformance.support import (
    UNUSUAL_NAMES,
    build,
    ids_of,
    info_of,
    name_of,
    open_calls,
    record,
    same,
    true,
)
from tokencache.core.incidents import Incident
from tokencache.store.base import LEARNED, Binding, EngineEntry, OpenCall, Store


async def check_ping(store: Store) -> None:
    """An open store can be pinged."""
    await store.ping()


async def check_begin(store: Store) -> None:
    """A call that begins creates the session and stays open. Reading creates nothing."""
    session = name_of("begin")
    same(await store.session(session), None, "a missing session")
    same(await store.find(session, [b"c1", b"r1"]), [[], []], "hits in it")
    same(await store.turns(session), [], "its turns")
    same(await store.session(session), None, "the session after reading")
    begun = await store.begin(session, "k1", [b"c1", b"r1"])
    true(begun.epoch, "an epoch has an id")
    same(begun.hits, [[], []], "hits of unknown keys, aligned")
    same((await store.begin(session, "k2", [])).hits, [], "hits of no keys")
    same((await store.begin(session, "k3", [])).epoch, begun.epoch, "the epoch at a later call")
    info = await store.session(session)
    true(info is not None, "the session is there")
    if info is not None:
        same((info.id, info.sealed, info.turns, info.incidents), (session, False, 0, ()), "its state")
        true(0 < info.created <= info.used, "times in order")


async def check_open_calls(store: Store) -> None:
    """A call is open from `begin` to `commit` or `settle`, and only once even if it began twice."""
    session, unusual = name_of("calls"), "call \r\n00012}\x00☕"
    epoch = (await store.begin(session, "k1", [])).epoch
    await store.begin(session, unusual, [])
    await store.begin(session, "k3", [])
    await store.begin(session, "k1", [])
    same(await open_calls(store, session), {"k1", unusual, "k3"}, "open calls")
    calls = (await info_of(store, session)).open_calls
    same(len(calls), 3, "number of open calls")
    true(all(isinstance(call, OpenCall) and call.since > 0 for call in calls), "time of each open call")
    await store.commit(session, epoch, unusual, [build("t1", call=unusual).entry])
    same(await open_calls(store, session), {"k1", "k3"}, "after a commit")
    await store.settle(session, epoch, "k1")
    await store.settle(session, epoch, "never begun")
    same(await open_calls(store, session), {"k3"}, "after a settle")
    await store.settle(session, epoch, "k3")
    same(await open_calls(store, session), set(), "after all")
    same((await info_of(store, session)).turns, 1, "turns")


async def check_incidents(store: Store) -> None:
    """Incidents are read as they were written, in order, whichever method wrote them. `add_incidents` creates a missing session."""
    session = name_of("incidents")
    incidents = [Incident("store-error", "why", True, "k1", "t1", 1.5), Incident("x"), Incident("x"), Incident("naïve ☕", "\x00" * 300)]
    await store.add_incidents(session, incidents[:2])
    same((await info_of(store, session)).incidents, tuple(incidents[:2]), "incidents after add_incidents")
    same(await open_calls(store, session), set(), "open calls after add_incidents")
    epoch = (await store.begin(session, "k", [])).epoch
    await store.settle(session, epoch, "k", incidents[2:3])
    await store.begin(session, "k", [])
    await store.commit(session, epoch, "k", [build("a").entry], incidents[3:])
    await store.add_incidents(session, incidents)
    await store.add_incidents(session, [])
    same((await info_of(store, session)).incidents, (*incidents, *incidents), "incidents in the end")
    empty = name_of("empty")
    await store.add_incidents(empty, [])
    same((await info_of(store, empty)).turns, 0, "turns of a session that an empty add_incidents created")


async def check_keys(store: Store) -> None:
    """An API key has its last binding, whether or not the session exists."""
    key, session = name_of("key"), name_of("bound")
    same(await store.binding_of_key(key), None, "an unknown key")
    whole = Binding("naïve {}", harness="codex", models={"gpt-*": "ü", "*": "x"})
    await store.bind_key(key, Binding(session))
    await store.bind_key(key + "2", whole)
    same(await store.binding_of_key(key), Binding(session), "bound")
    same(await store.binding_of_key(key + "2"), whole, "another")
    same(await store.session(session), None, "binding creates no session")
    await store.bind_key(key, Binding(session + "2"))
    same(await store.binding_of_key(key), Binding(session + "2"), "bound again")
    same((await store.unbind_key(key), await store.unbind_key(key)), (True, False), "revoked, once")
    same(await store.binding_of_key(key), None, "a key that was revoked")
    same(await store.binding_of_key(key + "2"), whole, "another after that")
    await store.bind_key(key, Binding(session))
    same(await store.binding_of_key(key), Binding(session), "bound after it was revoked")


async def check_documents(store: Store) -> None:
    """Documents are stored with a call's turns, read by name in their session, replaced, deleted, and deleted with the session."""
    session, other = name_of("documents"), name_of("others")
    same(await store.documents(session, ["a", "b"]), [None, None], "documents of a missing session")
    same(await store.delete_document(session, "a"), False, "delete_document in a missing session")
    same(await store.session(session), None, "the session after reading")
    epoch = (await store.begin(session, "k1", [])).epoch
    await store.commit(session, epoch, "k1", [build("t1").entry], [Incident("x")], documents={"a": b"1\x00\xff", "life": b"", "ü {}": b"3"})
    await record(store, other, build("t1"))
    same(await store.documents(session, ["ü {}", "b", "a", "life"]), [b"3", None, b"1\x00\xff", b""], "documents, aligned")
    same(await store.documents(session, []), [], "no names")
    same(await store.documents(other, ["a"]), [None], "in another session")
    info = await info_of(store, session)
    same((info.turns, [i.kind for i in info.incidents]), (1, ["x"]), "turns and incidents committed with them")
    await store.begin(session, "k2", [])
    await store.commit(session, epoch, "k2", [build("t2").entry], documents={"a": b"2"})
    same(await store.documents(session, ["a"]), [b"2"], "replaced")
    same((await store.delete_document(session, "a"), await store.delete_document(session, "a")), (True, False), "deleted, once")
    same(await store.documents(session, ["a", "life"]), [None, b""], "after that")
    await store.delete(session)
    same(await store.documents(session, ["life"]), [None], "after the session")


async def check_names(store: Store) -> None:
    """Sessions may have any name, do not mix, and are listed by their names."""
    mark = secrets.token_hex(4)
    names = [form for unusual in UNUSUAL_NAMES for form in (unusual + mark, mark + unusual)]
    for n, name in enumerate(names):
        await record(store, name, build(f"t{n}", keys=(b"c",)))
    for n, name in enumerate(names):
        same(ids_of(await store.find(name, [b"c"])), [[f"t{n}"]], f"turns in {name!r}")
    same(sorted([info.id async for info in store.sessions() if mark in info.id]), sorted(names), "sessions listed")
    for name in names[::2]:
        await store.delete(name)
    same(sorted([info.id async for info in store.sessions() if mark in info.id]), sorted(names[1::2]), "sessions left")
    for name in names:
        await store.delete(name)


async def check_sessions(store: Store) -> None:
    """Every session is listed once, with the state that `session` returns."""
    mark = name_of("list")
    names = [f"{mark}-{n}" for n in range(60)]
    for n, name in enumerate(names):
        begun = await store.begin(name, "k", [])
        if n % 2:
            await store.commit(name, begun.epoch, "k", [build("a").entry], [Incident("x")])
        if n % 3 == 0:
            await store.seal(name, force=True)
    listed = [info async for info in store.sessions() if info.id.startswith(mark)]
    same(sorted(info.id for info in listed), sorted(names), "sessions listed")
    for info in listed:
        same(info, await store.session(info.id), "a listed session")
    for name in names:
        await store.delete(name)
    same([info.id async for info in store.sessions() if info.id.startswith(mark)], [], "sessions after deleting them")


async def check_engines(store: Store) -> None:
    """Engine entries are stored by URL and replica, replaced, removed, and read all at once."""
    url, other = f"http://{name_of('engine')}:8000", f"http://{name_of('engine')}:8000/p%20q"
    wanted = EngineEntry(url, at=1.5)
    loads = ((url, 2**40), (other, 0))
    reports = [EngineEntry(url, "draining", 2.0, replica, calls, loads=loads) for replica, calls in (("r1", 3), ("r2", 0))]
    others = [EngineEntry(other, "removed", 3.0), EngineEntry(other, at=2.5, replica=LEARNED, stops=(("m", (5, 151645)),))]
    for entry in (wanted, *reports, *others):
        await store.put_engine(entry)
    same(await _engines(store, url, other), {wanted, *reports, *others}, "entries")
    await store.put_engine(EngineEntry(url, "draining", 4.0))
    await store.drop_engine(url, "r1")
    for replica in ("", "", LEARNED):
        await store.drop_engine(other, replica)
    same(await _engines(store, url, other), {EngineEntry(url, "draining", 4.0), reports[1]}, "replaced and dropped")
    await store.drop_engine(url)
    await store.drop_engine(url, "r2")
    same(await _engines(store, url, other), set(), "after all are dropped")


async def check_weights(store: Store) -> None:
    """What is announced about weights is replaced only by a writer that has read the last state. What the store holds is kept."""
    before = await store.weights()
    following = msgspec.structs.replace(before, revision=before.revision + 1)
    true(await store.replace_weights(following), "the next state replaces the one before")
    same(await store.weights(), following, "the state read back")
    true(await store.replace_weights(following), "a repeated replacement")
    late = msgspec.structs.replace(following, last=following.last + 1)
    true(not await store.replace_weights(late), "a state of a writer that was late is refused")
    ahead = msgspec.structs.replace(following, revision=following.revision + 2)
    true(not await store.replace_weights(ahead), "a state that skips a revision is refused")
    same(await store.weights(), following, "the state after refused writes")
    number = following.last + 1
    announced = following.announce(f"v{number}", 1.5)
    true(await store.replace_weights(announced), "an announcement is stored")
    same(await store.weights(), announced, "an announcement read back")
    restored = msgspec.structs.replace(before, revision=announced.revision + 1)
    true(await store.replace_weights(restored), "the former state is stored again")


async def _engines(store: Store, *urls: str) -> set[EngineEntry]:
    return {entry for entry in await store.engines() if entry.url in urls}

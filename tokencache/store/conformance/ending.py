"""How sessions end: sealed, deleted, deleted and begun anew, and calls that come too late."""

from tokencache.core.incidents import Incident
from tokencache.store.base import SessionDeletedError, SessionGoneError, SessionSealedError, Store
from tokencache.store.conformance.kit import build, ids_of, info_of, name_of, open_calls, raises, record, same, true


async def check_seal(store: Store) -> None:
    """A sealed session takes no more calls; open ones may still commit or settle."""
    session = name_of("seal")
    same(await store.seal(session), False, "seal of nothing")
    same(await store.session(session), None, "sealing creates nothing")
    epoch = (await store.begin(session, "k1", [], fingerprint=b"same")).epoch
    await store.begin(session, "k2", [])
    same(await store.seal(session), True, "seal")
    same(await store.seal(session), True, "seal again")
    async with raises(SessionSealedError, "begin in a sealed session"):
        await store.begin(session, "k3", [b"c"])
    async with raises(SessionSealedError, "joining a call of a sealed session"):
        await store.begin(session, "k3", [], fingerprint=b"same", join="any")
    same(await open_calls(store, session), {"k1", "k2"}, "a refused call was not opened")
    await store.commit(session, epoch, "k1", [build("a", keys=(b"ca",)).entry])
    await store.settle(session, epoch, "k2", [Incident("x")])
    await store.add_incidents(session, [Incident("y")])
    info = await info_of(store, session)
    same((info.sealed, info.turns, info.open_calls), (True, 1, ()), "state")
    same([incident.kind for incident in info.incidents], ["x", "y"], "incidents")
    same(ids_of(await store.find(session, [b"ca"])), [["a"]], "what a late call recorded")


async def _late(store: Store, session: str, epoch: str) -> None:
    """What a call of a deleted session may still try."""
    async with raises(SessionGoneError, "late commit"):
        await store.commit(session, epoch, "late", [build("b", keys=(b"cb",)).entry], [Incident("late")], documents={"d": b"1"})
    async with raises(SessionGoneError, "late settle"):
        await store.settle(session, epoch, "late", [Incident("late")])
    same(await store.mark_orphaned(session, "late"), False, "late linger")


async def check_delete(store: Store) -> None:
    """A deleted session is forgotten, and nothing that comes late brings it back: no commit, no note, no call."""
    session = name_of("delete")
    same(await store.delete(session), False, "delete of nothing")
    old = await record(store, session, build("a", keys=(b"ca",)))
    await store.begin(session, "late", [])
    await store.seal(session)
    same(await store.delete(session), True, "delete")
    same(await store.delete(session), False, "delete again")
    await _late(store, session, old)
    await store.add_incidents(session, [Incident("late", hole=True)])
    for join in ("never", "any"):
        async with raises(SessionDeletedError, "a late call"):
            await store.begin(session, "late", [b"ca"], fingerprint=b"same", join=join)
    same(await store.seal(session), False, "seal of a deleted session")
    same(await store.session(session), None, "what came late brings nothing back")
    same((await store.turns(session), await store.find(session, [b"ca", b"cb"])), ([], [[], []]), "what is left")
    same([info.id async for info in store.sessions() if info.id == session], [], "it is not listed")
    same(await store.documents(session, ["d"]), [None], "its documents")
    async with raises(KeyError, "prefix of a deleted turn"):
        await store.prefix(session, "a")


async def check_reuse(store: Store) -> None:
    """A name may be used again where that was said; the calls of its former life still write nothing."""
    at_once, later, twice = name_of("at-once"), name_of("lifted"), name_of("twice")
    for session in (at_once, later, twice):
        old = await record(store, session, build("a", keys=(b"ca",)))
        await store.begin(session, "late", [], fingerprint=b"same")
        same(await store.delete(session, reuse=session == at_once), True, "delete")
        if session == later:
            await store.lift_tombstone(session)
            await store.lift_tombstone(session)
        if session == twice:
            same(await store.delete(session, reuse=True), False, "delete of what was deleted, to use its name")
        await _late(store, session, old)
        try:
            begun = await store.begin(session, "k", [b"ca"], fingerprint=b"same", join="any")
        except SessionDeletedError:
            raise AssertionError(f"the name {session} can be used again: it is taken for deleted") from None
        true(begun.epoch != old, "a new life")
        same((begun.hits, begun.duplicate, begun.calls, begun.tokens), ([[]], None, 1, 0), "it knows nothing of the old one")
        await _late(store, session, old)
        info = await info_of(store, session)
        same((info.sealed, info.turns, info.incidents), (False, 0, ()), "state")
        same(await open_calls(store, session), {"k"}, "open calls")
        await store.lift_tombstone(session)
        same(await open_calls(store, session), {"k"}, "open calls of a session that lives, its name lifted")

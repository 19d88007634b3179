"""Checks of sealed and deleted sessions, reused names, and late calls."""

from functools import partial

from tests.store.conformance.support import build, ids_of, info_of, name_of, open_calls, raises, record, same, true
from tokencache.core.incidents import Incident
from tokencache.store.base import SealOutcome, SessionDeletedError, SessionGoneError, SessionSealedError, Store


async def check_seal(store: Store) -> None:
    """A sealed session accepts no more calls. Open calls may still commit or settle."""
    session = name_of("seal")
    same(await store.seal(session, force=True), SealOutcome.MISSING, "seal of a missing session")
    same(await store.session(session), None, "sealing creates nothing")
    epoch = (await store.begin(session, "k1", [], fingerprint=b"same")).epoch
    await store.begin(session, "k2", [])
    same(await store.seal(session, force=True), SealOutcome.SEALED, "seal")
    same(await store.seal(session, force=True), SealOutcome.SEALED, "seal again")
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
    same([incident.kind for incident in info.incidents], ["sealed-early", "x", "y"], "incidents")
    same(ids_of(await store.find(session, [b"ca"])), [["a"]], "turn that a late call recorded")


async def _late(store: Store, session: str, epoch: str, *, deleted: bool = True) -> None:
    """Check that a call of a deleted session can write nothing, and that its errors show whether the epoch was deleted."""
    for write in (
        partial(store.commit, session, epoch, "late", [build("b", keys=(b"cb",)).entry], [Incident("late")], documents={"d": b"1"}),
        partial(store.settle, session, epoch, "late", [Incident("late")]),
    ):
        try:
            await write()
        except SessionGoneError as why:
            same((type(why), why.deleted), (SessionGoneError, deleted), "the error of a late write, and whether its epoch was deleted")
        else:
            raise AssertionError("a late commit or settle raised no SessionGoneError")
    same(await store.mark_orphaned(session, "late"), False, "late mark_orphaned")


async def check_delete(store: Store) -> None:
    """Nothing creates a deleted session again: no late commit, no incidents, no call."""
    session = name_of("delete")
    same(await store.delete(session), False, "delete of a missing session")
    old = await record(store, session, build("a", keys=(b"ca",)))
    await store.begin(session, "late", [])
    await store.seal(session, force=True)
    same(await store.delete(session), True, "delete")
    same(await store.delete(session), False, "delete again")
    await _late(store, session, old)
    await store.add_incidents(session, [Incident("late", hole=True)])
    for join in ("never", "any"):
        async with raises(SessionDeletedError, "a late call"):
            await store.begin(session, "late", [b"ca"], fingerprint=b"same", join=join)
    same(await store.seal(session, force=True), SealOutcome.MISSING, "seal of a deleted session")
    same(await store.session(session), None, "the session, after all late writes")
    same((await store.turns(session), await store.find(session, [b"ca", b"cb"])), ([], [[], []]), "turns and hits that remain")
    same([info.id async for info in store.sessions() if info.id == session], [], "sessions listed")
    same(await store.documents(session, ["d"]), [None], "its documents")
    async with raises(KeyError, "prefix of a deleted turn"):
        await store.prefix(session, "a")


async def check_reuse(store: Store) -> None:
    """The name of a deleted session can be used again on request. Calls of the former epoch still write nothing."""
    at_once, later = name_of("at-once"), name_of("later")
    for session in (at_once, later):
        old = await record(store, session, build("a", keys=(b"ca",)))
        await store.begin(session, "late", [], fingerprint=b"same")
        same(await store.delete(session, reuse=session == at_once), True, "delete")
        for _ in range(2 if session == later else 0):
            same(await store.delete(session, reuse=True), False, "delete of a deleted session, to use its name again")
        await _late(store, session, old)
        try:
            begun = await store.begin(session, "k", [b"ca"], fingerprint=b"same", join="any")
        except SessionDeletedError:
            raise AssertionError(f"the name {session} can be used again, but the store refuses it as deleted") from None
        true(begun.epoch != old, "a new epoch")
        same((begun.hits, begun.duplicate, begun.calls, begun.tokens), ([[]], None, 1, 0), "begin in the new epoch")
        await _late(store, session, old)
        await _late(store, session, "another", deleted=False)
        info = await info_of(store, session)
        same((info.sealed, info.turns, info.incidents), (False, 0, ()), "state")
        same(await open_calls(store, session), {"k"}, "open calls")

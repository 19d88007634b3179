"""Checks of in-flight duplicates, heartbeats of replicas, and the shared secret."""

import asyncio
import secrets

from tests.store.conformance.support import EVERY_BYTE, build, ids_of, info_of, name_of, open_calls, record, same, true
from tokencache.store.base import OpenCall, Store

ASKED, OTHER = EVERY_BYTE[:16], EVERY_BYTE[-16:]


async def _call(store: Store, session: str, call: str) -> OpenCall:
    held: dict[str, OpenCall] = {one.call: one for one in (await info_of(store, session)).open_calls}
    return held[call]


async def check_duplicates(store: Store) -> None:
    """A call may join an open call with the same fingerprint. Then nothing is opened, and that call is marked as wanted."""
    session = name_of("twins")
    await record(store, session, build("a", keys=(b"ca",)))
    first = await store.begin(session, "k1", [], fingerprint=ASKED, replica="naïve }{", join="any")
    same((first.duplicate, first.calls), (None, 2), "no call to join")
    held = await _call(store, session, "k1")
    same((held.fingerprint, held.replica, held.orphaned, held.wanted), (ASKED, "naïve }{", False, False), "an open call")
    for join in ("never", "orphaned"):
        begun = await store.begin(session, f"k-{join}", [], fingerprint=OTHER if join == "orphaned" else ASKED, join=join)
        same(begun.duplicate, None, f"a call that may join {join}")
    same(
        (await store.begin(session, "k2", [], fingerprint=ASKED, join="orphaned")).duplicate, None, "a call whose client is still connected"
    )
    before = await open_calls(store, session)
    duplicate = await store.begin(session, "k3", [b"cx", b"ca"], fingerprint=ASKED, join="any")
    same((duplicate.epoch, duplicate.calls), (first.epoch, 5), "the epoch, and no call counted")
    same(ids_of(duplicate.hits), [[], ["a"]], "hits of a call that joins")
    same(duplicate.duplicate, OpenCall("k1", held.since, ASKED, "naïve }{", False, True), "the joined call, now wanted")
    same(await _call(store, session, "k1"), duplicate.duplicate, "the joined call, as the session reports it")
    same(await open_calls(store, session), before, "nothing was opened")
    same(
        (await store.begin(session, "k4", [], fingerprint=OTHER, join="any")).duplicate,
        await _call(store, session, "k-orphaned"),
        "another fingerprint",
    )
    same((await store.begin(session, "k5", [], join="any")).duplicate, None, "a call without a fingerprint joins none")
    same((await store.begin(session, "k6", [], join="any")).duplicate, None, "a call without a fingerprint is not joined")
    await store.settle(session, first.epoch, "k1")
    await store.settle(session, first.epoch, "k2")
    await store.settle(session, first.epoch, "k-never")
    same((await store.begin(session, "k7", [], fingerprint=ASKED, join="any")).duplicate, None, "a call that has ended is not joined")


async def check_orphaned_calls(store: Store) -> None:
    """An orphaned call may be joined with `join="orphaned"`. `mark_orphaned` returns whether another call wants its reply."""
    session = name_of("linger")
    same(await store.mark_orphaned(session, "k"), False, "in no session")
    same(await store.session(session), None, "mark_orphaned creates nothing")
    begun = await store.begin(session, "k", [], fingerprint=ASKED, replica="r")
    same(await store.mark_orphaned(session, "other"), False, "a call that never began")
    same(await store.mark_orphaned(session, "k"), False, "no call wants it")
    since = (await _call(store, session, "k")).since
    same(await _call(store, session, "k"), OpenCall("k", since, ASKED, "r", True, False), "an orphaned call")
    duplicate = (await store.begin(session, "k2", [], fingerprint=ASKED, join="orphaned")).duplicate
    same(duplicate, OpenCall("k", since, ASKED, "r", True, True), "joined")
    same(await store.mark_orphaned(session, "k"), True, "it is wanted")
    same(await store.mark_orphaned(session, "k"), False, "not marked again since")
    await store.mark_wanted(session, "k")
    same(await _call(store, session, "k"), duplicate, "wanted again")
    same(await store.mark_orphaned(session, "k"), True, "marked as wanted again")
    await store.commit(session, begun.epoch, "k", [build("a").entry])
    same(await store.mark_orphaned(session, "k"), False, "a call that has ended")
    same(await open_calls(store, session), set(), "open calls")


async def check_given_up_calls(store: Store) -> None:
    """After a waiting call gives up, no further call joins the call that it waited for. Other waiting calls may mark it as wanted."""
    session = name_of("given up")
    await store.mark_wanted(session, "k")
    same(await store.session(session), None, "mark_wanted creates nothing")
    begun = await store.begin(session, "k", [], fingerprint=ASKED, replica="r")
    await store.mark_wanted(session, "other")
    same((await store.begin(session, "k2", [], fingerprint=ASKED, join="any")).duplicate is None, False, "joined")
    await store.mark_wanted(session, "k", given_up=True)
    await store.mark_wanted(session, "k", given_up=True)
    held = await _call(store, session, "k")
    same((held.wanted, held.given_up), (True, True), "given up by one, wanted by another")
    same((await store.begin(session, "k3", [], fingerprint=ASKED, join="any")).duplicate, None, "a later call opens itself")
    same(await store.mark_orphaned(session, "k"), True, "the other call still waits")
    await store.mark_wanted(session, "k")
    same(await _call(store, session, "k"), OpenCall("k", held.since, ASKED, "r", True, True, True), "marked as wanted again")
    same(await store.mark_orphaned(session, "k"), True, "wanted")
    same(await store.mark_orphaned(session, "k"), False, "not wanted any more")
    same((await _call(store, session, "k")).given_up, True, "given up remains")
    await store.settle(session, begun.epoch, "k")
    same(await open_calls(store, session), {"k3"}, "open calls")


async def check_begin_twice(store: Store) -> None:
    """A `begin` that is sent twice opens one call, and counts it once."""
    session = name_of("own")
    await store.begin(session, "k", [], fingerprint=ASKED, join="any")
    begun = await store.begin(session, "k", [], fingerprint=ASKED, join="any")
    same((begun.duplicate, begun.calls), (None, 1), "begun again")
    same(await open_calls(store, session), {"k"}, "open calls")


async def check_counts(store: Store) -> None:
    """`begin` returns how many calls began, how many tokens were sampled, and how old the session is."""
    session = name_of("figures")
    first = await store.begin(session, "k1", [])
    same((first.calls, first.tokens), (1, 0), "at the first call")
    await store.commit(session, first.epoch, "k1", [build("a", reply=range(5)).entry, build("b", reply=range(7)).entry])
    second = await store.begin(session, "k2", [])
    same((second.calls, second.tokens), (2, 12), "at the second")
    await store.settle(session, first.epoch, "k2")
    await store.begin(session, "k3", [], fingerprint=ASKED)
    third = await store.begin(session, "k4", [], fingerprint=ASKED, join="any")
    same((third.calls, third.tokens), (3, 12), "at one that joins another")
    true(0 <= first.age <= second.age <= third.age, "ages in order")


async def check_concurrent_duplicates(store: Store) -> None:
    """Of many concurrent calls with one fingerprint, one is opened and all others join it."""
    session, many = name_of("at-once"), 25
    begun = await asyncio.gather(*(store.begin(session, f"k{n}", [], fingerprint=ASKED, join="any") for n in range(many)))
    opened = await open_calls(store, session)
    same(len(opened), 1, "calls opened")
    same({one.duplicate.call for one in begun if one.duplicate}, opened, "calls joined")
    same(sum(one.duplicate is None for one in begun), 1, "calls that joined none")
    same({one.calls for one in begun}, {1}, "calls counted")


async def check_heartbeats(store: Store) -> None:
    """A replica is alive for the time that its last heartbeat sets."""
    lives, forgotten, never = (name_of(f"replica {n}}}") for n in range(3))
    await store.heartbeat(lives, 60)
    await store.heartbeat(forgotten, 60)
    same(await store.live_replicas([never, forgotten, lives]), {lives, forgotten}, "live replicas")
    await store.heartbeat(forgotten, 0.001)
    for _ in range(200):
        if await store.live_replicas([forgotten]) == set():
            break
        await asyncio.sleep(0.01)
    same(await store.live_replicas([lives, forgotten]), {lives}, "live replicas after one heartbeat expired")
    same(await store.live_replicas([]), set(), "no replicas requested")


async def check_secret(store: Store) -> None:
    """The secret of the deployment is random and does not change."""
    secret = await store.secret()
    same(len(secret), 32, "bytes")
    same(await store.secret(), secret, "the secret, read again")
    same(await store.secret(secrets.token_bytes(32)), secret, "the secret, for a replica that knows another")
    true(secret != secrets.token_bytes(32), "a random secret")

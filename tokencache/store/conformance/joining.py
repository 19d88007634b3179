"""How calls meet: those that ask for the same while one is in flight; what replicas tell each other."""

import asyncio
import secrets

from tokencache.store.base import OpenCall, Store
from tokencache.store.conformance.kit import EVERY_BYTE, build, ids_of, info_of, name_of, open_calls, record, same, true

ASKED, OTHER = EVERY_BYTE[:16], EVERY_BYTE[-16:]


async def _call(store: Store, session: str, call: str) -> OpenCall:
    held: dict[str, OpenCall] = {one.call: one for one in (await info_of(store, session)).open_calls}
    return held[call]


async def check_twins(store: Store) -> None:
    """A call may join one in flight that asks for the same: then nothing is opened, and that one knows that it is wanted."""
    session = name_of("twins")
    await record(store, session, build("a", keys=(b"ca",)))
    first = await store.begin(session, "k1", [], asked=ASKED, replica="naïve }{", join="any")
    same((first.twin, first.calls), (None, 2), "nobody to join")
    held = await _call(store, session, "k1")
    same((held.asked, held.replica, held.left, held.wanted), (ASKED, "naïve }{", False, False), "an open call")
    for join in ("never", "left"):
        begun = await store.begin(session, f"k-{join}", [], asked=OTHER if join == "left" else ASKED, join=join)
        same(begun.twin, None, f"a call that may join {join}")
    same((await store.begin(session, "k2", [], asked=ASKED, join="left")).twin, None, "one whose asker is still there")
    before = await open_calls(store, session)
    twin = await store.begin(session, "k3", [b"cx", b"ca"], asked=ASKED, join="any")
    same((twin.life, twin.calls), (first.life, 5), "the life, and no call counted")
    same(ids_of(twin.hits), [[], ["a"]], "hits of a call that joins")
    same(twin.twin, OpenCall("k1", held.since, ASKED, "naïve }{", False, True), "the twin, wanted now")
    same(await _call(store, session, "k1"), twin.twin, "the twin, as the session tells it")
    same(await open_calls(store, session), before, "nothing was opened")
    same((await store.begin(session, "k4", [], asked=OTHER, join="any")).twin, await _call(store, session, "k-left"), "another imprint")
    same((await store.begin(session, "k5", [], join="any")).twin, None, "a call without an imprint joins nobody")
    same((await store.begin(session, "k6", [], join="any")).twin, None, "nor is it joined")
    await store.settle(session, first.life, "k1")
    await store.settle(session, first.life, "k2")
    await store.settle(session, first.life, "k-never")
    same((await store.begin(session, "k7", [], asked=ASKED, join="any")).twin, None, "a call that has ended is not joined")


async def check_lingering(store: Store) -> None:
    """A call whose asker has left goes on if another wants its reply, and may be joined by one that joins only such."""
    session = name_of("linger")
    same(await store.linger(session, "k"), False, "in no session")
    same(await store.session(session), None, "lingering creates nothing")
    begun = await store.begin(session, "k", [], asked=ASKED, replica="r")
    same(await store.linger(session, "other"), False, "a call that never began")
    same(await store.linger(session, "k"), False, "nobody wants it")
    since = (await _call(store, session, "k")).since
    same(await _call(store, session, "k"), OpenCall("k", since, ASKED, "r", True, False), "its asker has left")
    twin = (await store.begin(session, "k2", [], asked=ASKED, join="left")).twin
    same(twin, OpenCall("k", since, ASKED, "r", True, True), "joined")
    same(await store.linger(session, "k"), True, "it is wanted")
    same(await store.linger(session, "k"), False, "nobody said so since")
    await store.want(session, "k")
    same(await _call(store, session, "k"), twin, "wanted again")
    same(await store.linger(session, "k"), True, "said again")
    await store.commit(session, begun.life, "k", [build("a").entry])
    same(await store.linger(session, "k"), False, "a call that has ended")
    same(await open_calls(store, session), set(), "what is open")


async def check_giving_up(store: Store) -> None:
    """A call that somebody did not wait for any longer is joined by nobody any more; who waits still may say so."""
    session = name_of("given up")
    await store.want(session, "k")
    same(await store.session(session), None, "wanting creates nothing")
    begun = await store.begin(session, "k", [], asked=ASKED, replica="r")
    await store.want(session, "other")
    same((await store.begin(session, "k2", [], asked=ASKED, join="any")).twin is None, False, "joined")
    await store.want(session, "k", given_up=True)
    await store.want(session, "k", given_up=True)
    held = await _call(store, session, "k")
    same((held.wanted, held.given_up), (True, True), "given up by one, wanted by another")
    same((await store.begin(session, "k3", [], asked=ASKED, join="any")).twin, None, "who comes now begins itself")
    same(await store.linger(session, "k"), True, "the other one waits")
    await store.want(session, "k")
    same(await _call(store, session, "k"), OpenCall("k", held.since, ASKED, "r", True, True, True), "it waits still")
    same(await store.linger(session, "k"), True, "and said so")
    same(await store.linger(session, "k"), False, "and no longer")
    same((await _call(store, session, "k")).given_up, True, "given up for good")
    await store.settle(session, begun.life, "k")
    same(await open_calls(store, session), {"k3"}, "what is open")


async def check_a_call_is_not_its_own_twin(store: Store) -> None:
    """A begin that is sent twice opens one call, and counts once."""
    session = name_of("own")
    await store.begin(session, "k", [], asked=ASKED, join="any")
    begun = await store.begin(session, "k", [], asked=ASKED, join="any")
    same((begun.twin, begun.calls), (None, 1), "begun again")
    same(await open_calls(store, session), {"k"}, "open calls")


async def check_figures(store: Store) -> None:
    """`begin` tells how many calls began, how many tokens were sampled, and since when the session is there."""
    session = name_of("figures")
    first = await store.begin(session, "k1", [])
    same((first.calls, first.tokens), (1, 0), "at the first call")
    same(first.created, (await info_of(store, session)).created, "since when")
    await store.commit(session, first.life, "k1", [build("a", reply=range(5)).entry, build("b", reply=range(7)).entry])
    second = await store.begin(session, "k2", [])
    same((second.calls, second.tokens, second.created), (2, 12, first.created), "at the second")
    await store.settle(session, first.life, "k2")
    await store.begin(session, "k3", [], asked=ASKED)
    third = await store.begin(session, "k4", [], asked=ASKED, join="any")
    same((third.calls, third.tokens, third.created), (3, 12, first.created), "at one that joins another")


async def check_joining_at_once(store: Store) -> None:
    """Of many that ask for the same at once, one is opened, and all others join it."""
    session, many = name_of("at-once"), 25
    begun = await asyncio.gather(*(store.begin(session, f"k{n}", [], asked=ASKED, join="any") for n in range(many)))
    opened = await open_calls(store, session)
    same(len(opened), 1, "calls opened")
    same({one.twin.call for one in begun if one.twin}, opened, "calls joined")
    same(sum(one.twin is None for one in begun), 1, "calls that joined nobody")
    same({one.calls for one in begun}, {1}, "calls counted")


async def check_beats(store: Store) -> None:
    """A replica lives for as long as it said last."""
    lives, forgotten, never = (name_of(f"replica {n}}}") for n in range(3))
    await store.beat(lives, 60)
    await store.beat(forgotten, 60)
    same(await store.living([never, forgotten, lives]), {lives, forgotten}, "replicas that live")
    await store.beat(forgotten, 0.001)
    for _ in range(200):
        if await store.living([forgotten]) == set():
            break
        await asyncio.sleep(0.01)
    same(await store.living([lives, forgotten]), {lives}, "replicas that live after one was silent")
    same(await store.living([]), set(), "nobody asked for")


async def check_secret(store: Store) -> None:
    """The deployment's secret is random, and stays."""
    secret = await store.secret()
    same(len(secret), 32, "bytes")
    same(await store.secret(), secret, "the secret, read again")
    same(await store.secret(secrets.token_bytes(32)), secret, "the secret, for who thinks that it is another")
    true(secret != secrets.token_bytes(32), "a secret of its own")

"""Checks of sessions that share turns with the session from which they were forked."""

from msgspec.structs import replace

from tests.store.conformance.support import build, info_of, name_of, raises, record, same, true
from tokencache.core.session import Labels, SessionSettings
from tokencache.core.turn import Turn
from tokencache.store.base import SessionGoneError, Store


async def fork(store: Store, source: str, *turns: Turn) -> str:
    """Fork a session after some of its turns."""
    session = name_of("fork")
    await store.define(session, SessionSettings(), Labels())
    await store.share(session, source, [replace(turn, marks=("shared", *turn.marks)) for turn in turns])
    return session


async def check_forks(store: Store) -> None:
    """A fork has the turns that it shares, without log probabilities, and finds them; its own turns are its own."""
    source, root = name_of("source"), build("a", keys=(b"ca", b"same"))
    left = build("b", root, keys=(b"cb", b"same"))
    later = build("c", left, keys=(b"cc", b"same"))
    await record(store, source, root, left, later)
    session = await fork(store, source, root.turn, replace(left.turn, created=9.0))
    same([turn.id for turn in await store.turns(session)], ["a", "b"], "its turns")
    true(all(turn.marks == ("shared",) for turn in await store.turns(session)), "they are recorded as given")
    same((await info_of(store, session)).turns, 2, "their number")
    same((await info_of(store, session)).sampled, 4, "tokens that were sampled in them")
    found = await store.find(session, [b"ca", b"cb", b"cc", b"same"])
    first, second = ("a", True), ("b", False)
    same([[(hit.turn.id, hit.continued) for hit in hits] for hits in found], [[first], [second], [], [first, second]], "hits")
    begun = await store.begin(session, "k1", [b"cb"])
    same([hit.turn.id for hit in begun.hits[0]], ["b"], "hits of a call")
    same((begun.calls, begun.tokens), (2, 4), "calls and tokens so far, those of shared turns included")
    same((await store.prefix(session, "b")).ids, left.prefix, "prefix of a shared turn")
    tokens, recorded = await store.tokens(session, ["b", "a"]), await store.tokens(source, ["b", "a"])
    same({name: (one.delta, one.completion, one.logprobs) for name, one in tokens.items()},
         {name: (one.delta, one.completion, b"") for name, one in recorded.items()}, "tokens, without log probabilities")  # fmt: skip
    own = build("d", left, (9, 9, 9), keys=(b"cd",))
    await store.commit(session, begun.epoch, "k1", [own.entry])
    same((await info_of(store, session)).latest.id, "d", "the newest turn is one of its own, if it has one")
    same((await store.prefix(session, "d")).ids, own.prefix, "prefix of a turn that continues a shared one")
    same(await store.tokens(session, ["d"]), {"d": own.entry.tokens}, "its own tokens")
    same([turn.id for turn in await store.turns(source)], ["a", "b", "c"], "turns of the session that was left")
    true((await store.tokens(source, ["b"]))["b"].logprobs, "which keeps its log probabilities")
    stored = await fork(store, source, replace(root.turn, marks=("not-in-history",)), left.turn)
    found = await store.find(stored, [b"ca", b"cb", b"same"])
    same([[hit.turn.id for hit in hits] for hits in found], [[], ["b"], ["b"]], "hits without a turn that is not in its history")
    same((await store.prefix(stored, "b")).ids, left.prefix, "prefix that begins with the tokens of that turn")


async def check_forks_outlive(store: Store) -> None:
    """What forks share stays while one of them lives, whichever session is deleted first, and whether a name is used again."""
    for reuse in (False, True):
        source, root = name_of("source"), build("a", keys=(b"ca",))
        left = build("b", root)
        await record(store, source, root, left)
        first, second = await fork(store, source, root.turn, left.turn), await fork(store, source, root.turn)
        third = await fork(store, first, root.turn, left.turn)
        await store.delete(source, reuse=reuse)
        if reuse:
            await record(store, source, build("x"))
        for session, last in ((first, left), (second, root), (third, left)):
            same((await store.prefix(session, last.turn.id)).ids, last.prefix, "prefix after the deletion of the source")
            same(await store.contexts(session, ["a"]), {"a": b""}, "context")
        await store.delete(first)
        for session, last in ((second, root), (third, left)):
            same((await store.prefix(session, last.turn.id)).ids, last.prefix, "prefix after the deletion of a fork")
            same([len(hits) for hits in await store.find(session, [b"ca"])], [1], "hits")
        await store.delete(second)
        same((await store.prefix(third, "b")).ids, left.prefix, "prefix in the last fork")
        await store.delete(third)
        same(await store.session(third), None, "the last fork")


async def check_forks_refused(store: Store) -> None:
    """A fork of what does not exist is refused."""
    source, root = name_of("source"), build("a")
    await record(store, source, root)
    session = name_of("fork")
    await store.define(session, SessionSettings(), Labels())
    async with raises(KeyError, "a turn that does not exist"):
        await store.share(session, source, [root.turn, build("b").turn])
    same(await store.turns(session), [], "turns after a refusal")
    async with raises(SessionGoneError, "a source that does not exist"):
        await store.share(session, name_of("missing"), [root.turn])
    async with raises(SessionGoneError, "a fork that does not exist"):
        await store.share(name_of("missing"), source, [root.turn])

"""What the checks are made of: turns to write, and words for what is wrong."""

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from tokencache.core import ids
from tokencache.core.messages import Message
from tokencache.core.turn import MatchKind, Tokens, Turn, hash_ids, hash_logprobs
from tokencache.store.base import Entry, Store

LONG = 200
EVERY_BYTE = bytes(range(256))
ODD_NAMES = ("{}", "}", "{a}", "a}b", "{a}b", "%7D", "%", "a b", "*", "[x]?", "\\", "naïve ☕", "a\r\nb", "a\x00b", "x" * 200)


class Built(NamedTuple):
    """An entry, and the packed prefix that a store must rebuild for it."""

    entry: Entry
    prefix: bytes

    @property
    def turn(self) -> Turn:
        """The entry's turn."""
        return self.entry.turn


def build(
    name: str,
    base: Built | None = None,
    tail: Sequence[int] = (1, 2, 3),
    reply: Sequence[int] = (7, 8),
    *,
    shared: int | None = None,
    extends: bool = True,
    keys: tuple[bytes, ...] = (),
    call: str = "call",
) -> Built:
    """Make an entry on top of `base`.

    Its prompt is the first `shared` tokens of the base's prefix (all of them, if not told) and `tail`. With `extends`
    the base is its parent too, which wants all tokens shared.
    """
    before = base.prefix if base else b""
    common = ids.count(before) if shared is None else shared
    delta, completion = ids.pack(tail), ids.pack(reply)
    prefix = ids.head(before, common) + delta + completion
    logprobs = ids.pack_logprobs([-0.5] * len(reply))
    match: MatchKind = "root" if base is None else "continue" if extends else "resplice"
    turn = Turn(
        id=name,
        call=call,
        match=match,
        parent=base.turn.id if base and extends else None,
        origin=base.turn.id if base and not extends else None,
        base=base.turn.id if base else None,
        shared=common,
        prompt_tokens=common + len(tail),
        completion_tokens=len(reply),
        prefix_hash=hash_ids(prefix),
        completion_hash=hash_ids(completion),
        logprobs_hash=hash_logprobs(logprobs),
        served=Message("assistant", f"reply {name}"),
    )
    return Built(Entry(turn, Tokens(delta, completion, logprobs), keys), prefix)


async def record(store: Store, session: str, *built: Built) -> str:
    """Record entries, each by a call of its own; return the session's life."""
    epoch = ""
    for one in built:
        epoch = (await store.begin(session, one.turn.call, [])).epoch
        await store.commit(session, epoch, one.turn.call, [one.entry])
    return epoch


def name_of(what: str) -> str:
    """Make a session name that nobody else uses."""
    return f"{what}-{secrets.token_hex(6)}"


def true(condition: object, what: str) -> None:
    """Demand that something holds."""
    if not condition:
        raise AssertionError(f"not so: {what}")


def same(got: object, wanted: object, what: str) -> None:
    """Demand that two values are equal."""
    if got != wanted:
        raise AssertionError(f"{what}: {got!r}, wanted {wanted!r}")


@asynccontextmanager
async def raises(kind: type[Exception], what: str) -> AsyncIterator[None]:
    """Demand that what is done inside raises."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{what}: no {kind.__name__}")


def ids_of(hits: Sequence[Sequence[Any]]) -> list[list[str]]:
    """The ids of the turns that were found, under each key."""
    return [[hit.turn.id for hit in under] for under in hits]


async def continued(store: Store, session: str, *keys: bytes) -> list[bool]:
    """Whether each turn found under the keys is said to be continued."""
    return [hit.continued for under in await store.find(session, keys) for hit in under]


async def info_of(store: Store, session: str) -> Any:
    """The state of a session that must be there."""
    info = await store.session(session)
    true(info is not None, f"session {session} is there")
    return info


async def open_calls(store: Store, session: str) -> set[str]:
    """The calls of a session that have begun and not ended."""
    return {call.call for call in (await info_of(store, session)).open_calls}

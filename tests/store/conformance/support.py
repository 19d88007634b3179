"""Helpers of the checks: turns to write, and assertions."""

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
UNUSUAL_NAMES = ("{}", "}", "{a}", "a}b", "{a}b", "%7D", "%", "a b", "*", "[x]?", "\\", "naïve ☕", "a\r\nb", "a\x00b", "x" * 200)


class Built(NamedTuple):
    """An entry, and the packed prefix that a store must rebuild for its turn."""

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

    Its prompt is the first `shared` tokens of the base's prefix (by default all of them) and `tail`. With `extends` the base is
    also its parent, which requires all tokens to be shared.
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
    """Record entries, each by a call of its own. Returns the session's epoch."""
    epoch = ""
    for one in built:
        epoch = (await store.begin(session, one.turn.call, [])).epoch
        await store.commit(session, epoch, one.turn.call, [one.entry])
    return epoch


def name_of(what: str) -> str:
    """Make a unique session name."""
    return f"{what}-{secrets.token_hex(6)}"


def true(condition: object, what: str) -> None:
    """Assert that a condition holds."""
    if not condition:
        raise AssertionError(f"false: {what}")


def same(got: object, wanted: object, what: str) -> None:
    """Assert that two values are equal."""
    if got != wanted:
        raise AssertionError(f"{what}: got {got!r}, expected {wanted!r}")


@asynccontextmanager
async def raises(kind: type[Exception], what: str) -> AsyncIterator[None]:
    """Assert that the context raises."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{what}: no {kind.__name__}")


def ids_of(hits: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Return the ids of the turns found under each key."""
    return [[hit.turn.id for hit in under] for under in hits]


async def continued(store: Store, session: str, *keys: bytes) -> list[bool]:
    """Return for each turn found under the keys whether it is continued."""
    return [hit.continued for under in await store.find(session, keys) for hit in under]


async def info_of(store: Store, session: str) -> Any:
    """Return the state of a session, which must exist."""
    info = await store.session(session)
    true(info is not None, f"session {session} exists")
    return info


async def open_calls(store: Store, session: str) -> set[str]:
    """Return the ids of the open calls of a session."""
    return {call.call for call in (await info_of(store, session)).open_calls}

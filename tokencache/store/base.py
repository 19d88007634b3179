"""What a store must do: the one contract that memory and Redis keep, and that `conformance` checks.

A store holds sessions: their turns (immutable, in the order they were recorded), the tokens of each turn as deltas,
the keys under which a turn is found, the calls that began and have not ended, the incidents, and documents: what a
dialect must find again (a response that is asked for by its id). Everything that matching needs is here and can be
read by any replica as soon as `commit` has returned.

A call begins (`begin`), and ends in a `commit` with its turns or a `settle` without. A call that began and never ended
shows in `SessionInfo.open_calls`: no crash can hide a hole.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol

import msgspec

from tokencache.core.budget import Budget
from tokencache.core.match import Hit
from tokencache.core.turn import Prefix, Tokens, Turn


class StoreError(Exception):
    """The store could not do it now: down, slow, full or torn. The harness must not suffer for it."""


class SessionSealedError(Exception):
    """The session is sealed: it takes no more calls."""


class SessionGoneError(Exception):
    """The session was deleted, or deleted and begun anew, since the call began; what was to be written is dropped."""


class SessionDeletedError(Exception):
    """The session was deleted a short while ago: its name takes no calls until its tombstone has gone, or is lifted."""


class StoreFullError(Exception):
    """The store is at its bound: it takes no new sessions. Those that are there go on."""


Join = Literal["never", "left", "any"]
"""Which call in flight a call may join that asks for the same: none, one whose asker has left, any."""


class Incident(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something a trainer must know about a session.

    `hole` says that something the model said, or may have said, is missing from the record. `at` is in seconds since
    the epoch.
    """

    kind: str
    detail: str = ""
    hole: bool = False
    call: str = ""
    turn: str = ""
    at: float = 0.0


class Binding(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an API key stands for, as the trainer registered it.

    `harness` names the adapter whose rules apply. `models` maps the names that the harness uses (shell patterns) to the
    model that is served. `sampling` are the sampling parameters that are used whatever the harness asks for. `budget` is the session's own.
    `tenant` names whose session it is: what tenants say is kept apart in the engine's cache, too.
    """

    session: str
    harness: str = ""
    models: dict[str, str] = {}
    sampling: dict[str, Any] = {}
    budget: Budget = Budget()
    tenant: str = ""


class EngineEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What replicas of the proxy tell each other of an engine; `at` is in seconds since the epoch.

    Without a `replica` it is what is wanted: that the engine serves, takes no new calls (`draining`), or is gone (`removed`). With one
    it is what that replica reports: how many `calls` it has under way there.
    """

    url: str
    state: Literal["serving", "draining", "removed"] = "serving"
    at: float = 0.0
    replica: str = ""
    calls: int = 0


class Entry(msgspec.Struct, frozen=True):
    """A turn to record, its tokens, the keys under which it is to be found (none if nobody was served it), its context (packed)."""

    turn: Turn
    tokens: Tokens
    keys: tuple[bytes, ...] = ()
    context: bytes = b""


class OpenCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call that began and has not ended; `since` in seconds since the epoch.

    `asked` is the imprint of what it asks (16 bytes; `b""`: it is joined by nobody), `replica` who serves it. `left` says that its
    asker has gone, `wanted` that another call waits for its reply, `given_up` that one that waited did not wait any longer: it is
    joined by nobody any more.
    """

    call: str
    since: float
    asked: bytes = b""
    replica: str = ""
    left: bool = False
    wanted: bool = False
    given_up: bool = False


class Begun(msgspec.Struct, frozen=True):
    """What `begin` found: hits aligned with the wanted keys, and the life of the session that the call belongs to.

    `twin` is a call in flight that asks for the same and may be joined: then nothing was opened, and it knows that it is wanted.
    `calls` is how many calls the session has seen with this one, `tokens` how many were sampled in its recorded turns, `created` when it
    began (seconds since the epoch).
    """

    life: str
    hits: list[list[Hit]]
    twin: OpenCall | None = None
    calls: int = 0
    tokens: int = 0
    created: float = 0.0


class SessionInfo(msgspec.Struct, frozen=True):
    """The state of a session without its turns; times in seconds since the epoch."""

    id: str
    created: float
    used: float
    sealed: bool
    turns: int
    open_calls: tuple[OpenCall, ...]
    incidents: tuple[Incident, ...]


class Store(Protocol):
    """The contract. Every method may raise `StoreError`; what else it raises is named."""

    async def open(self) -> None:
        """Connect. Must be called once, in the running event loop, before anything else."""

    async def close(self) -> None:
        """Release connections; the store is not used again."""

    async def ping(self) -> None:
        """Return if the store can be reached and written to."""

    async def secret(self, known: bytes = b"") -> bytes:
        """Read this deployment's secret: 32 random bytes, made by whoever opened the store first, the same for all replicas.

        Where there is none (any more), it is `known` from now on, if that is given.
        """

    async def begin(
        self, session: str, call: str, keys: Sequence[bytes], *, asked: bytes = b"", replica: str = "", join: Join = "never"
    ) -> Begun:
        """Open a call, creating the session if need be, and look up `keys` in the order given.

        The look-up ends behind the first known key that begins with `c` (a chain key: the deepest match); later keys
        come back without hits. One round trip. `asked` and `replica` are those of `OpenCall`; where `join` allows it and a call in
        flight has the same imprint, that one is the `twin`, and nothing is opened.

        Raises:
            SessionSealedError: the session takes no more calls; nothing was opened.
            SessionDeletedError: the same, of a session that was deleted.
            StoreFullError: the session is new, and there is no room for it.
        """

    async def linger(self, session: str, call: str) -> bool:
        """Say of an open call that its asker has left; true if another call said since the last time that it waits for the reply."""

    async def want(self, session: str, call: str, *, given_up: bool = False) -> None:
        """Say of an open call that another one waits for its reply, or that it has given up waiting."""

    async def beat(self, replica: str, seconds: float) -> None:
        """Say that a replica lives, and will for so many seconds."""

    async def living(self, replicas: Sequence[str]) -> set[str]:
        """Say which of the named replicas live."""

    async def find(self, session: str, keys: Sequence[bytes]) -> list[list[Hit]]:
        """Look up all `keys`, to the last one; nothing is opened or created."""

    async def prefix(self, session: str, turn: str) -> Prefix:
        """Read the exact ids of a turn's prompt and completion. One round trip.

        Raises:
            KeyError: there is no such turn.
        """

    async def commit(
        self,
        session: str,
        life: str,
        call: str,
        entries: Sequence[Entry],
        incidents: Sequence[Incident] = (),
        *,
        documents: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Record the turns of a call, keep its documents and close it, atomically.

        One round trip; readable by all replicas on return. A document takes the place of one of the same name.

        Raises:
            SessionGoneError: the session's life ended; nothing was written.
        """

    async def settle(self, session: str, life: str, call: str, incidents: Sequence[Incident] = ()) -> None:
        """Close a call that brought no turn, with what there is to say about it.

        Raises:
            SessionGoneError: the session's life ended; nothing was written.
        """

    async def note(self, session: str, incidents: Sequence[Incident]) -> None:
        """Add incidents to a session, creating it if need be: a call may have been lost before it could begin.

        They are dropped if the session was deleted.
        """

    def sessions(self) -> AsyncIterator[SessionInfo]:
        """Iterate over all sessions, in no order."""

    async def session(self, session: str) -> SessionInfo | None:
        """Read a session's state; `None` if there is none."""

    async def turns(self, session: str) -> list[Turn]:
        """Read a session's turns in the order they were recorded; empty if there is no such session."""

    async def tokens(self, session: str, turns: Sequence[str]) -> dict[str, Tokens]:
        """Read the tokens of the named turns.

        Raises:
            KeyError: there is no such turn.
        """

    async def contexts(self, session: str, turns: Sequence[str]) -> dict[str, bytes]:
        """Read the packed contexts of the named turns; `b""` where none was stored.

        Raises:
            KeyError: there is no such turn.
        """

    async def seal(self, session: str) -> bool:
        """Let a session take no more calls; calls that are open may still commit. False if there is none."""

    async def delete(self, session: str, *, reuse: bool = False) -> bool:
        """Forget a session; a late commit cannot bring it back. False if there was none.

        A tombstone turns away calls that come late, for a while; not if its name is to be used again (`reuse`): then one
        that stands there is lifted, too.
        """

    async def lift(self, session: str) -> None:
        """Let the name of a deleted session be used again."""

    async def documents(self, session: str, names: Sequence[str]) -> list[bytes | None]:
        """Read documents of a session, `None` where there is none. One round trip."""

    async def forget(self, session: str, name: str) -> bool:
        """Drop a document; false if there was none."""

    async def bind_key(self, key: str, binding: Binding) -> None:
        """Let an API key (its hash) stand for something, from now on for nothing else."""

    async def binding_of_key(self, key: str) -> Binding | None:
        """Look up what an API key (its hash) stands for."""

    async def unbind_key(self, key: str) -> bool:
        """Let an API key (its hash) stand for nothing; false if it did not stand for anything."""

    async def put_engine(self, entry: EngineEntry) -> None:
        """Keep an entry, in the place of one of the same URL and replica."""

    async def drop_engine(self, url: str, replica: str = "") -> None:
        """Drop the entry of that URL and replica, if there is one."""

    async def engines(self) -> list[EngineEntry]:
        """Read all entries, in no order. One round trip."""

"""The interface of a session store: what every store must do, its values and its errors.

A store holds sessions. A session has turns (immutable, in the order they were recorded), their tokens as deltas, lookup keys that find
turns, open calls, incidents, and documents: what a dialect must find again, such as a response that is requested by its id. Any replica
can read what `commit` has written as soon as `commit` returns.

A call starts with `begin` and ends with `commit` (with turns) or `settle` (without). A call that never ended stays in
`SessionInfo.open_calls`, so a crash cannot hide a missing turn.

`tokencache.store.conformance` tests whether a store does all this.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol

import msgspec

from tokencache.core.budget import Budget
from tokencache.core.incidents import Incident
from tokencache.core.match import Hit
from tokencache.core.turn import Prefix, Tokens, Turn
from tokencache.errors import TokencacheError


class StoreError(TokencacheError):
    """The store cannot do this now: it is unreachable, slow or full, or its data is damaged. The harness's call must continue."""

    status = 503
    kind = "store_error"

    @property
    def client_message(self) -> str:
        """See `TokencacheError.client_message`."""
        return f"the store failed: {self}"


class SessionSealedError(TokencacheError):
    """The session that the message names is sealed: it accepts no more calls."""

    status = 409
    kind = "session_sealed"

    @property
    def client_message(self) -> str:
        """See `TokencacheError.client_message`."""
        return f"session {self} is sealed and accepts no more calls"


class SessionGoneError(Exception):
    """The session was deleted after the call began, and possibly created again. Nothing was written."""


class SessionDeletedError(TokencacheError):
    """The session that the message names was deleted recently. It accepts no calls until its tombstone expires or is lifted."""

    status = 409
    kind = "session_deleted"

    @property
    def client_message(self) -> str:
        """See `TokencacheError.client_message`."""
        reuse = f"DELETE /tokencache/v1/sessions/{self}?reuse=true makes its name usable again"
        return f"session {self} was deleted, and a late call does not create it again; {reuse}"


class StoreFullError(TokencacheError):
    """The store is full: it accepts no new sessions. Existing sessions continue."""

    status = 503
    kind = "store_full"
    headers = MappingProxyType({"Retry-After": "30"})

    @property
    def client_message(self) -> str:
        """See `TokencacheError.client_message`."""
        advice = "export and delete sessions (tokencache export --delete), or raise the bound; existing sessions continue"
        return f"the store accepts no new sessions: {self}: {advice}"


Join = Literal["never", "orphaned", "any"]
"""Which open call with the same fingerprint a new call may join: none, one whose client has disconnected, or any."""


class Binding(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a registered API key selects.

    Attributes:
        session: name of the session.
        harness: name of the harness adapter whose rules apply.
        models: maps model names that the harness requests (shell patterns) to served models.
        sampling: sampling parameters that replace what the harness requests.
        budget: limits of this session.
        tenant: owner of the session. Tenants do not share entries of the engine's prefix cache.
    """

    session: str
    harness: str = ""
    models: dict[str, str] = {}
    sampling: dict[str, Any] = {}
    budget: Budget = Budget()
    tenant: str = ""


class EngineEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of an engine that the proxy's replicas share.

    Without `replica` it is the wanted state. With `replica` it is what that replica reports.

    Attributes:
        url: base URL of the engine.
        state: whether it serves, accepts no new calls (`draining`), or is gone (`removed`).
        at: Unix time in seconds.
        replica: id of the reporting replica.
        calls: number of calls that the replica has in flight there.
    """

    url: str
    state: Literal["serving", "draining", "removed"] = "serving"
    at: float = 0.0
    replica: str = ""
    calls: int = 0


class Entry(msgspec.Struct, frozen=True):
    """A turn to record.

    Attributes:
        turn: the turn.
        tokens: its token ids and log probabilities.
        keys: lookup keys that find it; empty if no client received it.
        context: its messages, encoded.
    """

    turn: Turn
    tokens: Tokens
    keys: tuple[bytes, ...] = ()
    context: bytes = b""


class OpenCall(msgspec.Struct, frozen=True, omit_defaults=True, rename={"fingerprint": "asked", "orphaned": "left"}):
    """A call that began and has not ended.

    Attributes:
        call: id of the call.
        since: when it began, as Unix time in seconds.
        fingerprint: request fingerprint, 16 bytes. Empty if no other call may join it. Called `asked` in JSON.
        replica: id of the replica that serves it.
        orphaned: whether its client has disconnected. Called `left` in JSON.
        wanted: whether another call waits for its reply.
        given_up: whether a call has stopped waiting for its reply. No further call may then join it.
    """

    call: str
    since: float
    fingerprint: bytes = b""
    replica: str = ""
    orphaned: bool = False
    wanted: bool = False
    given_up: bool = False


class BeginResult(msgspec.Struct, frozen=True):
    """Result of `Store.begin`.

    Attributes:
        epoch: id of this lifetime of the session. A session that is deleted and created again has another one.
        hits: turns found, one list for each wanted key.
        duplicate: the open call that this call joins. If set, no call was opened, and that call is marked as wanted.
        calls: number of calls of the session so far, this one included.
        tokens: number of tokens sampled in the session's recorded turns.
        created: when the session began, as Unix time in seconds.
    """

    epoch: str
    hits: list[list[Hit]]
    duplicate: OpenCall | None = None
    calls: int = 0
    tokens: int = 0
    created: float = 0.0


class SessionInfo(msgspec.Struct, frozen=True):
    """State of a session without its turns. Times are Unix time in seconds."""

    id: str
    created: float
    used: float
    sealed: bool
    turns: int
    open_calls: tuple[OpenCall, ...]
    incidents: tuple[Incident, ...]


class Store(Protocol):
    """Interface of a store. Every method may raise `StoreError`; other errors are listed with the method."""

    async def open(self) -> None:
        """Connect. Must be called once, in the running event loop, before any other method."""

    async def close(self) -> None:
        """Release connections. The store is not used afterwards."""

    async def ping(self) -> None:
        """Check that the store can be reached and written to; raises `StoreError` if not."""

    async def secret(self, known: bytes = b"") -> bytes:
        """Read the secret of this deployment: 32 random bytes that all replicas share. The first call creates it.

        Args:
            known: the secret to set if the store has none, because it lost its data.
        """

    async def begin(
        self, session: str, call: str, keys: Sequence[bytes], *, fingerprint: bytes = b"", replica: str = "", join: Join = "never"
    ) -> BeginResult:
        """Open a call, create the session if it does not exist, and look up keys. One round trip.

        Args:
            session: name of the session.
            call: id of the call. Opening the same call twice has no further effect.
            keys: lookup keys, in order. The lookup ends after the first known key that starts with `c` (a chain key: the deepest
                match); later keys get no hits.
            fingerprint: as in `OpenCall`. With `join`, an open call with the same fingerprint is joined instead.
            replica: as in `OpenCall`.
            join: which open calls may be joined.

        Raises:
            SessionSealedError: the session accepts no more calls. Nothing was opened.
            SessionDeletedError: the session was deleted. Nothing was opened.
            StoreFullError: the session is new and the store is full.
        """

    async def mark_orphaned(self, session: str, call: str) -> bool:
        """Record that an open call's client has disconnected, and clear `wanted`. Returns whether the call was wanted."""

    async def mark_wanted(self, session: str, call: str, *, given_up: bool = False) -> None:
        """Record that another call waits for an open call's reply, or, with `given_up`, that it has stopped waiting."""

    async def heartbeat(self, replica: str, seconds: float) -> None:
        """Record that a replica is alive for the next `seconds`."""

    async def live_replicas(self, replicas: Sequence[str]) -> set[str]:
        """Return which of the given replicas are alive."""

    async def find(self, session: str, keys: Sequence[bytes]) -> list[list[Hit]]:
        """Look up all keys. Returns one list of hits for each key. Opens and creates nothing."""

    async def prefix(self, session: str, turn: str) -> Prefix:
        """Read the exact token ids of a turn's prompt and completion. One round trip.

        Raises:
            KeyError: there is no such turn.
        """

    async def commit(
        self,
        session: str,
        epoch: str,
        call: str,
        entries: Sequence[Entry],
        incidents: Sequence[Incident] = (),
        *,
        documents: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Record the turns and incidents of a call, store its documents, and close it. Atomic, one round trip.

        All replicas can read it on return. A document replaces one of the same name.

        Raises:
            SessionGoneError: this epoch of the session has ended. Nothing was written.
        """

    async def settle(self, session: str, epoch: str, call: str, incidents: Sequence[Incident] = ()) -> None:
        """Close a call that has no turn, and record its incidents.

        Raises:
            SessionGoneError: this epoch of the session has ended. Nothing was written.
        """

    async def add_incidents(self, session: str, incidents: Sequence[Incident]) -> None:
        """Add incidents to a session, and create it if it does not exist: a call may have failed before `begin`.

        Incidents of a deleted session are dropped.
        """

    def sessions(self) -> AsyncIterator[SessionInfo]:
        """Iterate over all sessions, in no particular order."""

    async def session(self, session: str) -> SessionInfo | None:
        """Read the state of a session; `None` if it does not exist."""

    async def turns(self, session: str) -> list[Turn]:
        """Read the turns of a session in the order they were recorded; empty if the session does not exist."""

    async def tokens(self, session: str, turns: Sequence[str]) -> dict[str, Tokens]:
        """Read the tokens of turns.

        Raises:
            KeyError: there is no such turn.
        """

    async def contexts(self, session: str, turns: Sequence[str]) -> dict[str, bytes]:
        """Read the encoded contexts of turns; `b""` where none was stored.

        Raises:
            KeyError: there is no such turn.
        """

    async def seal(self, session: str) -> bool:
        """Accept no more calls in a session. Open calls may still commit. Returns false if the session does not exist."""

    async def delete(self, session: str, *, reuse: bool = False) -> bool:
        """Delete a session. Returns false if it did not exist. A late commit does not create it again.

        A tombstone refuses late calls for a while. With `reuse` there is no tombstone, and an existing one is lifted.
        """

    async def lift_tombstone(self, session: str) -> None:
        """Allow the name of a deleted session to be used again."""

    async def documents(self, session: str, names: Sequence[str]) -> list[bytes | None]:
        """Read documents of a session; `None` for each that does not exist. One round trip."""

    async def delete_document(self, session: str, name: str) -> bool:
        """Delete a document. Returns false if it did not exist."""

    async def bind_key(self, key: str, binding: Binding) -> None:
        """Bind an API key, given by its hash. Replaces its previous binding."""

    async def binding_of_key(self, key: str) -> Binding | None:
        """Look up the binding of an API key, given by its hash."""

    async def unbind_key(self, key: str) -> bool:
        """Remove the binding of an API key, given by its hash. Returns false if it had none."""

    async def put_engine(self, entry: EngineEntry) -> None:
        """Store an entry. It replaces the entry with the same URL and replica."""

    async def drop_engine(self, url: str, replica: str = "") -> None:
        """Remove the entry of a URL and replica, if it exists."""

    async def engines(self) -> list[EngineEntry]:
        """Read all entries, in no particular order. One round trip."""

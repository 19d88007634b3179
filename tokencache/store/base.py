"""The interface of a session store: what every store must do, its values and its errors.

A store holds sessions. A session has turns (immutable, in the order they were recorded), their tokens as deltas, lookup keys that find
turns, open calls, incidents, documents (what a dialect must find again, such as a response that is requested by its id), and the bytes of
the media in its prompts. Any replica can read what `commit` has written as soon as `commit` returns.

A call starts with `begin` and ends with `commit` (with turns) or `settle` (without). A call that never ended stays in
`SessionInfo.open_calls`, so a crash cannot hide a missing turn.

A session is open, then finished, then sealed (`core.session.SessionStage`). It may be defined before its first call, with labels and with
settings that hold for all its calls. Rewards can be added in any state.

The queue lists finished sessions for consumers. An entry is offered when its session is finished, leased to a consumer as part of a
delivery, and removed when the delivery is acknowledged. A lease that ends makes the session free for the next consumer.

`tests.store.conformance` tests whether a store does all this.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from enum import StrEnum
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from tokencache.core.incidents import Incident
from tokencache.core.match import Hit
from tokencache.core.media import StoredMedium
from tokencache.core.outcome import LatestTurn, Outcome
from tokencache.core.session import Budget, History, LabelChanges, Labels, Reward, SessionSettings, SessionStage
from tokencache.core.turn import Prefix, Tokens, Turn
from tokencache.core.weights import WeightsState
from tokencache.errors import TokencacheError


class StoreError(TokencacheError):
    """The store cannot do this now: it is unreachable, slow or full, or its data is damaged. The harness's call must continue."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    kind = "store_error"
    words = "the store failed: {0}"


class DamagedError(StoreError):
    """The data of one session cannot be read: it is damaged, or a newer version wrote it."""


class SessionOverError(TokencacheError):
    """The session that the message names accepts no calls.

    Attributes:
        outcome: the outcome with which it was finished; `None` if none was given, or if it is not known here.
    """

    status = HTTPStatus.CONFLICT
    outcome: Outcome | None = None

    @property
    def why(self) -> str:
        """The failure with which it ended, in brackets; `""` if none is known."""
        return f" ({self.outcome.kind}: {self.outcome.detail})" if self.outcome is not None and not self.outcome.ok else ""


class SessionSealedError(SessionOverError):
    """The session that the message names is sealed: it accepts no more calls."""

    kind = "session_sealed"
    words = "session {0} is sealed{0.why} and accepts no more calls"


class SessionFinishedError(SessionOverError):
    """The session that the message names is finished: it accepts no new calls. Calls in flight end normally."""

    kind = "session_finished"
    words = "session {0} is finished{0.why} and accepts no new calls; use another session name"


class SessionExistsError(TokencacheError):
    """The session that the message names exists already, so it was not created."""

    status = HTTPStatus.CONFLICT
    kind = "session_exists"
    words = "session {0} exists already; use another name, delete it first, or send exist_ok to join it"


class OutcomeConflictError(TokencacheError):
    """The session has another outcome, or it is sealed without that outcome. Nothing was changed.

    Attributes:
        session: name of the session.
        wanted: the outcome that was to be stored.
        stored: the outcome that was given before; `""` if none was.
    """

    status = HTTPStatus.CONFLICT
    kind = "outcome_conflict"

    def __init__(self, session: str, wanted: str, stored: str) -> None:
        super().__init__(session, wanted, stored)
        self.session, self.wanted, self.stored = session, wanted, stored

    @property
    def client_message(self) -> str:
        """See `TokencacheError.client_message`."""
        if self.stored:
            return f"session {self.session} has the outcome {self.stored!r}, which cannot become {self.wanted!r}: the first one stays"
        return f"session {self.session} is sealed, so its outcome cannot become {self.wanted!r} any more: a trainer may have it"


class SettingsConflictError(TokencacheError):
    """The session exists with other settings.

    Attributes:
        session: name of the session.
        members: names of the settings that differ.
    """

    status = HTTPStatus.CONFLICT
    kind = "settings_conflict"

    def __init__(self, session: str, members: Sequence[str]) -> None:
        super().__init__(session, members)
        self.session, self.members = session, tuple(members)

    @property
    def client_message(self) -> str:
        """See `TokencacheError.client_message`."""
        return (
            f"session {self.session} exists with other settings ({', '.join(self.members)}); leave them out to join it as it is, "
            "or use another name"
        )


class SettingsChangedError(Exception):
    """The session has other settings than those whose digest `Store.begin` got. Nothing was opened.

    Attributes:
        settings: the settings that the session has.
    """

    def __init__(self, settings: SessionSettings) -> None:
        super().__init__(settings)
        self.settings = settings


class CursorError(TokencacheError):
    """A cursor does not belong to this database, or the database has changed so that the walk cannot continue."""

    status = HTTPStatus.UNPROCESSABLE_ENTITY
    kind = "invalid_cursor"
    words = "the cursor cannot be used ({0}); list again without a cursor"


class SessionGoneError(Exception):
    """The session was deleted or lost after the call began, and possibly created again. Nothing was written.

    Attributes:
        deleted: whether the store remembers that this epoch was deleted, so nothing was lost. `commit` and `settle` set it.
    """

    def __init__(self, session: str, *, deleted: bool = False) -> None:
        super().__init__(session)
        self.deleted = deleted


class TurnLostError(SessionGoneError):
    """The database has lost a turn of the session, to which a new turn refers. Nothing was written."""


class SessionDeletedError(TokencacheError):
    """The session that the message names was deleted recently. It accepts no calls until its tombstone expires or is lifted."""

    status = HTTPStatus.CONFLICT
    kind = "session_deleted"
    words = (
        "session {0} was deleted, and a late call does not create it again; `tokencache delete {0} --reuse` makes its name usable again "
        "(DELETE /tokencache/v1/sessions/{0}?reuse=true)"
    )


class StoreFullError(TokencacheError):
    """The store is full: it accepts no new sessions. Existing sessions continue."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    kind = "store_full"
    headers = MappingProxyType({"Retry-After": "30"})
    words = (
        "the store accepts no new sessions: {0}: export and delete sessions (tokencache export --delete), or raise the bound; existing "
        "sessions continue"
    )


SECRET_BYTES = 32
"""Length of the deployment's secret (`Store.secret`)."""
REMEMBER_SECONDS = 3600
"""How long a store remembers at least what was removed from the queue."""
MOST_OVERDUE = 1000
"""Sessions that one look for overdue ones returns."""
Join = Literal["never", "orphaned", "any"]
"""Which open call with the same fingerprint a new call may join: none, one whose client has disconnected, or any."""


class Binding(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a registered API key selects: a session, and the settings that define the session if it has none.

    Attributes:
        session: name of the session.
        harness, models, sampling, budget, tenant, history: as in `SessionSettings`. The session's own settings have priority. These apply
            if the key was registered by an older version, or if the store lost the session.
    """

    session: str
    harness: str = ""
    models: dict[str, str] = {}
    sampling: dict[str, Any] = {}
    budget: Budget = Budget()
    tenant: str = ""
    history: History | Literal[""] = ""

    @property
    def settings(self) -> SessionSettings:
        """The settings that define the session if it has none."""
        return SessionSettings(self.harness, self.models, self.sampling, self.budget, self.tenant, self.history)


class EngineEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of an engine that the proxy's replicas share.

    Without `replica` it is the wanted state. With `replica` it is what that replica reports, or what all have learned (`LEARNED`).

    Attributes:
        url: base URL of the engine.
        state: whether it serves, accepts no new calls (`draining`), or is gone (`removed`).
        at: Unix time in seconds.
        replica: id of the reporting replica.
        calls: number of calls that the replica has in flight there.
        loads: by engine, the tokens that sessions of the replica hold there (`engine.placement`). Such an entry has no URL.
        ended, footprint: sessions that ended at the replica, and the mean of their tokens (`engine.placement.Footprint`).
        claims, waiting: the tokens that its sessions claim, and since when sessions wait there to be created (`engine.admission`).
        stops: by model, the stop ids that its replies showed and a probe cannot find.
    """

    url: str
    state: Literal["serving", "draining", "removed"] = "serving"
    at: float = 0.0
    replica: str = ""
    calls: int = 0
    stops: tuple[tuple[str, tuple[int, ...]], ...] = ()
    loads: tuple[tuple[str, int], ...] = ()
    ended: int = 0
    footprint: int = 0
    claims: int = 0
    waiting: tuple[float, ...] = ()


LEARNED = "learned"
"""In place of a replica's id: the entry of an engine with what all replicas have learned about its models."""


class Entry(msgspec.Struct, frozen=True):
    """A turn to record.

    Attributes:
        turn: the turn.
        tokens: its token ids and log probabilities.
        keys: lookup keys that find it, each once; empty if no client received it.
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
        age: seconds since the session began, by the store's clock.
        engine: the engine that its last turn used; `""` if none is known.
    """

    epoch: str
    hits: list[list[Hit]]
    duplicate: OpenCall | None = None
    calls: int = 0
    tokens: int = 0
    age: float = 0.0
    engine: str = ""


class SessionInfo(msgspec.Struct, frozen=True):
    """State of a session without its turns. Times are Unix time in seconds, by the store's clock.

    Attributes:
        id: name of the session.
        created, used: when it began, and when a call last began or ended.
        sealed: whether it is sealed.
        turns: number of recorded turns.
        open_calls: the calls in flight.
        incidents: its incidents, in the order they were added.
        epoch: id of this lifetime of the session, as in `BeginResult`.
        finished: when its owner finished it; `None` if that has not happened.
        settings: what holds for its calls.
        labels: what the trainer noted.
        reward: the newest reward; `None` if there is none.
        rewards: number of rewards that were set.
        sampled: number of tokens sampled in its turns.
        call_ms: milliseconds that its recorded calls took, added up. Calls that an older version recorded are not in it.
        harness, model: of its settings and its newest turn; `""` if unknown.
        latest: its newest turn: of those recorded, the one whose call began last (of several, the last); `None` if it has none.
        outcome: the outcome that was given when it was finished; `None` if none was (`core.outcome`).
        engine: the engine that its last turn used; `""` if none is known, or if the session is finished.
    """

    id: str
    created: float
    used: float
    sealed: bool
    turns: int
    open_calls: tuple[OpenCall, ...]
    incidents: tuple[Incident, ...]
    epoch: str = ""
    finished: float | None = None
    settings: SessionSettings = SessionSettings()
    labels: Labels = Labels()
    reward: Reward | None = None
    rewards: int = 0
    sampled: int = 0
    call_ms: int = 0
    harness: str = ""
    model: str = ""
    latest: LatestTurn | None = None
    outcome: Outcome | None = None
    engine: str = ""

    @property
    def state(self) -> SessionStage:
        """The state in the life cycle."""
        if self.sealed:
            return SessionStage.SEALED
        return SessionStage.OPEN if self.finished is None else SessionStage.FINISHED


class StoreUsage(NamedTuple):
    """Result of `Store.usage`.

    Attributes:
        used: bytes that the store takes; of a Redis that others use too, theirs are in it.
        share: of the limits on bytes and sessions the one that is nearest, as the share of it that is used; `None` without any limit.
    """

    used: int
    share: float | None

    @classmethod
    def of(cls, used: int, max_bytes: int, sessions: int, max_sessions: int) -> "StoreUsage":
        """Return the usage. A limit of 0 is none."""
        shares = [part / limit for part, limit in ((used, max_bytes), (sessions, max_sessions)) if limit]
        return cls(used, max(shares, default=None))


class Overdue(NamedTuple):
    """Result of `Store.overdue`.

    Attributes:
        now: the time of the store's clock, as Unix time in seconds. `SessionInfo.used` is a time of the same clock.
        sessions: the sessions whose time has passed.
    """

    now: float
    sessions: list[str]


class SealOutcome(StrEnum):
    """Result of `Store.seal`."""

    MISSING = "missing"
    """There is no such session."""
    UNFINISHED = "unfinished"
    """Not sealed: its owner has not finished it."""
    CALLS_IN_FLIGHT = "calls-in-flight"
    """Not sealed: it is finished, and calls are in flight."""
    SEALED = "sealed"
    """It is sealed now, or was before."""


class Page(NamedTuple):
    """Result of `Store.page`.

    Attributes:
        sessions: the sessions of this page.
        cursor: continues the walk; `b""` at its end.
    """

    sessions: list[SessionInfo]
    cursor: bytes


class QueueEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A finished session in the queue.

    Attributes:
        session: name of the session.
        epoch: its epoch when it was offered. If the session has another one now, or is gone, the entry is void.
        at: when it was offered, as Unix time in seconds.
        delivery: id of the delivery that it is or was part of; `""` if none, or if that was released.
        consumer: name of the consumer that took that delivery.
        until: when the lease ends, as Unix time in seconds.
        attempt: how often it was leased.
        leased: whether the lease was in force when the entry was read, by the store's clock.
    """

    session: str
    epoch: str
    at: float
    delivery: str = ""
    consumer: str = ""
    until: float = 0.0
    attempt: int = 0
    leased: bool = False


class RemoveOutcome(StrEnum):
    """Result of `Store.remove`."""

    REMOVED = "removed"
    """The delivery's sessions have left the queue."""
    REPEATED = "repeated"
    """They had left it before, by the same delivery."""
    EXPIRED = "expired"
    """The delivery does not exist: it was released, or another consumer took one of its sessions after its lease had ended."""


class Store(Protocol):
    """Interface of a store. Every method may raise `StoreError`; other errors are listed with the method."""

    async def open(self) -> None:
        """Connect. Must be called once, in the running event loop, before any other method."""

    async def close(self) -> None:
        """Release connections. The store is not used afterwards."""

    async def ping(self) -> None:
        """Check that the store can be reached and written to; raises `StoreError` if not."""

    async def usage(self) -> StoreUsage:
        """Return how full the store is."""

    async def secret(self, known: bytes = b"") -> bytes:
        """Read the secret of this deployment: 32 random bytes that all replicas share. The first call creates it.

        Args:
            known: the secret to set if the store has none, because it lost its data.
        """

    async def define(self, session: str, settings: SessionSettings, labels: Labels, *, exist_ok: bool = False, adopt: bool = False) -> bool:
        """Create a session with settings and labels, and lift the tombstone of a deleted one. Of concurrent definitions one creates it.

        Args:
            session: name of the session.
            settings: what holds for all its calls.
            labels: what the trainer notes.
            exist_ok: join a session that exists. Then `settings` must be empty or equal to its own, and labels that are not empty
                replace its own.
            adopt: as `exist_ok`, and a session without settings takes these.

        Returns:
            Whether the session was created.

        Raises:
            SessionExistsError: it exists.
            SettingsConflictError: it exists with other settings.
            StoreFullError: the store is full.
        """

    async def settings(self, session: str) -> SessionSettings | None:
        """Read the settings of a session; `None` if it does not exist."""

    async def begin(
        self,
        session: str,
        call: str,
        keys: Sequence[bytes],
        *,
        fingerprint: bytes = b"",
        replica: str = "",
        join: Join = "never",
        settings: bytes = b"",
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
            settings: digest of the settings by which the caller serves the call (`SessionSettings.digest`).

        Raises:
            SettingsChangedError: the session has other settings. Nothing was opened.
            SessionFinishedError: the session is finished. Nothing was opened.
            SessionSealedError: the session is sealed. Nothing was opened.
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
        engine: str = "",
    ) -> None:
        """Record the turns and incidents of a call, store its documents, and close it. Atomic, one round trip.

        All replicas can read it on return. A document replaces one of the same name. `engine` is the engine to which the session is bound
        from now on; `""` changes nothing, and neither does a commit of a session that is finished or sealed.

        Raises:
            SessionGoneError: this epoch of the session has ended. Nothing was written. If it was deleted, the error says so for as long as
                a tombstone lasts, also when there is none any more.
            TurnLostError: a turn that an entry refers to (`base`, `parent`, `context_base`) does not exist. Nothing was written. Only
                stores whose database can lose single turns check this.
        """

    async def settle(self, session: str, epoch: str, call: str, incidents: Sequence[Incident] = ()) -> None:
        """Close a call that has no turn, and record its incidents.

        Raises:
            SessionGoneError: as `commit`.
        """

    async def add_incidents(self, session: str, incidents: Sequence[Incident]) -> None:
        """Add incidents to a session, and create it if it does not exist: a call may have failed before `begin`.

        Incidents of a deleted session are dropped.
        """

    def sessions(self) -> AsyncIterator[SessionInfo]:
        """Iterate over all sessions, in no particular order. Each is returned once."""

    async def page(self, cursor: bytes, limit: int) -> Page:
        """Read some sessions, in the store's own order.

        A session that exists during the whole walk is returned at least once; a store may return it twice. A page may have fewer or a few
        more sessions than `limit`, or none; the walk ends with an empty cursor.

        Args:
            cursor: of the previous page; `b""` starts a walk.
            limit: about how many sessions to read; at least 1.

        Raises:
            CursorError: the walk cannot continue with this cursor.
        """

    async def states(self, sessions: Sequence[str]) -> list[SessionInfo | None]:
        """Read the states of many sessions, in the order given; `None` for each that does not exist."""

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

    async def share(self, session: str, source: str, turns: Sequence[Turn]) -> None:
        """Record turns of another session in one without turns, which was defined: a fork.

        Only their records and look-up keys are written, and no keys of those that are not in its history (`core.fork`). Both sessions read
        the same tokens and contexts, here without log probabilities. Neither the deletion nor the expiry of one session takes them from the
        other. The calls and the sampled tokens of these turns count in the fork (`BeginResult`), as it is one episode with them.

        Args:
            session: the fork.
            source: the session that recorded them, or is a fork with them itself.
            turns: their records in the fork, in the order in which they were recorded, with all turns that they refer to.

        Raises:
            SessionGoneError: one of the sessions does not exist, or ended meanwhile.
            KeyError: the source has no such turn.
        """

    async def finish(self, session: str, outcome: Outcome | None = None) -> bool:
        """Accept no new calls in a session, and remove its engine. Open calls continue. Repeating it changes nothing.

        Args:
            session: name of the session.
            outcome: the outcome to store. The first one of a session stays, with its detail. `None` stores none.

        Returns:
            Whether the session exists.

        Raises:
            OutcomeConflictError: an outcome of another kind is stored, or none and the session is sealed. Nothing was changed.
        """

    async def seal(self, session: str, *, force: bool = False, at: float = 0.0) -> SealOutcome:
        """Seal a session: it accepts no calls and has no engine, and only calls that were cut off can still change it.

        Args:
            session: name of the session.
            force: seal it although it is not finished or calls are in flight. What this cuts off is added as an incident
                (`core.incidents.sealed_early`), once. Calls in flight may still commit, and so may those that `settle` closed as lost.
            at: the time of that incident, as Unix time in seconds.
        """

    async def set_labels(self, session: str, changes: LabelChanges) -> bool:
        """Replace labels of a session, in any state. Returns false if it does not exist."""

    async def add_reward(self, session: str, reward: Reward) -> bool:
        """Set the reward of a session, in any state. The last 100 are kept. Returns false if the session does not exist."""

    async def rewards(self, session: str) -> list[Reward]:
        """Read the rewards that are kept, the newest last; empty if there are none."""

    async def delete(self, session: str, *, reuse: bool = False) -> bool:
        """Delete a session. Returns false if it did not exist. A late commit does not create it again.

        A tombstone refuses late calls for a while. With `reuse` there is no tombstone, and an existing one is lifted.
        """

    async def documents(self, session: str, names: Sequence[str]) -> list[bytes | None]:
        """Read documents of a session; `None` for each that does not exist. One round trip."""

    async def delete_document(self, session: str, name: str) -> bool:
        """Delete a document. Returns false if it did not exist."""

    async def put_media(self, session: str, epoch: str, medium: StoredMedium, content: bytes, *, limit: int) -> bool:
        """Store the bytes of a medium. If the session has them, nothing changes.

        Args:
            session: name of the session.
            epoch: the session's epoch when the call began.
            medium: describes it.
            content: the bytes.
            limit: the media of a session may take this many bytes.

        Returns:
            Whether they are stored. False if the media of the session would take more than `limit` bytes.

        Raises:
            SessionGoneError: this epoch of the session does not exist.
        """

    async def media(self, session: str, sha256: str) -> tuple[str, bytes] | None:
        """Read the media type and the bytes of a medium; `None` if they are not stored."""

    async def stored_media(self, session: str) -> list[StoredMedium]:
        """List the media of a session in the order in which they were stored; empty if the session does not exist."""

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

    async def weights(self) -> WeightsState:
        """Read what the trainers announced about the weights; a state with revision 0 if nothing was ever announced. One round trip."""

    async def replace_weights(self, state: WeightsState) -> bool:
        """Replace what was announced, if the stored revision is the one before `state.revision`. Repeating a replacement changes nothing.

        Returns:
            Whether `state` is stored now. False if another state was stored meanwhile.
        """

    async def watch(self, session: str, seconds: float) -> None:
        """Let `overdue` name a session once so many seconds have passed, whether or not it exists. Replaces its earlier time."""

    async def overdue(self) -> Overdue:
        """Return the watched sessions whose time has passed, at most `MOST_OVERDUE`. One round trip."""

    async def unwatch(self, session: str) -> None:
        """Watch a session no longer whose time has passed. If it was set anew meanwhile, nothing changes."""

    async def offer(self, session: str, epoch: str, at: float) -> None:
        """Put a session into the queue.

        Nothing changes if this epoch of it is there, or was removed recently. An entry of another epoch is replaced.
        """

    async def queue(self) -> list[QueueEntry]:
        """Read the queue, in the order in which the sessions were offered. One round trip."""

    async def queue_length(self) -> int:
        """Return the number of entries of the queue, in constant time."""

    async def lease(self, sessions: Sequence[str], delivery: str, consumer: str, seconds: float) -> bool:
        """Lease sessions of the queue to a consumer, as one delivery: all or none.

        A session is free if it has no lease, if its lease has ended, or if it belongs to this very delivery, which is leased again.
        A delivery that loses a session by this does not exist any more.

        Returns:
            Whether they were leased. False if one is not free or not in the queue.
        """

    async def extend(self, delivery: str, seconds: float) -> bool:
        """Let the lease of a delivery end in `seconds` from now. Returns false if the delivery does not exist any more."""

    async def release(self, delivery: str) -> bool:
        """Make the sessions of a delivery free at once. Returns false if the delivery does not exist any more."""

    async def remove(self, delivery: str) -> RemoveOutcome:
        """Take the sessions of a delivery out of the queue. A store remembers this for `REMEMBER_SECONDS`."""

    async def withdraw(self, session: str, epoch: str) -> None:
        """Take a session out of the queue, if its entry is of this epoch: the session was deleted."""

    async def put_demand(self, consumer: str, demand: bytes) -> None:
        """Store what a consumer of the queue asked for. It replaces what the consumer asked for before."""

    async def drop_demand(self, consumer: str) -> None:
        """Forget what a consumer asked for."""

    async def demands(self) -> list[bytes]:
        """Read what all consumers asked for, in no particular order. One round trip."""


async def read_states(store: Store, sessions: Sequence[str]) -> tuple[dict[str, SessionInfo | None], dict[str, DamagedError]]:
    """Read the states of sessions by name, and apart from them what is wrong with those whose data is damaged. Usually one round trip.

    Raises:
        StoreError: the store failed.
    """
    try:
        return dict(zip(sessions, await store.states(sessions), strict=True)), {}
    except DamagedError:
        found: dict[str, SessionInfo | None] = {}
        damaged: dict[str, DamagedError] = {}
        for name in sessions:
            try:
                found[name] = await store.session(name)
            except DamagedError as why:
                damaged[name] = why
        return found, damaged

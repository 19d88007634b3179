"""Defines the state of a model call: four small machines, one for each party, and what follows from them.

The usual path of each is

    RecordState   NEW → OPENING → OPEN → STORING → STORED   the call in the store
    RequestState  IDLE → SAMPLING                            the request to the engine
    ClientState   WAITING (→ OPENED)                         the connection to the client that made the call
    ShownState    NOTHING → BEGUN → ENDING                   what the client has received of a streamed reply

`Party.advance` is the only writer of a state. A transition that its table does not have raises `IllegalTransitionError`, in production as
in tests. The cause can only be a bug in this package, so the state of the call is unknown. The call is then closed in the store as after
any other internal error: without a turn, and with the incident `internal-error`, so that the session does not count as complete.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec


class RecordState(StrEnum):
    """The record of a call in the store."""

    NEW = "new"
    """The store does not know the call yet."""
    OPENING = "opening"
    """The store is opening the call."""
    OPEN = "open"
    """Open in the store."""
    STORING = "storing"
    """The end of the call is being written to the store."""
    UNOPENED = "unopened"
    """Terminal: never opened, because a duplicate is in flight, the store refused, or the client left at once."""
    STORED = "stored"
    """Terminal: the result of the call is in the store, or in the ledger while the store fails."""
    LOST = "lost"
    """Terminal: the store failed, and the policy is strict."""


class RecordEvent(StrEnum):
    """An event that changes the record."""

    OPEN = "open"
    OPENED = "opened"
    NOT_OPENED = "not opened"
    STORE = "store"
    WRITTEN = "written"
    FAILED = "failed"


class RequestState(StrEnum):
    """The request to the engine."""

    IDLE = "idle"
    """No engine has the call."""
    QUEUED = "queued"
    """No engine accepted the call. It waits to be planned and sent again."""
    SAMPLING = "sampling"
    """An engine may be sampling, or may have sampled."""
    BROKEN = "broken"
    """The engine broke its reply off. No engine has the request for the next piece."""
    CONTINUING = "continuing"
    """An engine may be sampling the next piece of a reply that was broken off."""


class RequestEvent(StrEnum):
    """An event that changes the request to the engine."""

    SEND = "send"
    NOT_TAKEN = "not taken"
    BREAK = "break off"


class ClientState(StrEnum):
    """The connection to the client that made the call."""

    WAITING = "waiting"
    """It has received nothing."""
    OPENED = "opened"
    """It has received the head of a response. Keep-alive events may follow before any of the reply."""
    ORPHANED = "orphaned"
    """It left before it received anything of the reply. The call continues for a grace period."""
    LEFT = "left"
    """It left, or the grace period is over: the call ends."""


class ClientEvent(StrEnum):
    """An event that changes the connection to the client."""

    HEAD = "receive a head"
    ORPHAN = "leave before the reply"
    LEAVE = "leave"


class ShownState(StrEnum):
    """What the client has received of a streamed reply; if it is orphaned, what it would have received."""

    NOTHING = "nothing"
    """Chunks wait for the first sampled token."""
    WITHHELD = "withheld"
    """It receives nothing of this reply: the call is made again, or the prompt is too long."""
    BEGUN = "begun"
    """Each chunk is sent as it arrives."""
    ENDING = "ending"
    """All but the end. The end waits until the turn is stored."""


class ShownEvent(StrEnum):
    """An event that changes what the client has received."""

    SHOW = "show"
    WITHHOLD = "withhold"
    FINISH = "finish"


RECORD: Mapping[RecordState, Mapping[RecordEvent, RecordState]] = {
    RecordState.NEW: {RecordEvent.OPEN: RecordState.OPENING, RecordEvent.NOT_OPENED: RecordState.UNOPENED},
    RecordState.OPENING: {RecordEvent.OPENED: RecordState.OPEN, RecordEvent.NOT_OPENED: RecordState.UNOPENED},
    RecordState.OPEN: {RecordEvent.STORE: RecordState.STORING},
    RecordState.STORING: {RecordEvent.WRITTEN: RecordState.STORED, RecordEvent.FAILED: RecordState.LOST},
    RecordState.UNOPENED: {},
    RecordState.STORED: {},
    RecordState.LOST: {},
}
REQUEST: Mapping[RequestState, Mapping[RequestEvent, RequestState]] = {
    RequestState.IDLE: {RequestEvent.SEND: RequestState.SAMPLING, RequestEvent.NOT_TAKEN: RequestState.QUEUED},
    RequestState.QUEUED: {RequestEvent.SEND: RequestState.SAMPLING, RequestEvent.NOT_TAKEN: RequestState.QUEUED},
    RequestState.SAMPLING: {RequestEvent.NOT_TAKEN: RequestState.QUEUED, RequestEvent.BREAK: RequestState.BROKEN},
    RequestState.BROKEN: {RequestEvent.SEND: RequestState.CONTINUING, RequestEvent.NOT_TAKEN: RequestState.BROKEN},
    RequestState.CONTINUING: {RequestEvent.NOT_TAKEN: RequestState.BROKEN, RequestEvent.BREAK: RequestState.BROKEN},
}
CLIENT: Mapping[ClientState, Mapping[ClientEvent, ClientState]] = {
    ClientState.WAITING: {
        ClientEvent.HEAD: ClientState.OPENED,
        ClientEvent.ORPHAN: ClientState.ORPHANED,
        ClientEvent.LEAVE: ClientState.LEFT,
    },
    ClientState.OPENED: {ClientEvent.ORPHAN: ClientState.ORPHANED, ClientEvent.LEAVE: ClientState.LEFT},
    ClientState.ORPHANED: {
        ClientEvent.HEAD: ClientState.ORPHANED,  # although the client is gone
        ClientEvent.ORPHAN: ClientState.ORPHANED,  # another call waits for the reply: the grace period begins again
        ClientEvent.LEAVE: ClientState.LEFT,
    },
    ClientState.LEFT: {ClientEvent.HEAD: ClientState.LEFT, ClientEvent.LEAVE: ClientState.LEFT},
}
SHOWN: Mapping[ShownState, Mapping[ShownEvent, ShownState]] = {
    ShownState.NOTHING: {ShownEvent.SHOW: ShownState.BEGUN, ShownEvent.WITHHOLD: ShownState.WITHHELD},
    ShownState.WITHHELD: {},
    ShownState.BEGUN: {ShownEvent.FINISH: ShownState.ENDING},
    ShownState.ENDING: {},
}

TERMINAL = frozenset({RecordState.UNOPENED, RecordState.STORED, RecordState.LOST})
"""States in which a call has ended."""
WRITING = frozenset({RecordState.OPENING, RecordState.STORING})
"""States in which the store is at work: what is stored is unknown until it has answered."""

_State = TypeVar("_State", bound=StrEnum)
_Event = TypeVar("_Event", bound=StrEnum)


class IllegalTransitionError(RuntimeError):
    """An event that the table of a party does not allow in its state."""


class Party(msgspec.Struct, Generic[_State, _Event], eq=False):
    """One party of a call.

    Attributes:
        table: its transitions.
        state: its state; only `advance` changes it.
    """

    table: Mapping[_State, Mapping[_Event, _State]]
    state: _State

    def advance(self, event: _Event) -> None:
        """Change the state.

        Raises:
            IllegalTransitionError: the table does not have this transition.
        """
        try:
            self.state = self.table[self.state][event]
        except KeyError:
            raise IllegalTransitionError(f"{type(self.state).__name__}: what is {self.state} cannot {event}") from None


def may_cancel(record: RecordState) -> bool:
    """Whether the task of a call may be cancelled now. While the store writes, the cancellation waits for its answer."""
    return record not in WRITING


def may_have_sampled(engine: RequestState) -> bool:
    """Whether an engine may have sampled tokens, so that the call is recorded with what is known of them."""
    return engine not in {RequestState.IDLE, RequestState.QUEUED}


def may_resample(shown: ShownState) -> bool:
    """Whether the call may be made again: the client received nothing of its reply."""
    return shown in {ShownState.NOTHING, ShownState.WITHHELD}


def may_be_orphaned(record: RecordState, engine: RequestState, client: ClientState, shown: ShownState) -> bool:
    """Whether the call may continue without its client: an engine samples, and nothing of the reply was sent."""
    return (
        record is RecordState.OPEN
        and may_have_sampled(engine)
        and client in {ClientState.WAITING, ClientState.OPENED}
        and shown is ShownState.NOTHING
    )


def may_answer_with_status(client: ClientState) -> bool:
    """Whether an error may be a response of its own. After the head was sent, it is an event in the stream."""
    return client is not ClientState.OPENED

"""Defines the state of a model call: four small machines, one for each party, and what follows from them.

The usual path of each is

    Record  NEW → OPENING → OPEN → STORING → STORED   the call in the store
    Engine  IDLE → SAMPLING                            the request to the engine
    Client  WAITING (→ OPENED)                         the connection to the client that made the call
    Shown   NOTHING → BEGUN → ENDING                   what the client has received of a streamed reply

`Party.advance` is the only writer of a state. A transition that its table does not have raises `IllegalTransitionError`, in production as
in tests. The cause can only be a bug in this package, so the state of the call is unknown. The call is then closed in the store as after
any other internal error: without a turn, and with the incident `internal-error`, so that the session does not count as complete.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar


class Record(StrEnum):
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


class Engine(StrEnum):
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


class EngineEvent(StrEnum):
    """An event that changes the request to the engine."""

    SEND = "send"
    NOT_TAKEN = "not taken"
    BREAK = "break off"


class Client(StrEnum):
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


class Shown(StrEnum):
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


RECORD: Mapping[Record, Mapping[RecordEvent, Record]] = {
    Record.NEW: {RecordEvent.OPEN: Record.OPENING, RecordEvent.NOT_OPENED: Record.UNOPENED},
    Record.OPENING: {RecordEvent.OPENED: Record.OPEN, RecordEvent.NOT_OPENED: Record.UNOPENED},
    Record.OPEN: {RecordEvent.STORE: Record.STORING},
    Record.STORING: {RecordEvent.WRITTEN: Record.STORED, RecordEvent.FAILED: Record.LOST},
    Record.UNOPENED: {},
    Record.STORED: {},
    Record.LOST: {},
}
ENGINE: Mapping[Engine, Mapping[EngineEvent, Engine]] = {
    Engine.IDLE: {EngineEvent.SEND: Engine.SAMPLING, EngineEvent.NOT_TAKEN: Engine.QUEUED},
    Engine.QUEUED: {EngineEvent.SEND: Engine.SAMPLING, EngineEvent.NOT_TAKEN: Engine.QUEUED},
    Engine.SAMPLING: {EngineEvent.NOT_TAKEN: Engine.QUEUED, EngineEvent.BREAK: Engine.BROKEN},
    Engine.BROKEN: {EngineEvent.SEND: Engine.CONTINUING, EngineEvent.NOT_TAKEN: Engine.BROKEN},
    Engine.CONTINUING: {EngineEvent.NOT_TAKEN: Engine.BROKEN, EngineEvent.BREAK: Engine.BROKEN},
}
CLIENT: Mapping[Client, Mapping[ClientEvent, Client]] = {
    Client.WAITING: {ClientEvent.HEAD: Client.OPENED, ClientEvent.ORPHAN: Client.ORPHANED, ClientEvent.LEAVE: Client.LEFT},
    Client.OPENED: {ClientEvent.ORPHAN: Client.ORPHANED, ClientEvent.LEAVE: Client.LEFT},
    Client.ORPHANED: {
        ClientEvent.HEAD: Client.ORPHANED,  # although the client is gone
        ClientEvent.ORPHAN: Client.ORPHANED,  # another call waits for the reply: the grace period begins again
        ClientEvent.LEAVE: Client.LEFT,
    },
    Client.LEFT: {ClientEvent.HEAD: Client.LEFT, ClientEvent.LEAVE: Client.LEFT},
}
SHOWN: Mapping[Shown, Mapping[ShownEvent, Shown]] = {
    Shown.NOTHING: {ShownEvent.SHOW: Shown.BEGUN, ShownEvent.WITHHOLD: Shown.WITHHELD},
    Shown.WITHHELD: {},
    Shown.BEGUN: {ShownEvent.FINISH: Shown.ENDING},
    Shown.ENDING: {},
}

TERMINAL = frozenset({Record.UNOPENED, Record.STORED, Record.LOST})
"""States in which a call has ended."""
WRITING = frozenset({Record.OPENING, Record.STORING})
"""States in which the store is at work: what is stored is unknown until it has answered."""

_State = TypeVar("_State", bound=StrEnum)
_Event = TypeVar("_Event", bound=StrEnum)


class IllegalTransitionError(RuntimeError):
    """An event that the table of a party does not allow in its state."""


class Party(Generic[_State, _Event]):
    """One party of a call.

    Attributes:
        state: its state; only `advance` changes it.
    """

    __slots__ = ("_table", "state")

    def __init__(self, table: Mapping[_State, Mapping[_Event, _State]], state: _State) -> None:
        self._table, self.state = table, state

    def advance(self, event: _Event) -> None:
        """Change the state.

        Raises:
            IllegalTransitionError: the table does not have this transition.
        """
        try:
            self.state = self._table[self.state][event]
        except KeyError:
            raise IllegalTransitionError(f"{type(self.state).__name__.lower()}: what is {self.state} cannot {event}") from None


def may_cancel(record: Record) -> bool:
    """Whether the task of a call may be cancelled now. While the store writes, the cancellation waits for its answer."""
    return record not in WRITING


def may_have_sampled(engine: Engine) -> bool:
    """Whether an engine may have sampled tokens, so that the call is recorded with what is known of them."""
    return engine not in {Engine.IDLE, Engine.QUEUED}


def may_resample(shown: Shown) -> bool:
    """Whether the call may be made again: the client received nothing of its reply."""
    return shown in {Shown.NOTHING, Shown.WITHHELD}


def may_be_orphaned(record: Record, engine: Engine, client: Client, shown: Shown) -> bool:
    """Whether the call may continue without its client: an engine samples, and nothing of the reply was sent."""
    return record is Record.OPEN and may_have_sampled(engine) and client in {Client.WAITING, Client.OPENED} and shown is Shown.NOTHING


def may_answer_with_status(client: Client) -> bool:
    """Whether an error may be a response of its own. After the head was sent, it is an event in the stream."""
    return client is not Client.OPENED

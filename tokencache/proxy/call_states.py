"""Defines the states of a model call, and every legal transition between them. `call` follows this table.

The usual path is

    NEW → OPENING → OPEN → SAMPLING → STREAMING (or not) → STORING → STORED

An illegal transition raises `IllegalTransitionError`, in production as in tests. The cause can only be a bug in this package, so the state
of the call is unknown. The call is then closed in the store as after any other internal error: without a turn, and with the incident
`internal-error`, so that the session does not count as complete.
"""

from collections.abc import Mapping
from enum import StrEnum


class State(StrEnum):
    """The state of one model call."""

    NEW = "new"
    """The store does not know the call yet."""
    OPENING = "opening"
    """The store is opening the call."""
    OPENING_CANCELLED = "opening, cancelled"
    """The store is opening the call, and the client has left: the call is closed as soon as the store has answered."""
    OPEN = "open"
    """Open in the store. Its prompt is being planned; no engine has the call."""
    QUEUED = "queued"
    """No engine accepted the call. It waits to be planned and sent again."""
    SAMPLING = "sampling"
    """An engine may be sampling. The client has received nothing of the reply."""
    STREAMING = "streaming"
    """The client has received the beginning of the reply."""
    ORPHANED = "orphaned"
    """The client left before it received anything. The engine continues for a grace period."""
    ORPHANED_QUEUED = "orphaned, queued"
    """The client left, the grace period runs, and no engine has accepted the call yet."""
    ABANDONED = "abandoned"
    """Cancelled before an engine may have sampled. It must be closed without a turn."""
    CANCELLED = "cancelled"
    """Cancelled after an engine may have sampled. The received part must be recorded."""
    STORING = "storing"
    """The end of the call is being written to the store."""
    STORING_CANCELLED = "storing, cancelled"
    """The end of the call is being written, and the client has left: the call stops as soon as the store has answered."""
    UNOPENED = "unopened"
    """Terminal: never opened, because a duplicate is in flight, the store refused, or the client left at once."""
    STORED = "stored"
    """Terminal: the result of the call is in the store, or in the ledger while the store fails."""
    LOST = "lost"
    """Terminal: the store failed, and the policy is strict."""


class Event(StrEnum):
    """An event that changes the state of a call."""

    OPEN = "open"
    OPENED = "opened"
    NOT_OPENED = "not opened"
    SEND = "send"
    NOT_TAKEN = "not taken"
    SHOW = "show"
    ORPHAN = "orphan"
    CANCEL = "cancel"
    STORE = "store"
    WRITTEN = "written"
    FAILED = "failed"


TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    State.NEW: {Event.OPEN: State.OPENING, Event.CANCEL: State.UNOPENED},
    State.OPENING: {
        Event.OPENED: State.OPEN,
        Event.NOT_OPENED: State.UNOPENED,
        Event.CANCEL: State.OPENING_CANCELLED,
    },
    State.OPENING_CANCELLED: {
        Event.OPENED: State.ABANDONED,
        Event.NOT_OPENED: State.UNOPENED,
        Event.CANCEL: State.OPENING_CANCELLED,
    },
    State.OPEN: {
        Event.SEND: State.SAMPLING,
        Event.NOT_TAKEN: State.QUEUED,  # the engine went away while the prompt was planned
        Event.CANCEL: State.ABANDONED,
        Event.STORE: State.STORING,
    },
    State.QUEUED: {
        Event.SEND: State.SAMPLING,
        Event.NOT_TAKEN: State.QUEUED,
        Event.CANCEL: State.ABANDONED,
        Event.STORE: State.STORING,
    },
    State.SAMPLING: {
        Event.NOT_TAKEN: State.QUEUED,
        Event.SHOW: State.STREAMING,
        Event.ORPHAN: State.ORPHANED,
        Event.CANCEL: State.CANCELLED,
        Event.STORE: State.STORING,
    },
    State.STREAMING: {Event.CANCEL: State.CANCELLED, Event.STORE: State.STORING},
    State.ORPHANED: {
        Event.NOT_TAKEN: State.ORPHANED_QUEUED,
        Event.SHOW: State.ORPHANED,  # although the client is gone
        Event.ORPHAN: State.ORPHANED,  # another call waits for the reply: the grace period begins again
        Event.CANCEL: State.CANCELLED,
        Event.STORE: State.STORING,
    },
    State.ORPHANED_QUEUED: {
        Event.SEND: State.ORPHANED,
        Event.NOT_TAKEN: State.ORPHANED_QUEUED,
        Event.ORPHAN: State.ORPHANED_QUEUED,
        Event.CANCEL: State.ABANDONED,
        Event.STORE: State.STORING,
    },
    State.ABANDONED: {Event.CANCEL: State.ABANDONED, Event.STORE: State.STORING},
    State.CANCELLED: {Event.CANCEL: State.CANCELLED, Event.STORE: State.STORING},
    State.STORING: {Event.WRITTEN: State.STORED, Event.FAILED: State.LOST, Event.CANCEL: State.STORING_CANCELLED},
    State.STORING_CANCELLED: {
        Event.WRITTEN: State.STORED,
        Event.FAILED: State.LOST,
        Event.CANCEL: State.STORING_CANCELLED,
    },
    # The client may leave while the last bytes are sent to it, or while it waits for a duplicate.
    State.UNOPENED: {Event.CANCEL: State.UNOPENED},
    State.STORED: {Event.CANCEL: State.STORED},
    State.LOST: {Event.CANCEL: State.LOST},
}
"""Every legal transition."""

TERMINAL = frozenset({State.UNOPENED, State.STORED, State.LOST})
"""States in which a call has ended."""
DEFERRED = frozenset({State.OPENING_CANCELLED, State.STORING_CANCELLED})
"""States in which a cancellation waits for the store."""
ENDING = TERMINAL | {State.STORING, State.STORING_CANCELLED}
"""States in which the end of a call is being written, or has been written."""
SENT = frozenset({State.SAMPLING, State.STREAMING, State.ORPHANED, State.CANCELLED})
"""States in which an engine may have sampled."""


class IllegalTransitionError(RuntimeError):
    """An event that `TRANSITIONS` does not allow in the current state."""

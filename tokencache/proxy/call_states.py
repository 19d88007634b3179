"""Defines the states of a model call, and every legal transition between them. `call` runs calls by this table.

The usual path is

    NEW → OPENING → OPEN → SAMPLING → STREAMING (or not) → STORING → STORED

An illegal transition raises `IllegalTransitionError`, in production as in tests. It can only come from a mistake in this package, so
nothing is known about what would be recorded. The call is then closed in the store like after any other internal error: without a turn,
and with the incident `internal-error`, so that the trainer does not take the session for complete.
"""

from collections.abc import Mapping
from enum import StrEnum


class State(StrEnum):
    """The state of one model call."""

    NEW = "new"
    """The store was not asked yet."""
    OPENING = "opening"
    """The store is opening the call."""
    OPENING_CANCELLED = "opening, cancelled"
    """The same, and the client has left: the call is closed as soon as the store has answered."""
    OPEN = "open"
    """Open in the store. Its prompt is being planned; no engine has it."""
    QUEUED = "queued"
    """No engine took it. It waits to be planned and sent again."""
    SAMPLING = "sampling"
    """An engine may be sampling. The client has received nothing of the reply."""
    STREAMING = "streaming"
    """The client has received the beginning of the reply."""
    ORPHANED = "orphaned"
    """The client left before it received anything, and the engine goes on for a grace period."""
    ORPHANED_QUEUED = "orphaned, queued"
    """The same, and no engine has taken the call yet."""
    ABANDONED = "abandoned"
    """Cancelled before an engine may have sampled: to be closed without a turn."""
    CANCELLED = "cancelled"
    """Cancelled after an engine may have sampled: what was received is to be recorded."""
    STORING = "storing"
    """The end of the call is being written to the store."""
    STORING_CANCELLED = "storing, cancelled"
    """The same, and the client has left: the call stops as soon as the store has answered."""
    UNOPENED = "unopened"
    """Terminal: never opened. A duplicate is in flight, the store refused, or the client left at once."""
    STORED = "stored"
    """Terminal: the store (or, while it fails, the ledger) has what the call came to."""
    LOST = "lost"
    """Terminal: the store failed, and the policy is strict."""


class Event(StrEnum):
    """What happens to a call."""

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
        Event.SHOW: State.ORPHANED,  # to a client that is gone
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
"""States in which the end of a call is written, or was."""
SENT = frozenset({State.SAMPLING, State.STREAMING, State.ORPHANED, State.CANCELLED})
"""States in which an engine may have sampled."""


class IllegalTransitionError(RuntimeError):
    """An event that `TRANSITIONS` does not allow in the current state."""

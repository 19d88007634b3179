"""Edits the messages that a turn answered: messages are inserted or replaced, and the rest stays as it was recorded.

Places are those of the recorded messages, before any edit: 0 is the first, and -1 the last one before the turn's reply. The messages of a
later turn begin with those of an earlier one, so one edit fits all turns of a conversation. An edit whose place a turn does not have leaves
that turn as it was.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tokencache.core.context import Raw
from tokencache.core.reasons import Described, Reason

MOST_EDITS = 256
"""Edits of one request."""


class EditRefusal(Described):
    """Why a turn has no score under an edited context."""

    NOT_KEPT = "not-kept", "the messages of the turn are not stored, or cannot be read"
    MEDIA = "media", "the request contains images or other media, whose ids cannot be scored"
    REPLY_IN_PARTS = "reply-in-parts", "the client wrote the beginning of the reply, which no template renders as it was sent"
    TORN_RECORD = Reason.TORN_RECORD.value, Reason.TORN_RECORD.meaning
    SAMPLED_REPLY = "sampled-reply", "an edit replaces a reply that the model sampled in this history; every sampled reply keeps its ids"
    NO_PROOF = "no-proof", "nothing can be proven for this turn"
    RENDERED_OTHERWISE = (
        "rendered-otherwise",
        "without the edit, the engine does not render the prompt that was recorded, so its rendering proves nothing about the edited one",
    )
    UNPROVEN = "unproven", "it is not proven where a sampled reply is in the edited history"
    REPLY_CHANGES = "reply-changes", "with the edit, the template shows another part of a sampled reply, or ends it with another stop id"
    PROMPT_CHANGES = "prompt-changes", "with the edit, the template writes another generation prompt directly before the reply"
    TEMPLATE_REFUSES = Reason.TEMPLATE_REFUSES.value, "the chat template, or the engine, refuses the edited messages"
    NOT_SCORED = "not-scored", "the engine returned no log probabilities"


class Edit(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change of the recorded messages: exactly one of `insert` and `replace` is given, with at least one message.

    Attributes:
        at: the place: 0 is the first message, -1 the last. `None`: after the last one, directly before the reply.
        insert: messages (chat completions) to put before the message at this place.
        replace: messages to put in place of the message at this place.

    Raises:
        ValueError: none of both is given, or both are, or `replace` has no place.
    """

    at: int | None = None
    insert: list[dict[str, Any]] = []
    replace: list[dict[str, Any]] = []

    def __post_init__(self) -> None:
        """Check that it is one change."""
        if bool(self.insert) == bool(self.replace):
            raise ValueError("give `insert` or `replace`, one of both, with at least one message")
        if self.replace and self.at is None:
            raise ValueError("`replace` needs `at`, the place of the message to replace")

    def place(self, count: int) -> int | None:
        """Return its place among so many messages; `None` if they do not have it."""
        at = count if self.at is None else self.at + count if self.at < 0 else self.at
        return at if 0 <= at < count + bool(self.insert) else None


class EditedMessages(NamedTuple):
    """Messages after edits.

    Attributes:
        messages: the raw messages.
        places: the new place of each recorded message; -1 if it was replaced.
        edits: the indexes of the edits that changed them.
    """

    messages: list[Raw]
    places: list[int]
    edits: list[int]


def edit_messages(edits: Sequence[Edit], messages: Sequence[Raw]) -> EditedMessages:
    """Apply edits to recorded messages. Insertions at one place keep their order.

    Raises:
        ValueError: two edits replace the same message.
    """
    inserted: dict[int, list[Raw]] = {}
    replaced: dict[int, tuple[int, list[Raw]]] = {}
    applied = []
    for n, edit in enumerate(edits):
        place = edit.place(len(messages))
        if place is None:
            continue
        applied.append(n)
        written = [Raw(msgspec.json.encode(message)) for message in edit.insert or edit.replace]
        if edit.insert:
            inserted.setdefault(place, []).extend(written)
        elif place in replaced:
            raise ValueError(f"`edits[{n}]` replaces the message at {place} of a turn, as `edits[{replaced[place][0]}]` does")
        else:
            replaced[place] = n, written
    found: list[Raw] = []
    places = []
    for place, message in enumerate(messages):
        found += inserted.get(place, ())
        places.append(-1 if place in replaced else len(found))
        found += replaced[place][1] if place in replaced else [message]
    return EditedMessages([*found, *inserted.get(len(messages), ())], places, applied)

"""Says in words what changed in the request of each turn, compared with the turn that it could have continued.

A request is compared, message by message, with the history that the other turn left: its own request and its reply. The other turn is

- of a turn that continues one: that one, or the first other turn that continues it;
- otherwise the last turn whose request has the deepest message at the same index.

Requests are stored as deltas, and only what a delta adds is read. So the work is linear in what is stored, unless a request differs at its
beginning from one that is long: then the equal messages after it are compared too.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple

import msgspec
from rapidfuzz.distance import Postfix, Prefix

from tokencache.core.context import Context, Raw
from tokencache.core.messages import Message, canonical_arguments, digest, exact_digest
from tokencache.core.rules import function_names
from tokencache.core.turn import Turn
from tokencache.dialects.chat.vocabulary import read_message
from tokencache.trajectories.values import TurnChange

_SHOWN = 60
"""Characters of each side of a difference that are shown."""
_AROUND = 24
"""Characters before and after a difference that are shown with it, up to the next blank."""
_NAMED = 8
"""New messages, or tools, that are named."""


class ChangedMessage(NamedTuple):
    """The first message that differs, before and after; `None` if there is none, or if it cannot be read."""

    before: Message | None
    after: Message | None


class Comparisons:
    """Compares the requests of a session's turns, in the order in which they were recorded; contexts are whole (`core.context`)."""

    def __init__(self, turns: Sequence[Turn], contexts: Mapping[str, Context]) -> None:
        self._turns, self._contexts = turns, contexts
        self._number = {turn.id: number for number, turn in enumerate(turns)}
        self._read: dict[int, tuple[Message | None, bytes]] = {}
        """Messages and their digests by the `id` of the raw message, which whole contexts share."""

    def all(self) -> list[TurnChange]:
        """Say what changed in each turn's request."""
        children: dict[str, list[Turn]] = {}
        for turn in self._turns:
            children.setdefault(turn.parent or "", []).append(turn)
        newest: dict[tuple[int, bytes], Turn] = {}
        found = []
        other: Turn | None
        for turn in self._turns:
            own = self._own(turn)
            if turn.parent is not None and turn.parent in self._number:
                siblings = (child for child in children[turn.parent][:2] if child is not turn)
                other = next(siblings, self._turns[self._number[turn.parent]])
            else:
                shared = (newest[key] for key in reversed(own) if key in newest)
                other = next(shared, None) or self._base(turn)
            found.append(self._change(turn, other))
            newest |= dict.fromkeys(own, turn)
        return found

    def changed_message(self, change: TurnChange) -> ChangedMessage:
        """Return the message that a change names."""
        if change.message is None or change.against is None:
            return ChangedMessage(None, None)
        other = self._turns[change.against]
        before, after = self._contexts[other.id].messages, self._contexts[change.turn].messages
        at = change.message
        return ChangedMessage(self._message(before[at]) if at < len(before) else other.served, self._message(after[at]))

    def _base(self, turn: Turn) -> Turn | None:
        return self._turns[self._number[turn.context_base]] if turn.context_base in self._number else None

    def _own(self, turn: Turn) -> list[tuple[int, bytes]]:
        """Return the indices and digests of the messages that a request does not share with its context base."""
        if turn.id not in self._contexts:
            return []
        start = turn.context_shared if self._base(turn) is not None else 0
        return [(at, self._digest(raw)) for at, raw in enumerate(self._contexts[turn.id].messages[start:], start)]

    def _change(self, turn: Turn, other: Turn | None) -> TurnChange:
        at, text = None, ""
        if turn.id not in self._contexts or (other is not None and other.id not in self._contexts):
            other, text = None, "the messages are not kept"
        elif other is not None:
            at, text = self._compared(turn, other)
        elif self._number[turn.id]:
            text = "no earlier request has one of these messages in its place"
        return TurnChange(turn=turn.id, number=self._number[turn.id], against=None if other is None else self._number[other.id], message=at,
                          text=text)  # fmt: skip

    def _compared(self, turn: Turn, other: Turn) -> tuple[int | None, str]:
        """Compare the request of a turn with the history that another one left: the first message that differs, and all in words."""
        now, then = self._contexts[turn.id], self._contexts[other.id]
        around = _arguments(turn, other, now, then)
        start = turn.context_shared if turn.context_base == other.id else 0
        at = next((i for i in count(start) if i >= min(len(now.messages), len(then.messages) + 1) or self._differs(i, now, other)), 0)
        if at == len(now.messages):
            same = len(then.messages) == at
            words = "the same messages" if same else f"ends before its message {at}" if at < len(then.messages) else "ends with its reply"
            return None, "; ".join([*around, words])
        if at > len(then.messages):
            new = [_clipped(message.role) if message is not None else "unreadable" for message in map(self._message, now.messages[at:])]
            named = ", ".join(new[:_NAMED]) + (", …" if len(new) > _NAMED else "")
            return None, "; ".join([*around, f"{len(new)} new message{'' if len(new) == 1 else 's'}: {named}"])
        before = self._message(then.messages[at]) if at < len(then.messages) else other.served
        return at, "; ".join([*around, f"message {at}, {_difference(before, self._message(now.messages[at]))}"])

    def _differs(self, at: int, now: Context, other: Turn) -> bool:
        then, raw = self._contexts[other.id].messages, now.messages[at]
        if at < len(then):
            return raw is not then[at] and self._digest(raw) != self._digest(then[at])
        message, own = self._known(raw)
        return own != digest(other.served) or (message is not None and message.thought not in {"", other.served.thought})

    def _message(self, raw: Raw) -> Message | None:
        return self._known(raw)[0]

    def _digest(self, raw: Raw) -> bytes:
        return self._known(raw)[1]

    def _known(self, raw: Raw) -> tuple[Message | None, bytes]:
        known = self._read.get(id(raw))
        if known is None:
            try:
                message = read_message(msgspec.json.decode(raw))
                known = message, digest(message) if message.role == "assistant" else exact_digest(message)
            except (ValueError, RecursionError):
                known = None, bytes(raw)
            self._read[id(raw)] = known
        return known


def _arguments(turn: Turn, other: Turn, now: Context, then: Context) -> list[str]:
    """Say what differs beside the messages."""
    found = [] if turn.model == other.model else [f"the model differs: {_sides(other.model, turn.model)}"]
    if now.tools != then.tools:
        ours, theirs = (dict.fromkeys(map(_clipped, function_names(one.tools))) for one in (then, now))
        named = [f"without {name}" for name in ours if name not in theirs]
        named += [f"with {name}" for name in theirs if name not in ours]
        found.append(f"the tools differ: {', '.join(named[:_NAMED]) or 'in their descriptions or order'}")
    arguments = [(one.members | one.kwargs) for one in (then, now)]
    names = [name for name in {**arguments[0], **arguments[1]} if arguments[0].get(name) != arguments[1].get(name)]
    return found + ([f"template arguments differ: {', '.join(map(_clipped, names[:_NAMED]))}"] if names else [])


def _difference(before: Message | None, after: Message | None) -> str:
    """Say how two messages in one place differ."""
    if before is None or after is None:
        return "cannot be read"
    if before.role != after.role:
        return f"{_clipped(after.role)} in place of {_clipped(before.role)}: {_clipped(_said(before))} → {_clipped(_said(after))}"
    return f"{_clipped(after.role)}, {_field(before, after)}"


def _field(before: Message, after: Message) -> str:
    """Say which part of a message differs first, and how."""
    if _text(before) != _text(after):
        return f"differs: {_sides(_text(before), _text(after))}"
    if before.calls != after.calls and (found := _calls(before, after)):
        return found
    if before.thought != after.thought:
        return f"reasoning differs: {_sides(before.thought, after.thought)}"
    if before.answers != after.answers:
        return f"answers another call: {_sides(before.answers or '', after.answers or '')}"
    return "has other images or other media" if before.media != after.media else "differs in its form"


def _calls(before: Message, after: Message) -> str:
    """Say how calls differ; `""` if only their ids or their form do."""
    if len(before.calls) != len(after.calls):
        return f"has {len(after.calls)} calls in place of {len(before.calls)}"
    for number, (ours, theirs) in enumerate(zip(before.calls, after.calls, strict=True), 1):
        if ours.name != theirs.name:
            return f"call {number} differs: {_sides(ours.name, theirs.name)}"
        if canonical_arguments(ours.arguments) != canonical_arguments(theirs.arguments):
            return f"arguments of call {number} ({_clipped(ours.name)}) differ: {_sides(ours.arguments, theirs.arguments)}"
    return ""


def _text(message: Message) -> str:
    return message.text if message.role == "assistant" else message.content or ""


def _said(message: Message) -> str:
    return message.text or " ".join(f"{call.name}({call.arguments})" for call in message.calls)


def _sides(before: str, after: str) -> str:
    """Write the parts of two texts between their common beginning and their common end, up to the next blanks."""
    head = Prefix.similarity(before, after)
    tail = Postfix.similarity(before[head:], after[head:])
    shared, rest = before[max(head - _AROUND, 0) : head], before[len(before) - tail :][:_AROUND]
    begin = head - len(shared) + max(map(shared.rfind, " \n\t")) + 1
    more = min((at for at in map(rest.find, " \n\t") if at >= 0), default=len(rest))
    return " → ".join(_clipped(text[begin : len(text) - tail + more]) for text in (before, after))


def _clipped(text: str) -> str:
    shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
    return shown.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t") if text.strip() else f'"{shown}"'.replace("\n", "\\n")

"""Writes the conversation of a sequence as a transcript, next to its tokens.

The messages are those of the request of the sequence's last turn, and that turn's reply. A reply that was recognized is shown as it was
served, with the reasoning that most harnesses drop. Any other message is shown as the harness sent it.

A window of several messages cuts long texts, so that a response stays small. A window of one message has its texts whole.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from tokencache.api.viewer.tokens import Run
from tokencache.core.context import whole_context
from tokencache.core.media import MediaReference, references_in
from tokencache.core.messages import Message
from tokencache.core.turn import Turn
from tokencache.dialects.chat.vocabulary import UnreadableError, read_message

MAX_MESSAGES = 100
"""Messages in one response."""
SHOWN = 4000
"""Characters of each text in a window of several messages."""
MAX_SHOWN = 1_000_000
"""Characters of each text in a window of one message."""

_Read = tuple[Message | None, Sequence[MediaReference]]
"""A message, and its parts that are not text."""
_REPLIES = frozenset({"sampled", "unscored", "earlier", "anchor"})


class Place(NamedTuple):
    """A message of a conversation.

    Attributes:
        at: its index in the conversation.
        message: the message; `None` if it cannot be read.
        media: its parts that are not text.
        turn: the turn that sampled it; `""` if it is not a recognized reply.
        asked: the turn whose request has it first; `""` for a recognized reply.
        tokens: the half-open range of tokens that holds it. Neighbouring messages that no reply separates share one range.
    """

    at: int
    message: Message | None
    media: Sequence[MediaReference]
    turn: str
    asked: str
    tokens: tuple[int, int]


class Transcript(NamedTuple):
    """A conversation. Without `kept`, the requests were not stored, and only the replies are known."""

    places: Sequence[Place]
    kept: bool


def needed_contexts(last: Turn, turns: Mapping[str, Turn]) -> list[str]:
    """Return the ids of the turns whose stored contexts together are the request of a turn."""
    names = [last.id]
    while (base := turns[names[-1]].context_base) is not None:
        names.append(base)
    return names


def transcribe(last: Turn, turns: Mapping[str, Turn], contexts: Mapping[str, bytes], runs: Sequence[Run]) -> Transcript:
    """Write the conversation of the sequence that ends with a turn, and has these runs of tokens.

    `turns` are all turns of the session, and `contexts` the packed contexts that `needed_contexts` names, by turn id.

    Raises:
        KeyError, ValueError: the records do not fit together.
    """
    line = _ancestry(last, turns)
    replies = {last.messages: last.id}
    for turn in line:
        replies |= {anchor.place: anchor.turn for anchor in turn.anchors if anchor.place >= 0}
        if turn is not last:
            replies[turn.messages] = turn.id
    kept = all(contexts[name] for name in needed_contexts(last, turns))
    messages: dict[int, _Read] = {at: (turns[name].served, ()) for at, name in replies.items() if name in turns}
    if kept:
        sent = whole_context(last.id, turns, contexts).messages
        messages = {at: _read(raw) for at, raw in enumerate(sent)} | messages
    spans = {run.turn: (run.start, run.end) for run in runs if run.kind in _REPLIES}
    return Transcript(_placed(messages, replies, line, spans, runs[-1].end if runs else 0), kept)


def _ancestry(last: Turn, turns: Mapping[str, Turn]) -> list[Turn]:
    """Return a turn and those that its prompt extends, the oldest first."""
    line = [last]
    while (parent := turns.get(line[-1].parent or "")) is not None:
        line.append(parent)
    return line[::-1]


def _placed(
    messages: Mapping[int, _Read], replies: Mapping[int, str], line: Sequence[Turn], spans: Mapping[str, tuple[int, int]], end: int
) -> list[Place]:
    found = []
    lengths = [turn.messages for turn in line]
    ends = sorted((at, spans[name]) for at, name in replies.items() if name in spans)
    gaps = iter(pairwise([(-1, (0, 0)), *ends, (len(messages), (end, end))]))
    (_, before), (until, after) = next(gaps)
    for at in sorted(messages):
        while at > until:
            (_, before), (until, after) = next(gaps)
        name = replies.get(at, "")
        asked = "" if name else line[bisect_right(lengths, at)].id
        found.append(Place(at, *messages[at], name, asked, after if at == until else (before[1], after[0])))
    return found


def _read(raw: bytes) -> _Read:
    try:
        entry = msgspec.json.decode(raw)
        return read_message(entry), references_in(entry)
    except (UnreadableError, msgspec.DecodeError, RecursionError):
        return None, ()


def message_objects(places: Sequence[Place]) -> list[dict[str, Any]]:
    """Write messages as JSON values. Several have the first `SHOWN` characters of each text, one has `MAX_SHOWN`.

    `message` is `None` if the message cannot be read.
    """
    limit = MAX_SHOWN if len(places) == 1 else SHOWN
    return [
        {
            "at": place.at,
            "turn": place.turn,
            "asked": place.asked,
            "tokens": place.tokens,
            "message": _message(place.message, place.media, limit) if place.message is not None else None,
        }
        for place in places
    ]


def _message(message: Message, media: Sequence[MediaReference], limit: int) -> dict[str, Any]:
    """Write a message. Images and other media follow its texts: `name` is the modality, `id` the digest of the bytes (`""` for a URL)."""
    shown = [{"kind": "media", "text": "", "length": 0, "cut": False, "name": one.modality, "id": one.sha256} for one in media]
    parts = [*_parts(message, limit), *shown]
    return {"role": message.role, "name": message.name, "answers": message.answers, "media": bool(message.media), "parts": parts}


def _parts(message: Message, limit: int) -> list[dict[str, Any]]:
    """Write what a message says: `reasoning`, `text` and `call` parts. `length` is the number of characters of the whole text.

    A part with `cut` has only the first ones.
    """
    reply = message.role == "assistant"
    found = [("reasoning", message.thought if reply else "", "", ""), ("text", message.text if reply else message.content or "", "", "")]
    found += [("call", call.arguments, call.name, call.id) for call in message.calls]
    return [
        {"kind": kind, "text": text[:limit], "length": len(text), "cut": len(text) > limit, "name": name, "id": id_}
        for kind, text, name, id_ in found
        if text or kind == "call"
    ]

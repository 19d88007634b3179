"""Compares each reply in the history of a turn as it was served with how the harness sent it back.

Each assistant message of a request is shown next to the recorded reply that it equals or resembles, with the rules that explain the
difference and the places where the two texts differ. This shows which rules were applied, and why a rollout split: a `continue` or `branch`
depends on its last reply, every other match on all replies of its history.

A verdict is `same`, `equivalent`, `rewritten` or `foreign` (`core.verdict`). For this comparison all rules are allowed, whatever the
harness. The verdict is `unknown` if no recorded turn answered at this place or has the same reply at another place.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from rapidfuzz.distance import Indel, Postfix, Prefix

from tokencache.core.added_text import judge_echo
from tokencache.core.context import Context, whole_context
from tokencache.core.messages import Message, digest
from tokencache.core.rules import RULES, Leniency, ToolNames
from tokencache.core.turn import Turn
from tokencache.core.verdict import Verdict
from tokencache.dialects.chat.vocabulary import UnreadableError, read_message

MAX_REPLIES = 64
"""Largest number of replies that are compared: the last ones of the history."""

_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_DIFFABLE = 16_000_000
"""Words are compared one by one if the product of the two word counts is at most this. At the limit that takes about 10 ms."""
_MIN_SHARED = 3
"""Fewest characters that two words must share at one end; fewer are treated as a coincidence."""
_SHOWN = 400
"""Characters that are shown at both ends of a long equal part."""
_RANK = {"same": 0, "equivalent": 1, "rewritten": 2, "foreign": 3}

Segment = tuple[str, str, str]
"""(kind, served text, echoed text). The kind is `same`, `differs`, or `left-out`, for which both texts are a character count."""


class ReplyComparison(msgspec.Struct, frozen=True):
    """A reply of a history, next to the recorded turn that served it.

    Attributes:
        at: its index among the messages of the request.
        turn: the turn that served it; `""` if none is known.
        verdict, rules: how it compares, and the rules that explain the difference.
        relied: whether the prompt holds the exact ids of that turn here.
        elsewhere: whether that turn answered other messages than those before this reply.
        parts: the fields that either side has: (name, segments).
    """

    at: int
    turn: str
    verdict: str
    rules: tuple[str, ...]
    relied: bool
    elsewhere: bool
    parts: tuple[tuple[str, tuple[Segment, ...]], ...]


class _Reply(NamedTuple):
    at: int
    message: Message


def compare_replies(turn: Turn, turns: Sequence[Turn], contexts: Mapping[str, bytes]) -> list[ReplyComparison]:
    """Compare the replies in the history of a turn with what was served, in the order of the history.

    `turns` are all turns of the session, in the order in which they were recorded; `contexts` are their packed contexts, by turn id.

    Raises:
        KeyError, ValueError: the records do not fit together.
    """
    lookup = {one.id: one for one in turns}
    context = _context(turn.id, lookup, contexts)
    every_rule = Leniency(harness_rules=frozenset(RULES), tools=ToolNames(context.tools))
    messages = _messages(context)
    replies = [_Reply(at, message) for at, message in enumerate(messages) if message is not None and message.role == "assistant"]
    parent = lookup.get(turn.parent or "")
    if parent is not None:
        replies = [reply for reply in replies if reply.at >= parent.messages]
    replies = replies[-MAX_REPLIES:]
    relied = _relied(turn, parent, replies, lookup, every_rule)
    earlier = [one for one in turns if one.created < turn.created]
    found = []
    for reply in replies:
        by = relied.get(reply.at)
        here = by or _most_similar(_in_place(reply, messages, earlier, lookup, contexts), reply, every_rule)
        source = here or _with_same_text(reply, earlier)
        served = source.served if source is not None else None
        verdict = judge_echo(source, reply.message, every_rule) if source is not None else Verdict("foreign")
        found.append(
            ReplyComparison(
                at=reply.at,
                turn=source.id if source is not None else "",
                verdict=verdict.kind if source is not None else "unknown",
                rules=verdict.rules,
                relied=by is not None,
                elsewhere=here is not source,
                parts=compare_parts(served, reply.message),
            )
        )
    return found


def _context(turn: str, lookup: Mapping[str, Turn], contexts: Mapping[str, bytes]) -> Context:
    return whole_context(turn, lookup, contexts) if contexts.get(turn) else Context()


def _messages(context: Context) -> list[Message | None]:
    """Read the messages of a request; `None` for one that cannot be read."""
    read: list[Message | None] = []
    for raw in context.messages:
        try:
            read.append(read_message(msgspec.json.decode(raw)))
        except (UnreadableError, msgspec.DecodeError):
            read.append(None)
    return read


def _relied(
    turn: Turn, parent: Turn | None, replies: Sequence[_Reply], lookup: Mapping[str, Turn], every_rule: Leniency
) -> dict[int, Turn]:
    """Find the replies that the prompt holds with their exact ids: message index → turn."""
    if parent is not None:
        return {reply.at: parent for reply in replies if reply.at == parent.messages}
    relied: dict[int, Turn] = {}
    left = list(replies)
    for anchor in reversed(turn.anchors):  # anchors and replies are both in the order of the history
        source = lookup.get(anchor.turn)
        while left and source is not None:
            reply = left.pop()
            if judge_echo(source, reply.message, every_rule).kind != "foreign":
                relied[reply.at] = source
                break
    return relied


def _in_place(
    reply: _Reply, messages: Sequence[Message | None], earlier: Sequence[Turn], lookup: Mapping[str, Turn], contexts: Mapping[str, bytes]
) -> Iterator[Turn]:
    """Find the recorded turns that answered exactly the messages before this reply."""
    before = [_digest(message) for message in messages[: reply.at]]
    for one in earlier:
        if one.messages == reply.at and [_digest(message) for message in _messages(_context(one.id, lookup, contexts))] == before:
            yield one


def _most_similar(turns: Iterable[Turn], reply: _Reply, every_rule: Leniency) -> Turn | None:
    return min(turns, key=lambda one: _RANK[judge_echo(one, reply.message, every_rule).kind], default=None)


def _with_same_text(reply: _Reply, earlier: Sequence[Turn]) -> Turn | None:
    """Find the last turn with an equal reply, whatever messages came before it."""
    own = digest(reply.message)
    return next((one for one in reversed(earlier) if digest(one.served) == own), None)


def _digest(message: Message | None) -> bytes:
    return digest(message) if message is not None else b""


def compare_parts(served: Message | None, echoed: Message) -> tuple[tuple[str, tuple[Segment, ...]], ...]:
    """Compare the fields that either of two messages has: names, and segments. The first message may be missing."""
    ours, theirs = dict(_fields(served)) if served is not None else {}, dict(_fields(echoed))
    return tuple((name, segments(ours.get(name, ""), theirs.get(name, ""))) for name in {**ours, **theirs})


def _fields(message: Message) -> list[tuple[str, str]]:
    found = [("reasoning", message.reasoning or ""), ("content", message.content or "")]
    for n, call in enumerate(message.calls, 1):
        found += [(f"call {n} id", call.id), (f"call {n} name", call.name), (f"call {n} arguments", call.arguments)]
    return [(name, text) for name, text in found if text]


def segments(served: str, echoed: str) -> tuple[Segment, ...]:
    """Split two texts into equal and different parts. Long equal parts are cut in the middle.

    Words are compared with words first, then the characters at the ends of different words.
    """
    ours, theirs = _WORD.findall(served), _WORD.findall(echoed)
    if len(ours) * len(theirs) > _DIFFABLE:
        return _ends(served, echoed)
    found: list[Segment] = []
    a = b = 0
    for block in Indel.opcodes(ours, theirs).as_matching_blocks():  # the last one is empty, and at the end
        if (a, b) != (block.a, block.b):
            found += _ends("".join(ours[a : block.a]), "".join(theirs[b : block.b]))
        a, b = block.a + block.size, block.b + block.size
        found += _same("".join(ours[block.a : a]))
    return tuple(_joined(found))


def _joined(found: Sequence[Segment]) -> list[Segment]:
    """Join neighbouring segments of the same kind."""
    joined: list[Segment] = []
    for kind, ours, theirs in found:
        if joined and joined[-1][0] == kind != "left-out":
            joined[-1] = (kind, joined[-1][1] + ours, joined[-1][2] + theirs)
        else:
            joined.append((kind, ours, theirs))
    return joined


def _ends(served: str, echoed: str) -> tuple[Segment, ...]:
    """Split two texts into a common beginning, a common end, and the part between them."""
    head = _if_enough(Prefix.similarity(served, echoed))
    tail = _if_enough(Postfix.similarity(served[head:], echoed[head:]))
    ours, theirs = served[head : len(served) - tail], echoed[head : len(echoed) - tail]
    between: list[Segment] = [("differs", ours, theirs)] if ours or theirs else []
    return (*_same(served[:head]), *between, *_same(served[len(served) - tail :]))


def _if_enough(shared: int) -> int:
    return shared if shared >= _MIN_SHARED else 0


def _same(text: str) -> list[Segment]:
    if len(text) <= 3 * _SHOWN:
        return [("same", text, text)] if text else []
    count = str(len(text) - 2 * _SHOWN)
    return [("same", text[:_SHOWN], text[:_SHOWN]), ("left-out", count, count), ("same", text[-_SHOWN:], text[-_SHOWN:])]

"""Echoes: what was served and what the harness sent back, side by side.

A turn's request holds what the model said before, as the harness remembers it. Here each such message is put beside the reply
that it is, or seems to be, with the rules that explain the difference and the places where the two texts differ. So a person
sees what was forgiven, and of a rollout that split, why: a `continue` or `branch` is judged by its last reply, all else by every
reply in its history.

A verdict is `same`, `equivalent`, `rewritten` or `foreign` (`core.verdict`), under all rules that exist, whoever vouches for
them; or `unknown` where no turn is recorded that answers in this place, or said the same in another.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from rapidfuzz.distance import Indel

from tokencache.core.context import whole_context
from tokencache.core.messages import Message, digest
from tokencache.core.rules import RULES, Leniency
from tokencache.core.turn import Turn
from tokencache.core.verdict import Verdict, judge
from tokencache.dialects.chat.messages import UnreadableError, read_message

MOST = 64
"""Replies of one history that are compared, the last ones first."""

_GENEROUS = Leniency(vouched=frozenset(rule.name for rule in RULES))
_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_DIFFABLE = 16_000_000
"""Words of the one text times those of the other, up to which they are compared one by one: some 10 ms."""
_WORTH = 3
"""Characters that two words must share at an end for it not to be chance."""
_SHOWN = 400
"""Characters at either end of a long equal stretch that are shown."""
_RANK = {"same": 0, "equivalent": 1, "rewritten": 2, "foreign": 3}

Segment = tuple[str, str, str]
"""(`same` | `differs` | `left-out`, what was served, what came back); of `left-out` both are how many characters it were."""


class ReplyComparison(msgspec.Struct, frozen=True):
    """A reply in a history beside what was served.

    Attributes:
        at: its place among the request's messages.
        turn: the turn that was served; `""` if none is known.
        verdict, rules: what it is, and what explains the difference.
        relied: the request relies on it: the prompt holds that turn's exact ids here.
        elsewhere: that turn said it behind other messages than these.
        parts: the fields that are there on either side: (name, segments).
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


def echoes(turn: Turn, turns: Sequence[Turn], contexts: Mapping[str, bytes]) -> list[ReplyComparison]:
    """Compare the replies in a turn's history with what was served, in the order of the history.

    Args:
        turn: whose history.
        turns: all turns of the session, in the order they were recorded.
        contexts: their contexts, packed.

    Raises:
        KeyError, ValueError: the records are torn.
    """
    lookup = {one.id: one for one in turns}
    messages = _messages(turn.id, lookup, contexts)
    replies = [_Reply(at, message) for at, message in enumerate(messages) if message is not None and message.role == "assistant"]
    parent = lookup.get(turn.parent or "")
    if parent is not None:
        replies = [reply for reply in replies if reply.at >= parent.messages]
    replies = replies[-MOST:]
    relied = _relied(turn, parent, replies, lookup)
    earlier = [one for one in turns if one.created < turn.created]
    found = []
    for reply in replies:
        by = relied.get(reply.at)
        here = by or _in_place(reply, messages, earlier, lookup, contexts)
        whose = here or _by_words(reply, earlier)
        verdict = judge(whose.served, reply.message, _GENEROUS) if whose is not None else Verdict("foreign")
        parts = _parts(whose.served if whose is not None else None, reply.message)
        kind = verdict.kind if whose is not None else "unknown"
        found.append(
            ReplyComparison(reply.at, whose.id if whose is not None else "", kind, verdict.rules, by is not None, here is not whose, parts)
        )
    return found


def _messages(turn: str, lookup: Mapping[str, Turn], contexts: Mapping[str, bytes]) -> list[Message | None]:
    """The messages of a turn's request; `None` for one that cannot be read."""
    if not contexts.get(turn):
        return []
    read: list[Message | None] = []
    for raw in whole_context(turn, lookup, contexts).messages:
        try:
            read.append(read_message(msgspec.json.decode(raw)))
        except (UnreadableError, msgspec.DecodeError):
            read.append(None)
    return read


def _relied(turn: Turn, parent: Turn | None, replies: Sequence[_Reply], lookup: Mapping[str, Turn]) -> dict[int, Turn]:
    """Which replies the prompt holds with their exact ids, by their place."""
    if parent is not None:
        return {reply.at: parent for reply in replies if reply.at == parent.messages}
    relied: dict[int, Turn] = {}
    left = list(replies)
    for anchor in reversed(turn.anchors):  # both stand in the order of the history
        whose = lookup.get(anchor.turn)
        while left and whose is not None:
            reply = left.pop()
            if judge(whose.served, reply.message, _GENEROUS).kind != "foreign":
                relied[reply.at] = whose
                break
    return relied


def _in_place(
    reply: _Reply, messages: Sequence[Message | None], earlier: Sequence[Turn], lookup: Mapping[str, Turn], contexts: Mapping[str, bytes]
) -> Turn | None:
    """The recorded turn that answered just what stands before this reply; of several, the one that it is most like."""
    before = [_digest(message) for message in messages[: reply.at]]
    best: tuple[int, Turn] | None = None
    for one in earlier:
        if one.messages != reply.at:
            continue
        if [_digest(message) for message in _messages(one.id, lookup, contexts)] != before:
            continue
        rank = _RANK[judge(one.served, reply.message, _GENEROUS).kind]
        if best is None or rank < best[0]:
            best = (rank, one)
    return best[1] if best else None


def _by_words(reply: _Reply, earlier: Sequence[Turn]) -> Turn | None:
    """The last turn that said the very same, whatever stood before it."""
    own = digest(reply.message)
    return next((one for one in reversed(earlier) if digest(one.served) == own), None)


def _digest(message: Message | None) -> bytes:
    return digest(message) if message is not None else b""


def _parts(served: Message | None, echoed: Message) -> tuple[tuple[str, tuple[Segment, ...]], ...]:
    ours, theirs = dict(_fields(served)) if served is not None else {}, dict(_fields(echoed))
    return tuple((name, segments(ours.get(name, ""), theirs.get(name, ""))) for name in {**ours, **theirs})


def _fields(message: Message) -> list[tuple[str, str]]:
    found = [("reasoning", message.reasoning or ""), ("content", message.content or "")]
    for n, call in enumerate(message.calls, 1):
        found += [(f"call {n} id", call.id), (f"call {n} name", call.name), (f"call {n} arguments", call.arguments)]
    return [(name, text) for name, text in found if text]


def segments(served: str, echoed: str) -> tuple[Segment, ...]:
    """Part two texts into what is the same and what differs; long stretches that are the same are cut in their middle.

    Words are compared with words, then the characters at their ends.
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
    """Segments of a kind that stand beside each other are one."""
    joined: list[Segment] = []
    for kind, ours, theirs in found:
        if joined and joined[-1][0] == kind != "left-out":
            joined[-1] = (kind, joined[-1][1] + ours, joined[-1][2] + theirs)
        else:
            joined.append((kind, ours, theirs))
    return joined


def _ends(served: str, echoed: str) -> tuple[Segment, ...]:
    """Part two texts into a common beginning, a common end, and what is between."""
    shortest = min(len(served), len(echoed))
    head = _worth(next((i for i in range(shortest) if served[i] != echoed[i]), shortest))
    tail = _worth(next((i for i in range(shortest - head) if served[-1 - i] != echoed[-1 - i]), shortest - head))
    ours, theirs = served[head : len(served) - tail], echoed[head : len(echoed) - tail]
    between: list[Segment] = [("differs", ours, theirs)] if ours or theirs else []
    return (*_same(served[:head]), *between, *_same(served[len(served) - tail :]))


def _worth(shared: int) -> int:
    return shared if shared >= _WORTH else 0


def _same(text: str) -> list[Segment]:
    if len(text) <= 3 * _SHOWN:
        return [("same", text, text)] if text else []
    count = str(len(text) - 2 * _SHOWN)
    return [("same", text[:_SHOWN], text[:_SHOWN]), ("left-out", count, count), ("same", text[-_SHOWN:], text[-_SHOWN:])]

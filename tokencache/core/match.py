"""Match: which recorded turn does this history continue?

The session is a tree of turns, never a list: sub-agents interleave, turns vanish, byte-identical requests are sent
again, forks replay old history. Every delivered reply is indexed twice: by the chain up to and including it (found
when nothing before it was touched) and by its own digest (found wherever it stands). Matching walks the history from
its end: the deepest chain key that is known names the parent; replies behind it that are known by their own digest
become *anchors* of a resplice.

==========  =========================================================================================================
`root`      nothing the model said is in the history
`continue`  the history is a turn's messages, its reply, and new messages
`branch`    the same, from a turn that already has a continuation
`resplice`  the context was edited before or between replies that are still the model's own
`plain`     the history holds replies, and none of them is known for certain
==========  =========================================================================================================

Never guess: where several recorded turns fit and their tokens differ, none is taken.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec
import xxhash

from tokencache.core.canonical import Message
from tokencache.core.chain import Conversation, link
from tokencache.core.turn import MatchKind, Turn
from tokencache.core.verdict import Verdict, judge


class Hit(msgspec.Struct, frozen=True):
    """A recorded turn found under a key, and whether another turn already continues it."""

    turn: Turn
    continued: bool = False


DISAGREED = "engine-disagrees"
"""The mark of a turn whose prompt was not what was sent: nothing may continue it."""

Hits = Mapping[bytes, Sequence[Hit]]


class Match(NamedTuple):
    """How a history relates to what was recorded.

    `at` counts the messages that the parent's prefix covers. `anchors` are (place in the history, turn), in order.
    """

    kind: MatchKind
    reason: str = ""
    parent: Turn | None = None
    at: int = 0
    anchors: tuple[tuple[int, Turn], ...] = ()
    forgiven: tuple[str, ...] = ()


def chain_key(chain: bytes) -> bytes:
    """Name a place in a conversation: 17 bytes."""
    return b"c" + chain


def reply_key(digest: bytes, voice: bytes) -> bytes:
    """Name a reply regardless of its context, but not of the model and template arguments that it was sampled under: 17 bytes."""
    return b"r" + xxhash.xxh3_128_digest(voice + digest)


def keys_of_turn(conversation: Conversation, served: Message, digest: bytes) -> tuple[bytes, bytes]:
    """The keys under which a reply to `conversation` will be looked for; `digest` is that of `served`."""
    return chain_key(link(conversation.chain[-1], served, digest)), reply_key(digest, conversation.voice)


def wanted(conversation: Conversation, last: int | None = None) -> list[bytes]:
    """The keys to look up for a history, the deepest first; the first chain key that is known ends the search.

    `last` takes those of so many of its last replies only: nearly always the very last one is known.
    """
    keys = []
    for i in islice(conversation.replies(), last):
        keys.append(chain_key(conversation.chain[i + 1]))
        keys.append(reply_key(conversation.digests[i], conversation.voice))
    return keys


def match(conversation: Conversation, hits: Hits) -> Match:
    """Relate a history to the recorded turns in `hits` (the values found under `wanted` keys)."""
    anchors: list[tuple[int, Turn]] = []
    forgiven: set[str] = set()
    reasons: list[str] = []
    for i in conversation.replies():
        echoed = conversation.messages[i]
        chosen = _choose(echoed, hits.get(chain_key(conversation.chain[i + 1]), ()), in_place=True)
        if isinstance(chosen, _Found):
            forgiven.update(chosen.verdict.rules)
            return _continue(conversation, chosen.hit, i + 1, anchors, (forgiven, reasons))
        if chosen is None:
            chosen = _choose(echoed, hits.get(reply_key(conversation.digests[i], conversation.voice), ()), in_place=False)
        if isinstance(chosen, _Found):
            anchors.append((i, chosen.hit.turn))
            forgiven.update(chosen.verdict.rules)
        else:
            reasons.append(chosen or "unrecognised-reply")
    if not anchors and not reasons:
        return Match("root")
    anchors = _unique(anchors)
    if anchors:
        return Match("resplice", "context-edited", None, 0, tuple(reversed(anchors)), tuple(sorted(forgiven)))
    return Match("plain", reasons[0] if reasons else "ambiguous-reply")


def _continue(conversation: Conversation, hit: Hit, at: int, anchors: list[tuple[int, Turn]], found: tuple[set[str], list[str]]) -> Match:
    forgiven, reasons = found
    rules = tuple(sorted(forgiven))
    inside = set(conversation.digests[:at]) if anchors else ()  # what stands in the parent's prefix cannot stand behind it, too
    kept = tuple(reversed([(i, turn) for i, turn in _unique(anchors) if conversation.digests[i] not in inside]))
    if kept:
        return Match("resplice", "context-edited", hit.turn, at, kept, rules)
    reason = reasons[0] if reasons else ""
    if any(m.role == "assistant" for m in conversation.messages[at:]) and not reason:
        reason = "ambiguous-reply"
    return Match("branch" if hit.continued else "continue", reason, hit.turn, at, (), rules)


class _Found(NamedTuple):
    hit: Hit
    verdict: Verdict


def _choose(echoed: Message, hits: Sequence[Hit], *, in_place: bool) -> _Found | str | None:
    """Pick the one turn that an echoed reply is; a word for why none can be picked; None where there is nothing."""
    if not hits:
        return None
    judged = [_Found(hit, judge(hit.turn.served, echoed)) for hit in hits]
    genuine = [found for found in judged if found.verdict.kind != "rewritten"]
    kept = [found for found in genuine if found.verdict.ids_kept]
    if not in_place and genuine and not (kept if echoed.calls else echoed.text):
        return "foreign-reply"  # out of its context, a call is known by its id or not at all, and silence by nothing
    if echoed.calls:
        genuine = kept or genuine
    if not genuine:
        return "rewritten-reply"
    if any(DISAGREED in found.hit.turn.marks for found in genuine):
        return DISAGREED
    return genuine[0] if _interchangeable([found.hit.turn for found in genuine], in_place=in_place) else "ambiguous-reply"


def _interchangeable(turns: list[Turn], *, in_place: bool) -> bool:
    """Whether it makes no difference which of these turns is taken: they hold the same tokens."""
    return len({turn.prefix_hash if in_place else turn.completion_hash for turn in turns}) == 1


def _unique(anchors: list[tuple[int, Turn]]) -> list[tuple[int, Turn]]:
    """Keep the anchors whose turn is claimed once: a reply cannot stand in two places."""
    claims: dict[str, int] = {}
    for _, turn in anchors:
        claims[turn.id] = claims.get(turn.id, 0) + 1
    return [(i, turn) for i, turn in anchors if claims[turn.id] == 1]

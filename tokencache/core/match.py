"""Match: which recorded turn does this history continue?

The session is a tree of turns, never a list: sub-agents interleave, turns vanish, byte-identical requests are sent
again, forks replay old history. Matching walks the history from its end: the deepest reply that is known *in its place*
names the parent; replies behind it that are known out of their context become *anchors* of a resplice.

==========  =========================================================================================================
`root`      nothing the model said is in the history
`continue`  the history is a turn's messages, its reply, and new messages
`branch`    the same, from a turn that already has a continuation
`resplice`  the context was edited before or between replies that are still the model's own
`plain`     the history holds replies, and none of them is known for certain
==========  =========================================================================================================

What to look at is found under keys (`keys`); a key proposes, the fields decide (`verdict`). Never guess: where several
recorded turns fit and their tokens differ, none is taken.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from tokencache.core.canonical import Message
from tokencache.core.chain import Conversation
from tokencache.core.interrupt import Heard, heard, may_be
from tokencache.core.keys import aborted_key, call_key, chain_key, handle_key, place_key, reply_key
from tokencache.core.rules import STRICT, Leniency
from tokencache.core.turn import MatchKind, Turn
from tokencache.core.verdict import Verdict, judge


class Hit(msgspec.Struct, frozen=True):
    """A recorded turn found under a key, and whether another turn already continues it."""

    turn: Turn
    continued: bool = False


DISAGREED = "engine-disagrees"
"""The mark of a turn whose prompt was not what was sent: nothing may continue it."""

UNRECOGNISED = "unrecognised-reply"
"""Nothing is known of a reply in the history."""

Hits = Mapping[bytes, Sequence[Hit]]


class Match(NamedTuple):
    """How a history relates to what was recorded.

    `at` counts the messages that the parent's prefix covers. `anchors` are (place in the history, turn), in order.
    `heard` says of an aborted parent how much of it the history holds: to be proven. `unsure` are keys that may know
    better, and are to be looked up before this is relied on: the parent's ids did not come back, or an anchor has none.
    """

    kind: MatchKind
    reason: str = ""
    parent: Turn | None = None
    at: int = 0
    anchors: tuple[tuple[int, Turn], ...] = ()
    forgiven: tuple[str, ...] = ()
    heard: Heard | None = None
    unsure: tuple[bytes, ...] = ()


def match(conversation: Conversation, hits: Hits, leniency: Leniency = STRICT, handles: Mapping[int, str] = MappingProxyType({})) -> Match:
    """Relate a history to the recorded turns in `hits` (the values found under `keys.wanted`).

    `handles` are the places of replies that came back with a handle, and that handle.
    """
    if not any(hits.values()):  # as for a session's first call: no reply of a long history needs looking at
        return Match("root") if next(conversation.replies(), None) is None else Match("plain", UNRECOGNISED)
    found = _Finder(conversation, hits, leniency, handles)
    anchors: list[tuple[int, Turn]] = []
    forgiven: set[str] = set()
    reasons: list[str] = []
    for i in conversation.replies():
        chosen = found.in_place(i)
        if isinstance(chosen, _Found):
            forgiven.update(chosen.verdict.rules)
            result = _continue(conversation, chosen, i + 1, anchors, (forgiven, reasons))
            unsure = _unsure(conversation, result.anchors)
            return result._replace(unsure=unsure if chosen.verdict.ids_kept else (*unsure, call_key(conversation, i)))
        if not isinstance(chosen, _Found) and chosen in {None, "foreign-reply"}:
            chosen = found.elsewhere(i) or chosen
        if isinstance(chosen, _Found):
            anchors.append((i, chosen.hit.turn))
            forgiven.update(chosen.verdict.rules)
        else:
            reasons.append(chosen or UNRECOGNISED)
    if not anchors and not reasons:
        return Match("root")
    anchors = _unique(anchors)
    if anchors:
        unsure = _unsure(conversation, anchors)
        return Match("resplice", "context-edited", None, 0, tuple(reversed(anchors)), tuple(sorted(forgiven)), unsure=unsure)
    return Match("plain", reasons[0] if reasons else "ambiguous-reply")


def _unsure(conversation: Conversation, anchors: Sequence[tuple[int, Turn]]) -> tuple[bytes, ...]:
    """Where an anchor is known by its words alone, they may be the beginning of a reply that was never whole."""
    return (aborted_key(conversation.voice),) if any(not conversation.messages[i].calls for i, _ in anchors) else ()


def _continue(
    conversation: Conversation, by: "_Found", at: int, anchors: list[tuple[int, Turn]], found: tuple[set[str], list[str]]
) -> Match:
    forgiven, reasons = found
    rules = tuple(sorted(forgiven))
    inside = set(conversation.digests[:at]) if anchors else ()  # what stands in the parent's prefix cannot stand behind it, too
    kept = tuple(reversed([(i, turn) for i, turn in _unique(anchors) if conversation.digests[i] not in inside]))
    if kept:
        return Match("resplice", "context-edited", by.hit.turn, at, kept, rules, by.heard)
    reason = reasons[0] if reasons else ""
    if any(m.role == "assistant" for m in conversation.messages[at:]) and not reason:
        reason = "ambiguous-reply"
    return Match("branch" if by.hit.continued else "continue", reason, by.hit.turn, at, (), rules, by.heard)


class _Found(NamedTuple):
    hit: Hit
    verdict: Verdict
    heard: Heard | None = None


_ANOTHER = Verdict("foreign", ids_kept=False, supplied=False)


class _Finder(NamedTuple):
    """Finds the turn that a reply of a history is."""

    conversation: Conversation
    hits: Hits
    leniency: Leniency
    handles: Mapping[int, str]

    def in_place(self, i: int) -> _Found | str | None:
        """Find the turn that said this behind just this context; a word for why it is none; `None` where nothing was said."""
        echoed, place = self.conversation.messages[i], self.conversation.chain[i]
        by_name = [hit for hit in self._by_name(i) if hit.turn.place == place]
        whole = _once([*self.hits.get(chain_key(self.conversation.chain[i + 1]), ()), *by_name])
        judged = self._judged(i, whole)
        told = {hit.turn.prefix_hash for hit in whole}  # who left and asked again may have got the very same tokens
        aborted = [hit for hit in self.hits.get(place_key(place), ()) if hit.turn.prefix_hash not in told and may_be(hit.turn, echoed)]
        parts = [(hit, heard(hit.turn, echoed, self.leniency)) for hit in aborted]
        judged += [_Found(hit, Verdict("rewritten", part.rules), part) for hit, part in parts if part is not None]
        chosen = _choose(echoed, judged, in_place=True)
        if isinstance(chosen, _Found) and any(part is None for _, part in parts):
            return "ambiguous-reply"
        if isinstance(chosen, _Found) and not chosen.verdict.ids_kept and self._issued_to_another(i):
            return "rewritten-reply"
        return chosen

    def _issued_to_another(self, i: int) -> bool:
        """Whether the reply's first call has an id that was issued, though not to the turn that seems to be meant."""
        name = self.conversation.messages[i].calls[0].id
        return any(hit.turn.served.calls[0].id == name for hit in self._by_name(i) if hit.turn.served.calls)

    def elsewhere(self, i: int) -> _Found | str | None:
        """Find the turn that said this, whatever stood before it."""
        echoed, handle = self.conversation.messages[i], self.handles.get(i, "")
        hits = [*self.hits.get(reply_key(self.conversation.digests[i], self.conversation.voice), ()), *self._by_name(i)]
        judged = self._judged(i, _once(hits))
        # Out of its context a call is known by its id or not at all, and silence by its handle or by nothing.
        known = [f for f in judged if not f.verdict.supplied or _is_evidence(echoed, f, handle)]
        if judged and not known:
            return "foreign-reply"
        chosen = _choose(echoed, known, in_place=False)
        if isinstance(chosen, _Found) and not (handle and chosen.hit.turn.handle == handle):
            aborted = self.hits.get(aborted_key(self.conversation.voice), ())
            if any(may_be(hit.turn, echoed) for hit in aborted):
                return "ambiguous-reply"
        return chosen

    def _by_name(self, i: int) -> list[Hit]:
        """What is known under the id of the reply's first call, and under its handle."""
        keys = (call_key(self.conversation, i), handle_key(self.handles.get(i, ""), self.conversation.salt))
        return [hit for key in keys for hit in self.hits.get(key, ())]

    def _judged(self, i: int, hits: Iterable[Hit]) -> list[_Found]:
        """Judge every turn that this may be; one that was given out with another handle than came back it is not."""
        echoed, handle = self.conversation.messages[i], self.handles.get(i, "")
        judged = []
        for hit in hits:
            other = handle and hit.turn.handle and hit.turn.handle != handle
            judged.append(_Found(hit, _ANOTHER if other else judge(hit.turn.served, echoed, self.leniency)))
        return judged


def _is_evidence(echoed: Message, found: _Found, handle: str) -> bool:
    if echoed.calls:
        return found.verdict.ids_kept
    return bool(found.hit.turn.served.text or found.hit.turn.served.calls) or (bool(handle) and found.hit.turn.handle == handle)


def _once(hits: Iterable[Hit]) -> list[Hit]:
    return list({hit.turn.id: hit for hit in hits}.values())


def _choose(echoed: Message, judged: Sequence[_Found], *, in_place: bool) -> _Found | str | None:
    """Pick the one turn that an echoed reply is; a word for why none can be picked; None where there is nothing."""
    if not judged:
        return None
    genuine = [found for found in judged if found.verdict.supplied]
    if echoed.calls:
        genuine = [found for found in genuine if found.verdict.ids_kept] or genuine
    if not genuine:
        return "rewritten-reply" if any(found.verdict.kind == "rewritten" for found in judged) else "foreign-reply"
    if any(DISAGREED in found.hit.turn.marks for found in genuine):
        return DISAGREED
    if len(genuine) > 1 and any(found.heard is not None for found in genuine):
        return "ambiguous-reply"  # a beginning is known by its words alone
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

"""Finds the recorded turn that a history continues.

The turns of a session form a tree, never a list: sub-agents interleave, turns vanish, identical requests are sent again, forks replay old
history. Matching walks the history from its end. The deepest reply that is known *in its position* (nothing before it changed) names the
parent. Replies after it that are known out of their context become *anchors* of a resplice.

==========  ============================================================================================
`root`      the history contains no reply of the model
`continue`  the history is a turn's messages, its reply, and new messages
`branch`    the same, from a turn that already has a continuation
`resplice`  the context was edited before or between replies that are still the model's own
`plain`     the history contains replies, and none of them is certain
==========  ============================================================================================

Turns are looked up by keys (`chain`) and compared field by field (`verdict`). A parent is taken only if every reply in its prompt is
compared, or was when the same bytes came before (`evidence`).

Out of its context a reply needs more evidence than its text. In this order:

1. its token ids, if the client sent them back: those of its prompt and its generation (`evidence.ReturnedIdHashes`);
2. the handle that was issued with it;
3. the ids of its calls, as they were issued. An id that does not look random (`functions.bash:0`) may be issued twice, or be the
   harness's own: it counts together with the message, or the reply, directly before;
4. the message directly before it, if that is the one that it was sampled after.

Token ids also choose between turns with the same text in the same position. They never make up for a text that differs.

If several turns are equally likely, the one that was sampled after the same reply and the same messages since is taken. The matcher never
guesses: if several recorded turns remain and their tokens differ, it takes none.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from tokencache.core import evidence
from tokencache.core.chain import Conversation, aborted_key, call_key, chain_key, handle_key, position_key, reply_key
from tokencache.core.evidence import ReturnedIdHashes
from tokencache.core.messages import Message
from tokencache.core.reasons import Reason
from tokencache.core.rules import STRICT, Leniency
from tokencache.core.turn import MatchKind, Turn, TurnMark
from tokencache.core.verdict import DeliveredPrefix, Verdict, delivered_prefix, is_unique, judge, may_be_delivered, safe_id


class Hit(msgspec.Struct, frozen=True):
    """A recorded turn found under a key, and whether another turn already continues it."""

    turn: Turn
    continued: bool = False


Hits = Mapping[bytes, Sequence[Hit]]


class Match(NamedTuple):
    """How a history relates to the recorded turns.

    Attributes:
        kind: see the module.
        reason: a `Reason`, or `""`.
        parent: the turn that is continued, or whose context was edited.
        at: how many messages the parent's prefix covers.
        anchors: (place in the history, hit), in order.
        applied_rules: names of the rules that were needed.
        delivered: of an aborted parent, how much of its reply the history contains; the planner must prove where its tokens end.
        unsure: keys to look up before the match is used, because they may show otherwise: the parent's call ids did not come back, or an
            anchor has no calls.
        turns_wanted: the match needs all turns of the session (`turns`); the other fields are not set.
    """

    kind: MatchKind
    reason: str = ""
    parent: Turn | None = None
    at: int = 0
    anchors: tuple[tuple[int, Hit], ...] = ()
    applied_rules: tuple[str, ...] = ()
    delivered: DeliveredPrefix | None = None
    unsure: tuple[bytes, ...] = ()
    turns_wanted: bool = False


def match(
    conversation: Conversation,
    hits: Hits,
    leniency: Leniency = STRICT,
    handles: Mapping[int, str] = MappingProxyType({}),
    turns: Mapping[str, Turn] | None = None,
    *,
    echoed: Mapping[int, ReturnedIdHashes] = MappingProxyType({}),
) -> Match:
    """Relate a history to the recorded turns.

    Args:
        conversation: the history.
        hits: the values found under `chain.lookup_keys`.
        leniency: the rules of the session.
        handles: place → handle, for replies that came back with one.
        turns: all turns of the session by id, if they are at hand; few histories need them.
        echoed: place → hashes, for replies that came back with token ids; a place is read only where it decides something.
    """
    if not any(hits.values()):  # nothing is known, as for a session's first call: no reply has to be compared
        return Match("root") if next(conversation.replies(), None) is None else Match("plain", Reason.UNRECOGNISED_REPLY)
    finder = _Finder(conversation, hits, leniency, handles, turns or {}, echoed)
    claims: list[_Claim] = []
    parent: tuple[int, _Found] | None = None
    for i in conversation.replies():
        chosen = finder.in_place(i)
        if isinstance(chosen, _Found):
            if finder.was_judged(chosen.hit.turn, i):
                parent = (i, chosen)
                break
            if turns is None:
                return Match("plain", Reason.UNRECOGNISED_REPLY, turns_wanted=True)
            if finder.still_holds(chosen.hit.turn):
                parent = (i, chosen)
                break
            chosen = None
        claims.append(finder.elsewhere(i) if chosen in {None, Reason.FOREIGN_REPLY} else _Claim(i, (), chosen or ""))
    if parent is None and not claims:
        return Match("root")
    # Whether claimed turns are already in the parent's prompt, and which of them is meant, depends on the lineage.
    if turns is None and any(len(claim.candidates) > (parent is None) for claim in claims):
        return Match("plain", Reason.UNRECOGNISED_REPLY, turns_wanted=True)
    return _result(finder, list(reversed(claims)), parent)


class _Found(NamedTuple):
    """A turn that a reply of the history may be."""

    hit: Hit
    verdict: Verdict
    delivered: DeliveredPrefix | None = None


class _Claim(NamedTuple):
    """A reply out of its context: the turns that it may be, or the reason why it is none.

    `in_order`: only candidates count that were sampled after the reply before this one.
    """

    place: int
    candidates: tuple[_Found, ...]
    reason: str = ""
    in_order: bool = False


_OTHER_HANDLE = Verdict("foreign", ids_kept=False, supplied=False)


def _result(finder: "_Finder", claims: list[_Claim], parent: tuple[int, _Found] | None) -> Match:
    """Combine the parent and the claims of the replies after it, which are in the order of the history."""
    conversation = finder.conversation
    placed = evidence.placed_replies(parent[1].hit.turn, finder.turns) or () if parent is not None else ()
    inside = {reply.turn.id for reply in placed} | ({parent[1].hit.turn.id} if parent is not None else set())
    anchors, reasons = _settle(finder, claims, inside, parent)
    rules = {rule for _, found in anchors for rule in found.verdict.rules}
    hits = tuple((place, found.hit) for place, found in anchors)
    unsure = _unsure(conversation, anchors)
    if parent is None:
        if hits:
            return Match("resplice", Reason.CONTEXT_EDITED, None, 0, hits, tuple(sorted(rules)), unsure=unsure)
        return Match("plain", reasons[-1] if reasons else Reason.AMBIGUOUS_REPLY)
    i, found = parent
    rules.update(found.verdict.rules)
    applied_rules = tuple(sorted(rules))
    if not found.verdict.ids_kept:
        unsure = (*unsure, call_key(conversation, i))
    if hits:
        return Match("resplice", Reason.CONTEXT_EDITED, found.hit.turn, i + 1, hits, applied_rules, found.delivered, unsure)
    kind: MatchKind = "branch" if found.hit.continued else "continue"
    return Match(kind, reasons[-1] if reasons else "", found.hit.turn, i + 1, (), applied_rules, found.delivered, unsure)


def _settle(
    finder: "_Finder", claims: Sequence[_Claim], inside: set[str], parent: tuple[int, _Found] | None
) -> tuple[list[tuple[int, _Found]], list[str]]:
    """Choose one turn for each claim, in the order of the history; a turn is in one place only.

    Two places may claim turns with equal tokens. If there are as many turns as places, it makes no difference which is which. That a turn
    is already in the parent's prefix (`inside`) does not make another one certain. A claim that is given up is no evidence for the claims
    after it, so these are narrowed again.

    Returns:
        The anchors, and the reasons of the claims that were given up.
    """
    given_up: set[int] = set()
    while True:
        certain, reasons = _narrow_claims(finder, claims, given_up, parent)
        settled: list[tuple[int, _Found]] = []
        taken = set(inside)
        before = len(given_up)
        for place, candidates in certain:
            names = {found.hit.turn.id for found in candidates}
            rivals = [own for _, others in certain if names & (own := {found.hit.turn.id for found in others})]
            free = [found for found in candidates if found.hit.turn.id not in taken]
            if not free or len(rivals) > len(set().union(*rivals) - inside):
                given_up.add(place)
                continue
            taken.add(free[0].hit.turn.id)
            settled.append((place, free[0]))
        if len(given_up) == before:
            return settled, reasons


def _narrow_claims(
    finder: "_Finder", claims: Sequence[_Claim], given_up: set[int], parent: tuple[int, _Found] | None
) -> tuple[list[tuple[int, tuple[_Found, ...]]], list[str]]:
    """Narrow each claim to turns with equal tokens, by what is known to come before it; returns those, and reasons for the others."""
    certain: list[tuple[int, tuple[_Found, ...]]] = []
    reasons: list[str] = []
    last = parent[1].hit.turn if parent is not None else None
    for claim in claims:
        here, candidates = _Surroundings(finder.conversation, claim.place, last, finder.turns), claim.candidates
        if claim.in_order:
            candidates = tuple(found for found in candidates if here.follows(found.hit.turn, at_least=True))
        candidates = here.narrow(candidates) if len(candidates) > 1 else candidates
        is_certain = bool(candidates) and claim.place not in given_up and _interchangeable(_turns(candidates), in_place=False)
        last = candidates[0].hit.turn if is_certain and len(candidates) == 1 else None
        if is_certain:
            certain.append((claim.place, candidates))
        else:
            reasons.append(claim.reason or Reason.AMBIGUOUS_REPLY)
    return certain, reasons


class _Surroundings(NamedTuple):
    """What comes before a reply out of its context; `last` is the turn of the assistant message before it, if that is known."""

    conversation: Conversation
    place: int
    last: Turn | None
    turns: Mapping[str, Turn]

    @property
    def preceding(self) -> evidence.PrecedingHash:
        return evidence.split_preceding_hash(evidence.preceding_hash(self.conversation, self.place))

    def follows(self, turn: Turn, *, at_least: bool = False) -> bool | None:
        """Whether a turn was sampled after the reply before this place; `None` if its record does not say.

        It was not if other messages were in between; `at_least` accepts other messages, if there were as many.
        """
        if not at_least and evidence.split_preceding_hash(turn.before).messages != self.preceding.messages:
            return False
        before = reversed(self.conversation.messages[: self.place])
        since = next((n for n, message in enumerate(before) if message.role == "assistant"), self.place)
        reply_place = turn.messages - since - 1
        if reply_place < 0 or self.last is None:
            return False if reply_place < 0 else None
        if turn.anchors:
            recorded, owner = turn.anchors[-1].place, turn.anchors[-1].turn
        else:
            owner = turn.parent or ""
            parent = self.last if self.last.id == owner else self.turns.get(owner)
            recorded = parent.messages if parent is not None else -1
        return self.last.id == owner if recorded == reply_place else None

    def narrow(self, candidates: tuple[_Found, ...]) -> tuple[_Found, ...]:
        """Keep the turns that were sampled after the same message, then those that were sampled after the same reply.

        A turn that may have been keeps the others from being certain.
        """
        message = self.preceding.message
        candidates = tuple(found for found in candidates if message and _message_before(found.hit.turn) == message) or candidates
        if self.last is not None and not _interchangeable(_turns(candidates), in_place=False):
            follows = [self.follows(found.hit.turn) for found in candidates]
            if True in follows:
                candidates = tuple(found for found, follow in zip(candidates, follows, strict=True) if follow is not False)
        return candidates


def _unsure(conversation: Conversation, anchors: Sequence[tuple[int, _Found]]) -> tuple[bytes, ...]:
    """Return the key of interrupted replies if an anchor has no calls: its text may be the beginning of such a reply."""
    return (aborted_key(conversation.model_key),) if any(not conversation.messages[i].calls for i, _ in anchors) else ()


class _Finder(NamedTuple):
    """Finds the turn of a reply in a history; `match` documents the fields."""

    conversation: Conversation
    hits: Hits
    leniency: Leniency
    handles: Mapping[int, str]
    turns: Mapping[str, Turn]
    echoed: Mapping[int, ReturnedIdHashes]

    def in_place(self, i: int) -> _Found | str | None:
        """Find the turn of a reply whose context is unchanged; a reason if it is none; `None` if nothing is recorded in this position."""
        echoed, chain = self.conversation.messages[i], self.conversation.chain[i]
        by_name = [hit for hit in self._by_name(i) if hit.turn.position_key == chain]
        whole = _once([*self.hits.get(chain_key(self.conversation.chain[i + 1]), ()), *by_name])
        found = self._judged(i, whole)
        known = {hit.turn.prefix_hash for hit in whole}  # a harness that left and asked again may have got the same tokens
        aborted = [hit for hit in self.hits.get(position_key(chain), ()) if hit.turn.prefix_hash not in known]
        aborted = [hit for hit in aborted if may_be_delivered(hit.turn, echoed)]
        parts = [(hit, delivered_prefix(hit.turn, echoed, self.leniency)) for hit in aborted]
        found += [_Found(hit, Verdict("rewritten", part.rules), part) for hit, part in parts if part is not None]
        by_tokens = self._by_tokens(i, found) if len(found) + len(parts) > 1 else []
        chosen = _choose(echoed, by_tokens or found)
        if isinstance(chosen, _Found) and not by_tokens and any(part is None for _, part in parts):
            return Reason.AMBIGUOUS_REPLY
        if isinstance(chosen, _Found) and not chosen.verdict.ids_kept and self._issued_to_another(i, chosen.hit.turn):
            return Reason.REWRITTEN_REPLY
        return chosen

    def was_judged(self, turn: Turn, i: int) -> bool:
        """Whether everything before the reply was compared when the turn was sent, under the same rules and with the same bytes."""
        first_reply = self.conversation.written_chain[i] == self.conversation.written_chain[0]
        return first_reply or turn.judged == evidence.judged_hash(self.conversation, i, self.leniency, self.handles)

    def still_holds(self, turn: Turn) -> bool:
        """Whether every reply in a turn's prompt came back, compared again."""
        return evidence.still_holds(turn, self.conversation, self.turns, self._came_back)

    def _came_back(self, turn: Turn, place: int) -> bool:
        echoed = self.conversation.messages[place]
        if TurnMark.ABORTED in turn.marks and delivered_prefix(turn, echoed, self.leniency) is not None:
            return True
        return self._judged(place, [Hit(turn)])[0].verdict.supplied

    def _issued_to_another(self, i: int, turn: Turn) -> bool:
        """Whether the id of the reply's first call was issued to another turn than this one."""
        name = self.conversation.messages[i].calls[0].id
        others = [hit.turn for hit in self._by_name(i) if hit.turn.id != turn.id and hit.turn.served.calls]
        return any(name in {other.served.calls[0].id, safe_id(other.served.calls[0].id)} for other in others)

    def elsewhere(self, i: int) -> _Claim:
        """Find the turns that a reply may be, whatever comes before it."""
        echoed, handle = self.conversation.messages[i], self.handles.get(i, "")
        hits = [*self.hits.get(reply_key(self.conversation.digests[i], self.conversation.model_key), ()), *self._by_name(i)]
        judged = self._judged(i, _once(hits))
        if not judged:
            return _Claim(i, (), Reason.UNRECOGNISED_REPLY)
        genuine = [found for found in judged if found.verdict.supplied]
        evident = self._evident(i, genuine)
        by_number = [found for found in genuine if found.verdict.ids_kept and any(call.id for call in found.hit.turn.served.calls)]
        known = evident or by_number
        if not known:
            return _Claim(i, (), _why_not(judged) if not genuine else Reason.FOREIGN_REPLY)
        if any(TurnMark.ENGINE_DISAGREES in found.hit.turn.marks for found in known):
            return _Claim(i, (), Reason.ENGINE_DISAGREES)
        by_handle = handle and all(found.hit.turn.handle == handle for found in known)
        aborted = () if by_handle else self.hits.get(aborted_key(self.conversation.model_key), ())
        in_doubt = self._may_be_barred(i, judged, known) or any(may_be_delivered(hit.turn, echoed) for hit in aborted)
        if in_doubt and not self._by_tokens(i, known):
            return _Claim(i, (), Reason.AMBIGUOUS_REPLY)
        return _Claim(i, tuple(known), "" if evident else Reason.FOREIGN_REPLY, in_order=not evident)

    def _may_be_barred(self, i: int, judged: Sequence[_Found], known: Sequence[_Found]) -> bool:
        """Whether another turn would match too if one of its rules applied in this session: that leaves the others in doubt."""
        here = self._message_before(i)
        barred = [found.hit.turn for found in judged if found.verdict.rules and not found.verdict.supplied]
        tokens = {found.hit.turn.completion_hash for found in known}
        return any(_message_before(turn) == here and turn.completion_hash not in tokens for turn in barred)

    def _evident(self, i: int, genuine: list[_Found]) -> list[_Found]:
        """Keep the turns with the strongest evidence beside their text; empty if there is none."""
        echoed, handle = self.conversation.messages[i], self.handles.get(i, "")
        by_tokens = self._by_tokens(i, genuine)
        if by_tokens:
            return by_tokens
        by_handle = [found for found in genuine if handle and found.hit.turn.handle == handle]
        if by_handle:
            return by_handle
        by_id = [found for found in genuine if found.verdict.ids_kept and any(is_unique(call.id) for call in found.hit.turn.served.calls)]
        if by_id:
            return by_id
        here, has_content = self._message_before(i), echoed.text or echoed.calls
        after_same = [found for found in genuine if has_content and here and _message_before(found.hit.turn) == here]
        ids_kept = [found for found in after_same if found.verdict.ids_kept]
        return ids_kept or [found for found in after_same if not self._issued_to_another(i, found.hit.turn)]

    def _by_tokens(self, i: int, judged: Sequence[_Found]) -> list[_Found]:
        """Keep the turns that came back whole and with their token ids; turns without a continuation come first."""
        returned = self.echoed.get(i)
        if returned is None:
            return []
        named = [found for found in judged if found.verdict.supplied and found.delivered is None and returned.names(found.hit.turn)]
        return sorted(named, key=lambda found: found.hit.continued)

    def _by_name(self, i: int) -> list[Hit]:
        """Return what is known under the id of the reply's first call, and under its handle."""
        keys = (call_key(self.conversation, i), handle_key(self.handles.get(i, ""), self.conversation.salt))
        return [hit for key in keys for hit in self.hits.get(key, ())]

    def _judged(self, i: int, hits: Iterable[Hit]) -> list[_Found]:
        """Compare the reply with each turn. A turn that was issued with another handle is not the reply's."""
        echoed, handle = self.conversation.messages[i], self.handles.get(i, "")
        judged = []
        for hit in hits:
            other = handle and hit.turn.handle and hit.turn.handle != handle
            judged.append(_Found(hit, _OTHER_HANDLE if other else judge(hit.turn.served, echoed, self.leniency)))
        return judged

    def _message_before(self, i: int) -> bytes:
        return evidence.split_preceding_hash(evidence.preceding_hash(self.conversation, i)).message


def _message_before(turn: Turn) -> bytes:
    return evidence.split_preceding_hash(turn.before).message


def _once(hits: Iterable[Hit]) -> list[Hit]:
    return list({hit.turn.id: hit for hit in hits}.values())


def _turns(found: Iterable[_Found]) -> list[Turn]:
    return [one.hit.turn for one in found]


def _why_not(judged: Sequence[_Found]) -> Reason:
    return Reason.REWRITTEN_REPLY if any(found.verdict.kind == "rewritten" for found in judged) else Reason.FOREIGN_REPLY


def _choose(echoed: Message, judged: Sequence[_Found]) -> _Found | str | None:
    """Choose the turn of a reply in its position; a reason if that is not possible; `None` if there are no turns."""
    if not judged:
        return None
    genuine = [found for found in judged if found.verdict.supplied]
    if echoed.calls:
        genuine = [found for found in genuine if found.verdict.ids_kept] or genuine
    if not genuine:
        return _why_not(judged)
    if any(TurnMark.ENGINE_DISAGREES in found.hit.turn.marks for found in genuine):
        return Reason.ENGINE_DISAGREES
    if len(genuine) > 1 and any(found.delivered is not None for found in genuine):
        return Reason.AMBIGUOUS_REPLY  # a beginning is known by its text alone
    return genuine[0] if _interchangeable(_turns(genuine), in_place=True) else Reason.AMBIGUOUS_REPLY


def _interchangeable(turns: list[Turn], *, in_place: bool) -> bool:
    """Whether it makes no difference which of these turns is taken, because they have the same tokens."""
    return len({turn.prefix_hash if in_place else turn.completion_hash for turn in turns}) == 1

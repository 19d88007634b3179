"""Finds the recorded turn that a history continues.

The turns of a session form a tree, not a list: sub-agents interleave, turns disappear, identical requests are sent again, forks repeat old
history. Matching walks the history from its end. The last reply that is known *in its position* (no message before it changed) determines
the parent. Replies after it that are recognized although their context changed become *anchors* of a resplice.

==========  ============================================================================================
`root`      the history contains no reply of the model
`continue`  the history is a turn's messages, its reply, and new messages
`branch`    the same, from a turn that already has a continuation
`resplice`  the context was edited before or between replies of the model
`plain`     the history contains replies, but none of them is recognized with certainty
==========  ============================================================================================

Turns are looked up by keys (`chain`) and compared field by field (`verdict`). A turn becomes the parent only if every reply in its prompt
has been compared, now or when the same bytes arrived before (`evidence`).

If the context of a reply changed, its text is not enough evidence. It also needs one of these; the first that applies decides:

1. its token ids, if the client sent back those of its prompt and its generation (`evidence.ReturnedIdHashes`);
2. the handle that was issued with it;
3. the ids of its calls, as they were issued. An id that does not look random (`functions.bash:0`) may have been issued twice or be the
   harness's own. It counts only together with the message or the reply directly before;
4. the message directly before it, if the reply was sampled after that message. A harness may have made this reply of another turn that
   was sampled after it; then the reply is in doubt. No key finds such a turn, so the session's turns are read.

Token ids also choose between turns with the same text in the same position. They never compensate for a different text.

If several turns are equally likely, the matcher chooses the turn that was sampled after the same reply and the same messages since then. It
never guesses: if several recorded turns with different tokens remain, it chooses none.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from tokencache.core import evidence
from tokencache.core.added_text import AddedText, added_text, judge_echo, text_behind
from tokencache.core.chain import CHAIN_KEY, POSITION_KEY, Conversation, aborted_key, call_key, handle_key, reply_key
from tokencache.core.evidence import ReturnedIdHashes
from tokencache.core.messages import Message, ToolCall, canonical_arguments, digest
from tokencache.core.reasons import Reason
from tokencache.core.rules import STRICT, Leniency
from tokencache.core.turn import MatchKind, Turn, TurnMark
from tokencache.core.verdict import (
    CUT_OFF,
    DeliveredPrefix,
    Verdict,
    bare_id,
    delivered_prefix,
    is_unique,
    judge,
    judge_reply,
    keeps_id,
    may_be_delivered,
)


class Hit(msgspec.Struct, frozen=True):
    """A recorded turn found under a key, and whether another turn already continues it."""

    turn: Turn
    continued: bool = False


Hits = Mapping[bytes, Sequence[Hit]]


class Match(NamedTuple):
    """How a history relates to the recorded turns.

    Attributes:
        kind: see the table in the module's docstring.
        reason: a `Reason`, or `""`.
        parent: the turn that is continued; of a resplice, the turn with the edited context.
        at: the number of messages that the parent's prefix covers.
        anchors: (place in the history, hit), in order.
        applied_rules: names of the rules that were needed.
        delivered: how much of an aborted parent's reply the history contains; the planner must prove where its tokens end.
        added: the text that the history adds to replies, the parent's or an anchor's; the planner must prove where the recorded ids end.
        unsure: keys to look up before the match is used, because the result may change it: the echo of the parent's reply has other call
            ids or words of the harness, or an anchor has no calls.
        turns_wanted: whether the match needs all turns of the session (`turns`); then no other field is meaningful.
    """

    kind: MatchKind
    reason: str = ""
    parent: Turn | None = None
    at: int = 0
    anchors: tuple[tuple[int, Hit], ...] = ()
    applied_rules: tuple[str, ...] = ()
    delivered: DeliveredPrefix | None = None
    added: tuple[AddedText, ...] = ()
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
        hits: key → the turns found under it, for the keys of `chain.lookup_keys`.
        leniency: the rules of the session.
        handles: place → handle, for echoes with a handle.
        turns: all turns of the session by id; `None` if they were not read, because few histories need them.
        echoed: place → hashes, for echoes with token ids. A place is read only where the ids matter.
    """
    if not any(hits.values()):  # nothing is known, as for a session's first call: no reply has to be compared
        return Match("plain", Reason.UNRECOGNISED_REPLY) if conversation.replies else Match("root")
    finder = _Finder(conversation, hits, leniency, handles, turns or {}, echoed)
    claims: list[_Claim] = []
    parent: tuple[int, _Found] | None = None
    for i in reversed(conversation.replies):
        found = finder.in_place(i)
        if isinstance(found, str):
            claims.append(_Claim(i, (), found))
            continue
        if turns is not None:
            found = [one for one in found if finder.was_judged(one.hit.turn, i) or finder.still_holds(one.hit.turn)]
        else:
            for one in found:
                if not finder.was_judged(one.hit.turn, i):
                    return Match("plain", Reason.UNRECOGNISED_REPLY, turns_wanted=True)
        if found and _interchangeable(found, in_place=True):
            parent = (i, found[0])
            break
        # several prompts may have led to these tokens: the reply is certain, but not the tokens before it
        claims.append(_Claim(i, tuple(found)) if found else finder.elsewhere(i))
    if not claims:  # as in nearly every call
        return Match("root") if parent is None else _continued(conversation, *parent)
    # The lineage shows whether claimed turns are already in the parent's prompt, and which of them is the right one.
    # They also show whether other turns were sampled after the same message.
    if turns is None and any(len(claim.candidates) > (parent is None) or claim.after_message or claim.in_order for claim in claims):
        return Match("plain", Reason.UNRECOGNISED_REPLY, turns_wanted=True)
    return _result(finder, list(reversed(claims)), parent)


class _Found(msgspec.Struct, frozen=True):
    """A turn, and the verdict on a message of the history as its echo."""

    hit: Hit
    verdict: Verdict
    delivered: DeliveredPrefix | None = None
    added: AddedText | None = None


class _Claim(NamedTuple):
    """A reply with a changed context: the turns that it may be, or the reason why there are none.

    With `in_order`, only candidates that were sampled after the preceding reply count. With `after_message`, the message before the reply
    is the only evidence. Then another turn that was sampled after the preceding reply may be a rival (`_Finder.has_rival`).
    """

    place: int
    candidates: tuple[_Found, ...]
    reason: str = ""
    in_order: bool = False
    after_message: bool = False


_OTHER_HANDLE = Verdict("foreign", ids_kept=False, supplied=False)


def _result(finder: "_Finder", claims: list[_Claim], parent: tuple[int, _Found] | None) -> Match:
    """Combine the parent and the claims of the replies after it, which are in the order of the history."""
    conversation = finder.conversation
    placed = evidence.placed_replies(parent[1].hit.turn, finder.turns) or () if parent is not None else ()
    inside = {reply.turn.id for reply in placed} | ({parent[1].hit.turn.id} if parent is not None else set())
    if any(claim.candidates for claim in claims):
        until = parent[0] if parent is not None else 0
        as_text = {i for i in conversation.replies if i < until} - {reply.place for reply in placed}
        inside |= _claimed_by_others(finder, claims, as_text | {claim.place for claim in claims if not claim.candidates})
    anchors, reasons = _settle(finder, claims, inside, parent)
    rules = {rule for _, found in anchors for rule in found.verdict.rules}
    hits = tuple((place, found.hit) for place, found in anchors)
    added = tuple(found.added for _, found in anchors if found.added is not None)
    unsure = _unsure(conversation, anchors)
    if parent is None:
        if hits:
            return Match("resplice", Reason.CONTEXT_EDITED, None, 0, hits, tuple(sorted(rules)), added=added, unsure=unsure)
        return Match("plain", reasons[-1] if reasons else Reason.AMBIGUOUS_REPLY)
    alone = _continued(conversation, *parent, reasons[-1] if reasons else "")
    if not hits:
        return alone
    return alone._replace(
        kind="resplice",
        reason=Reason.CONTEXT_EDITED,
        anchors=hits,
        applied_rules=tuple(sorted({*rules, *alone.applied_rules})),
        added=(*alone.added, *added),
        unsure=(*unsure, *alone.unsure),
    )


def _continued(conversation: Conversation, i: int, found: _Found, reason: str = "") -> Match:
    """Return the match of a history of which only the reply at `i`, in its position, is known."""
    unsure: tuple[bytes, ...] = () if found.verdict.ids_kept else (call_key(conversation, i),)
    if found.added is not None and not found.added.restored:
        unsure = (*unsure, reply_key(conversation.digests[i], conversation.model_key))
    return Match(
        kind="branch" if found.hit.continued else "continue",
        reason=reason,
        parent=found.hit.turn,
        at=i + 1,
        applied_rules=tuple(sorted(found.verdict.rules)),
        delivered=found.delivered,
        added=() if found.added is None else (found.added,),
        unsure=unsure,
    )


def _claimed_by_others(finder: "_Finder", claims: Sequence[_Claim], others: Collection[int]) -> set[str]:
    """Return the claimed turns that one of these `others` may be, too: replies that are not recognized, or text in the parent's prompt.

    A harness that has the same message twice copied it, and may have changed either. Nothing shows that the second one is the model's. But
    the whole reply, with its handle or an id that looks random, is not the copy of a changed one.
    """
    names: dict[str, set[int]] = {}
    for i in others:
        for name in finder.names(i):
            names.setdefault(name, set()).add(i)

    def may_be_another(claim: _Claim, found: _Found) -> bool:
        turn, unnamed = found.hit.turn, claim.after_message or claim.in_order
        places = {i for name in _names(turn) for i in names.get(name, ())}
        if not unnamed:
            return bool(places) and (found.verdict.kind == "rewritten" or any(finder.is_whole(i, turn) for i in places))
        return bool(places) or any(finder.may_be_changed(i, turn) for i in others)

    return {found.hit.turn.id for claim in claims for found in claim.candidates if may_be_another(claim, found)}


def _settle(
    finder: "_Finder", claims: Sequence[_Claim], inside: set[str], parent: tuple[int, _Found] | None
) -> tuple[list[tuple[int, _Found]], list[str]]:
    """Choose one turn for each claim, in the order of the history; each turn is used in one place only.

    Several places may claim turns with equal tokens. If there are at least as many turns as places, it does not matter which place gets
    which turn. A place whose claim is in doubt counts; a turn with other tokens, or one that is already in the parent's prefix (`inside`),
    does not. A claim that is given up is not evidence for later claims, so those are narrowed again.

    Returns:
        The anchors, and the reasons of the claims that were given up.
    """
    given_up: set[int] = set()
    while True:
        narrowed, certain, reasons = _narrow_claims(finder, claims, given_up, parent)
        settled: list[tuple[int, _Found]] = []
        taken = set(inside)
        before = len(given_up)
        names = {place: {found.hit.turn.id for found in candidates} for place, candidates in narrowed.items()}
        claimed_by: dict[str, list[int]] = {}
        for place, own in names.items():
            for name in own:
                claimed_by.setdefault(name, []).append(place)
        for place in certain:
            rivals = {rival for name in names[place] for rival in claimed_by[name]}
            free = [found for found in narrowed[place] if found.hit.turn.id not in taken]
            tokens = narrowed[place][0].hit.turn.completion_hash
            equal = {turn.id for rival in rivals for turn in _turns(narrowed[rival]) if turn.completion_hash == tokens}
            if not free or len(rivals) > len(equal - inside):
                given_up.add(place)
                continue
            taken.add(free[0].hit.turn.id)
            settled.append((place, free[0]))
        if len(given_up) == before:
            return settled, reasons


def _narrow_claims(
    finder: "_Finder", claims: Sequence[_Claim], given_up: set[int], parent: tuple[int, _Found] | None
) -> tuple[dict[int, tuple[_Found, ...]], list[int], list[str]]:
    """Narrow each claim to turns with equal tokens, by what precedes it.

    Returns:
        The place of each claim, with what is left of its candidates; the places where they are certain; and reasons for the others.
    """
    narrowed: dict[int, tuple[_Found, ...]] = {}
    certain: list[int] = []
    reasons: list[str] = []
    last = parent[1].hit.turn if parent is not None else None
    for claim in claims:
        here, candidates = _Surroundings(finder.conversation, claim.place, last, finder.turns), claim.candidates
        if claim.in_order:
            candidates = tuple(found for found in candidates if here.follows(found.hit.turn, at_least=True))
        candidates = here.narrow(candidates) if len(candidates) > 1 else candidates
        is_certain = bool(candidates) and claim.place not in given_up and _interchangeable(candidates, in_place=False)
        if is_certain and (claim.in_order or (claim.after_message and not here.led_to(_turns(candidates)))):
            is_certain = not finder.has_rival(claim, here)
        is_certain = is_certain and not _may_repeat(candidates, claim.candidates)
        last = candidates[0].hit.turn if is_certain and len(candidates) == 1 else None
        narrowed[claim.place] = candidates
        if is_certain:
            certain.append(claim.place)
        else:
            reasons.append(claim.reason or Reason.AMBIGUOUS_REPLY)
    return narrowed, certain, reasons


def _may_repeat(narrowed: Collection[_Found], candidates: Collection[_Found]) -> bool:
    """Whether all turns that are left need the harness to have rewritten them, and another candidate said just this: it may be repeated."""
    tokens = {found.hit.turn.completion_hash for found in narrowed}
    others = [found for found in candidates if found.hit.turn.completion_hash not in tokens]
    return _all_rewritten(narrowed) and any(found.verdict.kind != "rewritten" for found in others)


class _Surroundings(NamedTuple):
    """What precedes a reply with a changed context; `last` is the turn of the preceding assistant message, if it is known."""

    conversation: Conversation
    place: int
    last: Turn | None
    turns: Mapping[str, Turn]

    @property
    def preceding(self) -> evidence.PrecedingHash:
        return evidence.split_preceding_hash(evidence.preceding_hash(self.conversation, self.place))

    def follows(self, turn: Turn, *, at_least: bool = False) -> bool | None:
        """Whether a turn was sampled after the reply that precedes this place; `None` if its record does not show that.

        False if the messages in between were different; with `at_least`, only their number must be the same.
        """
        if not at_least and evidence.split_preceding_hash(turn.before).messages != self.preceding.messages:
            return False
        messages = self.conversation.messages
        since = next((n for n in range(self.place) if messages[self.place - 1 - n].role == "assistant"), self.place)
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

    def led_to(self, turns: Iterable[Turn]) -> bool:
        """Whether one of these turns was sampled after the preceding reply and as many messages; what they say may have changed.

        If there is no such reply, or its turn is unknown, the messages are counted from the beginning.
        """
        if self.last is None:
            return any(turn.messages == self.place for turn in turns)
        return any(self.follows(turn, at_least=True) for turn in turns)

    def narrow(self, candidates: tuple[_Found, ...]) -> tuple[_Found, ...]:
        """Keep the turns that were sampled after the same message, then those that were sampled after the same reply.

        A turn that may have been sampled after that reply is also kept; then no candidate is certain.
        """
        message = self.preceding.message
        candidates = tuple(found for found in candidates if message and _message_before(found.hit.turn) == message) or candidates
        if self.last is not None and not _interchangeable(candidates, in_place=False):
            follows = [self.follows(found.hit.turn) for found in candidates]
            if True in follows:
                candidates = tuple(found for found, follow in zip(candidates, follows, strict=True) if follow is not False)
        return candidates


def _unsure(conversation: Conversation, anchors: Sequence[tuple[int, _Found]]) -> tuple[bytes, ...]:
    """Return the keys of turns that may also be an anchor's reply.

    An anchor whose text, or first call's id, does not tell it from other replies may be the beginning of an interrupted one. An anchor with
    its stop string may be another reply with words of the harness.
    """
    unnamed = any(not any(is_unique(call.id) for call in conversation.messages[i].calls[:1]) for i, _ in anchors)
    interrupted = (aborted_key(conversation.model_key),) if unnamed else ()
    return (*interrupted, *[_served_key(found.hit.turn, conversation) for _, found in anchors if found.added is not None])


def _served_key(turn: Turn, conversation: Conversation) -> bytes:
    """Return the key of all replies with the text that was served with a turn."""
    return reply_key(digest(turn.served), conversation.model_key)


class _Finder(msgspec.Struct, frozen=True):
    """Finds the turn of a reply in a history; `match` documents the fields."""

    conversation: Conversation
    hits: Hits
    leniency: Leniency
    handles: Mapping[int, str]
    turns: Mapping[str, Turn]
    echoed: Mapping[int, ReturnedIdHashes]

    def in_place(self, i: int) -> list[_Found] | str:
        """Find the turns of a reply in its position, which have the same tokens; a reason if they are in doubt; empty if there are none."""
        echoed, chain = self.conversation.messages[i], self.conversation.chain[i]
        whole = {hit.turn.id: hit for hit in self.hits.get(CHAIN_KEY + self.conversation.chain[i + 1], ())}
        for hit in self._by_name(i):
            if hit.turn.position_key == chain:
                whole[hit.turn.id] = hit
        found = self._judged(i, whole.values())
        others: list[Hit] = []
        undelivered = False
        if in_position := self.hits.get(POSITION_KEY + chain, ()):
            # A harness that disconnected and retried may have received these tokens.
            known = {hit.turn.prefix_hash for hit in whole.values()}
            others = [hit for hit in in_position if hit.turn.prefix_hash not in known]
            more, undelivered = self._delivered(i, others)
            found += more
            genuine = {one.hit.turn.id for one in found if one.verdict.supplied}
            found += [one for one in self._with_words_added(i, in_position) if one.hit.turn.id not in genuine]
        several = len(found) + len(others) > 1 and len({hit.turn.id for hit in (*others, *[one.hit for one in found])}) > 1
        by_tokens = self._by_tokens(i, found) if several else []
        chosen = _choose(echoed, by_tokens or found)
        if isinstance(chosen, str):
            return chosen
        if chosen and not by_tokens:
            barred = undelivered or self._may_be_barred(i, found, chosen)
            if barred or (others and any(self._may_be_another(i, one, others) for one in chosen)):
                return Reason.AMBIGUOUS_REPLY
        return self._doubt(i, chosen) or chosen

    def _delivered(self, i: int, others: Sequence[Hit]) -> tuple[list[_Found], bool]:
        """Find the turns of interrupted replies of which a message is the beginning, and whether it may be that of others, too."""
        echoed = self.conversation.messages[i]
        aborted = [hit for hit in others if may_be_delivered(hit.turn, echoed) and not self._is_of_another(i, hit.turn)]
        parts = [(hit, delivered_prefix(hit.turn, echoed, self.leniency)) for hit in aborted]
        found = [_Found(hit, Verdict("rewritten", part.rules), part) for hit, part in parts if part is not None]
        return found, len(found) < len(parts)

    def _doubt(self, i: int, chosen: Sequence[_Found]) -> str:
        """Return the reason why the turns that were chosen for a reply may not be its own; `""` if there is none."""
        for one in chosen:
            if not one.verdict.ids_kept and self._issued_to_another(i, one.hit.turn):
                return Reason.REWRITTEN_REPLY
        for one in chosen:
            if one.added is not None and not one.added.restored and self._is_reply(i):
                return Reason.AMBIGUOUS_REPLY
            if one.verdict.kind == "rewritten" and self._is_whole_elsewhere(i, one.hit.turn):
                return Reason.AMBIGUOUS_REPLY
        return ""

    def _is_whole_elsewhere(self, i: int, turn: Turn) -> bool:
        """Whether another message is this reply as it was served, by its handle or a random id. Then the harness did not rewrite it."""
        names = _names(turn)
        others = [place for place in self.conversation.replies if place != i and not names.isdisjoint(self.names(place))]
        return any(self.is_whole(place, turn) for place in others)

    def names(self, i: int) -> set[str]:
        """Return what may show whose reply a message is: the letters and digits of its first call's id, and its handle."""
        return {*(bare_id(call.id) for call in self.conversation.messages[i].calls[:1]), self.handles.get(i, "")}

    def is_whole(self, i: int, turn: Turn) -> bool:
        """Whether a message is a turn's reply as it was served, apart from canonical rules; those that are switched off count, too."""
        return judge(turn.served, self.conversation.messages[i], self.any_rule).kind in {"same", "equivalent"}

    @property
    def any_rule(self) -> Leniency:
        """The rules of the session, with those that are switched off."""
        return msgspec.structs.replace(self.leniency, off=frozenset())

    def may_be_changed(self, i: int, turn: Turn) -> bool:
        """Whether a message that is not recognized may be a turn's reply which the harness changed.

        It is in the reply's position, has its token ids, or follows the same message and is what a harness makes of the reply.
        """
        returned, echoed = self.echoed.get(i), self.conversation.messages[i]
        if self.conversation.chain[i] == turn.position_key or (returned is not None and returned.names(turn)):
            return True
        after_same = self.message_before(i) == _message_before(turn)
        return after_same and (self.conversation.digests[i] == digest(turn.served) or bool(judge(turn.served, echoed, self.any_rule).rules))

    def _may_be_another(self, i: int, chosen: _Found, others: Sequence[Hit]) -> bool:
        """Whether a harness may have made this reply of another turn in its position, which only the position finds.

        It may have left out the stop string of the other reply and added words, or have added to an interrupted one. An id of a call that
        looks random excludes all others.
        """
        if chosen.verdict.ids_kept and any(is_unique(call.id) for call in chosen.hit.turn.served.calls):
            return False
        others = [hit for hit in others if hit.turn.prefix_hash != chosen.hit.turn.prefix_hash and not self._is_of_another(i, hit.turn)]
        if chosen.added is not None and any(self._may_be_received(i, hit.turn, [chosen]) for hit in others):
            return True
        with_words = chosen.added is not None and not chosen.added.restored
        if with_words and any(text_behind(hit.turn, self.conversation.messages[i]) for hit in others):
            return True
        whole = [hit.turn for hit in others if CUT_OFF.isdisjoint(hit.turn.marks)]
        return any(judge_echo(turn, self.conversation.messages[i], self.any_rule).rules for turn in whole)

    def _is_reply(self, i: int) -> bool:
        """Whether a message is a whole reply of some turn, in any position."""
        hits = self.hits.get(reply_key(self.conversation.digests[i], self.conversation.model_key), ())
        return any(found.verdict.supplied for found in self._judged(i, hits))

    def _with_words_added(self, i: int, hits: Sequence[Hit]) -> list[_Found]:
        """Find the turns in a position to which the harness may have added words. Interrupted turns do not count."""
        added = [(hit, added_text(hit.turn, self.conversation.messages[i], self.leniency)) for hit in hits]
        return [_Found(hit, one.verdict, None, one) for hit, one in added if one is not None and not self._is_of_another(i, hit.turn)]

    def was_judged(self, turn: Turn, i: int) -> bool:
        """Whether everything before the reply was compared when the turn was sent, under the same rules and with the same bytes."""
        first_reply = self.conversation.written_chain[i] == self.conversation.written_chain[0]
        return first_reply or turn.judged == evidence.judged_hash(self.conversation, i, self.leniency, self.handles)

    def still_holds(self, turn: Turn) -> bool:
        """Compare again whether every reply in a turn's prompt has its echo."""
        return evidence.still_holds(turn, self.conversation, self.turns, self._came_back)

    def _came_back(self, turn: Turn, place: int) -> bool:
        echoed = self.conversation.messages[place]
        if not CUT_OFF.isdisjoint(turn.marks):
            if echoed.thought and not (echoed.text or echoed.calls):
                return False  # no chain shows how much of the thought had come back
            if delivered_prefix(turn, echoed, self.leniency) is not None:
                return True
        return self._judged(place, [Hit(turn)])[0].verdict.supplied

    def _issued_to_another(self, i: int, turn: Turn) -> bool:
        """Whether the id of the reply's first call was issued to another turn than this one."""
        name = self.conversation.messages[i].calls[0].id
        others = [hit.turn for hit in self._by_name(i) if hit.turn.id != turn.id and hit.turn.served.calls]
        return any(keeps_id(other.served.calls[0].id, name) for other in others)

    def elsewhere(self, i: int) -> _Claim:
        """Find the turns that a reply may be, whatever precedes it."""
        handle = self.handles.get(i, "")
        hits = [*self.hits.get(reply_key(self.conversation.digests[i], self.conversation.model_key), ()), *self._by_name(i)]
        judged = self._judged(i, _once(hits))
        if not judged:
            return _Claim(i, (), Reason.UNRECOGNISED_REPLY)
        genuine = [found for found in judged if found.verdict.supplied and not self._may_repeat_text(i, found.hit.turn)]
        evident = self._evident(i, genuine)
        after_same = [] if evident else self._after_same_message(i, genuine)
        by_number = [found for found in genuine if found.verdict.ids_kept and any(call.id for call in found.hit.turn.served.calls)]
        known = evident or after_same or by_number
        if not known:
            return _Claim(i, (), _why_not(judged) if not genuine else Reason.FOREIGN_REPLY)
        if any(TurnMark.ENGINE_DISAGREES in found.hit.turn.marks for found in known):
            return _Claim(i, (), Reason.ENGINE_DISAGREES)
        by_handle = handle and all(found.hit.turn.handle == handle for found in known)
        aborted = () if by_handle else self.hits.get(aborted_key(self.conversation.model_key), ())
        in_doubt = self._may_be_barred(i, judged, known) or any(self._may_begin(i, hit.turn, known) for hit in aborted)
        in_doubt = in_doubt or any(self._may_have_words(i, found.hit.turn) for found in known if found.added is not None)
        # a rewritten reply may be that of another turn, which said just this, or this and more
        rewritten = _all_rewritten(known) and (bool(self._rivals(judged, known)) or self._may_be_a_part(i, known))
        in_doubt = in_doubt or (bool(after_same) and (rewritten or self._may_be_unfound(i, judged)))
        if in_doubt and not self._by_tokens(i, known):
            return _Claim(i, (), Reason.AMBIGUOUS_REPLY)
        in_order = not (evident or after_same)
        reason = Reason.FOREIGN_REPLY if in_order else ""
        return _Claim(i, tuple(known), reason, in_order=in_order, after_message=bool(after_same))

    def _may_begin(self, i: int, turn: Turn, known: Sequence[_Found]) -> bool:
        """Whether a message may be the beginning of an interrupted reply; without calls only after the message that this one follows."""
        here = bool(self.conversation.messages[i].calls) or _message_before(turn) == self.message_before(i)
        return here and self._may_be_received(i, turn, known)

    def _may_be_received(self, i: int, turn: Turn, known: Sequence[_Found]) -> bool:
        """Whether a message may be what was received of an interrupted reply, alone or with the text that it adds to a known turn's."""
        echoed = self.conversation.messages[i]
        alone = [msgspec.structs.replace(echoed, content=one.hit.turn.served.content) for one in known if one.added is not None]
        return any(may_be_delivered(turn, one) for one in (echoed, *alone))

    def _rivals(self, judged: Sequence[_Found], known: Sequence[_Found]) -> tuple[Turn, ...]:
        """Return the turns with other tokens than the known ones that the harness may have sent back so, by an equally good id."""
        tokens, named = {found.hit.turn.completion_hash for found in known}, all(found.verdict.ids_kept for found in known)
        possible = [found for found in judged if found.verdict.supplied or found.verdict.rules]
        possible = [found for found in possible if found.verdict.ids_kept or not named]
        return tuple(found.hit.turn for found in possible if found.hit.turn.completion_hash not in tokens)

    def has_rival(self, claim: _Claim, here: _Surroundings) -> bool:
        """Whether a turn with other tokens, which was sampled here, may have come back so: an edit made one message of another before it.

        No key may find that turn: the harness may have added words to its text, or changed its reply in two ways at once.
        """
        known = {found.hit.turn.id for found in claim.candidates} | {
            found.hit.turn.parent for found in claim.candidates if found.hit.turn.begun
        }
        others = [turn for turn in self.turns.values() if turn.id not in known and here.led_to([turn])]
        others = [turn for turn in others if not self._has_other_handle(claim.place, turn)]
        if _all_rewritten(claim.candidates) and any(self._is_part_of(claim.place, turn) for turn in others):
            return True
        echoed = self.conversation.messages[claim.place]
        judged = [_Found(Hit(turn), judge_echo(turn, echoed, self.any_rule)) for turn in others]
        rivals = self._rivals(judged, claim.candidates)
        return bool(rivals) or any(self._may_be_received(claim.place, turn, claim.candidates) for turn in others)

    def _may_be_a_part(self, i: int, known: Sequence[_Found]) -> bool:
        """Whether a harness may have left out the rest of another reply, sampled after the same message."""
        here, tokens = self.message_before(i), {found.hit.turn.completion_hash for found in known}
        others = [turn for turn in self.turns.values() if turn.completion_hash not in tokens and _message_before(turn) == here]
        return any(self._is_part_of(i, turn) for turn in others)

    def _is_part_of(self, i: int, turn: Turn) -> bool:
        """Whether all calls of a message are calls of a turn as they were issued."""
        echoed = set(map(_as_issued, self.conversation.messages[i].calls))
        return bool(echoed) and echoed <= set(map(_as_issued, turn.served.calls))

    def _may_be_unfound(self, i: int, judged: Sequence[_Found]) -> bool:
        """Whether a harness may have made this reply of another turn, sampled after the same message, that no key finds.

        It may have added words to its text, or changed it in two ways at once; after one of them, a key would still find the turn. A reply
        that the client continued is the beginning of the turn that continues it, not another one; nor is a beginning to which nothing was
        added a reply.
        """
        here, found = self.message_before(i), {one.hit.turn.id for one in judged}
        found |= {one.hit.turn.parent or "" for one in judged if one.hit.turn.begun}
        others = [turn for turn in self.turns.values() if turn.id not in found and _message_before(turn) == here]
        others = [turn for turn in others if not self._has_other_handle(i, turn) and not _is_beginning_alone(turn)]
        return any(judge_echo(turn, self.conversation.messages[i], self.any_rule).rules for turn in others)

    def _may_have_words(self, i: int, restored: Turn) -> bool:
        """Whether a reply with its stop string may be another one with the same text, to which the harness added that string."""
        here = self.message_before(i)
        same = [hit.turn for hit in self.hits.get(_served_key(restored, self.conversation), ()) if hit.turn.id != restored.id]
        others = [turn for turn in same if turn.completion_hash != restored.completion_hash and _message_before(turn) == here]
        added = [added_text(turn, self.conversation.messages[i], self.leniency) for turn in others]
        return any(one is not None and not one.restored for one in added)

    def _may_repeat_text(self, i: int, turn: Turn) -> bool:
        """Whether the text of a reply is missing, and a message of the assistant directly before it may hold that text.

        Then the harness may have split the reply, and its exact ids would repeat the text.
        """
        missing = bool(turn.served.text) and not self.conversation.messages[i].text
        return missing and i > 0 and self.conversation.messages[i - 1].role == "assistant"

    def _may_be_barred(self, i: int, judged: Sequence[_Found], known: Sequence[_Found]) -> bool:
        """Whether another turn would also match if a rule that it needs applied here; then the match is uncertain.

        A turn that was sampled after another message counts only if no known turn has this very text: each needs a rule, then.
        """
        barred = [found.hit.turn for found in judged if found.verdict.rules and not found.verdict.supplied]
        if not barred:  # as in nearly every call: nothing has to be hashed
            return False
        here, rewritten = self.message_before(i), _all_rewritten(known)
        tokens = {found.hit.turn.completion_hash for found in known}
        return any((rewritten or _message_before(turn) == here) and turn.completion_hash not in tokens for turn in barred)

    def _evident(self, i: int, genuine: list[_Found]) -> list[_Found]:
        """Keep the turns with the strongest evidence of their own in addition to their text; empty if there is none."""
        handle = self.handles.get(i, "")
        by_tokens = self._by_tokens(i, genuine)
        if by_tokens:
            return by_tokens
        by_handle = [found for found in genuine if handle and found.hit.turn.handle == handle]
        if by_handle:
            return by_handle
        return [found for found in genuine if found.verdict.ids_kept and any(is_unique(call.id) for call in found.hit.turn.served.calls)]

    def _after_same_message(self, i: int, genuine: list[_Found]) -> list[_Found]:
        """Keep the turns that were sampled after the message before the reply."""
        echoed, here = self.conversation.messages[i], self.message_before(i)
        has_content = echoed.text or echoed.calls
        after_same = [found for found in genuine if has_content and here and _message_before(found.hit.turn) == here]
        ids_kept = [found for found in after_same if found.verdict.ids_kept]
        return ids_kept or [found for found in after_same if not self._issued_to_another(i, found.hit.turn)]

    def _by_tokens(self, i: int, judged: Sequence[_Found]) -> list[_Found]:
        """Keep the turns with a complete echo and the same token ids; turns without a continuation come first."""
        returned = self.echoed.get(i)
        if returned is None:
            return []
        named = [found for found in judged if found.verdict.supplied and found.delivered is None and returned.names(found.hit.turn)]
        return sorted(named, key=lambda found: found.hit.continued)

    def _by_name(self, i: int) -> list[Hit]:
        """Return the turns known under the id of the reply's first call, and under its handle."""
        if not (self.conversation.messages[i].calls or i in self.handles):
            return []
        keys = (call_key(self.conversation, i), handle_key(self.handles.get(i, ""), self.conversation.model_key))
        return [hit for key in keys for hit in self.hits.get(key, ())]

    def _judged(self, i: int, hits: Iterable[Hit]) -> list[_Found]:
        """Compare the reply with each turn. A turn that was issued with another handle is foreign."""
        echoed, handle, judged = self.conversation.messages[i], self.handles.get(i, ""), []
        for hit in hits:
            if handle and self._has_other_handle(i, hit.turn):
                judged.append(_Found(hit, _OTHER_HANDLE))
                continue
            verdict = judge_reply(hit.turn, echoed, self.leniency)
            added = added_text(hit.turn, echoed, self.leniency) if verdict.kind == "foreign" else None
            if added is not None and added.restored:
                judged.append(_Found(hit, added.verdict, None, added))
            else:
                judged.append(_Found(hit, verdict))
        return judged

    def _is_of_another(self, i: int, turn: Turn) -> bool:
        """Whether the message came back with the handle, or with the token ids, of another recorded turn than this one."""
        if self._has_other_handle(i, turn):
            return True
        returned = self.echoed.get(i)
        if returned is None or returned.names(turn):
            return False
        same_text = self.hits.get(reply_key(self.conversation.digests[i], self.conversation.model_key), ())
        return any(returned.names(hit.turn) for hit in same_text)

    def _has_other_handle(self, i: int, turn: Turn) -> bool:
        """Whether the message came back with a handle that was not issued with this turn."""
        handle = self.handles.get(i, "")
        return bool(handle and turn.handle) and turn.handle != handle

    def message_before(self, i: int) -> bytes:
        return evidence.split_preceding_hash(evidence.preceding_hash(self.conversation, i)).message


def _is_beginning_alone(turn: Turn) -> bool:
    """Whether a client asked for the rest of a message, and there was none."""
    return bool(turn.begun) and not turn.served_text and not turn.served.calls


def _names(turn: Turn) -> set[str]:
    """Return what shows that a message is this turn's reply, like `_Finder.names`: a handle, and an id only if it looks random."""
    return {*(bare_id(call.id) for call in turn.served.calls[:1] if is_unique(call.id)), turn.handle} - {""}


def _message_before(turn: Turn) -> bytes:
    return evidence.split_preceding_hash(turn.before).message


def _once(hits: Iterable[Hit]) -> list[Hit]:
    return list({hit.turn.id: hit for hit in hits}.values())


def _turns(found: Iterable[_Found]) -> list[Turn]:
    return [one.hit.turn for one in found]


def _all_rewritten(found: Iterable[_Found]) -> bool:
    return all(one.verdict.kind == "rewritten" for one in found)


def _as_issued(call: ToolCall) -> tuple[str, str, bytes]:
    return call.id, call.name, canonical_arguments(call.arguments)


def _why_not(judged: Sequence[_Found]) -> Reason:
    return Reason.REWRITTEN_REPLY if any(found.verdict.kind == "rewritten" for found in judged) else Reason.FOREIGN_REPLY


def _choose(echoed: Message, judged: Sequence[_Found]) -> list[_Found] | str:
    """Choose the turns of a reply in its position, all with the same tokens; a reason if they are in doubt; empty if there are none."""
    genuine = [*filter(attrgetter("verdict.supplied"), judged)]
    if echoed.calls:
        genuine = [*filter(attrgetter("verdict.ids_kept"), genuine)] or genuine
    if not genuine:
        return Reason.REWRITTEN_REPLY if _why_not(judged) == Reason.REWRITTEN_REPLY else []
    for found in genuine:
        if TurnMark.ENGINE_DISAGREES in found.hit.turn.marks:
            return Reason.ENGINE_DISAGREES
    if len(genuine) == 1:
        return genuine
    if any(found.delivered is not None for found in genuine):
        return Reason.AMBIGUOUS_REPLY  # an interrupted reply is recognized by its text alone
    if _interchangeable(genuine, in_place=True) or _interchangeable(genuine, in_place=False):
        return genuine
    return Reason.AMBIGUOUS_REPLY


def _interchangeable(found: Sequence[_Found], *, in_place: bool) -> bool:
    """Whether these turns have the same tokens, so that any of them may be used."""
    same = attrgetter("hit.turn.prefix_hash" if in_place else "hit.turn.completion_hash")
    return len({*map(same, found)}) == 1

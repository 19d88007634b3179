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

What to look at is found under keys (`keys`); a key proposes, the fields decide (`verdict`). A parent is taken only if every reply
in its prompt is judged, or was when the same bytes came before (`evidence`).

Out of its context a reply is known by more than its words. In this order:

1. its token ids, if the client sent them back: those of its prompt and its generation (`evidence.Echoed`);
2. the handle that was given out with it;
3. the ids of its calls, as they were issued. An id that does not look drawn at random (`functions.bash:0`) may be issued twice, or be the
   harness's own: it counts together with the message, or the reply, directly before;
4. the message directly before it, if that is the one behind which it was sampled.

Token ids also choose between turns that said the same in the same place. They never make up for words that differ.

Of several that fit equally, the one that was sampled behind the same reply and all the same messages since. Never guess: where several
recorded turns still fit and their tokens differ, none is taken.
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
    """How a history relates to what was recorded.

    `at` counts the messages that the parent's prefix covers. `anchors` are (place in the history, hit), in order.
    `delivered` says of an aborted parent how much of it the history holds: to be proven. `unsure` are keys that may know
    better, and are to be looked up before this is relied on: the parent's ids did not come back, or an anchor has none.
    `turns_wanted`: the session's turns are needed before this is relied on.
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
    """Relate a history to the recorded turns in `hits` (the values found under `keys.wanted`).

    `handles` are the places of replies that came back with a handle, and that handle. `turns` are all turns of the session, by
    their ids, if they are at hand: few histories need them. `echoed` are the places of replies that came back with token ids, and the
    hashes of these; a place is looked up only where it decides something.
    """
    if not any(hits.values()):  # as for a session's first call: no reply of a long history needs looking at
        return Match("root") if next(conversation.replies(), None) is None else Match("plain", Reason.UNRECOGNISED_REPLY)
    found = _Finder(conversation, hits, leniency, handles, turns or {}, echoed)
    claims: list[_Claim] = []
    parent: tuple[int, _Found] | None = None
    for i in conversation.replies():
        chosen = found.in_place(i)
        if isinstance(chosen, _Found):
            if found.was_judged(chosen.hit.turn, i):
                parent = (i, chosen)
                break
            if turns is None:
                return Match("plain", Reason.UNRECOGNISED_REPLY, turns_wanted=True)
            if found.holds(chosen.hit.turn):
                parent = (i, chosen)
                break
            chosen = None
        claims.append(found.elsewhere(i) if chosen in {None, Reason.FOREIGN_REPLY} else _Claim(i, (), chosen or ""))
    if parent is None and not claims:
        return Match("root")
    some = any(len(claim.candidates) > (parent is None) for claim in claims)
    if turns is None and some:  # which of them, and whether they stand in the parent's prompt, is known by the line of turns
        return Match("plain", Reason.UNRECOGNISED_REPLY, turns_wanted=True)
    return _result(conversation, found, claims, parent)


class _Found(NamedTuple):
    hit: Hit
    verdict: Verdict
    delivered: DeliveredPrefix | None = None


class _Claim(NamedTuple):
    """A reply out of its context: the turns that it may be, or why it is none.

    `in_order`: those count only that were sampled behind the reply that stands before.
    """

    place: int
    candidates: tuple[_Found, ...]
    reason: str = ""
    in_order: bool = False


_ANOTHER = Verdict("foreign", ids_kept=False, supplied=False)


def _result(conversation: Conversation, finder: "_Finder", claims: list[_Claim], parent: tuple[int, _Found] | None) -> Match:
    """Put together what was found: the parent, and the replies behind it, which are looked at in their order."""
    standing = evidence.placed_replies(parent[1].hit.turn, finder.turns) or () if parent is not None else ()
    inside = {reply.turn.id for reply in standing} | ({parent[1].hit.turn.id} if parent is not None else set())
    anchors, reasons = _settled(conversation, list(reversed(claims)), inside, parent, finder.turns)
    rules = {rule for _, found in anchors for rule in found.verdict.rules}
    hits = tuple((place, found.hit) for place, found in anchors)
    unsure = _unsure(conversation, anchors)
    if parent is None:
        if hits:
            return Match("resplice", Reason.CONTEXT_EDITED, None, 0, hits, tuple(sorted(rules)), unsure=unsure)
        return Match("plain", reasons[-1] if reasons else Reason.AMBIGUOUS_REPLY)
    i, by = parent
    rules.update(by.verdict.rules)
    applied_rules = tuple(sorted(rules))
    if not by.verdict.ids_kept:
        unsure = (*unsure, call_key(conversation, i))
    if hits:
        return Match("resplice", Reason.CONTEXT_EDITED, by.hit.turn, i + 1, hits, applied_rules, by.delivered, unsure)
    kind: MatchKind = "branch" if by.hit.continued else "continue"
    return Match(kind, reasons[-1] if reasons else "", by.hit.turn, i + 1, (), applied_rules, by.delivered, unsure)


def _settled(
    conversation: Conversation,
    claims: Sequence[_Claim],
    inside: set[str],
    parent: tuple[int, _Found] | None,
    turns: Mapping[str, Turn],
) -> tuple[list[tuple[int, _Found]], list[str]]:
    """Choose one turn for each claim, in the order of the history; a turn stands in one place only.

    Two places may claim replies of equal tokens: which of them is which then makes no difference, if there are as many. That a turn
    stands elsewhere (`inside` are those in the parent's prefix) does not make another one certain. What is given up is no evidence for
    the claims behind it, which are looked at again.
    """
    given_up: set[int] = set()
    while True:
        said, reasons = _certain(conversation, claims, given_up, parent, turns)
        settled: list[tuple[int, _Found]] = []
        taken = set(inside)
        before = len(given_up)
        for place, able in said:
            names = {found.hit.turn.id for found in able}
            rivals = [own for _, others in said if names & (own := {found.hit.turn.id for found in others})]
            free = [found for found in able if found.hit.turn.id not in taken]
            if not free or len(rivals) > len(set().union(*rivals) - inside):
                given_up.add(place)
                continue
            taken.add(free[0].hit.turn.id)
            settled.append((place, free[0]))
        if len(given_up) == before:
            return settled, reasons


def _certain(
    conversation: Conversation,
    claims: Sequence[_Claim],
    given_up: set[int],
    parent: tuple[int, _Found] | None,
    turns: Mapping[str, Turn],
) -> tuple[list[tuple[int, tuple[_Found, ...]]], list[str]]:
    """Narrow each claim to turns of equal tokens, by what is known to stand before it; say why that fails for the others."""
    said: list[tuple[int, tuple[_Found, ...]]] = []
    reasons: list[str] = []
    last: tuple[Turn, ...] = (parent[1].hit.turn,) if parent is not None else ()
    for claim in claims:
        here, able = _Here(conversation, claim.place, last, turns), claim.candidates
        if claim.in_order:
            able = tuple(found for found in able if here.follows(found.hit.turn, at_least=True))
        able = _narrowed(here, able) if len(able) > 1 else able
        certain = bool(able) and claim.place not in given_up and _interchangeable([found.hit.turn for found in able], in_place=False)
        last = (able[0].hit.turn,) if certain and len(able) == 1 else ()
        if certain:
            said.append((claim.place, able))
        else:
            reasons.append(claim.reason or Reason.AMBIGUOUS_REPLY)
    return said, reasons


class _Here(NamedTuple):
    """A reply out of its context, and the turns of which one is known to stand before it: the last of its assistant's messages."""

    conversation: Conversation
    place: int
    last: tuple[Turn, ...]
    turns: Mapping[str, Turn]

    @property
    def before(self) -> evidence.PrecedingHash:
        return evidence.split_preceding_hash(evidence.preceding_hash(self.conversation, self.place))

    def follows(self, turn: Turn, *, at_least: bool = False) -> bool | None:
        """Whether a turn was sampled behind the reply that stands before; `None` if its record does not tell.

        It was not if other messages stood between; `at_least` lets these be others, as many.
        """
        if not at_least and evidence.split_preceding_hash(turn.before).messages != self.before.messages:
            return False
        before = reversed(self.conversation.messages[: self.place])
        since = next((n for n, message in enumerate(before) if message.role == "assistant"), self.place)
        at = turn.messages - since - 1
        if at < 0 or not self.last:
            return False if at < 0 else None
        if turn.anchors:
            where, whose = turn.anchors[-1].place, turn.anchors[-1].turn
        else:
            whose = turn.parent or ""
            named = next((one for one in self.last if one.id == whose), self.turns.get(whose))
            where = named.messages if named is not None else -1
        return any(one.id == whose for one in self.last) if where == at else None


def _narrowed(here: _Here, able: tuple[_Found, ...]) -> tuple[_Found, ...]:
    """Of several turns that a reply may be, keep those that were sampled behind the same message, then those behind the same reply, too.

    One that may have been keeps the others from being certain.
    """
    message = here.before.message
    able = tuple(found for found in able if message and evidence.split_preceding_hash(found.hit.turn.before).message == message) or able
    if here.last and not _interchangeable([found.hit.turn for found in able], in_place=False):
        follow = [here.follows(found.hit.turn) for found in able]
        if True in follow:
            able = tuple(found for found, follows in zip(able, follow, strict=True) if follows is not False)
    return able


def _unsure(conversation: Conversation, anchors: Sequence[tuple[int, _Found]]) -> tuple[bytes, ...]:
    """Where an anchor is known without its calls, its words may be the beginning of a reply that was never whole."""
    return (aborted_key(conversation.model_key),) if any(not conversation.messages[i].calls for i, _ in anchors) else ()


class _Finder(NamedTuple):
    """Finds the turn that a reply of a history is."""

    conversation: Conversation
    hits: Hits
    leniency: Leniency
    handles: Mapping[int, str]
    turns: Mapping[str, Turn]
    echoed: Mapping[int, ReturnedIdHashes]

    def in_place(self, i: int) -> _Found | str | None:
        """Find the turn that said this behind just this context; a word for why it is none; `None` where nothing was said."""
        echoed, place = self.conversation.messages[i], self.conversation.chain[i]
        by_name = [hit for hit in self._by_name(i) if hit.turn.position_key == place]
        whole = _once([*self.hits.get(chain_key(self.conversation.chain[i + 1]), ()), *by_name])
        judged = self._judged(i, whole)
        told = {hit.turn.prefix_hash for hit in whole}  # who left and asked again may have got the very same tokens
        aborted = [
            hit for hit in self.hits.get(position_key(place), ()) if hit.turn.prefix_hash not in told and may_be_delivered(hit.turn, echoed)
        ]
        parts = [(hit, delivered_prefix(hit.turn, echoed, self.leniency)) for hit in aborted]
        judged += [_Found(hit, Verdict("rewritten", part.rules), part) for hit, part in parts if part is not None]
        by_tokens = self._by_tokens(i, judged) if len(judged) + len(parts) > 1 else []
        chosen = _choose(echoed, by_tokens or judged)
        if isinstance(chosen, _Found) and not by_tokens and any(part is None for _, part in parts):
            return Reason.AMBIGUOUS_REPLY
        if isinstance(chosen, _Found) and not chosen.verdict.ids_kept and self._issued_to_another(i, chosen.hit.turn):
            return Reason.REWRITTEN_REPLY
        return chosen

    def was_judged(self, turn: Turn, i: int) -> bool:
        """Whether all that stands before the reply was judged when the turn was sent, under these rules and in these bytes."""
        unsaid = self.conversation.written_chain[i] == self.conversation.written_chain[0]
        return unsaid or turn.judged == evidence.judged_hash(self.conversation, i, self.leniency, self.handles)

    def holds(self, turn: Turn) -> bool:
        """Whether every reply in a turn's prompt came back, judged anew."""
        return evidence.still_holds(turn, self.conversation, self.turns, self._came_back)

    def _came_back(self, turn: Turn, place: int) -> bool:
        echoed = self.conversation.messages[place]
        if TurnMark.ABORTED in turn.marks and delivered_prefix(turn, echoed, self.leniency) is not None:
            return True
        return self._judged(place, [Hit(turn)])[0].verdict.supplied

    def _issued_to_another(self, i: int, turn: Turn) -> bool:
        """Whether the reply's first call has an id that was issued, though not to the turn that seems to be meant."""
        name = self.conversation.messages[i].calls[0].id
        others = [hit.turn for hit in self._by_name(i) if hit.turn.id != turn.id and hit.turn.served.calls]
        return any(name in {other.served.calls[0].id, safe_id(other.served.calls[0].id)} for other in others)

    def elsewhere(self, i: int) -> _Claim:
        """Find the turns that may have said this, whatever stood before it."""
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
        left = () if by_handle else self.hits.get(aborted_key(self.conversation.model_key), ())
        in_doubt = self._may_be_barred(i, judged, known) or any(may_be_delivered(hit.turn, echoed) for hit in left)
        if in_doubt and not self._by_tokens(i, known):
            return _Claim(i, (), Reason.AMBIGUOUS_REPLY)
        return _Claim(i, tuple(known), "" if evident else Reason.FOREIGN_REPLY, in_order=not evident)

    def _may_be_barred(self, i: int, judged: Sequence[_Found], known: Sequence[_Found]) -> bool:
        """Whether another turn fits as well, but for a rule that may not be relied on: that leaves the others in doubt."""
        here = evidence.split_preceding_hash(evidence.preceding_hash(self.conversation, i)).message
        barred = [found.hit.turn for found in judged if found.verdict.rules and not found.verdict.supplied]
        tokens = {found.hit.turn.completion_hash for found in known}
        return any(evidence.split_preceding_hash(turn.before).message == here and turn.completion_hash not in tokens for turn in barred)

    def _evident(self, i: int, genuine: list[_Found]) -> list[_Found]:
        """Keep the turns that more than their words speak for, by the strongest evidence that speaks for any."""
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
        here = evidence.split_preceding_hash(evidence.preceding_hash(self.conversation, i)).message
        said = echoed.text or echoed.calls
        behind = [found for found in genuine if said and here and evidence.split_preceding_hash(found.hit.turn.before).message == here]
        kept = [found for found in behind if found.verdict.ids_kept]
        return kept or [found for found in behind if not self._issued_to_another(i, found.hit.turn)]

    def _by_tokens(self, i: int, judged: Sequence[_Found]) -> list[_Found]:
        """Keep the turns whose words came back whole and with their token ids, those that nothing continues first."""
        came = self.echoed.get(i)
        if came is None:
            return []
        named = [found for found in judged if found.verdict.supplied and found.delivered is None and came.names(found.hit.turn)]
        return sorted(named, key=lambda found: found.hit.continued)

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


def _once(hits: Iterable[Hit]) -> list[Hit]:
    return list({hit.turn.id: hit for hit in hits}.values())


def _why_not(judged: Sequence[_Found]) -> str:
    return Reason.REWRITTEN_REPLY if any(found.verdict.kind == "rewritten" for found in judged) else Reason.FOREIGN_REPLY


def _choose(echoed: Message, judged: Sequence[_Found]) -> _Found | str | None:
    """Pick the one turn that a reply in its place is; a word for why none can be picked; None where there is nothing."""
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
        return Reason.AMBIGUOUS_REPLY  # a beginning is known by its words alone
    return genuine[0] if _interchangeable([found.hit.turn for found in genuine], in_place=True) else Reason.AMBIGUOUS_REPLY


def _interchangeable(turns: list[Turn], *, in_place: bool) -> bool:
    """Whether it makes no difference which of these turns is taken: they hold the same tokens."""
    return len({turn.prefix_hash if in_place else turn.completion_hash for turn in turns}) == 1

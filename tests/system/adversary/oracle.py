"""The oracle: what is true of every message of a request, and how the prompt that was sent is held against it.

It knows of every message whether the model said it, and in which turn (`Entry.turn`), because it watches what the harness does. It
works out what could be known from the requests alone, by the evidence that docs/rules.md names, and holds every prompt against both:

==============  ===========================================================================================================
`false`         tokens of a turn stand where the message is not that turn's reply
`unfaithful`    outside the model's own spans the prompt is not what the template renders
`lost`          what was sampled is in no turn
`trained…`      what was sampled is trained other than once
`broken`        what is recorded is not what went into the engine and came out of it
`no rendering`  a prompt was sent, and the template refuses the request as a whole: a direct call would have been refused
`missed`        a reply that can be known for certain was not given its tokens
`not placed`    the same, where the product says that the template does not let it be proven where the reply stands
==============  ===========================================================================================================

The rendering that a prompt must equal is found by another way than the product's: the whole request is rendered, as text, with a
word in the place of every recognised reply, and cut at those words.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tests.system.adversary.stack import RefusedError
from tests.system.adversary.words import Message, call_ids, meaning, safe, thoughts
from tokencache.core import invariants

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.system.adversary.stack import Called, Stack

_DRAWN = re.compile(r"(?=[a-zA-Z]*[0-9])[0-9a-zA-Z]{8,}$")
"""An id that was drawn at random, so that nobody else comes by it: others count calls, and harnesses count, too."""
CONTEXT_FREE = frozenset({"unreadable-history", "media"})
"""Reasons of a request that nobody can read: nothing in it is owed."""

NOT_PLACED = frozenset(
    {
        *("opener-unknown", "sentinel-lost", "sentinel-twice", "reply-not-rendered", "empty-tail", "no-stop-id-behind-the-reply"),
        *("tail-not-proven", "past-changes", "new-messages-reach-back", "template-refuses", "unplaced-replies"),
    }
)
"""Reasons of a prompt in which recognised replies could not be placed, for the template does not let it be proven where."""

NEVER = ("false", "unfaithful", "lost", "trained twice", "broken", "internal-error")


@dataclass(frozen=True)
class Entry:
    """One entry of a harness's history, in chat.

    `turn` is the number of the turn that said it, `None` for words of the harness's own; where a reply was edited, its words decide
    whether it is that turn's still (`Oracle.truth`). `owed` is false where the harness did
    something to it that no rule demands to be recognised, such as saying it twice.
    """

    message: Message
    turn: int | None = None
    owed: bool = True
    handle: str = ""

    @functools.cached_property
    def exact(self) -> str:
        """The message as it is written."""
        return json.dumps(self.message, sort_keys=True)

    @functools.cached_property
    def loose(self) -> tuple[Any, ...]:
        """The message, however it is written, whatever the ids in it."""
        return meaning(self.message)

    @functools.cached_property
    def thoughts(self) -> set[str]:
        """The reasoning in it."""
        return thoughts(self.message)

    @property
    def is_reply(self) -> bool:
        return self.message["role"] == "assistant"


class Span(NamedTuple):
    """A turn's tokens within a prompt: which message they stand for, whose they are, from where to where."""

    place: int
    turn: int
    start: int
    end: int


@dataclass
class Said:
    """A turn, as the oracle remembers it."""

    number: int
    reply: Message
    entries: tuple[Entry, ...]
    scope: str
    """The tools and the template's arguments it was sampled under."""
    prompt: list[int]
    completion: list[int]
    spans: list[Span]
    opening: Opening
    """The generation prompt behind which it was sampled."""
    last: int | None
    """The turn whose tokens stand for the last reply before it."""
    handle: str = ""

    @functools.cached_property
    def words(self) -> tuple[Any, ...]:
        """What it says, without its reasoning."""
        return meaning(self.reply)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The ids of its calls, as the strictest harness writes them."""
        return tuple(map(safe, call_ids(self.reply)))

    @functools.cached_property
    def _thoughts(self) -> set[str]:
        return thoughts(self.reply)

    def is_said_by(self, entry: Entry) -> bool:
        """Whether an entry says what this turn said, and thinks nothing that it did not."""
        return entry.loose == self.words and entry.thoughts <= self._thoughts

    @functools.cached_property
    def exact(self) -> tuple[str, ...]:
        return tuple(entry.exact for entry in self.entries)

    @functools.cached_property
    def loose(self) -> tuple[Any, ...]:
        return tuple(entry.loose for entry in self.entries)


@dataclass(frozen=True)
class Finding:
    """Something that must not be: its class, in which session and call, under which template, and what."""

    kind: str
    session: int
    call: int
    template: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.template}, session {self.session}, call {self.call}: {self.what}"


@dataclass
class Tally:
    """What was seen: counts by name, and the first findings of every class."""

    counts: Counter[str] = field(default_factory=Counter)
    matches: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    """Of a session that is replayed: what was done and sent."""

    def find(self, finding: Finding) -> None:
        self.counts[finding.kind] += 1
        if self.counts[finding.kind] <= 50:
            self.findings.append(finding)

    def __iadd__(self, other: Tally) -> Self:
        for name in ("counts", "matches", "reasons", "missed"):
            getattr(self, name).update(getattr(other, name))
        self.findings += other.findings
        return self

    def table(self) -> str:
        """What was seen, a line for each."""
        lines = [(name, self.counts[name]) for name in ("turns", "refused", "not read", "served otherwise")]
        lines += [(f"  {name}", number) for name, number in self.matches.most_common()]
        lines += [(name, self.counts[name]) for name in (*NEVER, "no rendering", "owed", "not placed", "missed")]
        lines += [(f"  {name}", number) for name, number in self.missed.most_common(20)]
        return "\n".join(f"{name:60} {number:9}" for name, number in lines)

    def shown(self, most: int, *, misses: bool = False) -> list[str]:
        """The first findings of every class."""
        kinds = [*NEVER, *(["missed"] if misses else [])]
        return [str(one) for kind in kinds for one in [one for one in self.findings if one.kind == kind][:most]]

    @property
    def guilty(self) -> bool:
        """Whether anything was seen that must never be: misses are counted, not forbidden."""
        return any(self.counts[kind] for kind in NEVER)


def _since(entries: Sequence[Entry]) -> list[tuple[Any, ...]]:
    """What was said since the last reply, however it is written."""
    last = max((place for place, entry in enumerate(entries) if entry.is_reply), default=-1)
    return [entry.loose for entry in entries[last + 1 :]]


class Oracle:
    """Judges the calls of one session."""

    def __init__(self, stack: Stack, session: int, tally: Tally) -> None:
        self.stack, self.session, self.tally = stack, session, tally
        self.turns: dict[int, Said] = {}
        self.numbers: dict[str, int] = {}
        self._kept = 0  # the first turn that the store has
        self._by_words: dict[tuple[Any, ...], list[Said]] = defaultdict(list)
        self._issued: dict[str, set[int]] = defaultdict(set)
        self._call = 0
        self.template = shape_of(stack)

    def lose_store(self) -> None:
        """The store forgets all turns; the harness goes on with them."""
        self._kept = len(self.turns)

    def judge(
        self,
        called: Called,
        entries: Sequence[Entry],
        reply: Message,
        *,
        scope: str,
        owing: bool = True,
        handle: str = "",
    ) -> int | None:
        """Judge a call by its prompt; remember what was sampled. Returns the number of the turn, `None` if nothing was sampled.

        `reply` is what the model said, `handle` what its harness was served with it. Without `owing`, misses are not counted.
        """
        self._call += 1
        plan = called.plan
        self.tally.counts["calls"] += 1
        self.tally.reasons[f"{plan.match}: {plan.reason}" if plan.reason else plan.match] += 1
        if plan.reason == "internal-error":
            self._find("internal-error", "the planner failed")
        if called.refused:
            self.tally.counts["refused"] += 1
            if plan.match not in {"plain", "root"}:
                self.tally.counts["refused though supplied"] += 1
            return None
        self.tally.counts["turns"] += 1
        self.tally.matches[plan.match] += 1
        if called.turn is None:
            self._find("lost", f"nothing was recorded: {called.incidents}")
            return None
        if len(called.call.raw_messages) != len(entries):
            self._find("broken", f"{len(entries)} entries became {len(called.call.raw_messages)} messages")
            return None
        spans = self._spans(called, entries)
        self._tokens(called, spans)
        supplied = {span.place: span.turn for span in spans}
        for span in spans:
            self._judge_span(span, entries, scope, supplied)
        text = self._faithful(called, spans) if spans else self.stack.renderer.words.decode(called.prompt)
        if owing and plan.reason not in CONTEXT_FREE:
            self._owed(plan, entries, self._settled(plan, entries, scope), supplied, scope)
        replies = [i for i, entry in enumerate(entries) if entry.is_reply]
        number = len(self.turns)
        said = Said(
            number,
            reply,
            tuple(entries),
            scope,
            called.prompt,
            called.completion,
            spans,
            self.template.opening(called, text, reply),
            supplied.get(replies[-1]) if replies else None,
            handle,
        )
        self.turns[number] = said
        self.numbers[called.turn.id] = number
        self._by_words[said.words].append(said)
        for name in call_ids(reply):
            self._issued[safe(name)].add(number)
        return number

    def _find(self, kind: str, what: str) -> None:
        self.tally.find(Finding(kind, self.session, self._call, self.stack.kind.name, what))

    # what stands in the prompt

    def _spans(self, called: Called, entries: Sequence[Entry]) -> list[Span]:
        """Where which turns' tokens stand, by what was recorded with the turn."""
        turn = called.turn
        assert turn is not None
        if turn.parent is not None and not turn.anchors:
            parent = self.turns[self.numbers[turn.parent]]
            start = len(parent.prompt)
            return [*parent.spans, Span(len(parent.entries), parent.number, start, start + len(parent.completion))]
        taken: list[Span] = []
        for place in called.plan.client_places:  # ids that came back: those of the turn that the reply was
            said = self.turns[entries[place].turn]
            taken.append(Span(place, said.number, len(said.prompt), len(said.prompt) + len(said.completion)))
        for anchor in turn.anchors:
            number = self.numbers[anchor.turn]
            place = getattr(anchor, "place", None)
            if place is None:  # before it was recorded
                after = taken[-1].place if taken else -1
                fits = [i for i, e in enumerate(entries) if e.is_reply and i > after and e.loose == self.turns[number].words]
                place = next((i for i in fits if entries[i].turn == number), fits[0] if fits else after + 1)
            taken.append(Span(place, number, anchor.start, anchor.end))
        return taken

    def _tokens(self, called: Called, spans: Sequence[Span]) -> None:
        """Hold the claims against the tokens."""
        for span in spans:
            said = self.turns[span.turn].completion
            there = called.prompt[span.start : span.end]
            # A stop token that is not the template's is replaced.
            if there not in (said, said[:-1]):
                self._find("false", f"tokens {span.start} to {span.end} are not those of turn {span.turn}")

    # whose words they are

    def truth(self, entry: Entry) -> int | None:
        """The turn that an entry is; `None` if it is none, or none any more."""
        return entry.turn if entry.turn is not None and self.turns[entry.turn].is_said_by(entry) else None

    def _judge_span(self, span: Span, entries: Sequence[Entry], scope: str, supplied: dict[int, int]) -> None:
        """Judge one message that was given a turn's tokens."""
        if not 0 <= span.place < len(entries) or not entries[span.place].is_reply:
            self._find("false", f"message {span.place} is no reply, and stands in the tokens of turn {span.turn}")
            return
        entry, given = entries[span.place], self.turns[span.turn]
        if not given.is_said_by(entry):
            self._find("false", f"message {span.place} does not say what turn {span.turn} said: {entry.exact} is not {given.reply}")
            return
        truth = self.truth(entry)
        if truth is not None and self.turns[truth].completion == given.completion:
            return
        whose = f"turn {truth}" if truth is not None else "the harness's own"
        if entry.handle and given.handle and entry.handle != given.handle:
            self._find("false", f"message {span.place} is {whose}, came back with its handle, and stands in the tokens of turn {span.turn}")
            return
        if self._stood_there(span, entries, scope):
            return
        fits = self._fitting(entries, span.place)
        before = [i for i in range(span.place) if entries[i].is_reply]
        # The reply before may be known though its tokens could not be placed.
        previous = {supplied.get(before[-1]), self.truth(entries[before[-1]])} - {None} if before else set()
        in_order = [said for said in fits if said.last in previous]
        indicated = next((level for level in [*self._levels(fits, entries, span.place, scope), in_order] if level), [])
        ordered = [said for said in indicated if said in in_order]
        since = _since(entries[: span.place])
        for level in (indicated, ordered, [said for said in ordered if _since(said.entries) == since]):
            if {tuple(said.completion) for said in level} == {tuple(given.completion)} and truth not in {said.number for said in level}:
                return  # by all that can be known it is that turn
        others = [said.number for said in indicated]
        self._find("false", f"message {span.place} is {whose}, and stands in the tokens of turn {span.turn} (indicated: {others})")

    def _stood_there(self, span: Span, entries: Sequence[Entry], scope: str) -> bool:
        """Whether the history goes on from a turn in whose prompt the same tokens stood there: then its context tells whose they are."""
        for said in list(self.turns.values())[self._kept :]:
            n = len(said.entries)
            if not span.place < n < len(entries) or said.scope != scope or not said.is_said_by(entries[n]):
                continue
            same_tokens = any((one.place, one.turn) == (span.place, span.turn) for one in said.spans)
            if same_tokens and said.loose == tuple(entry.loose for entry in entries[:n]):
                return True
        return False

    def _fitting(self, entries: Sequence[Entry], place: int) -> list[Said]:
        """The turns that said just this."""
        entry = entries[place]
        return [said for said in self._by_words[entry.loose] if said.number >= self._kept and said.is_said_by(entry)]

    def _levels(self, fits: Sequence[Said], entries: Sequence[Entry], place: int, scope: str) -> list[list[Said]]:
        """The turns that each kind of evidence indicates, the strongest first: place, to the letter and not, ids, handle, neighbours."""
        entry = entries[place]
        context = tuple(one.loose for one in entries[:place])
        names = tuple(map(safe, call_ids(entry.message)))
        before = entries[place - 1].loose if place else None
        exactly = tuple(one.exact for one in entries[:place])
        placed = [said for said in fits if said.scope == scope and not self._renamed(said.entries, entries)]
        return [
            [said for said in placed if said.exact == exactly],
            [said for said in placed if said.loose == context],
            [said for said in fits if any(map(_DRAWN.search, names)) and said.names == names],
            [said for said in fits if entry.handle and said.handle == entry.handle],
            [said for said in fits if before is not None and any(entry.loose[1:]) and said.loose[-1:] == (before,)],
        ]

    def _renamed(self, before: Sequence[Entry], now: Sequence[Entry]) -> bool:
        """Whether a reply came back with another's handle or call id than stood there before: it is that one, of the same words."""
        for was, one in zip(before, now, strict=False):
            if was.handle and one.handle and was.handle != one.handle:
                return True
            names = zip(map(safe, call_ids(was.message)), map(safe, call_ids(one.message)), strict=False)
            if one.is_reply and any(old != new and new in self._issued for old, new in names):
                return True
        return False

    # what is owed

    def _owed(self, plan: Any, entries: Sequence[Entry], settled: int, supplied: dict[int, int], scope: str) -> None:
        """Count the replies that can be known, from place `settled` on, and those of them that were not given their tokens."""
        previous: int | None = None
        for place, entry in enumerate(entries):
            if not entry.is_reply:
                continue
            evidence = self._evidence(entries, place, previous, scope)
            previous = self._certain(entries, place, supplied)
            if not evidence or place < settled:
                continue
            self.tally.counts["owed"] += 1
            if place not in supplied and plan.reason in NOT_PLACED:
                self.tally.counts["not placed"] += 1
                self.tally.missed[f"{self.stack.kind.name}, {plan.match}: {plan.reason}"] += 1
            elif place not in supplied:
                self.tally.missed[f"{self.stack.kind.name}, {plan.match}: {plan.reason}"] += 1
                self._find("missed", f"message {place} is turn {entry.turn} by {evidence}; {plan.match}: {plan.reason}")

    def _certain(self, entries: Sequence[Entry], place: int, supplied: dict[int, int]) -> int | None:
        """Whose reply stands at a place; `None` if two turns of these tokens may be meant, for then it is not known which."""
        given = supplied.get(place)
        if given is None:
            return None
        twins = [said for said in self._fitting(entries, place) if said.completion == self.turns[given].completion]
        return given if len(twins) == 1 else None

    def _settled(self, plan: Any, entries: Sequence[Entry], scope: str) -> int:
        """How many messages stand before the reply that is gone on from, in its place: these were counted with that turn."""
        near = self.turns[self.numbers[plan.near]] if plan.near is not None else None
        if near is None or len(near.entries) >= len(entries):
            return 0
        n = len(near.entries)
        in_place = near.scope == scope and near.loose == tuple(entry.loose for entry in entries[:n]) and near.is_said_by(entries[n])
        return n if in_place else 0

    def _evidence(  # noqa: PLR0911 - one for each kind
        self, entries: Sequence[Entry], place: int, previous: int | None, scope: str
    ) -> str:
        """By what a reply can be known for certain; `""` if it cannot, or need not."""
        entry = entries[place]
        truth = self.truth(entry)
        if truth is None or truth < self._kept or not entry.owed:
            return ""
        if entry.handle and [other.handle for other in entries].count(entry.handle) > 1:
            return ""  # a handle that two came back with says nothing of either
        own, fits = self.turns[truth], self._fitting(entries, place)
        names = tuple(map(safe, call_ids(entry.message)))
        if names and names == own.names:
            fits = [said for said in fits if said.names == names]
        elif any(name in self._issued for name in names) or any(map(_same_make, own.names, names)):
            return ""  # an id that was issued to another turn, or may have been
        to_the_letter, in_place, by_id, by_handle, beside = self._levels(fits, entries, place, scope)
        if own in to_the_letter and self._alone(own, in_place):
            return "place"
        if self._claimed_elsewhere(own, entries, place, scope):
            return ""
        if own in by_id and self._alone(own, by_id):
            return "id"
        if own in by_handle and self._alone(own, by_handle):
            return "handle"
        if own in beside and self._alone(own, beside):
            return "neighbour"
        since = _since(entries[:place])
        # Behind which reply a turn was sampled is not known where that was not recognised: it may have been this one.
        led = [said for said in beside if previous is not None and said.last in {previous, None} and _since(said.entries) == since]
        return "previous reply and all since" if own in led and own.last is not None and self._alone(own, led) else ""

    def _claimed_elsewhere(self, own: Said, entries: Sequence[Entry], place: int, scope: str) -> bool:
        """Whether another message of the history may just as well be this turn's reply: it stands in one place only."""
        others = [i for i, entry in enumerate(entries) if i != place and entry.is_reply and own in self._fitting(entries, i)]
        if any(entries[i].turn == own.number for i in others):
            return True  # the same message twice, with whatever it carries
        return any(own in level for i in others for level in self._levels([own], entries, i, scope))

    @staticmethod
    def _alone(own: Said, fits: Sequence[Said]) -> bool:
        return all(said.completion == own.completion for said in fits)

    # what the template renders

    def _faithful(self, called: Called, spans: Sequence[Span]) -> str:
        """Hold the prompt outside of the spans against the template; the prompt as the template would have it."""
        try:
            wanted = self.template.pieces(called, spans, [self.turns[span.turn].opening for span in spans])
        except (LookupError, RefusedError) as why:
            kind = "no rendering" if isinstance(why, RefusedError) else "unfaithful"
            self._find(kind, f"no rendering of the request shows the replies: {why}")
            return self.stack.renderer.words.decode(called.prompt)
        decode = self.stack.renderer.words.decode
        at = 0
        for n, wants in enumerate(wanted):
            until = spans[n].start if n < len(spans) else len(called.prompt)
            have = decode(called.prompt[at:until]) if until > at else ""
            stop = decode(called.prompt[at - 1 : at]) if n and called.prompt[at - 1] in self.template.stop_ids else ""
            if not wants.startswith(stop):
                self._find("unfaithful", f"behind span {n - 1} stands {stop!r}, rendered is {wants[:30]!r} ({called.plan.match})")
                break
            want = wants.removeprefix(stop)
            if have != want:
                same = next((i for i, (a, b) in enumerate(zip(have, want, strict=False)) if a != b), min(len(have), len(want)))
                shown = f"{have[max(0, same - 20) : same + 40]!r} is not {want[max(0, same - 20) : same + 40]!r}"
                behind = f"behind message {spans[n - 1].place}" if n else "in front"
                behind += ", where the parent's prompt has it" if called.plan.parent is not None and n < len(spans) else ""
                self._find("unfaithful", f"{called.plan.match}, {behind}: {shown}")
                break
            at = spans[n].end if n < len(spans) else at
        return decode(called.prompt)

    # what is recorded

    async def close(self, names: Sequence[str]) -> None:
        """Hold the records of the session, under all its names, against the engine's books."""
        recorded = 0
        for name in names:
            turns = await self.stack.store.turns(name)
            recorded += len(turns)
            tokens = await self.stack.store.tokens(name, [turn.id for turn in turns]) if turns else {}
            ground_truth = [(e.prompt, e.completion, e.logprobs) for e in self.stack.engine.ground_truth if e.session == name]
            for found in invariants.engine_agrees(turns, tokens, ground_truth):
                self._find("lost" if "recorded by no turn" in found else "broken", found)
            for found in invariants.audit(turns, tokens):
                self._find("trained twice" if " sequences" in found or "mask" in found else "broken", found)
        if recorded != len(self.turns):
            kind = "lost" if recorded < len(self.turns) else "trained twice"
            self._find(kind, f"{len(self.turns)} turns were sampled, {recorded} recorded")


# --- how a template writes replies ------------------------------------------------------------------------------------------


class Opening(NamedTuple):
    """The generation prompt behind which a reply was sampled; `written` is what the template puts there before a reply of the past.

    `written` is `None` where that begins with the template's head of replies, wherever that is.
    """

    text: str
    written: str | None = None


class Template(NamedTuple):
    """How replies stand in a template's text: behind `head`; before one of `ends`, if it has any of its own.

    `bare` says that a reply to a tool's result has no head.
    """

    head: str
    ends: tuple[str, ...]
    style: str
    bare: bool
    stop_ids: frozenset[int]

    def opening(self, called: Called, prompt: str, reply: Message) -> Opening:
        """The generation prompt at the end of a prompt; `reply` was sampled behind it."""
        if self.bare:  # replies with a head and without one: what the template puts before this one is looked up
            messages = [_marked(message, "Zq") if message["role"] == "assistant" else message for message in called.messages]
            return self._opening(called, messages, reply)
        if not self.head:
            return self._opening(called, _small(called.messages), reply)
        return Opening(prompt[prompt.rfind(self.head) :])

    def _opening(self, called: Called, messages: list[Message], reply: Message) -> Opening:
        """What the template puts behind these messages: to open a reply, and before this one."""
        before, shown = called.text(messages), called.text([*messages, _marked({"role": "assistant", **reply}, "Zqwy")])
        same = len(_common(before, shown))
        if self.bare and before.endswith(self.head):
            same = min(same, len(before) - len(self.head))
        return Opening(before[same:], shown[same : shown.index("Zqwy", same)])

    def _headless(self, called: Called, place: int) -> str:
        """What the template writes before a reply, where it has no head of replies; what stands far in front may wander."""
        return self._opening(called, _small(called.messages[:place]), called.messages[place]).written or ""

    def pieces(self, called: Called, spans: Sequence[Span], openings: Sequence[Opening]) -> list[str]:
        """What stands in front of, between and behind the recognised replies.

        Raises:
            LookupError: a reply is not shown.
            RefusedError: the template refuses the conversation.
        """
        messages = list(called.messages)
        marks = [f"Zq{span.place}wy" for span in spans]
        for span, mark in zip(spans, marks, strict=True):
            messages[span.place] = _marked(messages[span.place], mark)
        shown = called.text(messages)
        out, at = [], 0
        for span, mark, opening in zip(spans, marks, openings, strict=True):
            first, last = shown.find(mark, at), shown.rfind(mark) + len(mark)
            written = opening.written if self.head else self._headless(called, span.place)
            known = written is not None and first >= 0 and shown.endswith(written, at, first)
            begin = first - len(written or "") if known else shown.rfind(self.head, at, first)
            before, headed = shown, shown.startswith(self.head, begin) and (known or begin + len(self.head) == first)
            if self.bare and not headed and (opening.text.startswith(self.head) or not known):  # it has no head where it stands now
                later = [message for message in messages[span.place :] if message["role"] == "system"]  # all of them stand in front
                alone = called.text([*messages[: span.place], *later], generation=False)
                before, begin = (alone, len(alone)) if alone.startswith(shown[:at]) else (shown, begin if known else -1)
            if first < 0 or begin < at:
                raise LookupError(f"{span.place}: {shown[max(at, first - 60) : first]!r}")
            out.append(before[at:begin] + opening.text)
            called_it = shown.startswith("Z", last)
            ends = ("<|call|>",) if self.style == "harmony" and called_it else self.ends
            at = _end(shown, ends, last, called=called_it)
        return [*out, shown[at:]]


def _same_make(ours: str, theirs: str) -> bool:
    """Whether an id in another's place looks drawn just like that."""
    drawn = [_DRAWN.search(name) for name in (ours, theirs)]
    if ours == theirs or None in drawn:
        return False
    (head, length), (other, same) = [(name[: one.start()], len(one[0])) for name, one in zip((ours, theirs), drawn, strict=True) if one]
    return head == other and length == same


def _small(messages: Sequence[Message]) -> list[Message]:
    """A small conversation that ends as this one does."""
    return [_ASK, _CALL, _RESULT] if messages and messages[-1]["role"] == "tool" else [_ASK]


def _end(shown: str, ends: Sequence[str], last: int, *, called: bool) -> int:
    """Where the reply ends whose last word ends at `last`: before its end of turn."""
    if not ends:
        return shown.index("</tool_call>", last) + len("</tool_call>") if called else last
    found = [i for end in ends if (i := shown.find(end, last)) >= 0]
    if not found:
        raise LookupError(f"no end of turn behind character {last}")
    return min(found)


def _marked(message: Message, mark: str) -> Message:
    """A reply with a word in the place of its text, and another one in the place of its last call's arguments."""
    out: Message = {"role": "assistant", "content": mark}
    if calls := message.get("tool_calls"):
        given = json.dumps({"z": f"{mark}Z"})  # of several calls a template may show the first one only
        out["tool_calls"] = [{**call, "function": {**call["function"], "arguments": given}} for call in calls]
    return out


@functools.lru_cache(maxsize=4)
def shape_of(stack: Stack) -> Template:
    """Find out how a template writes replies, from small conversations."""
    renderer, kind = stack.renderer, stack.kind
    ask, said = _ASK, {"role": "assistant", "content": "Zq"}
    opened, closed = (renderer.prompt([ask], None, {}, generation=generation) for generation in (True, False))
    with contextlib.suppress(RefusedError):
        if opened == closed:  # the generation prompt is always there, or there is none
            closed = renderer.prompt([ask, {**ask, "content": "And"}], None, {}, generation=False)
    start = len(_common(opened, closed))
    opening = head = opened[start:]
    for talk in ([ask, said], [ask, said, ask, said, ask]):
        shown = renderer.prompt(talk, None, {}, generation=False)
        head = _common(head, shown[start : shown.index("Zq")])
    bare = False
    with contextlib.suppress(RefusedError):  # it may take no results
        bare = not renderer.prompt([ask, _CALL, _RESULT], None, {}).endswith(opening)
    return Template(head, kind.ends, kind.style, bare, frozenset(renderer.words.id_of(stop) for stop in kind.stops))


_ASK: Message = {"role": "user", "content": "Ask"}
_RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "content": "Got"}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "bash", "arguments": "{}"}}],
}


def _common(one: str, other: str) -> str:
    return one[: next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))]

"""Decides what is true of every message of a request, and compares the prompt that was sent with it.

The oracle observes the simulated client, so it knows of every message which turn the model sampled it in (`Entry.turn`). It also works
out what can be known from the requests alone, by the evidence in docs/rules.md. It compares every prompt with both:

==============  ===========================================================================================================
`false`         the prompt has a turn's tokens in place of a message that is not that turn's reply
`unfaithful`    outside the model's own spans the prompt is not what the template renders
`lost`          sampled tokens are in no turn
`trained…`      sampled tokens are trained twice or never
`mislabelled`   the record says another end of a reply than its ids prove, or names other ids as forced than the engine forced
`broken`        the record differs from what the engine received and sent
`no rendering`  a prompt was sent although the template refuses the request: a direct call would have been refused
`missed`        a reply that can be identified with certainty is not in the prompt with its tokens
`not placed`    the same, where the product reports that the reply's place in the template's rendering cannot be proven
==============  ===========================================================================================================

The expected rendering is found in another way than the product finds it (`template_reading`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.engine.template.template_lab import UNASKED
from tests.support import invariants
from tests.system.adversary.engine import RefusedError
from tests.system.adversary.observed import Entry, Finding, SampledTurn, Span, Tally
from tests.system.adversary.template_reading import reading_of
from tests.system.adversary.words import (
    DRAWN,
    arguments_of,
    bare,
    call_ids,
    meaning,
    safe,
    says,
    shown,
    stripped,
    text_of,
    thoughts,
    understood_forms,
    with_blanks_of,
    with_mended_names,
    without_text,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.system.adversary.engine import Generation
    from tests.system.adversary.stack import Called, Stack
    from tests.system.adversary.words import Message
    from tokencache.core.turn import Turn

_END_OF_THINKING = re.compile("</(?:seed:)?think>|<\\|END_THINKING\\|>|<\\|end\\|><\\|start\\|>assistant|\u52a9\u624b\uff1a")
"""What ends thinking, and what Hunyuan's model writes before each answer (its template omits that in histories without tools)."""
CONTEXT_FREE = frozenset({"unreadable-history", "media", "continue-final-message", "record-only"})
"""Reasons for which no reply of a request has to be recognised: the request cannot be read."""

NOT_PLACED = frozenset(
    {
        *("opener-unknown", "sentinel-lost", "sentinel-twice", "reply-not-rendered", "empty-tail", "no-stop-id-behind-the-reply"),
        *("visible-part-unknown", "thinking-dropped"),
        *("tail-not-proven", "past-changes", "new-messages-reach-back", "template-refuses", "unplaced-replies"),
    }
)
"""Reasons of a prompt in which recognised replies are missing because their place in the rendering cannot be proven."""


HIDES_CALLS = frozenset({"Llama-3", "SmolLM3", "Granite 3.3", "gpt-oss", "Hunyuan-A13B"})
"""Templates that show no calls, or not all of them."""


def _since(entries: Sequence[Entry]) -> list[str]:
    """The messages since the last reply, as written."""
    last = max((place for place, entry in enumerate(entries) if entry.is_reply), default=-1)
    return [entry.exact for entry in entries[last + 1 :]]


class Oracle:
    """Judges the calls of one session."""

    def __init__(self, stack: Stack, session: int, tally: Tally) -> None:
        self.stack, self.session, self.tally = stack, session, tally
        self.turns: dict[int, SampledTurn] = {}
        self.numbers: dict[str, int] = {}
        self._generations: dict[str, Generation] = {}
        self._kept = 0  # the first turn that the store has
        self._by_words: dict[tuple[Any, ...], list[SampledTurn]] = defaultdict(list)
        self._issued: dict[str, set[int]] = defaultdict(set)
        self._with_ids: set[tuple[int, tuple[Any, ...]]] = set()  # turns whose ids a client sent, and with which words
        self._call = 0
        self.template = reading_of(stack)
        self._follows = stack.history == "follow"

    def lose_store(self) -> None:
        """The store loses all turns; the client continues with them."""
        self._kept = len(self.turns)

    def judge(
        self,
        called: Called,
        entries: Sequence[Entry],
        *,
        scope: str,
        owing: bool = True,
        handle: str = "",
        kept: Message | None = None,
    ) -> int | None:
        """Judge a call by its prompt; remember what was sampled. Return the number of the turn, `None` if nothing was sampled.

        `handle` is the handle that the client received with the reply, `kept` what its harness is known to make of it. Without `owing`,
        misses are not counted.
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
        assert called.generation is not None
        reply = called.generation.message
        spans = self._spans(called, entries)
        self._tokens(called, spans, entries)
        if self._follows and not (called.continues and plan.parent is not None):  # such a prompt is that of the reply, with its thinking
            self._thinking(called, spans)
        supplied = {span.place: span.turn for span in spans}
        for span in self._changed(spans, entries):
            self._judge_span(span, entries, scope, supplied, called)
        text = self._faithful(called, spans, entries) if spans else self.stack.renderer.words.decode(called.prompt)
        if owing and plan.reason not in CONTEXT_FREE:
            self._owed(plan, entries, self._settled(plan, entries, scope), supplied, scope)
        replies = [i for i, entry in enumerate(entries) if entry.is_reply]
        number = len(self.turns)
        said = SampledTurn(
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
            called.generation.thought,
            called.generation.served,
            called.continues,
            kept,
            called.generation.ends[1:] if called.generation.label == "abort" else (),
            called.generation.stop,
            called.generation.begins if called.generation.label == "abort" and not called.generation.ends[1:] else None,
            called.generation.begun,
        )
        self.turns[number] = said
        self.numbers[called.turn.id] = number
        self._generations[called.turn.id] = called.generation
        self._remember(said)
        return number

    def _remember(self, said: SampledTurn) -> None:
        for words in {*said.forms, meaning(without_text(said.reply, ()))}:
            self._by_words[words].append(said)
        for name in call_ids(said.reply):
            self._issued[safe(name)].add(said.number)

    def _find(self, kind: str, what: str) -> None:
        self.tally.find(Finding(kind, self.session, self._call, self.stack.kind.name, what))

    # the turns in a prompt

    def _spans(self, called: Called, entries: Sequence[Entry]) -> list[Span]:
        """The turns whose tokens are in the prompt, according to the record."""
        turn = called.turn
        assert turn is not None
        if turn.parent is not None and not turn.anchors:
            parent = self.turns[self.numbers[turn.parent]]
            start = len(parent.prompt)
            place = len(parent.entries) - parent.continues
            return [*parent.spans, Span(place, parent.number, start, start + len(parent.completion))]
        taken: list[Span] = []
        for place in called.plan.client_places:  # ids that the client sent back: those of the reply's turn
            said = self.turns[entries[place].turn]
            taken.append(Span(place, said.number, len(said.prompt), len(said.prompt) + len(said.completion)))
        for anchor in turn.anchors:
            number = self.numbers[anchor.turn]
            if not taken and called.prompt[: anchor.start] == self.turns[number].prompt:
                # The prompt goes on with that turn's. The record need not name the replies in it again.
                taken += [span for span in self.turns[number].spans if self._still_there(span, entries[span.place])]
            place = getattr(anchor, "place", None)
            if place is None:  # before it was recorded
                after = taken[-1].place if taken else -1
                fits = [i for i, e in enumerate(entries) if e.is_reply and i > after and e.loose == self.turns[number].words]
                place = next((i for i in fits if entries[i].turn == number), fits[0] if fits else after + 1)
            taken.append(Span(place, number, anchor.start, anchor.end, anchor.offset))
        return taken

    def _tokens(self, called: Called, spans: Sequence[Span], entries: Sequence[Entry]) -> None:
        """Compare the recorded spans with the tokens of the prompt."""
        for span in spans:
            said = self.turns[span.turn].completion[span.offset :]
            there = called.prompt[span.start : span.end]
            if self.turns[span.turn].was_cut:
                self._cut(span, there, entries[span.place].message if 0 <= span.place < len(entries) else {})
                continue
            # A stop token other than the template's is replaced. A template that is followed may trim the text, or show no calls.
            decode = self.stack.renderer.words.decode
            rest = decode(said[len(there) :][:-1])
            whole = self.turns[span.turn].completion
            until = len(decode(whole[: span.offset + len(there)]))
            if there == said[: len(there)] and not decode(whole)[until : self.turns[span.turn].served].strip():
                continue  # without the stop string, which the client did not receive
            left_out = not rest.strip() or (self.stack.kind.name in HIDES_CALLS and self.turns[span.turn].reply.get("tool_calls"))
            if there not in (said, said[:-1]) and not (self._follows and there == said[: len(there)] and left_out):
                self._find("false", f"tokens {span.start} to {span.end} are not those of turn {span.turn}")

    def _cut(self, span: Span, there: list[int], message: Message) -> None:
        """Check that the tokens of a reply which its client left end with the last call that the message has, or with its text.

        The client may have received more calls: Hermes drops one that stands twice, and nothing shows that the second had arrived.
        """
        said, decode = self.turns[span.turn], self.stack.renderer.words.decode
        calls = len(message.get("tool_calls") or ())
        if not calls:
            self._cut_text(span, there, message)
            return
        end = said.ends[calls - 1] if 0 < calls <= len(said.ends) else 0
        text = decode(said.completion[: span.offset + len(there)])
        if there != said.completion[span.offset :][: len(there)] or text.rstrip() != decode(said.completion)[:end].rstrip():
            self._find(
                "false", f"tokens {span.start} to {span.end} are not those of turn {span.turn} up to the end of call {calls}: {text!r}"
            )

    def _cut_text(self, span: Span, there: list[int], message: Message) -> None:
        """Check that the tokens of a reply which its client left end with the text of the message, or with its thinking.

        Without either, the harness dropped the thinking, and the prompt may have any part of it.
        """
        said, decode = self.turns[span.turn], self.stack.renderer.words.decode
        begins = said.begins or (0, 0)
        text = decode(said.completion[: span.offset + len(there)])
        own = {"role": "assistant", "content": text[begins[1] :] or None}
        wanted, now = (meaning(message)[1], meaning(own)[1])
        if said.begins is None:  # calls had arrived, and the message has none: the text before the first one
            wanted, now = stripped(text_of(message)), stripped(text[-len(stripped(text_of(message))) :])
        elif not wanted:  # the tokens may have the end of the thought
            thought = stripped(_END_OF_THINKING.split(text[begins[0] :])[0])
            wanted, now = next(iter(thoughts(message)), ""), next(iter(thoughts(own)), thought)
        if there != said.completion[span.offset :][: len(there)] or (wanted and wanted != now):
            self._find("false", f"tokens {span.start} to {span.end} are not those of turn {span.turn} up to {wanted!r}: {text!r}")

    def _thinking(self, called: Called, spans: Sequence[Span]) -> None:
        """In a session that follows the template, check that a reply has its thinking in the prompt if the template shows it there.

        Of a reply without its thinking, nothing else is missing at the beginning.
        """
        decode = self.stack.renderer.words.decode
        for span in spans:
            said = self.turns[span.turn]
            before, after = decode(said.completion[: span.offset]), decode(said.completion[span.offset :])
            *ended, left_out = (part.strip() for part in _END_OF_THINKING.split(before))
            left_out = left_out if ended else before.rpartition(said.thinking or UNASKED)[2].strip()
            there = decode(
                called.prompt[max(span.start - 20, 0) : span.start]
            ).rstrip()  # the template may open an answer with the same words
            if span.offset and not (there.endswith(left_out) and after.lstrip().startswith(text_of(said.reply).strip())):
                what = f"message {span.place} is shown from {after[:20]!r} on, after {before[-20:]!r} ({called.plan.match})"
                self._find("unfaithful", what)
        marks = {span.place: f"Zq{span.place}wy" for span in spans if self.turns[span.turn].thought}
        if not marks:
            return
        messages = list(called.messages)
        for span in spans:
            messages[span.place] = {**self.turns[span.turn].reply, "reasoning": marks.get(span.place), "role": "assistant"}
            messages[span.place] |= {"tool_calls": calls} if (calls := called.messages[span.place].get("tool_calls")) else {}
        try:
            shown = called.text(messages)
        except RefusedError as why:
            self._find("no rendering", f"the replies with their thinking cannot be rendered: {why}")
            return
        for span in spans:
            said = self.turns[span.turn]
            if span.place not in marks or said.thought not in decode(said.completion):
                continue
            kept, wanted = span.offset == 0, marks[span.place] in shown
            if kept is not wanted:
                does = "shows" if wanted else "omits"
                self._find(
                    "unfaithful", f"the template {does} the thinking of message {span.place}, the prompt does not ({called.plan.match})"
                )

    # the turn of each message

    def truth(self, entry: Entry) -> int | None:
        """The turn whose reply an entry is; `None` if the model did not sample it, or if it was changed since."""
        return entry.turn if entry.turn is not None and (entry.is_kept or self.turns[entry.turn].is_said_by(entry)) else None

    def _changed(self, spans: Sequence[Span], entries: Sequence[Entry]) -> list[Span]:
        """The spans without those of messages that still are what the harness made of that turn's reply, or of several turns' replies."""
        kept = [span for span in spans if 0 <= span.place < len(entries) and self._is_kept(span, entries[span.place])]
        self.tally.counts["kept"] += len(kept)
        return [span for span in spans if span not in kept]

    def _is_kept(self, span: Span, entry: Entry) -> bool:
        if not entry.is_kept or entry.turn is None or span.turn in {entry.turn, *entry.parts}:
            return entry.is_kept
        given = self.turns[span.turn]
        if not entry.parts:
            return self.turns[entry.turn].completion == given.completion
        parts = [self.turns[part] for part in entry.parts]  # a part has the same beginning as well
        return any((part.prompt, part.completion) == (given.prompt, given.completion) for part in parts)

    def _still_there(self, span: Span, entry: Entry) -> bool:
        """Whether a message may be the reply with these tokens: it is what a harness made of it, or has its words."""
        return self._is_kept(span, entry) or self.turns[span.turn].is_said_by(entry)

    def _words_after(self, span: Span, entry: Entry) -> str:
        """The harness's words after a turn's reply in the prompt: none if the message as it was written is that reply."""
        given = self.turns[span.turn]
        if entry.is_kept and self._is_kept(span, entry):
            return entry.words
        if given.is_said_by(entry) or (not entry.is_kept and _is_made_of(entry, given)):
            return ""
        return _rest(given, entry.message) or (entry.words if entry.is_kept else "")

    def _judge_span(self, span: Span, entries: Sequence[Entry], scope: str, supplied: dict[int, int], called: Called) -> None:
        """Judge one message whose place in the prompt has a turn's tokens."""
        if not 0 <= span.place < len(entries) or not entries[span.place].is_reply:
            self._find("false", f"message {span.place} is not a reply, but has the tokens of turn {span.turn}")
            return
        entry, given, written = entries[span.place], self.turns[span.turn], entries
        with_words = bool(entry.words) and (entry.is_kept or entry.words == entry.stop)
        words = entry.words if with_words else given.stop  # it may also be another turn's reply with the stop string at which that ended
        if words and not given.is_said_by(entry):  # without these, it may be a copy that stands in the place of another turn's reply
            entry = _without_end(entry, words)
            entries = [*entries[: span.place], entry, *entries[span.place + 1 :]]
        if not given.is_said_by(entry):
            began = self._began_there(given, entries[: span.place + 1], scope)
            if not (began or self._is_mended(given, entries, span.place, scope) or self._came_with_ids(given, entry, span, called)):
                self._find("false", f"message {span.place} does not have the words of turn {span.turn}: {entry.exact} is not {given.reply}")
            return
        if not self._stood_there(span, written, scope, called.prompt):
            self._judge_evidence(span, entries, scope, supplied, with_words=with_words)

    def _judge_evidence(self, span: Span, entries: Sequence[Entry], scope: str, supplied: dict[int, int], *, with_words: bool) -> None:
        """Judge whether a message whose words are those of the turn is that turn, or all evidence says so."""
        entry, given = entries[span.place], self.turns[span.turn]
        truth = self.truth(entry)
        if truth is not None and self.turns[truth].completion == given.completion:
            return
        whose = f"turn {truth}" if truth is not None else "the harness's own"
        if entry.handle and given.handle and entry.handle != given.handle:
            self._find("false", f"message {span.place} is {whose}, came back with its handle, and stands in the tokens of turn {span.turn}")
            return
        fits = self._fitting(entries, span.place)
        if with_words and truth is not None and truth not in {said.number for said in fits} and truth >= self._kept:
            fits = [*fits, self.turns[truth]]  # as it was written, it may as well be that turn's reply with words
        before = [i for i in range(span.place) if entries[i].is_reply]
        # The reply before may be known though its tokens could not be placed.
        previous = {supplied.get(before[-1]), self.truth(entries[before[-1]])} - {None} if before else set()
        in_order = [said for said in fits if said.last in previous]
        levels = self._levels(fits, entries, span.place, scope)
        indicated = next((level for level in [*levels, in_order] if level), [])
        in_its_place = entry.loose in given.forms and any(given in level for level in levels[:2])
        alike = [given, *(said for said in indicated if said.completion == given.completion)]
        if not in_its_place and all(self._is_another(said, entries, span.place, scope) for said in alike):
            self._find("false", f"message {span.place} is {whose}, and has the tokens of turn {span.turn}, which is another message")
            return
        ordered = [said for said in indicated if said in in_order]
        since = _since(entries[: span.place])
        beside = [said for said in indicated if said in levels[-1]]  # the same message directly before decides between these
        for level in (indicated, beside, ordered, [said for said in ordered if _since(said.entries) == since]):
            if {tuple(said.completion) for said in level} == {tuple(given.completion)} and truth not in {said.number for said in level}:
                return  # all evidence indicates that turn
        others = [said.number for said in indicated]
        self._find("false", f"message {span.place} is {whose}, but has the tokens of turn {span.turn} (indicated: {others})")

    def _is_another(self, said: SampledTurn, entries: Sequence[Entry], place: int, scope: str) -> bool:
        """Whether a turn's reply is in another place than this one, with evidence of its own.

        Messages of the client before it that have other blanks, or other parts, are no evidence.
        """
        itself = [n for n, one in enumerate(entries) if n != place and self.truth(one) == said.number and said.is_said_by(one)]

        def as_written(n: int) -> bool:
            return all(was.exact == one.exact for was, one in zip(said.entries, entries[:n], strict=False) if not one.is_reply)

        levels = {n: self._levels([said], entries, n, scope) for n in itself}
        return any(levels[n][0] or (levels[n][1] and as_written(n)) or any(levels[n][2:]) for n in itself)

    def _began_there(self, given: SampledTurn, entries: Sequence[Entry], scope: str) -> bool:
        """Whether a turn was sampled after just these messages, and its text begins the last one, which the harness made of something else.

        Then the turn's tokens are the policy's own in this place, whoever wrote the rest of the message, which has mask 0. What the harness
        makes of the turn itself is judged by what it is known to do.
        """
        *before, entry = entries
        n = len(given.entries) - given.continues
        begun = given.entries[n].thoughts if given.continues else frozenset()
        says_so = entry.thoughts <= {given.thought, *begun} and _rest(given, entry.message) is not None
        return says_so and self._answered(given, before, scope) and not _is_made_of(entry, given)

    def _is_mended(self, given: SampledTurn, entries: Sequence[Entry], place: int, scope: str) -> bool:
        """Whether another's message is a turn's reply with names mended, in the position of that reply or with its drawn ids.

        It has all evidence of a reply that was mended. What the harness makes of the turn itself is judged by what it is known to do.
        """
        entry = entries[place]
        names = [call["function"]["name"] for call in entry.message.get("tool_calls") or ()]
        mended = names and says(entry.message, with_mended_names(given.reply, names)) and not _is_made_of(entry, given)
        if not mended or self._is_another(given, entries, place, scope):
            return False
        by_id = all(map(DRAWN.search, given.names)) and tuple(map(safe, call_ids(entry.message))) == given.names
        return by_id or self._answered(given, entries[:place], scope)

    def _came_with_ids(self, given: SampledTurn, entry: Entry, span: Span, called: Called) -> bool:
        """Whether a client sent a turn's ids with a message that the template writes as the turn's reply, but for blanks at its end.

        Kimi's writes no names of tools. A prompt that goes on with that one has them, too.
        """
        if span.place in called.plan.client_places:
            messages = list(called.messages)
            messages[span.place] = {**with_blanks_of(entry.message, given.reply), "role": "assistant"}
            if called.text(messages) == called.text():
                self._with_ids.add((given.number, entry.loose))
        return (given.number, entry.loose) in self._with_ids

    @staticmethod
    def _answered(given: SampledTurn, before: Sequence[Entry], scope: str) -> bool:
        """Whether a turn was sampled after just these messages."""
        n = len(given.entries) - given.continues
        return n == len(before) and given.scope == scope and given.loose[:n] == tuple(one.loose for one in before)

    def _stood_there(self, span: Span, entries: Sequence[Entry], scope: str, prompt: list[int]) -> bool:
        """Whether the history continues a turn whose prompt has the same tokens there: then the context identifies them.

        With other tools as well, if the whole prompt goes on with that turn's.
        """
        for said in list(self.turns.values())[self._kept :]:
            n = len(said.entries) - said.continues
            if not span.place < n < len(entries) or (said.scope != scope and prompt[: len(said.prompt)] != said.prompt):
                continue
            if not self._is_echo(entries[n], said):
                continue
            same_tokens = any((one.place, one.turn) == (span.place, span.turn) for one in said.spans)
            if same_tokens and said.loose[:n] == tuple(entry.loose for entry in entries[:n]):
                return True
        return False

    def _fitting(self, entries: Sequence[Entry], place: int) -> list[SampledTurn]:
        """The turns with these words."""
        entry = entries[place]
        return [said for said in self._by_words[entry.loose] if said.number >= self._kept and said.is_said_by(entry)]

    def _levels(self, fits: Sequence[SampledTurn], entries: Sequence[Entry], place: int, scope: str) -> list[list[SampledTurn]]:
        """The turns that each kind of evidence indicates, the strongest first: place (then normalised), ids, handle, neighbour."""
        entry = entries[place]
        context = tuple(one.loose for one in entries[:place])
        names = tuple(map(safe, call_ids(entry.message)))
        before = entries[place - 1].exact if place else None
        placed = [said for said in fits if said.scope == scope and not self._renamed(said.entries, entries)]
        return [
            [said for said in placed if self._unchanged(said, entries[:place])],
            [said for said in placed if said.loose == context],
            [said for said in fits if any(map(DRAWN.search, names)) and said.names == names],
            [said for said in fits if entry.handle and said.handle == entry.handle],
            [said for said in fits if before is not None and any(entry.loose[1:]) and said.entries and said.entries[-1].exact == before],
        ]

    def _unchanged(self, said: SampledTurn, now: Sequence[Entry]) -> bool:
        """Whether these messages are those that a turn answered: its client's as written, and replies by the turns that its prompt has.

        Replies must have the same call ids: they show which call a result answers. Words of the client at their ends are its own text. A
        reply without its handle may be written otherwise; one with the handle of another turn is that turn's.
        """
        supplied = {span.place: span.turn for span in said.spans if span.turn >= self._kept}

        def same(place: int, was: Entry, one: Entry) -> bool:
            its_own = place in supplied and one.handle in {"", self.turns[supplied[place]].handle}
            if was is one or (was.exact == one.exact and (was.handle == one.handle or its_own)):
                return True
            same_words = was.loose == one.loose
            return (
                place in supplied and supplied[place] == self.truth(one) and call_ids(was.message) == call_ids(one.message) and same_words
            )

        return len(said.entries) == len(now) and all(map(same, range(len(now)), said.entries, now))

    def _renamed(self, before: Sequence[Entry], now: Sequence[Entry]) -> bool:
        """Whether a reply came back with the handle or call id of another turn: then it is that turn's reply, which has the same words."""
        for was, one in zip(before, now, strict=False):
            if was.handle and one.handle and was.handle != one.handle:
                return True
            names = zip(map(safe, call_ids(was.message)), map(safe, call_ids(one.message)), strict=False)
            if one.is_reply and any(old != new and new in self._issued for old, new in names):
                return True
        return False

    # replies that must be recognised

    def _owed(self, plan: Any, entries: Sequence[Entry], settled: int, supplied: dict[int, int], scope: str) -> None:
        """Count the replies from place `settled` on that can be identified, and those of them whose tokens are not in the prompt."""
        previous: int | None = None
        for place, entry in enumerate(entries):
            if not entry.is_reply:
                continue
            evidence = self._evidence(entries, place, previous, scope)
            previous = self._certain(entries, place, supplied)
            if not evidence or place < settled:
                continue
            self.tally.counts["owed"] += 1
            hidden = self._follows and (self.stack.kind.name in HIDES_CALLS or not any(entry.loose[1:]))
            if place not in supplied and (hidden or plan.reason in NOT_PLACED):
                self.tally.counts["not placed"] += 1
                self.tally.missed[f"{self.stack.kind.name}, {plan.match}: {plan.reason}"] += 1
            elif place not in supplied:
                self.tally.missed[f"{self.stack.kind.name}, {plan.match}: {plan.reason}"] += 1
                self._find("missed", f"message {place} is turn {entry.turn} by {evidence}; {plan.match}: {plan.reason}")

    def _certain(self, entries: Sequence[Entry], place: int, supplied: dict[int, int]) -> int | None:
        """The turn whose reply is at a place; `None` if two turns have these tokens and no handle shows which it is."""
        given = supplied.get(place)
        if given is None:
            return None
        equal = [said for said in self._fitting(entries, place) if said.completion == self.turns[given].completion]
        named = bool(entries[place].handle) and entries[place].handle == self.turns[given].handle
        return given if named or len(equal) == 1 else None

    def _settled(self, plan: Any, entries: Sequence[Entry], scope: str) -> int:
        """How many messages precede the reply that the call continues in its own context: they were counted with that turn.

        Words that the client added to that reply keep the call from continuing it, if the history must be rendered again. So does a reply
        without words, where the template is followed: it shows nothing of it. What was text in the prompt of that turn is text then, too.
        """
        near = [self.turns[self.numbers[plan.basis.id]]] if plan.basis.id is not None else []
        with_words = [entry for entry in entries if entry.is_kept and entry.words] if plan.reason == "added-text-unproven" else []
        wordless = [entry for entry in entries if entry.is_reply and not any(entry.loose[1:])] if self._follows else []
        near += [self.turns[entry.turn] for entry in (*with_words, *wordless) if entry.turn is not None]
        settled = 0
        for said in near:
            n = len(said.entries) - said.continues
            before = [entry.without_stop for entry in said.entries[:n]]
            same_context = said.scope == scope and before == [entry.without_stop for entry in entries[:n]]
            if n < len(entries) and same_context and self._is_echo(entries[n], said):
                settled = max(settled, n)
        return settled

    @staticmethod
    def _is_echo(entry: Entry, said: SampledTurn) -> bool:
        """Whether an entry has the words of a turn, or is what the harness made of its reply.

        Whoever wrote it, it also has them with the stop string at which the turn ended.
        """
        if said.is_said_by(entry) or (entry.is_kept and entry.turn == said.number):
            return True
        ended_there = bool(said.stop) and text_of(entry.message).endswith(said.stop)
        return ended_there and said.is_said_by(_without_end(entry, said.stop))

    def _evidence(  # noqa: C901, PLR0911 - one for each kind
        self, entries: Sequence[Entry], place: int, previous: int | None, scope: str
    ) -> str:
        """The evidence that identifies a reply with certainty; `""` if there is none, or if the reply need not be recognised."""
        entry = entries[place]
        truth = self.truth(entry)
        if truth is None or truth < self._kept or not entry.owed or self.turns[truth].was_cut:
            return ""  # a reply whose client left is recognised in its place, if its template shows where each call ends
        if entry.handle and [other.handle for other in entries].count(entry.handle) > 1:
            return ""  # a handle on two replies identifies neither
        own, fits = self.turns[truth], self._fitting(entries, place)
        names = tuple(map(safe, call_ids(entry.message)))
        if names and names == own.names:
            fits = [said for said in fits if said.names == names]
        elif any(name in self._issued for name in names) or any(map(_same_make, own.names, names)):
            return ""  # an id that was, or may have been, issued to another turn
        unchanged, in_place, by_id, by_handle, beside = self._levels(fits, entries, place, scope)
        here = [said for said in self.turns.values() if said.loose == tuple(one.loose for one in entries[:place])]
        if (
            own in unchanged
            and self._alone(own, in_place)
            and self._calls_as_written(own, entries)
            and self._words_as_written(own, entries)
            and not self._may_be_cut(entry, here, own)
            and not self._may_be_text_of_cut(entry, here, own)
            and not self._may_be_understood(entry, here, own)
        ):
            return "place"
        if self._claimed_elsewhere(own, entries, place, scope):
            return ""
        if own in by_id and self._alone(own, by_id):
            return "id"
        if own in by_handle and self._alone(own, by_handle):
            return "handle"
        after_same = [said for said in self.turns.values() if said.entries[-1].exact == entries[place - 1].exact]
        since = _since(entries[:place])
        there = [said for said in self.turns.values() if self._led_there(said, place, previous, len(since))]
        if (
            self._may_be_cut(entry, [*self.turns.values()], own)
            or self._may_be_text_of_cut(entry, [*after_same, *there], own)
            or self._may_be_understood(entry, after_same, own)
            or self._may_have_words(entry, after_same, own)
            or self._may_be_a_part(entry, [*after_same, *there], own)
            or (own not in there and self._may_be_understood(entry, there, own))  # an edit may have made one message of the other
            or (own not in there and self._may_have_words(entry, there, own))
            or self._may_be_changed(own, entries, place, scope)
        ):
            return ""
        if any(said.number >= self._kept and meaning(said.reply) == entry.loose and not said.is_said_by(entry) for said in here):
            return ""  # a reply in its position with other reasoning: the harness may have changed that one
        if own in beside and self._alone(own, beside):
            return "neighbour"
        # The reply before a turn is unknown where it was not recognised: it may have been this one.
        led = [said for said in beside if previous is not None and said.last in {previous, None} and _since(said.entries) == since]
        return "previous reply and all since" if own in led and own.last is not None and self._alone(own, led) else ""

    @staticmethod
    def _led_there(said: SampledTurn, place: int, previous: int | None, since: int) -> bool:
        """Whether a turn was sampled after the previous reply and as many messages.

        If there is no such reply, or it is unknown, the messages are counted from the beginning.
        """
        return len(said.entries) == place if previous is None else said.last == previous and len(_since(said.entries)) == since

    def _may_be_cut(self, entry: Entry, turns: Sequence[SampledTurn], own: SampledTurn) -> bool:
        """Whether a message may be the beginning of another reply, which its client left: it begins with the same call.

        Arguments that are no object may be the beginning of any.
        """
        others = [said for said in turns if said.was_cut and said.number >= self._kept and said.completion != own.completion]
        calls = entry.message.get("tool_calls")
        begun = [said.reply["tool_calls"][0] if said.ends else said.begun for said in others if said.ends or said.begun]
        return bool(calls) and any(_may_be(calls[0], call) for call in begun)

    def _may_be_text_of_cut(self, entry: Entry, turns: Sequence[SampledTurn], own: SampledTurn) -> bool:
        """Whether a message without calls may be what its client received of another reply."""
        others = [said for said in turns if said.was_cut and said.number >= self._kept and said.completion != own.completion]
        return not call_ids(entry.message) and any(self._text_began_with(said, entry) for said in others)

    def _text_began_with(self, said: SampledTurn, entry: Entry) -> bool:
        """Whether a reply that was cut began with the words of a message, or with its thinking if it has no others."""
        text = self.stack.renderer.words.decode(said.completion)
        words = meaning(entry.message)[1] or next(iter(entry.thoughts), "")
        return bool(words) and words in text

    def _may_be_understood(self, entry: Entry, turns: Sequence[SampledTurn], own: SampledTurn) -> bool:
        """Whether some harness would make this message of the reply of another turn; it need not be the harness of this session."""
        others = [said for said in turns if said.number >= self._kept and said.completion != own.completion]
        return any(entry.loose == meaning(form) for said in others for form in understood_forms(said.reply))

    def _may_have_words(self, entry: Entry, turns: Sequence[SampledTurn], own: SampledTurn) -> bool:
        """Whether some harness would make this message of the reply of another turn with words of its own at the end."""
        others = [said for said in turns if said.number >= self._kept and said.completion != own.completion]
        begun = [shown(said.reply) for said in others if not call_ids(said.reply) and text_of(said.reply).strip()]
        now = shown(entry.message)
        return not call_ids(entry.message) and any(now.startswith(text) and now[len(text) :].strip() for text in begun)

    def _may_be_a_part(self, entry: Entry, turns: Sequence[SampledTurn], own: SampledTurn) -> bool:
        """Whether a message with other words than the reply has only calls of another turn: a harness may have dropped the rest."""
        calls = _issued_calls(entry.message)
        others = [said for said in turns if said.number >= self._kept and said.completion != own.completion]
        return entry.loose != own.words and bool(calls) and any(calls <= _issued_calls(said.reply) for said in others)

    def _claimed_elsewhere(self, own: SampledTurn, entries: Sequence[Entry], place: int, scope: str) -> bool:
        """Whether another message of the history may equally be this turn's reply, which can be in one place only."""
        understood = set(map(meaning, understood_forms(own.reply)))
        others = [i for i, entry in enumerate(entries) if i != place and entry.is_reply]
        others = [i for i in others if self._is_echo(entries[i], own) or entries[i].loose in understood]
        names = tuple(map(bare, call_ids(own.reply))) if any(map(DRAWN.search, own.names)) else None
        if any(entries[i].turn == own.number or tuple(map(bare, call_ids(entries[i].message))) == names for i in others):
            return True  # the same message twice, with the same ids
        return any(own in level for i in others for level in self._levels([own], entries, i, scope))

    @staticmethod
    def _may_be_changed(own: SampledTurn, entries: Sequence[Entry], place: int, scope: str) -> bool:
        """Whether another message is in the position of a turn's reply, so that it may be that reply, changed."""
        n = len(own.entries) - own.continues
        in_position = n < len(entries) and n != place and entries[n].is_reply
        return in_position and own.scope == scope and own.loose[:n] == tuple(entry.loose for entry in entries[:n])

    def _calls_as_written(self, own: SampledTurn, entries: Sequence[Entry]) -> bool:
        """Whether calls before a turn that count as text only are written as they were.

        A template may show other arguments of calls that are text in its prompt. Where a text beside calls was dropped, only verbatim calls
        show whose they are (rule `text-dropped`).
        """
        supplied = {span.place: self.turns[span.turn] for span in own.spans}

        def as_text(n: int, one: Entry) -> bool:
            return n not in supplied or (bool(text_of(supplied[n].reply).strip()) and not text_of(one.message).strip())

        both = zip(own.entries, entries, strict=False)
        return all(
            not as_text(n, one) or was.message.get("tool_calls") == one.message.get("tool_calls") for n, (was, one) in enumerate(both)
        )

    @staticmethod
    def _words_as_written(own: SampledTurn, entries: Sequence[Entry]) -> bool:
        """Whether the history is written as it was, if it has words of the client behind a reply that a turn's prompt has.

        The record shows those words without the blanks around them. So they are compared only as a part of the whole history, as it was
        written and with its handles.
        """
        supplied = {span.place for span in own.spans}
        with_words = any(n in supplied and was.words.strip() != was.stop.strip() for n, was in enumerate(own.entries))
        as_written = [(was.message, was.handle) for was in own.entries] == [
            (one.message, one.handle) for one in entries[: len(own.entries)]
        ]
        return as_written or not with_words

    @staticmethod
    def _alone(own: SampledTurn, fits: Sequence[SampledTurn]) -> bool:
        return all(said.completion == own.completion for said in fits)

    # the template's rendering

    def _faithful(self, called: Called, spans: Sequence[Span], entries: Sequence[Entry]) -> str:
        """Compare the prompt outside of the spans with the template's rendering; return the prompt's text."""
        spans, first = self._joined(spans), {span.place: self.turns[span.turn] for span in reversed(spans)}
        openings = [first[span.place].opening for span in spans]
        parts = [span.offset > 0 or self._written_otherwise(called, span) for span in spans]
        added = [self._words_after(span, entries[span.place]) for span in spans]
        decode = self.stack.renderer.words.decode
        if called.continues and called.plan.parent is not None:
            return decode(called.prompt)  # the prompt of the reply that it continues, which was judged when it was sent
        try:
            wanted = self.template.pieces(called, spans, openings, parts, added)
        except (LookupError, RefusedError) as why:
            kind = "no rendering" if isinstance(why, RefusedError) else "unfaithful"
            self._find(kind, f"no rendering of the request shows the replies: {why}")
            return decode(called.prompt)
        at, shown = 0, self._shown_before(called, spans, first)
        for n, wants in enumerate(wanted):
            if n < shown:
                at = spans[n].end
                continue
            until = spans[n].start if n < len(spans) else len(called.prompt)
            have = decode(called.prompt[at:until]) if until > at else ""
            if n and added[n - 1]:
                have, want = self._after_words(called, spans[n - 1], added[n - 1], have, wants)
            else:
                stop = decode(called.prompt[at - 1 : at]) if n and called.prompt[at - 1] in self.template.stop_ids else ""
                if not wants.startswith(stop):
                    self._find("unfaithful", f"span {n - 1} is followed by {stop!r}, rendered is {wants[:30]!r} ({called.plan.match})")
                    break
                want = wants.removeprefix(stop)
            if n < len(spans) and parts[n] and (blanks := self._blanks_of(called, spans[n])) and have + blanks == want:
                want = have  # the blanks that the template writes before the reply's text are the reply's own
            if have != want:
                same = next((i for i, (a, b) in enumerate(zip(have, want, strict=False)) if a != b), min(len(have), len(want)))
                texts = f"{have[max(0, same - 20) : same + 40]!r} is not {want[max(0, same - 20) : same + 40]!r}"
                where = f"after message {spans[n - 1].place}" if n else "at the beginning"
                where += ", where the parent's prompt has it" if called.plan.parent is not None and n < len(spans) else ""
                self._find("unfaithful", f"{called.plan.match}, {where}: {texts}")
                break
            at = spans[n].end if n < len(spans) else at
        return decode(called.prompt)

    @staticmethod
    def _shown_before(called: Called, spans: Sequence[Span], first: Mapping[int, SampledTurn]) -> int:
        """How many spans end with a reply that continues a text without known tokens: its whole prompt was judged when it was sent."""
        begun = [
            n for n, span in enumerate(spans) if first[span.place].continues and called.prompt[: span.start] == first[span.place].prompt
        ]
        return begun[-1] + 1 if begun else 0

    def _after_words(self, called: Called, span: Span, words: str, have: str, want: str) -> tuple[str, str]:
        """What follows the served text of a reply to whose end the harness added words: in the prompt, and in the rendering.

        If all of these words were sampled (a stop string), the last of their tokens may have more text.
        """
        unserved, words = self._unserved(called, span), words.rstrip()
        if unserved.startswith(words) and want.startswith(words):
            return have.lstrip(), want.removeprefix(words).lstrip()
        return unserved + have, want

    def _blanks_of(self, called: Called, span: Span) -> str:
        """The blanks with which a turn's tokens in the prompt begin."""
        text = self.stack.renderer.words.decode(called.prompt[span.start : span.end])
        return text[: len(text) - len(text.lstrip())]

    def _joined(self, spans: Sequence[Span]) -> list[Span]:
        """The spans with those of one message as one; between them must be nothing."""
        out: list[Span] = []
        for span in spans:
            if out and out[-1].place == span.place:
                if out[-1].end != span.start:
                    self._find("unfaithful", f"the parts of message {span.place} end at {out[-1].end} and go on at {span.start}")
                out[-1] = out[-1]._replace(turn=span.turn, end=span.end)
            else:
                out.append(span)
        return out

    def _unserved(self, called: Called, span: Span) -> str:
        """The text of a turn's tokens in the prompt behind what the client received: its stop string, or a part of that."""
        completion = self.turns[span.turn].completion
        own = (*completion[: span.offset], *called.prompt[max(span.start, span.end - len(completion)) : span.end])
        if own and own[-1] in self.template.stop_ids:
            own = own[:-1]
        return self.stack.renderer.words.decode(own)[self.turns[span.turn].served :]

    def _written_otherwise(self, called: Called, span: Span) -> bool:
        """Whether a reply without thinking follows another opening than its generation prompt, as the template writes it in a history."""
        opening = self.turns[span.turn].opening.text
        before = self.stack.renderer.words.decode(called.prompt[: span.start])
        return self._follows and bool(opening) and not before.endswith(opening)

    # the record

    async def close(self, names: Sequence[str]) -> None:
        """Compare the record of the session, under all its names, with the engine's ground-truth log."""
        recorded = 0
        for name in names:
            turns = await self.stack.store.turns(name)
            recorded += len(turns)
            tokens = await self.stack.store.tokens(name, [turn.id for turn in turns]) if turns else {}
            sampled = [one for one in self.stack.engine.ground_truth if one.session == name]
            for turn in turns:
                self._labels(turn)
            proven = {id(self._generations[turn.id]) for turn in turns if turn.forced and turn.id in self._generations}
            ground_truth = [(one.prompt, one.completion, _recorded_logprobs(one) if id(one) in proven else one.logprobs) for one in sampled]
            for found in invariants.engine_agrees(turns, tokens, ground_truth):
                self._find("lost" if "recorded by no turn" in found else "broken", found)
            for found in invariants.audit(turns, tokens):
                self._find("trained twice" if " sequences" in found or "mask" in found else "broken", found)
        if recorded != len(self.turns):
            kind = "lost" if recorded < len(self.turns) else "trained twice"
            self._find(kind, f"{len(self.turns)} turns were sampled, {recorded} recorded")

    def _labels(self, turn: Turn) -> None:
        """Compare what a stored turn says of its reply with what the engine did."""
        sampled = self._generations.get(turn.id)
        if sampled is None:
            return
        ends = {sampled.label, "length"} if self.stack.engine.base and sampled.cut else {"length" if sampled.cut else sampled.label}
        if turn.finish_reason not in ends:
            self._find("mislabelled", f"turn {turn.id} ended by {turn.finish_reason}, not by {' or '.join(ends)}")
        self.tally.counts["budgets"] += bool(sampled.forced)
        self.tally.counts["cut"] += sampled.cut
        if "budget-unproven" in turn.marks:
            self.tally.counts["budgets unproven"] += 1
        elif tuple(turn.forced) != sampled.forced:
            self._find("mislabelled", f"turn {turn.id}: {turn.forced} are called forced, and the engine forced {sampled.forced}")


def _is_made_of(entry: Entry, said: SampledTurn) -> bool:
    return said.number in {entry.turn, *entry.parts}


def _without_end(entry: Entry, words: str) -> Entry:
    """The entry without these words at the end of its text."""
    return replace(entry, message={**entry.message, "content": text_of(entry.message).removesuffix(words)})


def _issued_calls(message: Message) -> set[tuple[str, ...]]:
    """The id, name and arguments of each call."""
    calls = message.get("tool_calls") or ()
    return {(safe(call["id"]), call["function"]["name"], arguments_of(call["function"]["arguments"])) for call in calls}


def _rest(said: SampledTurn, message: Message) -> str | None:
    """What a message without calls says after the text of a turn, and after what that turn continued; `None` if it begins otherwise."""
    begun = text_of(said.entries[-1].message) if said.continues else ""
    text, now = begun + text_of(said.reply), text_of(message)
    calls = call_ids(said.reply) or call_ids(message)
    return None if calls or not text_of(said.reply) or not now.startswith(text) else now.removeprefix(text)


def _recorded_logprobs(sampled: Generation) -> list[float]:
    """The log probabilities of a generation as they must be recorded: 0 for ids that were forced."""
    forced = {place for start, end in sampled.forced for place in range(start, end)}
    return [0.0 if place in forced else value for place, value in enumerate(sampled.logprobs)]


def _may_be(call: Message, cut: Message) -> bool:
    """Whether a call may be one that its client received in a stream that was cut, judged by its id and arguments."""
    now, then = (arguments_of(one["function"]["arguments"]) for one in (call, cut))
    arrived = cut["function"]["arguments"].strip() and then.startswith("{")
    return safe(call["id"]) == safe(cut["id"]) and (now == then or not arrived)


def _same_make(ours: str, theirs: str) -> bool:
    """Whether an id has the same form as another one, with other random characters."""
    drawn = [DRAWN.search(name) for name in (ours, theirs)]
    if ours == theirs or None in drawn:
        return False
    (head, length), (other, same) = [(name[: one.start()], len(one[0])) for name, one in zip((ours, theirs), drawn, strict=True) if one]
    return head == other and length == same

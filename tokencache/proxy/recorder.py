"""Makes the turns to store from the reply to a call.

The recorded prompt is the prompt that the engine reports. If that differs from the prompt that was sent, the turn is marked
(`engine-disagrees`). It does not continue another turn, and no turn continues it.
"""

import secrets
import time
from itertools import takewhile
from typing import Any

import msgspec

from tokencache.core import evidence, ids
from tokencache.core.added_text import with_stop_string
from tokencache.core.chain import aborted_turn_keys, position_key, request_key, turn_keys
from tokencache.core.context import Context, pack_context
from tokencache.core.continued import rest_of, whole_reply
from tokencache.core.forced import Span, ThinkingMarks, forced_spans
from tokencache.core.ids import Fragment
from tokencache.core.incidents import Incident, IncidentKind
from tokencache.core.media import PlacedMedia, Places, PlacesDifferError, place_media
from tokencache.core.messages import digest
from tokencache.core.reasons import Reason
from tokencache.core.turn import Prefix, ReplyPiece, Tokens, Turn, TurnMark, hash_ids, hash_logprobs
from tokencache.core.verdict import CUT_OFF, Cut, pack_cuts
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.chat.vocabulary import with_references
from tokencache.engine.ending import finish_reason
from tokencache.engine.figures import Finding, judge, wrong_prompt
from tokencache.engine.model import Model
from tokencache.engine.prompt_echo import as_fragment, read_ids
from tokencache.engine.reply import Choice, Reply
from tokencache.proxy.continuation import Continuation
from tokencache.proxy.plan import Plan
from tokencache.proxy.policy_version import NOTHING_KNOWN, UNREAD, PieceVersions, VersionReading, joined
from tokencache.proxy.prefix_cache import CachedPrefix, PrefixCache
from tokencache.store.base import Entry

MIN_SHARED = 16
"""Tokens. A common beginning is stored as a reference only if it is longer than this."""

ABORTED, BROKE, DROPPED = TurnMark.ABORTED, TurnMark.UPSTREAM_BROKE, TurnMark.ENGINE_ABORTED
_INCIDENT_OF: dict[str, IncidentKind] = {
    ABORTED: IncidentKind.CLIENT_GONE,
    BROKE: IncidentKind.UPSTREAM_BROKE,
    DROPPED: IncidentKind.ENGINE_ABORTED,
    TurnMark.INTERNAL_ERROR: IncidentKind.INTERNAL_ERROR,
}


class Recorded(msgspec.Struct, frozen=True):
    """The result of a call: entries to store, the prefix of each entry, and incidents."""

    entries: list[Entry]
    prefixes: list[CachedPrefix]
    incidents: list[Incident]


class Outcome(msgspec.Struct, kw_only=True):
    """A call that has ended.

    Attributes:
        session: the session's name.
        epoch: the session's epoch when the call began.
        call_id: the call's id.
        call: the request.
        plan: how it was sent.
        reply: the engine's reply.
        model: the model; `None` if the engine could not be probed.
        started: when the call began, Unix time in seconds.
        broke: why the reply is incomplete: `aborted` (the client left), `upstream-broke`, `engine-aborted` (the client received
            nothing of it), `internal-error`, or `""`.
        detail: the same in words.
        experts: choice → the file of its routed experts, and its first token (`Turn.experts_start`).
        places: the placeholders of media that the engine reports; `None` if it reports none.
        media_kept: whether the bytes of its media are stored, as far as they are known.
        noted: incidents that were found before the turns are made.
        asked: the request fingerprint; `b""` if retries are not deduplicated.
        second: the id of an answered call with the same fingerprint, if this is a second sample of it; otherwise `""`.
        unanswered: whether the client had left before the reply was complete.
        weights: the readings of the engine's policy version for the last request.
        continuation: continues a reply that an engine broke off; `None` if none did.
        ended: the versions of the pieces that have ended, each with its number of tokens.
        again: why a reply that an engine broke off is not continued.
        budget: the thinking budget of the request, in tokens; `None` if it has none. `thinking`: the ids around a thought; `None` if they
            are not known.
        late_grammar: see `EngineRequest.late_grammar`.
        uncertain: whether ids of the reply are in doubt (`engine.figures`); set by `record`.
    """

    session: str
    epoch: str
    call_id: str
    call: ChatCall
    plan: Plan
    reply: Reply
    model: Model | None
    started: float
    broke: str = ""
    detail: str = ""
    experts: dict[int, tuple[str, int]] = {}
    places: Places | None = None
    media_kept: bool = True
    noted: list[Incident] = []
    asked: bytes = b""
    second: str = ""
    unanswered: bool = False
    weights: VersionReading = UNREAD
    continuation: Continuation | None = None
    ended: list[tuple[PieceVersions, int]] = []
    again: str = ""
    budget: int | None = None
    thinking: ThinkingMarks | None = None
    late_grammar: bool = False
    uncertain: bool = False

    async def end_piece(self, how: str) -> None:
        """Note how a piece of a reply has ended (`core.turn.ReplyPiece.ended`)."""
        assert self.continuation is not None  # noqa: S101 - the caller made it
        await self.weights.end()
        piece = self.continuation.end_piece(how)
        self.ended.append((self.weights.versions(self.reply.versions(0), piece.end - piece.start), piece.end - piece.start))

    def _versions(self, index: int, tokens: int) -> PieceVersions:
        """The versions of a choice's tokens, over all pieces. Those of a piece that is not recorded as a whole are not known."""
        left = tokens
        pieces: list[tuple[PieceVersions, int]] = []
        for piece, length in self.ended:
            if length > left:
                return joined([*pieces, (NOTHING_KNOWN, left)])
            pieces.append((piece, length))
            left -= length
        last = self.weights.versions(self.reply.versions(index), left)
        return joined([*pieces, (last, left)]) if pieces else last

    def _pieces(self, choice: Choice) -> tuple[ReplyPiece, ...]:
        """The pieces of a reply that was continued; none for any other."""
        if not self._continued(choice):
            return ()
        assert self.continuation is not None  # noqa: S101 - `_continued` looked
        pieces = self.continuation.pieces
        if pieces[-1].end < len(choice.ids):
            self.continuation.end_piece(choice.finish_reason or self.broke)
        recorded = [piece for piece in pieces if piece.start < len(choice.ids)]
        return tuple(msgspec.structs.replace(piece, end=min(piece.end, len(choice.ids))) for piece in recorded)

    def _continued(self, choice: Choice) -> bool:
        """Whether another request continued the reply."""
        return self.continuation is not None and len(choice.ids) > self.continuation.pieces[0].end

    @property
    def whole(self) -> bool:
        """Whether the reply is complete, and all its ids are certain."""
        return not (self.broke or self.reply.error or self.reply.unreadable or self.uncertain)

    def record(self, prefixes: PrefixCache) -> Recorded:
        """Make the turns of the call, and its incidents, from its reply."""
        found = judge(self.reply, whole=self.whole)
        wrong = wrong_prompt(self.reply)
        self.uncertain = bool(wrong) or any(finding.hole is not None for finding in found.values())
        incidents = [*self.noted, *self._incidents()]
        if wrong:
            return Recorded([], [], [*incidents, self.incident(IncidentKind.INCONSISTENT_REPLY, wrong)])
        prompt = self._prompt()
        if prompt is None and (self.reply.refusal or (self.broke == DROPPED and not self.reply.choices)):
            return Recorded([], [], incidents)
        if prompt is None:
            return Recorded([], [], [*incidents, self._no_prompt()])
        if prompt.marks:
            incidents.append(self.incident(IncidentKind.ENGINE_DISAGREES, f"{prompt.difference}; recorded with the ids that it used"))
        entries, cached = [], []
        for index, choice in sorted(self.reply.choices.items()):
            if self.model is not None and self.whole:
                self.model.observe(choice)
            incidents += self._incidents_of(index, choice, found[index])
            choice.keep(found[index].tokens, logprobs=not found[index].no_logprobs)
            if self.broke == DROPPED and not choice.ids:
                continue
            entry, prefix = self._entry(self._own_prompt(choice) or prompt, index, choice, prefixes)
            entries.append(entry)
            cached.append(prefix)
        return Recorded(entries, cached, incidents)

    def expert_rows(self, choice: Choice) -> tuple[int, int]:
        """Return the number of tokens of a choice and its prompt, and the first token whose routed experts were requested."""
        prompt = self._own_prompt(choice) or self._prompt()
        return (ids.count(prompt.ids) + len(choice.ids), prompt.plan.basis.routed) if prompt is not None else (0, 0)

    def incident(self, kind: IncidentKind, detail: str = "", *, hole: bool | None = None) -> Incident:
        """Make an incident of this call."""
        return kind.incident(detail, call=self.call_id, hole=hole, at=time.time())

    def _incidents(self) -> list[Incident]:
        found = []
        if self.broke:
            kind = _INCIDENT_OF[self.broke]
            found.append(self.incident(kind, self.detail))
        if self.reply.error:
            kind = IncidentKind.ENGINE_REFUSED if self.reply.refusal else IncidentKind.ENGINE_ERROR
            found.append(self.incident(kind, self.reply.error[:300].decode(errors="replace")))
        if self.reply.unreadable:
            found.append(self.incident(IncidentKind.UNREADABLE_REPLY, f"{self.reply.unreadable} chunks"))
        if self.whole and len(self.reply.choices) < self.reply.expected:
            found.append(self.incident(IncidentKind.MISSING_CHOICES, f"{len(self.reply.choices)} of {self.reply.expected}"))
        return found

    def _incidents_of(self, index: int, choice: Choice, finding: Finding) -> list[Incident]:
        found = []
        if finding.hole is not None and finding.hole is not IncidentKind.UNREADABLE_REPLY:  # that one is the whole reply's
            found.append(self.incident(finding.hole, f"choice {index}: {finding.detail}"))
        if finding.no_logprobs:
            found.append(self.incident(IncidentKind.NO_LOGPROBS, finding.no_logprobs))
        if self.whole and choice.finish_reason == "abort":
            found.append(
                self.incident(
                    IncidentKind.ENGINE_ABORTED, f"the engine aborted choice {index} after {len(choice.ids)} tokens; the client received it"
                )
            )
        if self.whole and not choice.finish_reason:
            found.append(self.incident(IncidentKind.UNFINISHED_REPLY, f"choice {index} has no finish reason"))
        return found

    def _no_prompt(self) -> Incident:
        if self.broke and not self.reply.choices:
            return self.incident(IncidentKind.NOTHING_RECEIVED, "the call ended before the engine sent anything")
        return self.incident(IncidentKind.NO_TOKEN_IDS, "the engine did not report which ids it used")

    def _own_prompt(self, choice: Choice) -> "_Prompt | None":
        """Return the prompt of a choice, if the engine reports another one for it than for the call (text completions)."""
        return self._prompt(choice.prompt) if choice.prompt and choice.prompt != self.reply.prompt.raw else None

    def _prompt(self, echo: bytes = b"") -> "_Prompt | None":
        """Return the prompt that the engine reports; `None` if it reports none."""
        plan, whole = self.plan, self.reply.prompt  # for all choices; `echo` is for a single choice
        if not echo and whole.agreed and (exact := plan.exact) is not None:
            return self._with_media(_Prompt(exact.ids, exact.fragment, plan))
        echoed = read_ids(echo) if echo else whole.packed
        if echoed is None:
            return None
        fragment = as_fragment(echo, echoed) if echo else whole.fragment
        if plan.prompt is None or echoed == plan.prompt or (not plan.whole and echoed.startswith(plan.prompt)):
            return self._with_media(_Prompt(echoed, fragment, plan))
        disagreed = plan.rendered(Reason.ENGINE_DISAGREES)
        return _Prompt(echoed, fragment, disagreed, (TurnMark.ENGINE_DISAGREES,), _difference(plan, echoed))

    def _with_media(self, prompt: "_Prompt") -> "_Prompt":
        """Add the images of the messages to a prompt. The engine must report that they are where the recorded ones were."""
        plan, parts = prompt.plan, self.call.media_parts()
        if not parts or (self.places is None and plan.exact is None):  # without the plugin nothing is reported
            return prompt
        try:
            media = place_media(parts, self.places or {}, ids.count(prompt.ids))
        except PlacesDifferError as why:
            difference = str(why)
        else:
            if len(media) >= len(plan.basis.media) and all(one.is_same(other) for one, other in zip(plan.basis.media, media, strict=False)):
                return msgspec.structs.replace(prompt, media=media)
            difference = "the engine reports other places of the recorded images"
        disagreed = plan.rendered(Reason.ENGINE_DISAGREES)
        return _Prompt(prompt.ids, prompt.fragment, disagreed, (TurnMark.ENGINE_DISAGREES,), difference)

    def _entry(self, prompt: "_Prompt", index: int, choice: Choice, prefixes: PrefixCache) -> tuple[Entry, CachedPrefix]:
        call, plan, answered = self.call, prompt.plan, self.call.answers
        completion = ids.pack(choice.ids)
        forced = self._forced(prompt, completion)
        if forced and len(choice.logprobs) == len(choice.ids):
            for start, end in forced:
                choice.logprobs[start:end] = [0.0] * (end - start)
        logprobs = ids.pack_logprobs(choice.logprobs) if len(choice.logprobs) == len(choice.ids) else b""
        packed = prompt.ids + completion
        base, shared = self._base(prompt, prefixes)
        context_base, context_shared = self._context_base(plan, prefixes)
        served = received = choice.message(with_reasoning=call.shows_reasoning)
        if call.continues:
            begun = plan.begun or call.messages[-1]
            served = whole_reply(begun, received)
        versions, pieces = self._versions(index, len(choice.ids)), self._pieces(choice)
        said = choice.finish_reason or ("abort" if self.broke else None)
        ended = finish_reason(choice, call.fields, ids.count(prompt.ids), self.model) if self.whole else said
        experts, experts_start = ("", plan.basis.routed) if self.uncertain else self.experts.get(index, ("", plan.basis.routed))
        turn = Turn(
            id=secrets.token_hex(8),
            call=self.call_id,
            match=plan.match,
            reason=plan.reason,
            parent=plan.parent,
            origin=plan.origin,
            applied_rules=plan.applied_rules,
            anchors=plan.anchors,
            base=base,
            shared=shared,
            prompt_tokens=ids.count(prompt.ids),
            completion_tokens=len(choice.ids),
            prefix_hash=hash_ids(packed),
            completion_hash=hash_ids(completion),
            logprobs_hash=hash_logprobs(logprobs),
            served=served,
            begun=len(begun.content or "") if call.continues else 0,
            position_key=answered.chain[-1] if answered is not None else b"",
            **self._evidence(plan),
            handle=call.reply_handle,
            cuts=pack_cuts(_cuts(choice, with_reasoning=call.shows_reasoning)) if self._cut_short(choice) else b"",
            finish_reason=ended,
            engine_reason="" if ended == said else said or "",
            stop_reason=choice.stop_reason,
            stopped=bool(choice.ids) and self.model is not None and choice.ids[-1] in self.model.stop_ids,
            model=self.reply.model or call.model,
            dialect=call.dialect,
            stream=call.stream,
            choice=index,
            messages=call.answered_messages,
            tools=call.tool_count,
            forced=forced or (),
            sampling=call.sampling,
            replaced=dict(call.replaced),
            logprob_kind=self.model.capability.logprobs if self.model is not None and logprobs else "",
            experts=experts,
            experts_start=experts_start,
            harness=call.harness,
            context_base=context_base,
            context_shared=context_shared,
            marks=self._marks(prompt, choice, versions, forced),
            created=self.started,
            seconds=round(time.time() - self.started, 6),
            versions=[msgspec.structs.asdict(span) for span in versions.spans],
            version_source=versions.source,
            prompt_version=versions.prompt,
            kv=versions.kv,
            pieces=pieces,
            media=prompt.media,
            again=self.again if choice.finish_reason == "abort" or self.broke in {BROKE, DROPPED} else "",
        )
        keys: tuple[bytes, ...] = ()
        may_return = not call.continues or bool(rest_of(received) or received.calls)  # without them it would be the beginning alone
        if answered is not None and not call.plain and may_return and (not call.media or prompt.media):
            if self.whole and choice.finish_reason:
                restored = with_stop_string(served, choice.stop_reason)
                keys = turn_keys(answered, served, digest(served), handle=call.reply_handle, leniency=call.leniency, restored=restored)
                if call.has_stop_strings and not served.calls:  # its harness may add words to it
                    keys = (*keys, position_key(answered.chain[-1]))
            elif self._cut_short(choice):
                keys = aborted_turn_keys(answered)
        if self.asked:
            keys = (*keys, request_key(self.asked))
        prefix = CachedPrefix(
            Prefix(packed, len(choice.ids)), prompt.fragment.extended(completion), answered.chain if answered is not None else ()
        )
        tokens = Tokens(ids.tail(prompt.ids, shared), completion, logprobs)
        return Entry(turn, tokens, keys, self._context(plan, turn.context_shared)), prefix

    def _evidence(self, plan: Plan) -> dict[str, Any]:
        """Hash the history, for comparison with later ones (`core.evidence`)."""
        conversation = self.call.answers
        if conversation is None or self.call.plain:
            return {}
        until = len(conversation.messages)
        replies = {*plan.client_places, *(anchor.place for anchor in plan.anchors)}
        start = plan.basis.messages + 1 if plan.parent is not None and not plan.anchors else 0
        return {
            "judged": evidence.judged_hash(conversation, until, self.call.leniency, self.call.handles),
            "foreign": evidence.foreign_hash(conversation, start, until, replies, plan.basis.foreign),
            "before": evidence.preceding_hash(conversation, until),
        }

    def _context(self, plan: Plan, shared: int) -> bytes:
        """Pack the messages that are not stored with another turn, with references in place of images and other media."""
        call = self.call
        own = range(shared, call.answered_messages)
        raw = ((with_references if index in call.media else bytes)(call.raw_messages[index]) for index in own)
        messages = [msgspec.Raw(message) for message in raw]
        if shared:
            return pack_context(Context(messages), plan.basis.served)
        args, _ = call.as_written()
        return pack_context(Context(messages, args.tools, args.members, args.kwargs))

    def _context_base(self, plan: Plan, prefixes: PrefixCache) -> tuple[str | None, int]:
        """Find a turn with a request that began with the same messages, which are stored already; return its id and their number."""
        if plan.basis.messages:
            return plan.parent, plan.basis.messages
        best: tuple[str | None, int] = (None, 0)
        answered = self.call.answers
        chain = answered.chain if answered is not None else ()
        for turn, prefix in prefixes.nearby(self.epoch, plan.basis.id):
            shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(prefix.chain, chain, strict=False)))
            if shared - 1 > best[1]:  # the first link is for the prompt context
                best = (turn, shared - 1)
        return best

    def _cut_short(self, choice: Choice) -> bool:
        """Whether the client may send back the part that it received: it left during a text, or the stream ended after a call had begun."""
        if self.reply.error or self.uncertain or self.call.continues:
            return False
        if choice.calls:
            return self.broke in CUT_OFF and len(choice.call_steps) == len(choice.calls)
        return self.broke == ABORTED and bool(choice.steps)

    def _forced(self, prompt: "_Prompt", completion: bytes) -> tuple[Span, ...] | None:
        """Return the ranges of a completion that a thinking budget forced; `None` if that is not certain."""
        if self.budget is None:
            return ()
        return forced_spans(prompt.ids, completion, self.budget, self.thinking) if self.thinking is not None else None

    def _marks(self, prompt: "_Prompt", choice: Choice, versions: PieceVersions, forced: tuple[Span, ...] | None) -> tuple[str, ...]:
        marks = {
            self.broke: bool(self.broke),
            DROPPED: choice.finish_reason == "abort",
            TurnMark.NO_LOGPROBS: len(choice.logprobs) != len(choice.ids),
            TurnMark.UNCERTAIN: self.uncertain,
            TurnMark.ENGINE_ERROR: bool(self.reply.error),
            TurnMark.FORCED: bool(forced),
            TurnMark.BUDGET_UNPROVEN: forced is None,
            TurnMark.LATE_GRAMMAR: self.late_grammar,
            TurnMark.MEDIA: bool(self.call.media),
            TurnMark.MEDIA_NOT_KEPT: not self.media_kept,
            TurnMark.SAMPLED_PLACEHOLDER: self._sampled_placeholder(choice),
            TurnMark.SECOND_SAMPLE: bool(self.second),
            TurnMark.UNANSWERED: self.unanswered and self.whole,
            TurnMark.CONTINUED: self._continued(choice),
        }
        return (*prompt.marks, *(name for name, there in marks.items() if there), *versions.marks())

    def _sampled_placeholder(self, choice: Choice) -> bool:
        return self.model is not None and any(token in choice.ids for token in self.model.capability.placeholder_ids)

    def _base(self, prompt: "_Prompt", prefixes: PrefixCache) -> tuple[str | None, int]:
        """Find a turn with a prefix that begins like the prompt; return its id and the number of common tokens."""
        if prompt.plan.basis.tokens:
            return prompt.plan.basis.id, prompt.plan.basis.tokens
        best: tuple[str | None, int] = (None, 0)
        for turn, prefix in prefixes.nearby(self.epoch, prompt.plan.basis.id):
            shared = ids.common_head(prefix.prefix.ids, prompt.ids)
            if shared > max(best[1], MIN_SHARED):
                best = (turn, shared)
        return best


def _cuts(choice: Choice, *, with_reasoning: bool) -> list[Cut]:
    """List the events after which a client may have left; reasoning counts only if the client receives it.

    Of a reply with calls, list the events with which they began.
    """
    if choice.calls:
        return [Cut(before, after, 0, 0) for before, after in choice.call_steps]
    cuts: list[Cut] = []
    content = reasoning = 0
    for before, after, more_content, more_reasoning in choice.steps:
        content += more_content
        reasoning += more_reasoning if with_reasoning else 0
        cuts.append(Cut(before, after, content, reasoning))
    return cuts


class _Prompt(msgspec.Struct, frozen=True):
    """The prompt that the engine used, with its media, the plan that it is recorded with, and how it differs from what was sent."""

    ids: bytes
    fragment: Fragment
    plan: Plan
    marks: tuple[str, ...] = ()
    difference: str = ""
    media: tuple[PlacedMedia, ...] = ()


def _difference(plan: Plan, echoed: bytes) -> str:
    """Describe how the prompt that the engine used differs from the planned one."""
    assert plan.prompt is not None  # noqa: S101 - only a planned prompt can differ
    sent, same = ids.count(plan.prompt), ids.common_head(plan.prompt, echoed)
    if plan.prompt.endswith(echoed):
        return f"the engine cut the prompt: it used the last {ids.count(echoed)} of {sent} ids"
    if plan.last_reply is not None and same >= plan.last_reply.end:
        return f"the engine used the history's {plan.last_reply.end} ids, and another tail after them"
    return f"the engine used other ids than were sent: they differ from index {same} of {sent} on"

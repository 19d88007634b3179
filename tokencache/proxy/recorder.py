"""Makes the turns to store from the facts of a call.

The recorded prompt is the prompt that the engine reports. If that differs from the prompt that was sent, the turn is marked
(`engine-disagrees`). It does not continue another turn, and no turn continues it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import compress
from operator import attrgetter, eq
from typing import Any

import msgspec
import xxhash

from tokencache.core import evidence, ids
from tokencache.core.added_text import with_stop_string
from tokencache.core.chain import POSITION_KEY, REQUEST_KEY, Conversation, aborted_turn_keys, turn_keys
from tokencache.core.context import Context, pack_context
from tokencache.core.continued import rest_of, whole_reply
from tokencache.core.forced import Span, forced_spans
from tokencache.core.ids import Fragment
from tokencache.core.incidents import Incident, IncidentKind
from tokencache.core.media import PlacedMedia, PlacesDifferError, place_media
from tokencache.core.messages import Message, digest
from tokencache.core.reasons import Reason
from tokencache.core.turn import Prefix, ReplyPiece, Tokens, Turn, TurnMark, hash_ids, hash_logprobs
from tokencache.core.verdict import CUT_OFF, Cut, pack_cuts
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.chat.sampling import bending, recorded
from tokencache.dialects.chat.vocabulary import with_references
from tokencache.dialects.json_io import value_of
from tokencache.dialects.members import LIMITS
from tokencache.engine.logprob_kind import LogprobKind
from tokencache.engine.model import Model
from tokencache.engine.prompt_echo import as_fragment, read_ids
from tokencache.engine.reply import STEP, Choice
from tokencache.pauses import LARGE, pause
from tokencache.proxy.facts import CallFacts
from tokencache.proxy.plan import Plan
from tokencache.proxy.policy_version import NOTHING_KNOWN, PieceVersions, joined
from tokencache.proxy.prefix_cache import CachedPrefix, PrefixCache
from tokencache.store.base import Entry

MIN_SHARED = 16
"""Tokens. A common beginning is stored as a reference only if it is longer than this."""

_INCIDENT_OF: dict[str, IncidentKind] = {
    TurnMark.UPSTREAM_BROKE: IncidentKind.UPSTREAM_BROKE,
    TurnMark.ENGINE_ABORTED: IncidentKind.ENGINE_ABORTED,
    TurnMark.INTERNAL_ERROR: IncidentKind.INTERNAL_ERROR,
}


class Recorded(msgspec.Struct, frozen=True):
    """The result of a call: entries to store, the prefix of each entry, and incidents."""

    entries: list[Entry]
    prefixes: list[CachedPrefix]
    incidents: list[Incident]


class UsedPrompt(msgspec.Struct, frozen=True):
    """The prompt that the engine used, the plan that it is recorded with, how it differs from what was sent, if it does, and its media.

    Its packed ids are in two parts, `prefix` and `tail`, because those of a long history are copied only to record them.
    """

    prefix: bytes
    fragment: Fragment
    plan: Plan
    difference: str = ""
    media: tuple[PlacedMedia, ...] = ()
    tail: bytes = b""

    @property
    def ids(self) -> bytes:
        """The packed ids, joined."""
        return self.prefix + self.tail

    @property
    def tokens(self) -> int:
        """The number of ids."""
        return (len(self.prefix) + len(self.tail)) // ids.ID_BYTES


class _Sampled(msgspec.Struct, frozen=True):
    """The ids of a choice that are certain, and their log probabilities, packed; the ranges that were forced, their versions and pieces.

    `kind` is that of the log probabilities.
    """

    ids: Sequence[int]
    packed: bytes
    logprobs: bytes
    kind: LogprobKind
    forced: tuple[Span, ...] | None
    versions: PieceVersions
    pieces: tuple[ReplyPiece, ...]


async def turns_of(facts: CallFacts, prefixes: PrefixCache) -> Recorded:
    """Make the turns of a call, and its incidents. The same facts give the same turns, unless other prefixes are cached."""
    incidents, large = [*facts.call.noted, *_incidents(facts)], len(facts.planned.plan.prefix or facts.reply.prompt.packed or b"") > LARGE
    if facts.judged.wrong_prompt:
        return Recorded([], [], [*incidents, _incident(facts, IncidentKind.INCONSISTENT_REPLY, facts.judged.wrong_prompt)])
    if large:
        await pause()
    prompt = used_prompt(facts)
    if prompt is None:
        return Recorded([], [], [*incidents, *_no_prompt(facts)])
    if large:
        await pause()
    if prompt.difference:
        detail = f"{prompt.difference}; recorded with the ids that it used"
        incidents.append(_incident(facts, IncidentKind.ENGINE_DISAGREES, detail))
    entries, cached = [], []
    for index, choice in sorted(facts.reply.choices.items()):
        incidents += _incidents_of(facts, index, choice)
        if facts.mark == TurnMark.ENGINE_ABORTED and not facts.judged.found[index].tokens:
            continue
        entry, prefix = await _entry(facts, own_prompt(facts, choice) or prompt, index, choice, prefixes)
        entries.append(entry)
        cached.append(prefix)
        if large:
            await pause()
    return Recorded(entries, cached, incidents)


# --- incidents ---


def _incident(facts: CallFacts, kind: IncidentKind, detail: str) -> Incident:
    return kind.incident(detail, call=facts.call.id, at=facts.ended)


def _incidents(facts: CallFacts) -> list[Incident]:
    found, reply = [], facts.reply
    if facts.mark == TurnMark.ABORTED:
        found.append(facts.call.left(facts.detail))
    elif facts.mark:
        found.append(_incident(facts, _INCIDENT_OF[facts.mark], facts.detail))
    if reply.error:
        kind = IncidentKind.ENGINE_REFUSED if reply.refusal else IncidentKind.ENGINE_ERROR
        found.append(_incident(facts, kind, reply.error[:300].decode(errors="replace")))
    if reply.unreadable:
        found.append(_incident(facts, IncidentKind.UNREADABLE_REPLY, f"{reply.unreadable} chunks"))
    if facts.judged.whole and len(facts.judged.found) < reply.expected:
        found.append(_incident(facts, IncidentKind.MISSING_CHOICES, f"{len(facts.judged.found)} of {reply.expected}"))
    return found


def _incidents_of(facts: CallFacts, index: int, choice: Choice) -> list[Incident]:
    found, finding = [], facts.judged.found[index]
    if finding.hole is not None and finding.hole is not IncidentKind.UNREADABLE_REPLY:  # that one is the whole reply's
        found.append(_incident(facts, finding.hole, f"choice {index}: {finding.detail}"))
    if finding.no_logprobs:
        found.append(_incident(facts, IncidentKind.NO_LOGPROBS, finding.no_logprobs))
    if facts.judged.whole and choice.finish_reason == "abort":
        detail = f"the engine aborted choice {index} after {len(choice.ids)} tokens; the client received it"
        found.append(_incident(facts, IncidentKind.ENGINE_ABORTED, detail))
    if facts.judged.whole and not choice.finish_reason:
        found.append(_incident(facts, IncidentKind.UNFINISHED_REPLY, f"choice {index} has no finish reason"))
    return found


def _no_prompt(facts: CallFacts) -> list[Incident]:
    """Return the incident of a call without a reported prompt; none if that is no surprise."""
    nothing = not facts.reply.choices
    if facts.reply.refusal or (facts.mark == TurnMark.ENGINE_ABORTED and nothing):
        return []
    if facts.mark and nothing:
        return [_incident(facts, IncidentKind.NOTHING_RECEIVED, "the call ended before the engine sent anything")]
    words = "the reply ended before the engine reported" if facts.mark else "the engine did not report"
    return [_incident(facts, IncidentKind.NO_TOKEN_IDS, f"{words} which ids it used")]


# --- the prompt ---


def used_prompt(facts: CallFacts, echo: bytes = b"") -> UsedPrompt | None:
    """Return the prompt that the engine reports for all choices, or for a single one with `echo`; `None` if it reports none."""
    plan, whole = facts.planned.plan, facts.reply.prompt
    if not echo and whole.agreed and plan.prefix is not None and plan.fragment is not None:
        return _with_media(facts, UsedPrompt(plan.prefix, plan.fragment, plan, tail=plan.tail))
    planned, echoed = plan.prompt, read_ids(echo) if echo else whole.packed
    if echoed is None:
        return None
    fragment = as_fragment(echo, echoed) if echo else whole.fragment
    if planned is None and whole.sent and not echo:  # the driver had it rendered
        planned = read_ids(b"[%s]" % bytes(whole.sent))
    if planned is None or echoed == planned or (not plan.whole and echoed.startswith(planned)):
        return _with_media(facts, UsedPrompt(echoed, fragment, plan))
    difference = _difference(planned, plan, echoed, facts.planned.engine.driver.ignored_hint)
    return UsedPrompt(echoed, fragment, plan.rendered(Reason.ENGINE_DISAGREES), difference)


def own_prompt(facts: CallFacts, choice: Choice) -> UsedPrompt | None:
    """Return the prompt of a choice, if the engine reports another one for it than for the call (text completions)."""
    return used_prompt(facts, choice.prompt) if choice.prompt and choice.prompt != facts.reply.prompt.raw else None


def expert_rows(facts: CallFacts, choice: Choice) -> tuple[int, int]:
    """Return the number of tokens of a choice and its prompt, and the first token whose routed experts were requested."""
    prompt = own_prompt(facts, choice) or used_prompt(facts)
    return (prompt.tokens + len(choice.ids), prompt.plan.basis.routed) if prompt is not None else (0, 0)


def _with_media(facts: CallFacts, prompt: UsedPrompt) -> UsedPrompt:
    """Add the images of the messages to a prompt. The engine must report that they are where the recorded ones were."""
    plan, chat, places = prompt.plan, facts.call.chat, facts.reply.places
    if not chat.media or (places is None and plan.exact is None):  # without the plugin nothing is reported
        return prompt
    try:
        media = place_media(chat.media_parts(), places or {}, prompt.tokens)
    except PlacesDifferError as why:
        difference = str(why)
    else:
        if len(media) >= len(plan.basis.media) and all(one.is_same(other) for one, other in zip(plan.basis.media, media, strict=False)):
            return msgspec.structs.replace(prompt, media=media)
        difference = "the engine reports other places of the recorded images"
    return UsedPrompt(prompt.prefix, prompt.fragment, plan.rendered(Reason.ENGINE_DISAGREES), difference, tail=prompt.tail)


def _difference(sent: bytes, plan: Plan, echoed: bytes, hint: str) -> str:
    """Describe how the prompt that the engine used differs from the planned one, which was sent, and what may help."""
    tokens, same = ids.count(sent), ids.common_head(sent, echoed)
    if sent.endswith(echoed):
        return f"the engine cut the prompt: it used the last {ids.count(echoed)} of {tokens} ids"
    if plan.last_reply is not None and same >= plan.last_reply.end:
        return f"the engine used the history's {plan.last_reply.end} ids, and another tail after them"
    return f"the engine used other ids than were sent: they differ from index {same} of {tokens} on" + (f" ({hint})" if hint else "")


# --- the tokens ---


def _sampled(facts: CallFacts, prompt: UsedPrompt, index: int, choice: Choice) -> _Sampled:
    """Return what is certain of a choice."""
    finding = facts.judged.found[index]
    tokens = choice.ids[: finding.tokens]
    logprobs = [] if finding.no_logprobs else choice.logprobs[: finding.tokens].tolist()
    packed, known = ids.pack(tokens), b""
    forced = _forced(facts, prompt, packed)
    if len(logprobs) == len(tokens):
        for start, end in forced or ():
            logprobs[start:end] = [0.0] * (end - start)
        known = ids.pack_logprobs(logprobs)
    pieces = _pieces(facts, choice, len(tokens)) if facts.pieces else ()
    kind: LogprobKind = facts.planned.model.capability.logprobs if facts.planned.model is not None and known else ""
    return _Sampled(tokens, packed, known, kind, forced, _versions(facts, index, len(tokens)), pieces)


def _forced(facts: CallFacts, prompt: UsedPrompt, completion: bytes) -> tuple[Span, ...] | None:
    """Return the ranges of a completion that a thinking budget forced; `None` if that is not certain."""
    budget, marks = facts.planned.budget, facts.planned.thinking
    if budget is None:
        return ()
    return forced_spans(prompt.ids, completion, budget, marks) if marks is not None else None


def _versions(facts: CallFacts, index: int, tokens: int) -> PieceVersions:
    """Return the versions of a choice's tokens, over all pieces. Those of a piece that is not recorded as a whole are not known."""
    left = tokens
    pieces: list[tuple[PieceVersions, int]] = []
    for piece, versions in facts.pieces:
        length = piece.end - piece.start
        if length > left:
            return joined([*pieces, (NOTHING_KNOWN, left)])
        pieces.append((versions, length))
        left -= length
    last = facts.planned.weights.versions(facts.reply.versions(index), left)
    return joined([*pieces, (last, left)]) if pieces else last


def _pieces(facts: CallFacts, choice: Choice, tokens: int) -> tuple[ReplyPiece, ...]:
    """Return the pieces of a reply that was continued; none if only its first one is recorded."""
    pieces = [ended.piece for ended in facts.pieces]
    if tokens <= pieces[0].end:
        return ()
    if pieces[-1].end < tokens:
        engine, ended = facts.planned.engine.upstream.url, choice.finish_reason or facts.mark
        pieces.append(ReplyPiece(facts.request, engine, pieces[-1].end, tokens, ended))
    return tuple(msgspec.structs.replace(piece, end=min(piece.end, tokens)) for piece in pieces if piece.start < tokens)


def _base(facts: CallFacts, prompt: UsedPrompt, prefixes: PrefixCache) -> tuple[str | None, int]:
    """Find a turn with a prefix that begins like the prompt; return its id and the number of common tokens."""
    basis = prompt.plan.basis
    if basis.tokens:
        return basis.id, basis.tokens
    best: tuple[str | None, int] = (None, 0)
    for turn, prefix in prefixes.nearby(facts.epoch, facts.reply.model or facts.call.chat.model, basis.id):
        shared = ids.common_head(prefix.prefix.ids, prompt.ids)
        if shared > max(best[1], MIN_SHARED):
            best = (turn, shared)
    return best


# --- the messages ---


def _context_base(facts: CallFacts, plan: Plan, chain: Sequence[bytes], prefixes: PrefixCache) -> tuple[str | None, int]:
    """Find a turn with a request that began with the same messages, which are stored already; return its id and their number.

    `chain` is that of the messages.
    """
    if plan.basis.messages:
        return plan.parent, plan.basis.messages
    best: tuple[str | None, int] = (None, 0)
    for turn, prefix in prefixes.nearby(facts.epoch, facts.reply.model or facts.call.chat.model, plan.basis.id):
        shared = sum(map(eq, prefix.chain, chain)) - 1  # each link hashes all before it; the first one is for the prompt context
        if shared > best[1]:
            best = (turn, shared)
    return best


async def _context(chat: ChatCall, plan: Plan, shared: int, until: int) -> bytes:
    """Pack the messages up to `until` that are not stored with another turn, with references in place of images and other media."""
    new = chat.raw_messages[shared:until]
    large = not shared and sum(map(len, new)) > LARGE
    if large:
        await pause()
    if chat.media:
        new = [with_references(raw) if index in chat.media else raw for index, raw in enumerate(new, shared)]
    messages = [*map(msgspec.Raw, new)]
    if shared:
        return pack_context(Context(messages), plan.basis.served)
    args, _ = chat.as_written()
    context = Context(messages, args.tools, dict(args.members), dict(args.kwargs))
    if not large:
        return pack_context(context)
    packed = await asyncio.to_thread(pack_context, context)
    await pause()
    return packed


def _evidence(chat: ChatCall, conversation: Conversation | None, plan: Plan) -> dict[str, Any]:
    """Hash the history that the reply answers, for comparison with later ones (`core.evidence`)."""
    if conversation is None or chat.plain:
        return {}
    until = len(conversation.messages)
    replies = {*plan.client_places, *map(attrgetter("place"), plan.anchors)}
    start = plan.basis.messages + 1 if plan.parent is not None and not plan.anchors else 0
    return {
        "judged": evidence.judged_hash(conversation, until, chat.leniency, chat.handles),
        "foreign": evidence.foreign_hash(conversation, start, until, replies, plan.basis.foreign),
        "before": evidence.preceding_hash(conversation, until),
    }


def _keys(facts: CallFacts, turn: Turn, choice: Choice, answered: Conversation | None, received: Message) -> tuple[bytes, ...]:
    """Return the keys under which later histories find a turn, which answers a conversation; the engine sent `received` of its reply."""
    chat, served = facts.call.chat, turn.served
    keys: tuple[bytes, ...] = ()
    may_return = not chat.continues or bool(rest_of(received) or received.calls)  # without them it would be the beginning alone
    if answered is not None and not chat.plain and may_return and (not chat.media or turn.media):
        if facts.judged.whole and choice.finish_reason:
            restored = with_stop_string(served, choice.stop_reason) if choice.stop_reason is not None else None
            keys = turn_keys(answered, served, digest(served), handle=turn.handle, leniency=chat.leniency, restored=restored)
            if chat.has_stop_strings and not served.calls:  # its harness may add words to it
                keys = (*keys, POSITION_KEY + answered.chain[-1])
        elif _cut_short(facts, choice):
            keys = aborted_turn_keys(answered)
    return (*keys, REQUEST_KEY + facts.call.fingerprint) if facts.call.fingerprint else keys


def _cut_short(facts: CallFacts, choice: Choice) -> bool:
    """Whether the client may send back the part that it received: the stream ended within the reply. It may have received nothing yet."""
    if facts.mark not in CUT_OFF or facts.reply.error or facts.judged.uncertain or facts.call.chat.continues:
        return False
    return len(choice.call_steps) == len(choice.calls)


def _cuts(choice: Choice, *, with_reasoning: bool) -> list[Cut]:
    """List the events with text after which a client may have left; reasoning counts only if the client receives it.

    Of a reply with calls, list those up to the first call, and then the events with which the calls began.
    """
    last = choice.call_steps[0][1] if choice.calls else len(choice.ids)
    cuts: list[Cut] = []
    content = reasoning = 0
    for before, after, more_content, more_reasoning in zip(*[iter(choice.steps)] * STEP, strict=True):
        content += more_content
        reasoning += more_reasoning if with_reasoning else 0
        if after <= last and (content or reasoning):
            cuts.append(Cut(before, after, content, reasoning))
    return [*cuts, *[Cut(before, after, 0, 0) for before, after in choice.call_steps]]


# --- the turn ---


def _marks(facts: CallFacts, prompt: UsedPrompt, choice: Choice, sampled: _Sampled, sampling: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the marks of a turn; `sampling` are the recorded members of the request."""
    model, frozen = facts.planned.model, facts.planned.frozen
    placeholders = model.capability.placeholder_ids if model is not None else ()
    marks = {
        TurnMark.ENGINE_DISAGREES: bool(prompt.difference),
        TurnMark.ENGINE_ABORTED: choice.finish_reason == "abort",
        facts.mark: bool(facts.mark),  # after it: a reply without a finish reason has the same mark
        TurnMark.NO_LOGPROBS: bool(sampled.ids) and not sampled.logprobs,
        TurnMark.RAW_LOGPROBS: sampled.kind == "raw" and bool(bending(sampling)),
        TurnMark.UNCERTAIN: facts.judged.uncertain,
        TurnMark.ENGINE_ERROR: bool(facts.reply.error),
        TurnMark.FORCED: bool(sampled.forced),
        TurnMark.BUDGET_UNPROVEN: sampled.forced is None,
        TurnMark.LATE_GRAMMAR: facts.late_grammar,
        TurnMark.MEDIA: bool(facts.call.chat.media),
        TurnMark.MEDIA_NOT_KEPT: not facts.media_kept,
        TurnMark.SAMPLED_PLACEHOLDER: bool(placeholders) and not set(placeholders).isdisjoint(sampled.ids),
        TurnMark.NOT_TRAINABLE: not frozen.isdisjoint((facts.call.chat.model, facts.reply.model)),
        TurnMark.SECOND_SAMPLE: facts.sample.second,
        TurnMark.UNANSWERED: facts.unanswered and facts.judged.whole,
        TurnMark.NEVER_ANSWERED: facts.unanswered and facts.judged.whole and facts.sample.never_answered,
        TurnMark.CONTINUED: bool(sampled.pieces),
    }
    return (*compress(marks, marks.values()), *sampled.versions.marks())


async def _entry(facts: CallFacts, prompt: UsedPrompt, index: int, choice: Choice, prefixes: PrefixCache) -> tuple[Entry, CachedPrefix]:
    """Make the turn of one choice, with its prefix."""
    call, chat, plan, model = facts.call, facts.call.chat, prompt.plan, facts.planned.model
    answered, answered_messages, sampling = chat.answers, chat.answered_messages, recorded(chat.fields)
    sampled, prompt_tokens = _sampled(facts, prompt, index, choice), prompt.tokens
    base, shared = _base(facts, prompt, prefixes)
    chain = answered.chain if answered is not None else ()
    stored_with = facts.planned.plan if chat.released else plan  # the messages of that plan's basis are all that was released
    context_base, context_shared = _context_base(facts, stored_with, chain, prefixes)
    served = received = choice.message(with_reasoning=chat.shows_reasoning)
    if chat.continues:
        begun = plan.begun or chat.messages[-1]
        served = whole_reply(begun, received)
    said = choice.finish_reason or ("abort" if facts.mark else None)
    ended = finish_reason(choice, chat.fields, prompt_tokens, model) if facts.judged.whole else said
    broken_off = choice.finish_reason == "abort" or facts.mark in {TurnMark.UPSTREAM_BROKE, TurnMark.ENGINE_ABORTED}
    routed = ("", plan.basis.routed)
    experts, experts_start = routed if facts.judged.uncertain else facts.experts.get(index, routed)
    packed = b"".join((prompt.prefix, prompt.tail, sampled.packed))
    turn = Turn(
        id=xxhash.xxh3_64_hexdigest(f"{call.id}-{index}".encode()),
        call=call.id,
        choice=index,
        created=call.started,
        seconds=round(facts.ended - call.started, 6),
        marks=_marks(facts, prompt, choice, sampled, sampling),
        # the turns that it continues
        match=plan.match,
        reason=plan.reason,
        parent=plan.parent,
        origin=plan.origin,
        applied_rules=plan.applied_rules,
        anchors=plan.anchors,
        # its tokens
        base=base,
        shared=shared,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(sampled.ids),
        prefix_hash=hash_ids(packed),
        completion_hash=hash_ids(sampled.packed),
        logprobs_hash=hash_logprobs(sampled.logprobs),
        logprob_kind=sampled.kind,
        forced=sampled.forced or (),
        pieces=sampled.pieces,
        media=prompt.media,
        experts=experts,
        experts_start=experts_start,
        # the policy that sampled them
        versions=[*map(msgspec.structs.asdict, sampled.versions.spans)],
        version_source=sampled.versions.source,
        prompt_version=sampled.versions.prompt,
        kv=sampled.versions.kv,
        # its message, and how later histories show it
        served=served,
        begun=len(begun.content or "") if chat.continues else 0,
        position_key=chain[-1] if chain else b"",
        **_evidence(chat, answered, plan),
        handle=chat.reply_handle,
        cuts=pack_cuts(_cuts(choice, with_reasoning=chat.shows_reasoning)) if _cut_short(facts, choice) else b"",
        # how it ended
        finish_reason=ended,
        engine_reason="" if ended == said else said or "",
        stop_reason=choice.stop_reason,
        stopped=bool(sampled.ids) and model is not None and sampled.ids[-1] in model.stop_ids,
        again=facts.again if broken_off else "",
        # the request
        model=facts.reply.model or chat.model,
        adapter_of=model.adapter_of if model is not None else "",
        dialect=chat.dialect,
        stream=chat.stream,
        harness=chat.harness,
        agent=chat.agent,
        messages=answered_messages,
        tools=chat.tool_count,
        sampling=sampling,
        replaced=dict(chat.replaced),
        context_base=context_base,
        context_shared=context_shared,
    )
    prefix = CachedPrefix(Prefix(packed, len(sampled.ids)), prompt.fragment.extended(sampled.packed), chain)
    tokens = Tokens(packed[shared * ids.ID_BYTES : prompt_tokens * ids.ID_BYTES], sampled.packed, sampled.logprobs)
    context = await _context(chat, stored_with, context_shared, answered_messages)
    return Entry(turn, tokens, _keys(facts, turn, choice, answered, received), context), prefix


_BROKEN_OFF = frozenset({"length", "abort", "error"})


def finish_reason(choice: Choice, fields: Mapping[str, msgspec.Raw], prompt_tokens: int, model: Model | None) -> str | None:
    """Return how a whole reply ended: `length` if its ids prove that it was cut, otherwise the engine's finish reason.

    vLLM (0.32, `chat_completion/serving.py`) writes `tool_calls` for every whole reply in which its parser found a call, also if the limit
    of tokens cut the next call. A reply was certainly cut if all of this holds, for then none of its ids ended it:

    1. it has as many ids as its limit: `max_tokens` of the request, or what the context of the model has room for
    2. its last id is no stop id: of the request (`stop_token_ids`), of the model (the probe, and what was learned), or of the template
    3. the engine names neither a stop id nor a stop string that ended it (`stop_reason`)
    4. an id at which the model stops by itself is known: otherwise the last id may be one

    Args:
        choice: the reply, with all its ids.
        fields: the members of the request, raw.
        prompt_tokens: the number of the prompt's tokens.
        model: the model; `None` if the engine could not be probed.
    """
    said = choice.finish_reason
    if said is None or said in _BROKEN_OFF or choice.stop_reason is not None or not choice.ids:
        return said
    if model is None or not model.stops_by_itself:
        return said
    last = choice.ids[-1]
    if last in model.stop_ids or last in model.capability.turn_ends or len(choice.ids) not in _cut_at(fields, prompt_tokens, model):
        return said
    own = value_of(fields["stop_token_ids"]) if "stop_token_ids" in fields else None
    return said if isinstance(own, list) and last in own else "length"


def _cut_at(fields: Mapping[str, msgspec.Raw], prompt_tokens: int, model: Model) -> set[int]:
    """Return the numbers of tokens at which an engine cuts the reply."""
    asked = [value for name in LIMITS if name in fields and isinstance(value := value_of(fields[name]), int)]
    room = model.capability.max_model_len
    return {*asked[:1], *([room - prompt_tokens] if room else ())}

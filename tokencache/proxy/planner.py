"""Decides how a call is sent: plans its exact prompt, from its messages and the recorded turns of its session.

`core.match` finds the turn that a history continues. The planner reads the ids of that turn and joins them with the tail. If something
cannot be proven, the plan is `plain`, with the reason: the engine renders, and the turn starts a new lineage. After a failure of the proxy
or its store, the plan is also `plain`: the client gets its reply, and the trainer sees the reason.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial

import msgspec

from tokencache.core import ids
from tokencache.core.added_text import is_exactly
from tokencache.core.chain import CHAIN_KEY, lookup_keys
from tokencache.core.edited import is_a_reply_of, is_edited_reply
from tokencache.core.evidence import PlacedReply
from tokencache.core.match import Hit, Match, match
from tokencache.core.messages import Message
from tokencache.core.reasons import Reason
from tokencache.core.splice import OPEN, REPLACED, join, junction, without_stop_id
from tokencache.core.turn import Turn
from tokencache.core.verdict import DeliveredPrefix, has_own_reasoning, is_unique
from tokencache.dialects.chat.request import ChatCall
from tokencache.engine.drivers.base import LastReply
from tokencache.engine.model import Engine, Model
from tokencache.engine.pool import Pool
from tokencache.engine.template.calls import call_end
from tokencache.engine.template.learned import TailRefusedError
from tokencache.engine.template.renderer import RenderError, TemplateRefusedError
from tokencache.errors import EngineError, HarnessError, passing_cause
from tokencache.proxy import partial_reply
from tokencache.proxy.client_ids import ReturnedIds, prove
from tokencache.proxy.earlier_thoughts import as_directly
from tokencache.proxy.plan import Basis, Plan, PlanningContext
from tokencache.proxy.prefix_cache import PrefixCache
from tokencache.proxy.resplice import Resplice
from tokencache.proxy.sampled_text import sampled_after, words_after
from tokencache.store.base import BeginResult, Store, StoreError

log = logging.getLogger(__name__)

FIRST_REPLIES = 2
"""Number of last replies that are looked up when a call begins; the others are looked up only if none of these is known."""
_EDITED = frozenset({Reason.PAST_CHANGES, Reason.NEW_MESSAGES_REACH_BACK, Reason.TAIL_NOT_PROVEN})
"""Reasons for refusing a tail that mean that the template now writes the unchanged history differently, as if it had been edited."""
_NOT_RECOGNISED = frozenset({Reason.UNRECOGNISED_REPLY, Reason.FOREIGN_REPLY})
_FAILURES: dict[type[Exception], str] = {StoreError: Reason.STORE_ERROR, KeyError: Reason.TORN_RECORD, ValueError: Reason.TORN_RECORD}

_Known = Mapping[bytes, Sequence[Hit]]
"""The turns that the store found under the keys that were looked up."""


class Planner:
    """Plans the prompts of calls, for the engines of a pool."""

    def __init__(self, pool: Pool, store: Store, prefixes: PrefixCache) -> None:
        self._pool = pool
        self._store = store
        self._prefixes = prefixes

    async def plan(
        self, engine: Engine, session: str, call: ChatCall, keys: Sequence[bytes], begun: BeginResult | None
    ) -> tuple[Plan, Model | None]:
        """Plan a call that has begun, for an engine. After a failure of the proxy or its store, the plan is `plain`.

        Raises:
            EngineError: the engine cannot be reached, or cannot serve now. Any other prompt would break this session's lineage.
        """
        if begun is None:
            return Plan(match="plain", reason=Reason.STORE_ERROR), None
        model = None
        try:
            model = await engine.model(call.model)
            plan = await self._plan(session, call, model, keys, begun.hits, first=begun.calls == 1)
            return (await self._explained(session, call, plan, model) if plan.reason in _NOT_RECOGNISED else plan), model
        except EngineError as why:
            if why.passing:
                raise
            log.debug("session %s: a call is not planned: %s", session, why)
            return Plan(match="plain", reason=Reason.ENGINE_UNKNOWN), model
        except Exception as why:  # a fault of the proxy must not fail the call
            log.exception("session %s: a call is not planned; the engine renders it", session)
            return Plan(match="plain", reason=_FAILURES.get(type(why), Reason.INTERNAL_ERROR)), model

    async def _explained(self, session: str, call: ChatCall, plan: Plan, model: Model) -> Plan:
        """Change the reason of a plan if the reply that was not recognized is another model's, or an edited one."""
        try:
            turns = await self._store.turns(session)
        except StoreError:
            return plan
        if call.conversation is None:
            return plan
        others = (turn for turn in reversed(turns) if not model.capability.sampled(turn, named=False))
        if is_a_reply_of(call.conversation, others):
            return msgspec.structs.replace(plan, reason=Reason.OTHER_MODEL)
        edited = is_edited_reply(call.conversation, turns)
        return msgspec.structs.replace(plan, reason=Reason.REWRITTEN_REPLY) if edited else plan

    async def next_prompt(self, session: str, call: ChatCall) -> tuple[bytes, Model] | None:
        """Preview the prompt of a call: its packed ids and the model; `None` if the engine would render."""
        keys = keys_wanted(call)
        try:
            hits = await self._store.find(session, keys)
            model = await self._pool.engine_of(session, call.model).model(call.model)
            plan = await self._plan(session, call, model, keys, hits)
        except (StoreError, EngineError, KeyError, ValueError) as why:
            log.warning("session %s: the next prompt is not planned: %s", session, type(why).__name__)
            return None
        prompt = plan.prompt
        return (prompt, model) if prompt is not None and plan.whole else None

    async def count_tokens(self, session: str, call: ChatCall) -> int:
        """Count the tokens of the prompt that a call would have.

        Raises:
            HarnessError: the template refuses the messages.
            EngineError: the engine cannot render now.
        """
        found = await self.next_prompt(session, call)
        if found is not None:
            return ids.count(found[0])
        model = await self._pool.engine_of(session, call.model).model(call.model)
        args, generation = call.as_written()
        try:
            return ids.count(await model.renderer.render(call.model, call.safe_messages(), args, generation=generation))
        except TemplateRefusedError as why:
            raise HarnessError(str(why)) from None
        except RenderError as why:
            raise EngineError("the engine cannot render this", private=str(why)) from None

    async def _plan(
        self, session: str, call: ChatCall, model: Model, keys: Sequence[bytes], hits: Sequence[list[Hit]], *, first: bool = False
    ) -> Plan:
        """Plan a call; `hits` are the turns that the store found under `keys`, `first` is whether it is the first call of its session.

        Raises:
            StoreError: the store failed.
            EngineError: the engine cannot be reached, or cannot answer now. The call is planned later, or for another engine.
        """
        if call.plain or call.conversation is None:
            return Plan(match="plain", reason=call.plain)
        if call.media and (why_not := media_reason(call, model)):
            return Plan(match="plain", reason=why_not)
        context = PlanningContext(self._store, self._prefixes, session, call, call.conversation, model)
        returned = ReturnedIds(call) if call.echoes or call.required_prefix else None
        planning = _Planning(context, returned)
        known = _looked_up(keys, hits)
        found = match(call.conversation, {}, call.leniency) if first else await planning.match(known)
        if found.kind == "root" or (found.kind == "plain" and (returned is None or returned.last < 0)):
            return Plan(match=found.kind, reason=Reason.CONTINUE_FINAL_MESSAGE if call.continues else found.reason)
        blocked = await context.blocked()
        if blocked:
            return Plan(match="plain", reason=blocked)
        try:
            if call.continues:
                plan = await planning.continue_reply(found)
            else:
                own = await planning.from_client_ids(found, returned) if returned is not None else None
                plan = own or await planning.splice(found, known)
        except (TailRefusedError, RenderError) as why:
            if (temporary := passing_cause(why)) is not None:
                raise temporary from why
            log.debug("session %s: rendered plainly: %s", session, why)
            return Plan(match="plain", reason=str(why) if isinstance(why, TailRefusedError) else Reason.RENDER_ERROR)
        return await planning.supplied(plan)


class _Planning(msgspec.Struct, frozen=True):
    """The planning of one call; `_returned` are the ids that its client sent back, if it did."""

    _context: PlanningContext
    _returned: ReturnedIds | None

    # match

    async def match(self, known: _Known, without: AbstractSet[str] = frozenset()) -> Match:
        """Match the history with recorded turns, except those `without` (ids).

        Turns beyond `known` that the match needs are read from the store, each key once.
        """
        mixed = not self._context.call.model or self._context.model.capability.adapter
        for found_hits in known.values():  # inline, because nearly always all are the model's own
            for hit in found_hits:
                mixed |= hit.turn.adapter_of != ""
        hits = {key: self._usable(found, without) for key, found in known.items()} if without or mixed else dict(known)
        turns = None
        echoed = self._returned if self._returned is not None else {}
        call, conversation = self._context.call, self._context.conversation
        while True:
            found = match(conversation, hits, call.leniency, call.handles, turns, echoed=echoed)
            # If the last replies are not known, or the last known place was not the model's reply, look up the rest.
            looked = not hits or (found.parent is not None and CHAIN_KEY + conversation.chain[found.at] in hits)
            missing = [] if looked else [key for key in lookup_keys(conversation, handles=call.handles) if key not in hits]
            if not missing and found.turns_wanted and turns is None:
                turns = await self._context.turns()
                continue
            if not missing and found.unsure:
                missing = [key for key in found.unsure if key not in hits]
            if not missing:
                return found
            looked_up = await self._context.store.find(self._context.session, missing)
            hits |= {key: self._usable(found, without) for key, found in zip(missing, looked_up, strict=True)}

    def _usable(self, hits: Sequence[Hit], without: AbstractSet[str]) -> Sequence[Hit]:
        """Return the hits that the engine's model sampled, except those of turns `without`."""
        own, named = self._context.model.capability, bool(self._context.call.model)
        return [hit for hit in hits if hit.turn.id not in without and own.sampled(hit.turn, named=named)]

    async def supplied(self, plan: Plan) -> Plan:
        """Return a plan whose prompt can be supplied to this engine: itself, or a plain one with the reason.

        Raises:
            EngineError: the engine cannot be reached, or cannot answer now.
        """
        if plan.prefix is None or plan.last_reply is None:
            return plan
        (history, tail), call, model = plan.parts, self._context.call, self._context.model
        if 0 < model.capability.max_model_len * ids.ID_BYTES <= len(history) + len(tail):
            return Plan(match="plain", reason=Reason.CONTEXT_FULL)  # it may still fit without the reasoning that the template removes
        if reason := model.driver.cannot_supply(call, plan.last_reply):
            return Plan(match="plain", reason=reason)
        thoughts = await model.earlier_thoughts(call.fields)
        changed = thoughts.changed(history, tail)
        return await as_directly(plan, changed, call, model, thoughts) if changed else plan

    # ids that the client sent back

    async def from_client_ids(self, found: Match, returned: ReturnedIds) -> Plan | None:
        """Begin the prompt with the ids that the client sent back, if they are not recorded here; `None` to use the record.

        Raises:
            TailRefusedError: the ids are not proven, and no recorded reply is certain.
            RenderError: the engine cannot answer now.
        """
        context = self._context
        if context.follows_template or context.call.media or await self._recorded(found, returned):
            return None
        try:
            proven = await prove(context.session, context.call, returned, context.model)
        except (TailRefusedError, RenderError) as why:
            if passing_cause(why) is not None:
                raise
            log.debug("session %s: the client's ids are not proven: %s", context.session, why)
            if found.kind == "plain":
                raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN) from why
            return None
        return Plan(
            match="resplice",
            reason=Reason.CLIENT_IDS,
            prefix=proven.ids,
            fragment=ids.Fragment.of(proven.ids),
            last_reply=LastReply(proven.places[-1], proven.start, proven.end),
            client_places=proven.places,
        )

    async def _recorded(self, found: Match, returned: ReturnedIds) -> bool:
        """Whether the last returned ids belong to a recorded turn, or precede a reply that was found; true if no ids were returned.

        For a recorded turn the text decides: ids do not compensate for other words.
        """
        last = returned.last
        if last < 0 or any(place > last for place, _ in found.anchors):
            return True
        if found.parent is not None and found.at - 1 > last:
            return True
        if found.parent is not None and found.at - 1 == last:
            prefix = await self._context.prefixes.get(self._context.session, found.parent.id)
            if returned.is_prefix(last, prefix):
                return True  # without parsing any id
        hashes = returned.get(last)
        return hashes is not None and any(hashes.names(turn) for turn in (await self._context.turns()).values())

    # splices

    async def continue_reply(self, found: Match) -> Plan:
        """Plan a call that continues its last message: the ids of that reply, without a stop id at their end, are the end of the prompt.

        Raises:
            RenderError: the engine cannot decode its own tokens.
        """
        parent, last = found.parent, self._context.conversation.messages[-1]
        is_last = found.at == len(self._context.conversation.messages) and not found.anchors and found.delivered is None
        # of a turn that continues another one, `judge_reply` takes the reasoning for the model's
        if parent is not None and is_last and not (self._context.model.driver.adds_tail or has_own_reasoning(parent)):
            sampled = await sampled_after(self._context, parent)
            if sampled is not None and is_exactly(parent, sampled, last):
                plan = await self._continue(parent, found, None)
                return msgspec.structs.replace(plan, begun=msgspec.structs.replace(parent.served, content=last.content))
        return Plan(match="plain", reason=Reason.CONTINUE_FINAL_MESSAGE)

    async def splice(self, found: Match, known: _Known) -> Plan:
        """Plan a prompt for a match.

        If the parent was aborted, first prove how much of it the client has received. If the client added text to replies, prove where
        their ids end.
        """
        found, cut, words = await self._proven(found, known) if found.delivered is not None or found.added else (found, None, "")
        if found.kind == "plain":
            return Plan(match="plain", reason=found.reason)
        renders = self._context.model.capability.tokenizes
        if found.parent is not None and not (
            found.anchors or self._context.follows_template or (renders and self._may_change(found.parent, found.at))
        ):
            try:
                return await self._continue(found.parent, found, cut, words)
            except TailRefusedError as why:
                if not renders or str(why) not in _EDITED:
                    raise
                found = found._replace(reason=str(why))
        if not renders:
            return Plan(match="plain", reason=Reason.NO_RENDERING)
        return await Resplice(self._context).plan(found, cut)

    def _may_change(self, parent: Turn, at: int) -> bool:
        """Whether a template may write the history differently now that the parent's reply, and the messages from `at` on, follow it.

        Many templates show the reasoning of assistant messages only after the last question. The model's own replies keep their sampled
        ids, but it must be proven that the client's own assistant messages are rendered as before. Also, a tool result that answered no
        call before may answer one of the new calls.
        """
        messages = self._context.conversation.messages
        if parent.foreign:
            if at > 1 and messages[at - 2].role == "assistant":
                return True  # it was the last message of the parent's request, and many templates write the last message differently
            stable = self._context.model.edited_histories.is_stable(self._context.session, parent)
            harmless = {"tool", "user"} if stable else {"tool"}
            if at == len(messages) or any(message.role not in harmless for message in messages[at:]):
                return True  # with no message after it, the reply is an answer (it has its stop string, or words of the client)
        named = {call.id for message in messages[at - 1 :] for call in message.calls if not is_unique(call.id)}
        return bool(named) and not named.isdisjoint(_unasked(messages[: at - 1]))

    async def _cut(self, turn: Turn, delivered: DeliveredPrefix, at: int) -> bytes | None:
        """Cut an aborted turn's prefix (packed ids) where its client left; `None` if it is not proven that a token ends there.

        `at` is the number of messages up to and including its reply.

        Raises:
            RenderError: the engine cannot decode its own tokens.
        """
        prefix = (await self._context.prefixes.get(self._context.session, turn.id)).prefix.ids
        completion = ids.tail(prefix, turn.prompt_tokens)
        model = self._context.model
        read = partial(model.renderer.read, self._context.call.model)
        if delivered.calls:
            end = await call_end(model.tails.template, self._context.request(at))
            n = await partial_reply.tokens_of_calls(delivered, completion, end, model.stop_ids, read) if end else None
        else:
            n = await partial_reply.delivered_tokens(delivered, completion, model.stop_ids, read)
        return ids.head(prefix, turn.prompt_tokens + n) if n is not None else None

    async def _proven(self, found: Match, known: _Known) -> tuple[Match, bytes | None, str]:
        """Prove where the ids of a parent that was cut, and of replies with added text, end.

        Turns for which that fails are matched as if they were not recorded: the message is text. No other turn takes the place of one that
        cannot be cut at a token, nor one with the same text that of a reply with added text: the message may be the reply of either.

        Returns:
            The match, the prefix of its parent if that was cut, and the words that the client added to the parent's reply.

        Raises:
            RenderError: the engine cannot decode its own tokens.
        """
        without: set[str] = set()
        as_text: set[int] = set()
        words: dict[str, str | None] = {}
        doubtful: set[str] = set()
        while True:
            cut, last = None, found.at - 1
            if found.parent is not None and found.delivered is not None and last not in as_text:
                cut = await self._cut(found.parent, found.delivered, found.at)
                as_text |= {last} if cut is None else set()
            unproven, reason = {turn for place, turn in _placed(found) if place in as_text}, Reason.INTERRUPT_INSIDE_TOKEN
            if not unproven:
                unproven, reason = await self._without_words(found, words, doubtful), Reason.ADDED_TEXT_UNPROVEN
            if not unproven:
                return found, cut, (words.get(found.parent.id) or "") if found.parent is not None else ""
            without |= unproven
            found = (await self.match(known, without))._replace(reason=reason)

    async def _without_words(self, found: Match, words: dict[str, str | None], doubtful: set[str]) -> set[str]:
        """Return the turns (ids) to whose replies the client added text, and for which it is not proven where their own ids end.

        Args:
            found: the match.
            words: receives the words that the client added to each reply, by turns; `None` if nothing is proven.
            doubtful: receives the texts of the replies for which nothing is proven.

        Raises:
            RenderError: the engine cannot decode its own tokens.
        """
        for added in found.added:
            text = added.turn.served.text
            if text not in doubtful and added.turn.id not in words:
                words[added.turn.id] = await words_after(self._context, added)
                doubtful |= {text} if words[added.turn.id] is None else set()
        return {added.turn.id for added in found.added if added.turn.served.text in doubtful}

    async def _continue(self, parent: Turn, found: Match, cut: bytes | None, words: str = "") -> Plan:
        """Continue a turn: its prefix (up to `cut`, if it was aborted), `words` that the client added to its reply, and the tail.

        Raises:
            TailRefusedError: the tail cannot be proven.
        """
        cached = await self._context.prefixes.get(self._context.session, parent.id)
        base = cached.prefix.ids if cut is None else cut
        logprobs = b""
        if self._context.model.driver.sends_logprobs:
            logprobs = (await self._context.store.tokens(self._context.session, [parent.id]))[parent.id].logprobs
        last_reply = LastReply(found.at - 1, parent.prompt_tokens, len(base) // ids.ID_BYTES, logprobs)
        if self._context.model.capability.tokenizes:
            if self._context.call.continues:
                tail, where = b"", OPEN if without_stop_id(base, self._context.model.stop_ids) == base else REPLACED
            else:
                tail = await self._context.model.tails.tail(self._context.request(found.at, base, parent.prompt_tokens, words))
                where = junction(base, tail, self._context.model.stop_ids)
            if where == REPLACED or len(base) < len(cached.prefix.ids):
                extended = words or self._context.call.continues
                why = Reason.REPLY_EXTENDED if extended else Reason.OTHER_STOP if where == REPLACED else Reason.INTERRUPTED
                kept = msgspec.structs.replace(last_reply, end=last_reply.end - where.drop)
                return await self._shortened(parent, found, join(base, tail, where), kept, why)
            reason, added = found.reason, ids.tail(tail, where.skip)
        elif cut is not None:
            return Plan(match="plain", reason=Reason.NO_RENDERING)
        else:
            reason, added = Reason.TAIL_BY_ENGINE, b""
        return Plan(
            match=found.kind,
            reason=reason,
            prefix=base,
            tail=added,
            fragment=cached.fragment.extended(added),
            whole=self._context.model.capability.tokenizes,
            last_reply=last_reply,
            parent=parent.id,
            applied_rules=found.applied_rules,
            basis=Basis.of(parent, last_reply.end, found.at - 1),
            sampled=self._context.sampled(base, parent),
        )

    async def _shortened(self, parent: Turn, found: Match, prompt: bytes, last_reply: LastReply, reason: str) -> Plan:
        """Plan a prompt in which the last reply is shorter than it was sampled: cut by its client, or without its stop id."""
        last = PlacedReply(found.at - 1, parent, parent.prompt_tokens, last_reply.end)
        return Plan(
            match="resplice",
            reason=reason,
            prefix=prompt,
            fragment=ids.Fragment.of(prompt),
            last_reply=last_reply,
            origin=parent.id,
            anchors=(*[reply.anchor for reply in await self._context.placed_replies(parent)], last.anchor),
            applied_rules=found.applied_rules,
            basis=Basis.of(parent, last.end),
            sampled=self._context.sampled(ids.head(prompt, last.end), parent),
        )


def media_reason(call: ChatCall, model: Model) -> str:
    """Return the reason why the engine cannot use an exact prompt with the media of a call; `""` if it can."""
    parts = call.media_parts()
    if not all(part.known for part in parts):
        return Reason.UNSUPPORTED_PART
    if not model.capability.images or any(part.modality != "image" for part in parts):
        return Reason.MEDIA
    if any(not part.sha256 for part in parts):
        return Reason.MEDIA_BY_URL
    if not all(part.trusted for part in parts):
        return Reason.MEDIA
    return Reason.MEDIA_WITH_FOLLOW if call.history == "follow" else ""


def _placed(found: Match) -> list[tuple[int, str]]:
    """Return the places of a match's turns, and their ids."""
    parent = [(found.at - 1, found.parent.id)] if found.parent is not None else []
    return [*[(place, hit.turn.id) for place, hit in found.anchors], *parent]


def _looked_up(keys: Sequence[bytes], hits: Sequence[list[Hit]]) -> _Known:
    """Map keys to hits for the look-up at the beginning of the call, which ended at the first known place (`store.base`)."""
    known: dict[bytes, Sequence[Hit]] = {}
    for key, found in zip(keys, hits, strict=True):
        known[key] = found
        if key[:1] == CHAIN_KEY and found:
            break
    return known


def _unasked(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the call ids that results name although no preceding call has that id."""
    asked = set[str]()
    for message in messages:
        asked.update(call.id for call in message.calls)
        if message.answers is not None and message.answers not in asked:
            yield message.answers


def keys_wanted(call: ChatCall) -> list[bytes]:
    """Return the keys to look up first for a call; empty if its history is not matched."""
    return lookup_keys(call.conversation, FIRST_REPLIES, call.handles) if call.conversation is not None and not call.plain else []

"""Plans the exact prompt of a call, from its messages and the recorded turns of its session.

`core.match` finds the turn that a history continues. The planner reads the ids of that turn and joins them with the tail. If something
cannot be proven, the plan is `plain`, with the reason: the engine renders, and the turn starts a new lineage. After a failure of the proxy
or its store, the plan is also `plain`: the client gets its reply, and the trainer sees the reason.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import NamedTuple

import msgspec

from tokencache.core import evidence, experts, ids
from tokencache.core.added_text import AddedText, added_text, is_exactly, stop_string
from tokencache.core.chain import chain_key, lookup_keys
from tokencache.core.evidence import PlacedReply
from tokencache.core.match import Hit, Match, match
from tokencache.core.media import PlacedMedia
from tokencache.core.messages import Message
from tokencache.core.reasons import Reason
from tokencache.core.splice import OPEN, REPLACED, fill, join, junction, without_stop_id
from tokencache.core.turn import Anchor, MatchKind, Tokens, Turn
from tokencache.core.verdict import CUT_OFF, DeliveredPrefix, is_unique
from tokencache.dialects.chat.request import ChatCall
from tokencache.engine.drivers.base import ExactPrompt, LastReply
from tokencache.engine.earlier_thoughts import Part
from tokencache.engine.model import Engine, Model
from tokencache.engine.pool import Pool
from tokencache.engine.template.calls import call_end
from tokencache.engine.template.edited import HistoryFrame
from tokencache.engine.template.learned import TailRefusedError
from tokencache.engine.template.renderer import RenderError, TemplateRefusedError
from tokencache.engine.template.shapes import TailRequest
from tokencache.engine.template.visible import SampledReply, as_served
from tokencache.errors import EngineError, HarnessError, passing_cause
from tokencache.proxy import partial_reply
from tokencache.proxy.client_ids import ReturnedIds, prove
from tokencache.proxy.earlier_thoughts import is_unlike
from tokencache.proxy.prefix_cache import PrefixCache
from tokencache.proxy.sampled_text import text_after
from tokencache.store.base import BeginResult, Store, StoreError

log = logging.getLogger(__name__)

FIRST_REPLIES = 2
"""Number of last replies that are looked up when a call begins; the others are looked up only if none of these is known."""
_EDITED = frozenset({Reason.PAST_CHANGES, Reason.NEW_MESSAGES_REACH_BACK, Reason.TAIL_NOT_PROVEN})
"""Reasons for refusing a tail that mean that the template now writes the unchanged history differently, as if it had been edited."""
_NOT_PLACED = frozenset({Reason.OPENER_UNKNOWN, Reason.VISIBLE_PART_UNKNOWN, Reason.ADDED_TEXT_UNPROVEN})
"""Reasons for which a recognized reply is rendered as text."""
_FAILURES: dict[type[Exception], str] = {StoreError: Reason.STORE_ERROR, KeyError: Reason.TORN_RECORD, ValueError: Reason.TORN_RECORD}

_Known = Mapping[bytes, Sequence[Hit]]
"""The turns that the store found under the keys that were looked up."""


class Basis(msgspec.Struct, frozen=True):
    """The recorded turn whose prefix begins like a prompt, so that the beginning is not stored again.

    Attributes:
        turn: the turn; `None` if there is none.
        tokens: the number of tokens that its prefix and the prompt have in common; 0 if it is not known yet.
        messages: the number of the request's messages that are those of the turn's request, whose reply follows them; 0 if it is not known.
    """

    turn: Turn | None = None
    tokens: int = 0
    messages: int = 0

    @property
    def id(self) -> str | None:
        """The turn's id."""
        return self.turn.id if self.turn is not None else None

    @property
    def media(self) -> tuple[PlacedMedia, ...]:
        """The images and other media of the turn's prompt, with which this prompt begins."""
        return self.turn.media if self.turn is not None and self.tokens else ()

    @property
    def routed(self) -> int:
        """The number of tokens at the beginning of the prompt whose routed experts are stored with the turn (`core.experts`)."""
        return min(self.tokens, experts.covered(self.turn)) if self.turn is not None and self.tokens else 0

    @property
    def served(self) -> Message | None:
        """The turn's reply, if it follows the common messages."""
        return self.turn.served if self.turn is not None and self.messages else None

    @property
    def foreign(self) -> bytes:
        """A hash of the client's own assistant messages among the common messages (`core.evidence`)."""
        return self.turn.foreign if self.turn is not None and self.messages else b""


NO_BASIS = Basis()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a call is sent.

    Attributes:
        match: how the history relates to recorded turns. It is recorded with the turn, like `reason`, `parent`, `origin`, `anchors` and
            `applied_rules`.
        prompt: the exact packed ids; `None` if the engine renders.
        fragment: the same ids as a JSON fragment.
        whole: whether these are the whole prompt; otherwise they end with the last reply, and the engine adds the tail.
        last_reply: the last reply in the prompt.
        parent: the id of the turn that this one continues.
        basis: the recorded turn whose prefix begins like the prompt.
        begun: the recorded reply that the call continues, as the client has it.
        sampled: positions in the prompt at which the model itself sampled an id of a placeholder.
        changed: what earlier thoughts in the prompt change for the reply (`engine.earlier_thoughts`).
        client_places: the places of replies with unrecorded ids that the client sent back and the prompt uses (`client_ids`).
    """

    match: MatchKind
    reason: str = ""
    prompt: bytes | None = None
    fragment: ids.Fragment | None = None
    whole: bool = True
    last_reply: LastReply | None = None
    parent: str | None = None
    origin: str | None = None
    anchors: tuple[Anchor, ...] = ()
    applied_rules: tuple[str, ...] = ()
    basis: Basis = NO_BASIS
    begun: Message | None = None
    sampled: tuple[int, ...] = ()
    changed: tuple[Part, ...] = ()
    client_places: tuple[int, ...] = ()

    @property
    def exact(self) -> ExactPrompt | None:
        """The exact prompt for a driver; `None` if the engine renders."""
        if self.prompt is None or self.fragment is None or self.last_reply is None:
            return None
        return ExactPrompt(self.prompt, self.fragment, self.last_reply, self.basis.media, self.sampled)

    def rendered(self, reason: str) -> "Plan":
        """Return the plan of a call that the engine renders in place of this one, for a `reason`."""
        return Plan(match="plain", reason=reason, basis=Basis(self.basis.turn))

    @property
    def sent(self) -> ids.Fragment:
        """The whole prompt as a JSON fragment, as the engine should report it; empty if it is not known."""
        return self.fragment if self.fragment is not None and self.whole else ids.Fragment()


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
            return await self._plan(session, call, model, keys, begun.hits, first=begun.calls == 1), model
        except EngineError as why:
            if why.passing:
                raise
            log.debug("session %s: a call is not planned: %s", session, why)
            return Plan(match="plain", reason=Reason.ENGINE_UNKNOWN), model
        except Exception as why:  # a fault of the proxy must not fail the call
            log.exception("session %s: a call is not planned; the engine renders it", session)
            return Plan(match="plain", reason=_FAILURES.get(type(why), Reason.INTERNAL_ERROR)), model

    async def next_prompt(self, session: str, call: ChatCall) -> tuple[bytes, Model] | None:
        """Preview the prompt of a call: its packed ids and the model; `None` if the engine would render."""
        keys = keys_wanted(call)
        try:
            hits = await self._store.find(session, keys)
            model = await self._pool.order(session)[0].model(call.model)
            plan = await self._plan(session, call, model, keys, hits)
        except (StoreError, EngineError, KeyError, ValueError) as why:
            log.warning("session %s: the next prompt is not planned: %s", session, type(why).__name__)
            return None
        return (plan.prompt, model) if plan.prompt is not None and plan.whole else None

    async def count_tokens(self, session: str, call: ChatCall) -> int:
        """Count the tokens of the prompt that a call would have.

        Raises:
            HarnessError: the template refuses the messages.
            EngineError: the engine cannot render now.
        """
        found = await self.next_prompt(session, call)
        if found is not None:
            return ids.count(found[0])
        model = await self._pool.order(session)[0].model(call.model)
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
        planning = _Planning(self._store, self._prefixes, session, call, model)
        known = _looked_up(keys, hits)
        found = match(call.conversation, {}, call.leniency) if first else await planning.match(known)
        if found.kind == "root" or (found.kind == "plain" and planning.last_returned < 0):
            return Plan(match=found.kind, reason=Reason.CONTINUE_FINAL_MESSAGE if call.continues else found.reason)
        blocked = await planning.blocked()
        if blocked:
            return Plan(match="plain", reason=blocked)
        try:
            if call.continues:
                plan = await planning.continue_reply(found)
            else:
                plan = await planning.from_client_ids(found) or await planning.splice(found, known)
        except (TailRefusedError, RenderError) as why:
            if (temporary := passing_cause(why)) is not None:
                raise temporary from why
            log.debug("session %s: rendered plainly: %s", session, why)
            return Plan(match="plain", reason=str(why) if isinstance(why, TailRefusedError) else Reason.RENDER_ERROR)
        return await planning.supplied(plan)


class _Planning:
    """The planning of one call."""

    __slots__ = ("_call", "_conversation", "_model", "_prefixes", "_returned", "_session", "_store")

    def __init__(self, store: Store, prefixes: PrefixCache, session: str, call: ChatCall, model: Model) -> None:
        assert call.conversation is not None  # noqa: S101 - the planner looked
        self._store, self._prefixes = store, prefixes
        self._session, self._call, self._model = session, call, model
        self._conversation = call.conversation
        self._returned = ReturnedIds(call) if call.echoes or call.required_prefix else None

    @property
    def _follows_template(self) -> bool:
        """Whether the prompt omits the thinking of earlier replies where the template does."""
        return self._call.history == "follow"

    @property
    def last_returned(self) -> int:
        """The place of the last echo with token ids; -1 if there is none."""
        return self._returned.last if self._returned is not None else -1

    # match

    async def match(self, known: _Known, without: AbstractSet[str] = frozenset()) -> Match:
        """Match the history with recorded turns, except those `without` (ids).

        Turns beyond `known` that the match needs are read from the store, each key once.
        """
        hits, turns = {key: _except(without, found) for key, found in known.items()}, None
        echoed = self._returned if self._returned is not None else {}
        call, conversation = self._call, self._conversation
        while True:
            found = match(conversation, hits, call.leniency, call.handles, turns, echoed=echoed)
            # If the last replies are not known, or the last known place was not the model's reply, look up the rest.
            looked = not hits or (found.parent is not None and chain_key(conversation.chain[found.at]) in hits)
            rest = () if looked else lookup_keys(conversation, handles=call.handles)
            missing = [key for key in rest if key not in hits]
            if not missing and found.turns_wanted and turns is None:
                turns = await self._turns()
                continue
            missing = missing or [key for key in found.unsure if key not in hits]
            if not missing:
                return found
            looked_up = await self._store.find(self._session, missing)
            hits |= {key: _except(without, found) for key, found in zip(missing, looked_up, strict=True)}

    async def _turns(self) -> dict[str, Turn]:
        return {turn.id: turn for turn in await self._store.turns(self._session)}

    async def blocked(self) -> str:
        """Return the reason why nothing can be spliced for this model or these arguments; `""` if it can."""
        capability = self._model.capability
        if capability.level != "exact":
            return Reason.RECORD_ONLY
        if not self._call.leniency.off.isdisjoint(self._call.left_out):
            return Reason.SWITCHED_OFF  # parsing the request needed a rule that is switched off
        if not capability.tokenizes:
            return ""  # the engine adds the tail
        return "" if await self._model.renders_alike(self._call.args) else Reason.RENDERINGS_DIFFER

    async def supplied(self, plan: Plan) -> Plan:
        """Return a plan whose prompt can be supplied to this engine: itself, or a plain one with the reason.

        Raises:
            EngineError: the engine cannot be reached, or cannot answer now.
        """
        if plan.prompt is None or plan.last_reply is None:
            return plan
        if 0 < self._model.capability.max_model_len <= ids.count(plan.prompt):
            return Plan(match="plain", reason=Reason.CONTEXT_FULL)  # it may still fit without the reasoning that the template removes
        if reason := self._model.driver.cannot_supply(self._call, plan.last_reply):
            return Plan(match="plain", reason=reason)
        changed = (await self._model.earlier_thoughts(self._call.fields)).changed(plan.prompt, plan.last_reply.end)
        if changed and is_unlike(self._call, changed):
            return Plan(match="plain", reason=Reason.EARLIER_THOUGHT)
        return msgspec.structs.replace(plan, changed=changed) if changed else plan

    # ids that the client sent back

    async def from_client_ids(self, found: Match) -> Plan | None:
        """Begin the prompt with the ids that the client sent back, if they are not recorded here; `None` to use the record.

        Raises:
            TailRefusedError: the ids are not proven, and no recorded reply is certain.
            RenderError: the engine cannot answer now.
        """
        if self._returned is None or self._follows_template or self._call.media or await self._recorded(found, self._returned):
            return None
        try:
            proven = await prove(self._session, self._call, self._returned, self._model)
        except (TailRefusedError, RenderError) as why:
            if passing_cause(why) is not None:
                raise
            log.debug("session %s: the client's ids are not proven: %s", self._session, why)
            if found.kind == "plain":
                raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN) from why
            return None
        return Plan(
            match="resplice",
            reason=Reason.CLIENT_IDS,
            prompt=proven.ids,
            fragment=ids.Fragment(proven.ids),
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
            prefix = await self._prefixes.get(self._session, found.parent.id)
            if returned.is_prefix(last, prefix):
                return True  # without parsing any id
        hashes = returned.get(last)
        return hashes is not None and any(hashes.names(turn) for turn in (await self._turns()).values())

    # splices

    async def continue_reply(self, found: Match) -> Plan:
        """Plan a call that continues its last message: the ids of that reply, without a stop id at their end, are the end of the prompt.

        Raises:
            RenderError: the engine cannot decode its own tokens.
        """
        parent, last = found.parent, self._conversation.messages[-1]
        is_last = found.at == len(self._conversation.messages) and not found.anchors and found.delivered is None
        if parent is not None and is_last and not self._model.driver.adds_tail:
            sampled = await self._sampled_after(parent)
            if sampled is not None and is_exactly(parent, sampled, last):
                plan = await self._continue(parent, found, None)
                return msgspec.structs.replace(plan, begun=msgspec.structs.replace(parent.served, content=last.content))
        return Plan(match="plain", reason=Reason.CONTINUE_FINAL_MESSAGE)

    async def splice(self, found: Match, known: _Known) -> Plan:
        """Plan a prompt for a match.

        If the parent was aborted, first prove how much of it the client has received. If the client added text to replies, prove where
        their ids end.
        """
        cut = None
        if found.parent is not None and found.delivered is not None:
            cut = await self._cut(found.parent, found.delivered, found.at)
            if cut is None:
                found = await self._without(found.parent, known)
        found, words = await self._proven_words(found, known)
        if found.kind == "plain":
            return Plan(match="plain", reason=found.reason)
        renders = self._model.capability.tokenizes
        if found.parent is not None and not (
            found.anchors or self._follows_template or (renders and self._may_change(found.parent, found.at))
        ):
            try:
                return await self._continue(found.parent, found, cut, words)
            except TailRefusedError as why:
                if not renders or str(why) not in _EDITED:
                    raise
                found = found._replace(reason=str(why))
        if not renders:
            return Plan(match="plain", reason=Reason.NO_RENDERING)
        return await self._resplice(found, cut)

    def _may_change(self, parent: Turn, at: int) -> bool:
        """Whether a template may write the history differently now that the parent's reply, and the messages from `at` on, follow it.

        Many templates show the reasoning of assistant messages only after the last question. The model's own replies keep their sampled
        ids, but it must be proven that the client's own assistant messages are rendered as before. Also, a tool result that answered no
        call before may answer one of the new calls.
        """
        messages = self._call.messages
        if parent.foreign:
            if at > 1 and messages[at - 2].role == "assistant":
                return True  # it was the last message of the parent's request, and many templates write the last message differently
            settled = self._model.edited_histories.is_settled(self._session, parent)
            harmless = {"tool", "user"} if settled else {"tool"}
            if any(message.role not in harmless for message in messages[at:]):
                return True
        named = {call.id for message in messages[at - 1 :] for call in message.calls if not is_unique(call.id)}
        return bool(named) and not named.isdisjoint(_unasked(messages[: at - 1]))

    async def _cut(self, turn: Turn, delivered: DeliveredPrefix, at: int) -> bytes | None:
        """Cut an aborted turn's prefix (packed ids) where its client left; `None` if it is not proven that a token ends there.

        `at` is the number of messages up to and including its reply.

        Raises:
            RenderError: the engine cannot decode its own tokens.
        """
        prefix = (await self._prefixes.get(self._session, turn.id)).prefix.ids
        completion = ids.tail(prefix, turn.prompt_tokens)
        model = self._model
        read = partial(model.renderer.read, self._call.model)
        if delivered.calls:
            end = await call_end(model.tails.template, self._request(at))
            n = await partial_reply.tokens_of_calls(delivered, completion, end, model.stop_ids, read) if end else None
        else:
            n = await partial_reply.delivered_tokens(delivered, completion, model.stop_ids, read)
        return ids.head(prefix, turn.prompt_tokens + n) if n is not None else None

    async def _without(self, turn: Turn, known: _Known) -> Match:
        """Match again without an aborted turn that cannot be cut at a token. Its text is then treated as ordinary text.

        Raises:
            TailRefusedError: the new match also needs to cut an aborted turn.
        """
        found = await self.match(known, {turn.id})
        if found.delivered is not None:
            raise TailRefusedError(Reason.INTERRUPT_INSIDE_TOKEN)
        return found._replace(reason=Reason.INTERRUPT_INSIDE_TOKEN)

    async def _proven_words(self, found: Match, known: _Known) -> tuple[Match, str]:
        """Prove where the ids of replies with added text end. Turns for which that fails are matched as if they were not recorded.

        Another turn with the same text does not take their place: the harness may have added its words to either.

        Returns:
            The match, and the words that the client added to the parent's reply.

        Raises:
            RenderError: the engine cannot decode its own tokens.
        """
        words: dict[str, str | None] = {}
        doubtful: set[str] = set()
        while found.added:
            for added in found.added:
                name, text = added.turn.id, added.turn.served.text
                if name not in words:
                    words[name] = None if text in doubtful else await self._words(added)
                    doubtful |= {text} if words[name] is None else set()
            unproven = {turn for turn, own in words.items() if own is None}
            if unproven.isdisjoint(added.turn.id for added in found.added):
                break
            found = (await self.match(known, unproven))._replace(reason=Reason.ADDED_TEXT_UNPROVEN)
        return found, (words.get(found.parent.id) or "") if found.parent is not None else ""

    async def _words(self, added: AddedText) -> str | None:
        """Return the words that a client added to a reply after the text of its ids.

        `None` if it is not proven where they begin, or if the engine adds the tail itself: after the end of the message, without them.
        """
        sampled = await self._sampled_after(added.turn)
        words = added.words_after(sampled) if sampled is not None else None
        return None if words and self._model.driver.adds_tail else words

    async def _sampled_after(self, turn: Turn) -> str | None:
        """Return the text that a reply's ids have after the text that was served; `None` if that is not certain."""
        model = self._model
        if not model.capability.tokenizes:
            return None
        prefix = (await self._prefixes.get(self._session, turn.id)).prefix
        body = without_stop_id(ids.tail(prefix.ids, turn.prompt_tokens), model.stop_ids)
        return await text_after(turn.served_text, stop_string(turn.stop_reason), body, partial(model.renderer.read, self._call.model))

    async def _continue(self, parent: Turn, found: Match, cut: bytes | None, words: str = "") -> Plan:
        """Continue a turn: its prefix (up to `cut`, if it was aborted), `words` that the client added to its reply, and the tail.

        Raises:
            TailRefusedError: the tail cannot be proven.
        """
        cached = await self._prefixes.get(self._session, parent.id)
        base = cached.prefix.ids if cut is None else cut
        last_reply = await self._last_reply(found.at - 1, parent, base)
        if self._model.capability.tokenizes:
            if self._call.continues:
                tail, where = b"", OPEN if without_stop_id(base, self._model.stop_ids) == base else REPLACED
            else:
                tail = await self._model.tails.tail(self._request(found.at, base, parent.prompt_tokens, words))
                where = junction(base, tail, self._model.stop_ids)
            if where == REPLACED or len(base) < len(cached.prefix.ids):
                extended = words or self._call.continues
                why = Reason.REPLY_EXTENDED if extended else Reason.OTHER_STOP if where == REPLACED else Reason.INTERRUPTED
                kept = last_reply._replace(end=last_reply.end - where.drop)
                return await self._shortened(parent, found, join(base, tail, where), kept, why)
            reason, added = found.reason, ids.tail(tail, where.skip)
        elif cut is not None:
            return Plan(match="plain", reason=Reason.NO_RENDERING)
        else:
            reason, added = Reason.TAIL_BY_ENGINE, b""
        return Plan(
            match=found.kind,
            reason=reason,
            prompt=base + added,
            fragment=cached.fragment.extended(added),
            whole=self._model.capability.tokenizes,
            last_reply=last_reply,
            parent=parent.id,
            applied_rules=found.applied_rules,
            basis=Basis(parent, last_reply.end, found.at - 1),
            sampled=self._sampled(base, parent),
        )

    async def _shortened(self, parent: Turn, found: Match, prompt: bytes, last_reply: LastReply, reason: str) -> Plan:
        """Plan a prompt in which the last reply is shorter than it was sampled: cut by its client, or without its stop id."""
        kept = last_reply.end
        last = PlacedReply(found.at - 1, parent, parent.prompt_tokens, kept)
        return Plan(
            match="resplice",
            reason=reason,
            prompt=prompt,
            fragment=ids.Fragment(prompt),
            last_reply=last_reply,
            origin=parent.id,
            anchors=(*[reply.anchor for reply in await self._placed_replies(parent)], last.anchor),
            applied_rules=found.applied_rules,
            basis=Basis(parent, kept),
            sampled=self._sampled(ids.head(prompt, kept), parent),
        )

    def _sampled(self, prefix: bytes, turn: Turn) -> tuple[int, ...]:
        """Return the positions in a turn's prefix that have an id of a placeholder, but belong to no image."""
        if not self._call.media:
            return ()
        inside = {place for medium in turn.media for place in range(medium.start, medium.end)}
        return tuple(place for place in ids.places_of(prefix, self._model.capability.placeholder_ids) if place not in inside)

    async def _last_reply(self, place: int, turn: Turn, base: bytes) -> LastReply:
        """Describe the reply at the end of a prefix."""
        logprobs = b""
        if self._model.driver.sends_logprobs:
            logprobs = (await self._store.tokens(self._session, [turn.id]))[turn.id].logprobs
        return LastReply(place, turn.prompt_tokens, ids.count(base), logprobs)

    async def _placed_replies(self, turn: Turn) -> tuple[PlacedReply, ...]:
        """List the replies in a turn's prompt.

        Raises:
            TailRefusedError: the records do not contain their positions.
        """
        if turn.parent is None and not turn.anchors:
            return ()
        known = evidence.placed_replies(turn, await self._turns())
        if known is None:
            raise TailRefusedError(Reason.UNPLACED_REPLIES)
        return known

    async def _resplice(self, found: Match, cut: bytes | None) -> Plan:
        """Render the history again, with the exact ids of every recognized reply.

        A frame has no place for words that the client added to a reply, nor for the parts of one that the client continued. So such replies
        are rendered as text.

        Raises:
            TailRefusedError: the frame of the replies, or the generation prompts before them, cannot be proven.
        """
        replies = [evidence.whole_reply(place, hit.turn) for place, hit in found.anchors]
        if found.parent is not None:
            last = evidence.whole_reply(found.at - 1, found.parent)
            last = last if cut is None else msgspec.structs.replace(last, end=ids.count(cut))
            replies = [*await self._placed_replies(found.parent), last, *replies]
        in_parts = {reply.place for reply in replies if reply.turn.begun}
        framed = [reply for reply in replies if reply.place not in in_parts and not self._has_words(reply)]
        if len(framed) < len(replies):
            found = found._replace(reason=Reason.OPENER_UNKNOWN if in_parts else Reason.ADDED_TEXT_UNPROVEN)
        if not framed:
            raise TailRefusedError(found.reason)
        replies = framed
        stored = await self._store.tokens(self._session, [reply.turn.id for reply in replies])
        laid = await (self._lay_out_visible(replies, stored) if self._follows_template else self._lay_out(replies, stored))
        found = found._replace(reason=laid.reason or found.reason or laid.default_reason)
        completions = [reply.tokens_in(stored[reply.turn.id].completion) for reply in laid.replies]
        prompt, spans = fill(laid.pieces, laid.openers, completions, self._model.stop_ids)
        replies = [msgspec.structs.replace(reply, start=start, end=end) for reply, (start, end) in zip(laid.replies, spans, strict=True)]
        last = replies[-1]
        parent = await self._same_prefix(prompt, last)
        plan = Plan(
            match="resplice",
            reason=found.reason,
            prompt=prompt,
            fragment=ids.Fragment(prompt),
            last_reply=LastReply(last.place, last.start, last.end, _logprobs_from(last.offset, stored[last.turn.id].logprobs)),
            origin=last.turn.id,
            anchors=tuple(reply.anchor for reply in replies),
            applied_rules=found.applied_rules,
            basis=Basis(parent or found.parent or last.turn),
            sampled=self._sampled_in(prompt, spans),
        )
        if parent is None:
            return plan
        reason = found.reason if found.reason in _NOT_PLACED else Reason.RENDERED_ALIKE
        follows = msgspec.structs.replace(
            plan,
            match="continue",
            reason=reason,
            parent=parent.id,
            origin=None,
            basis=Basis(parent, last.end),
            sampled=self._sampled(ids.head(prompt, last.end), parent),
        )
        if parent is found.parent and not found.anchors and reason == Reason.RENDERED_ALIKE:  # not edited after all
            if not self._follows_template:
                await self._model.edited_histories.settle(parent, laid.request, [reply.place for reply in replies], laid.frame)
            basis = Basis(parent, last.end, found.at - 1)
            return msgspec.structs.replace(follows, match=found.kind, reason="", anchors=(), basis=basis)
        continued = any(hit.continued for _, hit in found.anchors if hit.turn.id == parent.id)
        return msgspec.structs.replace(follows, match="branch") if continued else follows

    def _has_words(self, reply: PlacedReply) -> bool:
        """Whether the client added words of its own to a reply."""
        added = added_text(reply.turn, self._conversation.messages[reply.place], self._call.leniency)
        return added is not None and not added.restored

    def _sampled_in(self, prompt: bytes, spans: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Return the positions in replies, half-open ranges of a prompt, that have an id of a placeholder."""
        if not self._call.media:
            return ()
        inside = {place for start, end in spans for place in range(start, end)}
        return tuple(place for place in ids.places_of(prompt, self._model.capability.placeholder_ids) if place in inside)

    async def _lay_out(self, replies: Sequence[PlacedReply], stored: Mapping[str, Tokens]) -> "_Layout":
        """Lay out replies as they were sampled, after their generation prompts. A reply whose generation prompt is unknown is left out.

        Raises:
            TailRefusedError: the frame of the replies, or all generation prompts, cannot be proven.
        """
        reason = ""
        while replies:
            request = self._request(replies[-1].place + 1)
            frame = await self._model.edited_histories.frame(request, [reply.place for reply in replies])
            prompts = [await self._generation_prompt(frame, n, reply, stored) for n, reply in enumerate(replies)]
            known = [prompt for prompt in prompts if prompt is not None]
            if len(known) == len(prompts):
                return _Layout(request, frame, frame.pieces, known, replies, reason, Reason.PAST_CHANGES)
            replies = [reply for reply, prompt in zip(replies, prompts, strict=True) if prompt is not None]
            reason = Reason.OPENER_UNKNOWN
        raise TailRefusedError(Reason.OPENER_UNKNOWN)

    async def _lay_out_visible(self, replies: Sequence[PlacedReply], stored: Mapping[str, Tokens]) -> "_Layout":
        """Lay out the parts of replies that the template shows. A reply whose visible part is not proven is left out.

        Raises:
            TailRefusedError: the frame of the replies, or all visible parts, cannot be proven.
        """
        reason = ""
        while replies:
            places = [reply.place for reply in replies]
            raw = list(self._call.safe_messages())
            for reply in replies:
                raw[reply.place] = as_served(raw[reply.place], self._received(reply))
            request = msgspec.structs.replace(self._request(places[-1] + 1), raw=raw)
            frame = await self._visible_frame(request, places)
            sampled = [
                SampledReply(_received_tokens(reply, stored), self._received(reply), await self._generation_prompt(frame, n, reply, stored))
                for n, reply in enumerate(replies)
            ]
            parts = await self._model.visible_replies.parts(request, frame, places, sampled)
            shown = [(n, part) for n, part in enumerate(parts) if part is not None and part.tokens]
            if len(shown) == len(replies):
                pieces = [frame.pieces[n] if part.whole else frame.fronts[n] for n, part in shown]
                openers = [sampled[n].generation_prompt or b"" if part.whole else b"" for n, part in shown]
                kept = [msgspec.structs.replace(replies[n], start=0, end=part.tokens, offset=part.offset) for n, part in shown]
                default = Reason.PAST_CHANGES if all(part.whole for _, part in shown) else Reason.THINKING_DROPPED
                return _Layout(request, frame, [*pieces, frame.pieces[-1]], openers, kept, reason, default)
            reason = Reason.VISIBLE_PART_UNKNOWN if None in parts else reason
            replies = [replies[n] for n, _ in shown]
        raise TailRefusedError(reason or Reason.THINKING_DROPPED)

    async def _visible_frame(self, request: TailRequest, places: Sequence[int]) -> HistoryFrame:
        """Find a frame with the sentinels in the texts of the replies; in their calls, if the template writes later calls in another form.

        Raises:
            TailRefusedError: neither frame can be proven.
        """
        frames = self._model.edited_histories
        try:
            return await frames.frame(request, places, in_text=True)
        except TailRefusedError:
            if not any(request.conversation.messages[place].calls for place in places):
                raise
            return await frames.frame(request, places)

    def _received(self, reply: PlacedReply) -> Message:
        """Return a reply as the client has it, with its thinking. Of an interrupted reply, only the echo shows how much that is."""
        served, echoed = reply.turn.served, self._conversation.messages[reply.place]
        if CUT_OFF.isdisjoint(reply.turn.marks):
            added = added_text(reply.turn, echoed, self._call.leniency)
            return served if added is None else msgspec.structs.replace(served, content=(served.content or "") + added.text)
        if echoed.calls:
            return msgspec.structs.replace(served, calls=served.calls[: len(echoed.calls)])
        return msgspec.structs.replace(served, content=echoed.content, reasoning=served.reasoning if echoed.text else echoed.reasoning)

    async def _generation_prompt(self, frame: HistoryFrame, n: int, reply: PlacedReply, stored: Mapping[str, Tokens]) -> bytes | None:
        """Find the generation prompt after which reply `n` was sampled; `None` if it cannot be identified."""
        prompt = stored[reply.turn.id].delta
        if len(prompt) < frame.longest:  # most of its prompt is stored with another turn
            prompt = (await self._prefixes.get(self._session, reply.turn.id)).prefix.prompt
        before = evidence.split_preceding_hash(evidence.preceding_hash(self._conversation, reply.place)).message
        same_message = before == evidence.split_preceding_hash(reply.turn.before).message
        return frame.generation_prompt(n, prompt, same_message=same_message)

    async def _same_prefix(self, prompt: bytes, last: PlacedReply) -> Turn | None:
        """Return the last reply's turn if the prompt still begins with its exact prefix after the edit; otherwise `None`."""
        if (self._call.media or last.turn.media) and not self._has_media_of(last):
            return None  # another image may have the same ids
        if last != evidence.whole_reply(last.place, last.turn):
            return None
        cached = await self._prefixes.get(self._session, last.turn.id)
        return last.turn if prompt.startswith(cached.prefix.ids) else None

    def _has_media_of(self, last: PlacedReply) -> bool:
        """Whether the messages before a reply have the media of its turn's prompt."""
        here = [(part.modality, part.sha256) for part in self._call.media_parts(last.place)]
        return here == [(medium.modality, medium.sha256) for medium in last.turn.media]

    def _request(self, at: int, prefix: bytes = b"", reply_start: int = 0, words: str = "") -> TailRequest:
        call = self._call
        raw, session = call.safe_messages(), self._session
        return TailRequest(
            call.model, call.args, self._conversation, raw, at, prefix=prefix, reply_start=reply_start, session=session, words=words
        )


class _Layout(NamedTuple):
    """Replies and what the template writes around them.

    Attributes:
        request: the request whose rendering it is.
        frame: the frame of the replies.
        pieces: the ids before each reply, since the preceding one, and the ids after the last (packed).
        openers: the ids that follow each piece and precede the reply.
        replies: the replies that are placed; their ranges show which tokens of each, and how many.
        reason: why other replies are not placed; `""` if all are.
        default_reason: why the history is rendered again, if nothing else was found.
    """

    request: TailRequest
    frame: HistoryFrame
    pieces: Sequence[bytes]
    openers: Sequence[bytes]
    replies: Sequence[PlacedReply]
    reason: str
    default_reason: str


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


def _received_tokens(reply: PlacedReply, stored: Mapping[str, Tokens]) -> bytes:
    """Return the packed ids of a whole reply, as far as the client received it."""
    completion = stored[reply.turn.id].completion
    return ids.head(completion, reply.offset + reply.end - reply.start) if not CUT_OFF.isdisjoint(reply.turn.marks) else completion


def _logprobs_from(offset: int, packed: bytes) -> bytes:
    """Return packed log probabilities without those of the first `offset` tokens."""
    return ids.pack_logprobs(ids.unpack_logprobs(packed)[offset:]) if offset else packed


def _except(names: AbstractSet[str], hits: Sequence[Hit]) -> Sequence[Hit]:
    """Return hits without those of the turns with these ids."""
    return [hit for hit in hits if hit.turn.id not in names] if names else hits


def _looked_up(keys: Sequence[bytes], hits: Sequence[list[Hit]]) -> _Known:
    """Map keys to hits for the look-up at the beginning of the call, which ended at the first known place (`store.base`)."""
    ended = next((i for i, key in enumerate(keys) if key[:1] == b"c" and hits[i]), len(keys))
    return dict(zip(keys[: ended + 1], hits[: ended + 1], strict=True))


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

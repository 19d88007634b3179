"""Plan: from a request and what was recorded to the exact prompt that is sent.

The core says which turn a history continues (`core.match`); here the ids are fetched and joined. Whatever cannot be
proven ends in a plain plan with the reason: the engine renders, the turn starts a new lineage, nothing is guessed.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tokencache.core import evidence, ids
from tokencache.core.chain import chain_key, lookup_keys
from tokencache.core.evidence import PlacedReply
from tokencache.core.match import Hit, Match, match
from tokencache.core.messages import Message
from tokencache.core.reasons import Reason
from tokencache.core.splice import REPLACED, fill, join, junction
from tokencache.core.turn import Anchor, MatchKind, Tokens, Turn
from tokencache.core.verdict import DeliveredPrefix, is_unique
from tokencache.dialects.chat.request import ChatCall
from tokencache.engine.drivers.base import ExactPrompt, LastReply
from tokencache.engine.model import Model
from tokencache.engine.template.edited import HistoryFrame
from tokencache.engine.template.learned import TailRefusedError
from tokencache.engine.template.renderer import RenderError
from tokencache.engine.template.shapes import TailRequest
from tokencache.errors import passing_cause
from tokencache.proxy import partial_reply as interrupts
from tokencache.proxy.client_ids import ReturnedIds, prove
from tokencache.proxy.prefix_cache import CachedPrefix, PrefixCache
from tokencache.store.base import Store

log = logging.getLogger(__name__)

EDITED = frozenset({Reason.PAST_CHANGES, Reason.NEW_MESSAGES_REACH_BACK, Reason.TAIL_NOT_PROVEN})
"""Why no tail can be put behind a history that is what it was: the template writes the history otherwise now, as if it had been edited."""
FIRST_REPLIES = 2
"""Replies that are looked up when a call begins; the others only if none of these is known."""


_Known = Mapping[bytes, Sequence[Hit]]
"""What the store found under the keys that were looked up."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a call will be sent.

    `prompt` are the exact packed ids, `fragment` the same as JSON in pieces; both `None` where the engine renders. They are the `whole`
    prompt, or its beginning up to the end of the last reply, where the engine adds the tail. `head` is that reply. `parent`,
    `origin`, `anchors` and `forgiven` are those of the turn to be recorded. `near` is a turn whose prefix the prompt
    shares a beginning with: `shared` tokens, or if that is 0 as many as will be found. They are not stored again.
    `heard` is how many of the request's messages are those of the parent's request; behind them stands `served`, its reply. `foreign`
    names the harness's own assistant's messages among them (`core.evidence`). `client` are the places of replies that stand in ids which
    the client sent back and which are not recorded here (`client_ids`).
    """

    match: MatchKind
    reason: str = ""
    prompt: bytes | None = None
    fragment: ids.Pieces | None = None
    whole: bool = True
    head: LastReply | None = None
    parent: str | None = None
    origin: str | None = None
    anchors: tuple[Anchor, ...] = ()
    forgiven: tuple[str, ...] = ()
    near: str | None = None
    shared: int = 0
    heard: int = 0
    served: Message | None = None
    foreign: bytes = b""
    client: tuple[int, ...] = ()

    @property
    def exact(self) -> ExactPrompt | None:
        """The exact prompt, for a driver to say; `None` where the engine renders."""
        if self.prompt is None or self.fragment is None or self.head is None:
            return None
        return ExactPrompt(self.prompt, self.fragment, self.head)

    @property
    def sent(self) -> ids.Pieces:
        """The whole prompt as JSON, as the engine is to echo it; empty where that is not known."""
        return self.fragment if self.fragment is not None and self.whole else ()


class Planner:
    """Plans calls on one store."""

    def __init__(self, store: Store, prefixes: PrefixCache) -> None:
        self._store = store
        self._prefixes = prefixes

    async def plan(
        self, session: str, call: ChatCall, keys: Sequence[bytes], hits: Sequence[list[Hit]], model: Model, *, first: bool = False
    ) -> Plan:
        """Plan a call; `hits` are what the store found under `keys`, `first`: before it nobody called in its session.

        Raises:
            StoreError: the store failed in between.
            EngineError: the engine cannot be reached, or does not answer now: what is continued is proven later, or elsewhere.
        """
        if call.plain or call.conversation is None:
            return Plan(match="plain", reason=call.plain)
        returned = ReturnedIds(call)
        known = _looked_up(keys, hits)
        found = match(call.conversation, {}, call.leniency) if first else await self._match(session, call, known, returned)
        if found.kind == "root" or (found.kind == "plain" and returned.last < 0):
            return Plan(match=found.kind, reason=found.reason)
        blocked = await self._blocked(call, model)
        if blocked:
            return Plan(match="plain", reason=blocked)
        try:
            plan = await self._by_client(session, call, found, returned, model)
            if plan is None:
                plan = await self._proven(session, call, found, known, model)
        except (TailRefusedError, RenderError) as why:
            if (away := passing_cause(why)) is not None:
                raise away from why
            log.debug("session %s: rendered plainly: %s", session, why)
            return Plan(match="plain", reason=str(why) if isinstance(why, TailRefusedError) else Reason.RENDER_ERROR)
        unsayable = self._unsayable(call, plan, model)
        return Plan(match="plain", reason=unsayable) if unsayable else plan

    async def _recorded(self, session: str, found: Match, returned: ReturnedIds) -> bool:
        """Whether the last ids that came back are those of a recorded turn, or stand before what was found; true if none came back.

        Of a recorded turn the words decide: ids do not make up for others.
        """
        last = returned.last
        if last < 0 or any(place > last for place, _ in found.anchors):
            return True
        if found.parent is not None and found.at - 1 > last:
            return True
        if found.parent is not None and found.at - 1 == last and returned.says(last, await self._prefixes.get(session, found.parent.id)):
            return True  # without reading any id
        named = returned.get(last)
        return named is not None and any(named.names(turn) for turn in (await self._turns(session)).values())

    async def _by_client(self, session: str, call: ChatCall, found: Match, returned: ReturnedIds, model: Model) -> Plan | None:
        """Begin the prompt with the ids that the client sent back, if they are not recorded here; `None` where the record decides.

        Raises:
            TailRefusedError: they are not proven, and nothing recorded is known for certain.
            RenderError: the engine does not answer now.
        """
        if await self._recorded(session, found, returned):
            return None
        try:
            proven = await prove(session, call, returned, model)
        except (TailRefusedError, RenderError) as why:
            if passing_cause(why) is not None:
                raise
            log.debug("session %s: the client's ids are not proven: %s", session, why)
            if found.kind == "plain":
                raise TailRefusedError(Reason.CLIENT_IDS_UNPROVEN) from why
            return None
        return Plan(
            match="resplice",
            reason=Reason.CLIENT_IDS,
            prompt=proven.ids,
            fragment=ids.extended((), proven.ids),
            head=LastReply(proven.places[-1], proven.start, proven.end),
            client=proven.places,
        )

    @staticmethod
    def _unsayable(call: ChatCall, plan: Plan, model: Model) -> str:
        """Say why a prompt cannot be handed to this engine; `""` if it can, or if there is none."""
        if plan.prompt is None or plan.head is None:
            return ""
        if 0 < model.capability.max_model_len <= ids.count(plan.prompt):
            return Reason.CONTEXT_FULL  # with the template's own stripping it may still fit
        return model.driver.cannot_supply(call, plan.head)

    async def _proven(self, session: str, call: ChatCall, found: Match, known: _Known, model: Model) -> Plan:
        """Splice what was found, once it is proven how much of its parent the harness has heard."""
        cut = None
        if found.parent is not None and found.delivered is not None:
            cut = await self._cut(session, call, found.parent, found.delivered, model)
            if cut is None:
                found = await self._without(session, call, found.parent, known)
        if found.kind == "plain":
            return Plan(match="plain", reason=found.reason)
        renders = model.capability.tokenizes
        if found.parent is not None and not found.anchors and not (renders and _may_change(found.parent, call.messages, found.at)):
            try:
                return await self._continue(session, call, found, model, cut)
            except TailRefusedError as why:
                if not renders or str(why) not in EDITED:
                    raise
                found = found._replace(reason=str(why))
        if not renders:
            return Plan(match="plain", reason=Reason.NO_RENDERING)
        return await self._resplice(session, call, found, model, cut)

    @staticmethod
    async def _blocked(call: ChatCall, model: Model) -> str:
        """Say why nothing can be spliced for this model or these arguments, if so."""
        if model.capability.level != "exact":
            return Reason.RECORD_ONLY
        if not call.leniency.off.isdisjoint(call.left_out):
            return Reason.SWITCHED_OFF  # the codec left something out by a rule that is not wanted here
        if not model.capability.tokenizes:
            return ""  # the engine adds the tail, in its own rendering
        return "" if await model.renders_alike(call.args) else Reason.RENDERINGS_DIFFER

    async def _match(self, session: str, call: ChatCall, known: _Known, returned: ReturnedIds) -> Match:
        """Match a call's history. What that turns out to need is read from the store, each thing once."""
        assert call.conversation is not None  # noqa: S101 - the caller looked
        hits, turns = dict(known), None
        while True:
            found = match(call.conversation, hits, call.leniency, call.handles, turns, echoed=returned)
            # If the last replies are not known, or the deepest known place was not the model's reply after all: look at the rest.
            looked = not hits or (found.parent is not None and chain_key(call.conversation.chain[found.at]) in hits)
            rest = () if looked else lookup_keys(call.conversation, handles=call.handles)
            missing = [key for key in rest if key not in hits]
            if not missing and found.turns_wanted and turns is None:
                turns = await self._turns(session)
                continue
            missing = missing or [key for key in found.unsure if key not in hits]
            if not missing:
                return found
            hits |= zip(missing, await self._store.find(session, missing), strict=True)

    async def _turns(self, session: str) -> dict[str, Turn]:
        return {turn.id: turn for turn in await self._store.turns(session)}

    async def _cut(self, session: str, call: ChatCall, turn: Turn, part: DeliveredPrefix, model: Model) -> bytes | None:
        """Cut an aborted turn's prefix (packed ids) where its harness left; `None` if no token is proven to end there.

        Raises:
            RenderError: the engine cannot read its own tokens.
        """
        prefix = (await self._prefixes.get(session, turn.id)).prefix.ids
        completion = ids.tail(prefix, turn.prompt_tokens)
        n = await interrupts.kept(part, completion, model.stop_ids, lambda packed: model.renderer.read(call.model, packed))
        return ids.head(prefix, turn.prompt_tokens + n) if n is not None else None

    async def _without(self, session: str, call: ChatCall, turn: Turn, known: _Known) -> Match:
        """Match again without an aborted turn, of which no token ends where its harness left: its words are text like any other.

        Raises:
            TailRefusedError: a reply before it is a beginning, too.
        """
        others = {key: [hit for hit in hits if hit.turn.id != turn.id] for key, hits in known.items()}
        found = await self._match(session, call, others, ReturnedIds(call))
        if found.delivered is not None:
            raise TailRefusedError(Reason.INTERRUPT_INSIDE_TOKEN)
        return found._replace(reason=Reason.INTERRUPT_INSIDE_TOKEN)

    async def _continue(self, session: str, call: ChatCall, found: Match, model: Model, cut: bytes | None) -> Plan:
        parent = found.parent
        assert parent is not None  # noqa: S101 - the caller looked
        held = await self._prefixes.get(session, parent.id)
        base = held.prefix.ids if cut is None else cut
        head = await self._head(session, found.at - 1, parent, base, model)
        if not model.capability.tokenizes:
            return self._open_ended(found, held, head, cut)
        tail = await model.tails.tail(_ask(session, call, found.at, ids.head(base, parent.prompt_tokens)))
        where = junction(base, tail, model.stop_ids)
        added = ids.tail(tail, where.skip)
        if where == REPLACED or len(base) < len(held.prefix.ids):
            prompt = join(base, tail, where)
            kept = ids.count(base) - where.drop
            last = PlacedReply(found.at - 1, parent, parent.prompt_tokens, kept)
            return Plan(
                match="resplice",
                reason=Reason.OTHER_STOP if where == REPLACED else Reason.INTERRUPTED,
                prompt=prompt,
                fragment=ids.extended((), prompt),
                head=head._replace(end=kept),
                origin=parent.id,
                anchors=(*[reply.anchor for reply in await self._standing(session, parent)], last.anchor),
                forgiven=found.forgiven,
                near=parent.id,
                shared=kept,
            )
        return Plan(
            match=found.kind,
            reason=found.reason,
            prompt=base + added,
            fragment=ids.extended(held.fragment, added),
            head=head,
            parent=parent.id,
            forgiven=found.forgiven,
            near=parent.id,
            shared=ids.count(base),
            heard=found.at - 1,
            served=parent.served,
            foreign=parent.foreign,
        )

    @staticmethod
    def _open_ended(found: Match, held: CachedPrefix, head: LastReply, cut: bytes | None) -> Plan:
        """Continue a turn on an engine that adds the tail itself, and whose rendering cannot be asked for."""
        assert found.parent is not None  # noqa: S101 - the caller looked
        if cut is not None:
            return Plan(match="plain", reason=Reason.NO_RENDERING)
        return Plan(
            match=found.kind,
            reason=Reason.TAIL_BY_ENGINE,
            prompt=held.prefix.ids,
            fragment=held.fragment,
            whole=False,
            head=head,
            parent=found.parent.id,
            forgiven=found.forgiven,
            near=found.parent.id,
            shared=head.end,
            heard=found.at - 1,
            served=found.parent.served,
            foreign=found.parent.foreign,
        )

    async def _head(self, session: str, place: int, turn: Turn, base: bytes, model: Model) -> LastReply:
        """Say where the reply stands with which a prefix ends."""
        logprobs = b""
        if model.driver.sends_logprobs:
            logprobs = (await self._store.tokens(session, [turn.id]))[turn.id].logprobs
        return LastReply(place, turn.prompt_tokens, ids.count(base), logprobs)

    async def _standing(self, session: str, turn: Turn) -> tuple[PlacedReply, ...]:
        """List the replies that stand in a turn's prompt.

        Raises:
            TailRefusedError: the records do not say where.
        """
        if turn.parent is None and not turn.anchors:
            return ()
        known = evidence.placed_replies(turn, await self._turns(session))
        if known is None:
            raise TailRefusedError(Reason.UNPLACED_REPLIES)
        return known

    async def _resplice(self, session: str, call: ChatCall, found: Match, model: Model, cut: bytes | None) -> Plan:
        """Render afresh, with every recognised reply standing in its exact ids."""
        replies = [evidence.whole_reply(place, hit.turn) for place, hit in found.anchors]
        if found.parent is not None:
            last = evidence.whole_reply(found.at - 1, found.parent)
            last = last if cut is None else msgspec.structs.replace(last, end=ids.count(cut))
            replies = [*await self._standing(session, found.parent), last, *replies]
        stored = await self._store.tokens(session, [reply.turn.id for reply in replies])
        while replies:
            frame = await model.edited_histories.frame(_ask(session, call, replies[-1].place + 1), [reply.place for reply in replies])
            openers = [await self._opener(session, call, (frame, n), reply, stored) for n, reply in enumerate(replies)]
            if None not in openers:
                break
            replies = [reply for reply, opener in zip(replies, openers, strict=True) if opener is not None]
            found = found._replace(reason=Reason.OPENER_UNKNOWN)
        else:
            raise TailRefusedError(Reason.OPENER_UNKNOWN)
        said = [ids.head(stored[reply.turn.id].completion, reply.end - reply.start) for reply in replies]
        opened = [opener or b"" for opener in openers]
        prompt, spans = fill(frame.pieces, opened, said, model.stop_ids)
        replies = [msgspec.structs.replace(reply, start=start, end=end) for reply, (start, end) in zip(replies, spans, strict=True)]
        last = replies[-1]
        parent = await self._gone_on_from(session, prompt, last)
        near = parent or found.parent or last.turn
        plan = Plan(
            match="resplice",
            reason=found.reason or Reason.PAST_CHANGES,
            prompt=prompt,
            fragment=ids.extended((), prompt),
            head=LastReply(last.place, last.start, last.end, stored[last.turn.id].logprobs),
            origin=near.id,
            anchors=tuple(reply.anchor for reply in replies),
            forgiven=found.forgiven,
            near=near.id,
        )
        if parent is None:
            return plan
        reason = found.reason if found.reason == Reason.OPENER_UNKNOWN else Reason.RENDERED_ALIKE
        follows = msgspec.structs.replace(plan, match="continue", reason=reason, parent=parent.id, origin=None, shared=last.end)
        if parent is found.parent and not found.anchors and reason == Reason.RENDERED_ALIKE:  # nothing was edited: it only had to be proven
            return msgspec.structs.replace(
                follows, match=found.kind, reason="", anchors=(), heard=found.at - 1, served=parent.served, foreign=parent.foreign
            )
        continued = any(hit.continued for _, hit in found.anchors if hit.turn.id == parent.id)
        return msgspec.structs.replace(follows, match="branch") if continued else follows

    async def _opener(
        self, session: str, call: ChatCall, place: tuple[HistoryFrame, int], reply: PlacedReply, stored: Mapping[str, Tokens]
    ) -> bytes | None:
        """Find the generation prompt that a reply was sampled behind; `None` if it is not known to be one."""
        frame, n = place
        assert call.conversation is not None  # noqa: S101 - it was matched
        opened = stored[reply.turn.id].delta
        if len(opened) < frame.longest:  # most of its prompt is stored with another turn
            opened = (await self._prefixes.get(session, reply.turn.id)).prefix.prompt
        before = evidence.split_preceding_hash(evidence.preceding_hash(call.conversation, reply.place)).message
        return frame.generation_prompt(n, opened, same_message=before == evidence.split_preceding_hash(reply.turn.before).message)

    async def _gone_on_from(self, session: str, prompt: bytes, last: PlacedReply) -> Turn | None:
        """Find the turn whose exact ids a prompt goes on from, though its context was edited: the template renders both alike."""
        if last != evidence.whole_reply(last.place, last.turn):
            return None
        held = await self._prefixes.get(session, last.turn.id)
        return last.turn if prompt.startswith(held.prefix.ids) else None


def _looked_up(keys: Sequence[bytes], hits: Sequence[list[Hit]]) -> _Known:
    """What was found when the call began: the search ended at the first known place (`store.base`)."""
    ended = next((i for i, key in enumerate(keys) if key[:1] == b"c" and hits[i]), len(keys))
    return dict(zip(keys[: ended + 1], hits[: ended + 1], strict=True))


def _may_change(parent: Turn, messages: Sequence[Message], at: int) -> bool:
    """Whether a template may write the history otherwise now, with the parent's reply and what stands behind it (from `at` on).

    Many show the thinking of assistant's messages behind the last question only. The model's own stand as they were sampled; of the
    harness's own it is to be proven that they stand as they did. And a tool's result that answered no call may answer one of these.
    """
    if parent.foreign and any(message.role != "tool" for message in messages[at:]):
        return True
    named = {call.id for message in messages[at - 1 :] for call in message.calls if not is_unique(call.id)}
    return bool(named) and not named.isdisjoint(_unasked(messages[: at - 1]))


def _unasked(messages: Sequence[Message]) -> Iterator[str]:
    """The ids that tools' results name though no call before them has that id."""
    asked = set[str]()
    for message in messages:
        asked.update(call.id for call in message.calls)
        if message.answers is not None and message.answers not in asked:
            yield message.answers


def _ask(session: str, call: ChatCall, at: int, opened: bytes | None = None) -> TailRequest:
    assert call.conversation is not None  # noqa: S101 - it was matched
    return TailRequest(call.model, call.args, call.conversation, call.safe_messages(), at, opened, session)


def keys_wanted(call: ChatCall) -> list[bytes]:
    """The keys to look up first for a call; none if its history is not to be matched."""
    return lookup_keys(call.conversation, FIRST_REPLIES, call.handles) if call.conversation is not None and not call.plain else []

"""Plan: from a request and what was recorded to the exact prompt that is sent.

The core says which turn a history continues (`core.match`); here the ids are fetched and joined. Whatever cannot be
proven ends in a plain plan with the reason: the engine renders, the turn starts a new lineage, nothing is guessed.
"""

import logging
from collections.abc import Sequence

import msgspec

from tokencache.core import ids
from tokencache.core.canonical import Message
from tokencache.core.interrupt import RULE, Heard
from tokencache.core.keys import wanted
from tokencache.core.match import Hit, Match, match
from tokencache.core.splice import REPLACED, Boundary, boundary, join
from tokencache.core.turn import Anchor, MatchKind, Turn
from tokencache.dialects.chat.call import ChatCall
from tokencache.engines.driver import Exact, Head
from tokencache.engines.engine import Model
from tokencache.errors import passing_cause
from tokencache.proxy import interrupts
from tokencache.proxy.prefixes import Held, Prefixes
from tokencache.render.renderer import RenderError
from tokencache.render.shapes import TailAsk
from tokencache.render.tails import TailRefusedError
from tokencache.store.contract import Store

log = logging.getLogger(__name__)

INSIDE_TOKEN = "interrupt-inside-token"  # noqa: S105 - a reason
TAIL_BY_ENGINE = "tail-by-engine"
"""The engine put the tail behind the history, and nobody proved it: what stands there is as good as the engine is."""
UNRENDERED = "no-rendering"
"""The engine renders nothing for us, and without that nothing can be put behind an edited context."""
FIRST_REPLIES = 2
"""Replies that are looked up when a call begins; the others only if none of these is known."""


_Known = tuple[Sequence[bytes], Sequence[list[Hit]]]
"""Keys, and what the store found under each."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a call will be sent.

    `prompt` are the exact packed ids, `fragment` the same as JSON in pieces; both `None` where the engine renders. They are the `whole`
    prompt, or its beginning up to the end of the last reply, where the engine adds the tail. `head` is that reply. `parent`,
    `origin`, `anchors` and `forgiven` are those of the turn to be recorded. `near` is a turn whose prefix the prompt
    shares a beginning with: `shared` tokens, or if that is 0 as many as will be found. They are not stored again.
    `heard` is how many of the request's messages are those of the parent's request; behind them stands `served`, its reply.
    """

    match: MatchKind
    reason: str = ""
    prompt: bytes | None = None
    fragment: ids.Pieces | None = None
    whole: bool = True
    head: Head | None = None
    parent: str | None = None
    origin: str | None = None
    anchors: tuple[Anchor, ...] = ()
    forgiven: tuple[str, ...] = ()
    near: str | None = None
    shared: int = 0
    heard: int = 0
    served: Message | None = None

    @property
    def exact(self) -> Exact | None:
        """The exact prompt, for a driver to say; `None` where the engine renders."""
        if self.prompt is None or self.fragment is None or self.head is None:
            return None
        return Exact(self.prompt, self.fragment, self.head)

    @property
    def sent(self) -> ids.Pieces:
        """The whole prompt as JSON, as the engine is to echo it; empty where that is not known."""
        return self.fragment if self.fragment is not None and self.whole else ()


class Planner:
    """Plans calls on one store."""

    def __init__(self, store: Store, prefixes: Prefixes) -> None:
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
        found = match(call.conversation, {}, call.leniency) if first else await self._match(session, call, keys, hits)
        if found.kind in {"root", "plain"}:
            return Plan(match=found.kind, reason=found.reason)
        blocked = await self._blocked(call, model)
        if blocked:
            return Plan(match="plain", reason=blocked)
        try:
            plan = await self._proven(session, call, found, (keys, hits), model)
        except (TailRefusedError, RenderError) as why:
            if (away := passing_cause(why)) is not None:
                raise away from why
            log.debug("session %s: rendered plainly: %s", session, why)
            return Plan(match="plain", reason=str(why) if isinstance(why, TailRefusedError) else "render-error")
        unsayable = self._unsayable(call, plan, model)
        return Plan(match="plain", reason=unsayable) if unsayable else plan

    @staticmethod
    def _unsayable(call: ChatCall, plan: Plan, model: Model) -> str:
        """Say why a prompt cannot be handed to this engine; `""` if it can, or if there is none."""
        if plan.prompt is None or plan.head is None:
            return ""
        if 0 < model.capability.max_model_len <= ids.count(plan.prompt):
            return "context-full"  # with the template's own stripping it may still fit
        return model.driver.unsayable(call, plan.head)

    async def _proven(self, session: str, call: ChatCall, found: Match, known: _Known, model: Model) -> Plan:
        """Splice what was found, once it is proven how much of its parent the harness has heard."""
        cut = None
        if found.parent is not None and found.heard is not None:
            cut = await self._cut(session, call, found.parent, found.heard, model)
            if cut is None:
                found = await self._without(session, call, found.parent, known)
        if found.kind == "plain":
            return Plan(match="plain", reason=found.reason)
        if found.parent is not None and not found.anchors:
            return await self._continue(session, call, found, model, cut)
        if not model.capability.tokenizes:
            return Plan(match="plain", reason=UNRENDERED)
        return await self._resplice(session, call, found, model, cut)

    @staticmethod
    async def _blocked(call: ChatCall, model: Model) -> str:
        """Say why nothing can be spliced for this model or these arguments, if so."""
        if model.capability.level != "exact":
            return "record-only"
        if not call.leniency.off.isdisjoint(call.left_out):
            return "switched-off"  # the codec left something out by a rule that is not wanted here
        if not model.capability.tokenizes:
            return ""  # the engine adds the tail, in its own rendering
        return "" if await model.renders_alike(call.args) else "renderings-differ"

    async def _match(self, session: str, call: ChatCall, keys: Sequence[bytes], hits: Sequence[list[Hit]]) -> Match:
        assert call.conversation is not None  # noqa: S101 - the caller looked
        by_key = dict(zip(keys, hits, strict=True))
        found = match(call.conversation, by_key, call.leniency, call.handles)
        if found.parent is None and keys:
            # The last replies are not known, or the deepest known place was not the model's reply after all: look at the rest.
            ended = next((i for i, key in enumerate(keys) if key[:1] == b"c" and by_key[key]), len(keys) - 1)
            found = await self._look(session, call, by_key, wanted(call.conversation, handles=call.handles)[ended + 1 :]) or found
        return await self._look(session, call, by_key, found.unsure) or found

    async def _look(self, session: str, call: ChatCall, by_key: dict[bytes, list[Hit]], more: Sequence[bytes]) -> Match | None:
        """Match again with what is found under more keys; `None` if there are none."""
        if not more:
            return None
        assert call.conversation is not None  # noqa: S101 - the caller looked
        by_key |= zip(more, await self._store.find(session, more), strict=True)
        return match(call.conversation, by_key, call.leniency, call.handles)

    async def _cut(self, session: str, call: ChatCall, turn: Turn, part: Heard, model: Model) -> bytes | None:
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
        keys, hits = known
        found = await self._match(session, call, keys, [[hit for hit in one if hit.turn.id != turn.id] for one in hits])
        if found.heard is not None:
            raise TailRefusedError(INSIDE_TOKEN)
        return found._replace(reason=INSIDE_TOKEN)

    async def _continue(self, session: str, call: ChatCall, found: Match, model: Model, cut: bytes | None) -> Plan:
        parent = found.parent
        assert parent is not None  # noqa: S101 - the caller looked
        held = await self._prefixes.get(session, parent.id)
        base = held.prefix.ids if cut is None else cut
        head = await self._head(session, found.at - 1, parent, base, model)
        if not model.capability.tokenizes:
            return self._open_ended(found, held, head, cut)
        tail = await model.tails.tail(_ask(call, found.at, len(call.raw_messages)))
        where = boundary(base, tail, model.stop_ids)
        added = ids.tail(tail, where.skip)
        if where == REPLACED or len(base) < len(held.prefix.ids):
            prompt = join(base, tail, where)
            kept = ids.count(base) - where.drop
            return Plan(
                match="resplice",
                reason="other-stop" if where == REPLACED else RULE,
                prompt=prompt,
                fragment=ids.extended((), prompt),
                head=head._replace(end=kept),
                origin=parent.id,
                anchors=(Anchor(parent.id, parent.prompt_tokens, kept),),
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
        )

    @staticmethod
    def _open_ended(found: Match, held: Held, head: Head, cut: bytes | None) -> Plan:
        """Continue a turn on an engine that adds the tail itself, and whose rendering cannot be asked for."""
        assert found.parent is not None  # noqa: S101 - the caller looked
        if cut is not None:
            return Plan(match="plain", reason=UNRENDERED)
        return Plan(
            match=found.kind,
            reason=TAIL_BY_ENGINE,
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
        )

    async def _head(self, session: str, place: int, turn: Turn, base: bytes, model: Model) -> Head:
        """Say where the reply stands with which a prefix ends."""
        logprobs = b""
        if model.driver.says_logprobs:
            logprobs = (await self._store.tokens(session, [turn.id]))[turn.id].logprobs
        return Head(place, turn.prompt_tokens, ids.count(base), logprobs)

    async def _resplice(self, session: str, call: ChatCall, found: Match, model: Model, cut: bytes | None) -> Plan:
        """Render afresh, with every recognised reply standing in its exact ids."""
        places = [i for i, _ in found.anchors]
        if any(i not in places and call.messages[i].role == "assistant" for i in range(found.at, places[-1])):
            # How a template writes a reply may depend on what follows it, and there a part is rendered without that.
            raise TailRefusedError("foreign-reply-between")
        stored = await self._store.tokens(session, [turn.id for _, turn in found.anchors])
        if found.parent is not None:
            prompt, at = cut or (await self._prefixes.get(session, found.parent.id)).prefix.ids, found.at
        else:
            prompt, at = await model.renderer.render(call.model, call.safe_messages()[: places[0]], call.args, generation=True), places[0]
        anchors: list[Anchor] = []
        for place, turn in found.anchors:
            if at < place or (found.parent is not None and not anchors):
                prompt = await self._behind(call, prompt, at, place, model=model, anchors=anchors)
            elif anchors:
                raise TailRefusedError("replies-without-anything-between")
            start = ids.count(prompt)
            prompt += stored[turn.id].completion
            anchors.append(Anchor(turn.id, start, ids.count(prompt)))
            at = place + 1
        place, last = found.anchors[-1]
        prompt = await self._behind(call, prompt, at, len(call.raw_messages), model=model, anchors=anchors)
        head = Head(place, anchors[-1].start, anchors[-1].end, stored[last.id].logprobs)
        near = found.parent or last
        return Plan(
            match="resplice",
            reason=found.reason,
            prompt=prompt,
            fragment=ids.extended((), prompt),
            head=head,
            origin=near.id,
            anchors=tuple(anchors),
            forgiven=found.forgiven,
            near=near.id,
        )

    @staticmethod
    async def _behind(call: ChatCall, prompt: bytes, at: int, until: int, *, model: Model, anchors: list[Anchor]) -> bytes:
        """Join a prompt that ends with the reply `messages[at - 1]` with what the template puts behind that reply.

        A stop id of that reply that is not the template's is replaced, and its anchor ends before it.
        """
        tail = await model.tails.tail(_ask(call, at, until))
        where: Boundary = boundary(prompt, tail, model.stop_ids)
        if anchors:
            anchors[-1] = msgspec.structs.replace(anchors[-1], end=anchors[-1].end - where.drop)
        return join(prompt, tail, where)


def _ask(call: ChatCall, at: int, until: int) -> TailAsk:
    assert call.conversation is not None  # noqa: S101 - it was matched
    return TailAsk(call.model, call.args, call.conversation, call.safe_messages(), at, until)


def keys_wanted(call: ChatCall) -> list[bytes]:
    """The keys to look up first for a call; none if its history is not to be matched."""
    return wanted(call.conversation, FIRST_REPLIES, call.handles) if call.conversation is not None and not call.plain else []

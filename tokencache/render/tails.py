"""Tails: the ids that the template puts behind a history, found without rendering the history.

Only the new messages are rendered, in a small conversation that ends like the real one with a sentinel in the
assistant's place (`boundary`). That the small conversation's tail is the real one's is not assumed but *proven*, once
for every **shape** (`shapes`), with full renderings of the first real conversation that has it:

1. The full conversation with a sentinel in the last reply shows where that reply ends; what stands behind is a suffix
   of the full rendering with the real reply.
2. Other words in the new messages change nothing in front of that place. vLLM 0.32 moves later system messages to the
   front where a developer's are there, and DeepSeek's template does so always: their text would be missing from a
   spliced prompt, and no suffix would tell.
3. What stood before the model's first words is still what the full rendering begins with. A template that moves its
   tools, or a hint, to the last user message changes the past with every new message; what was sampled behind the old
   past is then no prefix of what the template renders now.
4. The small conversation gives the very same ids.

Four things can come of it, and every 64th tail of a shape is compared with full renderings again:

`local`    all of it holds, and the local tokenizer, if there is one, gives these ids: it makes the small renderings
`small`    all of it holds: the engine's small renderings are trusted for this shape
`full`     all but the last holds (DeepSeek-V3's second round of tool results): this shape is rendered in full each time
refused    nothing is spliced, the call is rendered plainly, and the reason is recorded; every 8th call tries again

What was learned is keyed by how many stop ids are known: with a new one everything is learned anew.
"""

import asyncio
import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

import msgspec

from tokencache.core import ids
from tokencache.render.boundary import ASK, SENTINEL, Boundary, BoundaryUnknownError, learn, reworded, stand_in
from tokencache.render.renderer import Renderer, RenderError, TemplateRefusedError
from tokencache.render.shapes import MANY, Shape, TailAsk, shape_of

log = logging.getLogger(__name__)
_T = TypeVar("_T")

RECHECK_EVERY, MOST_TRUST = 64, 16
"""After so many uses a proven shape is looked at again, by a rendering of a whole history; each time that it was right, after twice as
many, up to 16 times as many: at 141 KB a rendering costs as much as five calls."""
RETRY_EVERY = 8
MOST_KEPT = 4096
"""How many shapes, and how many boundaries, are remembered: template arguments come from harnesses and may be all new."""


class TailRefusedError(Exception):
    """No tail can be proven; the words say why."""


class Tails:
    """Tails for one engine; what it learns of a template it keeps.

    `stop_ids` is the engine's set, which may still grow. `small` is a renderer for small conversations, used where it
    gives the same as `renderer`. `renders` counts renderings: those of a few messages by either, and those of whole histories.
    """

    def __init__(
        self, renderer: Renderer, stop_ids: AbstractSet[int], *, small: Renderer | None = None, recheck_every: int = RECHECK_EVERY
    ) -> None:
        self._renderer = renderer
        self._local = small
        self._warned = False
        self._stop_ids = stop_ids
        self._recheck_every = recheck_every
        self._boundaries: dict[tuple[object, ...], Boundary] = {}
        self._shapes: dict[tuple[object, ...], Shape] = {}
        self._learning = asyncio.Lock()
        self.renders = {"local": 0, "small": 0, "full": 0}

    async def tail(self, ask: TailAsk) -> bytes:
        """Find the packed ids that the template puts behind the reply: end of turn, new messages, generation prompt.

        Raises:
            TailRefusedError: it cannot be proven what they are.
        """
        shape = self._shape(ask)
        try:
            proofs = shape.proofs
            if not shape.way:
                async with shape.lock:  # thousands of rollouts begin alike: one proves, the others wait
                    if not shape.way:
                        return await self._first(ask, shape, waited=shape.proofs != proofs)
            return await self._again(ask, shape)
        except (BoundaryUnknownError, TemplateRefusedError) as why:
            raise TailRefusedError(_reason(why)) from why
        except RenderError as why:
            log.debug("no tail: %s", why)
            raise TailRefusedError("render-error") from why

    async def _first(self, ask: TailAsk, shape: Shape, *, waited: bool) -> bytes:
        """Prove a shape; what was refused is tried again, but not by every call."""
        if shape.refused:
            shape.uses += 0 if waited else 1
            if waited or shape.uses % RETRY_EVERY:
                raise BoundaryUnknownError(shape.refused)
        try:
            boundary = await self._boundary(ask)
            tail, way = await self._prove(ask, boundary)
        except (BoundaryUnknownError, TemplateRefusedError) as why:
            shape.refused = _reason(why)
            log.warning("tails of shape %s are refused: %s", shape, shape.refused)
            raise
        finally:
            shape.proofs += 1
        shape.way, shape.boundary, shape.refused, shape.uses = way, boundary, "", 0
        log.info("tails of shape %s: %s", shape, way)
        return tail

    async def _again(self, ask: TailAsk, shape: Shape) -> bytes:
        """Render a tail of a proven shape."""
        shape.uses += 1
        boundary, recheck = shape.boundary, shape.uses >= shape.trust * self._recheck_every
        shape.uses = 0 if recheck else shape.uses  # one of many at a time
        try:
            if ask.reply.calls and not boundary.in_calls:
                boundary = await self._boundary(ask)  # the calls stand behind the text, and these may have other names
            tail = await self._locally(ask, boundary) if shape.way == "local" else None
            if not tail:  # what is rendered in full is right by construction
                shown = await (self._small(ask, boundary) if shape.way == "small" else self._full(ask, boundary))
                tail = self._cut(shown, boundary)
            if recheck:
                await self._recheck(ask, boundary, (tail, shape.way))
                shape.trust = min(2 * shape.trust, MOST_TRUST)
        except BoundaryUnknownError as why:
            log.error("a tail of a trusted shape is not what it was (%s); the shape is proven anew: %s", why, shape)  # noqa: TRY400
            shape.forget()
            self._boundaries.clear()
            raise
        return tail

    async def _recheck(self, ask: TailAsk, boundary: Boundary, found: tuple[bytes, str]) -> None:
        tail, way = await self._prove(ask, boundary)
        if tail != found[0] and found[1] == "local":
            log.error("the local tokenizer is no longer used: it gave other ids than the engine")
            self._local = None
            for shape in self._shapes.values():
                shape.way = "" if shape.way == "local" else shape.way
        if tail != found[0] or found[1] not in {way, "local"}:  # this very conversation may not have been one for the local tokenizer
            raise BoundaryUnknownError("tail-not-proven")

    async def _boundary(self, ask: TailAsk) -> Boundary:
        if not self._stop_ids:
            raise BoundaryUnknownError("stop-ids-unknown")
        reply = ask.reply
        kind = (ask.model, ask.args.digest, min(len(reply.calls), MANY), bool(reply.text), len(self._stop_ids))
        named = (*kind, *(call.name for call in reply.calls))  # where only the text is shown, the calls may stand behind it
        async with self._learning:
            known = self._boundaries.get(kind) or self._boundaries.get(named)
            if known is None:
                known = await self._learn(ask)
                _keep(self._boundaries, kind if known.in_calls or not reply.calls else named, known)
        return known

    async def _learn(self, ask: TailAsk) -> Boundary:
        calls = bool(ask.reply.calls)
        self.renders["small"] += 2
        try:
            return await learn(self._renderer, ask.model, ask.args, ask.reply, self._stop_ids, in_text=not calls)
        except BoundaryUnknownError:
            if not calls:
                raise
        # A template that never shows calls may still show the text beside them.
        self.renders["small"] += 2
        return await learn(self._renderer, ask.model, ask.args, ask.reply, self._stop_ids, in_text=True)

    def _cut(self, shown: bytes, boundary: Boundary) -> bytes:
        """Cut a tail out of a rendering; refuse one that does not begin where a reply ends."""
        tail = boundary.cut(shown)
        if not tail:
            raise BoundaryUnknownError("empty-tail")
        if boundary.closing and not boundary.turn_end and ids.unpack(ids.head(tail, 1))[0] not in self._stop_ids:
            # What the model is thought to have written may hold an end of turn that is not known yet.
            raise BoundaryUnknownError("no-stop-id-behind-the-reply")
        return tail

    async def _prove(self, ask: TailAsk, boundary: Boundary) -> tuple[bytes, str]:
        """Find a tail and prove it, as the head of this module says; return it and the way that led to it."""
        real = await self._full(ask)
        shown = await self._full(ask, boundary)
        tail = self._cut(shown, boundary)
        if not real.endswith(tail):
            raise BoundaryUnknownError("tail-not-proven")
        other = msgspec.structs.replace(ask, raw=[*ask.raw[: ask.at], *map(reworded, ask.raw_new)])
        if boundary.before(await self._full(other, boundary)) != boundary.before(shown):
            raise BoundaryUnknownError("new-messages-reach-back")
        await self._prove_past(ask, real)
        local = await self._locally(ask, boundary)
        if local == tail:
            return tail, "local"
        try:
            small = boundary.cut(await self._small(ask, boundary))
        except (BoundaryUnknownError, TemplateRefusedError):
            return tail, "full"  # a template may refuse a conversation that small
        if small == tail and local is not None and not self._warned:
            self._warned = True
            log.warning("the local tokenizer gives other ids than the engine for some conversations: those are left to the engine")
        return tail, "small" if small == tail else "full"

    async def _locally(self, ask: TailAsk, boundary: Boundary) -> bytes | None:
        """Take a tail from the local tokenizer; `None` if it leaves this conversation to the engine, nothing if it hides the tail."""
        if self._local is None:
            return None
        try:
            return boundary.cut(await self._small(ask, boundary, self._local))
        except TemplateRefusedError:
            return None
        except BoundaryUnknownError:
            return b""

    async def _prove_past(self, ask: TailAsk, real: bytes) -> None:
        """Prove that what stood before the model's first words stands there still."""
        lead = ask.conversation.debuts["assistant"]
        if not lead:
            return
        self.renders["full"] += 1
        alone = await self._renderer.render(ask.model, ask.raw[:lead], ask.args, generation=False)
        # The last token may have grown together with what follows, where no special token parts them.
        if ids.common_head(alone, real) < ids.count(alone) - 1:
            raise BoundaryUnknownError("past-changes")

    async def _small(self, ask: TailAsk, boundary: Boundary, local: Renderer | None = None) -> bytes:
        self.renders["small" if local is None else "local"] += 1
        _unspoken(ask.raw_new)
        args = msgspec.structs.replace(ask.args, tools=None)
        reply = stand_in(ask.reply, SENTINEL, in_text=not boundary.in_calls)
        return await (local or self._renderer).render(ask.model, [ASK, reply, *ask.raw_new], args, generation=True)

    async def _full(self, ask: TailAsk, boundary: Boundary | None = None) -> bytes:
        """Render the whole conversation; given a boundary, with the sentinel in its last reply."""
        self.renders["full"] += 1
        shown = list(ask.raw[: ask.until])
        if boundary is not None:
            shown[ask.at - 1] = b""
            _unspoken(shown)
            shown[ask.at - 1] = stand_in(ask.reply, SENTINEL, in_text=not boundary.in_calls)
        return await self._renderer.render(ask.model, shown, ask.args, generation=True)

    def _shape(self, ask: TailAsk) -> Shape:
        name = (*shape_of(ask), len(self._stop_ids))
        known = self._shapes.get(name)
        if known is None:
            known = _keep(self._shapes, name, Shape(name))
        return known


def _unspoken(messages: Sequence[bytes]) -> None:
    """Refuse messages that spell out the sentinel. Nobody should know it, so this says nothing about their shape."""
    plain = (msgspec.json.encode(msgspec.json.decode(raw)) if b"\\u" in raw else raw for raw in messages)
    if any(SENTINEL.encode() in raw for raw in plain):
        raise TailRefusedError("sentinel-in-messages")


def _reason(why: Exception) -> str:
    return "template-refuses" if isinstance(why, TemplateRefusedError) else str(why)


def _keep(kept: dict[tuple[object, ...], _T], name: tuple[object, ...], value: _T) -> _T:
    if len(kept) >= MOST_KEPT:
        del kept[next(iter(kept))]
    kept[name] = value
    return value

"""Tails: the ids that the template puts after a history, found without rendering the history.

Only the new messages are rendered, in a small conversation that ends like the real one with a sentinel in the
assistant's place (`boundary`). That the small conversation's tail is what the real one ends with is not assumed but
*proven*, once for every **shape**: the first tail of a shape is compared with a full rendering of the real
conversation, and every 64th again. Three things can come of it:

`small`    the tail is a suffix of the full rendering: small renderings are trusted for this shape
`full`     it is not, but the full conversation with a sentinel in its last reply gives a tail that is (DeepSeek-V3's second
           round of tool results): this shape is rendered in full each time, which is right by construction
refused    neither: nothing is spliced, the call is rendered plainly, and the reason is recorded
"""

import asyncio
import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby

import msgspec

from tokencache.core import ids
from tokencache.core.canonical import Message
from tokencache.dialects.chat import RenderArgs
from tokencache.render.boundary import ASK, SENTINEL, Boundary, BoundaryUnknownError, learn, reworded, stand_in
from tokencache.render.renderer import Renderer, RenderError

log = logging.getLogger(__name__)

RECHECK_EVERY = 64
RETRY_EVERY = 8
MANY = 2


class TailRefusedError(Exception):
    """No tail can be proven; the words say why."""


class TailAsk(msgspec.Struct, frozen=True):
    """What comes after which reply.

    `history` are the messages up to and including the reply, as canonical entries and raw; `new` those behind it.
    """

    model: str
    args: RenderArgs
    history: Sequence[Message]
    raw_history: Sequence[bytes]
    new: Sequence[Message]
    raw_new: Sequence[bytes]

    @property
    def reply(self) -> Message:
        """The reply whose end is the boundary."""
        return self.history[-1]


class _Shape:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.verdict = ""
        self.uses = 0


class Tails:
    """Tails for one engine; what it learns of a template it keeps.

    `stop_ids` is the engine's set, which may still grow.
    """

    def __init__(self, renderer: Renderer, stop_ids: AbstractSet[int], *, recheck_every: int = RECHECK_EVERY) -> None:
        self._renderer = renderer
        self._stop_ids = stop_ids
        self._recheck_every = recheck_every
        self._boundaries: dict[tuple[object, ...], Boundary] = {}
        self._shapes: dict[tuple[object, ...], _Shape] = {}
        self.renders = {"small": 0, "full": 0}

    async def tail(self, ask: TailAsk) -> bytes:
        """Find the packed ids that the template puts behind the reply: end of turn, new messages, generation prompt.

        Raises:
            TailRefusedError: it cannot be proven what they are.
        """
        shape = self._shapes.setdefault(_shape(ask), _Shape())
        try:
            boundary = await self._boundary(ask)
            if shape.verdict not in {"small", "full"}:
                async with shape.lock:  # thousands of rollouts begin alike: one proves, the others wait
                    if shape.verdict not in {"small", "full"}:
                        return await self._first(ask, boundary, shape)
            if shape.verdict == "full":
                tail = boundary.cut(await self._full(ask, sentinel=True))
            else:
                tail = boundary.cut(await self._small(ask))
                shape.uses += 1
                if shape.uses % self._recheck_every == 0:
                    await self._recheck(ask, tail, shape)
            return self._checked(tail, boundary)
        except BoundaryUnknownError as why:
            raise TailRefusedError(str(why)) from why
        except RenderError as why:
            log.debug("no tail: %s", why)
            raise TailRefusedError("render-error") from why

    async def _first(self, ask: TailAsk, boundary: Boundary, shape: _Shape) -> bytes:
        """Prove a shape; what was refused is tried again, but not by every call."""
        if shape.verdict:
            shape.uses += 1
            if shape.uses % RETRY_EVERY:
                raise BoundaryUnknownError(shape.verdict)
        try:
            tail, verdict = await self._prove(ask, boundary)
            self._checked(tail, boundary)
        except BoundaryUnknownError as why:
            shape.verdict = str(why)
            log.warning("tails of shape %s are refused: %s", _shape(ask)[2:], why)
            raise
        shape.verdict = verdict
        log.info("tails of shape %s: %s", _shape(ask)[2:], verdict)
        return tail

    async def _boundary(self, ask: TailAsk) -> Boundary:
        calls = bool(ask.reply.calls)
        name = self._reply_kind(ask)
        known = self._boundaries.get(name)
        if known is None:
            if not self._stop_ids:
                raise BoundaryUnknownError("stop-ids-unknown")
            try:
                known = await learn(self._renderer, ask.model, ask.args, ask.reply, self._stop_ids, in_text=not calls)
            except BoundaryUnknownError:
                if not calls:
                    raise
                # A template that never shows calls may still show the text beside them.
                known = await learn(self._renderer, ask.model, ask.args, ask.reply, self._stop_ids, in_text=True)
            self._boundaries[name] = known
        return known

    def _checked(self, tail: bytes, boundary: Boundary) -> bytes:
        """Refuse a tail that does not begin where a reply ends."""
        if not tail:
            raise BoundaryUnknownError("empty-tail")
        if not boundary.turn_end and ids.unpack(ids.head(tail, 1))[0] not in self._stop_ids:
            raise BoundaryUnknownError("no-stop-id-behind-the-reply")
        return tail

    async def _prove(self, ask: TailAsk, boundary: Boundary) -> tuple[bytes, str]:
        await self._prove_order(ask, boundary)
        real = await self._full(ask, sentinel=False)
        try:
            small = boundary.cut(await self._small(ask))
            if small and real.endswith(small):
                return small, "small"
        except (BoundaryUnknownError, RenderError):
            pass  # a template may refuse a conversation that small
        full = boundary.cut(await self._full(ask, sentinel=True))
        if full and real.endswith(full):
            return full, "full"
        raise BoundaryUnknownError("tail-not-proven")

    async def _prove_order(self, ask: TailAsk, boundary: Boundary) -> None:
        """Prove that new messages are rendered behind the reply, all of them.

        Some are not: vLLM 0.32 moves a later system message to the front for templates that take it only there. Its
        text would be missing from a spliced prompt, and no suffix would tell.
        """
        other = msgspec.structs.replace(ask, raw_new=[reworded(raw) for raw in ask.raw_new])
        try:
            heads = [boundary.before(await self._small(a)) for a in (ask, other)]
        except (BoundaryUnknownError, RenderError):
            heads = [boundary.before(await self._full(a, sentinel=True)) for a in (ask, other)]
        if heads[0] != heads[1]:
            raise BoundaryUnknownError("new-messages-reach-back")

    async def _recheck(self, ask: TailAsk, tail: bytes, shape: _Shape) -> None:
        if (await self._full(ask, sentinel=False)).endswith(tail):
            return
        log.error("a tail of a trusted shape is no suffix of the full rendering any more; the shape is proven anew: %s", _shape(ask)[2:])
        shape.verdict = ""
        raise BoundaryUnknownError("tail-not-proven")

    async def _small(self, ask: TailAsk) -> bytes:
        self.renders["small"] += 1
        args = msgspec.structs.replace(ask.args, tools=None)
        return await self._renderer.render(ask.model, [ASK, self._stand_in(ask), *ask.raw_new], args, generation=True)

    async def _full(self, ask: TailAsk, *, sentinel: bool) -> bytes:
        self.renders["full"] += 1
        *before, reply = ask.raw_history
        if sentinel and any(SENTINEL.encode() in raw for raw in before):
            raise BoundaryUnknownError("sentinel-in-history")
        last = self._stand_in(ask) if sentinel else reply
        return await self._renderer.render(ask.model, [*before, last, *ask.raw_new], ask.args, generation=True)

    def _reply_kind(self, ask: TailAsk) -> tuple[object, ...]:
        # What was learned with fewer stop ids is learned again.
        return (ask.model, ask.args.digest, bool(ask.reply.calls), bool(ask.reply.text), len(self._stop_ids))

    def _stand_in(self, ask: TailAsk) -> bytes:
        boundary = self._boundaries.get(self._reply_kind(ask))
        in_text = not ask.reply.calls or (boundary is not None and not boundary.in_calls)
        return stand_in(ask.reply, SENTINEL, in_text=in_text)


def _shape(ask: TailAsk) -> tuple[object, ...]:
    """Name what the form of a tail may depend on: template arguments, the reply, the new messages, what came before."""
    runs = tuple((role, min(len(list(run)), MANY)) for role, run in groupby(m.role for m in ask.new))
    before = ask.history[:-1]
    return (
        ask.model,
        ask.args.digest,
        "calls" if ask.reply.calls else "text",
        min(len(ask.reply.calls), MANY),
        bool(ask.reply.text),
        bool(ask.reply.thought),
        runs,
        any(m.calls for m in ask.new),
        any(m.role == "tool" for m in before),
        any(m.role == "assistant" for m in before),
        bool(before) and before[0].role == "system",
    )

"""Tails: the ids that the template puts behind a history, found without rendering the history.

Only the new messages are rendered, in a small conversation that ends like the real one with a sentinel in the
assistant's place (`boundary`). That the small conversation's tail is the real one's is not assumed but *proven*, for
every **shape** (`shapes`), with full renderings of the first real conversation that has it:

1. The full conversation with a sentinel in the last reply shows where that reply ends; what stands behind is a suffix
   of the full rendering with the real reply.
2. Other words in the new messages change nothing in front of that place. vLLM 0.32 moves later system messages to the
   front where a developer's are there, and DeepSeek's template does so always: their text would be missing from a
   spliced prompt, and no suffix would tell.
3. What stood before the model's first words is still what the full rendering begins with, and the messages that the last reply was
   sampled behind are still rendered as they were. A template that moves its tools, or a hint, to the last user message changes the past
   with every new message; what was sampled behind the old past is then no prefix of what the template renders now.
4. The small conversation gives the very same ids.

Five things can come of it, and every 64th tail of a shape is compared with full renderings again:

`local`    all of it holds, and the local tokenizer, if there is one, gives these ids: it makes the small renderings
`small`    all of it holds: the engine's small renderings are trusted for this shape
`context`  all of it holds if the small conversation begins with the real one's system messages and tools
`full`     all but the last holds (DeepSeek-V3's second round of tool results): this shape is rendered in full each time
refused    nothing is spliced, the call is rendered plainly, and the reason is recorded; every 8th call tries again

A shape belongs to one context: the system messages, tools and template arguments that a conversation starts from. Where the form was
proven in another context, one full rendering and the beginning's (3 and 4) are enough; and one more each time that a history is four
times as long as any before it.

Templates also look at words in the middle: `/no_think` in any user's message changes the generation prompt from then on (Nemotron Nano
2). That shows when the message is new, and stays in what the next reply is sampled behind. So the generation prompt of each tail
is compared with the one that the last reply was sampled behind, and with the one that the shape was proven with. If either differs,
the tail is taken from a full rendering.

A refusal that is due to one conversation holds for that conversation alone. What was learned is keyed by how many stop ids are known: with
a new one everything is learned anew.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

import msgspec

from tokencache.core import ids
from tokencache.core.messages import Message
from tokencache.core.reasons import Reason
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.template.boundary import ASK, SENTINEL, Boundary, BoundaryUnknownError, Spot, answering, learn, reworded, stand_in
from tokencache.engine.template.renderer import Renderer, RenderError, TemplateRefusedError, TextRenderer
from tokencache.engine.template.shapes import MANY, Shape, TailAsk, TailRefusal, counted_twice, shape_of

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_REPLY = b'{"role":"assistant","content":"."}'

RECHECK_EVERY, MOST_TRUST = 64, 16
"""After so many uses a proven shape is looked at again, by a rendering of a whole history; each time that it was right, after twice as
many, up to 16 times as many: at 141 KB a rendering costs as much as five calls."""
DEEPER = 4
"""A history that is so many times as long as any that was looked at before is looked at as a whole: a template may count messages."""
RETRY_EVERY = 8
MOST_KEPT, MOST_SHAPES = 4096, 65_536
"""How many boundaries and shapes are remembered: template arguments and system prompts come from harnesses and may be all new."""
MOST_REFUSALS, MOST_OPENERS, MOST_HEADS = 64, 64, 8
END_OF_MESSAGE, SHORT = 8, 3
"""Tokens by which the end of a message is known, and that of a short message."""


class TailRefusedError(Exception):
    """No tail can be proven; the words say why."""


class Around(NamedTuple):
    """What a template puts around recognised replies: packed ids.

    `pieces` stand before the first reply, between replies and behind the last, less what opens a reply in a history (`heads`, one for
    each reply; `None` where that cannot be told). `openers` are the generation prompts that are known; `unprompted` says for each reply
    whether the template has none behind messages of the role that stands before it.
    """

    pieces: list[bytes]
    heads: list[bytes | None]
    openers: tuple[bytes, ...]
    unprompted: list[bool]

    @property
    def longest(self) -> int:
        """How many bytes of a prompt's end have to be looked at."""
        return max(END_OF_MESSAGE * ids.ID_BYTES, *map(len, self.openers))

    def opener(self, n: int, opened: bytes, *, alike: bool) -> bytes | None:
        """Find the generation prompt that ends `opened`, the prompt that reply `n` was sampled behind; `None` if none is known.

        There may be none at all, in the template or behind such a message: then it was sampled directly behind the message that stands
        before it now. `alike`: it is the same message, by whose end that can be seen. Otherwise, and where other words stand in front of a
        short message, only a template that has no generation prompt there leaves no doubt.
        """
        head = self.heads[n]
        if head is None:
            return None
        able = [opener for opener in (*self.openers, head) if opener and opened.endswith(opener)]
        end, last = self.pieces[n][-END_OF_MESSAGE * ids.ID_BYTES :], self.pieces[n][-ids.ID_BYTES :]
        bare = (alike and opened.endswith(end)) or (opened.endswith(last) and (self.unprompted[n] or not (head and any(self.openers))))
        return max(able, key=len, default=b"" if bare else None)


class _Proven(NamedTuple):
    """A tail, the way that leads to it, and the small conversation's rendering that holds it."""

    tail: bytes
    way: str
    small: bytes


class _End(NamedTuple):
    """With what conversations of a context end: the generation prompt, and the part of it that is there without being asked for."""

    opener: bytes
    trailer: bytes


_NOTHING = _End(b"", b"")


class _Heads:
    """What opens replies of one kind in a history; `unprompted`: no generation prompt was ever seen there."""

    __slots__ = ("heads", "unprompted")

    def __init__(self) -> None:
        self.heads: set[bytes] = set()
        self.unprompted = True


class Tails:
    """Tails for one engine; what it learns of a template it keeps.

    `stop_ids` is the engine's set, which may still grow. `small` is a renderer for small conversations, used where it
    gives the same as `renderer`. `renders` counts renderings: those of a few messages by either, and those of whole histories.
    """

    def __init__(
        self, renderer: TextRenderer, stop_ids: AbstractSet[int], *, small: Renderer | None = None, recheck_every: int = RECHECK_EVERY
    ) -> None:
        self._renderer = renderer
        self._local = small
        self._warned = False
        self._stop_ids = stop_ids
        self._recheck_every = recheck_every
        self._boundaries: OrderedDict[object, Boundary] = OrderedDict()
        self._heads: OrderedDict[object, _Heads] = OrderedDict()
        self._shapes: OrderedDict[object, Shape] = OrderedDict()
        self._forms: OrderedDict[object, None] = OrderedDict()
        self._openers: OrderedDict[object, bytes] = OrderedDict()
        self._usual: OrderedDict[object, _End] = OrderedDict()  # of contexts for which it was asked
        self._learning = asyncio.Lock()
        self.renders = {"local": 0, "small": 0, "full": 0}

    async def tail(self, ask: TailAsk) -> bytes:
        """Find the packed ids that the template puts behind the reply: end of turn, new messages, generation prompt.

        Raises:
            TailRefusedError: it cannot be proven what they are.
        """
        shape = self._shape(ask)
        with _refusing():
            proofs = shape.proofs
            if not shape.way or _whose(ask) in shape.refusals:
                async with shape.lock:  # thousands of rollouts begin alike: one proves, the others wait
                    if not shape.way or _whose(ask) in shape.refusals:
                        return await self._first(ask, shape, waited=shape.proofs != proofs)
            return await self._again(ask, shape)

    async def around(self, ask: TailAsk, places: Sequence[int]) -> Around:
        """Render a whole conversation, and find what stands around the replies at `places`, of which the last is that of `ask`.

        Raises:
            TailRefusedError: it cannot be proven what that is.
        """
        with _refusing():
            return await self._around(ask, places)

    async def _first(self, ask: TailAsk, shape: Shape, *, waited: bool) -> bytes:
        """Prove a shape; what was refused is tried again, but not by every call."""
        whose = _whose(ask)
        refusal = shape.refusals.get(None) or shape.refusals.get(whose)
        if refusal is not None:
            refusal.asked += 0 if waited else 1
            if waited or refusal.asked % RETRY_EVERY:
                raise BoundaryUnknownError(refusal.reason)
        due_to: object = None
        try:
            boundary = await self._boundary(ask)
            due_to = whose
            confirms = shape.form in self._forms and refusal is None
            found = await (self._confirm(ask, boundary) if confirms else self._prove(ask, boundary))
            shape.opener = await self._opener_of_shape(ask, boundary, found)
        except (BoundaryUnknownError, TemplateRefusedError) as why:
            _keep(shape.refusals, due_to, TailRefusal(_reason(why)), MOST_REFUSALS)
            level = logging.WARNING if due_to is None else logging.INFO  # what one conversation holds is no fault of the template's
            log.log(level, "session %s: no tail can be proven for %s; they are rendered as text: %s", ask.session, shape, _reason(why))
            raise
        finally:
            shape.proofs += 1
        shape.way, shape.uses, shape.deepest = found.way, 0, ask.at
        shape.refusals.pop(None, None)
        shape.refusals.pop(whose, None)
        _keep(self._forms, shape.form, None, MOST_KEPT)
        log.debug("session %s: proved the tail for %s; way: %s", ask.session, shape, found.way)
        return found.tail

    async def _again(self, ask: TailAsk, shape: Shape) -> bytes:
        """Render a tail of a proven shape."""
        shape.uses += 1
        recheck = shape.uses >= shape.trust * self._recheck_every
        shape.uses = 0 if recheck else shape.uses  # one of many at a time
        try:
            boundary = await self._boundary(ask)
            tail = await self._trusted(ask, shape, boundary)
            if recheck:
                await self._recheck(ask, boundary, (tail, shape.way))
                shape.trust = min(2 * shape.trust, MOST_TRUST)
            elif ask.at > DEEPER * shape.deepest and shape.way != "full":
                shape.deepest = ask.at
                _same_tail(tail, self._cut(await self._full(ask, boundary), boundary))
        except BoundaryUnknownError as why:
            log.error("session %s: a proven tail has changed (%s); it is proven anew for %s", ask.session, why, shape)  # noqa: TRY400
            shape.forget()
            self._boundaries.clear()
            raise
        return tail

    async def _trusted(self, ask: TailAsk, shape: Shape, boundary: Boundary) -> bytes:
        """Render a tail as it was proven, or in full where its generation prompt is not the one that is expected."""
        if shape.way != "full":
            tail = await self._locally(ask, boundary) if shape.way == "local" else None
            if not tail:
                way = "small" if shape.way == "local" else shape.way
                tail = self._cut(await self._small(ask, boundary, way), boundary)
            if tail.endswith(shape.opener) and (ask.opened is None or ask.opened.endswith(shape.opener)):
                return tail
        return self._cut(await self._full(ask, boundary), boundary)  # right by construction

    async def _recheck(self, ask: TailAsk, boundary: Boundary, found: tuple[bytes, str]) -> None:
        tail, way, _ = await self._prove(ask, boundary)
        if tail != found[0] and found[1] == "local":
            log.error("the local tokenizer is no longer used: it gave other ids than the engine")
            self._local = None
            for shape in self._shapes.values():
                shape.way = "" if shape.way == "local" else shape.way
        _same_tail(tail, found[0])
        if found[1] not in {way, "local"}:  # this very conversation may not have been one for the local tokenizer
            raise BoundaryUnknownError(Reason.TAIL_NOT_PROVEN)

    async def _boundary(self, ask: TailAsk, reply: Message | None = None) -> Boundary:
        if not self._stop_ids:
            raise BoundaryUnknownError(Reason.STOP_IDS_UNKNOWN)
        reply = reply or ask.reply
        kind = (ask.model, ask.args.digest, min(len(reply.calls), MANY), bool(reply.text), len(self._stop_ids))
        # Where only the text is shown the calls may stand behind it, and where ids are shown they may stand behind the arguments.
        named = (*kind, *(call.name for call in reply.calls))
        identified = (*named, *(call.id for call in reply.calls))
        async with self._learning:
            known = self._boundaries.get(kind) or self._boundaries.get(named) or self._boundaries.get(identified)
            if known is None:
                known = await self._learn(ask, reply)
                name: tuple[object, ...] = kind
                if reply.calls:
                    name = named if known.spot is Spot.TEXT else identified if await self._shows_ids(ask, reply, known) else kind
                _keep(self._boundaries, name, known, MOST_KEPT)
        return known

    async def _learn(self, ask: TailAsk, reply: Message) -> Boundary:
        # A template may show one call only, the first, or none, and still the text beside them.
        *spots, last = Spot if reply.calls else [Spot.TEXT]
        for spot in spots:
            self.renders["small"] += 2
            with suppress(BoundaryUnknownError):
                return await learn(self._renderer, ask.model, ask.args, reply, self._stop_ids, spot=spot)
        self.renders["small"] += 2
        return await learn(self._renderer, ask.model, ask.args, reply, self._stop_ids, spot=last)

    async def _shows_ids(self, ask: TailAsk, reply: Message, known: Boundary) -> bool:
        """Whether a template writes the ids of calls behind their arguments."""
        other = _renamed(reply, _other_ids(reply))
        self.renders["small"] += 1
        try:
            shown = await self._renderer.render(ask.model, [ASK, stand_in(other, SENTINEL, known.spot)], ask.args, generation=False)
            return known.cut(shown) != known.turn_end
        except (BoundaryUnknownError, TemplateRefusedError):
            return True

    def _cut(self, shown: bytes, boundary: Boundary) -> bytes:
        """Cut a tail out of a rendering; refuse one that does not begin where a reply ends."""
        return self._ended(boundary.cut(shown), boundary)

    def _ended(self, tail: bytes, boundary: Boundary) -> bytes:
        if not tail:
            raise BoundaryUnknownError(Reason.EMPTY_TAIL)
        if boundary.closing and not boundary.turn_end and ids.unpack(ids.head(tail, 1))[0] not in self._stop_ids:
            # What the model is thought to have written may hold an end of turn that is not known yet.
            raise BoundaryUnknownError(Reason.NO_STOP_ID_BEHIND_THE_REPLY)
        return tail

    async def _prove(self, ask: TailAsk, boundary: Boundary) -> _Proven:
        """Find a tail and prove it, as the head of this module says."""
        real = await self._real(ask, [ask.at - 1])
        shown = await self._full(ask, boundary)
        tail = self._cut(shown, boundary)
        if not real.endswith(tail):
            raise BoundaryUnknownError(Reason.TAIL_NOT_PROVEN)
        other = msgspec.structs.replace(ask, raw=[*ask.raw[: ask.at], *map(reworded, ask.raw_new)])
        if boundary.before(await self._full(other, boundary)) != boundary.before(shown):
            raise BoundaryUnknownError(Reason.NEW_MESSAGES_REACH_BACK)
        await self._prove_past(ask, boundary, real)
        return await self._way(ask, boundary, tail)

    async def _confirm(self, ask: TailAsk, boundary: Boundary) -> _Proven:
        """Find a tail of a form that was proven in another context, and the way that leads to it in this one."""
        shown = await self._full(ask, boundary)
        tail = self._cut(shown, boundary)
        await self._prove_past(ask, boundary, shown)
        return await self._way(ask, boundary, tail)

    async def _way(self, ask: TailAsk, boundary: Boundary, tail: bytes) -> _Proven:
        """Find the cheapest way that leads to a tail."""
        if counted_twice(ask) and not await self._hides_ids(ask, boundary, tail):
            return _Proven(tail, "full", b"")  # which call a result belongs to is for the template to find out, among all calls
        local = await self._locally(ask, boundary)
        if local == tail:
            return _Proven(tail, "local", await self._small(ask, boundary, "local"))
        for way in ("small", "context") if ask.systems or ask.args.tools is not None else ("small",):
            try:
                shown = await self._small(ask, boundary, way)
                small = boundary.cut(shown)
            except (BoundaryUnknownError, TemplateRefusedError):
                continue  # a template may refuse a conversation that small
            if small == tail:
                if local is not None and not self._warned:
                    self._warned = True
                    log.warning("the local tokenizer gives other ids than the engine for some conversations: those are left to the engine")
                return _Proven(tail, way, shown)
        return _Proven(tail, "full", b"")

    async def _hides_ids(self, ask: TailAsk, boundary: Boundary, tail: bytes) -> bool:
        """Whether a tail is the same if the reply's calls, and what answers them, have ids that no other call has."""
        other = _other_ids(ask.reply)
        reply = _renamed(ask.reply, other)
        new = [answering(raw, other) for raw in ask.raw_new]
        shown = [*ask.raw[: ask.at - 1], stand_in(reply, SENTINEL, boundary.spot), *new]
        self.renders["full"] += 1
        try:
            return boundary.cut(await self._renderer.render(ask.model, shown, ask.args, generation=True)) == tail
        except (BoundaryUnknownError, TemplateRefusedError):
            return False

    async def _locally(self, ask: TailAsk, boundary: Boundary) -> bytes | None:
        """Take a tail from the local tokenizer; `None` if it leaves this conversation to the engine, nothing if it hides the tail."""
        if self._local is None:
            return None
        try:
            return boundary.cut(await self._small(ask, boundary, "local"))
        except TemplateRefusedError:
            return None
        except BoundaryUnknownError:
            return b""

    async def _prove_past(self, ask: TailAsk, boundary: Boundary, rendered: bytes) -> None:
        """Prove that what stood before the model's first words stands there still, and the messages that the reply was sampled behind."""
        if not ask.lead:
            return
        self.renders["full"] += 1
        _same_past(await self._renderer.render(ask.model, ask.raw[: ask.lead], ask.args, generation=False), rendered)
        last = max((i for i in range(ask.lead, ask.at - 1) if ask.conversation.messages[i].role == "assistant"), default=None)
        if last is None:
            return
        other = await self._boundary(ask, ask.conversation.messages[last])
        marked = {last: other, ask.at - 1: boundary}
        then, now = [other.around(await self._whole(ask, marked, end=end, generation=False))[1] for end in (ask.at - 1, None)]
        _same_past(then, now)

    async def _opener_of_shape(self, ask: TailAsk, boundary: Boundary, found: _Proven) -> bytes:
        """Find the generation prompt with which the small conversations of a shape end."""
        if found.way == "full":
            return b""
        return self._opened(found.small, await self._small(ask, boundary, found.way, generation=False))

    def _opened(self, with_it: bytes, without: bytes) -> bytes:
        """What `with_it` has at its end and `without` has not: a generation prompt; it is remembered."""
        opener = ids.tail(with_it, ids.common_head(with_it, without))
        return _keep(self._openers, opener, opener, MOST_OPENERS)

    async def _small(self, ask: TailAsk, boundary: Boundary, way: str, *, generation: bool = True) -> bytes:
        """Render a small conversation, one way or another."""
        self.renders["local" if way == "local" else "small"] += 1
        _unspoken(ask.raw_new)
        renderer = self._local if way == "local" and self._local is not None else self._renderer
        front, args = (ask.systems, ask.args) if way == "context" else ((), msgspec.structs.replace(ask.args, tools=None))
        reply = stand_in(ask.reply, SENTINEL, boundary.spot)
        return await renderer.render(ask.model, [*front, ASK, reply, *ask.raw_new], args, generation=generation)

    async def _full(self, ask: TailAsk, boundary: Boundary | None = None, *, generation: bool = True) -> bytes:
        """Render the whole conversation; given a boundary, with the sentinel in its last reply."""
        return await self._whole(ask, {} if boundary is None else {ask.at - 1: boundary}, generation=generation)

    async def _real(self, ask: TailAsk, places: Sequence[int]) -> bytes:
        """Render the whole conversation as it is, but with a word in replies (at `places`) that say nothing: templates leave those out."""
        said = ask.conversation.messages
        empty = {place for place in places if not said[place].text and not said[place].calls}
        self.renders["full"] += 1
        shown = [_REPLY if place in empty else raw for place, raw in enumerate(ask.raw)] if empty else ask.raw
        return await self._renderer.render(ask.model, shown, ask.args, generation=True)

    async def _whole(self, ask: TailAsk, marked: dict[int, Boundary], *, end: int | None = None, generation: bool = True) -> bytes:
        """Render the whole conversation, or what stands before `end`, with the sentinel in the replies at the places of `marked`."""
        self.renders["full"] += 1
        shown = list(ask.raw)
        for place in marked:
            shown[place] = b""
        if marked:
            _unspoken(shown)
        for place, boundary in marked.items():
            shown[place] = stand_in(ask.conversation.messages[place], SENTINEL, boundary.spot)
        return await self._renderer.render(ask.model, shown[:end], ask.args, generation=generation)

    # a history that was edited

    async def _around(self, ask: TailAsk, places: Sequence[int]) -> Around:
        boundaries = {place: await self._boundary(ask, ask.conversation.messages[place]) for place in places}
        shown = rest = await self._whole(ask, boundaries)
        real = await self._real(ask, places)
        await self._learn_openers(ask, shown, real)
        pieces: list[bytes] = []
        heads: list[bytes | None] = []
        unprompted: list[bool] = []
        for n, (place, boundary) in enumerate(boundaries.items()):
            front, rest = boundary.around(rest)
            self._ended(rest, boundary)
            piece, head, bare = await self._parted(ask, front, place, places[n - 1] if n else None, boundaries)
            pieces.append(piece)
            heads.append(head)
            unprompted.append(bare)
        pieces.append(rest)
        if None not in heads:
            _stands(pieces, real)
        return Around(pieces, heads, tuple(self._openers.values()), unprompted)

    async def _parted(
        self, ask: TailAsk, front: bytes, place: int, last: int | None, boundaries: Mapping[int, Boundary]
    ) -> tuple[bytes, bytes | None, bool]:
        """Part what was rendered between the reply at `last` and that at `place` into the messages and what opens the latter.

        `None` in the latter's place says that where it begins cannot be told. The third says that there is no generation prompt there.
        """
        messages = ask.conversation.messages
        named = tuple(call.name for call in messages[place].calls) if boundaries[place].spot is not Spot.TEXT else ()
        role = messages[place - 1].role if place else ""
        kind = (ask.conversation.context, named, bool(messages[place].text), role)
        known = self._heads.get(kind) or _keep(self._heads, kind, _Heads(), MOST_KEPT)
        head = max((head for head in known.heads if front.endswith(head)), key=len, default=b"")
        if head:
            return front[: len(front) - len(head)], head, known.unprompted
        body, opener = await self._body(ask, place, last, boundaries)
        known.unprompted = known.unprompted and not opener
        bare = not any(self._openers.values())
        piece, begins = await self._checked(ask, body, front, _parted(body, front, self._stop_ids, bare=bare))
        if begins is None and (ask.systems or ask.args.tools is not None):  # which a template may write before the last message
            with suppress(BoundaryUnknownError, TemplateRefusedError):
                body, _ = await self._body(ask, place, last, boundaries, args=msgspec.structs.replace(ask.args, tools=None))
                piece, begins = await self._checked(ask, body, front, _parted(body, front, self._stop_ids, bare=bare))
        if begins is not None and len(known.heads) < MOST_HEADS and front == piece + begins:
            known.heads.add(begins)
        return piece, begins, known.unprompted

    async def _checked(self, ask: TailAsk, body: bytes, front: bytes, parted: tuple[bytes, bytes | None]) -> tuple[bytes, bytes | None]:
        """Check that the last token of `body`, where `front` has another one, did grow into that.

        Otherwise the template closes its last message with that token, and leaves it out where the reply follows (DeepSeek-V3 closes
        results so, but not before a reply with calls): then the reply must follow a known generation prompt.
        """
        same = ids.common_head(body, front)
        if parted[1] is None or same != ids.count(body) - 1:
            return parted
        rest = ids.tail(front, same)
        try:
            closing, grown = [await self._renderer.read(ask.model, ids.head(part, 1)) for part in (ids.tail(body, same), rest)]
        except RenderError:
            closing = grown = ""
        if closing and grown.startswith(closing):
            return parted
        opened = any(opener and rest.startswith(opener) for opener in self._openers.values())
        return (ids.head(front, same), rest) if opened else (front, None)

    async def _body(
        self, ask: TailAsk, place: int, last: int | None, boundaries: Mapping[int, Boundary], *, args: RenderArgs | None = None
    ) -> tuple[bytes, bytes]:
        """Render what stands between two replies without the latter: what is rendered with a generation prompt and without, and that.

        With other `args` the system messages in front are left out.
        """
        systems = ask.systems if args is None else ()
        if last is None:
            shown = [*systems, *ask.raw[len(ask.systems) : place]]
        else:
            reply = stand_in(ask.conversation.messages[last], SENTINEL, boundaries[last].spot)
            shown = [*systems, ASK, reply, *ask.raw[last + 1 : place]]
        self.renders["full" if last is None else "small"] += 2
        both = [await self._renderer.render(ask.model, shown, args or ask.args, generation=generation) for generation in (True, False)]
        if last is not None:
            both = [boundaries[last].cut(one) for one in both]
        trailer = self._usual.get(ask.conversation.context, _NOTHING).trailer
        body = ids.head(both[0], ids.common_head(*both)).removesuffix(trailer)
        return body, self._opened(both[0], body)

    async def _learn_openers(self, ask: TailAsk, shown: bytes, real: bytes) -> None:
        """Learn the generation prompts that replies in this conversation may have been sampled behind."""
        context = ask.conversation.context
        usual = self._usual.get(context)
        if usual is None:
            self.renders["small"] += 4
            with suppress(TemplateRefusedError):
                usual = _keep(self._usual, context, await self._usual_end(ask), MOST_SHAPES)
        if usual is None or not shown.endswith(usual.opener):
            self._opened(real, await self._full(ask, generation=False))

    async def _usual_end(self, ask: TailAsk) -> "_End":
        """Find out with what a small conversation of this context ends."""
        asked = [await self._renderer.render(ask.model, [*ask.systems, ASK], ask.args, generation=on) for on in (True, False)]
        plain = msgspec.structs.replace(ask.args, tools=None)  # what wanders is left out: system messages and tools
        alone, answered = [await self._renderer.render(ask.model, one, plain, generation=False) for one in ([ASK], [ASK, _REPLY])]
        same = ids.common_head(alone, answered)
        trailer = ids.tail(alone, same) if same < ids.count(alone) - 1 else b""  # the last token may have grown
        return _End(self._opened(asked[0], asked[1].removesuffix(trailer)), trailer)

    def _shape(self, ask: TailAsk) -> Shape:
        name = (*shape_of(ask), len(self._stop_ids))
        known = self._shapes.get(name)
        if known is None:
            return _keep(self._shapes, name, Shape(name), MOST_SHAPES)
        self._shapes.move_to_end(name)
        return known


def _whose(ask: TailAsk) -> object:
    """Name a conversation for which a tail may have to be refused though its shape is proven: its session, and how it began."""
    return ask.session, ask.conversation.chain[ask.lead]


def _other_ids(reply: Message) -> dict[str, str]:
    """Other ids for the calls of a reply, which no call has: nobody else knows the sentinel."""
    return {call.id: f"{call.id}{SENTINEL[::-1]}" for call in reply.calls}


def _renamed(reply: Message, names: Mapping[str, str]) -> Message:
    return msgspec.structs.replace(reply, calls=tuple(msgspec.structs.replace(call, id=names[call.id]) for call in reply.calls))


def _same_tail(one: bytes, other: bytes) -> None:
    if one != other:
        raise BoundaryUnknownError(Reason.TAIL_NOT_PROVEN)


def _same_past(before: bytes, rendered: bytes) -> None:
    """Refuse a rendering that does not begin with what stood before the model's first words."""
    # The last token may have grown together with what follows, where no special token parts them.
    if ids.common_head(before, rendered) < ids.count(before) - 1:
        raise BoundaryUnknownError(Reason.PAST_CHANGES)


def _parted(body: bytes, front: bytes, stop_ids: AbstractSet[int], *, bare: bool) -> tuple[bytes, bytes | None]:
    """Part a rendering behind the messages that `body` is a rendering of; `None` if it cannot be told where that is.

    `bare`: the template has no generation prompts, so that fewer tokens tell where a message ends.
    """
    same = ids.common_head(body, front)
    if same == ids.count(body):
        return body, front[len(body) :]
    if same == ids.count(body) - 1:  # its last token has grown together with what follows, which the reply was not sampled behind
        return body, ids.tail(front, same)
    # How the last message begins, and what stands before it, is written otherwise there: its end is looked for. The last token may have
    # grown; then the others stand farther on than an earlier message that ends alike. Where an end repeats itself, neither can be told.
    for length in (END_OF_MESSAGE, SHORT) if bare else (END_OF_MESSAGE,):
        end = ids.tail(body, max(ids.count(body) - length, 0))
        size = ids.count(end)
        whole, but_one = ids.find_last(front, end), ids.find_last(front, ids.head(end, size - 1))
        if but_one < 0:
            continue
        grown = length == END_OF_MESSAGE and (whole < 0 or but_one >= whole + size)
        if but_one != whole and not grown:
            return front, None
        cut = but_one + size - grown
        piece, rest = ids.head(front, but_one) + end, ids.tail(front, cut)
        return (piece, rest) if stop_ids.isdisjoint(ids.unpack(rest)) else (front, None)
    return front, None


def _stands(pieces: Sequence[bytes], real: bytes) -> None:
    """Refuse pieces that are not, in order, in the rendering with the real replies: these change what stands around them."""
    _same_past(pieces[0], real)
    if not real.endswith(pieces[-1]):
        raise BoundaryUnknownError(Reason.TAIL_NOT_PROVEN)
    rest = ids.tail(real, max(ids.count(pieces[0]) - 1, 0))
    for piece in pieces[1:-1]:
        sure = ids.head(piece, max(ids.count(piece) - 1, 0))  # the last may have grown, as above
        at = ids.find(rest, sure)
        if at < 0:
            raise BoundaryUnknownError(Reason.TAIL_NOT_PROVEN)
        rest = ids.tail(rest, at + ids.count(sure))


def _unspoken(messages: Sequence[bytes]) -> None:
    """Refuse messages that spell out the sentinel. Nobody should know it, so this says nothing about their shape."""
    plain = (msgspec.json.encode(msgspec.json.decode(raw)) if b"\\u" in raw else raw for raw in messages)
    if any(SENTINEL.encode() in raw for raw in plain):
        raise TailRefusedError(Reason.SENTINEL_IN_MESSAGES)


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn what a template or an engine refuses into the refusal of a tail."""
    try:
        yield
    except (BoundaryUnknownError, TemplateRefusedError) as why:
        raise TailRefusedError(_reason(why)) from why
    except RenderError as why:
        log.debug("no rendering: %s", why)
        raise TailRefusedError(Reason.RENDER_ERROR) from why


def _reason(why: Exception) -> str:
    return Reason.TEMPLATE_REFUSES if isinstance(why, TemplateRefusedError) else str(why)


def _keep(kept: "OrderedDict[object, _T] | dict[object, _T]", name: object, value: _T, most: int) -> _T:
    if len(kept) >= most and name not in kept:
        del kept[next(iter(kept))]
    kept[name] = value
    return value

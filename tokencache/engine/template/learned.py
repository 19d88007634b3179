"""Renders conversations with sentinels, and remembers what was learned about one chat template.

`tails` and `edited` use these renderings. This module remembers the boundary of each kind of reply, and the generation prompts that were
seen.
"""

import asyncio
import logging
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress

import msgspec

from tokencache.core import ids
from tokencache.core.messages import Message
from tokencache.core.reasons import Reason
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.template.boundary import ASK, SENTINEL, Boundary, BoundaryUnknownError, SentinelPlace, learn, stand_in
from tokencache.engine.template.renderer import Renderer, RenderError, TemplateRefusedError, TextRenderer
from tokencache.engine.template.shapes import MANY, TailRequest
from tokencache.pauses import parts_of, pause
from tokencache.recent import Recent

log = logging.getLogger(__name__)

REPLY = b'{"role":"assistant","content":"."}'
_MANY = 256
"""Messages of a conversation from which on it is written between two pauses."""
MOST_BOUNDARIES, MOST_GENERATION_PROMPTS = 4096, 64
"""Limits for what is remembered: template arguments and system prompts come from clients and may be new with every call."""


class TailRefusedError(Exception):
    """A proof of what the template writes failed. The text of the error is a `Reason`."""


class LearnedTemplate:
    """Renders with one engine's template, and remembers what was learned about it.

    Attributes:
        renderer: the engine's own rendering, the reference.
        local: a renderer for small conversations, used where it gives the same ids as `renderer`; `None` if there is none.
        stop_ids: the ids at which the engine stops. The set may grow, so what is learned is keyed by its size.
        generation_prompts: the generation prompts seen so far (packed ids).
        renders: the number of renderings of each kind: a few messages by `local` ("local") or by `renderer` ("small"), and whole
            histories ("full").
    """

    def __init__(self, renderer: TextRenderer, stop_ids: AbstractSet[int], local: Renderer | None = None) -> None:
        self.renderer = renderer
        self.stop_ids = stop_ids
        self.local = local
        self.generation_prompts: Recent[bytes, bytes] = Recent(MOST_GENERATION_PROMPTS)
        self.renders = {"local": 0, "small": 0, "full": 0}
        self._boundaries: Recent[object, Boundary] = Recent(MOST_BOUNDARIES)
        self._learning = asyncio.Lock()

    # boundaries

    async def boundary(self, request: TailRequest, reply: Message | None = None, *, in_text: bool = False) -> Boundary:
        """Return the boundary of a reply, by default the reply before the requested tail; learn it if it is not known.

        With `in_text`, its sentinel is in the text, also of a reply with calls, if the template shows the text.

        Raises:
            BoundaryUnknownError: the template does not show where such a reply ends.
            RenderError: the small conversation cannot be rendered.
        """
        if not self.stop_ids:
            raise BoundaryUnknownError(Reason.STOP_IDS_UNKNOWN)
        reply = reply or request.reply
        in_text = in_text and bool(reply.calls)
        kind = (request.model, request.args.digest, min(len(reply.calls), MANY), bool(reply.text), len(self.stop_ids), in_text)
        if (known := self._boundaries.get(kind)) is not None:
            self._boundaries.move_to_end(kind)
            return known
        # A template may write the names of the calls after the text, and their ids after the arguments.
        named = (*kind, *(call.name for call in reply.calls))
        identified = (*named, *(call.id for call in reply.calls))
        async with self._learning:
            known = self._boundaries.get(kind) or self._boundaries.get(named) or self._boundaries.get(identified)
            if known is None:
                known = await self._learn(request, reply, in_text=in_text)
                key: tuple[object, ...] = kind
                if reply.calls and known.place is SentinelPlace.TEXT and not in_text:
                    key = named
                elif reply.calls and await self._writes_call_ids(request, reply, known):
                    key = identified
                elif in_text:
                    key = named  # the names follow the text
                self._boundaries[key] = known
        return known

    def forget_boundaries(self) -> None:
        """Forget all boundaries, because the template has changed."""
        self._boundaries.clear()

    async def _learn(self, request: TailRequest, reply: Message, *, in_text: bool) -> Boundary:
        # A template may show only the last call, only the first, or only the text.
        *places, last = SentinelPlace if reply.calls else [SentinelPlace.TEXT]
        if in_text:
            places, last = [last, *places[:-1]], places[-1]
        for place in places:
            with suppress(BoundaryUnknownError):
                return await self._learn_at(place, request, reply)
        return await self._learn_at(last, request, reply)

    async def _learn_at(self, place: SentinelPlace, request: TailRequest, reply: Message) -> Boundary:
        self.renders["small"] += 2
        return await learn(self.renderer, request.model, request.args, reply, self.stop_ids, place=place)

    async def _writes_call_ids(self, request: TailRequest, reply: Message, known: Boundary) -> bool:
        """Whether a template writes the ids of calls after their arguments."""
        other = with_call_ids(reply, other_call_ids(reply))
        try:
            rendered = await self.render("small", request, [ASK, stand_in(other, SENTINEL, known.place)], generation=False)
            return known.after(rendered) != known.turn_end
        except (BoundaryUnknownError, TemplateRefusedError):
            return True

    def check_tail(self, tail: bytes, boundary: Boundary) -> bytes:
        """Return the tail, the ids that were rendered after a reply, unchanged.

        Raises:
            BoundaryUnknownError: the tail is empty, or does not begin where a reply ends.
        """
        if not tail:
            raise BoundaryUnknownError(Reason.EMPTY_TAIL)
        if boundary.closing and not boundary.turn_end and ids.unpack(ids.head(tail, 1))[0] not in self.stop_ids:
            # The closing may contain an end of turn with a stop id that is not known yet.
            raise BoundaryUnknownError(Reason.NO_STOP_ID_BEHIND_THE_REPLY)
        return tail

    def turn_end(self, tail: bytes) -> int:
        """Return the index of the first stop id in a tail; 0 if it has none, or begins with it."""
        return next((i for i, token in enumerate(ids.unpack(tail)) if token in self.stop_ids), 0)

    # renderings

    def render(
        self,
        kind: str,
        request: TailRequest,
        messages: Sequence[bytes],
        args: RenderArgs | None = None,
        *,
        generation: bool = True,
    ) -> Awaitable[bytes]:
        """Render messages and count the rendering as `kind` (a key of `renders`); the local renderer makes those of the kind `local`."""
        self.renders[kind] += 1
        renderer = self.local if kind == "local" and self.local is not None else self.renderer
        return renderer.render(request.model, messages, args or request.args, generation=generation)

    def small(self, request: TailRequest, boundary: Boundary, method: str, *, generation: bool = True) -> Awaitable[bytes]:
        """Render the new messages in a small conversation; `method` as in `tails`: "local", "small" or "context"."""
        new = request.raw_new
        check_no_sentinel(new)
        front, args = (request.systems, request.args) if method == "context" else ((), without_tools(request.args))
        messages = [*front, ASK, stand_in(request.reply, SENTINEL + request.words, boundary.place), *new]
        return self.render("local" if method == "local" else "small", request, messages, args, generation=generation)

    async def full(self, request: TailRequest, marked: Mapping[int, Boundary], *, end: int | None = None, generation: bool = True) -> bytes:
        """Render the whole conversation, or what precedes `end`, with the sentinel in the replies at the places of `marked`."""
        if len(request.raw) > _MANY:
            await pause()
        messages = list(request.raw[:])  # a slice is cut faster than its items
        for place in marked:
            messages[place] = b""
        if marked:
            for part in parts_of(messages):
                check_no_sentinel(part)
                await pause()
        for place, boundary in marked.items():
            words = request.words if place == request.at - 1 else ""
            messages[place] = stand_in(request.conversation.messages[place], SENTINEL + words, boundary.place)
        return await self.render("full", request, messages[:end], generation=generation)

    def real(self, request: TailRequest, places: Sequence[int], *, generation: bool = True) -> Awaitable[bytes]:
        """Render the whole conversation, with a word in empty replies at `places`, because templates leave out empty replies."""
        messages = request.conversation.messages
        empty = {place for place in places if not messages[place].text and not messages[place].calls}
        shown = [REPLY if place in empty else raw for place, raw in enumerate(request.raw)] if empty else request.raw
        return self.render("full", request, shown, generation=generation)

    def generation_prompt(self, with_it: bytes, without: bytes, *, last: str) -> bytes:
        """Return the ids at the end of `with_it` that `without` lacks, and remember them as a generation prompt.

        `last` is the role of the last message. After an assistant's message they are not remembered: gpt-oss's template ends the last reply
        of a conversation otherwise than one in a history, so they may begin with its end of turn.
        """
        prompt = ids.tail(with_it, ids.common_head(with_it, without))
        if last != "assistant":
            self.generation_prompts[prompt] = prompt
        return prompt


def other_call_ids(reply: Message) -> dict[str, str]:
    """Map the ids of a reply's calls to ids that no other call has, because they contain the secret sentinel."""
    return {call.id: f"{call.id}{SENTINEL[::-1]}" for call in reply.calls}


def with_call_ids(reply: Message, names: Mapping[str, str]) -> Message:
    """Return a reply with other ids of its calls."""
    return msgspec.structs.replace(reply, calls=tuple(msgspec.structs.replace(call, id=names[call.id]) for call in reply.calls))


def without_tools(args: RenderArgs) -> RenderArgs:
    """Return template arguments without the tools."""
    return msgspec.structs.replace(args, tools=None)


def check_same_past(before: bytes, rendered: bytes) -> None:
    """Refuse a rendering that does not begin with `before`, the rendering of its first messages.

    The last token of `before` may have merged with the next, where no special token separates them.

    Raises:
        BoundaryUnknownError: the rendering begins differently.
    """
    if not rendered.startswith(before[: -ids.ID_BYTES]):
        raise BoundaryUnknownError(Reason.PAST_CHANGES)


def check_no_sentinel(messages: Sequence[bytes]) -> None:
    """Refuse messages that contain the sentinel. It is random and secret, so this is not a property of their shape."""
    for raw in messages:
        if SENTINEL.encode() in (msgspec.json.encode(msgspec.json.decode(raw)) if b"\\u00" in raw else raw):
            raise TailRefusedError(Reason.SENTINEL_IN_MESSAGES)


@contextmanager
def tail_refusals() -> Iterator[None]:
    """Convert errors of boundaries and renderings into a `TailRefusedError`."""
    try:
        yield
    except (BoundaryUnknownError, RenderError) as why:
        raise as_refusal(why) from why


def as_refusal(why: BoundaryUnknownError | RenderError) -> TailRefusedError:
    """Return the refusal that an error of a boundary or a rendering means."""
    if isinstance(why, BoundaryUnknownError | TemplateRefusedError):
        return TailRefusedError(reason_of(why))
    log.debug("no rendering: %s", why)
    return TailRefusedError(Reason.RENDER_ERROR)


def reason_of(why: Exception) -> str:
    """Return the `Reason` for an error."""
    return Reason.TEMPLATE_REFUSES if isinstance(why, TemplateRefusedError) else str(why)

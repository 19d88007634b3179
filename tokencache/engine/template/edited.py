"""Finds what the template writes around recorded replies in a history that was edited.

The whole history is rendered with sentinels in place of the recognized replies. The gaps around the sentinels are the *frame* into which
the exact ids of the replies are inserted. A reply was sampled after a generation prompt, but a rendered history often opens a reply with
other ids. So each gap of the frame ends where its last message ends, and the reply's own generation prompt is added after it. The
*opening* of a reply, the ids that open it in a history, is found by rendering the messages before it separately.

**Settled turns.** Many templates show the reasoning of an assistant message, or an empty thinking block, only after the last question. So
if the client wrote assistant messages itself, a history with a new question is rendered as if it had been edited. That costs two renderings
of the whole history. But once a question follows these messages, another question rarely changes them. A turn is *stable* if its prompt is
rendered as before with the next question, and also with one more question after that. A turn that continues a stable turn, and adds no
such message, is stable too, because its prompt begins with the same ids.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import NamedTuple

import msgspec

from tokencache.core import ids
from tokencache.core.reasons import Reason
from tokencache.core.turn import Turn
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.template.boundary import ASK, SENTINEL, Boundary, BoundaryUnknownError, SentinelPlace, stand_in
from tokencache.engine.template.learned import REPLY, LearnedTemplate, check_same_past, tail_refusals, without_tools
from tokencache.engine.template.renderer import RenderError, TemplateRefusedError
from tokencache.engine.template.shapes import TailRequest
from tokencache.engine.template.tails import DEEPER, RECHECK_EVERY
from tokencache.recent import Recent

MOST_CONTEXTS, MOST_KINDS, MOST_OPENINGS, MOST_STABLE = 65_536, 4096, 8, 65_536
"""Limits for remembered contexts, kinds of replies, openings of one kind, and stable turns."""
END_OF_MESSAGE, SHORT_END = 8, 3
"""Numbers of tokens that identify the end of a message, and of a short message."""


class HistoryFrame(NamedTuple):
    """The packed ids that a template writes around recognized replies.

    Attributes:
        fronts: the ids before each reply, since the preceding one.
        gaps: the same without the openings, and the ids after the last reply.
        openings: the ids that open each reply in a history; `None` if they cannot be separated.
        generation_prompts: the known generation prompts.
        unprompted: for each reply, whether the template writes no generation prompt after a message with the role of the preceding one.
        rendered: the rendering with the sentinels, and `real` the one with the real replies.
        sentinels: the ids of the sentinel in each reply, and what follows it up to the reply's end.
        in_calls: for each reply, whether its sentinel is in the arguments of a call.
    """

    fronts: list[bytes]
    gaps: list[bytes]
    openings: list[bytes | None]
    generation_prompts: tuple[bytes, ...]
    unprompted: list[bool]
    rendered: bytes
    real: bytes
    sentinels: list[bytes]
    in_calls: list[bool]

    @property
    def longest(self) -> int:
        """The number of bytes at the end of a prompt that `generation_prompt` needs."""
        return max(END_OF_MESSAGE * ids.ID_BYTES, *map(len, self.generation_prompts))

    def generation_prompt(self, n: int, prompt: bytes, *, same_message: bool) -> bytes | None:
        """Find the generation prompt at the end of `prompt`, after which reply `n` was sampled; `None` if it cannot be identified.

        A template may write no generation prompt, in general or after such a message. Then the reply was sampled directly after the
        preceding message, and the result is `b""`. This is certain if that is still the preceding message (`same_message`) and `prompt`
        ends like it. Otherwise the template must be known to write no generation prompt at this place.
        """
        opening = self.openings[n]
        if opening is None:
            return None
        known = [ending for ending in (*self.generation_prompts, opening) if ending and prompt.endswith(ending)]
        end, last = self.gaps[n][-END_OF_MESSAGE * ids.ID_BYTES :], self.gaps[n][-ids.ID_BYTES :]
        unprompted = self.unprompted[n] or not (opening and any(self.generation_prompts))
        bare = (same_message and prompt.endswith(end)) or (prompt.endswith(last) and unprompted)
        return max(known, key=len, default=b"" if bare else None)


class _ContextEnd(NamedTuple):
    """The end of conversations in a context: the generation prompt, and the trailer that is written even without a generation prompt."""

    generation_prompt: bytes
    trailer: bytes


class _Openings:
    """The openings of one kind of reply in a history; `unprompted` means that no generation prompt was ever seen there."""

    __slots__ = ("known", "unprompted")

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.unprompted = True


class _Stable(NamedTuple):
    """A stable turn.

    `foreign` is the hash of the client's own assistant messages in its prompt. `messages` is the number of messages when it was proven, and
    `turns` the number of turns since then.
    """

    foreign: bytes
    messages: int
    turns: int


class EditedHistories:
    """Finds the frames of edited histories for one engine, and remembers stable turns."""

    def __init__(self, template: LearnedTemplate) -> None:
        self._template = template
        self._openings: Recent[object, _Openings] = Recent(MOST_KINDS)
        self._ends: Recent[bytes, _ContextEnd] = Recent(MOST_CONTEXTS)
        self._stable: Recent[tuple[str, str], _Stable] = Recent(MOST_STABLE)

    async def frame(self, request: TailRequest, places: Sequence[int], *, in_text: bool = False) -> HistoryFrame:
        """Render a whole conversation and return the frame of the replies at `places`; the last of them is the reply of `request`.

        With `in_text`, the sentinels are in the texts of the replies, also of those with calls, wherever the template shows their texts.

        Raises:
            TailRefusedError: the frame cannot be proven.
        """
        with tail_refusals():
            return await self._frame(request, places, in_text=in_text)

    def is_stable(self, session: str, turn: Turn) -> bool:
        """Whether a turn is stable: further questions and tool results do not change how its prompt is rendered.

        After some turns, and when the history has grown, the answer is false, so that the caller proves it again (`confirm`).
        """
        known = self._stable.get((session, turn.id))
        if known is None:
            before = self._stable.get((session, turn.parent or ""))
            if before is None or before.foreign != turn.foreign or turn.anchors:
                return False
            known = self._stable[session, turn.id] = before._replace(turns=before.turns + 1)
        return known.turns < RECHECK_EVERY and turn.messages <= DEEPER * known.messages

    async def confirm(self, turn: Turn, request: TailRequest, places: Sequence[int], frame: HistoryFrame) -> None:
        """Remember a turn as stable if one more question leaves everything before its reply as it is in `frame`.

        `frame` is that of `request` with the replies at `places`, the last of which is the turn's reply. The caller has compared it with
        the turn's prompt.
        """
        asked = msgspec.structs.replace(request, raw=[*request.raw, REPLY, ASK])
        fronts: list[bytes] = []
        with suppress(BoundaryUnknownError, RenderError):
            boundaries = [await self._template.boundary(request, request.conversation.messages[place]) for place in places]
            rest = await self._template.full(asked, dict(zip(places, boundaries, strict=True)))
            for boundary in boundaries:
                front, rest = boundary.split(rest)
                fronts.append(front)
        if fronts == frame.fronts:
            self._stable[request.session, turn.id] = _Stable(turn.foreign, len(request.raw), 0)
        else:
            self._stable.pop((request.session, turn.id), None)

    async def _frame(self, request: TailRequest, places: Sequence[int], *, in_text: bool) -> HistoryFrame:
        replies = {place: request.conversation.messages[place] for place in places}
        boundaries = {place: await self._template.boundary(request, reply, in_text=in_text) for place, reply in replies.items()}
        rendered = rest = await self._template.full(request, boundaries)
        real = await self._template.real(request, places)
        await self._learn_generation_prompts(request, places, rendered, real)
        fronts: list[bytes] = []
        gaps: list[bytes] = []
        openings: list[bytes | None] = []
        unprompted: list[bool] = []
        for n, (place, boundary) in enumerate(boundaries.items()):
            front, rest = boundary.split(rest)
            self._template.check_tail(rest, boundary)
            gap, opening, bare = await self._split_opening(request, front, place, places[n - 1] if n else None, boundaries)
            fronts.append(front)
            gaps.append(gap)
            openings.append(opening)
            unprompted.append(bare)
        gaps.append(rest)
        if None not in openings:
            _check_gaps(gaps, real)
        return HistoryFrame(
            fronts,
            gaps,
            openings,
            tuple(self._template.generation_prompts),
            unprompted,
            rendered,
            real,
            sentinels=[boundary.mark + boundary.closing for boundary in boundaries.values()],
            in_calls=[boundary.place is not SentinelPlace.TEXT for boundary in boundaries.values()],
        )

    async def _split_opening(
        self, request: TailRequest, front: bytes, place: int, last: int | None, boundaries: Mapping[int, Boundary]
    ) -> tuple[bytes, bytes | None, bool]:
        """Split `front`, the ids between the replies at `last` and `place`, into the messages and the opening of the reply at `place`.

        Returns:
            The ids of the messages, the opening (`None` if they cannot be separated), and whether the template writes no generation prompt
            there.
        """
        messages = request.conversation.messages
        named = tuple(call.name for call in messages[place].calls) if boundaries[place].place is not SentinelPlace.TEXT else ()
        role = messages[place - 1].role if place else ""
        kind = (request.conversation.sampling_context, named, bool(messages[place].text), role)
        openings = self._openings.get(kind)
        if openings is None:
            openings = self._openings[kind] = _Openings()
        opening = max((known for known in openings.known if front.endswith(known)), key=len, default=b"")
        gap = front[: len(front) - len(opening)]
        longer = any(prompt and gap.endswith(prompt) for prompt in self._template.generation_prompts)  # or a message ends with these ids
        if opening and not longer:
            return gap, opening, openings.unprompted
        body, generation_prompt = await self._body(request, place, last, boundaries)
        openings.unprompted = openings.unprompted and not generation_prompt
        bare = not any(self._template.generation_prompts)
        gap, found = await self._split_after(request, body, front, bare=bare)
        if found is None and (request.systems or request.args.tools is not None):  # a template may move these before the last message
            with suppress(BoundaryUnknownError, TemplateRefusedError):
                body, _ = await self._body(request, place, last, boundaries, args=without_tools(request.args))
                gap, found = await self._split_after(request, body, front, bare=bare)
        if found is not None and len(openings.known) < MOST_OPENINGS and front == gap + found:
            openings.known.add(found)
        return gap, found, openings.unprompted

    async def _split_after(self, request: TailRequest, body: bytes, front: bytes, *, bare: bool) -> tuple[bytes, bytes | None]:
        """Split `front` after the messages that are rendered alone in `body`; the second part is `None` if their end cannot be found.

        The last token of `body` may differ in `front`. Either it merged with the text after it, or the template writes it only after the
        last message of a conversation (DeepSeek-V3 closes results with it, but not before a reply with calls). In the latter case, the
        reply must follow a known generation prompt.
        """
        same = ids.common_head(body, front)
        if same == ids.count(body):
            return body, front[len(body) :]
        if same < ids.count(body) - 1:  # the last message begins differently in `front`, or other text precedes it
            return _split_at_end(body, front, self._template.stop_ids, bare=bare)
        rest = ids.tail(front, same)
        try:
            parts = ids.tail(body, same), ids.head(rest, 1)
            closing, merged = [await self._template.renderer.read(request.model, part) for part in parts]
        except RenderError:
            closing = merged = ""
        if closing and merged.startswith(closing):
            return body, rest  # the reply was sampled after the token that had not merged
        prompted = any(prompt and rest.startswith(prompt) for prompt in self._template.generation_prompts)
        return (ids.head(front, same), rest) if prompted else (front, None)

    async def _body(
        self, request: TailRequest, place: int, last: int | None, boundaries: Mapping[int, Boundary], *, args: RenderArgs | None = None
    ) -> tuple[bytes, bytes]:
        """Render the messages between two replies without the latter reply.

        If `args` is given, the system messages at the beginning are left out.

        Returns:
            The ids that are written both with and without a generation prompt, and the generation prompt.
        """
        systems = request.systems if args is None else ()
        if last is None:
            messages = [*systems, *request.raw[len(request.systems) : place]]
        else:
            reply = stand_in(request.conversation.messages[last], SENTINEL, boundaries[last].place)
            messages = [*systems, ASK, reply, *request.raw[last + 1 : place]]
        kind = "full" if last is None else "small"
        both = [await self._template.render(kind, request, messages, args, generation=generation) for generation in (True, False)]
        if last is not None:
            both = [boundaries[last].after(one) for one in both]
        end = self._ends.get(request.conversation.sampling_context)
        body = ids.head(both[0], ids.common_head(*both)).removesuffix(end.trailer if end is not None else b"")
        role = request.conversation.messages[place - 1].role if place else ""
        prompt = self._template.generation_prompt(both[0], body, last=role)
        if role == "assistant":  # an end of turn that differs at the end of a conversation is a part of the message
            known = [one for one in self._template.generation_prompts if one and prompt.endswith(one)]
            prompt = max(known, key=len, default=prompt)
            body = both[0].removesuffix(prompt)
        return body, prompt

    async def _learn_generation_prompts(self, request: TailRequest, places: Sequence[int], rendered: bytes, real: bytes) -> None:
        """Learn the generation prompts after which replies in this conversation may have been sampled."""
        context = request.conversation.sampling_context
        end = self._ends.get(context)
        if end is None:
            with suppress(TemplateRefusedError):
                end = self._ends[context] = await self._context_end(request)
        if end is None or not rendered.endswith(end.generation_prompt):
            last = request.conversation.messages[-1].role
            self._template.generation_prompt(real, await self._template.real(request, places, generation=False), last=last)

    async def _context_end(self, request: TailRequest) -> _ContextEnd:
        """Find the end of a small conversation in this context."""
        prompted, unprompted = [
            await self._template.render("small", request, [*request.systems, ASK], generation=generation) for generation in (True, False)
        ]
        plain = without_tools(request.args)  # without system messages and tools, which some templates move
        alone, answered = [
            await self._template.render("small", request, messages, plain, generation=False) for messages in ([ASK], [ASK, REPLY])
        ]
        same = ids.common_head(alone, answered)
        trailer = ids.tail(alone, same) if same < ids.count(alone) - 1 else b""  # the last token may have merged with the next
        return _ContextEnd(self._template.generation_prompt(prompted, unprompted.removesuffix(trailer), last="user"), trailer)


def _split_at_end(body: bytes, front: bytes, stop_ids: AbstractSet[int], *, bare: bool) -> tuple[bytes, bytes | None]:
    """Split `front` where the last tokens of `body` occur in it; see `EditedHistories._split_after`.

    With `bare`, the template has no generation prompts, so fewer tokens identify the end of a message.
    """
    # The last token may have merged with the next; then the tokens before it are found after any earlier message with the same end. An end
    # that repeats itself cannot be distinguished from its repetition.
    for length in (END_OF_MESSAGE, SHORT_END) if bare else (END_OF_MESSAGE,):
        end = ids.tail(body, max(ids.count(body) - length, 0))
        size = ids.count(end)
        whole, but_one = ids.find_last(front, end), ids.find_last(front, ids.head(end, size - 1))
        if but_one < 0:
            continue
        merged = length == END_OF_MESSAGE and (whole < 0 or but_one >= whole + size)
        if but_one != whole and not merged:
            return front, None
        cut = but_one + size - merged
        gap, rest = ids.head(front, but_one) + end, ids.tail(front, cut)
        return (gap, rest) if stop_ids.isdisjoint(ids.unpack(rest)) else (front, None)
    return front, None


def _check_gaps(gaps: Sequence[bytes], real: bytes) -> None:
    """Refuse gaps that do not occur, in order, in the rendering with the real replies: the replies change what is written around them."""
    check_same_past(gaps[0], real)
    if not real.endswith(gaps[-1]):
        raise BoundaryUnknownError(Reason.TAIL_NOT_PROVEN)
    rest = ids.tail(real, max(ids.count(gaps[0]) - 1, 0))
    for gap in gaps[1:-1]:
        sure = ids.head(gap, max(ids.count(gap) - 1, 0))  # the last token may have merged with the next
        at = ids.find(rest, sure)
        if at < 0:
            raise BoundaryUnknownError(Reason.TAIL_NOT_PROVEN)
        rest = ids.tail(rest, at + ids.count(sure))

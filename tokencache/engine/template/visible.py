"""Finds the part of each recorded reply that the template still shows in a history.

Many templates omit the thinking of earlier replies: after the next question, or always. A session that follows the template
(`history: follow`) must omit it too, and keep the exact ids of the rest. The replies are put into the history as they were served, with
their thinking, so that the template decides:

1. A rendering with a mark in place of each reply's thinking shows whose thinking is omitted.
2. The frame (`edited`) has the sentinel in the text of each reply. What precedes it, with the opening that the template writes there, is
   the front of the reply. The rendering of the real replies must consist of the same fronts, with the visible texts between them.
3. A reply is *whole* if its thinking is shown. A reply without thinking is whole if its generation prompt and its own text begin like its
   front and its visible text: a template may also omit an empty thinking block, or write one.
4. Of any other reply, the end that equals the visible text is kept. If they differ, because the model wrote a call in another form than
   the template does, the part after the reply's thinking and the template's end of thinking is kept. Both must begin at a token, which
   the engine's own `/detokenize` shows.

What is not proven has no part; the caller renders that reply as text.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tokencache.core import ids
from tokencache.core.messages import BLANK, Message, ToolCall
from tokencache.core.reasons import Reason
from tokencache.core.splice import without_stop_id
from tokencache.core.turn import hash_ids
from tokencache.engine.template.boundary import ASK, OTHER, SENTINEL, BoundaryUnknownError
from tokencache.engine.template.edited import HistoryFrame
from tokencache.engine.template.learned import LearnedTemplate, tail_refusals, without_tools
from tokencache.engine.template.shapes import TailRequest
from tokencache.recent import Recent, RecentBySize

TEXT_BYTES = 16 * 2**20
"""Limit for remembered texts of completions, openings and closings, in characters."""
MOST_OFFSETS, MOST_BRACKETS = 65_536, 4096
_AROUND = 3
"""Number of tokens tried on each side of the place that the lengths suggest: a part of a character may decode to several characters."""


class SampledReply(NamedTuple):
    """A recorded reply in a history.

    Attributes:
        completion: the packed ids that were sampled, as far as the client received them.
        served: the message that was served.
        generation_prompt: the packed generation prompt after which it was sampled; `None` if it cannot be identified.
    """

    completion: bytes
    served: Message
    generation_prompt: bytes | None


class ShownPart(NamedTuple):
    """The tokens of a reply that the template shows: `tokens` of them from `offset` on; `whole` if its thinking is shown, or it has none.

    A whole reply follows its generation prompt. Another part follows the opening that the template writes in a history. `tokens` is 0 if
    the template shows nothing of the reply.
    """

    offset: int
    tokens: int
    whole: bool


class _Brackets(NamedTuple):
    """What the template writes before and after thinking, without whitespace around it."""

    before: str
    after: str


_NEVER_SHOWN = _Brackets("", "</think>")


def as_served(raw: bytes, served: Message) -> bytes:
    """Write an echoed assistant message (raw JSON) as it was served, with its thinking; the ids of its calls stay as they are.

    White space that the client trimmed from the text stays trimmed: without the proxy, the policy would not see it either. Arguments that
    are not a JSON object stay as they are, too: the engine might refuse them. Calls that the client left out are restored.
    """
    entry = msgspec.json.decode(raw)
    entry.pop("reasoning_content", None)
    content = entry.get("content")
    if not isinstance(content, str | None) or (content or "").strip(BLANK) != (served.content or "").strip(BLANK):
        content = served.content
    entry |= {"content": content, "reasoning": served.reasoning}
    if len(calls := entry.get("tool_calls") or []) != len(served.calls):
        calls = entry["tool_calls"] = [{"id": ours.id, "type": "function", "function": {"arguments": "{}"}} for ours in served.calls]
    for call, ours in zip(calls, served.calls, strict=True):
        call["function"] |= {"name": ours.name} | ({"arguments": ours.arguments} if _is_object(ours.arguments) else {})
    return msgspec.json.encode(entry)


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (ValueError, RecursionError):
        return False


class VisibleReplies:
    """Finds the visible parts of replies for one engine."""

    def __init__(self, template: LearnedTemplate) -> None:
        self._template = template
        self._texts: RecentBySize[bytes, str] = RecentBySize(TEXT_BYTES, lambda text: len(text) + 1)
        self._offsets: Recent[tuple[bytes, int], int | None] = Recent(MOST_OFFSETS)
        self._brackets: Recent[object, _Brackets] = Recent(MOST_BRACKETS)

    async def parts(
        self, request: TailRequest, frame: HistoryFrame, places: Sequence[int], replies: Sequence[SampledReply]
    ) -> list[ShownPart | None]:
        """Find the visible part of each reply; `None` for replies whose part is not proven.

        Args:
            request: the conversation, with the replies as they were served (`as_served`).
            frame: its frame, with the sentinel in the text of the replies.
            places: the places of the replies.
            replies: the replies, in the same order.

        Raises:
            TailRefusedError: the rendering does not consist of the frame and the replies.
        """
        with tail_refusals():
            return await self._parts(request, frame, places, replies)

    async def _parts(
        self, request: TailRequest, frame: HistoryFrame, places: Sequence[int], replies: Sequence[SampledReply]
    ) -> list[ShownPart | None]:
        omitted = await self._omitted(request, places, replies)
        fronts, end = await self._front_texts(request, frame)
        gaps = [await self._gap_text(request, frame, n, front) for n, front in enumerate(fronts)]
        rendered = await self._read(request, frame.real)
        found: list[ShownPart | None] = []
        at = 0
        for n, (front, reply) in enumerate(zip(fronts, replies, strict=True)):
            following = [*(gaps[n + 1 : n + 2] or [end]), *fronts[n + 1 : n + 2]]
            thinks = bool(reply.served.thought) and n not in omitted
            start = at + len(gaps[n] if thinks or not rendered.startswith(front, at) else front)
            until = rendered.find(next(filter(None, following), ""), start)
            if until < 0 or not rendered.startswith(gaps[n], at):
                raise BoundaryUnknownError(Reason.TAIL_NOT_PROVEN)
            opening = front[len(gaps[n]) :]
            calls_first = any(_named_in(opening, call) for call in reply.served.calls)
            in_front = not (frame.in_calls[n] or calls_first) and rendered.startswith(front, at)
            openings = [opening] if in_front else []
            if thinks or await self._is_whole(request, reply, openings, rendered[at + len(gaps[n]) : until]):
                found.append(_whole(reply))
            else:
                found.append(await self._part(request, reply, rendered[start:until]) if in_front else None)
            at = until
        if rendered[at:] != end:
            raise BoundaryUnknownError(Reason.TAIL_NOT_PROVEN)
        return found

    async def _omitted(self, request: TailRequest, places: Sequence[int], replies: Sequence[SampledReply]) -> set[int]:
        """Return which of the replies, by number, have thinking that the template omits."""
        marks = {n: f"{SENTINEL}{n}{OTHER}" for n, reply in enumerate(replies) if reply.served.thought}
        if not marks:
            return set()
        messages = list(request.raw)
        for n, mark in marks.items():
            messages[places[n]] = _with_thinking(messages[places[n]], replies[n].served, mark)
        shown = await self._read(request, await self._template.render("full", request, messages, generation=False))
        return {n for n, mark in marks.items() if mark not in shown}

    async def _front_texts(self, request: TailRequest, frame: HistoryFrame) -> tuple[list[str], str]:
        """Return the text before each reply, since the preceding one, and the text after the last."""
        rest = await self._read(request, frame.rendered)
        fronts = []
        for sentinel in frame.sentinels:
            front, found, rest = rest.partition(await self._short(request, sentinel))
            if not found:
                raise BoundaryUnknownError(Reason.SENTINEL_LOST)
            fronts.append(front)
        return fronts, rest

    async def _gap_text(self, request: TailRequest, frame: HistoryFrame, n: int, front: str) -> str:
        """Return the front of reply `n` without its opening."""
        opening = await self._short(request, frame.openings[n] or b"")
        return front.removesuffix(opening)

    async def _is_whole(self, request: TailRequest, reply: SampledReply, openings: Sequence[str], written: str) -> bool:
        """Whether a reply without thinking, and its generation prompt, begin like `written`, its opening and its visible text."""
        if reply.served.thought or reply.generation_prompt is None:
            return False
        generation_prompt = await self._short(request, reply.generation_prompt)
        own = generation_prompt + await self._short(request, self._body(reply.completion))
        both = [opening for opening in (*openings, generation_prompt) if own.startswith(opening) and written.startswith(opening)]
        shows_calls = not reply.served.calls or _named_in(written, reply.served.calls[0])
        return bool(shows_calls) and any(_begin_alike(own[len(opening) :], written[len(opening) :], reply.served) for opening in both)

    def _body(self, completion: bytes) -> bytes:
        """Return a completion without its stop id."""
        return without_stop_id(completion, self._template.stop_ids)

    async def _part(self, request: TailRequest, reply: SampledReply, shown: str) -> ShownPart | None:
        """Find the part of a reply that is visible as `shown`."""
        body = self._body(reply.completion)
        stopped = len(body) < len(reply.completion)
        text = await self._short(request, body)
        if not shown or not (reply.served.text or reply.served.calls):
            return ShownPart(ids.count(reply.completion), 0, whole=False)
        thought = reply.served.thought
        thinking_end = text.find(thought) + len(thought) if thought in text else 0
        for sampled in dict.fromkeys((text, text.rstrip(BLANK))):
            if sampled.endswith(shown) and len(sampled) - len(shown) >= thinking_end:
                end = await self._token_at(request, body, len(sampled))
                offset = await self._token_at(request, body, len(sampled) - len(shown))
                if end is None or offset is None:
                    return None
                return ShownPart(offset, end - offset + (stopped and sampled == text), whole=False)
        begin = await self._visible_from(request, text, reply.served, shown)
        if begin is None or (offset := await self._token_at(request, body, begin)) is None:
            return None
        if not text.startswith(shown, begin):
            return ShownPart(offset, ids.count(reply.completion) - offset, whole=False)
        end = await self._token_at(request, body, begin + len(shown))  # the template does not show the calls
        return ShownPart(offset, end - offset, whole=False) if end is not None else None

    async def _visible_from(self, request: TailRequest, text: str, served: Message, shown: str) -> int | None:
        """Return the index in a sampled text after its thinking and the end of thinking; `None` if that is not certain.

        The text after it begins like `shown`. A client that asked for no reasoning was not served the thinking; then the first end of
        thinking ends it, as it does for vLLM's reasoning parsers.
        """
        brackets = await self._thinking_brackets(request)
        thought = served.thought if served.thought in text else ""
        before, _, after = text.partition(thought) if thought else ("", "", text)
        if thought and brackets.before and not brackets.before.endswith(before.strip(BLANK)):
            return None
        if thought and not after.lstrip(BLANK).startswith(brackets.after):
            return None
        candidates = [after.partition(brackets.after)[2]] if brackets.after in after else []
        for rest in candidates if thought else [text, *candidates]:
            visible = rest.lstrip(BLANK)
            white = shown[: len(shown) - len(shown.lstrip(BLANK))]
            if _begin_alike(visible, shown, served) and rest[: len(rest) - len(visible)].endswith(white):
                return len(text) - len(visible) - len(white)
        return None

    async def _thinking_brackets(self, request: TailRequest) -> _Brackets:
        """Find what the template writes around the thinking of the last reply; `</think>` ends it if the template never shows thinking."""
        key = (request.model, request.args.digest)
        known = self._brackets.get(key)
        if known is None:
            reply = msgspec.json.encode({"role": "assistant", "content": OTHER, "reasoning": SENTINEL})
            small = await self._template.render("small", request, [ASK, reply], without_tools(request.args), generation=False)
            before, _, rest = (await self._read(request, small)).partition(SENTINEL)
            after, text, _ = rest.partition(OTHER)
            known = self._brackets[key] = _Brackets(before.strip(BLANK), after.strip(BLANK)) if text else _NEVER_SHOWN
        return known

    async def _token_at(self, request: TailRequest, completion: bytes, index: int) -> int | None:
        """Return the number of tokens before a character of a completion's text; `None` if no token begins there."""
        key = (hash_ids(completion), index)
        if key not in self._offsets:
            self._offsets[key] = await self._find_token(request, completion, index)
        return self._offsets[key]

    async def _find_token(self, request: TailRequest, completion: bytes, index: int) -> int | None:
        text, low, high = await self._short(request, completion), 0, ids.count(completion)
        if index in {0, len(text)}:
            return low if index == 0 else high
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if len(await self._read(request, ids.head(completion, middle))) < index else (low, middle)
        for n in range(max(low - _AROUND, 0), min(low + _AROUND, ids.count(completion)) + 1):
            both = [await self._read(request, part) if part else "" for part in (ids.head(completion, n), ids.tail(completion, n))]
            if both == [text[:index], text[index:]]:
                return n
        return None

    async def _short(self, request: TailRequest, packed: bytes) -> str:
        """Decode ids, and remember their text."""
        if not packed:
            return ""
        key = hash_ids(packed)
        text = self._texts.get(key)
        if text is None:
            text = await self._read(request, packed)
            self._texts[key] = text
        return text

    async def _read(self, request: TailRequest, packed: bytes) -> str:
        return await self._template.renderer.read(request.model, packed)


def _whole(reply: SampledReply) -> ShownPart | None:
    return ShownPart(0, ids.count(reply.completion), whole=True) if reply.generation_prompt is not None else None


def _begin_alike(own: str, shown: str, served: Message) -> bool:
    """Whether what was sampled and what is shown both begin with the reply's text; without a text, with the same first call.

    Calls are compared up to the name or id of the first one, without whitespace.
    """
    if served.text:
        return own.lstrip(BLANK).startswith(served.text) and shown.lstrip(BLANK).startswith(served.text)
    if served.calls:
        named = _named_in(shown, served.calls[0])
        head = shown[: shown.find(named)] + named
        return bool(named) and "".join(own.split()).startswith("".join(head.split()))
    return own == shown == ""


def _named_in(shown: str, call: ToolCall) -> str:
    """Return the name or the id by which a text shows a call; `""` if it does not show it."""
    return next((named for named in (call.name, call.id) if named and named in shown), "")


def _with_thinking(raw: bytes, served: Message, mark: str) -> bytes:
    """Put a mark in place of a reply's thinking, which is in a member of its own or at the beginning of the text."""
    entry = msgspec.json.decode(raw)
    if (served.reasoning or "").strip(BLANK):
        return msgspec.json.encode({**entry, "reasoning": mark})
    return msgspec.json.encode({**entry, "content": (served.content or "").replace(served.thought, mark, 1)})

"""Reads from small renderings how a chat template writes replies, so that the oracle can render the prompt that it expects.

The oracle finds that rendering in another way than the product: the whole request is rendered as text, with a mark in place of every
recognised reply, and cut at the marks.
"""

from __future__ import annotations

import contextlib
import functools
import json
from typing import TYPE_CHECKING, NamedTuple

from tests.system.adversary.engine import RefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.system.adversary.observed import Span
    from tests.system.adversary.stack import Called, Stack
    from tests.system.adversary.words import Message


class ReplyOpening(NamedTuple):
    """The generation prompt after which a reply was sampled; `written` is what the template writes there before a reply in a history.

    `written` is `None` where that begins with the template's head of replies.
    """

    text: str
    written: str | None = None


class TemplateReading(NamedTuple):
    """How a template writes replies: after `head`, and before one of `ends` if there are any.

    `bare` says that a reply to a tool's result has no head.
    """

    head: str
    ends: tuple[str, ...]
    style: str
    bare: bool
    stop_ids: frozenset[int]

    def opening(self, called: Called, prompt: str, reply: Message) -> ReplyOpening:
        """The generation prompt at the end of a prompt; `reply` was sampled after it. One that continues a message has none."""
        if called.continues:
            return ReplyOpening("")
        if self.bare:  # some replies have a head, some have none: find out for this one
            messages = [_marked(message, "Zq") if message["role"] == "assistant" else message for message in called.messages]
            return self._opening(called, messages, reply)
        if not self.head:
            return self._opening(called, _small(called.messages), reply)
        return ReplyOpening(prompt[prompt.rfind(self.head) :])

    def _opening(self, called: Called, messages: list[Message], reply: Message) -> ReplyOpening:
        """What the template writes after these messages: the generation prompt, and what precedes this reply in a history."""
        before, shown = called.text(messages), called.text([*messages, _marked({"role": "assistant", **reply}, "Zqwy")])
        same = len(_common(before, shown))
        if self.bare and before.endswith(self.head):
            same = min(same, len(before) - len(self.head))
        return ReplyOpening(before[same:], shown[same : shown.index("Zqwy", same)])

    def _headless(self, called: Called, place: int) -> str:
        """What the template writes before a reply, where it has no head of replies; only the last messages are rendered."""
        return self._opening(called, _small(called.messages[:place]), called.messages[place]).written or ""

    def pieces(
        self, called: Called, spans: Sequence[Span], openings: Sequence[ReplyOpening], parts: Sequence[bool], added: Sequence[str]
    ) -> list[str]:
        """What is written before, between and after the recognised replies. Of `parts`, the opening is that of a history, too.

        `added` are texts that the client wrote at the ends of replies: they follow the reply, before its end of turn.

        Raises:
            LookupError: a reply is not shown.
            RefusedError: the template refuses the conversation.
        """
        messages = list(called.messages)
        marks = [f"Zq{span.place}wy" for span in spans]
        for span, mark in zip(spans, marks, strict=True):
            messages[span.place] = _marked(messages[span.place], mark)
        for span, words in zip(spans, added, strict=True):
            messages[span.place] |= {"content": messages[span.place]["content"] + words}
        shown = called.text(messages, continues=called.continues)
        out, at = [], 0
        for span, mark, opening, part, words in zip(spans, marks, openings, parts, added, strict=True):
            first, last = shown.find(mark, at), shown.rfind(mark) + len(mark)
            written = opening.written if self.head else self._headless(called, span.place)
            known = written is not None and first >= 0 and shown.endswith(written, at, first)
            begin = first - len(written or "") if known else shown.rfind(self.head, at, first)
            before, headed = shown, shown.startswith(self.head, begin) and (known or begin + len(self.head) == first)
            if self.bare and not headed and (opening.text.startswith(self.head) or not known):  # it has no head at its place now
                later = [message for message in messages[span.place :] if message["role"] == "system"]  # these are written at the beginning
                alone = called.text([*messages[: span.place], *later], generation=False)
                # DeepSeek-V3 also ends a conversation with what opens a reply after results; a user's text may end with the same words
                here = [message["role"] for message in messages[: span.place] if message["role"] != "system"]
                after_result = here[-1:] == ["tool"]
                end = len(alone.removesuffix(opening.text) if after_result else alone)
                before, begin = (alone, end) if alone.startswith(shown[:at]) else (shown, begin if known else -1)
            if first < 0 or (begin < at and not part):
                raise LookupError(f"{span.place}: {shown[max(at, first - 60) : first]!r}")
            out.append(shown[at:first] if part else before[at:begin] + opening.text)
            called_it = shown.startswith("Z", last)
            if words or (called.continues and span.place == len(messages) - 1):
                at = last
                continue
            ends = ("<|call|>",) if self.style == "harmony" and called_it else self.ends
            at = _end(shown, ends, last, called=called_it)
        return [*out, shown[at:]]


def _small(messages: Sequence[Message]) -> list[Message]:
    """A small conversation that ends as this one does."""
    return [_ASK, _CALL, _RESULT] if messages and messages[-1]["role"] == "tool" else [_ASK]


def _end(shown: str, ends: Sequence[str], last: int, *, called: bool) -> int:
    """The end of a reply whose last mark ends at `last`: before its end of turn."""
    if not ends:
        return shown.index("</tool_call>", last) + len("</tool_call>") if called else last
    found = [i for end in ends if (i := shown.find(end, last)) >= 0]
    if not found:
        raise LookupError(f"no end of turn after character {last}")
    return min(found)


def _marked(message: Message, mark: str) -> Message:
    """A reply with a mark in place of its text, and another one in place of the arguments of its calls."""
    out: Message = {"role": "assistant", "content": mark}
    if calls := message.get("tool_calls"):
        given = json.dumps({"z": f"{mark}Z"})  # of several calls a template may show the first one only
        out["tool_calls"] = [{**call, "function": {**call["function"], "arguments": given}} for call in calls]
    return out


@functools.lru_cache(maxsize=4)
def reading_of(stack: Stack) -> TemplateReading:
    """Read from small conversations how a template writes replies."""
    renderer, kind = stack.renderer, stack.kind
    ask, said = _ASK, {"role": "assistant", "content": "Zq"}
    opened, closed = (renderer.prompt([ask], None, {}, generation=generation) for generation in (True, False))
    with contextlib.suppress(RefusedError):
        if opened == closed:  # the generation prompt is always there, or there is none
            closed = renderer.prompt([ask, {**ask, "content": "And"}], None, {}, generation=False)
    start = len(_common(opened, closed))
    opening = head = opened[start:]
    for talk in ([ask, said], [ask, said, ask, said, ask]):
        shown = renderer.prompt(talk, None, {}, generation=False)
        head = _common(head, shown[start : shown.index("Zq")])
    bare = False
    with contextlib.suppress(RefusedError):  # it may take no results
        bare = not renderer.prompt([ask, _CALL, _RESULT], None, {}).endswith(opening)
    return TemplateReading(head, kind.ends, kind.style, bare, frozenset(renderer.words.id_of(stop) for stop in kind.stops))


_ASK: Message = {"role": "user", "content": "Ask"}
_RESULT: Message = {"role": "tool", "tool_call_id": "call00001", "content": "Got"}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "bash", "arguments": "{}"}}],
}


def _common(one: str, other: str) -> str:
    return one[: next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))]

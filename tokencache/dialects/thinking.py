r"""Splits inline thinking, `<think>…</think>` at the beginning of a reply's text, and puts it back.

An engine without a reasoning parser, and NeMo Gym's model server, leave the model's thinking in the text. Dialects with a field for
thinking return it there (`Thinking`), as Gym's server does for Responses. The record keeps the engine's text. When the client sends the
thinking back, it is put into the text again (`folded`). So the history has the text that the engine wrote, and equals the record.

    <think>\nHm.\n</think>\n\nYes.      thinking "\nHm.\n", text "\n\nYes."
    <think>\nHm                        thinking "\nHm": the reply was cut off

The opaque member that clients echo (the handle, see `base`) ends with a mark if the thinking was in the text (`signed`, `read_signature`).
Thinking without that mark is `reasoning`, as from every other engine. Chat completions are passed on as the engine writes them.

Source: nemo-gym 0.7.0, `nemo_gym/responses_converter.py` (`THINK_TAG_PATTERN`): it finds blocks anywhere in a text, and only closed ones.
"""

import re
from typing import Any, Literal

import msgspec

from tokencache.dialects.base import HANDLE
from tokencache.dialects.completion_reader import ChoicePart, CompletionChunk, read_completion

Mark = Literal["", "inln", "open"]
"""Where a reply's thinking was: not in its text, in a closed block, or in an unclosed block. Valid base64 after a handle."""
NOT_IN_TEXT: Mark = ""
CLOSED: Mark = "inln"
UNCLOSED: Mark = "open"

_MARKS: dict[str | None, Mark] = {None: NOT_IN_TEXT, "inln": CLOSED, "open": UNCLOSED}
_OPENING, _CLOSING = "<think>", "</think>"
_SIGNATURE = re.compile(rf"({HANDLE.pattern})(inln|open)?")


class Thinking:
    """Parses the chunks of one reply, or its whole body, and splits inline thinking from the text of the first choice.

    Attributes:
        mark: where the thinking was, as far as the reply is parsed.
        settled: whether the rest of the text cannot be thinking, so that its chunks need not be parsed.
    """

    def __init__(self) -> None:
        self.mark = NOT_IN_TEXT
        self.settled = False
        self._pending = ""  # text that may be the beginning of a tag

    def read(self, data: bytes) -> CompletionChunk | None:
        """Parse a completion or a chunk (`completion_reader.read_completion`), with its inline thinking as `reasoning`."""
        completion = read_completion(data)
        choice = completion.choice if completion is not None else None
        if choice is not None and not self.settled:
            self._split(choice)
        return completion

    def _split(self, choice: ChoicePart) -> None:
        reply = choice.reply
        over = choice.message is not None or choice.finish_reason is not None
        if reply.thought and not self.mark:  # the engine has a reasoning parser
            self.settled = True
            thought, text = "", self._pending + (reply.content or "")
        else:
            thought, text = self.feed(reply.content or "", over=over or bool(reply.tool_calls))
        reply.content, reply.reasoning = text, reply.thought + thought
        if choice.delta is None and choice.message is None:
            choice.delta = reply

    def feed(self, piece: str, *, over: bool) -> tuple[str, str]:
        """Split the next piece of the text into thinking and text; `over`: no text follows that could continue a tag."""
        pending, self._pending = self._pending + piece, ""
        if not self.mark:
            if not over and len(pending) < len(_OPENING) and _OPENING.startswith(pending):
                self._pending = pending
                return "", ""
            if not pending.startswith(_OPENING):
                self.settled = True
                return "", pending
            self.mark, pending = UNCLOSED, pending[len(_OPENING) :]
        thought, closing, text = pending.partition(_CLOSING)
        if closing:
            self.mark, self.settled = CLOSED, True
            return thought, text
        kept = 0 if over else _unfinished(thought)
        self._pending = thought[len(thought) - kept :]
        return thought[: len(thought) - kept], ""


def split_text(text: str) -> tuple[str, str]:
    """Split a whole text into its inline thinking, `""` if it has none, and the rest."""
    return Thinking().feed(text, over=True)


def _unfinished(text: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a closing tag."""
    return next((size for size in range(min(len(_CLOSING) - 1, len(text)), 0, -1) if _CLOSING.startswith(text[-size:])), 0)


def signed(handle: str, mark: Mark) -> str:
    """Write an opaque member: a handle, followed by the mark of the reply's thinking."""
    return handle + mark


def read_signature(value: Any) -> tuple[str, Mark]:
    """Read an opaque member that the client sent back: its handle, `""` if it has none, and the mark of the reply's thinking."""
    found = _SIGNATURE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return "", NOT_IN_TEXT
    return found[1], _MARKS[found[2]]


def in_text(raw: bytes) -> bytes:
    """Move the `reasoning` of a raw chat message into its text, for NeMo Gym's server, which refuses that member."""
    if b'"reasoning"' not in raw:
        return raw
    message = msgspec.json.decode(raw)
    thought, content = message.get("reasoning"), message.get("content")
    if message.get("role") != "assistant" or not isinstance(thought, str | None) or "reasoning" not in message:
        return raw
    if not thought:
        return msgspec.json.encode({name: value for name, value in message.items() if name != "reasoning"})
    if isinstance(content, list):
        message["content"] = [{"type": "text", "text": f"{_OPENING}{thought}{_CLOSING}"}, *content]
        del message["reasoning"]
        return msgspec.json.encode(message)
    return msgspec.json.encode(folded(message, CLOSED))


def folded(message: dict[str, Any], mark: Mark) -> dict[str, Any]:
    """Put the `reasoning` of an assistant message back into its text if it was there; the content is a string or missing."""
    if not mark or "reasoning" not in message:
        return message
    closing = _CLOSING if mark == CLOSED else ""
    text = f"{_OPENING}{message['reasoning']}{closing}{message.get('content') or ''}"
    return {**{name: value for name, value in message.items() if name != "reasoning"}, "content": text}

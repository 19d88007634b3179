"""Anthropic Messages: a chat reply, said again as content blocks, whole or event by event.

    message_start ping  (content_block_start  content_block_delta …  content_block_stop) …  message_delta message_stop

A block opens with the first words that belong into it and closes when something else is said, so blocks stand in the
order in which things came; text after a tool call opens another. Each thinking block is signed with the call's handle,
which clients must send back as it is. `message_delta` waits for the engine's last chunk, in which the usage stands.

Decisions, where vLLM 0.32 (`entrypoints/anthropic/serving.py`) does otherwise or nothing:

* `input` must be an object. In a stream the arguments are passed on as they come, whatever they are; in a whole answer
  arguments that are no object are wrapped (`blocks.UNPARSED`): no client runs a tool with them by mistake, and
  the reading unwraps them. vLLM fails there with a 500;
* parallel calls that an engine sends interleaved have several blocks open at a time, told apart by their index, as
  Anthropic's clients accumulate them. vLLM's own parsers never do that; its converter would drop the pieces;
* an answer that says nothing is one empty text block, also in a stream (there vLLM sends no block at all);
* a stream that ends before its reply does is an error, not the end of a turn;
* `input_tokens` excludes what was read from the cache, as Anthropic counts; the prompt's length stands in `message_start`.
"""

from typing import Any

from tokencache.dialects import json_io
from tokencache.dialects.anthropic.vocabulary import ending, error_members, is_json, usage_of, wrapped
from tokencache.dialects.completion_reader import ChoicePart, ToolCallPart, Usage, text_piece
from tokencache.dialects.sse import event_of
from tokencache.dialects.thinking import Thinking, signed

_TAIL = b"}}\n\n"
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"), "tool_use": ("input_json_delta", "partial_json")}
"""How a block of each kind grows: the delta's type, and the member with the words."""
_GROWING = {b"content": "text", b"reasoning": "thinking"}


class _Block:
    """A block that was opened: its place in the message and, of a call, the arguments so far."""

    def __init__(self, place: int, kind: str) -> None:
        self.place, self.kind = place, kind
        self.arguments: list[str] = []
        # Its deltas differ in their last member alone, and there are hundreds: all up to that is written once.
        delta, member = _DELTAS[kind]
        self._head = _event("content_block_delta", index=place, delta={"type": delta, member: ""}).removesuffix(b'""' + _TAIL)

    def grown(self, words: str) -> bytes:
        """Say the next piece of it."""
        return self._head + json_io.write(words) + _TAIL


class AnthropicReplyEncoder:
    """Says one chat reply in Messages; `model` as the harness named it, `handle` as dialects use it."""

    def __init__(self, model: str, handle: str) -> None:
        self._model = model
        self._handle = handle
        self._thinking = Thinking()
        self._open: list[_Block] = []  # more than one only while calls come interleaved
        self._calls: dict[int, _Block] = {}
        self._blocks = 0
        self._usage = Usage()
        self._finish: str | None = None
        self._stop: int | str | None = None
        self._started = False
        self._failed = False

    def whole(self, data: bytes) -> bytes:
        """Say a whole chat completion; what is none is passed on as it is."""
        heard = self._thinking.read(data)
        choice = heard.choice if heard is not None else None
        if heard is None or choice is None:
            return data
        said = choice.reply
        content: list[dict[str, Any]] = []
        if thought := said.thought:
            content.append({"type": "thinking", "thinking": thought, "signature": self._signature})
        if said.content:
            content.append({"type": "text", "text": said.content})
        calls = [call for _, call in said.calls()]
        content += [{"type": "tool_use", "id": call.id or "", "name": call.name, "input": _input(call.arguments)} for call in calls]
        last = calls[-1].arguments if calls else None
        message = self._message(content or [{"type": "text", "text": ""}], usage_of(heard.usage or Usage()))
        return json_io.write(message | ending(choice.finish_reason, choice.stop_reason, last))

    def chunk(self, event: bytes, data: bytes, prompt_tokens: int) -> bytes:  # noqa: ARG002 - the event is written anew
        """Say one chunk; what cannot be read says nothing."""
        heard = self._thinking.read(data)
        if heard is None or self._failed:
            return b""
        if heard.fault is not None:
            return self.error(*heard.fault)
        self._usage = heard.usage or self._usage
        out = [] if self._started else self._start(prompt_tokens)
        if heard.choice is not None:
            self._choice(heard.choice, out)
        return b"".join(out)

    def chunk_unparsed(self, event: bytes) -> bytes | None:
        """See `ReplyEncoder.chunk_unparsed`: the next piece of a block that is open."""
        piece = text_piece(event) if self._thinking.settled else None
        if piece is None or self._failed:
            return None
        kind, call, words = piece
        if not kind:
            return b""
        if not words:
            return None
        if kind in _GROWING:
            block = self._open[-1] if self._open else None
            return block.grown(words) if block is not None and block.kind == _GROWING[kind] else None
        block = self._calls.get(call)
        if block is None:
            return None
        block.arguments.append(words)
        return block.grown(words)

    def end(self) -> bytes:
        """Say the end of the message."""
        if self._failed:
            return b""
        if self._finish is None:
            return self.error(502, "the engine ended its stream before its reply")
        out: list[bytes] = []
        if not self._blocks:
            self._begin(_Block(0, "text"), {"text": ""}, out)
            self._close(out)
        last = max(self._calls.values(), key=lambda block: block.place, default=None)
        how = ending(self._finish, self._stop, "".join(last.arguments) if last else None)
        out += [_event("message_delta", delta=how, usage=usage_of(self._usage)), _event("message_stop")]
        return b"".join(out)

    def keep_alive(self) -> bytes:
        """Say nothing, in Anthropic's way."""
        return _event("ping")

    def error(self, status: int, message: str) -> bytes:
        """Say an error within the stream."""
        self._failed = True
        return _event(**error_members(status, message))

    def documents(self) -> dict[str, bytes]:
        """Keep nothing: a Messages request brings its whole history."""
        return {}

    @property
    def _signature(self) -> str:
        return signed(self._handle, self._thinking.mark)

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._handle}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _start(self, prompt_tokens: int) -> list[bytes]:
        self._started = True
        return [_event("message_start", message=self._message([], usage_of(Usage(prompt_tokens)))), self.keep_alive()]

    def _choice(self, choice: ChoicePart, out: list[bytes]) -> None:
        said = choice.reply
        if thought := said.thought:
            self._speak("thinking", {"thinking": "", "signature": ""}, thought, out)
        if said.content:
            self._speak("text", {"text": ""}, said.content, out)
        for index, call in said.calls():
            self._call(index, call, out)
        if choice.finish_reason is not None:
            self._finish, self._stop = choice.finish_reason, choice.stop_reason
            self._close(out)

    def _speak(self, kind: str, empty: dict[str, str], words: str, out: list[bytes]) -> None:
        if not self._open or self._open[-1].kind != kind:
            self._close(out)
            self._begin(_Block(self._blocks, kind), empty, out)
        out.append(self._open[-1].grown(words))

    def _call(self, index: int, call: ToolCallPart, out: list[bytes]) -> None:
        block = self._calls.get(index)
        if block is None:
            # An engine that has not finished the call before this one will come back to it: its block stays open.
            if not (self._open and self._open[-1].kind == "tool_use") or all(is_json("".join(b.arguments)) for b in self._open):
                self._close(out)
            block = self._calls[index] = _Block(self._blocks, "tool_use")
            self._begin(block, {"id": call.id or "", "name": call.name, "input": {}}, out)
        if call.arguments:
            block.arguments.append(call.arguments)
            out.append(block.grown(call.arguments))

    def _begin(self, block: _Block, empty: dict[str, Any], out: list[bytes]) -> None:
        self._open.append(block)
        self._blocks += 1
        out.append(_event("content_block_start", index=block.place, content_block={"type": block.kind, **empty}))

    def _close(self, out: list[bytes]) -> None:
        for block in self._open:
            if block.kind == "thinking":
                signature = {"type": "signature_delta", "signature": self._signature}
                out.append(_event("content_block_delta", index=block.place, delta=signature))
            out.append(_event("content_block_stop", index=block.place))
        self._open = []


def _event(type: str, **members: Any) -> bytes:  # noqa: A002 - its name in the event
    return event_of(json_io.write({"type": type, **members}), type)


def _input(arguments: str) -> dict[str, Any]:
    try:
        found = json_io.read(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return wrapped(arguments)
    return found if isinstance(found, dict) else wrapped(arguments)

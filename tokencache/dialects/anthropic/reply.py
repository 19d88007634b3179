"""Writes a chat reply as Anthropic content blocks, whole or event by event.

    message_start ping  (content_block_start  content_block_delta …  content_block_stop) …  message_delta message_stop

A block opens with its first text and closes when a block of another kind begins, so blocks keep the order of the reply; text after a
tool call opens another block. The signature of each thinking block is the call's handle, which clients have to send back. `message_delta`
is sent after the engine's last chunk, which has the usage.

Differences from vLLM 0.32 (`entrypoints/anthropic/serving.py`):

* `input` has to be an object. A stream passes arguments on as they come, once they begin like one. Arguments that are not an object are
  wrapped (`vocabulary.UNPARSED`), so no client runs a tool with them by mistake; the request parser unwraps them. Anthropic's clients raise
  an error for others in a stream. A stream leaves out `null`, which they then read as `{}`, as Claude Code does. vLLM answers 500;
* parallel calls that an engine sends interleaved have several open blocks with different indexes, as Anthropic's clients accept. vLLM's own
  parsers never interleave; its converter would drop the pieces;
* an empty reply is one empty text block, in a stream too (vLLM sends no block there);
* a stream that ends before its reply is complete is an error, not the end of a turn;
* `input_tokens` excludes what was read from the cache, as Anthropic counts; `message_start` has the length of the prompt.
"""

from http import HTTPStatus
from typing import Any

from tokencache.core.strict_json import read_object
from tokencache.dialects import json_io
from tokencache.dialects.anthropic.vocabulary import ending, error_members, is_json, usage_of, wrapped
from tokencache.dialects.completion_reader import ChoicePart, ToolCallPart, Usage, text_piece
from tokencache.dialects.reply_encoder import ReplyEncoder
from tokencache.dialects.sse import event_of
from tokencache.dialects.thinking import Thinking, signed

_TAIL = b"}}\n\n"
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"), "tool_use": ("input_json_delta", "partial_json")}
"""For each type of block, the type of its deltas and their member with the text."""
_BLOCK_TYPES = {b"content": "text", b"reasoning": "thinking"}


class _Block:
    """An open block: its index in the message and, for a call, the arguments so far."""

    def __init__(self, index: int, kind: str) -> None:
        self.index, self.kind = index, kind
        self.arguments: list[str] = []
        self._is_object: bool | None = None  # whether they begin like an object; `None` before anything but white space has come
        self._read, self._complete = 0, False  # how many pieces of them were parsed, and with which result
        # The hundreds of deltas of a block differ only in their last member: the bytes before it are written once.
        delta, member = _DELTAS[kind]
        self._head = _event("content_block_delta", index=index, delta={"type": delta, member: ""}).removesuffix(b'""' + _TAIL)

    def delta(self, text: str) -> bytes:
        """Write the event for the next piece of its text."""
        return self._head + json_io.write(text) + _TAIL

    def grow(self, piece: str) -> bytes:
        """Add a piece of the arguments, and write its event; none while they do not begin like an object."""
        self.arguments.append(piece)
        if self._is_object is None and piece.strip():
            self._is_object = piece.lstrip().startswith("{")
        return self.delta(piece) if self._is_object else b""

    def wrapped_arguments(self) -> bytes:
        """Write the event for arguments that do not begin like an object; none for `null`."""
        arguments = "".join(self.arguments)
        if self._is_object is not False or arguments.strip() == "null":
            return b""
        return self.delta(json_io.write(wrapped(arguments)).decode())

    @property
    def complete(self) -> bool:
        """Whether the arguments are complete JSON; they are not parsed again before more of them arrive."""
        if len(self.arguments) > self._read:
            self._read, self._complete = len(self.arguments), is_json("".join(self.arguments))
        return self._complete


class AnthropicReplyEncoder(ReplyEncoder):
    """Writes one chat reply in Messages. `model` is the name that the client wrote."""

    def __init__(self, model: str, handle: str) -> None:
        self._model = model
        self._handle = handle
        self._thinking = Thinking()
        self._open: list[_Block] = []  # more than one only while calls are interleaved
        self._calls: dict[int, _Block] = {}
        self._blocks = 0
        self._usage = Usage()
        self._finish: str | None = None
        self._stop: int | str | None = None
        self._started = False
        self._failed = False

    def whole(self, data: bytes) -> bytes:
        """See `ReplyEncoder.whole`. A body that is not a chat completion is passed on."""
        completion = self._thinking.read(data)
        choice = completion.choice if completion is not None else None
        if completion is None or choice is None:
            return data
        reply = choice.reply
        content: list[dict[str, Any]] = []
        if thought := reply.thought:
            content.append({"type": "thinking", "thinking": thought, "signature": self._signature})
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        calls = [call for _, call in reply.calls()]
        content += [{"type": "tool_use", "id": call.id or "", "name": call.name, "input": _input(call.arguments)} for call in calls]
        last = calls[-1].arguments if calls else None
        message = self._message(content or [{"type": "text", "text": ""}], usage_of(completion.usage or Usage()))
        return json_io.write(message | ending(choice.finish_reason, choice.stop_reason, last))

    def chunk(self, event: bytes, data: bytes, prompt_tokens: int) -> bytes:  # noqa: ARG002 - the encoder writes new events
        """See `ReplyEncoder.chunk`; a chunk that cannot be parsed is dropped."""
        completion = self._thinking.read(data)
        if completion is None or self._failed:
            return b""
        if completion.fault is not None:
            return self.error(*completion.fault)
        self._usage = completion.usage or self._usage
        out = [] if self._started else self._start(prompt_tokens)
        if completion.choice is not None:
            self._choice(completion.choice, out)
        return b"".join(out)

    def chunk_unparsed(self, event: bytes) -> bytes | None:
        """See `ReplyEncoder.chunk_unparsed`: the next piece of an open block."""
        piece = text_piece(event) if self._thinking.settled else None
        if piece is None or self._failed:
            return None
        kind, call, text = piece
        if not kind:
            return b""
        if not text:
            return None
        if kind in _BLOCK_TYPES:
            block = self._open[-1] if self._open else None
            return block.delta(text) if block is not None and block.kind == _BLOCK_TYPES[kind] else None
        block = self._calls.get(call)
        return block.grow(text) if block is not None else None

    def end(self) -> bytes:
        """See `ReplyEncoder.end`."""
        if self._failed:
            return b""
        if self._finish is None:
            return self.error(HTTPStatus.BAD_GATEWAY, "the engine ended its stream before its reply")
        out: list[bytes] = []
        if not self._blocks:
            self._begin(_Block(0, "text"), {"text": ""}, out)
            self._close(out)
        last = max(self._calls.values(), key=lambda block: block.index, default=None)
        delta = ending(self._finish, self._stop, "".join(last.arguments) if last else None)
        out += [_event("message_delta", delta=delta, usage=usage_of(self._usage)), _event("message_stop")]
        return b"".join(out)

    def keep_alive(self) -> bytes:
        """See `ReplyEncoder.keep_alive`."""
        return _event("ping")

    def error(self, status: int, message: str) -> bytes:
        """See `ReplyEncoder.error`."""
        self._failed = True
        return _event(**error_members(status, message))

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
        reply = choice.reply
        if thought := reply.thought:
            self._text("thinking", {"thinking": "", "signature": ""}, thought, out)
        if reply.content:
            self._text("text", {"text": ""}, reply.content, out)
        for number, call in reply.calls():
            self._call(number, call, out)
        if choice.finish_reason is not None:
            self._finish, self._stop = choice.finish_reason, choice.stop_reason
            self._close(out)

    def _text(self, kind: str, empty: dict[str, str], text: str, out: list[bytes]) -> None:
        if not self._open or self._open[-1].kind != kind:
            self._close(out)
            self._begin(_Block(self._blocks, kind), empty, out)
        out.append(self._open[-1].delta(text))

    def _call(self, number: int, call: ToolCallPart, out: list[bytes]) -> None:
        block = self._calls.get(number)
        if block is None:
            # If the arguments of an earlier call are incomplete, the engine will continue them later: that block stays open.
            if not (self._open and self._open[-1].kind == "tool_use") or all(block.complete for block in self._open):
                self._close(out)
            block = self._calls[number] = _Block(self._blocks, "tool_use")
            self._begin(block, {"id": call.id or "", "name": call.name, "input": {}}, out)
        if call.arguments:
            out.append(block.grow(call.arguments))

    def _begin(self, block: _Block, empty: dict[str, Any], out: list[bytes]) -> None:
        self._open.append(block)
        self._blocks += 1
        out.append(_event("content_block_start", index=block.index, content_block={"type": block.kind, **empty}))

    def _close(self, out: list[bytes]) -> None:
        for block in self._open:
            if block.kind == "thinking":
                signature = {"type": "signature_delta", "signature": self._signature}
                out.append(_event("content_block_delta", index=block.index, delta=signature))
            out.append(block.wrapped_arguments())
            out.append(_event("content_block_stop", index=block.index))
        self._open = []


def _event(type: str, **members: Any) -> bytes:  # noqa: A002 - its name in the event
    return event_of(json_io.write({"type": type, **members}), type)


def _input(arguments: str) -> dict[str, Any]:
    found = read_object(arguments)
    return wrapped(arguments) if found is None else found

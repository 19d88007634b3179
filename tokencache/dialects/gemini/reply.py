"""Writes a chat reply as Gemini's GenerateContentResponse: one for a whole reply, a sequence of them for a stream.

Texts and thoughts are sent as they arrive. A call is an object in this dialect and has no partial form, so it is sent when the next part
begins. Gemini puts the finish reason and the usage into the last response, so the reason is sent only when the usage is known. A whole
reply is written like a stream of one chunk, so the two differ only in where text is cut.

Thoughts are sent if the request has `includeThoughts`. The handle is the `thoughtSignature` (32 hexadecimal digits are valid base64) of
the first text and of the first call. Gemini 3 signs the first call and the last text. But while a reply streams, its last text is not
known, and Gemini CLI 0.61 loses a signature on an empty text at the end when it joins texts (`processStreamResponse`).

A call whose arguments are not a JSON object cannot be represented. The reply then ends with `MALFORMED_FUNCTION_CALL`, as Gemini's own
replies do, or with `MAX_TOKENS` if it was cut off. What comes back without it is still this reply (rule `calls-hidden`).
"""

from typing import Any

from tokencache.dialects import json_io
from tokencache.dialects.completion_reader import ChoicePart, ToolCallPart, Usage, text_piece
from tokencache.dialects.gemini.vocabulary import error_of, finish_reason_of, object_of, usage_of
from tokencache.dialects.reply_encoder import ReplyEncoder
from tokencache.dialects.sse import event_of
from tokencache.dialects.thinking import Thinking, signed

_TEXT, _CALL = "text", "functionCall"


class GeminiReplyEncoder(ReplyEncoder):
    """Writes one reply. `model` is the name that the client wrote.

    With `sse` (`alt=sse`) a stream consists of events; otherwise it is one JSON array.
    """

    def __init__(self, *, model: str, handle: str, shows_thoughts: bool, sse: bool) -> None:
        self._model, self._handle = model, handle
        self._thinking = Thinking()
        self._shows_thoughts = shows_thoughts
        self._sse = sse
        self._id = ""
        self._around = b"", b""
        """The bytes before and after the parts. They are the same in every response except the last."""
        self._call: tuple[str, list[str], list[str], list[str]] | None = None
        """The incomplete call: number, ids, and the pieces of its name and of its arguments."""
        self._unsigned = {_TEXT, _CALL}
        self._malformed = ""
        self._reason: str | None = None
        self._usage: Usage | None = None
        self._started = False  # whether the array's opening bracket was sent
        self._over = False

    def whole(self, data: bytes) -> bytes:
        """See `ReplyEncoder.whole`. A body that is not a chat completion is passed on."""
        completion = self._thinking.read(data)
        if completion is None:
            return data
        parts = self._parts(completion.choice) if completion.choice is not None else []
        self._id, self._usage = completion.id, completion.usage
        parts += self._signed_if_none()
        return json_io.write(self._response(parts, last=True))

    def chunk(self, event: bytes, data: bytes, prompt_tokens: int) -> bytes:
        """See `ReplyEncoder.chunk`; a chunk that cannot be parsed is dropped."""
        del event, prompt_tokens
        completion = self._thinking.read(data)
        if completion is None:
            return b""
        if completion.fault is not None:
            self._over = True
            return self._framed(json_io.write(error_of(*completion.fault)))
        self._id = self._id or completion.id
        self._usage = completion.usage or self._usage
        parts = self._parts(completion.choice) if completion.choice is not None else []
        if self._reason is not None and not completion.choices:
            return self._last()
        return self._framed(json_io.write(self._response(parts))) if parts else b""

    def chunk_unparsed(self, event: bytes) -> bytes | None:
        """See `ReplyEncoder.chunk_unparsed`: the next piece of a text or thought, or of a call, which is sent when complete."""
        piece = text_piece(event) if self._thinking.settled else None
        if piece is None or self._over:
            return None
        kind, call, text = piece
        thought = kind == b"reasoning"
        if not kind or (thought and not self._shows_thoughts):
            return b""
        if kind == b"arguments":
            if self._call is None or self._call[0] != str(call):
                return None
            self._call[3].append(text)
            return b""
        if not text or not self._id or self._call is not None or (not thought and _TEXT in self._unsigned):
            return None
        if not self._around[0]:
            before, _, after = json_io.write(self._response([])).partition(b"[]")
            self._around = before, after
        part: dict[str, Any] = {"text": text, "thought": True} if thought else {"text": text}
        return self._framed(json_io.write([part]).join(self._around))

    def end(self) -> bytes:
        """See `ReplyEncoder.end`: the last response, unless it was sent with the usage, and the end of the array."""
        return self._last() + self._close()

    def keep_alive(self) -> bytes:
        """See `ReplyEncoder.keep_alive`: a comment, or white space in an array."""
        return b": keep-alive\n\n" if self._sse else b"\n"

    def error(self, status: int, message: str) -> bytes:
        """See `ReplyEncoder.error`."""
        self._over = True
        return self._framed(json_io.write(error_of(status, message))) + self._close()

    def _last(self) -> bytes:
        """Write the last response, with finish reason and usage, once."""
        if self._over or self._reason is None:
            return b""
        self._over = True
        return self._framed(json_io.write(self._response(self._signed_if_none() or [{"text": ""}], last=True)))

    def _framed(self, response: bytes) -> bytes:
        if self._sse:
            return event_of(response)
        opening = b",\n" if self._started else b"["
        self._started = True
        return opening + response

    def _close(self) -> bytes:
        if self._sse:
            return b""
        return b"]\n" if self._started else b"[]\n"

    def _response(self, parts: list[dict[str, Any]], *, last: bool = False) -> dict[str, Any]:
        candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": 0}
        response: dict[str, Any] = {"candidates": [candidate], "modelVersion": self._model, "responseId": self._id}
        if last:
            if self._malformed and self._reason != "length":
                candidate["finishReason"] = "MALFORMED_FUNCTION_CALL"
                candidate["finishMessage"] = f"Malformed function call: {self._malformed}"
            else:
                candidate["finishReason"] = finish_reason_of(self._reason)
            response["usageMetadata"] = usage_of(self._usage)
        return response

    def _parts(self, choice: ChoicePart) -> list[dict[str, Any]]:
        """Return the parts that a chunk, or a whole message, completes."""
        reply, parts = choice.reply, []
        if reply.thought and self._shows_thoughts:
            parts += [*self._completed_call(), {"text": reply.thought, "thought": True}]
        if reply.content:
            parts += [*self._completed_call(), self._signed(_TEXT, {"text": reply.content})]
        for number, call in reply.calls():
            parts += self._continue_call(str(number), call)
        if choice.finish_reason is not None:
            parts += self._completed_call()
            self._reason = choice.finish_reason
        return parts

    def _continue_call(self, number: str, call: ToolCallPart) -> list[dict[str, Any]]:
        """Add a piece to a call; returns the call before it if another one begins."""
        completed = [] if self._call is not None and self._call[0] == number else self._completed_call()
        if self._call is None:
            self._call = number, [], [], []
        for pieces, piece in zip(self._call[1:], (call.id or "", call.name, call.arguments), strict=True):
            if piece:
                pieces.append(piece)
        return completed

    def _completed_call(self) -> list[dict[str, Any]]:
        """Return the current call as a part, if there is one, and end it."""
        if self._call is None:
            return []
        _, call_ids, names, pieces = self._call
        call_id, name, arguments = call_ids[-1] if call_ids else "", "".join(names), "".join(pieces)
        self._call = None
        args = object_of(arguments)
        if args is None:
            self._malformed = f"{name}({arguments})"
            return []
        return [self._signed(_CALL, {"functionCall": {"id": call_id, "name": name, "args": args}})]

    def _signed(self, kind: str, part: dict[str, Any]) -> dict[str, Any]:
        """Put the handle on the first part of a kind."""
        if kind not in self._unsigned:
            return part
        self._unsigned.discard(kind)
        return {**part, "thoughtSignature": signed(self._handle, self._thinking.mark)}

    def _signed_if_none(self) -> list[dict[str, Any]]:
        """Return an empty text with the handle if no other part has it, because the reply is empty or only a thought."""
        return [self._signed(_TEXT, {"text": ""})] if self._unsigned == {_TEXT, _CALL} else []

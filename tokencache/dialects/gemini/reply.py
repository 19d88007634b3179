"""A chat reply, said as Gemini's GenerateContentResponse: whole, or one after another as the chunks come.

Texts and thoughts leave as they come. A call is an object in this dialect and has no unfinished form: it leaves whole as soon as
something else begins. What the engine says last, why it stopped and what it used, stands together in the last response, so
the reason waits for the count. One machine says both forms: a whole reply is to it a stream of one chunk, so the two
cannot differ but in how a text is cut.

Thoughts are shown only where `includeThoughts` asked for them. The handle is a `thoughtSignature` (base64, which 32
hexadecimal digits are) on the first text and on the first call. Gemini 3 signs the first call and the last text; of a
stream nobody knows the last text beforehand, and a signature on an empty text at its end is lost where a harness joins texts into
the first (Gemini CLI 0.61, `processStreamResponse`).

A call whose arguments are no JSON object cannot be said: the reply then ends with `MALFORMED_FUNCTION_CALL`, as Gemini's own
do, or with `MAX_TOKENS` where it was cut off.
"""

from typing import Any

from tokencache.dialects import json_io
from tokencache.dialects.completion_reader import ChoicePart, ToolCallPart, Usage, text_piece
from tokencache.dialects.gemini.vocabulary import error_of, finish_reason_of, object_of, usage_of
from tokencache.dialects.sse import event_of
from tokencache.dialects.thinking import Thinking, signed


class GeminiReplyEncoder:
    """Says one reply (`dialect.Speaker`); `sse` is for `alt=sse`, else a stream is one JSON array."""

    def __init__(self, *, model: str, handle: str, shows_thoughts: bool, sse: bool) -> None:
        self._model, self._handle = model, handle
        self._thinking = Thinking()
        self._shows_thoughts = shows_thoughts
        self._sse = sse
        self._id = ""
        self._around = b"", b""
        """What stands before and behind the parts in every response but the last: the same each time, so written once."""
        self._call: list[str] | None = None
        """The call that is being said: index, id, name, arguments."""
        self._unsigned = {"text", "functionCall"}
        self._malformed = ""
        self._reason: str | None = None
        self._usage: Usage | None = None
        self._started = False  # of the array form, its bracket
        self._over = False

    def whole(self, data: bytes) -> bytes:
        """See `ReplyEncoder.whole`; what is no chat completion is passed on as it is."""
        heard = self._thinking.read(data)
        if heard is None:
            return data
        parts = self._parts(heard.choice) if heard.choice is not None else []
        self._id, self._usage = heard.id, heard.usage
        if len(self._unsigned) == 2:  # noqa: PLR2004 - of either kind: nothing was said, or only thought
            parts.append(self._signed("text", {"text": ""}))
        return json_io.write(self._response(parts, last=True))

    def chunk(self, event: bytes, data: bytes, prompt_tokens: int) -> bytes:
        """See `ReplyEncoder.chunk`; what cannot be read says nothing."""
        del event, prompt_tokens
        heard = self._thinking.read(data)
        if heard is None:
            return b""
        if heard.fault is not None:
            self._over = True
            return self._framed(json_io.write(error_of(*heard.fault)))
        self._id = self._id or heard.id
        self._usage = heard.usage or self._usage
        parts = self._parts(heard.choice) if heard.choice is not None else []
        if self._reason is not None and not heard.choices:
            return self._last()
        return self._framed(json_io.write(self._response(parts))) if parts else b""

    def chunk_unparsed(self, event: bytes) -> bytes | None:
        """See `ReplyEncoder.chunk_unparsed`: the next piece of a text or a thought, or of a call, which is said when it is whole."""
        piece = text_piece(event) if self._thinking.settled else None
        if piece is None or self._over:
            return None
        kind, call, words = piece
        thought = kind == b"reasoning"
        if not kind or (thought and not self._shows_thoughts):
            return b""
        if kind == b"arguments":
            if self._call is None or self._call[0] != str(call):
                return None
            self._call[3] += words
            return b""
        if not words or not self._id or self._call is not None or (not thought and "text" in self._unsigned):
            return None
        if not self._around[0]:
            before, _, behind = json_io.write(self._response([])).partition(b"[]")
            self._around = before, behind
        part: dict[str, Any] = {"text": words, "thought": True} if thought else {"text": words}
        return self._framed(json_io.write([part]).join(self._around))

    def end(self) -> bytes:
        """See `ReplyEncoder.end`: the last response, if it did not leave with the count, and the end of the array."""
        return self._last() + self._close()

    def keep_alive(self) -> bytes:
        """See `ReplyEncoder.keep_alive`: a comment; in an array white space."""
        return b": keep-alive\n\n" if self._sse else b"\n"

    def error(self, status: int, message: str) -> bytes:
        """See `ReplyEncoder.error`."""
        self._over = True
        return self._framed(json_io.write(error_of(status, message))) + self._close()

    def documents(self) -> dict[str, bytes]:
        """See `ReplyEncoder.documents`: this dialect keeps nothing."""
        return {}

    def _last(self) -> bytes:
        """The last response, once: why the reply ended, and what it used."""
        if self._over or self._reason is None:
            return b""
        self._over = True
        return self._framed(json_io.write(self._response([self._signed("text", {"text": ""}, only_if_none=True)], last=True)))

    def _framed(self, said: bytes) -> bytes:
        if self._sse:
            return event_of(said)
        opening = b",\n" if self._started else b"["
        self._started = True
        return opening + said

    def _close(self) -> bytes:
        if self._sse:
            return b""
        return b"]\n" if self._started else b"[]\n"

    def _response(self, parts: list[dict[str, Any]], *, last: bool = False) -> dict[str, Any]:
        candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": 0}
        response: dict[str, Any] = {"candidates": [candidate], "modelVersion": self._model, "responseId": self._id}
        if last:
            candidate["finishReason"] = self._finish_reason()
            if candidate["finishReason"] == "MALFORMED_FUNCTION_CALL":
                candidate["finishMessage"] = f"Malformed function call: {self._malformed}"
            response["usageMetadata"] = usage_of(self._usage)
        return response

    def _finish_reason(self) -> str:
        if self._malformed and self._reason != "length":
            return "MALFORMED_FUNCTION_CALL"
        return finish_reason_of(self._reason)

    def _parts(self, choice: ChoicePart) -> list[dict[str, Any]]:
        """The parts that a chunk, or a whole message, completes."""
        said, parts = choice.reply, []
        if said.thought and self._shows_thoughts:
            parts += [*self._called(), {"text": said.thought, "thought": True}]
        if said.content:
            parts += [*self._called(), self._signed("text", {"text": said.content})]
        for index, call in said.calls():
            parts += self._calling(str(index), call)
        if choice.finish_reason is not None:
            parts += self._called()
            self._reason = choice.finish_reason
        return parts

    def _calling(self, index: str, call: ToolCallPart) -> list[dict[str, Any]]:
        """Go on with a call; the one before it, if another begins."""
        done = [] if self._call is not None and self._call[0] == index else self._called()
        if self._call is None:
            self._call = [index, "", "", ""]
        self._call[1] = call.id or self._call[1]
        self._call[2] += call.name
        self._call[3] += call.arguments
        return done

    def _called(self) -> list[dict[str, Any]]:
        """The call that is complete now, if one is."""
        if self._call is None:
            return []
        _, call_id, name, arguments = self._call
        self._call = None
        args = object_of(arguments)
        if args is None:
            self._malformed = f"{name}({arguments})"
            return []
        return [self._signed("functionCall", {"functionCall": {"id": call_id, "name": name, "args": args}})]

    def _signed(self, kind: str, part: dict[str, Any], *, only_if_none: bool = False) -> dict[str, Any]:
        """Put the handle on the first part of a kind, or on this one if no other part has it."""
        due = len(self._unsigned) == 2 if only_if_none else kind in self._unsigned  # noqa: PLR2004 - of either kind
        self._unsigned.discard(kind)
        return {**part, "thoughtSignature": signed(self._handle, self._thinking.mark)} if due else part

"""Responses: a chat reply said again, whole or event by event.

    response.created · response.in_progress · (items: `output`) · response.completed | .incomplete | .failed

There is one machine for both: a whole completion is heard as one big delta, and what comes of it is the response that
the last event of a stream would carry. An item ends when one of another kind, or another call, begins. As at OpenAI no
`[DONE]` follows the last event (vLLM 0.32 sends none either); an error within a stream is an `error` event, and
`response.failed` behind it, which is what Codex 0.169 looks for.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from tokencache.dialects.chat.plain import piece_of
from tokencache.dialects.completion_reader import ChoicePart, CompletionChunk, ToolCallPart, Usage
from tokencache.dialects.responses.events import Events
from tokencache.dialects.responses.output import CustomCall, FunctionCall, Item, Reasoning, Text
from tokencache.dialects.responses.tools import ToolName
from tokencache.dialects.thinking import Thinking

_ENCODER = msgspec.json.Encoder()
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter", "abort": None}
"""Ends by which a reply is cut short, and OpenAI's reason for it; it has none for an engine that aborts."""

_GROWING = {b"content": Text, b"reasoning": Reasoning}
_UNREADABLE = CompletionChunk(error={"message": "the engine sent what cannot be read"})


class ResponsesSpeaker:
    """Says one reply.

    `members` are those of the response that are known from the request, and `names` how the harness calls its tools.
    `thoughts` says whether reasoning is shown, `sealed` whether it brings an `encrypted_content`. `as_gym` is whether it is said as NeMo
    Gym's model server does: reasoning is its own summary, too, and an empty reply is a message with an empty text. `keep` makes of the
    whole response the documents that are to be kept.
    """

    def __init__(
        self,
        handle: str,
        *,
        model: str,
        members: dict[str, Any],
        names: dict[str, ToolName],
        thoughts: bool,
        sealed: bool,
        as_gym: bool,
        keep: Callable[[dict[str, Any]], dict[str, bytes]],
    ) -> None:
        self._handle, self._model, self._members, self._names = handle, model, members, names
        self._thoughts, self._keep = thoughts, keep
        self._as_gym = as_gym
        self._thinking = Thinking()
        self._reasoning = {"sealed": sealed, "summarised": as_gym, "thinking": self._thinking}
        self._events = Events()
        self._created: int | None = None
        self._items: list[Item] = []
        self._open: Item | None = None
        self._calls: dict[int, Item] = {}
        self._finish: str | None = None
        self._usage: Usage | None = None
        self._status = "in_progress"
        self._error: dict[str, str] | None = None

    def body(self, data: bytes) -> bytes:
        """Say a whole chat completion."""
        self._hear(self._thinking.hear(data) or _UNREADABLE)
        self._conclude()
        return _ENCODER.encode(self._response())

    def chunk(self, event: bytes, data: bytes, prompt_tokens: int) -> bytes:
        """Say one chunk; neither its framing nor the number of prompt tokens matters here."""
        del event, prompt_tokens
        self._hear(self._thinking.hear(data) or _UNREADABLE)
        return self._events.take()

    def unread(self, event: bytes) -> bytes | None:
        """See `Speaker.unread`: the next piece of an item that is under way."""
        piece = piece_of(event) if self._thinking.settled else None
        if piece is None or self._status != "in_progress":
            return None
        kind, call, words = piece
        if not kind:
            return b""
        item = self._calls.get(call) if kind == b"arguments" else self._open
        if not words or item is None or (kind in _GROWING and not isinstance(item, _GROWING[kind])):
            return None
        item.grow(words)
        return self._events.take()

    def end(self) -> bytes:
        """Say the end of the response."""
        self._conclude()
        return self._events.take()

    def keep_alive(self) -> bytes:
        """Write a comment."""
        return b": keep-alive\n\n"

    def failed(self, status: int, message: str) -> bytes:
        """Say that it failed; it has, whatever was ready to be said."""
        del status  # OpenAI's vocabulary has one code for all that is the server's
        self._fail(message)
        return self._events.take()

    def documents(self) -> dict[str, bytes]:
        """Give out what is to be kept: of a reply that came to its end."""
        return self._keep(self._response([item.kept() for item in self._items])) if self._status in {"completed", "incomplete"} else {}

    def _hear(self, heard: CompletionChunk) -> None:
        if self._status != "in_progress":
            return
        self._start(heard)
        if heard.fault is not None:
            self._fail(heard.fault[1])
            return
        self._usage = heard.usage or self._usage
        if heard.choice is not None:
            self._choice(heard.choice)

    def _start(self, heard: CompletionChunk) -> None:
        if self._created is None:
            self._created = heard.created
            self._model = self._model or heard.model
            self._events.tell("created", response=self._response())
            self._events.tell("in_progress", response=self._response())

    def _choice(self, choice: ChoicePart) -> None:
        said = choice.said
        if said.thought and self._thoughts:
            self._into(Reasoning, **self._reasoning).grow(said.thought)
        if said.content:
            self._into(Text, present=False).grow(said.content)
        for index, call in said.called():
            self._call(index, call)
        if choice.finish_reason is not None:
            self._finish = choice.finish_reason
            if (said.tokens or self._as_gym) and not self._items:
                self._begin(Text, present=self._as_gym)
            if said.tokens:
                self._items[-1].tokens = said.tokens
            self._close("incomplete" if self._finish in _INCOMPLETE else "completed")

    def _into(self, kind: type[Item], **more: Any) -> Item:
        """The open item if it is of this kind, else a new one."""
        return self._open if isinstance(self._open, kind) else self._begin(kind, **more)

    def _begin(self, kind: type[Item], **more: Any) -> Item:
        self._close("completed")
        item = self._open = kind(self._handle, len(self._items), self._events, **more)
        self._items.append(item)
        item.begin()
        return item

    def _call(self, index: int, call: ToolCallPart) -> None:
        item = self._calls.get(index)
        if item is None:
            name = self._names.get(call.name, ToolName(call.name))
            kind = CustomCall if name.custom else FunctionCall
            item = self._calls[index] = self._begin(kind, call_id=call.id or f"call_{self._handle}_{index}", name=name)
        if call.arguments:
            item.grow(call.arguments)

    def _close(self, status: str) -> None:
        if self._open is not None:
            item, self._open = self._open, None
            item.end(status)

    def _conclude(self) -> None:
        if self._status != "in_progress":
            return
        if self._finish is None:
            self._fail("the engine's reply ended before it was finished")
            return
        self._status = "incomplete" if self._finish in _INCOMPLETE else "completed"
        self._events.tell(self._status, response=self._response())

    def _fail(self, message: str) -> None:
        if self._status == "failed":
            return
        self._start(CompletionChunk())
        if self._open is not None:
            self._open.status = "incomplete"
        self._status, self._error = "failed", {"code": "server_error", "message": message}
        self._events.error(code="server_error", message=message, param=None)
        self._events.tell("failed", response=self._response())

    def _response(self, output: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        cut = self._status == "incomplete"
        return {
            "id": f"resp_{self._handle}",
            "object": "response",
            "created_at": self._created or 0,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": _INCOMPLETE[self._finish or ""]} if cut else None,
            "model": self._model,
            "output": [item.shown() for item in self._items] if output is None else output,
            "usage": _usage_of(self._usage) if self._usage is not None else None,
            **self._members,
        }


def _usage_of(usage: Usage) -> dict[str, Any]:
    """Write what it used as a response has it (`ResponseUsage`, openai 3.52); vLLM does not count what it put in its cache."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion,
    }

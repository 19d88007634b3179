"""Writes a chat reply as a response, whole or event by event.

    response.created · response.in_progress · (items) · response.completed | .incomplete | .failed
    item: output_item.added · content_part.added · …delta … · …done · content_part.done · output_item.done

A whole completion is processed as one big delta; its response is the one that the last event of a stream would contain. An item ends when
another kind of item, or another call, begins. As at OpenAI, no `[DONE]` follows the last event (vLLM 0.32 sends none either). An error
within a stream is an `error` event followed by `response.failed`, which Codex 0.169 needs. Members are those of openai 3.52's types.

Clients send a reply back as its items, so what no item shows is lost. A reply without text, reasoning and calls is a message with an empty
text. The same message follows a closed block of thinking that is the whole reply, if the id of its item does not show that it is closed.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from tokencache.core.finish import FinishReason
from tokencache.dialects.completion_reader import ChoicePart, CompletionChunk, ToolCallPart, Usage, text_piece
from tokencache.dialects.reply_encoder import ReplyEncoder
from tokencache.dialects.responses.vocabulary import INLINE, INLINE_CLOSED, FreeformInput, ToolName, item_id
from tokencache.dialects.sse import event_of
from tokencache.dialects.thinking import CLOSED, Thinking, signed

_NUMBER, _EMPTY = b'"sequence_number":', b'""'


class DeltaEvent:
    """Writes the events for the pieces of one item, which differ only in number and piece; the rest is encoded once.

    `kind` is without `response.`. Among `members`, only `delta` is an empty string.
    """

    def __init__(self, kind: str, **members: Any) -> None:
        head, rest = _event(kind, 0, members).split(_NUMBER + b"0")
        self._head = head + _NUMBER
        self._between, self._tail = rest.split(_EMPTY)

    def write(self, number: int, piece: str) -> bytes:
        """Write the event with its number and its piece."""
        return b"".join((self._head, b"%d" % number, self._between, msgspec.json.encode(piece), self._tail))


class EventBuffer:
    """Collects the numbered events of one response until `take`."""

    def __init__(self) -> None:
        self._written = bytearray()
        self._number = 0  # of the next event

    def add(self, kind: str, **members: Any) -> None:
        """Add an event; `kind` is without `response.`."""
        self._written += _event(kind, self._next(), members)

    def add_delta(self, delta: DeltaEvent, piece: str) -> None:
        """Add a piece of an item."""
        self._written += delta.write(self._next(), piece)

    def add_error(self, **members: Any) -> None:
        """Add an `error` event, the only kind without `response.`."""
        self._written += event_of(msgspec.json.encode({"type": "error", "sequence_number": self._next(), **members}), "error")

    def take(self) -> bytes:
        """Return and remove everything that was added since the last time."""
        written, self._written = bytes(self._written), bytearray()
        return written

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number


def _event(kind: str, number: int, members: dict[str, Any]) -> bytes:
    name = f"response.{kind}"
    return event_of(msgspec.json.encode({"type": name, "sequence_number": number, **members}), name)


class OutputItem:
    """An incomplete output item at `index` in the output. `tokens` are the members with the reply's ids, if it is the last item (`gym`)."""

    prefix = ""

    def __init__(self, handle: str, index: int, events: EventBuffer) -> None:
        self.id = item_id(self.prefix, handle, index)
        self.status = "in_progress"
        self.tokens: dict[str, Any] = {}
        self._index = index
        self._events = events
        self._pieces: list[str] = []
        kind, members = self._delta()
        self._delta_event = DeltaEvent(kind, item_id=self.id, output_index=index, **members)

    def shown(self) -> dict[str, Any]:
        """Return the item as the client gets it now."""
        return {**self.stored(), **self.tokens}

    def stored(self) -> dict[str, Any]:
        """Return the item for the stored response: without token ids, which are stored with the turn."""
        return {"id": self.id, **self._shape("".join(self._pieces))}

    def begin(self) -> None:
        """Write the events of its beginning."""
        self._events.add("output_item.added", output_index=self._index, item=self.shown())
        self._opening()

    def grow(self, piece: str) -> None:
        """Add a piece."""
        self._pieces.append(piece)
        self._events.add_delta(self._delta_event, piece)

    def end(self, status: str) -> None:
        """Write the events of its end; `status` is `completed` or `incomplete`."""
        self.status = status
        self._closing("".join(self._pieces))
        self._events.add("output_item.done", output_index=self._index, item=self.shown())

    def _add(self, kind: str, **members: Any) -> None:
        self._events.add(kind, item_id=self.id, output_index=self._index, **members)

    def _shape(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _opening(self) -> None:
        """Write the events that follow `output_item.added`; none for calls."""

    def _delta(self) -> tuple[str, dict[str, Any]]:
        """Return the kind and the members of the event for a piece."""
        raise NotImplementedError

    def _closing(self, text: str) -> None:
        raise NotImplementedError


class ReasoningItem(OutputItem):
    """The model's reasoning.

    If it is `sealed`, it has an `encrypted_content` with the handle. If it is `summarised`, its text is also its summary: NeMo Gym's model
    server puts it only there. `thinking` knows whether the reasoning was in the text (`dialects.thinking`).
    """

    prefix = "rs"

    def __init__(self, handle: str, index: int, events: EventBuffer, *, sealed: bool, summarised: bool, thinking: Thinking) -> None:
        if thinking.mark:
            self.prefix = INLINE_CLOSED if thinking.mark == CLOSED else INLINE
        super().__init__(handle, index, events)
        self._handle, self._sealed, self._thinking = handle, sealed, thinking
        self._summarised = summarised

    def _shape(self, text: str) -> dict[str, Any]:
        summary = [{"type": "summary_text", "text": text}] if text and self._summarised else []
        seal = {"encrypted_content": signed(self._handle, self._thinking.mark)} if self._sealed else {}
        return {"type": "reasoning", "summary": summary, "content": [_reasoning_part(text)] if text else [], **seal}

    def _opening(self) -> None:
        self._add("content_part.added", content_index=0, part=_reasoning_part(""))

    def _delta(self) -> tuple[str, dict[str, Any]]:
        return "reasoning_text.delta", {"content_index": 0, "delta": ""}

    def _closing(self, text: str) -> None:
        self._add("reasoning_text.done", content_index=0, text=text)
        self._add("content_part.done", content_index=0, part=_reasoning_part(text))


class MessageItem(OutputItem):
    """The model's text, which may be empty."""

    prefix = "msg"

    def _shape(self, text: str) -> dict[str, Any]:
        content = [_text_part(text)] if text or self.status != "in_progress" else []
        return {"type": "message", "status": self.status, "role": "assistant", "content": content}

    def _opening(self) -> None:
        self._add("content_part.added", content_index=0, part=_text_part(""))

    def _delta(self) -> tuple[str, dict[str, Any]]:
        return "output_text.delta", {"content_index": 0, "delta": "", "logprobs": []}

    def _closing(self, text: str) -> None:
        self._add("output_text.done", content_index=0, text=text, logprobs=[])
        self._add("content_part.done", content_index=0, part=_text_part(text))


class FunctionCallItem(OutputItem):
    """A call of a function; its arguments are the engine's text."""

    prefix, kind, member, event = "fc", "function_call", "arguments", "function_call_arguments"

    def __init__(self, handle: str, index: int, events: EventBuffer, *, call_id: str, name: ToolName) -> None:
        super().__init__(handle, index, events)
        self._named = {"call_id": call_id, "name": name.name} | ({"namespace": name.namespace} if name.namespace else {})

    def _shape(self, text: str) -> dict[str, Any]:
        return {"type": self.kind, "status": self.status, **self._named, self.member: text}

    def _delta(self) -> tuple[str, dict[str, Any]]:
        return f"{self.event}.delta", {"delta": ""}

    def _closing(self, text: str) -> None:
        self._add(f"{self.event}.done", **{self.member: text})


class CustomCallItem(FunctionCallItem):
    """A call of a custom tool; its input is sent as far as it can be decoded from the arguments."""

    prefix, kind, member, event = "ctc", "custom_tool_call", "input", "custom_tool_call_input"

    def __init__(self, handle: str, index: int, events: EventBuffer, *, call_id: str, name: ToolName) -> None:
        super().__init__(handle, index, events, call_id=call_id, name=name)
        self._input = FreeformInput()

    def grow(self, piece: str) -> None:
        """Add a piece of the arguments."""
        decoded = self._input.feed(piece)
        if decoded:
            super().grow(decoded)

    def end(self, status: str) -> None:
        """Write the rest of the input and the events of its end."""
        sent, whole = "".join(self._pieces), self._input.whole()
        if whole.startswith(sent) and whole != sent:
            super().grow(whole[len(sent) :])
        self._pieces = [whole]
        super().end(status)


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


FINISHED: dict[str, tuple[str, str | None]] = {
    FinishReason.STOP: ("completed", None),
    FinishReason.TOOL_CALLS: ("completed", None),
    FinishReason.FUNCTION_CALL: ("completed", None),
    FinishReason.LENGTH: ("incomplete", "max_output_tokens"),
    FinishReason.REPETITION: ("completed", None),
    FinishReason.CONTENT_FILTER: ("incomplete", "content_filter"),
    FinishReason.ABORT: ("incomplete", None),
    FinishReason.ERROR: ("incomplete", None),
}
"""The status of a response for each finish reason, and OpenAI's reason if it is incomplete (none for what an engine broke off)."""
_COMPLETED = ("completed", None)
_ITEM_TYPES = {b"content": MessageItem, b"reasoning": ReasoningItem}
_UNREADABLE = CompletionChunk(error={"message": "the engine sent what cannot be read"})


class ResponsesReplyEncoder(ReplyEncoder):
    """Writes one reply.

    Args:
        handle: the call's handle.
        model: the model's name as the client wrote it.
        members: members of the response that follow from the request.
        names: the client's names of its tools, by flat name.
        thoughts: whether reasoning is sent.
        sealed: whether reasoning has an `encrypted_content`.
        as_gym: whether reasoning is also its summary, as NeMo Gym's model server writes it.
        keep: makes the documents to store, given the whole response.
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
        self._thinking = Thinking()
        self._reasoning = {"sealed": sealed, "summarised": as_gym, "thinking": self._thinking}
        self._events = EventBuffer()
        self._created: int | None = None
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._calls: dict[int, OutputItem] = {}
        self._finish: str | None = None
        self._usage: Usage | None = None
        self._status = "in_progress"
        self._error: dict[str, str] | None = None

    def whole(self, data: bytes) -> bytes:
        """See `ReplyEncoder.whole`."""
        self._add(self._thinking.read(data) or _UNREADABLE)
        self._conclude()
        return msgspec.json.encode(self._response())

    def chunk(self, event: bytes, data: bytes, prompt_tokens: int) -> bytes:
        """See `ReplyEncoder.chunk`."""
        del event, prompt_tokens
        self._add(self._thinking.read(data) or _UNREADABLE)
        return self._events.take()

    def chunk_unparsed(self, event: bytes) -> bytes | None:
        """See `ReplyEncoder.chunk_unparsed`: the next piece of an incomplete item."""
        piece = text_piece(event) if self._thinking.settled else None
        if piece is None or self._status != "in_progress":
            return None
        kind, call, text = piece
        if not kind:
            return b""
        item = self._calls.get(call) if kind == b"arguments" else self._open
        if not text or item is None or (kind in _ITEM_TYPES and not isinstance(item, _ITEM_TYPES[kind])):
            return None
        item.grow(text)
        return self._events.take()

    def end(self) -> bytes:
        """See `ReplyEncoder.end`."""
        self._conclude()
        return self._events.take()

    def error(self, status: int, message: str) -> bytes:
        """See `ReplyEncoder.error`."""
        del status  # OpenAI has one code for all server errors
        self._fail(message)
        return self._events.take()

    def documents(self) -> dict[str, bytes]:
        """See `ReplyEncoder.documents`; none if the reply is not complete."""
        return self._keep(self._response([item.stored() for item in self._items])) if self._status in {"completed", "incomplete"} else {}

    def _add(self, completion: CompletionChunk) -> None:
        if self._status != "in_progress":
            return
        self._start(completion)
        if completion.fault is not None:
            self._fail(completion.fault[1])
            return
        self._usage = completion.usage or self._usage
        if completion.choice is not None:
            self._choice(completion.choice)

    def _start(self, completion: CompletionChunk) -> None:
        if self._created is None:
            self._created = completion.created
            self._model = self._model or completion.model
            self._events.add("created", response=self._response())
            self._events.add("in_progress", response=self._response())

    def _choice(self, choice: ChoicePart) -> None:
        reply = choice.reply
        if reply.thought and self._thoughts:
            self._item(ReasoningItem, **self._reasoning).grow(reply.thought)
        if reply.content:
            self._item(MessageItem).grow(reply.content)
        for number, call in reply.calls():
            self._call(number, call)
        if choice.finish_reason is not None:
            self._finish = choice.finish_reason
            if not self._items or self._ends_in_doubt():
                self._begin(MessageItem)
            if reply.tokens:
                self._items[-1].tokens = reply.tokens
            self._close(FINISHED.get(choice.finish_reason, _COMPLETED)[0])

    def _ends_in_doubt(self) -> bool:
        """Whether the only item is a closed block of thinking whose id does not show its end."""
        return len(self._items) == 1 and self._thinking.mark == CLOSED and self._items[0].prefix == INLINE

    def _item(self, kind: type[OutputItem], **options: Any) -> OutputItem:
        """Return the open item if it is of this kind, else a new one."""
        return self._open if isinstance(self._open, kind) else self._begin(kind, **options)

    def _begin(self, kind: type[OutputItem], **options: Any) -> OutputItem:
        self._close("completed")
        item = self._open = kind(self._handle, len(self._items), self._events, **options)
        self._items.append(item)
        item.begin()
        return item

    def _call(self, number: int, call: ToolCallPart) -> None:
        item = self._calls.get(number)
        if item is None:
            name = self._names.get(call.name, ToolName(call.name))
            kind = CustomCallItem if name.custom else FunctionCallItem
            item = self._calls[number] = self._begin(kind, call_id=call.id or f"call_{self._handle}_{number}", name=name)
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
        self._status = FINISHED.get(self._finish, _COMPLETED)[0]
        self._events.add(self._status, response=self._response())

    def _fail(self, message: str) -> None:
        if self._status == "failed":
            return
        self._start(CompletionChunk())
        if self._open is not None:
            self._open.status = "incomplete"
        self._status, self._error = "failed", {"code": "server_error", "message": message}
        self._events.add_error(code="server_error", message=message, param=None)
        self._events.add("failed", response=self._response())

    def _response(self, output: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        incomplete = self._status == "incomplete"
        return {
            "id": f"resp_{self._handle}",
            "object": "response",
            "created_at": self._created or 0,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": FINISHED.get(self._finish or "", _COMPLETED)[1]} if incomplete else None,
            "model": self._model,
            "output": [item.shown() for item in self._items] if output is None else output,
            "usage": _usage_of(self._usage) if self._usage is not None else None,
            **self._members,
        }


def _usage_of(usage: Usage) -> dict[str, Any]:
    """Write the usage of a response (`ResponseUsage`, openai 3.52). vLLM does not count tokens that it wrote to its cache."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion,
    }

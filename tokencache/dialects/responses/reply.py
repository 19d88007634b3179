"""Responses: events, numbered as they are written.

An item that grows tells of each piece with the same event, hundreds of times, in which the number and the piece alone differ: all
else of it is written once (`Delta`).


Responses: output items, and the events that tell of them while they grow.

    output_item.added · content_part.added · …delta … · …done · content_part.done · output_item.done

Every kind of item knows how it looks and which of these events it needs; `reply` decides when one begins and
when it ends. Members are those of openai 3.52's types.


Responses: a chat reply said again, whole or event by event.

    response.created · response.in_progress · (items: `output`) · response.completed | .incomplete | .failed

There is one machine for both: a whole completion is heard as one big delta, and what comes of it is the response that
the last event of a stream would carry. An item ends when one of another kind, or another call, begins. As at OpenAI no
`[DONE]` follows the last event (vLLM 0.32 sends none either); an error within a stream is an `error` event, and
`response.failed` behind it, which is what Codex 0.169 looks for.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from tokencache.dialects.completion_reader import ChoicePart, CompletionChunk, ToolCallPart, Usage, text_piece
from tokencache.dialects.responses.vocabulary import INLINE, FreeformInput, ToolName, item_id
from tokencache.dialects.sse import event_of
from tokencache.dialects.thinking import Thinking, signed

_ENCODER = msgspec.json.Encoder()
_NUMBER, _EMPTY = b'"sequence_number":', b'""'


class Delta:
    """An event of this kind (without `response.`) with these members, of which `delta` is the only empty text."""

    def __init__(self, kind: str, **members: Any) -> None:
        head, rest = _written(kind, 0, members).split(_NUMBER + b"0")
        self._head = head + _NUMBER
        self._between, self._tail = rest.split(_EMPTY)

    def event(self, number: int, piece: str) -> bytes:
        """Write it with its number and its piece."""
        return b"".join((self._head, b"%d" % number, self._between, _ENCODER.encode(piece), self._tail))


class Events:
    """The events of one response: written in order, and taken when there is somebody to read_completion them."""

    def __init__(self) -> None:
        self._said = bytearray()
        self._number = 0  # of the next event

    def tell(self, kind: str, **members: Any) -> None:
        """Write an event of this kind (without `response.`) with these members."""
        self._said += _written(kind, self._next(), members)

    def grow(self, delta: Delta, piece: str) -> None:
        """Write that something has grown."""
        self._said += delta.event(self._next(), piece)

    def error(self, **members: Any) -> None:
        """Write an `error` event, which is the only one of its kind."""
        self._said += event_of(_ENCODER.encode({"type": "error", "sequence_number": self._next(), **members}), "error")

    def take(self) -> bytes:
        """All that was written since the last time."""
        said, self._said = bytes(self._said), bytearray()
        return said

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number


def _written(kind: str, number: int, members: dict[str, Any]) -> bytes:
    name = f"response.{kind}"
    return event_of(_ENCODER.encode({"type": name, "sequence_number": number, **members}), name)


class Item:
    """An output item under way, at `place` in the output. `tokens` are the members with a reply's ids, on its last item (`gym`)."""

    prefix = ""

    def __init__(self, handle: str, place: int, events: Events) -> None:
        self.id = item_id(self.prefix, handle, place)
        self.status = "in_progress"
        self.tokens: dict[str, Any] = {}
        self._place = place
        self._events = events
        self._pieces: list[str] = []
        kind, members = self._delta()
        self._grown = Delta(kind, item_id=self.id, output_index=place, **members)

    def shown(self) -> dict[str, Any]:
        """The item as it stands."""
        return {**self.kept(), **self.tokens}

    def kept(self) -> dict[str, Any]:
        """The same without its tokens: they are kept with the turn."""
        return {"id": self.id, **self._shape("".join(self._pieces))}

    def begin(self) -> None:
        """Tell that it is there."""
        self._events.tell("output_item.added", output_index=self._place, item=self.shown())
        self._opening()

    def grow(self, piece: str) -> None:
        """Add a piece to it."""
        self._pieces.append(piece)
        self._events.grow(self._grown, piece)

    def end(self, status: str) -> None:
        """Tell that it is over: `completed` or `incomplete`."""
        self.status = status
        self._closing("".join(self._pieces))
        self._events.tell("output_item.done", output_index=self._place, item=self.shown())

    def _about(self, kind: str, **members: Any) -> None:
        self._events.tell(kind, item_id=self.id, output_index=self._place, **members)

    def _shape(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _opening(self) -> None:
        """Tell what follows its beginning: nothing, for most."""

    def _delta(self) -> tuple[str, dict[str, Any]]:
        """The kind of event that tells of a piece, and its own members."""
        raise NotImplementedError

    def _closing(self, text: str) -> None:
        raise NotImplementedError


class Reasoning(Item):
    """What the model thought; `thinking` says whether it stood in the text (`dialects.thinking`).

    `sealed` is whether it brings an `encrypted_content`: our handle; `summarised` whether its text is its summary, too: NeMo Gym's
    model server has it there, and nowhere else.
    """

    prefix = "rs"

    def __init__(self, handle: str, place: int, events: Events, *, sealed: bool, summarised: bool, thinking: Thinking) -> None:
        if thinking.mark:
            self.prefix = INLINE
        super().__init__(handle, place, events)
        self._handle, self._sealed, self._thinking = handle, sealed, thinking
        self._summarised = summarised

    def _shape(self, text: str) -> dict[str, Any]:
        summary = [{"type": "summary_text", "text": text}] if text and self._summarised else []
        seal = {"encrypted_content": signed(self._handle, self._thinking.mark)} if self._sealed else {}
        return {"type": "reasoning", "summary": summary, "content": [_thought(text)] if text else [], **seal}

    def _opening(self) -> None:
        self._about("content_part.added", content_index=0, part=_thought(""))

    def _delta(self) -> tuple[str, dict[str, Any]]:
        return "reasoning_text.delta", {"content_index": 0, "delta": ""}

    def _closing(self, text: str) -> None:
        self._about("reasoning_text.done", content_index=0, text=text)
        self._about("content_part.done", content_index=0, part=_thought(text))


class Text(Item):
    """What the model said; `present` is whether a text is there even if it is empty."""

    prefix = "msg"

    def __init__(self, handle: str, place: int, events: Events, *, present: bool) -> None:
        self._present = present
        super().__init__(handle, place, events)

    def _shape(self, text: str) -> dict[str, Any]:
        content = [_words(text)] if text or (self._present and self.status != "in_progress") else []
        return {"type": "message", "status": self.status, "role": "assistant", "content": content}

    def _opening(self) -> None:
        self._about("content_part.added", content_index=0, part=_words(""))

    def _delta(self) -> tuple[str, dict[str, Any]]:
        return "output_text.delta", {"content_index": 0, "delta": "", "logprobs": []}

    def _closing(self, text: str) -> None:
        self._about("output_text.done", content_index=0, text=text, logprobs=[])
        self._about("content_part.done", content_index=0, part=_words(text))


class FunctionCall(Item):
    """A function's call; its arguments are the engine's text."""

    prefix, kind, member, event = "fc", "function_call", "arguments", "function_call_arguments"

    def __init__(self, handle: str, place: int, events: Events, *, call_id: str, name: ToolName) -> None:
        super().__init__(handle, place, events)
        self._named = {"call_id": call_id, "name": name.name} | ({"namespace": name.namespace} if name.namespace else {})

    def _shape(self, text: str) -> dict[str, Any]:
        return {"type": self.kind, "status": self.status, **self._named, self.member: text}

    def _delta(self) -> tuple[str, dict[str, Any]]:
        return f"{self.event}.delta", {"delta": ""}

    def _closing(self, text: str) -> None:
        self._about(f"{self.event}.done", **{self.member: text})


class CustomCall(FunctionCall):
    """A custom tool's call; its input is told as far as it can be read out of the arguments."""

    prefix, kind, member, event = "ctc", "custom_tool_call", "input", "custom_tool_call_input"

    def __init__(self, handle: str, place: int, events: Events, *, call_id: str, name: ToolName) -> None:
        super().__init__(handle, place, events, call_id=call_id, name=name)
        self._input = FreeformInput()

    def grow(self, piece: str) -> None:
        """Add a piece of the arguments."""
        said = self._input.feed(piece)
        if said:
            super().grow(said)

    def end(self, status: str) -> None:
        """Tell that it is over, and what of the input was not told yet."""
        told, whole = "".join(self._pieces), self._input.whole()
        if whole.startswith(told) and whole != told:
            super().grow(whole[len(told) :])
        self._pieces = [whole]
        super().end(status)


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _words(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter", "abort": None}
"""Ends by which a reply is cut short, and OpenAI's reason for it; it has none for an engine that aborts."""
_GROWING = {b"content": Text, b"reasoning": Reasoning}
_UNREADABLE = CompletionChunk(error={"message": "the engine sent what cannot be read"})


class ResponsesReplyEncoder:
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

    def whole(self, data: bytes) -> bytes:
        """Say a whole chat completion."""
        self._hear(self._thinking.read(data) or _UNREADABLE)
        self._conclude()
        return _ENCODER.encode(self._response())

    def chunk(self, event: bytes, data: bytes, prompt_tokens: int) -> bytes:
        """Say one chunk; neither its framing nor the number of prompt tokens matters here."""
        del event, prompt_tokens
        self._hear(self._thinking.read(data) or _UNREADABLE)
        return self._events.take()

    def chunk_unparsed(self, event: bytes) -> bytes | None:
        """See `ReplyEncoder.chunk_unparsed`: the next piece of an item that is under way."""
        piece = text_piece(event) if self._thinking.settled else None
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

    def error(self, status: int, message: str) -> bytes:
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
        said = choice.reply
        if said.thought and self._thoughts:
            self._into(Reasoning, **self._reasoning).grow(said.thought)
        if said.content:
            self._into(Text, present=False).grow(said.content)
        for index, call in said.calls():
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

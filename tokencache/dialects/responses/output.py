"""Responses: output items, and the events that tell of them while they grow.

    output_item.added · content_part.added · …delta … · …done · content_part.done · output_item.done

Every kind of item knows how it looks and which of these events it needs; `reply` decides when one begins and
when it ends. Members are those of openai 3.52's types.
"""

from typing import Any

from tokencache.dialects.responses.events import Delta, Events
from tokencache.dialects.responses.freeform import FreeformInput
from tokencache.dialects.responses.items import INLINE, item_id
from tokencache.dialects.responses.tools import ToolName
from tokencache.dialects.thinking import Thinking, signed


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

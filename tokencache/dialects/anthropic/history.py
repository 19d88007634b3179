"""Anthropic Messages: `system` and `messages` → chat messages.

vLLM 0.32 has a converter of its own (`entrypoints/anthropic/serving.py`, `_convert_messages`). Where it loses nothing of
what a template can show, ours gives the same messages, so that a call here renders as a direct one would:

* `system` blocks are joined with no separator, in one message. Claude Code's billing line (`x-anthropic-billing-header…`)
  is left out: it changes while nothing else does. A `role: "system"` entry between the others stays where it stands (vLLM
  moves them to the front for templates that refuse that; whether one does cannot be seen from here);
* tool results become `tool` messages, in their order, in front of what else their entry says, however they were mixed;
  text blocks of a result are joined with newlines, its images follow in a user message of their own. `is_error` has no place
  in chat: the text says it, or nothing does. Empty text blocks vanish, a lone one is a string, several stay parts;
* an entry at the end with `role: "assistant"` is one more message, not a beginning to be continued.

Where it differs, it is because more is known here of how a reply was taken apart:

* assistant text blocks are joined with no separator, for the engine said one string (vLLM keeps them as parts, which
  become lines). Consecutive assistant entries are one turn, as Anthropic's API defines it (vLLM keeps them apart), unless
  the handles in the signatures of their thinking tell two replies of ours: clients that merge neighbours merge replies, too;
* `tool_use.input` is written compactly; a call whose arguments were no JSON object comes back wrapped
  (`blocks.UNPARSED`) and is unwrapped, so that the record and the echo agree. Any other JSON value is written as it is;
* a document that is plain text is a text part; every other kind of document, and every block that chat has no place for,
  is refused by name (vLLM ignores some of them).
"""

from typing import Any

import msgspec

from tokencache.dialects import lenient
from tokencache.dialects.anthropic.blocks import kind_of, listed, parts_of, unsupported, unwrapped
from tokencache.dialects.anthropic.members import required, shown, wrong
from tokencache.dialects.places import Place
from tokencache.dialects.thinking import Mark, folded, read_signature

_BILLING = "x-anthropic-billing-header"
_BILLING_LINE, _CACHE_MARKS = "billing-line", "cache-marks"

Message = dict[str, Any]


class _Turn(msgspec.Struct):
    """What an assistant says between two entries of others; `mark` says where its thinking stood."""

    handle: str = ""
    mark: Mark = ""
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[Message] = []

    @property
    def message(self) -> Message:
        out: Message = {"role": "assistant"}
        if thought := "".join(self.thoughts):
            out["reasoning"] = thought
        if self.texts or not (thought or self.calls):
            out["content"] = "".join(self.texts)
        if self.calls:
            out["tool_calls"] = self.calls
        return folded(out, self.mark)


class History:
    """A request's conversation in chat.

    Attributes:
        messages: chat messages.
        handles: places in them → the handle that came back there.
        left_out: rules by which something was left out: `billing-line`, `cache-marks`.
    """

    def __init__(self, system: Any, entries: list[Any]) -> None:
        """Read a request's `system` and `messages`.

        Raises:
            HarnessError: something is of the wrong type, or chat has no place for it.
        """
        self.messages: list[Message] = []
        self.handles: dict[int, str] = {}
        self.left_out: set[str] = set()
        self._turns: list[_Turn] = []
        self._leading_system(system)
        for i, entry in enumerate(entries):
            self._entry(("messages", i), entry)
        self._end_turns()

    def _leading_system(self, system: Any) -> None:
        if isinstance(system, str):
            if system.startswith(_BILLING):  # of a string vLLM drops that line only (`renderers/chat_utils.py`)
                self.left_out.add(_BILLING_LINE)
                system = system.partition("\n")[2]
        else:
            system = self._system_text("system", system)
        if system:
            self.messages.append({"role": "system", "content": system})

    def _system_text(self, at: Place, content: Any) -> str:
        texts: list[str] = []
        for i, block in enumerate(listed(content, at)):
            if self._kind(block, (at, i)) != "text":
                raise unsupported(block, (at, i))
            texts.append(required(block, "text", str, (at, i)))
        kept = [text for text in texts if not text.startswith(_BILLING)]
        if len(kept) < len(texts):
            self.left_out.add(_BILLING_LINE)
        return "".join(kept)

    def _entry(self, at: Place, entry: Any) -> None:
        if not isinstance(entry, dict):
            raise wrong(at, "Input should be a valid dictionary")
        role, content = entry.get("role"), entry.get("content")
        if role == "assistant":
            self._assistant((at, "content"), content)
            return
        self._end_turns()
        if role == "user":
            self._user((at, "content"), content)
        elif role == "system":
            if text := self._system_text((at, "content"), content):
                self.messages.append({"role": "system", "content": text})
        else:
            raise wrong((at, "role"), f"Input should be 'user', 'assistant' or 'system', not {shown(role)}")

    def _user(self, at: Place, content: Any) -> None:
        if content is None or isinstance(content, str):
            self.messages.append({"role": "user", "content": content or ""})
            return
        parts: list[Message] = []
        for i, block in enumerate(listed(content, at)):
            if self._kind(block, (at, i)) == "tool_result":
                self._result((at, i), block)
            else:
                parts += parts_of(block, (at, i))
        if parts:
            lone = len(parts) == 1 and parts[0]["type"] == "text"
            self.messages.append({"role": "user", "content": parts[0]["text"] if lone else parts})

    def _result(self, at: Place, block: Message) -> None:
        call = required(block, "tool_use_id", str, at)
        texts: list[str] = []
        images: list[Message] = []
        references: list[Message] = []
        at = at, "content"
        for i, inner in enumerate(listed(block.get("content"), at)):
            place = at, i
            kind = self._kind(inner, place)
            if kind == "text":
                texts.append(required(inner, "text", str, place))  # an empty one, too: vLLM joins it in
            elif kind == "tool_reference":  # a tool found by a search: templates that know deferred tools expand it
                references.append({"type": "tool_reference", "name": required(inner, "tool_name", str, place)})
            else:
                for part in parts_of(inner, place):
                    if part["type"] == "text":
                        texts.append(part["text"])
                    else:
                        images.append(part)
        self.messages.append({"role": "tool", "tool_call_id": call, "content": "\n".join(texts)})
        if images:
            self.messages.append({"role": "user", "content": images})
        if references:
            self.messages.append({"role": "tool", "tool_call_id": call, "content": references})

    def _assistant(self, at: Place, content: Any) -> None:
        begins = True
        if not self._turns:
            self._turns.append(_Turn())
        for i, block in enumerate(listed(content, at)):
            place = at, i
            kind = self._kind(block, place)
            turn = self._turns[-1]
            if kind == "text":
                turn.texts.append(required(block, "text", str, place))
            elif kind == "tool_use":
                function = {"name": required(block, "name", str, place), "arguments": _arguments(block.get("input"))}
                turn.calls.append({"id": required(block, "id", str, place), "type": "function", "function": function})
            elif kind == "thinking":
                handle, mark = read_signature(block.get("signature"))
                if handle and handle != turn.handle and (turn.handle or (begins and turn != _Turn())):
                    self._turns.append(turn := _Turn())  # another reply of ours
                turn.handle, turn.mark = handle or turn.handle, mark or turn.mark
                turn.thoughts.append(required(block, "thinking", str, place))
            elif kind != "redacted_thinking":  # that one is for its author's eyes only
                raise unsupported(block, place)
            begins = False

    def _end_turns(self) -> None:
        for turn in self._turns:
            if turn.handle:
                self.handles[len(self.messages)] = turn.handle
            self.messages.append(turn.message)
        self._turns = []

    def _kind(self, block: Any, at: Place) -> str:
        """The type of a block; whether it has a cache mark is noted."""
        kind = kind_of(block, at)
        if "cache_control" in block:
            self.left_out.add(_CACHE_MARKS)
        return kind


def _arguments(given: Any) -> str:
    raw = unwrapped(given)
    if raw is not None:
        return raw
    return "{}" if given is None else lenient.write(given).decode()

"""Parses the text of a completion into message fields, as vLLM 0.32 does with `--reasoning-parser qwen3 --tool-call-parser hermes`.

A model writes one text; a client gets a message with `reasoning`, `content` and `tool_calls`. The parsers lose information (whitespace of
arguments, text after a call, the markup itself), so the sampled text cannot be restored from the message. Sources: the 0.32.0 wheel and a
running server.

* The completion is *reasoning* until `</think>` or, without that, `<tool_call>`. A reply with neither is all reasoning, with content null.
  Nothing is trimmed: newlines next to the markup stay.
* Within reasoning, `<think>` and the end-of-turn tokens disappear.
* Arguments: whole replies are read as JSON and written again (`{"a":1}` becomes `{"a": 1}`); streams forward the text as it is. One invalid
  call makes a whole reply plain content, while a stream has already sent the calls before it and the beginning of the invalid one. Both
  drop text after a call.
* A whole reply with calls has content null if there is only whitespace. A stream has sent the whitespace.
* A stream also depends on the prompt: if that ends with a closed thinking block, there is no reasoning. Whole replies depend only on
  `enable_thinking` of the request.

So a stream and a whole reply agree for well-formed text and differ as above for the rest. The tests list both.
"""

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokencache.testing.tokenizer import SimTokenizer

_THINK, _END_THINK, _CALL, _END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"
_DROPPED = ("<|im_end|>", "<|endoftext|>")
"""The tokens that tokenizer_config.json names (eos, pad). Other special tokens stay in the text, even `<|im_start|>`."""
_REGION = re.compile(r"<tool_call>(?:(.*?)</tool_call>|(.*))", re.DOTALL)
_NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')


def new_call_id() -> str:
    """Return a fresh tool-call id in vLLM 0.32's style: `chatcmpl-tool-` and 16 hexadecimal digits."""
    return f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"


@dataclass(slots=True)
class ParsedText:
    """The message fields of a whole reply; `tool_calls` are (name, arguments as JSON text)."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[tuple[str, str]] = field(default_factory=list)


def parse_reply(text: str, *, tools: bool, thinking: bool = True) -> ParsedText:
    """Parse a whole completion.

    `tools`: look for calls (the request has tools, and its `tool_choice` is not `none`). `thinking`: look for reasoning.
    """
    reasoning = None
    content: str | None = text
    if thinking:
        reasoning, content = _split_reasoning(text)
    if not tools or content is None or _CALL not in content:
        return ParsedText(reasoning, content or None)
    calls = _whole_calls(content)
    if calls is None:
        return ParsedText(reasoning, content)
    before = content[: content.index(_CALL)]
    return ParsedText(reasoning, before if before.strip() else None, calls)


def _split_reasoning(text: str) -> tuple[str | None, str | None]:
    """Split a completion at the end of its reasoning. A second `</think>` after it disappears too."""
    end = min((at for at in (text.find(_END_THINK), text.find(_CALL)) if at >= 0), default=len(text))
    thought, rest = text[:end], text[end:].replace(_END_THINK, "")
    for token in (_THINK, *_DROPPED):
        thought = thought.replace(token, "")
    for token in _DROPPED:
        rest = rest.replace(token, "")
    return thought or None, rest or None


def _whole_calls(content: str) -> list[tuple[str, str]] | None:
    """Return all calls in `content`, or `None` if one of them is not a JSON object with a name and arguments."""
    calls = []
    for closed, unclosed in _REGION.findall(content):
        try:
            call = json.loads(closed or unclosed)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, KeyError, TypeError):
            return None
        if not isinstance(name, str):
            return None
        calls.append((name, json.dumps(arguments, ensure_ascii=False)))
    return calls


class StreamParser:
    """Parses text that arrives in pieces into `delta` objects of a streamed chat completion."""

    def __init__(self, *, tools: bool, thinking: bool = True, reasoning_done: bool = False) -> None:
        """Start a stream. `reasoning_done`: the prompt has already closed the thinking block (see `reasoning_is_over`)."""
        self._tools = tools
        self._in_reasoning = thinking and not reasoning_done
        self._held = ""
        self._calls = _CallStream()
        self.called = False

    def feed(self, text: str, *, finished: bool = False) -> dict[str, Any] | None:
        """Return the delta for `text` (may be empty), with its keys in vLLM's order; `None` if there is nothing to send yet."""
        reasoning = None
        if self._in_reasoning:
            thought, rest = self._think(text, finished=finished)
            reasoning = thought or None
            if rest is None:
                return {"reasoning": reasoning} if reasoning else None
            self._in_reasoning = False
            text = rest
        delta = self._calls.feed(text) if self._tools else _content(text)
        if reasoning is not None:
            if delta is None:
                return {"reasoning": reasoning}
            calls = delta.pop("tool_calls", None)
            delta["reasoning"] = reasoning
            if calls:
                delta["tool_calls"] = calls
        if delta is not None and "tool_calls" in delta:
            self.called = True
            if finished:
                function = delta["tool_calls"][-1]["function"]
                function["arguments"] = function.get("arguments", "") + self._calls.missing()
        return delta

    def _think(self, text: str, *, finished: bool) -> tuple[str, str | None]:
        """Split off the reasoning. Returns it, and the text after it, which is `None` while the reasoning continues.

        The end of the text is held back while it may be the beginning of a marker.
        """
        text = self._held + text
        self._held = ""
        end = min((at for at in (text.find(_END_THINK), text.find(_CALL)) if at >= 0), default=-1)
        rest = None
        if end >= 0:
            text, rest = text[:end], text[end:].removeprefix(_END_THINK)
        elif not finished:
            keep = max(_overlap(text, marker) for marker in (_THINK, _END_THINK, _CALL, *_DROPPED))
            if keep:
                text, self._held = text[:-keep], text[-keep:]
        for token in (_THINK, *_DROPPED):
            text = text.replace(token, "")
        return text, rest


class _CallStream:
    """Parses calls in a growing text: each step reads the whole text again and sends what was not sent yet."""

    def __init__(self) -> None:
        self._text = ""
        self._content_sent = 0
        self._names: list[str] = []
        self._arguments: list[str] = []

    def feed(self, text: str) -> dict[str, Any] | None:
        self._text += text
        content = self._new_content()
        calls = list(self._new_calls())
        if not content and not calls:
            return None
        return {"content": content, "tool_calls": calls} if calls else {"content": content}

    def missing(self) -> str:
        """Return the arguments of a last call without any, when a reply ends within it."""
        return "{}" if self._arguments and not self._arguments[-1] else ""

    def _new_content(self) -> str | None:
        """Return new text before the first call. What may be the beginning of a call is held back."""
        end = self._text.find(_CALL)
        if end < 0:
            end = len(self._text) - _overlap(self._text, _CALL)
        new = self._text[self._content_sent : end]
        self._content_sent = max(self._content_sent, end)
        return new or None

    def _new_calls(self) -> Iterator[dict[str, Any]]:
        for index, (body, complete) in enumerate(self._bodies()):
            if index == len(self._names):
                name = _NAME.search(body)
                if name is None:
                    return
                self._names.append(name[1])
                self._arguments.append("")
                yield {"id": new_call_id(), "type": "function", "index": index, "function": {"name": name[1]}}
            opening = _ARGUMENTS.search(body)
            if opening is None:
                continue
            arguments = body[opening.end() :]
            if complete:
                arguments = arguments.rstrip().removesuffix("}").rstrip()
            new = arguments[len(self._arguments[index]) :]
            if new:
                self._arguments[index] = arguments
                yield {"index": index, "function": {"arguments": new}}

    def _bodies(self) -> Iterator[tuple[str, bool]]:
        """Yield the text between call markers, and whether it is complete: closed, or valid JSON."""
        for region in _REGION.finditer(self._text):
            if region[1] is not None:
                yield region[1].strip(), True
                continue
            body = region[2]
            body = body[: len(body) - _overlap(body, _END_CALL)].strip()
            yield body, _is_json(body)


def _content(text: str) -> dict[str, Any] | None:
    return {"content": text} if text else None


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `marker`, but not all of it."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def reasoning_is_over(prompt_ids: Sequence[int], tokenizer: SimTokenizer, *, thinking: bool, anywhere: bool = False) -> bool:
    """Return whether the prompt ends after the thinking of its last turn, so that a stream starts with content.

    Some parsers look for the last mark of a thought `anywhere`, also in an earlier turn.
    """
    ends, opens = {tokenizer.id_of(_END_THINK)} | ({tokenizer.id_of(_CALL)} if not anywhere else set()), tokenizer.id_of(_THINK)
    turns = {tokenizer.id_of("<|im_start|>"), tokenizer.id_of("<|im_end|>")}
    for token_id in reversed(prompt_ids):
        if token_id in ends:
            return True
        if token_id == opens:
            return not thinking
        if token_id in turns and not anywhere:
            break
    return not thinking


def count_reasoning(ids: Sequence[int], tokenizer: SimTokenizer, *, thinking: bool) -> int:
    """Count the ids of reasoning, as `usage.completion_tokens_details.reasoning_tokens` does: without markup."""
    if not thinking:
        return 0
    ends = {tokenizer.id_of(_END_THINK), tokenizer.id_of(_CALL)}
    silent = {tokenizer.id_of(token) for token in (_THINK, *_DROPPED)}
    count = 0
    for token_id in ids:
        if token_id in ends:
            break
        count += token_id not in silent
    return count

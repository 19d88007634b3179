"""Translates an Anthropic Messages request into a chat request.

vLLM 0.32 serves `/v1/messages` itself (`entrypoints/anthropic/serving.py`). Members are mapped as it maps them, so a request samples under
the same conditions here and there:

====================  ==================================================================================================
Messages              chat completions
====================  ==================================================================================================
`max_tokens` …        `max_tokens`, `temperature`, `top_p`, `top_k`; `stop_sequences` is `stop`
`thinking`            `enabled` is `thinking_token_budget`, `disabled` is `reasoning_effort: "none"` (vLLM first checks whether
                      its template knows that effort, and otherwise uses `low`); other types set nothing. `display` is
                      ignored, as in vLLM: thinking is always returned
`output_config`       `effort` is `reasoning_effort`, `format` is `response_format`; so is `output_format`, its older name
`tool_choice`         `any` is `required`, `tool` names a function; `disable_parallel_tool_use` is `parallel_tool_calls`
`tools`               functions, as blocks of type `tool_addition` and `tool_removal` in system messages leave them at the end of
                      the conversation: templates see one list of tools (vLLM's `_resolve_tools`). Tools that Anthropic's
                      servers run, or whose schema only its models know, are refused by name: Claude Code puts none into its
                      main requests (its web search is a side call, which vLLM refuses too)
vLLM's own            `chat_template_kwargs`, `cache_salt`, `vllm_xargs`, `kv_transfer_params`, `ec_transfer_params` and
                      `watermarking` pass unchanged; `chat.request` checks them
====================  ==================================================================================================

Without tools, a call that the model writes anyway is text, as in chat. vLLM parses it and returns it in streams only; a whole reply
loses it (vLLM sends `tool_choice: null`, which its chat completions never have). Everything else (`metadata`, `service_tier`,
`context_management`, `container`, unknown members) is ignored, as in vLLM.

Messages become those of vLLM's `_convert_messages` wherever that loses nothing that a template can render:

* `system` blocks are joined without a separator, in one message. Claude Code's billing line (`x-anthropic-billing-header…`) is left out,
  because it changes while nothing else does. A `role: "system"` entry between others keeps its position (vLLM moves it to the front
  for templates that refuse it there; the dialect cannot know the template);
* tool results become `tool` messages, in order, before the rest of their entry. Text blocks of a result are joined with newlines; its
  images follow in a user message, the tools that it names (`tool_reference`) in a second tool message; outside of results vLLM
  ignores such references. Chat has no place for `is_error`. Other blocks of a result are left out, as in vLLM: a model that reads a PDF
  (Claude Code's `Read` returns one) must not end its rollout. Empty text blocks are dropped, a single one becomes a string, several
  stay parts;

It differs where Anthropic's API defines more, and where the proxy knows how a reply was split into blocks:

* the reply continues a last entry of the assistant's that has a text and no call, as Anthropic's API defines it. In vLLM it is one more
  message, and the reply begins anew; then a client that joins both parts, as that API's clients do, holds a reply that was never sampled;
* assistant text blocks are joined without a separator, because the engine wrote one string (in vLLM they stay parts, which become
  lines). Consecutive assistant entries are one turn, as Anthropic's API defines it (vLLM keeps them apart), unless the handles in their
  signatures belong to two replies: clients that merge entries also merge replies;
* `tool_use.input` is written compactly. Clients send arguments that were not a JSON object back as they received them, wrapped
  (`vocabulary.UNPARSED`). They are unwrapped, so that the call equals the record. Any other JSON value is written as it is;
* a plain text document is a text part. Outside of results, every other kind of document, and every block that chat has no equivalent
  for, is refused by name.
"""

from typing import Any

import msgspec

from tokencache.dialects import json_io
from tokencache.dialects.anthropic.vocabulary import (
    TOOL_CHANGES,
    is_text_document,
    kind_of,
    listed,
    optional,
    parts_of,
    required,
    shown,
    unsupported,
    unwrapped,
    wrong,
)
from tokencache.dialects.json_io import Position
from tokencache.dialects.thinking import Mark, folded, read_signature
from tokencache.pauses import MESSAGES, pause

_NUMBERS = {"max_tokens": int, "temperature": float, "top_p": float, "top_k": int}
_PASSED = ("chat_template_kwargs", "cache_salt", "vllm_xargs", "kv_transfer_params", "ec_transfer_params", "watermarking")


class TranslatedRequest(msgspec.Struct, frozen=True):
    """A request, translated into chat.

    Attributes:
        body: the chat request's JSON.
        model: the model's name as the client wrote it.
        handles: index of a chat message → the handle that the client sent back with it.
        left_out: rules by which parts of the request were left out.
    """

    body: bytes
    model: str
    handles: dict[int, str]
    left_out: tuple[str, ...]


async def read_request(body: bytes, *, counting: bool = False) -> TranslatedRequest:
    """Translate the body of `/v1/messages`, or of `count_tokens` (`counting`), where nothing is sampled and `max_tokens` is not required.

    Raises:
        HarnessError: chat has no equivalent; the message names the position.
    """
    fields = json_io.read_body(body)
    model = required(fields, "model", str)
    entries = required(fields, "messages", list)
    if not counting:
        required(fields, "max_tokens", int)
    history = await read_history(fields.get("system"), entries)
    chat: dict[str, Any] = {"model": model, **_tools(fields, history), **_thinking(fields)}
    chat |= {name: fields[name] for name in _PASSED if fields.get(name) is not None}
    if not counting:
        chat |= _sampling(fields)
        if optional(fields, "stream", bool):
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if fields.get("cache_control") is not None:
        history.left_out.add("cache-marks")
    if history.is_begun:
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    whole = b'{"messages":%s,%s' % (json_io.write(history.messages), json_io.write(chat)[1:])
    return TranslatedRequest(whole, model, history.handles, tuple(sorted(history.left_out)))


async def read_history(system: Any, entries: list[Any]) -> "History":
    """Translate a request's `system` and `messages`, with pauses.

    Raises:
        HarnessError: a member has the wrong type, or chat has no equivalent.
    """
    history = History()
    history.leading_system(system)
    for i, entry in enumerate(entries):
        if i % MESSAGES == MESSAGES - 1:
            await pause()
        history.entry(("messages", i), entry)
    history.end_turns()
    return history


def _sampling(fields: dict[str, Any]) -> dict[str, Any]:
    given = {name: optional(fields, name, kind) for name, kind in _NUMBERS.items()}
    stop = optional(fields, "stop_sequences", list)
    if stop and not all(isinstance(text, str) for text in stop):
        raise wrong("stop_sequences", "Input should be a list of valid strings")
    given["stop"] = stop or None
    return {name: value for name, value in given.items() if value is not None}


def _thinking(fields: dict[str, Any]) -> dict[str, Any]:
    """Translate the members for thinking and for the response format."""
    chat: dict[str, Any] = {}
    config = optional(fields, "output_config", dict) or {}
    effort = optional(config, "effort", str, "output_config")
    if effort is not None:
        chat["reasoning_effort"] = effort
    answer = optional(config, "format", dict, "output_config") or optional(fields, "output_format", dict)
    if answer and answer.get("type", "json_schema") == "json_schema":
        schema = optional(answer, "schema", dict, "output_config.format" if config.get("format") else "output_format")
        if schema is not None:
            chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}
    thinking = optional(fields, "thinking", dict) or {}
    if thinking.get("type") == "disabled":
        chat["reasoning_effort"] = "none"
    elif thinking.get("type") == "enabled":
        chat["thinking_token_budget"] = required(thinking, "budget_tokens", int, "thinking.enabled")
    return chat


def _tools(fields: dict[str, Any], history: "History") -> dict[str, Any]:
    if optional(fields, "mcp_servers", list):
        raise wrong("mcp_servers", "MCP servers that the API itself connects to are not supported here")
    given = [_tool(f"tools.{i}", tool, history.left_out) for i, tool in enumerate(optional(fields, "tools", list) or ())]
    tools = _resolved(given, history) if history.tool_changes else given
    choice = optional(fields, "tool_choice", dict)
    kind = optional(choice, "type", str, "tool_choice") if choice else None
    if not tools and kind in {None, "auto", "none"}:
        return {}  # chat completions refuse an empty list, and a choice without one
    chat: dict[str, Any] = {}
    if tools:
        chat["tools"] = tools
    if choice is None:
        return chat
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": required(choice, "name", str, "tool_choice.tool")}}
    elif kind in {"auto", "any", "none"}:
        chat["tool_choice"] = "required" if kind == "any" else kind
    else:
        raise wrong("tool_choice.type", f"Input should be 'auto', 'any', 'tool' or 'none', not {shown(kind)}")
    if optional(choice, "disable_parallel_tool_use", bool, "tool_choice"):
        chat["parallel_tool_calls"] = False
    return chat


def _resolved(given: list[dict[str, Any]], history: "History") -> list[dict[str, Any]]:
    """Return the tools after all changes in the conversation, as vLLM 0.32 does (`_resolve_tools`).

    A tool that is added by name is no longer deferred, one that is added with a definition is declared, and a removed one is left out.

    Raises:
        HarnessError: a change names a tool that is not declared, or has another form.
    """
    tools = {tool["function"]["name"]: tool for tool in given}
    removed: set[str] = set()
    for at, block in history.tool_changes:
        change, place = required(block, "tool", dict, at), (at, "tool")
        if change.get("type") == "tool_definition" and block["type"] == "tool_addition":
            added = _tool((place, "definition"), change.get("definition"), history.left_out)
            name = added["function"]["name"]
            tools[name] = added
        elif change.get("type") == "tool_reference":
            name = required(change, "name", str, place)
            if name not in tools:
                raise wrong((place, "name"), f"{block['type']} references tool {shown(name)}, which is not declared in tools")
            if block["type"] == "tool_addition":
                function = {member: value for member, value in tools[name]["function"].items() if member != "defer_loading"}
                tools[name] = {**tools[name], "function": function}
        else:
            raise wrong((place, "type"), f"a {block['type']} cannot have a tool of type {shown(change.get('type'))}")
        if block["type"] == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
    return [tool for name, tool in tools.items() if name not in removed]


def _tool(at: Position, tool: Any, left_out: set[str]) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong(at, "Input should be a valid dictionary")
    kind = optional(tool, "type", str, at)
    if tool.get("input_schema") is None and kind not in {None, "custom"}:
        raise wrong((at, "type"), f"tools of type {shown(kind)} are not supported here: only those with an 'input_schema' of their own")
    if "cache_control" in tool:
        left_out.add("cache-marks")
    function: dict[str, Any] = {
        "name": required(tool, "name", str, at),
        "description": optional(tool, "description", str, at),
        "parameters": {**required(tool, "input_schema", dict, at)},
        "strict": optional(tool, "strict", bool, at),
        "defer_loading": optional(tool, "defer_loading", bool, at),
    }
    function["parameters"].setdefault("type", "object")
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


_BILLING = "x-anthropic-billing-header"
_BILLING_LINE, _CACHE_MARKS, _RESULT_PARTS = "billing-line", "cache-marks", "result-parts"
Message = dict[str, Any]


class _Turn(msgspec.Struct):
    """Consecutive content of the assistant, which becomes one chat message; `mark` is where its thinking was."""

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
    """A request's conversation, translated into chat.

    Attributes:
        messages: chat messages.
        handles: index of a message → the handle that the client sent back with it.
        left_out: rules by which parts were left out.
        tool_changes: the blocks that add or remove a tool, with their positions, in order.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.handles: dict[int, str] = {}
        self.left_out: set[str] = set()
        self.tool_changes: list[tuple[Position, Message]] = []
        self._turns: list[_Turn] = []

    @property
    def is_begun(self) -> bool:
        """Whether the last message is the beginning of the reply: a text of the assistant's."""
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "assistant" and bool((last.get("content") or "").strip()) and "tool_calls" not in last

    def leading_system(self, system: Any) -> None:
        """Translate the member `system`."""
        if isinstance(system, str):
            if system.startswith(_BILLING):  # in a string, vLLM drops only that line (`renderers/chat_utils.py`)
                self.left_out.add(_BILLING_LINE)
                system = system.partition("\n")[2]
        else:
            system = self._system_text("system", system)
        if system:
            self.messages.append({"role": "system", "content": system})

    def _system_text(self, at: Position, content: Any) -> str:
        texts: list[str] = []
        for i, block in enumerate(listed(content, at)):
            kind = self._kind(block, (at, i))
            if kind in TOOL_CHANGES and at != "system":
                self.tool_changes.append(((at, i), block))
            elif kind == "text":
                texts.append(required(block, "text", str, (at, i)))
            elif kind != "tool_reference":
                raise unsupported(block, (at, i))
        kept = [text for text in texts if not text.startswith(_BILLING)]
        if len(kept) < len(texts):
            self.left_out.add(_BILLING_LINE)
        return "".join(kept)

    def entry(self, at: Position, entry: Any) -> None:
        """Translate one of `messages`."""
        if not isinstance(entry, dict):
            raise wrong(at, "Input should be a valid dictionary")
        role, content = entry.get("role"), entry.get("content")
        if role == "assistant":
            self._assistant((at, "content"), content)
            return
        self.end_turns()
        if role == "user":
            self._user((at, "content"), content)
        elif role == "system":
            if text := self._system_text((at, "content"), content):
                self.messages.append({"role": "system", "content": text})
        else:
            raise wrong((at, "role"), f"Input should be 'user', 'assistant' or 'system', not {shown(role)}")

    def _user(self, at: Position, content: Any) -> None:
        if content is None or isinstance(content, str):
            self.messages.append({"role": "user", "content": content or ""})
            return
        parts: list[Message] = []
        for i, block in enumerate(listed(content, at)):
            kind = self._kind(block, (at, i))
            if kind == "tool_result":
                self._result((at, i), block)
            elif kind != "tool_reference":
                parts += parts_of(block, (at, i))
        if parts:
            lone = len(parts) == 1 and parts[0]["type"] == "text"
            self.messages.append({"role": "user", "content": parts[0]["text"] if lone else parts})

    def _result(self, at: Position, block: Message) -> None:
        call = required(block, "tool_use_id", str, at)
        texts: list[str] = []
        images: list[Message] = []
        references: list[Message] = []
        at = at, "content"
        for i, inner in enumerate(listed(block.get("content"), at)):
            place = at, i
            kind = self._kind(inner, place)
            if kind == "text":
                texts.append(required(inner, "text", str, place))  # empty text too, as in vLLM
            elif kind == "tool_reference":  # a tool that a tool search found: templates that support deferred tools expand it
                if name := optional(inner, "tool_name", str, place) or optional(inner, "name", str, place):
                    references.append({"type": "tool_reference", "name": name})
            elif kind == "image" or is_text_document(inner):
                for part in parts_of(inner, place):
                    if part["type"] == "text":
                        texts.append(part["text"])
                    else:
                        images.append(part)
            else:
                self.left_out.add(_RESULT_PARTS)
        self.messages.append({"role": "tool", "tool_call_id": call, "content": "\n".join(texts)})
        if images:
            self.messages.append({"role": "user", "content": images})
        if references:
            self.messages.append({"role": "tool", "tool_call_id": call, "content": references})

    def _assistant(self, at: Position, content: Any) -> None:
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
                    self._turns.append(turn := _Turn())  # another recorded reply
                turn.handle, turn.mark = handle or turn.handle, mark or turn.mark
                turn.thoughts.append(optional(block, "thinking", str, place) or "")  # vLLM leaves out a block without its text
            elif kind not in {"redacted_thinking", "tool_reference"}:  # only Anthropic can decrypt thinking
                raise unsupported(block, place)
            begins = False

    def end_turns(self) -> None:
        """End the assistant's message to which the last entries belong."""
        for turn in self._turns:
            if turn.handle:
                self.handles[len(self.messages)] = turn.handle
            self.messages.append(turn.message)
        self._turns = []

    def _kind(self, block: Any, at: Position) -> str:
        """Return the type of a block, and note whether it has a cache mark."""
        kind = kind_of(block, at)
        if "cache_control" in block:
            self.left_out.add(_CACHE_MARKS)
        return kind


def _arguments(value: Any) -> str:
    raw = unwrapped(value)
    if raw is not None:
        return raw
    return "{}" if value is None else json_io.write(value).decode()

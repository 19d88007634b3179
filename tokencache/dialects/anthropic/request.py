"""Anthropic Messages: a request → a chat request.

The members are mapped as vLLM 0.32 maps them for its own `/v1/messages` (`entrypoints/anthropic/serving.py`), so that the
same request samples under the same conditions here and there:

====================  ==================================================================================================
Messages              chat completions
====================  ==================================================================================================
`max_tokens` …        `max_tokens`, `temperature`, `top_p`, `top_k`; `stop_sequences` is `stop`
`thinking`            `enabled` is `thinking_token_budget`, `disabled` is `reasoning_effort: "none"` (vLLM asks its template
                      first whether it knows that effort, and else says `low`); other kinds pin nothing. `display` is
                      ignored: thinking is always shown, as there
`output_config`       `effort` is `reasoning_effort`, `format` is `response_format`; so is `output_format`, its older name
`tool_choice`         `any` is `required`, `tool` names a function; `disable_parallel_tool_use` is `parallel_tool_calls`
`tools`               functions. Tools that Anthropic's servers run, or whose schema only its models know, are refused by
                      name: Claude Code puts none into its main requests (its web search is a side call, which vLLM refuses too)
vLLM's own            `chat_template_kwargs`, `cache_salt`, `vllm_xargs`, `kv_transfer_params`, `ec_transfer_params` and
                      `watermarking` pass as they are; the proxy's chat reading judges them
====================  ==================================================================================================

Without tools a call that the model writes all the same is text, as in chat. vLLM reads it there, too, and then shows it in
a stream alone: of a whole answer it is lost (it sends `tool_choice: null`, which its chat completions never have).

Everything else (`metadata`, `service_tier`, `context_management`, `container`, members unknown to us) says nothing to an
engine, and is ignored as vLLM ignores it.
"""

from typing import Any

import msgspec

from tokencache.dialects import lenient
from tokencache.dialects.anthropic.history import History
from tokencache.dialects.anthropic.members import optional, read_object, required, shown, wrong

_NUMBERS = {"max_tokens": int, "temperature": float, "top_p": float, "top_k": int}
_PASSED = ("chat_template_kwargs", "cache_salt", "vllm_xargs", "kv_transfer_params", "ec_transfer_params", "watermarking")


class TranslatedRequest(msgspec.Struct, frozen=True):
    """A request in chat.

    Attributes:
        body: the chat request's JSON.
        model: the model's name as the harness wrote it.
        handles: places in its messages → the handle that came back there.
        left_out: rules by which something was left out.
    """

    body: bytes
    model: str
    handles: dict[int, str]
    left_out: tuple[str, ...]


def read_request(body: bytes, *, counting: bool = False) -> TranslatedRequest:
    """Read the body of `/v1/messages`, or of its `count_tokens`, where nothing is sampled and `max_tokens` is not asked for.

    Raises:
        HarnessError: it cannot be said in chat; the message names the place.
    """
    fields = read_object(body)
    model = required(fields, "model", str)
    entries = required(fields, "messages", list)
    if not counting:
        required(fields, "max_tokens", int)
    history = History(fields.get("system"), entries)
    chat: dict[str, Any] = {"model": model, **_tools(fields, history.left_out), **_thinking(fields)}
    chat |= {name: fields[name] for name in _PASSED if fields.get(name) is not None}
    if not counting:
        chat |= _sampling(fields)
        if optional(fields, "stream", bool):
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if fields.get("cache_control") is not None:
        history.left_out.add("cache-marks")
    whole = b'{"messages":%s,%s' % (lenient.write(history.messages), lenient.write(chat)[1:])
    return TranslatedRequest(whole, model, history.handles, tuple(sorted(history.left_out)))


def _sampling(fields: dict[str, Any]) -> dict[str, Any]:
    given = {name: optional(fields, name, kind) for name, kind in _NUMBERS.items()}
    stop = optional(fields, "stop_sequences", list)
    if stop and not all(isinstance(text, str) for text in stop):
        raise wrong("stop_sequences", "Input should be a list of valid strings")
    given["stop"] = stop or None
    return {name: value for name, value in given.items() if value is not None}


def _thinking(fields: dict[str, Any]) -> dict[str, Any]:
    """How much to think, and in which form to answer."""
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


def _tools(fields: dict[str, Any], left_out: set[str]) -> dict[str, Any]:
    if optional(fields, "mcp_servers", list):
        raise wrong("mcp_servers", "MCP servers that the API itself connects to are not supported here")
    listed = optional(fields, "tools", list)
    choice = optional(fields, "tool_choice", dict)
    kind = optional(choice, "type", str, "tool_choice") if choice else None
    if not listed and kind in {None, "auto", "none"}:
        return {}  # chat completions refuse an empty list, and a choice without one
    chat: dict[str, Any] = {}
    if listed:
        chat["tools"] = [_tool(f"tools.{i}", tool, left_out) for i, tool in enumerate(listed)]
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


def _tool(at: str, tool: Any, left_out: set[str]) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong(at, "Input should be a valid dictionary")
    kind = optional(tool, "type", str, at)
    if tool.get("input_schema") is None and kind not in {None, "custom"}:
        raise wrong(f"{at}.type", f"tools of type {shown(kind)} are not supported here: only those with an 'input_schema' of their own")
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

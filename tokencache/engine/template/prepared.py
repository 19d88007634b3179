"""What vLLM 0.32 does to messages and tools before a chat template sees them (`renderers/chat_utils.py`, `renderers/hf.py`).

* text parts are joined with newlines, empty ones left out, or kept as parts where the template loops over them; a
  tool's result is always text; `null` is no text; Claude Code's billing line is dropped from system messages;
* `reasoning` is given under its old name, too;
* arguments of calls are read into objects (`{}` where they are none), and the members of a call stand in the order of
  OpenAI's types, `arguments` before `name`: templates that write a whole call as JSON show it;
* a developer's messages become system messages for a template that does not know the role, and then all system
  messages are made one, in front;
* tools get fixed members: unknown ones are gone, `description` and `parameters` are there even if `null`.

Only what is understood here to the letter is prepared; anything else is declined, and left to the engine.
"""

import json
from collections.abc import Sequence
from typing import Any

from tokencache.engine.template.renderer import TemplateRefusedError

_TEXT_OF = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_BILLING = "x-anthropic-billing-header"


class DeclinedError(TemplateRefusedError):
    """The conversation has something that only the engine is trusted with."""


def prepare(messages: Sequence[bytes], *, parts: bool, developer: bool) -> list[dict[str, Any]]:
    """Prepare raw messages; `parts` says that the template takes content in parts, `developer` that it knows the role.

    Raises:
        DeclinedError: the engine had better do it.
    """
    out = [_message(_read(raw), parts=parts) for raw in messages]
    if developer or all(message["role"] != "developer" for message in out):
        return out
    return _one_system([{**message, "role": "system"} if message["role"] == "developer" else message for message in out])


def prepare_tools(raw: bytes | None) -> list[dict[str, Any]] | None:
    """Prepare a raw list of tools.

    Raises:
        DeclinedError: the engine had better do it.
    """
    return [_tool(tool) for tool in _list(_read(raw))] if raw is not None else None


def _read(raw: bytes) -> Any:
    try:
        return json.loads(bytes(raw))  # as vLLM reads it: numbers of any size, and any float
    except (ValueError, RecursionError) as why:
        raise DeclinedError(f"no JSON: {why}") from why


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise DeclinedError("something that is no list")
    return value


def _message(message: Any, *, parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise DeclinedError("a message that is no object")
    role, name = message.get("role"), message.get("name")
    if role not in _ROLES or any(message.get(member) is not None for member in ("tools", "task", "function_call")):
        raise DeclinedError(f"an unusual message of role {role!r}")
    content = message.get("content")
    if content is None and role != "assistant":
        raise DeclinedError("a message without content")
    given = [_part(part) for part in ([content] if isinstance(content, str) else _list(content or []))]
    if role == "system":
        given = [part for part in map(_unbilled, given) if part is not None]
    out: dict[str, Any] = {"role": role, "content": given}
    if role == "tool" or not parts:
        out["content"] = "\n".join(part["text"] for part in given if parts or part["text"])
    if role == "assistant":
        out |= _said(message)
    elif role == "tool" and "tool_call_id" in message:
        out["tool_call_id"] = message["tool_call_id"]
    return out | {"name": name} if isinstance(name, str) else out


def _part(part: Any) -> dict[str, Any]:
    """Read a part that has a text and nothing else, but for a cache mark."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    member = _TEXT_OF.get(str(part.get("type"))) if isinstance(part, dict) else None
    if member is None or not isinstance(part.get(member), str) or not part.keys() <= {"type", member, "cache_control"}:
        raise DeclinedError("an unusual content part")
    return {"type": "text", "text": part[member], **{name: part[name] for name in part if name == "cache_control"}}


def _unbilled(part: dict[str, Any]) -> dict[str, Any] | None:
    """Leave out Claude Code's billing line, and a part that was nothing else."""
    if not part["text"].startswith(_BILLING):
        return part
    rest = part["text"].partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _said(message: dict[str, Any]) -> dict[str, Any]:
    """What an assistant's message has beside its content."""
    out: dict[str, Any] = {}
    if message.get("tool_calls"):
        out["tool_calls"] = [_call(call) for call in _list(message["tool_calls"])]
    thought = message["reasoning"] if message.get("reasoning") is not None else message.get("reasoning_content")
    if thought is not None:
        if not isinstance(thought, str):
            raise DeclinedError("reasoning that is no text")
        out |= {"reasoning": thought, "reasoning_content": thought}
    return out


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type") != "function" or not isinstance(call.get("id"), str):
        raise DeclinedError("an unusual tool call")
    if not isinstance(function.get("arguments"), str) or not isinstance(function.get("name"), str):
        raise DeclinedError("an unusual function call")
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = {}
    told = {"arguments": arguments if isinstance(arguments, dict) else {}, "name": function["name"]}
    known = {"id": call["id"], "function": {**told, **{key: value for key, value in function.items() if key not in told}}}
    return {**known, "type": "function", **{key: value for key, value in call.items() if key not in {*known, "type"}}}


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if all(message["role"] != "system" for message in messages[1:]):
        return messages
    contents = [message["content"] for message in messages if message["role"] == "system"]
    texts = ["\n".join(part["text"] for part in content) if isinstance(content, list) else content for content in contents]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *(m for m in messages if m["role"] != "system")]


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or "defer_loading" in tool or "defer_loading" in function:
        raise DeclinedError("an unusual tool")
    shown = {member: function.get(member) for member in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        shown["strict"] = function["strict"]
    return {"type": "function", "function": shown}

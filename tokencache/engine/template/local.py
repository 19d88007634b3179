"""Renders small conversations in this process, with transformers, as vLLM renders them.

This is an optimization; the engine stays the reference. A model uses it only after it agreed with the engine on sample conversations
(`agreement`), and a shape only after it gave the engine's tail (`tails`). It declines everything unusual, which the engine then renders.

It needs the extra `local`, and imports that only when a renderer is created. So a proxy without the extra starts.

Before a chat template sees messages and tools, vLLM 0.32 prepares them (`renderers/chat_utils.py`, `renderers/hf.py`). `prepare` and
`prepare_tools` do the same:

* text parts are joined with newlines without empty parts, or kept as parts where the template loops over them; a tool's result is always
  text; `null` is an empty text; Claude Code's billing line is removed from system messages;
* `reasoning` is also passed under its old name;
* arguments of calls are parsed into objects (`{}` if they are not an object), and the members of a call are in the order of OpenAI's types,
  `arguments` before `name`: templates that write a whole call as JSON show this order;
* if the template does not know the role `developer`, developer messages become system messages, and then all system messages are merged
  into one at the beginning;
* tools have fixed members: unknown ones are removed, and `description` and `parameters` are present even if `null`.
"""

import asyncio
import copy
import inspect
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokencache.core import ids
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.template.renderer import TemplateRefusedError
from tokencache.errors import extra_missing

LARGE_BYTES = 8 * 1024
"""Conversations with more bytes than this are rendered in a thread: encoding a megabyte takes a second."""
_TEXT_OF = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
_KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_BILLING = "x-anthropic-billing-header"


class LocalTokenizerError(ValueError):
    """The configured local tokenizer cannot be used."""


class DeclinedError(TemplateRefusedError):
    """The conversation contains something that only the engine should render."""


def quieten() -> None:
    """Keep transformers from using PyTorch, TensorFlow, the network and the terminal; for this program's own processes."""
    for name, value in {"USE_TORCH": "0", "USE_TF": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}.items():
        os.environ.setdefault(name, value)


class LocalRenderer:
    """Renders with the tokenizer and the chat template in a folder.

    Attributes:
        path: the folder.
        parts: whether the template accepts content in parts. vLLM reads that from the template; `agreement` tries both.
    """

    def __init__(self, path: str | Path) -> None:
        """Load a tokenizer.

        Raises:
            LocalTokenizerError: the folder has no usable tokenizer, or transformers is not installed.
        """
        self.path = Path(path)
        self.parts = False
        self._tokenizer = _load(self.path)
        # Template arguments with the names of this function's own parameters: the engine handles them.
        self._reserved = inspect.signature(self._tokenizer.apply_chat_template).parameters.keys() - {"documents"}

    def in_parts(self) -> "LocalRenderer":
        """Return the same renderer with content in parts."""
        other = copy.copy(self)
        other.parts = True
        return other

    async def render(self, model: str, messages: Sequence[bytes], args: RenderArgs, *, generation: bool) -> bytes:  # noqa: ARG002
        """See `Renderer.render`; anything unusual is declined with a `DeclinedError`."""
        if sum(map(len, messages)) > LARGE_BYTES:
            return await asyncio.to_thread(self._render, messages, args, generation)
        return self._render(messages, args, generation)

    def _render(self, messages: Sequence[bytes], args: RenderArgs, generation: bool) -> bytes:
        if args.members or not self._reserved.isdisjoint(args.kwargs):
            raise DeclinedError("arguments that only the engine understands")
        try:
            tools = prepare_tools(args.tools)
            template = self._tokenizer.get_chat_template(None, tools)
            given = prepare(messages, parts=self.parts, developer='"developer"' in template or "'developer'" in template)
            text = self._tokenizer.apply_chat_template(given, tools=tools, tokenize=False, add_generation_prompt=generation, **args.kwargs)
            return ids.pack(self._tokenizer.encode(text, add_special_tokens=False))
        except DeclinedError:
            raise
        except Exception as why:  # any error in a template is a refusal, as in vLLM
            raise TemplateRefusedError(f"{type(why).__name__}: {why}") from why


def _load(path: Path) -> Any:
    if not path.is_dir():
        raise LocalTokenizerError(f"no tokenizer: {path} is no folder (it must hold tokenizer.json and tokenizer_config.json)")
    try:
        import jinja2  # noqa: F401, PLC0415 - the extra `local`
        from transformers import AutoTokenizer  # noqa: PLC0415
    except ImportError as why:
        raise LocalTokenizerError(extra_missing("--tokenizer", "local", why.name or str(why))) from why
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        tokenizer.get_chat_template(None, None)
    except Exception as why:
        raise LocalTokenizerError(f"no tokenizer with a chat template can be loaded from {path}: {why}") from why
    if not tokenizer.is_fast:
        raise LocalTokenizerError(f"the tokenizer in {path} is a slow one, which threads cannot share: leave it to the engine")
    tokenizer.encode("", add_special_tokens=False)  # the first call sets up truncation, which must not change while a thread encodes
    return tokenizer


def prepare(messages: Sequence[bytes], *, parts: bool, developer: bool) -> list[dict[str, Any]]:
    """Prepare raw messages for the template.

    Args:
        messages: the messages as JSON.
        parts: whether the template accepts content in parts.
        developer: whether the template knows the role `developer`.

    Raises:
        DeclinedError: only the engine should render one of the messages.
    """
    out = [_message(_read(raw), parts=parts) for raw in messages]
    if developer or all(message["role"] != "developer" for message in out):
        return out
    return _merge_systems([{**message, "role": "system"} if message["role"] == "developer" else message for message in out])


def prepare_tools(raw: bytes | None) -> list[dict[str, Any]] | None:
    """Prepare a raw list of tools for the template.

    Raises:
        DeclinedError: only the engine should render one of the tools.
    """
    return [_tool(tool) for tool in _list(_read(raw))] if raw is not None else None


def _read(raw: bytes) -> Any:
    try:
        return json.loads(bytes(raw))  # like vLLM: numbers of any size, and any float
    except (ValueError, RecursionError) as why:
        raise DeclinedError(f"not JSON: {why}") from why


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise DeclinedError("not a list")
    return value


def _message(message: Any, *, parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise DeclinedError("a message that is not an object")
    role, name = message.get("role"), message.get("name")
    if role not in _KNOWN_ROLES or any(message.get(member) is not None for member in ("tools", "task", "function_call")):
        raise DeclinedError(f"an unusual message of role {role!r}")
    content = message.get("content")
    if content is None and role != "assistant":
        raise DeclinedError("a message without content")
    given = [_part(part) for part in ([content] if isinstance(content, str) else _list(content or []))]
    if role == "system":
        given = [part for part in map(_without_billing_line, given) if part is not None]
    out: dict[str, Any] = {"role": role, "content": given}
    if role == "tool" or not parts:
        out["content"] = "\n".join(part["text"] for part in given if parts or part["text"])
    if role == "assistant":
        out |= _assistant_members(message)
    elif role == "tool" and "tool_call_id" in message:
        out["tool_call_id"] = message["tool_call_id"]
    return out | {"name": name} if isinstance(name, str) else out


def _part(part: Any) -> dict[str, Any]:
    """Read a part that has a text and nothing else except a cache mark."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    member = _TEXT_OF.get(str(part.get("type"))) if isinstance(part, dict) else None
    if member is None or not isinstance(part.get(member), str) or not part.keys() <= {"type", member, "cache_control"}:
        raise DeclinedError("an unusual content part")
    return {"type": "text", "text": part[member], **{name: part[name] for name in part if name == "cache_control"}}


def _without_billing_line(part: dict[str, Any]) -> dict[str, Any] | None:
    """Remove Claude Code's billing line; `None` if the part contains nothing else."""
    if not part["text"].startswith(_BILLING):
        return part
    rest = part["text"].partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _assistant_members(message: dict[str, Any]) -> dict[str, Any]:
    """Return the members of an assistant message except its content."""
    out: dict[str, Any] = {}
    if message.get("tool_calls"):
        out["tool_calls"] = [_call(call) for call in _list(message["tool_calls"])]
    thought = message["reasoning"] if message.get("reasoning") is not None else message.get("reasoning_content")
    if thought is not None:
        if not isinstance(thought, str):
            raise DeclinedError("reasoning that is not text")
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
    first = {"arguments": arguments if isinstance(arguments, dict) else {}, "name": function["name"]}
    known = {"id": call["id"], "function": {**first, **{key: value for key, value in function.items() if key not in first}}}
    return {**known, "type": "function", **{key: value for key, value in call.items() if key not in {*known, "type"}}}


def _merge_systems(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
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

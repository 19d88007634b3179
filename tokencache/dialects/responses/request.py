"""Translates the members and items of a Responses request into a chat request.

Members follow vLLM 0.32's own Responses route (`entrypoints/openai/responses/protocol.py`); vLLM's additions pass unchanged. Members
without effect here (`truncation`, `service_tier`, `prompt_cache_key`, `text.verbosity`, `reasoning.summary`, `include` besides
encrypted reasoning) are accepted, and repeated in the response if OpenAI's responses repeat them. Log probabilities of the text are not
supported: chat returns them by token, for reasoning and calls too, and pieces of text do not end where tokens do.

Clients send one reply back as several items (reasoning, message, calls), which become one chat message again. A reply ends

- at any item that is not the assistant's;
- where the handle changes, if both items have one (in the id, or in `encrypted_content`);
- otherwise before a message directly after a message, and before reasoning after anything but reasoning. vLLM 0.32 splits there too
  (`entrypoints/openai/responses/utils.py`), and replies of the proxy never have two messages in a row.

Unlike vLLM's converter, this one loses nothing. vLLM reads the first part of a message or reasoning item; here all parts are joined
without a separator (summaries, which are paragraphs, with newlines). Text after a tool call stays with its reply. `encrypted_content`
from elsewhere is ignored and not refused. Parts of user and system messages and of tool results stay parts, except for files in results
(AI SDK sends a PDF that a tool returned as `input_file`), which are left out.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from tokencache.dialects import json_io
from tokencache.dialects.gym import TAKEN, ReturnedIdFragments, take_all
from tokencache.dialects.json_io import FIELDS, Position, bracketed, entries_of, fields_of, member, read_members
from tokencache.dialects.responses.vocabulary import INLINE, INLINE_CLOSED, Item, ToolSelection, flat_name, handle_of, own_id
from tokencache.dialects.thinking import CLOSED, UNCLOSED, Mark, folded, read_signature
from tokencache.errors import HarnessError

_TEXTS = {
    **dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), "text"),
    **{name: name for name in ("refusal", "encrypted_content")},
}
"""Type of a part with text → the member that has it. An `encrypted_content` of Codex is what its model wrote: nothing encrypts it here."""
_ROLES = frozenset({"user", "system", "developer", "assistant"})
_DETAILS = "low", "high"
_FILE = "input_file"
_UNFINISHED = "in_progress", "incomplete"


def _mark_of(item: Mapping[str, Any], reply: Mapping[str, list[Any]]) -> Mark:
    """Return where the thinking of a reasoning item was. A block whose id does not show its end was closed if an item follows."""
    handle, mark = read_signature(item.get("encrypted_content"))
    ours = None if handle else own_id(item)
    if ours is None or ours[1] not in {INLINE, INLINE_CLOSED}:
        return mark
    return CLOSED if ours[1] == INLINE_CLOSED or reply["content"] or reply["tool_calls"] else UNCLOSED


class ItemMessages:
    """Translates a list of items into chat messages: `add` them in order, then `close`.

    Attributes:
        messages: chat messages.
        handles: index of an assistant message → the handle that the client sent back with it.
        echoes: index of a message → the token ids that the client sent back with it.
        left_out: rules by which parts were left out.
        tools: the tools that `additional_tools` items offer, by path.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.handles: dict[int, str] = {}
        self.echoes: dict[int, ReturnedIdFragments] = {}
        self.left_out: set[str] = set()
        self.tools: dict[str, Any] = {}
        self._reply: dict[str, list[Any]] = {}  # the incomplete assistant message
        self._handle = self._last = ""
        self._echo: ReturnedIdFragments | None = None
        self._thinking: dict[str, Any] = {}  # its last reasoning item

    def add(self, item: Any, at: Position, echo: ReturnedIdFragments | None = None) -> None:
        """Add one item at position `at`; `echo` are the token ids that the client sent back with it.

        Raises:
            HarnessError: it is malformed, or its type is not supported.
        """
        if not isinstance(item, dict):
            raise _wrong(at, " must be an object")
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        match kind:
            case "message":
                self._message(item, at)
            case "reasoning":
                self._continue(item, "reasoning")["reasoning"].append(_thought(item, at))
                self._thinking = item
            case "function_call" | "custom_tool_call":
                self._call(item, at)
            case "function_call_output" | "custom_tool_call_output":
                self._append({"role": "tool", "tool_call_id": _text(item, "call_id", at), "content": self._output(item, (at, "output"))})
            case "agent_message":  # what one agent of Codex writes to another
                self._append({"role": "user", "content": _content(item.get("content"), (at, "content"))})
            case "additional_tools":
                self.close()
                self.tools[bracketed((at, "tools"))] = item.get("tools")
            case _:
                why = f": items of type {kind!r} are not supported" if kind is not None else " must have a 'type' or a 'role'"
                raise _wrong(at, why)
        if self._reply:  # the last item of a reply has its ids
            self._echo = echo or self._echo

    def close(self) -> None:
        """Complete the current assistant message."""
        if not self._reply:
            return
        reply, self._reply = self._reply, {}
        message: dict[str, Any] = {"role": "assistant"}
        if any(reply["reasoning"]):
            message["reasoning"] = "".join(reply["reasoning"])
        if reply["content"] or not reply["tool_calls"]:
            message["content"] = "".join(reply["content"])
        if reply["tool_calls"]:
            message["tool_calls"] = reply["tool_calls"]
        if self._handle:
            self.handles[len(self.messages)] = self._handle
        if self._echo is not None:
            self.echoes[len(self.messages)] = self._echo
        self.messages.append(folded(message, _mark_of(self._thinking, reply)))

    def _append(self, message: dict[str, Any]) -> None:
        self.close()
        self.messages.append(message)

    def _continue(self, item: dict[str, Any], kind: str) -> dict[str, list[Any]]:
        """Return the assistant message that an item belongs to."""
        handle = handle_of(item)
        if self._reply and handle and self._handle:
            ended = handle != self._handle
        else:
            ended = kind == self._last == "message" or (kind == "reasoning" and self._last != "reasoning")
        if ended:
            self.close()
        if self._reply:
            self.left_out.add("items-merged")
        else:
            self._reply = {"reasoning": [], "content": [], "tool_calls": []}
            self._handle, self._echo, self._thinking = "", None, {}
        self._handle = self._handle or handle
        self._last = kind
        return self._reply

    def _message(self, item: dict[str, Any], at: Position) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise _wrong((at, "role"), f" must be one of {', '.join(sorted(_ROLES))}, not {role!r}")
        content = _content(item.get("content"), (at, "content"))
        if role != "assistant":
            self._append({"role": role, "content": content})
            return
        if isinstance(content, list):
            texts = [part["text"] for part in content if part["type"] == "text"]
            if len(texts) < len(content):
                raise _wrong((at, "content"), ": an assistant's message can only have text")
            content = "".join(texts)
        self._continue(item, "message")["content"].append(content)

    def _output(self, item: dict[str, Any], at: Position) -> str | list[dict[str, Any]]:
        """Translate a tool's output. Files are left out: a model that reads a PDF must not end its rollout."""
        output = item.get("output")
        parts = output if isinstance(output, list) else ()
        shown = [i for i, part in enumerate(parts) if not (isinstance(part, dict) and part.get("type") == _FILE)]
        if len(shown) == len(parts):
            return _content(output, at)
        self.left_out.add("result-parts")
        return [_part(parts[i], (at, i)) for i in shown] or ""

    def _call(self, item: dict[str, Any], at: Position) -> None:
        name = flat_name(_text(item, "name", at), _optional(item, "namespace", at))
        if item["type"] == "function_call":
            arguments = _text(item, "arguments", at)
        else:
            arguments = msgspec.json.encode({"input": _text(item, "input", at)}).decode()
        call = {"id": _text(item, "call_id", at), "type": "function", "function": {"name": name, "arguments": arguments}}
        self._continue(item, "call")["tool_calls"].append(call)


def continues(item: Any) -> bool:
    """Whether the reply continues the last item, as in vLLM 0.32: if the item is the assistant's and incomplete."""
    if not isinstance(item, dict) or item.get("status") not in _UNFINISHED:
        return False
    return item.get("type") == "reasoning" or item.get("role") == "assistant"


def _content(content: Any, at: Position) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(at, " must be a string or a list of parts")
    return [_part(part, (at, i)) for i, part in enumerate(content)] or ""


def _part(part: Any, at: Position) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    member = _TEXTS.get(kind) if isinstance(kind, str) else None
    if member is not None:
        return {"type": "text", "text": _text(part, member, at)}
    if kind == "input_image":
        url, detail = part.get("image_url"), part.get("detail")
        if not isinstance(url, str):
            raise _wrong(at, ": an image must have an 'image_url'; files are not stored here")
        return {"type": "image_url", "image_url": {"url": url, **({"detail": detail} if detail in _DETAILS else {})}}
    raise _wrong(at, f": content of type {kind!r} is not supported")


def _thought(item: dict[str, Any], at: Position) -> str:
    for name, separator in (("content", ""), ("summary", "\n")):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise _wrong((at, name), " must be a list of parts")
        read = [_part(part, ((at, name), i)) for i, part in enumerate(parts)]
        text = separator.join([part["text"] for part in read if part["type"] == "text"])
        if text:
            return text
    return ""


def _text(item: dict[str, Any], member: str, at: Position) -> str:
    value = item.get(member)
    if not isinstance(value, str):
        raise _wrong((at, member), " must be a string")
    return value


def _optional(item: dict[str, Any], member: str, at: Position) -> str | None:
    return _text(item, member, at) if item.get(member) is not None else None


def _wrong(at: Position, why: str) -> HarnessError:
    name = bracketed(at)
    return HarnessError(f"'{name}'{why}", param=name)


Raw = msgspec.Raw
_LIST = msgspec.json.Decoder(list[Any])
SEALED = "reasoning.encrypted_content"
_SHOWN: dict[str, tuple[tuple[type, ...], Any]] = {
    "background": ((bool,), False),
    "max_output_tokens": ((int,), None),
    "max_tool_calls": ((int,), None),
    "metadata": ((dict,), {}),
    "parallel_tool_calls": ((bool,), True),
    "prompt_cache_key": ((str,), None),
    "reasoning": ((dict,), {"effort": None, "summary": None}),
    "safety_identifier": ((str,), None),
    "service_tier": ((str,), "default"),
    "store": ((bool,), True),
    "temperature": ((int, float), None),
    "text": ((dict,), {"format": {"type": "text"}}),
    "tool_choice": ((str, dict), "auto"),
    "tools": ((list,), []),
    "top_logprobs": ((int,), 0),
    "top_p": ((int, float), None),
    "truncation": ((str,), "disabled"),
    "user": ((str,), None),
}
"""Members that the response repeats: their types and defaults (openai 3.52, `Response`)."""
_RENAMED = {"max_output_tokens": "max_completion_tokens"}
_SAME = (
    "temperature", "top_p", "parallel_tool_calls", "user",
    # vLLM's own, in both of its requests
    "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "skip_special_tokens", "include_stop_str_in_output", "structured_outputs",
    "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "cache_salt", "priority", "vllm_xargs",
    "kv_transfer_params", "ec_transfer_params", "watermarking",
)  # fmt: skip
_UNSUPPORTED = {
    "conversation": "conversations are not stored here; use 'previous_response_id', or send the items",
    "prompt": "prompt templates are not stored here; send 'instructions' and 'input'",
}


def members_of(body: bytes) -> dict[str, Raw]:
    """Return the members of a body, raw. JSON that strict readers refuse is re-encoded first, because its items are stored as they are.

    Raises:
        HarnessError: it is not a JSON object, or has a member twice (`json_io.refuse_repeated_members`).
    """
    try:
        fields = FIELDS.decode(body)
    except (ValueError, RecursionError):
        return fields_of(json_io.write(json_io.read_body(body)))
    json_io.refuse_repeated_members(body)
    return fields


def refuse_unsupported(fields: dict[str, Raw]) -> None:
    """Refuse members that are not supported and that change the meaning of the request.

    Raises:
        HarnessError: the request has such a member.
    """
    for name, why in _UNSUPPORTED.items():
        if name in fields and bytes(fields[name]) != b"null":
            raise HarnessError(f"'{name}' is not supported: {why}", param=name)
    if member(fields, "background", (bool,), False):
        raise HarnessError("'background' is not supported: a response is generated while its client waits", param="background")


def members_shown(fields: dict[str, Raw]) -> dict[str, Any]:
    """Read the members that the response repeats.

    Raises:
        HarnessError: one of them has the wrong type.
    """
    return read_members(fields, _SHOWN)


def items_of(fields: dict[str, Raw], *, needed: bool, kept: bool) -> tuple[list[Item], dict[int, ReturnedIdFragments]]:
    """Read `input`; a string is a message of the user. A missing one is an error if it is `needed`, otherwise an empty list.

    Only if the items are `kept` in the store, their JSON is cut out one by one.

    Returns:
        The items, and the token ids that the client sent back with them, by index.

    Raises:
        HarnessError: `input` is neither a string nor a list.
    """
    raw = fields.get("input", Raw(b"null"))
    if bytes(raw) == b"null" and not needed:
        return [], {}
    if bytes(raw)[:1] == b'"':
        message = {"type": "message", "role": "user", "content": member(fields, "input", (str,), "")}
        return [(json_io.write(message), message)], {}
    with contextlib.suppress(ValueError, RecursionError):  # the code below reports items that cannot be read
        items = _LIST.decode(raw)
        if not any(isinstance(item, dict) and not TAKEN.isdisjoint(item) for item in items):
            return list(zip(entries_of(raw) if kept else [b""] * len(items), items, strict=True)), {}
    try:
        raws, echoes = take_all(entries_of(raw), 0)
    except (ValueError, RecursionError):
        raise HarnessError("'input' must be a string or a list of items", param="input") from None
    return [(entry, _decoded(entry, f"input[{i}]")) for i, entry in enumerate(raws)], echoes


def chat_request(
    fields: dict[str, Raw], shown: dict[str, Any], messages: list[dict[str, Any]], choice: ToolSelection, *, continues: bool, gym: bool
) -> bytes:
    """Write the chat request; with `gym`, also the members that NeMo Gym's converter passes on to vLLM (`gym_request`).

    Raises:
        HarnessError: a member has the wrong type, or is nested too deeply.
    """
    chat: dict[str, Any] = {}
    if choice.tools:
        chat["tools"] = choice.tools
    if choice.choice is not None:
        chat["tool_choice"] = choice.choice
    effort = shown["reasoning"].get("effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise HarnessError("'reasoning.effort' must be a string", param="reasoning.effort")
        chat["reasoning_effort"] = effort
    form = _response_format(shown["text"].get("format"))
    if form is not None:
        chat["response_format"] = form
    if gym and shown["text"].get("verbosity") is not None:
        chat["verbosity"] = shown["text"]["verbosity"]
    if continues:
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if member(fields, "stream", (bool,), False):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    names = ("model", *_RENAMED, *_SAME, *(("metadata",) if gym else ()))
    same = {_RENAMED.get(name, name): bytes(fields[name]) for name in names if name in fields}
    parts = {"messages": json_io.write(messages), **same, **{name: json_io.write(value) for name, value in chat.items()}}
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), raw) for name, raw in parts.items() if raw != b"null") + b"}"


def _response_format(form: Any) -> dict[str, Any] | None:
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "json_schema":
        if form.get("schema") is not None and not isinstance(form["schema"], dict):
            raise HarnessError("'text.format.schema' must be an object", param="text.format.schema")
        described = {name: form[name] for name in ("name", "description", "schema", "strict") if form.get(name) is not None}
        return {"type": "json_schema", "json_schema": described}
    raise HarnessError(f"'text.format' of type {kind!r} is not supported", param="text.format")


def _decoded(raw: bytes, path: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError) as why:
        raise HarnessError(f"'{path}' cannot be read: {why}", param=path) from None

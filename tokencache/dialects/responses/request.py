"""Responses: items → chat messages.

What one reply said comes back as several items (reasoning, message, calls). They become one chat message again; where
one reply ends and the next begins is told, in this order, by

- any item that is not the assistant's;
- our handles, where both sides have one (in an item's id, or in `encrypted_content`);
- the order: a message right behind a message, or reasoning behind anything but reasoning, begins a new one. vLLM 0.32
  parts them there too (`entrypoints/openai/responses/utils.py`), and no reply of ours holds the former.

Compared with that converter nothing is lost: of a message or a reasoning item it reads the first part alone, here all
parts are joined with nothing between (summaries, which are paragraphs, with newlines), and text behind a tool call
stays with its reply instead of becoming one of its own. `encrypted_content` that is not ours is ignored rather than
refused. Parts of the user's and the system's messages stay parts, and so do those of a tool's result.


Responses: the members of a request → those of the chat request, and those that the response shows again.

Mirrors vLLM 0.32's own Responses route (`entrypoints/openai/responses/protocol.py`) where the two APIs say the same in
other words; what vLLM adds to OpenAI's members passes as it came. Members that change nothing here (`truncation`,
`service_tier`, `prompt_cache_key`, `text.verbosity`, `reasoning.summary`, `include` beyond encrypted reasoning) are
accepted and shown again where a response shows them. Log probabilities of the text are not: chat has them by token, over
reasoning and calls too, and pieces of text do not end where tokens do.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from tokencache.dialects import json_io
from tokencache.dialects.gym import TAKEN, ReturnedIdFragments, take_all
from tokencache.dialects.json_io import Position, bracketed, entries_of, fields_of, member
from tokencache.dialects.responses.vocabulary import INLINE, Item, ToolSelection, flat_name, handle_of, own_id
from tokencache.dialects.thinking import CLOSED, UNCLOSED, Mark, folded, read_signature
from tokencache.errors import HarnessError

_TEXTS = dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), "text") | {"refusal": "refusal"}
_ROLES = frozenset({"user", "system", "developer", "assistant"})
_DETAILS = "low", "high"
_UNFINISHED = "in_progress", "incomplete"


def _mark_of(item: Mapping[str, Any], reply: Mapping[str, list[Any]]) -> Mark:
    """Where the thinking of a reasoning item stood. An id does not say whether the block was closed: something follows if it was."""
    handle, mark = read_signature(item.get("encrypted_content"))
    ours = None if handle else own_id(item)
    if ours is None or ours[1] != INLINE:
        return mark
    return CLOSED if reply["content"] or reply["tool_calls"] else UNCLOSED


class Talk:
    """The chat messages of a list of items: add them in order, then `close`.

    `messages` are chat messages, `handles` the places of those (the assistant's) that came back with a handle, `echoes` of those
    that came back with token ids; `merged` says that several items became one message.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.handles: dict[int, str] = {}
        self.echoes: dict[int, ReturnedIdFragments] = {}
        self.merged = False
        self._reply: dict[str, list[Any]] = {}  # the assistant's message under way
        self._handle = self._last = ""
        self._echo: ReturnedIdFragments | None = None
        self._thinking: dict[str, Any] = {}  # its last reasoning item

    def add(self, item: Any, at: Position, echo: ReturnedIdFragments | None = None) -> None:
        """Read one item; `at` says where it stood, `echo` are the token ids that came back with it.

        Raises:
            HarnessError: it is malformed, or of a type that is not supported.
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
            case "function_call":
                name = flat_name(_text(item, "name", at), _optional(item, "namespace", at))
                self._call(item, at, name, _text(item, "arguments", at))
            case "custom_tool_call":
                name = flat_name(_text(item, "name", at), _optional(item, "namespace", at))
                self._call(item, at, name, msgspec.json.encode({"input": _text(item, "input", at)}).decode())
            case "function_call_output" | "custom_tool_call_output":
                content = _content(item.get("output"), (at, "output"))
                self._say({"role": "tool", "tool_call_id": _text(item, "call_id", at), "content": content})
            case _:
                raise _wrong(at, f": items of type {kind!r} are not supported")
        if self._reply:  # the last item of a reply carries its ids
            self._echo = echo or self._echo

    def close(self) -> None:
        """End the assistant's message that is under way."""
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

    def _say(self, message: dict[str, Any]) -> None:
        self.close()
        self.messages.append(message)

    def _continue(self, item: dict[str, Any], kind: str) -> dict[str, list[Any]]:
        """The assistant's message that an item belongs to."""
        handle = handle_of(item)
        if self._reply and handle and self._handle:
            ended = handle != self._handle
        else:
            ended = kind == self._last == "message" or (kind == "reasoning" and self._last != "reasoning")
        if ended:
            self.close()
        self.merged = self.merged or bool(self._reply)
        if not self._reply:
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
            self._say({"role": role, "content": content})
            return
        if isinstance(content, list):
            texts = [part["text"] for part in content if part["type"] == "text"]
            if len(texts) < len(content):
                raise _wrong((at, "content"), ": an assistant's message can only have text")
            content = "".join(texts)
        self._continue(item, "message")["content"].append(content)

    def _call(self, item: dict[str, Any], at: Position, name: str, arguments: str) -> None:
        call = {"id": _text(item, "call_id", at), "type": "function", "function": {"name": name, "arguments": arguments}}
        self._continue(item, "call")["tool_calls"].append(call)


def continues(item: Any) -> bool:
    """Whether a last item asks for its own continuation: what vLLM 0.32 makes of an assistant's that is not complete."""
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
            raise _wrong(at, ": an image must have an 'image_url'; files are not kept here")
        return {"type": "image_url", "image_url": {"url": url, **({"detail": detail} if detail in _DETAILS else {})}}
    raise _wrong(at, f": content of type {kind!r} is not supported")


def _thought(item: dict[str, Any], at: Position) -> str:
    for name, between in (("content", ""), ("summary", "\n")):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise _wrong((at, name), " must be a list of parts")
        read = [_part(part, ((at, name), i)) for i, part in enumerate(parts)]
        text = between.join([part["text"] for part in read if part["type"] == "text"])
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
_MEMBERS = msgspec.json.Decoder(dict[str, Raw])
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
"""Members that the response shows again: their types and defaults (openai 3.52, `Response`)."""
_RENAMED = {"max_output_tokens": "max_completion_tokens"}
_SAME = (
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "user",
    # vLLM's own, in both of its requests
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "structured_outputs",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "cache_salt",
    "priority",
    "vllm_xargs",
    "kv_transfer_params",
)
_UNSUPPORTED = {
    "conversation": "conversations are not kept here; use 'previous_response_id', or send the items",
    "prompt": "prompt templates are not kept here; send 'instructions' and 'input'",
}


def members_of(body: bytes) -> dict[str, Raw]:
    """The members of a body, raw; one that no strict reader takes is written again first, for its items are kept as they are.

    Raises:
        HarnessError: it is no JSON object.
    """
    try:
        return _MEMBERS.decode(body)
    except (ValueError, RecursionError):
        return fields_of(json_io.write(json_io.read_body(body)))


def refuse_unsupported(fields: dict[str, Raw]) -> None:
    """Refuse what cannot be left out without serving something else than was asked for.

    Raises:
        HarnessError: the request has such a member.
    """
    for name, why in _UNSUPPORTED.items():
        if name in fields and bytes(fields[name]) != b"null":
            raise HarnessError(f"'{name}' is not supported: {why}", param=name)
    if member(fields, "background", (bool,), False):
        raise HarnessError("'background' is not supported: a response is made while its harness waits for it", param="background")


def members_shown(fields: dict[str, Raw]) -> dict[str, Any]:
    """Read the members that the response shows again.

    Raises:
        HarnessError: one of them has the wrong type.
    """
    return {name: member(fields, name, kinds, default) for name, (kinds, default) in _SHOWN.items()}


def items_of(fields: dict[str, Raw], *, needed: bool, kept: bool) -> tuple[list[Item], dict[int, ReturnedIdFragments]]:
    """Read `input`; a text is a message of the user's. Without any the list is empty, unless one is `needed`.

    `kept` is whether somebody keeps the items: their JSON is cut out one by one only then.

    Token ids that came back with an item are taken out of it: they are the second of what is returned, by its place.

    Raises:
        HarnessError: it is neither a text nor a list.
    """
    raw = fields.get("input", Raw(b"null"))
    if bytes(raw) == b"null" and not needed:
        return [], {}
    if bytes(raw)[:1] == b'"':
        message = {"type": "message", "role": "user", "content": member(fields, "input", (str,), "")}
        return [(json_io.write(message), message)], {}
    with contextlib.suppress(ValueError, RecursionError):  # what it is that cannot be read is found out below
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
    """Write the chat request. With `gym` it has the members that NeMo Gym's converter passes on to vLLM, too (`gym_request`).

    Raises:
        HarnessError: a member has the wrong type, or is nested too deeply.
    """
    told: dict[str, Any] = {}
    if choice.tools:
        told["tools"] = choice.tools
    if choice.choice is not None:
        told["tool_choice"] = choice.choice
    effort = shown["reasoning"].get("effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise HarnessError("'reasoning.effort' must be a string", param="reasoning.effort")
        told["reasoning_effort"] = effort
    form = _response_format(shown["text"].get("format"))
    if form is not None:
        told["response_format"] = form
    if gym and shown["text"].get("verbosity") is not None:
        told["verbosity"] = shown["text"]["verbosity"]
    if continues:
        told |= {"add_generation_prompt": False, "continue_final_message": True}
    if member(fields, "stream", (bool,), False):
        told |= {"stream": True, "stream_options": {"include_usage": True}}
    names = ("model", *_RENAMED, *_SAME, *(("metadata",) if gym else ()))
    same = {_RENAMED.get(name, name): bytes(fields[name]) for name in names if name in fields}
    parts = {"messages": json_io.write(messages), **same, **{name: json_io.write(value) for name, value in told.items()}}
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

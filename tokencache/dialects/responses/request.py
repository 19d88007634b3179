"""Responses: the members of a request → those of the chat request, and those that the response shows again.

Mirrors vLLM 0.32's own Responses route (`entrypoints/openai/responses/protocol.py`) where the two APIs say the same in
other words; what vLLM adds to OpenAI's members passes as it came. Members that change nothing here (`truncation`,
`service_tier`, `prompt_cache_key`, `text.verbosity`, `reasoning.summary`, `include` beyond encrypted reasoning) are
accepted and shown again where a response shows them. Log probabilities of the text are not: chat has them by token, over
reasoning and calls too, and pieces of text do not end where tokens do.
"""

import contextlib
from typing import Any

import msgspec

from tokencache.dialects import lenient
from tokencache.dialects.body import entries_of, fields_of, member
from tokencache.dialects.gym import TAKEN, ReturnedIdFragments, take_all
from tokencache.dialects.responses.items import Item
from tokencache.dialects.responses.tools import ToolSelection
from tokencache.errors import HarnessError

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
        return fields_of(lenient.write(lenient.read_body(body)))


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
        return [(lenient.write(message), message)], {}
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
    parts = {"messages": lenient.write(messages), **same, **{name: lenient.write(value) for name, value in told.items()}}
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

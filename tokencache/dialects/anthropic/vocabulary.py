"""Anthropic Messages: members of the type they must have.

Errors are worded as Anthropic's API words them, the place first: `messages.1.content.0.text: Input should be a valid string`.


Anthropic Messages: content blocks, and what chat's content parts can say of them.

Anthropic Messages: why a reply ended, and what it used.

Anthropic Messages: errors in Anthropic's vocabulary (`anthropic` 2.12 `types/shared/error_object.py`; platform.claude.com, "Errors").

What an engine says is passed on in its own words, with one exception: clients find out that a conversation has grown too
long, and compact it, by the words in which Anthropic's API says so.
"""

import re
from collections.abc import Iterator
from typing import Any

from tokencache.dialects import json_io
from tokencache.dialects.completion_reader import Usage
from tokencache.dialects.json_io import Position, dotted
from tokencache.errors import HarnessError

_SHOWN = 80
_TYPES: dict[type, str] = {str: "string", dict: "dictionary", list: "list", int: "integer", float: "number", bool: "boolean"}


def wrong(at: Position, why: str) -> HarnessError:
    """Make the error for a place in the body."""
    name = dotted(at)
    return HarnessError(f"{name}: {why}", param=name)


def shown(value: Any) -> str:
    """Write a harness's value into a message for it, at a readable length."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def read_object(body: bytes) -> dict[str, Any]:
    """Read a body.

    Raises:
        HarnessError: it is no JSON object, or nested too deeply.
    """
    found = json_io.read_body(body)
    if not isinstance(found, dict):
        raise HarnessError("the request body must be a JSON object")
    return found


def optional(fields: dict[str, Any], name: str, kind: type, at: Position = "") -> Any:
    """The value of a member; `None` if it is missing or null. An integer is a number, a boolean is neither.

    Raises:
        HarnessError: it is of another type.
    """
    value = fields.get(name)
    if value is None or (isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))):
        return value
    raise wrong((at, name), f"Input should be a valid {_TYPES[kind]}")


def required(fields: dict[str, Any], name: str, kind: type, at: Position = "") -> Any:
    """The value of a member that must be there.

    Raises:
        HarnessError: it is missing, null or of another type.
    """
    value = fields.get(name)
    if type(value) is kind:  # nearly always, and of every block
        return value
    value = optional(fields, name, kind, at)
    if value is None:
        raise wrong((at, name), "Field required")
    return value


UNPARSED = "__unparsed_arguments"
"""The member in which a whole answer of ours shows a call's arguments that are no JSON object, as one text.

Claude Code wraps such arguments, too, where a stream brought them, under a name of its own: that is a change of its own,
which the rule `unparsed-input` judges (`core.rules`).
"""


def listed(content: Any, at: Position) -> list[Any]:
    """The blocks of a content, unread; a string is a single one, null has none.

    Raises:
        HarnessError: it is none of these.
    """
    if isinstance(content, list):
        return content
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is None:
        return []
    raise wrong(at, "Input should be a valid string or list of content blocks")


def kind_of(block: Any, at: Position) -> str:
    """The type of a block.

    Raises:
        HarnessError: it is no block.
    """
    if not isinstance(block, dict):
        raise wrong(at, "Input should be a valid dictionary")
    kind: str = required(block, "type", str, at)
    return kind


def parts_of(block: dict[str, Any], at: Position) -> Iterator[dict[str, Any]]:
    """Say what a user shows (text, an image, a document that is text) in content parts.

    Raises:
        HarnessError: chat has no place for it.
    """
    kind = block["type"]
    if kind == "text":
        if text := required(block, "text", str, at):
            yield {"type": "text", "text": text}
    elif kind == "image":
        yield {"type": "image_url", "image_url": {"url": _image_url(block, at)}}
    elif kind == "document":
        source, at = required(block, "source", dict, at), (at, "source")
        if source.get("type") == "text":
            yield {"type": "text", "text": required(source, "data", str, at)}
        elif source.get("type") == "content":
            at = at, "content"
            for i, inner in enumerate(listed(source.get("content"), at)):
                if kind_of(inner, (at, i)) == "document":
                    raise unsupported(inner, (at, i))
                yield from parts_of(inner, (at, i))
        else:
            raise wrong((at, "type"), f"documents of type {shown(source.get('type'))} are not supported here; plain text is")
    else:
        raise unsupported(block, at)


def unsupported(block: dict[str, Any], at: Position) -> HarnessError:
    """Make the error for a block that has no place where it stands."""
    return wrong((at, "type"), f"content blocks of type {shown(block['type'])} are not supported here")


def wrapped(arguments: str) -> dict[str, str]:
    """Wrap arguments that are no JSON object, so that they can stand where an object must."""
    return {UNPARSED: arguments}


def unwrapped(given: Any) -> str | None:
    """Take such arguments out again; `None` if this is an input of its own."""
    raw = given.get(UNPARSED) if isinstance(given, dict) and len(given) == 1 else None
    return raw if isinstance(raw, str) else None


def _image_url(block: dict[str, Any], at: Position) -> str:
    source, at = required(block, "source", dict, at), (at, "source")
    if source.get("type") == "url":
        url: str = required(source, "url", str, at)
        return url
    if source.get("type") == "base64":
        return f"data:{required(source, 'media_type', str, at)};base64,{required(source, 'data', str, at)}"
    raise wrong((at, "type"), f"images of type {shown(source.get('type'))} are not supported here; 'base64' and 'url' are")


_FINISHED = {"length": "max_tokens", "content_filter": "refusal"}


def usage_of(usage: Usage) -> dict[str, int]:
    """Count as Anthropic does: what the cache gave or took is no part of `input_tokens`."""
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached - usage.cache_created),
        "cache_creation_input_tokens": usage.cache_created,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def ending(finish: str | None, stop: int | str | None, last: str | None) -> dict[str, Any]:
    """Say why it ended, as vLLM 0.32 says it; `last` are the arguments of the last call.

    A call that a stop string cut short must not run: then the stop string is the reason. An end without a word for it
    (`abort`, `error`) has none here either.
    """
    reason, sequence = _FINISHED.get(finish or ""), None
    if finish in {"stop", "tool_calls"}:
        if isinstance(stop, str) and (last is None or not is_json(last)):
            reason, sequence = "stop_sequence", stop
        else:
            reason = "tool_use" if last is not None or finish == "tool_calls" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}


def is_json(text: str) -> bool:
    """Whether a text is one whole JSON value."""
    try:
        json_io.read(text)
    except (ValueError, RecursionError):
        return False
    return True


_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_SERVERS_FAULT = 500
_TOO_LONG = (
    # vLLM 0.32 `renderers/params.py`; with the prompt's ids supplied, its engine says it in other words
    re.compile(r"context length is (?P<limit>\d+) tokens\. However, your prompt contains (?:at least )?(?P<tokens>\d+) input tokens"),
    re.compile(r"Input length \((?P<tokens>\d+)\) exceeds model's maximum context length \((?P<limit>\d+)\)"),
)


def error_members(status: int, message: str) -> dict[str, Any]:
    """What an error's body consists of, and its event in a stream; `status` is HTTP's."""
    kind = _ERROR_TYPES.get(status) or ("api_error" if status >= _SERVERS_FAULT else "invalid_request_error")
    found = next((found for pattern in _TOO_LONG if (found := pattern.search(message))), None)
    if found is not None:
        message = f"prompt is too long: {found['tokens']} tokens > {found['limit']} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}

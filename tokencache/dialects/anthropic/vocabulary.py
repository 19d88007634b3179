"""Members and content blocks of an Anthropic request; stop reasons, usage and errors of a reply.

Errors have the wording of Anthropic's API, with the position first: `messages.1.content.0.text: Input should be a valid string`.
Error types: `anthropic` 2.12 `types/shared/error_object.py`; platform.claude.com, "Errors".
"""

import re
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

from tokencache.core import strict_json
from tokencache.core.finish import FinishReason
from tokencache.dialects.chat.scalars import read_number, read_whole
from tokencache.dialects.completion_reader import Usage
from tokencache.dialects.json_io import Position, dotted
from tokencache.errors import HarnessError

_SHOWN = 80
_NUMBERS: dict[type, Callable[[Any], Any]] = {int: read_whole, float: read_number}
_TYPES: dict[type, str] = {str: "string", dict: "dictionary", list: "list", int: "integer", float: "number", bool: "boolean"}


def wrong(at: Position, why: str) -> HarnessError:
    """Make the error for a position in the body."""
    name = dotted(at)
    return HarnessError(f"{name}: {why}", param=name)


def shown(value: Any) -> str:
    """Write a client's value for an error message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def optional(fields: dict[str, Any], name: str, kind: type, at: Position = "") -> Any:
    """Return the value of a member, `None` if it is missing or null. Numbers are read as vLLM reads them (`chat.scalars`).

    Raises:
        HarnessError: it has another type.
    """
    value = fields.get(name)
    if value is None:
        return None
    meant = _NUMBERS[kind](value) if kind in _NUMBERS else value if isinstance(value, kind) else None
    if meant is None:
        raise wrong((at, name), f"Input should be a valid {_TYPES[kind]}")
    return meant


def required(fields: dict[str, Any], name: str, kind: type, at: Position = "") -> Any:
    """Return the value of a required member.

    Raises:
        HarnessError: it is missing, null or has another type.
    """
    value = fields.get(name)
    if type(value) is kind:  # the fast path, for every block of a long history
        return value
    value = optional(fields, name, kind, at)
    if value is None:
        raise wrong((at, name), "Field required")
    return value


UNPARSED = "__unparsed_arguments"
"""The member that holds a call's arguments as one string, if they are not a JSON object; in a stream, if they do not begin like one.

Claude Code itself wraps other broken arguments from a stream, under another name. The rule `unparsed-input` covers that (`core.rules`).
"""


def listed(content: Any, at: Position) -> list[Any]:
    """Return the blocks of a content; a string is one text block, null has none.

    Raises:
        HarnessError: the content is neither a list, a string nor null.
    """
    if isinstance(content, list):
        return content
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is None:
        return []
    raise wrong(at, "Input should be a valid string or list of content blocks")


def kind_of(block: Any, at: Position) -> str:
    """Return the type of a block.

    Raises:
        HarnessError: it is not a block.
    """
    if not isinstance(block, dict):
        raise wrong(at, "Input should be a valid dictionary")
    kind: str = required(block, "type", str, at)
    return kind


def parts_of(block: dict[str, Any], at: Position) -> Iterator[dict[str, Any]]:
    """Translate a user's block (text, image, plain text document) into content parts.

    Raises:
        HarnessError: chat has no equivalent.
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


def is_text_document(block: dict[str, Any]) -> bool:
    """Whether a block is a document that `parts_of` translates."""
    source = block.get("source") if block["type"] == "document" else None
    return isinstance(source, dict) and source.get("type") in ("text", "content")


TOOL_CHANGES = frozenset({"tool_addition", "tool_removal"})
"""Types of the blocks that add or remove a tool in the middle of a conversation (vLLM 0.32, `entrypoints/anthropic/protocol.py`)."""


def unsupported(block: dict[str, Any], at: Position) -> HarnessError:
    """Make the error for a block that is not supported in its position."""
    if block["type"] in TOOL_CHANGES:
        return wrong((at, "type"), f'{block["type"]} blocks are only allowed in messages with role "system"')
    return wrong((at, "type"), f"content blocks of type {shown(block['type'])} are not supported here")


def wrapped(arguments: str) -> dict[str, str]:
    """Wrap arguments that are not a JSON object, for a member that has to be an object."""
    return {UNPARSED: arguments}


def unwrapped(value: Any) -> str | None:
    """Return the arguments of an input that `wrapped` made; `None` for any other input."""
    raw = value.get(UNPARSED) if isinstance(value, dict) and len(value) == 1 else None
    return raw if isinstance(raw, str) else None


def _image_url(block: dict[str, Any], at: Position) -> str:
    source, at = required(block, "source", dict, at), (at, "source")
    if source.get("type") == "url":
        url: str = required(source, "url", str, at)
        return url
    if source.get("type") == "base64":
        return f"data:{required(source, 'media_type', str, at)};base64,{required(source, 'data', str, at)}"
    raise wrong((at, "type"), f"images of type {shown(source.get('type'))} are not supported here; 'base64' and 'url' are")


FINISHED: dict[str, str | None] = {
    FinishReason.STOP: "end_turn",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.FUNCTION_CALL: "tool_use",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.REPETITION: None,
    FinishReason.CONTENT_FILTER: "refusal",
    FinishReason.ABORT: None,
    FinishReason.ERROR: None,
}
"""Anthropic's stop reason for each finish reason, as in vLLM 0.32; `None` if its API has none."""


def usage_of(usage: Usage) -> dict[str, int]:
    """Count as Anthropic does: `input_tokens` excludes tokens that were read from or written to the cache."""
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached - usage.cache_created),
        "cache_creation_input_tokens": usage.cache_created,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def ending(finish: str | None, stop: int | str | None, last: str | None) -> dict[str, Any]:
    """Return the members with the stop reason, as vLLM 0.32 does; `last` are the arguments of the last call.

    A call that a stop string cut short must not run, so the stop string is then the reason.
    """
    reason, sequence = FINISHED.get(finish or ""), None
    if reason in {"end_turn", "tool_use"}:
        if isinstance(stop, str) and (last is None or not is_json(last)):
            reason, sequence = "stop_sequence", stop
        elif last is not None:
            reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": sequence}


def is_json(text: str) -> bool:
    """Whether a text is one whole JSON value."""
    try:
        strict_json.read(text)
    except (ValueError, RecursionError):
        return False
    return True


_ERROR_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.PAYMENT_REQUIRED: "billing_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    529: "overloaded_error",
}
_TOO_LONG = (
    # vLLM 0.32 `renderers/params.py`; if the prompt's ids are supplied, vLLM's error has another text
    re.compile(r"context length is (?P<limit>\d+) tokens\. However, your prompt contains (?:at least )?(?P<tokens>\d+) input tokens"),
    re.compile(r"Input length \((?P<tokens>\d+)\) exceeds model's maximum context length \((?P<limit>\d+)\)"),
)


def error_members(status: int, message: str) -> dict[str, Any]:
    """Return the members of an error's body, and of its event in a stream; `status` is HTTP's.

    The engine's message is passed on, with one exception: for a conversation that is too long the message is that of Anthropic's API,
    by which clients recognize that they must compact the conversation.
    """
    kind = _ERROR_TYPES.get(status) or ("api_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error")
    found = next((found for pattern in _TOO_LONG if (found := pattern.search(message))), None)
    if found is not None:
        message = f"prompt is too long: {found['tokens']} tokens > {found['limit']} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}

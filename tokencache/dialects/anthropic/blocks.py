"""Anthropic Messages: content blocks, and what chat's content parts can say of them."""

from collections.abc import Iterator
from typing import Any

from tokencache.dialects.anthropic.members import required, shown, wrong
from tokencache.dialects.places import Place
from tokencache.errors import HarnessError

UNPARSED = "__unparsed_arguments"
"""The member in which a whole answer of ours shows a call's arguments that are no JSON object, as one text.

Claude Code wraps such arguments, too, where a stream brought them, under a name of its own: that is a change of its own,
which the rule `unparsed-input` judges (`core.rules`).
"""


def listed(content: Any, at: Place) -> list[Any]:
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


def kind_of(block: Any, at: Place) -> str:
    """The type of a block.

    Raises:
        HarnessError: it is no block.
    """
    if not isinstance(block, dict):
        raise wrong(at, "Input should be a valid dictionary")
    kind: str = required(block, "type", str, at)
    return kind


def parts_of(block: dict[str, Any], at: Place) -> Iterator[dict[str, Any]]:
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


def unsupported(block: dict[str, Any], at: Place) -> HarnessError:
    """Make the error for a block that has no place where it stands."""
    return wrong((at, "type"), f"content blocks of type {shown(block['type'])} are not supported here")


def wrapped(arguments: str) -> dict[str, str]:
    """Wrap arguments that are no JSON object, so that they can stand where an object must."""
    return {UNPARSED: arguments}


def unwrapped(given: Any) -> str | None:
    """Take such arguments out again; `None` if this is an input of its own."""
    raw = given.get(UNPARSED) if isinstance(given, dict) and len(given) == 1 else None
    return raw if isinstance(raw, str) else None


def _image_url(block: dict[str, Any], at: Place) -> str:
    source, at = required(block, "source", dict, at), (at, "source")
    if source.get("type") == "url":
        url: str = required(source, "url", str, at)
        return url
    if source.get("type") == "base64":
        return f"data:{required(source, 'media_type', str, at)};base64,{required(source, 'data', str, at)}"
    raise wrong((at, "type"), f"images of type {shown(source.get('type'))} are not supported here; 'base64' and 'url' are")

"""Anthropic Messages: content blocks, and what chat's content parts can say of them."""

from collections.abc import Iterator
from typing import Any

import msgspec

from tokencache.dialects.messages.members import required, shown, wrong
from tokencache.errors import HarnessError

UNPARSED = "__unparsed_arguments"
"""The member in which a whole answer of ours shows a call's arguments that are no JSON object, as one text.

Claude Code wraps such arguments, too, where a stream brought them, under a name of its own: that is a change of its own,
which the rule `unparsed-input` judges (`core.rules`).
"""


class Block(msgspec.Struct, frozen=True):
    """A content block: its place in the body, its type, its members."""

    at: str
    kind: str
    fields: dict[str, Any]

    @property
    def text(self) -> str:
        """The text of a text block.

        Raises:
            HarnessError: it has none, or is another kind of block.
        """
        if self.kind != "text":
            raise unsupported(self)
        text: str = required(self.fields, "text", str, self.at)
        return text


def blocks_of(at: str, content: Any) -> Iterator[Block]:
    """The blocks of a content; a string is a single one, null has none.

    Raises:
        HarnessError: something in it is no block.
    """
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    elif not isinstance(content, list | None):
        raise wrong(at, "Input should be a valid string or list of content blocks")
    for i, block in enumerate(content or ()):
        place = f"{at}.{i}"
        if not isinstance(block, dict):
            raise wrong(place, "Input should be a valid dictionary")
        yield Block(place, required(block, "type", str, place), block)


def parts_of(block: Block) -> Iterator[dict[str, Any]]:
    """Say what a user shows (text, an image, a document that is text) in content parts.

    Raises:
        HarnessError: chat has no place for it.
    """
    if block.kind == "text":
        if block.text:
            yield {"type": "text", "text": block.text}
    elif block.kind == "image":
        yield {"type": "image_url", "image_url": {"url": _image_url(block)}}
    elif block.kind == "document":
        at, source = f"{block.at}.source", required(block.fields, "source", dict, block.at)
        if source.get("type") == "text":
            yield {"type": "text", "text": required(source, "data", str, at)}
        elif source.get("type") == "content":
            for inner in blocks_of(f"{at}.content", source.get("content")):
                if inner.kind == "document":
                    raise unsupported(inner)
                yield from parts_of(inner)
        else:
            raise wrong(f"{at}.type", f"documents of type {shown(source.get('type'))} are not supported here; plain text is")
    else:
        raise unsupported(block)


def unsupported(block: Block) -> HarnessError:
    """Make the error for a block that has no place where it stands."""
    return wrong(f"{block.at}.type", f"content blocks of type {shown(block.kind)} are not supported here")


def wrapped(arguments: str) -> dict[str, str]:
    """Wrap arguments that are no JSON object, so that they can stand where an object must."""
    return {UNPARSED: arguments}


def unwrapped(given: Any) -> str | None:
    """Take such arguments out again; `None` if this is an input of its own."""
    raw = given.get(UNPARSED) if isinstance(given, dict) and len(given) == 1 else None
    return raw if isinstance(raw, str) else None


def _image_url(block: Block) -> str:
    at, source = f"{block.at}.source", required(block.fields, "source", dict, block.at)
    if source.get("type") == "url":
        url: str = required(source, "url", str, at)
        return url
    if source.get("type") == "base64":
        return f"data:{required(source, 'media_type', str, at)};base64,{required(source, 'data', str, at)}"
    raise wrong(f"{at}.type", f"images of type {shown(source.get('type'))} are not supported here; 'base64' and 'url' are")

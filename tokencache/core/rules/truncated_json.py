"""Completes truncated JSON as some harnesses do, which run a tool call although its arguments were cut off.

If a reply reaches its token limit inside a call, the arguments look like `{"command": "ls -1 && echo cu`. A harness can complete them in
only one way: it drops an incomplete end (a key without a value, half an escape, half a number or word), and closes open strings, lists and
objects. It adds nothing.

The text is scanned once, and only a few ends are tried (`_ends`), so the work is linear in its length.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

_MARK = re.compile(r'"(?:[^"\\]++|\\.)*+("?)|[\[\]{}]', re.DOTALL)
"""A string, whose group is empty if it has no end, or a bracket."""
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?|true|false|null|NaN|-?Infinity")
"""The longest number or word of JSON."""
_MAX_DROPPED = 256
"""Dropped ends are shorter than this, in characters."""


class NotTruncatedJsonError(ValueError):
    """The text is not the beginning of a JSON object, or it is a complete object."""


def complete_json(text: str) -> dict[str, Any]:
    """Parse the beginning of a JSON object: drop its incomplete end and close the rest.

    Raises:
        NotTruncatedJsonError: the text is not such a beginning.
    """
    text = text.rstrip()
    brackets: list[str] = []
    last: re.Match[str] | None = None
    for mark in _MARK.finditer(text) if text.lstrip().startswith("{") else ():
        if mark[0][0] == '"':
            last = mark
        elif mark[0] in "[{":
            brackets.append("]" if mark[0] == "[" else "}")
        elif not brackets or brackets.pop() != mark[0]:
            raise NotTruncatedJsonError(text[:20])
    closing = "".join(reversed(brackets))
    for end, quote in _ends(text, last):
        if end <= len(text) - _MAX_DROPPED or not closing:
            break
        try:
            value = json.loads(text[:end] + quote + closing)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    raise NotTruncatedJsonError(text[:20])


def _ends(text: str, last: re.Match[str] | None) -> Iterator[tuple[int, str]]:
    """Yield the ends to which a text may be cut, the last one first, with the quote that closes an open string; `last` is the last string.

    It drops an incomplete escape at the end, or a trailing comma, key, and incomplete number or word; each of these is optional.
    """
    at = len(text)
    if last is not None and not last[1]:
        yield at, '"'
        yield from ((end, '"') for end in range(at - 1, max(at - 6, last.start()), -1) if _HALF_ESCAPE.fullmatch(text, end))
        at = last.start()
    else:
        at = _skip(text, at, lambda char: char.isalnum() or char in "-+._")
        if scalar := _SCALAR.match(text, at):
            yield scalar.end(), ""
        yield at, ""
        at = _skip(text, at, str.isspace)
        colon = text.endswith(":", 0, at)
        key = _skip(text, at - colon, str.isspace)
        if last is not None and last.end() == key:
            yield at, ""
            at = last.start()
    yield at, ""
    at = _skip(text, at, str.isspace)
    yield at, ""
    if text.endswith(",", 0, at):
        yield at - 1, ""


def _skip(text: str, end: int, accepts: Callable[[str], bool]) -> int:
    """Return where the characters before `end` that are accepted begin."""
    while end and accepts(text[end - 1]):
        end -= 1
    return end

"""Completes truncated JSON as some harnesses do, which run a tool call although its arguments were cut off.

If a reply reaches its token limit inside a call, the arguments look like `{"command": "ls -1 && echo cu`. A harness can complete them in
only one way: it drops an incomplete end (a key without a value, half an escape, half a number or word), and closes open strings, lists and
objects. It adds nothing.
"""

import json
import re
from typing import Any

_HALF_ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?")
"""An end that may be dropped inside a string."""
_HALF_MEMBER = re.compile(r""",?\s*(?:"(?:[^"\\]|\\.)*+(?:\\|"\s*:?\s*)?)?(?:[-+.\w]*)?""", re.DOTALL)
"""An end that may be dropped outside a string: a comma, a key, a part of a number or word."""
_MAX_DROPPED = 256
"""Maximum length of an incomplete end, in characters."""


class NotTruncatedJsonError(ValueError):
    """The text is not the beginning of a JSON object, or it is a complete object."""


def complete_json(text: str) -> dict[str, Any]:
    """Parse the beginning of a JSON object: drop its incomplete end and close the rest.

    Raises:
        NotTruncatedJsonError: the text is not such a beginning.
    """
    text = text.rstrip()
    if not text.lstrip().startswith("{"):
        raise NotTruncatedJsonError(text[:20])
    for end in range(len(text), max(0, len(text) - _MAX_DROPPED), -1):
        closing = _closing(text[:end])
        half = _HALF_ESCAPE if closing[:1] == '"' else _HALF_MEMBER
        if not closing or (end < len(text) and not half.fullmatch(text, end)):
            continue
        try:
            value = json.loads(text[:end] + closing)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    raise NotTruncatedJsonError(text[:20])


def _closing(text: str) -> str:
    """Return the quotes, brackets and braces that close everything open at the end of a text; `""` if nothing is open."""
    stack: list[str] = []
    quoted = False
    at = 0
    while at < len(text):
        char = text[at]
        if quoted:
            at += char == "\\"
            quoted = char != '"'
        elif char == '"':
            quoted = True
        elif char in "[{":
            stack.append("]" if char == "[" else "}")
        elif char in "]}" and (not stack or stack.pop() != char):
            return ""
        at += 1
    return ('"' if quoted else "") + "".join(reversed(stack))

"""Completes truncated JSON as harnesses do that run a call whose arguments were cut off.

A reply that ran into its token limit inside a call leaves arguments like `{"command": "ls -1 && echo cu`. The value that a harness may
have made of that is unique: an incomplete end is dropped (a key without a value, half an escape, half a number or word), and what is open
is closed. Nothing is added.
"""

import json
import re
from typing import Any

_HALF_ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?")
"""What may be dropped inside a string."""
_HALF_MEMBER = re.compile(r""",?\s*(?:"(?:[^"\\]|\\.)*+(?:\\|"\s*:?\s*)?)?(?:[-+.\w]*)?""", re.DOTALL)
"""What may be dropped outside a string: a comma, a key, a part of a number or word."""
_MAX_DROPPED = 256
"""Characters of an incomplete end that are tried at most."""


class NotTruncatedJsonError(ValueError):
    """A text is not the beginning of a JSON object, or it is a complete one."""


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
    """The quotes, brackets and braces that close all that is open at the end of a text; `""` if nothing is open."""
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

"""Repair: what a truncated JSON text says, as far as it says anything.

A reply that ran into its token limit in the middle of a call leaves arguments like `{"command": "ls -1 && echo cu`.
Some harnesses end them themselves and run the call. What they may have made of it is one value: an incomplete end is
dropped (a key without its value, half an escape, half a number or word), and what is open is closed. Nothing is added.
"""

import json
import re
from typing import Any

_HALF_ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?")
_HALF_MEMBER = re.compile(r""",?\s*(?:"(?:[^"\\]|\\.)*+(?:\\|"\s*:?\s*)?)?(?:[-+.\w]*)?""", re.DOTALL)
"""What may be dropped within a string, and outside of one: a comma, a key, a part of a number or word."""
_MOST = 256
"""An incomplete end is a few characters; one that would be longer than this is not looked for."""


class NotTruncatedJsonError(ValueError):
    """A text is not the beginning of a JSON object, or it is a whole one."""


def complete_json(text: str) -> dict[str, Any]:
    """Read the beginning of a JSON object as the object that it becomes when its end is dropped and the rest closed.

    Raises:
        NothingSaidError: it is no such beginning.
    """
    text = text.rstrip()
    if not text.lstrip().startswith("{"):
        raise NotTruncatedJsonError(text[:20])
    for end in range(len(text), max(0, len(text) - _MOST), -1):
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
    """What ends all that is open at the end of a text: quotes, brackets, braces; nothing if nothing is."""
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

"""Reads JSON that every reader accepts, and replaces lone surrogates, which UTF-8 cannot encode."""

import json
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import msgspec

replace_surrogates: Callable[[str], str] = partial(re.compile("[\ud800-\udfff]").sub, "\ufffd")
"""Replaces lone surrogates in a text with U+FFFD. Not a function of its own: each text of a conversation passes through it."""


def read(text: str | bytes) -> Any:
    """Read JSON.

    Raises:
        ValueError: the text is not JSON, or has NaN or an infinite number.
        RecursionError: it is nested too deeply.
    """
    try:
        return msgspec.json.decode(text)
    except ValueError:
        found = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        written = json.dumps(found, ensure_ascii=False)
        replaced = replace_surrogates(written)
        return json.loads(replaced) if replaced != written else found


def read_object(arguments: str) -> dict[str, Any] | None:
    """Read the arguments of a call; empty ones are an empty object. `None` if they are not a JSON object."""
    try:
        found = read(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"the number {text[:80]} is out of range")
    return number

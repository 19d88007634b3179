"""Anthropic Messages: JSON in and out, and members of the type they must have.

Errors are worded as Anthropic's API words them, the place first: `messages.1.content.0.text: Input should be a valid string`.
"""

import json
import math
from typing import Any, NoReturn

import msgspec

from tokencache.errors import HarnessError

_SHOWN = 80
_TYPES: dict[type, str] = {str: "string", dict: "dictionary", list: "list", int: "integer", float: "number", bool: "boolean"}


def wrong(at: str, why: str) -> HarnessError:
    """Make the error for a place in the body."""
    return HarnessError(f"{at}: {why}", param=at)


def shown(value: Any) -> str:
    """Write a harness's value into a message for it, at a readable length."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def read_object(body: bytes) -> dict[str, Any]:
    """Read a body.

    Raises:
        HarnessError: it is no JSON object, or nested too deeply.
    """
    try:
        found = read_json(body)
    except (ValueError, RecursionError) as why:
        raise HarnessError(f"the request body is not valid JSON: {why}") from None
    if not isinstance(found, dict):
        raise HarnessError("the request body must be a JSON object")
    return found


def read_json(text: str | bytes) -> Any:
    """Read strict JSON, or JSON with the lone surrogates that models and Python harnesses write.

    Raises:
        ValueError: it is neither.
        RecursionError: it is nested too deeply.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"the number {text[:_SHOWN]} is out of range")
    return number


def written(value: Any) -> bytes:
    """Write a value compactly; what strict JSON cannot hold (a lone surrogate) is escaped as Python does.

    Raises:
        HarnessError: it is nested too deeply.
    """
    try:
        try:
            return msgspec.json.encode(value)
        except UnicodeEncodeError:
            return json.dumps(value, separators=(",", ":")).encode()
    except RecursionError:
        raise HarnessError("the request body is nested too deeply") from None


def optional(fields: dict[str, Any], name: str, kind: type, at: str = "") -> Any:
    """The value of a member; `None` if it is missing or null. An integer is a number, a boolean is neither.

    Raises:
        HarnessError: it is of another type.
    """
    value = fields.get(name)
    if value is None or (isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))):
        return value
    raise wrong(f"{at}.{name}" if at else name, f"Input should be a valid {_TYPES[kind]}")


def required(fields: dict[str, Any], name: str, kind: type, at: str = "") -> Any:
    """The value of a member that must be there.

    Raises:
        HarnessError: it is missing, null or of another type.
    """
    value = fields.get(name)
    if type(value) is kind:  # nearly always, and of every block
        return value
    value = optional(fields, name, kind, at)
    if value is None:
        raise wrong(f"{at}.{name}" if at else name, "Field required")
    return value

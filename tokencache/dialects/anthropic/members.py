"""Anthropic Messages: members of the type they must have.

Errors are worded as Anthropic's API words them, the place first: `messages.1.content.0.text: Input should be a valid string`.
"""

from typing import Any

from tokencache.dialects import lenient
from tokencache.dialects.places import Place, dotted
from tokencache.errors import HarnessError

_SHOWN = 80
_TYPES: dict[type, str] = {str: "string", dict: "dictionary", list: "list", int: "integer", float: "number", bool: "boolean"}


def wrong(at: Place, why: str) -> HarnessError:
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
    found = lenient.read_body(body)
    if not isinstance(found, dict):
        raise HarnessError("the request body must be a JSON object")
    return found


def optional(fields: dict[str, Any], name: str, kind: type, at: Place = "") -> Any:
    """The value of a member; `None` if it is missing or null. An integer is a number, a boolean is neither.

    Raises:
        HarnessError: it is of another type.
    """
    value = fields.get(name)
    if value is None or (isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))):
        return value
    raise wrong((at, name), f"Input should be a valid {_TYPES[kind]}")


def required(fields: dict[str, Any], name: str, kind: type, at: Place = "") -> Any:
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

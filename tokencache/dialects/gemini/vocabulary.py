"""Reads objects of a Gemini request; writes finish reasons, usage and errors.

Requests are protocol buffers in JSON. By their JSON mapping each member may be spelled in camelCase or snake_case (Google's clients write
camelCase, other programs both), numbers may be strings, and `null` is a missing member. `RequestObject` reads one object by these
rules and names its position in errors.
"""

import re
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import msgspec

from tokencache.core.finish import FinishReason
from tokencache.core.strict_json import read_object
from tokencache.dialects import json_io
from tokencache.dialects.completion_reader import Usage
from tokencache.dialects.json_io import Position, bracketed
from tokencache.errors import HarnessError

_DECIMAL = re.compile(r"-?\d{1,18}(\.\d{1,18})?", re.ASCII)
_HUMP = re.compile(r"(?<=[a-z0-9])([A-Z])")


class RequestObject:
    """An object of a request, and its position.

    Raises:
        HarnessError: raised by every method that returns a typed value, if the member has another type.
    """

    __slots__ = ("members", "position")

    def __init__(self, members: dict[str, Any], position: Position) -> None:
        self.members = members
        self.position = position

    @property
    def path(self) -> str:
        """The text of its position."""
        return bracketed(self.position)

    def named(self) -> list[str]:
        """The names of the members that have a value, as written."""
        return [name for name, value in self.members.items() if value is not None]

    def at(self, name: str) -> str:
        """The text of a member's position."""
        return bracketed((self.position, name))

    def get(self, name: str) -> Any:
        """The value of a member, by its camelCase name; `None` if it is missing."""
        value = self.members.get(name)
        return value if value is not None else self.members.get(snake(name))

    def text(self, name: str) -> str | None:
        """The string of a member."""
        value = self.members.get(name)
        if type(value) is str:  # the fast path, for every part of a long history
            return value
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong(self.at(name), "a string", value)
        return value

    def flag(self, name: str) -> bool:
        """A boolean; false if it is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(self.at(name), "true or false", value)
        return bool(value)

    def number(self, name: str) -> float | None:
        """A number, which may be written as `"0.5"`."""
        value = self.get(name)
        if isinstance(value, str) and _DECIMAL.fullmatch(value):
            return float(value)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise wrong(self.at(name), "a number", value)
        return value

    def integer(self, name: str) -> int | None:
        """A whole number, which may be written as `64.0` or `"64"`.

        Raises:
            HarnessError: it is not a whole number.
        """
        value = self.get(name)
        return None if value is None else whole_number(value, self.at(name))

    def inner(self, name: str) -> "RequestObject | None":
        """An object."""
        value = self.members.get(name)
        if type(value) is dict:  # the fast path, for every part of a long history
            return RequestObject(value, (self.position, name))
        value = self.get(name)
        return None if value is None else entry(value, (self.position, name))

    def values(self, name: str) -> list[Any]:
        """A list; empty if it is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise wrong(self.at(name), "a list", value)
        return value or []

    def objects(self, name: str) -> "list[RequestObject]":
        """A list of objects; Google's API reads a single object as a list of one, and its own examples have them."""
        position, only = (self.position, name), self.get(name)
        if isinstance(only, dict):
            return [RequestObject(only, position)]
        return [
            RequestObject(item, (position, i)) if type(item) is dict else entry(item, (position, i))
            for i, item in enumerate(self.values(name))
        ]

    def texts(self, name: str) -> list[str]:
        """A list of strings."""
        found = self.values(name)
        for i, item in enumerate(found):
            if not isinstance(item, str):
                raise wrong(f"{self.at(name)}[{i}]", "a string", item)
        return found


def entry(value: Any, position: Position) -> RequestObject:
    """Read a value as an object.

    Raises:
        HarnessError: it is not an object.
    """
    if not isinstance(value, dict):
        raise wrong(bracketed(position), "an object", value)
    return RequestObject(value, position)


def whole_number(value: Any, path: str) -> int:
    """Read a value as a whole number; 64-bit integers may be strings in this dialect.

    Raises:
        HarnessError: it is not a whole number.
    """
    try:
        number = int(value)
    except (ValueError, TypeError, OverflowError):
        raise wrong(path, "a whole number", value) from None
    if isinstance(value, bool) or (isinstance(value, float) and number != value):
        raise wrong(path, "a whole number", value)
    return number


def wrong(path: str, wanted: str, value: Any) -> HarnessError:
    """Make the error for a value of the wrong type."""
    return HarnessError(f"{path} must be {wanted}, not {type(value).__name__}", param=path)


@lru_cache(maxsize=1024)  # a long history has the same few names thousands of times
def snake(name: str) -> str:
    """Spell a camelCase name in snake_case."""
    return _HUMP.sub(lambda hump: "_" + hump[1].lower(), name)


Raw = msgspec.Raw
FINISHED: dict[str, str] = {
    FinishReason.STOP: "STOP",
    FinishReason.TOOL_CALLS: "STOP",
    FinishReason.FUNCTION_CALL: "STOP",
    FinishReason.LENGTH: "MAX_TOKENS",
    FinishReason.REPETITION: "OTHER",
    FinishReason.CONTENT_FILTER: "SAFETY",
    FinishReason.ABORT: "OTHER",
    FinishReason.ERROR: "OTHER",
}
"""Gemini's reason for each finish reason (google-genai, `types.FinishReason`)."""
_STATUSES = {
    HTTPStatus.BAD_REQUEST: "INVALID_ARGUMENT",
    HTTPStatus.UNAUTHORIZED: "UNAUTHENTICATED",
    HTTPStatus.FORBIDDEN: "PERMISSION_DENIED",
    HTTPStatus.NOT_FOUND: "NOT_FOUND",
    HTTPStatus.CONFLICT: "ABORTED",
    HTTPStatus.TOO_MANY_REQUESTS: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    HTTPStatus.NOT_IMPLEMENTED: "UNIMPLEMENTED",
    HTTPStatus.BAD_GATEWAY: "UNAVAILABLE",
    HTTPStatus.SERVICE_UNAVAILABLE: "UNAVAILABLE",
    HTTPStatus.GATEWAY_TIMEOUT: "DEADLINE_EXCEEDED",
}
"""google.rpc.Code by HTTP status (googleapis, `google/rpc/code.proto`)."""


def finish_reason_of(reason: str | None) -> str:
    """Return Gemini's reason for the end of a reply; `OTHER` if it has none."""
    return FINISHED.get(reason or "", "OTHER")


def error_of(status: int, message: str) -> dict[str, Any]:
    """Write an error as google.rpc.Status in its JSON form."""
    name = _STATUSES.get(status) or ("INTERNAL" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "INVALID_ARGUMENT")
    return {"error": {"code": status, "message": message, "status": name}}


def object_of(arguments: str) -> Raw | dict[str, Any] | None:
    """Return arguments as a member: their own text on one line if it is a JSON object, else `None`."""
    found = read_object(arguments)
    if not found:
        return found
    try:
        return Raw(msgspec.json.format(arguments, indent=-1).encode())
    except (ValueError, RecursionError):
        return Raw(json_io.write(found))


def usage_of(usage: Usage | None) -> dict[str, Any]:
    """Return `usageMetadata` in tokens; `candidatesTokenCount` excludes thoughts (google-genai 3.4, `candidates_token_count`)."""
    if usage is None:
        return {}
    counts = {"promptTokenCount": usage.prompt_tokens, "candidatesTokenCount": usage.completion - usage.reasoning}
    if usage.reasoning:
        counts["thoughtsTokenCount"] = usage.reasoning
    if usage.cached:
        counts["cachedContentTokenCount"] = usage.cached
    return counts | {"totalTokenCount": usage.prompt_tokens + usage.completion}

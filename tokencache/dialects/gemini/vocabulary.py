"""Gemini's objects: protocol buffers in JSON's clothes.

Every member may be spelt in camelCase or in snake_case (the JSON mapping of protocol buffers says so; Google's own clients
write camelCase, hand-written ones both), 64-bit integers may come as text, and `null` stands for a missing member. An
`Entry` reads one object that way and says in its errors where in the request it stood.


Chat's words in Gemini's: why a reply ended, what it used, what went wrong, and arguments as an object.
"""

import re
from functools import lru_cache
from typing import Any

import msgspec

from tokencache.dialects import json_io
from tokencache.dialects.completion_reader import Usage
from tokencache.dialects.json_io import Position, bracketed
from tokencache.errors import HarnessError

_HUMP = re.compile(r"(?<=[a-z0-9])([A-Z])")


class RequestObject:
    """An object of a request, and the place at which it stands."""

    __slots__ = ("members", "place")

    def __init__(self, members: dict[str, Any], place: Position) -> None:
        self.members = members
        self.place = place

    @property
    def path(self) -> str:
        """The name of its place."""
        return bracketed(self.place)

    def named(self) -> list[str]:
        """The names of the members that have a value, as they were written."""
        return [name for name, value in self.members.items() if value is not None]

    def at(self, name: str) -> str:
        """The path of a member."""
        return bracketed((self.place, name))

    def get(self, name: str) -> Any:
        """The value of a member, by its camelCase name; `None` if it is not there."""
        value = self.members.get(name)
        return value if value is not None else self.members.get(snake(name))

    def text(self, name: str) -> str | None:
        """The text of a member.

        Raises:
            HarnessError: it is no text.
        """
        value = self.members.get(name)
        if type(value) is str:  # nearly always, and of every part
            return value
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong(self.at(name), "a string", value)
        return value

    def flag(self, name: str) -> bool:
        """A member that is true or false, the latter if it is not there.

        Raises:
            HarnessError: it is neither.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(self.at(name), "true or false", value)
        return bool(value)

    def number(self, name: str) -> float | None:
        """A number.

        Raises:
            HarnessError: it is none.
        """
        value = self.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise wrong(self.at(name), "a number", value)
        return value

    def integer(self, name: str) -> int | None:
        """A whole number; `64.0` and `"64"` are ones, too.

        Raises:
            HarnessError: it is none.
        """
        value = self.get(name)
        return None if value is None else whole_number(value, self.at(name))

    def inner(self, name: str) -> "RequestObject | None":
        """An object.

        Raises:
            HarnessError: it is none.
        """
        value = self.members.get(name)
        if type(value) is dict:  # nearly always, and of every part
            return RequestObject(value, (self.place, name))
        value = self.get(name)
        return None if value is None else entry(value, (self.place, name))

    def values(self, name: str) -> list[Any]:
        """A list, empty if it is not there.

        Raises:
            HarnessError: it is none.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise wrong(self.at(name), "a list", value)
        return value or []

    def objects(self, name: str) -> "list[RequestObject]":
        """A list of objects.

        Raises:
            HarnessError: it is none.
        """
        place = self.place, name
        return [
            RequestObject(item, (place, i)) if type(item) is dict else entry(item, (place, i)) for i, item in enumerate(self.values(name))
        ]

    def texts(self, name: str) -> list[str]:
        """A list of texts.

        Raises:
            HarnessError: it is none.
        """
        found = self.values(name)
        for i, item in enumerate(found):
            if not isinstance(item, str):
                raise wrong(f"{self.at(name)}[{i}]", "a string", item)
        return found


def entry(value: Any, place: Position) -> RequestObject:
    """Take a value for an object.

    Raises:
        HarnessError: it is none.
    """
    if not isinstance(value, dict):
        raise wrong(bracketed(place) or "the request body", "an object", value)
    return RequestObject(value, place)


def whole_number(value: Any, path: str) -> int:
    """Take a value for a whole number; 64-bit integers come as text in this dialect.

    Raises:
        HarnessError: it is none.
    """
    try:
        number = int(value)
    except (ValueError, TypeError, OverflowError):
        raise wrong(path, "a whole number", value) from None
    if isinstance(value, bool) or (isinstance(value, float) and number != value):
        raise wrong(path, "a whole number", value)
    return number


def wrong(path: str, wanted: str, value: Any) -> HarnessError:
    """An error for a value of a wrong type."""
    return HarnessError(f"{path} must be {wanted}, not {type(value).__name__}", param=path)


@lru_cache(maxsize=1024)  # the same few names, thousands of times in a long history
def snake(name: str) -> str:
    """Spell a camelCase name in snake_case."""
    return _HUMP.sub(lambda hump: "_" + hump[1].lower(), name)


Raw = msgspec.Raw
_REASONS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""google.rpc.Code by HTTP status (googleapis, `google/rpc/code.proto`)."""
_SERVERS_FAULT = 500


def finish_reason_of(reason: str | None) -> str:
    """Say why a reply ended; what Gemini has no word for is `OTHER`."""
    return _REASONS.get(reason or "", "OTHER")


def error_of(status: int, message: str) -> dict[str, Any]:
    """Say an error in Gemini's words (google.rpc.Status in its JSON form)."""
    name = _STATUSES.get(status) or ("INTERNAL" if status >= _SERVERS_FAULT else "INVALID_ARGUMENT")
    return {"error": {"code": status, "message": message, "status": name}}


def object_of(arguments: str) -> Raw | dict[str, Any] | None:
    """Arguments as a member: their own text on one line where it is JSON of an object; `None` if they are none."""
    if not arguments.strip():
        return {}
    try:
        found = json_io.read(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    try:
        return Raw(msgspec.json.format(arguments, indent=-1).encode())
    except (ValueError, RecursionError):
        return Raw(json_io.write(found))


def usage_of(usage: Usage | None) -> dict[str, Any]:
    """`usageMetadata`, in tokens: thoughts are not among the candidates' (google-genai 3.4, `candidates_token_count`)."""
    if usage is None:
        return {}
    said = {"promptTokenCount": usage.prompt_tokens, "candidatesTokenCount": usage.completion - usage.reasoning}
    if usage.reasoning:
        said["thoughtsTokenCount"] = usage.reasoning
    if usage.cached:
        said["cachedContentTokenCount"] = usage.cached
    return said | {"totalTokenCount": usage.prompt_tokens + usage.completion}

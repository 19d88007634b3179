"""Responses: events, numbered as they are written.

An item that grows tells of each piece with the same event, hundreds of times, in which the number and the piece alone differ: all
else of it is written once (`Delta`).
"""

from typing import Any

import msgspec

from tokencache.dialects.sse import event_of

_ENCODER = msgspec.json.Encoder()
_NUMBER, _EMPTY = b'"sequence_number":', b'""'


class Delta:
    """An event of this kind (without `response.`) with these members, of which `delta` is the only empty text."""

    def __init__(self, kind: str, **members: Any) -> None:
        head, rest = _written(kind, 0, members).split(_NUMBER + b"0")
        self._head = head + _NUMBER
        self._between, self._tail = rest.split(_EMPTY)

    def event(self, number: int, piece: str) -> bytes:
        """Write it with its number and its piece."""
        return b"".join((self._head, b"%d" % number, self._between, _ENCODER.encode(piece), self._tail))


class Events:
    """The events of one response: written in order, and taken when there is somebody to hear them."""

    def __init__(self) -> None:
        self._said = bytearray()
        self._number = 0  # of the next event

    def tell(self, kind: str, **members: Any) -> None:
        """Write an event of this kind (without `response.`) with these members."""
        self._said += _written(kind, self._next(), members)

    def grow(self, delta: Delta, piece: str) -> None:
        """Write that something has grown."""
        self._said += delta.event(self._next(), piece)

    def error(self, **members: Any) -> None:
        """Write an `error` event, which is the only one of its kind."""
        self._said += event_of(_ENCODER.encode({"type": "error", "sequence_number": self._next(), **members}), "error")

    def take(self) -> bytes:
        """All that was written since the last time."""
        said, self._said = bytes(self._said), bytearray()
        return said

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number


def _written(kind: str, number: int, members: dict[str, Any]) -> bytes:
    name = f"response.{kind}"
    return event_of(_ENCODER.encode({"type": name, "sequence_number": number, **members}), name)

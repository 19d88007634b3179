"""Entries: the messages of a body, where they stand in it.

A history is long and nobody looks at most of it: who knows where each message begins and ends need not keep a copy of
each, nor of the body. A message is cut out when it is asked for.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import overload


class Entries(Sequence[bytes]):
    """The raw messages of `body`; `spans` says of each where it begins and where it ends, in bytes."""

    __slots__ = ("_body", "_spans")

    def __init__(self, body: bytes, spans: "array[int]") -> None:
        self._body, self._spans = body, spans

    def __len__(self) -> int:
        return len(self._spans) // 2

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> list[bytes]: ...
    def __getitem__(self, place: int | slice) -> bytes | list[bytes]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        i = range(len(self))[place]
        return self._body[self._spans[2 * i] : self._spans[2 * i + 1]]


def spans_of(body: bytes, entries: Iterable[bytes], at: int) -> "array[int] | None":
    """Find objects that stand one behind the other in a body from `at` on; `None` if they do not stand there like this.

    Between two messages stand blanks and a comma, nothing that an object begins with.
    """
    spans = array("Q")
    for entry in entries:
        start = body.find(b"{", at)
        if start < 0 or not body.startswith(entry, start):
            return None
        at = start + len(entry)
        spans.extend((start, at))
    return spans

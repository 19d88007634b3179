"""Server-sent events: a byte stream cut into events, wherever the network cut it into chunks.

Only as much of the format as a proxy needs: an event is what stands between blank lines; its data are its `data:`
lines. Events are handed on as the bytes they came in unless somebody changes them.
"""

import re
from collections.abc import Iterator

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
DONE = b"[DONE]"


class EventSplitter:
    """Collects bytes and gives out whole events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes; yields each event that is now whole, with the blank line that ends it."""
        self._rest += data
        at = 0
        for end in _END.finditer(self._rest):
            yield self._rest[at : end.end()]
            at = end.end()
        self._rest = self._rest[at:]

    @property
    def rest(self) -> bytes:
        """Bytes of an event that is not whole yet."""
        return self._rest


def data_of(event: bytes) -> bytes | None:
    """Return the data of an event, `None` if it has none (a comment, say)."""
    if event.startswith(b"data: ") and event.find(b"\n", 0, len(event) - 2) == -1:
        return event[6:].rstrip(b"\r\n")  # what vLLM sends: one line
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def event_of(data: bytes) -> bytes:
    """Write an event with one line of data."""
    return b"data: " + data + b"\n\n"

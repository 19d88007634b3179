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
        scanned = max(0, len(self._rest) - 3)  # an end may have begun there, but none is behind
        whole, at = self._rest + data, 0
        if b"\r" in whole:
            for end in _END.finditer(whole, scanned):
                yield whole[at : end.end()]
                at = end.end()
        else:  # what vLLM sends: a prompt's echo has hundreds of kilobytes, in which one byte is found a hundred times faster than two
            found = whole.find(b"\n", scanned)
            while found >= 0:
                behind = found + 1
                if whole[behind : behind + 1] == b"\n":
                    behind += 1
                    yield whole[at:behind]
                    at = behind
                found = whole.find(b"\n", behind)
        self._rest = whole[at:]

    @property
    def rest(self) -> bytes:
        """Bytes of an event that is not whole yet."""
        return self._rest


def data_of(event: bytes) -> bytes | None:
    """Return the data of an event, `None` if it has none (a comment, say)."""
    if event.startswith(b"data: ") and event.endswith(b"\n\n") and b"\r" not in event and event.find(b"\n", 0, -2) < 0:
        return event[6:-2]  # what vLLM sends: one line
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def event_of(data: bytes, kind: str = "") -> bytes:
    """Write an event with one line of data, and its `kind` where the dialect names its events."""
    return (b"event: %s\n" % kind.encode() if kind else b"") + b"data: " + data + b"\n\n"

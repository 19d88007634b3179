"""Splits a byte stream into server-sent events, and writes them.

Implements as much of the format as a proxy needs: a blank line ends an event, and the data of an event are its `data:` lines. An event is
passed on in the bytes that arrived, unless something in it has to change.
"""

import re

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
DONE = b"[DONE]"


class EventSplitter:
    """Collects bytes and returns complete events."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the events that are complete now, each with the blank line that ends it."""
        events: list[bytes] = []
        scanned = max(0, len(self._rest) - 3)  # an end may have begun in the last three bytes
        self._rest += (
            data if self._rest else b""
        )  # an event may arrive in many pieces, so what has arrived is neither copied nor searched again
        whole: bytes | bytearray = self._rest or data
        at = 0
        if whole.find(b"\r", scanned) >= 0:
            for end in _END.finditer(whole, scanned):
                events.append(bytes(whole[at : end.end()]))
                at = end.end()
        else:  # what vLLM sends: in the hundreds of KB of an echoed prompt, searching for one byte is 100 times faster than for two
            found = whole.find(b"\n", scanned)
            while found >= 0:
                after = found + 1
                if whole[after : after + 1] == b"\n":
                    after += 1
                    events.append(bytes(whole[at:after]))
                    at = after
                found = whole.find(b"\n", after)
        if whole is data:
            self._rest += data[at:]
        else:
            del self._rest[:at]
        return events

    @property
    def rest(self) -> bytes:
        """Bytes of an incomplete event."""
        return bytes(self._rest)


def data_of(event: bytes) -> bytes | None:
    """Return the data of an event; `None` if it has none, such as a comment."""
    if event.startswith(b"data: ") and event.endswith(b"\n\n") and b"\r" not in event and event.find(b"\n", 0, -2) < 0:
        return event[6:-2]  # what vLLM sends: one line
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def event_of(data: bytes, kind: str = "") -> bytes:
    """Write an event with one line of data; `kind` is its name, in dialects that name their events."""
    return (b"event: %s\n" % kind.encode() if kind else b"") + b"data: " + data + b"\n\n"

"""Trouble to order: what an engine does on a bad day, one request at a time.

A test says `engine.faults.append(Fault.cut(after=3))` and the next chat completion's stream ends after three chunks.
Faults are taken from the front of the queue, each by one request; `None` in the queue lets one request through.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FaultKind(enum.Enum):
    """What goes wrong."""

    STATUS = "status"
    """Another status code and body, before anything is generated."""
    HANG = "hang"
    """No answer, ever: until the client gives up or the engine stops."""
    TRUNCATED = "truncated"
    """Status 200 and the first half of a JSON body, as if it were whole."""
    STALL = "stall"
    """A stream that says everything but its end, and then nothing more: until the client gives up or the engine stops."""
    CUT = "cut"
    """A stream that ends, cleanly by HTTP's rules, without finish reason and `[DONE]`."""
    ERROR_EVENT = "error_event"
    """An error object within a stream, then `[DONE]`: how vLLM reports a failure after status 200 went out."""
    CLOSE = "close"
    """The connection is torn down."""
    ABORT = "abort"
    """The engine ends the reply by itself (`finish_reason: "abort"`), as when its weights are replaced."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing to go wrong with one request; build it with the class methods."""

    kind: FaultKind
    status: int = 500
    body: bytes = b""
    content_type: str = "application/json"
    after: int = 0
    """Chunks of the stream that still go out: the role chunk is the first. Of an abort: tokens that were sampled."""
    path: str = "/v1/chat/completions"
    """The route that fails; a fault waits in the queue for a request to this route."""

    @classmethod
    def answer(cls, status: int, body: bytes | str = b"", *, content_type: str = "application/json", path: str | None = None) -> Fault:
        """Answer with `status` and `body` instead of generating."""
        raw = body.encode() if isinstance(body, str) else body
        return cls(FaultKind.STATUS, status=status, body=raw, content_type=content_type, path=path or cls._chat())

    @classmethod
    def hang(cls, *, path: str | None = None) -> Fault:
        """Never answer."""
        return cls(FaultKind.HANG, path=path or cls._chat())

    @classmethod
    def truncated_json(cls, *, path: str | None = None) -> Fault:
        """Answer 200 with half of the JSON (requests that do not stream)."""
        return cls(FaultKind.TRUNCATED, path=path or cls._chat())

    @classmethod
    def stall(cls) -> Fault:
        """Fall silent before the end of the stream."""
        return cls(FaultKind.STALL)

    @classmethod
    def cut(cls, after: int) -> Fault:
        """End the stream after so many chunks."""
        return cls(FaultKind.CUT, after=after)

    @classmethod
    def error_event(cls, after: int, message: str = "Internal server error", *, status: int = 500) -> Fault:
        """Put an error event with this status into the stream after so many chunks."""
        return cls(FaultKind.ERROR_EVENT, status=status, after=after, body=message.encode())

    @classmethod
    def close(cls, after: int = 0, *, path: str | None = None) -> Fault:
        """Tear the connection down, before any answer or after so many chunks of a stream."""
        return cls(FaultKind.CLOSE, after=after, path=path or cls._chat())

    @classmethod
    def abort(cls, after: int) -> Fault:
        """Abort the reply after so many tokens."""
        return cls(FaultKind.ABORT, after=after)

    @staticmethod
    def _chat() -> str:
        return "/v1/chat/completions"

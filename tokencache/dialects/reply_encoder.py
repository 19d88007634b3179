"""Defines what writes the reply to one call in the client's format."""

from collections.abc import Callable
from typing import Protocol

EVENT_STREAM = "text/event-stream"


class ReplyEncoder(Protocol):
    """Encodes the reply to one call. `chunk` is called once for each chunk, in order. Subclass it to get the defaults.

    Attributes:
        verbatim: whether the client gets the engine's own bytes: also what cannot be read, comments, and a stream that breaks off.
    """

    verbatim: bool = False

    def whole(self, data: bytes) -> bytes:
        """Encode a whole chat completion (JSON) as a response body."""

    def chunk(self, event: bytes, data: bytes, prompt_tokens: int) -> bytes:
        """Encode one chat chunk as framed events; `b""` if the client gets nothing for it yet.

        Args:
            event: the bytes that the engine sent.
            data: the chunk's JSON, possibly without the prompt's ids. `{"error": …}` is an engine's error within its stream.
            prompt_tokens: the length of the prompt, 0 while unknown (known from the first chunk on).
        """

    @property
    def chunk_unparsed(self) -> Callable[[bytes], bytes | None] | None:
        """A function that encodes most events without parsing them, or `None` if this reply needs every event parsed.

        It takes an event after the first chunk. It returns what `chunk` would return, which may be `b""`; or `None`, and then the
        event has to go through `chunk`.
        """
        return None

    def rest(self) -> bytes:
        """Return events that `chunk` kept back, if the engine's stream ended without `[DONE]`; none by default."""
        return b""

    def end(self) -> bytes:
        """Encode the end of the stream, after the engine's `[DONE]`."""

    def keep_alive(self) -> bytes:
        """Encode an event without content, to keep a silent connection open; by default a comment, which clients ignore."""
        return b": keep-alive\n\n"

    def error(self, status: int, message: str) -> bytes:
        """Encode an error within a stream that has begun, framed, with everything up to the end of the stream."""

    def documents(self) -> dict[str, bytes]:
        """Documents to store in the session with this reply, by name; none by default. Called after the reply is complete."""
        return {}

"""A request's body in pieces, each of which goes to the socket as it lies in memory.

The ids of a long history stand in hundreds of kilobytes of digits. Joined with the messages, and once more with the head of the
request (`aiohttp.http_writer`), they would be copied twice for every call.
"""

from collections.abc import Sequence

from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

_SHORT = 2**16
"""A body up to this size is copied faster than its pieces are written one by one."""


class Written(Payload):
    """JSON in pieces; aiohttp joins the first one with the head of the request."""

    _autoclose = True  # there is nothing to close

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        super().__init__(pieces, content_type="application/json")
        self._pieces = pieces
        self._size = sum(map(len, pieces))

    async def write(self, writer: AbstractStreamWriter) -> None:
        """See `Payload.write`."""
        for piece in self._pieces:
            await writer.write(piece)

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        """See `Payload.write_with_length`: the length is that of the pieces."""
        del content_length
        await self.write(writer)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """See `Payload.decode`."""
        return b"".join(self._pieces).decode(encoding, errors)


def written(*pieces: bytes | memoryview) -> bytes | Written:
    """Make a body of pieces: in one where it is short. The first should have a byte or two, for it is copied either way."""
    return Written(pieces) if sum(map(len, pieces)) > _SHORT else b"".join(pieces)

"""Decompresses the body of a request: gzip, deflate and zstd (RFC 9110 §8.4, RFC 8878). Codex sends zstd to its built-in provider.

A few kilobytes can contain gigabytes. So a body is decompressed in pieces, no further than `--max-body`, and other calls run in between.
Time and memory grow with what was read, not with what the body contains. A body is one stream: what follows its end is refused, because
a million empty streams would take time and give no bytes.
"""

import asyncio
import zlib
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus

import zstandard
from aiohttp import web

from tokencache.errors import BodyTooLargeError, HarnessError

_PIECE = 2**20
"""Bytes that are decompressed before other calls may run."""
_SLICE = 2**16
"""Bytes that zlib gets at once: it copies what it has not read yet, at each piece."""
_ZSTD_SLICE = 256
"""Bytes that zstd gets at once, which it decompresses as a whole: at most 8 MiB, because four bytes can be a block of 128 KiB."""
_SMALLEST_WINDOW = 2**23
"""Bytes of history that every zstd decoder should accept (RFC 8878 §3.1.1.1.2)."""
_LARGEST_WINDOW = 2**31
_GZIP, _ZLIB, _RAW = 31, 15, -15
"""zlib's `wbits` for its three formats."""


def _inflated(body: bytes, wbits: int) -> Iterator[bytes]:
    stream = zlib.decompressobj(wbits)
    for start in range(0, len(body), _SLICE):
        rest = body[start : start + _SLICE]
        while rest and not stream.eof:
            yield stream.decompress(rest, _PIECE)
            rest = stream.unconsumed_tail
        if stream.eof:
            _check_end(stream.unused_data or body[start + _SLICE :])
            return
    while piece := stream.decompress(b"", _PIECE):
        yield piece
    if not stream.eof:
        raise zlib.error("it ends too early")


def _check_end(rest: bytes) -> None:
    if rest:
        raise zlib.error("bytes follow its end")


def _gunzipped(body: bytes, _: int) -> Iterator[bytes]:
    return _inflated(body, _GZIP)


def _deflated(body: bytes, _: int) -> Iterator[bytes]:
    """Decompress `deflate`: by the standard in zlib's format, from some clients without its header."""
    has_header = len(body) > 1 and body[0] & 15 == zlib.DEFLATED and int.from_bytes(body[:2], "big") % 31 == 0
    return _inflated(body, _ZLIB if has_header else _RAW)


def _from_zstd(body: bytes, most: int) -> Iterator[bytes]:
    window = min(max(most, _SMALLEST_WINDOW), _LARGEST_WINDOW)
    stream = zstandard.ZstdDecompressor(max_window_size=window).decompressobj()
    for start in range(0, len(body), _ZSTD_SLICE):
        yield stream.decompress(body[start : start + _ZSTD_SLICE])
        if stream.eof:
            _check_end(stream.unused_data or body[start + _ZSTD_SLICE :])
            return
    raise zlib.error("it ends too early")


_CODINGS: Mapping[str, Callable[[bytes, int], Iterator[bytes]]] = {
    "gzip": _gunzipped,
    "x-gzip": _gunzipped,
    "deflate": _deflated,
    "zstd": _from_zstd,
}


def coding_of(request: web.Request) -> str:
    """Return the `Content-Encoding` of a request in lower case; `""` if its body is not compressed.

    Raises:
        HarnessError: such a body cannot be read.
    """
    named = [coding.strip().lower() for value in request.headers.getall("Content-Encoding", ()) for coding in value.split(",")]
    coding = ", ".join(name for name in named if name not in {"identity", ""})
    if coding and coding not in _CODINGS:
        raise HarnessError(
            f"the request's body is compressed with '{coding[:40]}', which tokencache cannot read: send it uncompressed, or with gzip, "
            "deflate or zstd",
            status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            headers={"Accept-Encoding": "gzip, deflate, zstd"},
        )
    return coding


async def decompressed(body: bytes, coding: str, most: int, *, take: Callable[[int], None]) -> bytes:
    """Decompress a body.

    Args:
        body: the compressed body.
        coding: a result of `coding_of`.
        most: the most bytes that the result may have.
        take: counts bytes that the request holds, before they are kept.

    Raises:
        HarnessError: the body is damaged.
        BodyTooLargeError: the result is longer than `most`.
        MemoryFullError: requests hold as much memory as they may (`take`).
    """
    pieces, size, done = [], 0, 0
    try:
        for piece in _CODINGS[coding](body, most):
            size += len(piece)
            if size > most:
                raise BodyTooLargeError(most)
            take(len(piece))
            pieces.append(piece)
            done += len(piece) + _ZSTD_SLICE
            if done >= _PIECE:
                done = 0
                await asyncio.sleep(0)
    except (zlib.error, zstandard.ZstdError) as why:
        raise HarnessError(f"the request's body cannot be decompressed ({coding}): {why}", status=HTTPStatus.BAD_REQUEST) from None
    return b"".join(pieces)

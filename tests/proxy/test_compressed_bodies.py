"""Compressed request bodies: each coding is read as if the body came without it, in bounded memory, or refused with a reason."""

import contextlib
import gzip
import json
import tracemalloc
import zlib
from functools import partial

import pytest
import zstandard
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from tests.core.settings import SOME
from tests.proxy.kit import CHAT, HEADER, proxied, user
from tests.support import pairwise
from tokencache.errors import BodyTooLargeError, HarnessError
from tokencache.proxy import compressed_body
from tokencache.proxy.compressed_body import coding_of

GZIP, ZSTD = partial(gzip.compress, mtime=0), zstandard.ZstdCompressor().compress
MEBIBYTE = 2**20


async def decompressed(body: bytes, coding: str, most: int) -> bytes:
    """Decompress a body; every byte of the result was counted."""
    taken: list[int] = []
    result = await compressed_body.decompressed(body, coding, most, take=taken.append)
    assert sum(taken) == len(result)
    return result


def raw_deflate(body: bytes) -> bytes:
    return zlib.compress(body)[2:-4]


def unsized_zstd(body: bytes) -> bytes:
    """In pieces, without the size in the head, as a client that streams."""
    stream = zstandard.ZstdCompressor(level=19).compressobj()
    return stream.compress(body) + stream.flush()


CODINGS = [("gzip", GZIP), ("X-GZIP", GZIP), ("deflate", zlib.compress), ("deflate", raw_deflate), ("zstd", ZSTD), ("zstd", unsized_zstd)]
each = pytest.mark.parametrize(("coding", "compress"), CODINGS)
PATHS = {
    CHAT: {"model": "sim", "messages": [user("EPISODE:talk")]},
    "/v1/messages": {"model": "sim", "max_tokens": 99, "messages": [user("EPISODE:talk")]},
    "/v1/responses": {"model": "sim", "input": "EPISODE:talk"},
    "/v1/completions": {"model": "sim", "prompt": "EPISODE:talk", "max_tokens": 9},
    "/v1beta/models/sim:generateContent": {"contents": [{"role": "user", "parts": [{"text": "EPISODE:talk"}]}]},
    "/tokenize": {"model": "sim", "messages": [user("EPISODE:talk")]},
}


async def send(rig, path, body, coding):
    headers = {HEADER: "s", "Content-Type": "application/json", "Content-Encoding": coding}
    async with rig.http.post(rig.url + path, data=body, headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers


@each
@pytest.mark.parametrize("path", PATHS)
async def test_a_compressed_body_is_read(coding, compress, path):
    async with proxied() as rig:
        status, said, _ = await send(rig, path, compress(json.dumps(PATHS[path]).encode()), coding)
        assert status == 200, said
        assert not any("Content-Encoding" in headers for headers in rig.engine.headers), "the engine receives what was read"
        if path != "/tokenize":
            assert len(await rig.turns()) == 1
            await rig.check()


@pytest.mark.parametrize(("path", "coding"), pairwise.each([*PATHS], ["br", "compress", "gzip, zstd", "aws-chunked"]))
async def test_another_coding_is_refused_in_the_dialect_of_the_client(path, coding):
    async with proxied() as rig:
        status, said, headers = await send(rig, path, b"\x0b\x02\x80", coding)
        error = said["error"]
        assert (status, headers["Accept-Encoding"]) == (415, "gzip, deflate, zstd")
        assert f"compressed with '{coding}'" in error["message"]
        assert "send it uncompressed, or with gzip, deflate or zstd" in error["message"]
        if path == "/v1/messages":
            assert (said["type"], error["type"]) == ("error", "invalid_request_error")


@pytest.mark.parametrize(
    ("coding", "compress"), [pytest.param(*one, marks=() if one == ("zstd", ZSTD) else pytest.mark.whole) for one in CODINGS]
)
async def test_a_bomb_is_refused_in_memory_that_grows_with_the_limit(coding, compress):
    bomb = compress(b" " * (200 * MEBIBYTE))
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLargeError):
            await decompressed(bomb, coding.lower(), 4 * MEBIBYTE)
        assert tracemalloc.get_traced_memory()[1] < 20 * MEBIBYTE
    finally:
        tracemalloc.stop()


@each
async def test_a_body_may_be_as_long_as_the_limit(coding, compress):
    body = b"x" * MEBIBYTE
    assert await decompressed(compress(body), coding.lower(), MEBIBYTE) == body
    with pytest.raises(BodyTooLargeError):
        await decompressed(compress(body), coding.lower(), MEBIBYTE - 1)


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", b"{}"),
        ("gzip", GZIP(b"{}")[:-1]),
        ("gzip", GZIP(b"{}") + b"x"),
        ("gzip", GZIP(b"") * 100_000),
        ("deflate", zlib.compress(b"{}")[:-5]),
        ("deflate", b"{"),
        ("zstd", b"{}"),
        ("zstd", GZIP(b"{}")),
        ("zstd", ZSTD(b"{}")[:-1]),
        ("zstd", unsized_zstd(b"{}" * 999)[:-1]),
        ("zstd", ZSTD(b"{}") + b"x"),
        ("zstd", ZSTD(b"") * 100_000),
        ("zstd", ZSTD(b"{}" * 99)[:4] + b"\xff" * 99),
    ],
)
async def test_a_damaged_body_is_refused(coding, body):
    with pytest.raises(HarnessError, match=rf"cannot be decompressed \({coding}\)") as refused:
        await decompressed(body, coding, MEBIBYTE)
    assert refused.value.status == 400


@SOME
@given(st.binary(max_size=300_000), st.sampled_from(CODINGS))
async def test_every_body_comes_out_as_it_went_in(body, coding):
    name, compress = coding
    assert await decompressed(compress(body), name.lower(), MEBIBYTE) == body


@SOME
@given(st.binary(max_size=200), st.sampled_from(["gzip", "deflate", "zstd"]))
async def test_any_bytes_are_read_or_refused(body, coding):
    with contextlib.suppress(HarnessError):
        await decompressed(body, coding, 1000)


def test_identity_is_no_coding():
    for named in ("", "identity", "Identity, identity"):
        assert not coding_of(make_mocked_request("POST", "/", headers={"Content-Encoding": named}))

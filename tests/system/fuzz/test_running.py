"""Random requests against the running server, by hypothesis: bytes that are nearly HTTP, and JSON that is nearly a request."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.pairwise import some
from tests.support.profiles import examples
from tests.system.fuzz.kit import ASK, DIALECTS, answers, chunked, request, send
from tests.system.fuzz.targets import SEEDS
from tests.system.fuzz.test_parsers import inputs

QUIETLY = settings(max_examples=examples(120), suppress_health_check=list(HealthCheck))
LINES = [
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"Content-Length: 5", b"Content-Length: 0",
    b"Transfer-Encoding: chunked", b"Connection: upgrade",
    b"Expect: 100-continue", b"Upgrade: websocket", b"X-Tokencache-Session: oracle", b"0\r\n\r\n",
    b"ffffffff\r\n", b"HTTP/1.0", b"HTTP/2", b"GET ", b"/s/x/",
    b"%0d%0a", b"/../", b"\xff", b";", b",", b"Host: other", b"Authorization: Bearer tcs-y", b"Content-Encoding: gzip", b"A" * 70_000,
]  # fmt: skip


@st.composite
def nearly_http(draw):
    good = draw(
        st.sampled_from(
            [
                request(ASK),
                request(chunked(), b"Transfer-Encoding: chunked", length=False),
                request(ASK) * 2,
                b"GET /s/x/v1/models HTTP/1.1\r\nHost: h\r\n\r\n",
                request(ASK, session=None, path="/v1/embeddings"),
            ]
        )
    )
    raw = bytearray(good)
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(raw)))
        raw[at : at + draw(st.integers(0, 8))] = draw(st.sampled_from(LINES) | st.binary(max_size=4))
    cut = draw(st.integers(0, len(raw)))
    return [bytes(raw[:cut]), bytes(raw[cut:])] if draw(st.booleans()) else [bytes(raw)]


def chosen(strategy):
    """What hypothesis chooses. It does so before the attack: it allows nothing else to use `random` meanwhile, and a proxy does."""
    found = []

    @QUIETLY
    @given(strategy)
    def choose(one):
        found.append(one)

    choose()
    return found


async def test_bytes_that_are_nearly_http(target):
    for pieces in chosen(nearly_http()):
        received = await send(target.url, *pieces)
        assert b"Internal error in tokencache" not in received, pieces
        assert not received or received.startswith(b"HTTP/"), pieces
    await target.unharmed("attack", "x")


@pytest.mark.parametrize("dialect", some(DIALECTS, 2))
async def test_json_that_is_nearly_a_request(target, dialect):
    seen = set()

    for body in chosen(inputs(dialect)):
        (answer,) = answers(await send(target.url, request(body, b"Connection: close", path=DIALECTS[dialect]), half_close=False))
        assert b"Internal error in tokencache" not in answer[2], body
        if 400 <= answer[0] < 500 and answer[1].get("content-type", "").startswith("application/json"):
            json.loads(answer[2])
        seen.add(answer[0])
    assert {200, 400} & seen
    await target.unharmed("attack")
    assert SEEDS[dialect]

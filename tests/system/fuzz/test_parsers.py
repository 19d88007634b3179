"""Runs the fuzzer's targets for a bounded number of examples from a fixed seed; `make fuzz` continues from there."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.pairwise import some
from tests.support.profiles import examples
from tests.system.fuzz.targets import SEEDS, TARGETS

ODD = [
    b"", b"{", b"}", b"[", b"]", b'"', b"\\", b"\\u0000", b"\\ud800", b"\\udc00\\ud800", b"NaN", b"-Infinity",
    b"1e999", b"-0", b"9" * 400, b"null",
    b"true", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x00", b"\r", b"\n\n", b"\r\n\r\n", b"data:", b"{}",
    b"[]", b'"role"', b'"content"', b'"type"',
    b"..", b"%2e", b"%2F", b"?", b"/", b"tck-", b"key=", b"[" * 2000, b'{"a":' * 1200, b" ", b"\xe2\x80\xa8", b"<think>", b"</think>",
]  # fmt: skip


@st.composite
def spoiled(draw, seeds):
    """A good input with a few of its bytes removed, doubled, or replaced by bytes that are hard for parsers."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 6))):
        at, length = draw(st.integers(0, len(data))), draw(st.integers(0, 12))
        kept = bytes(data[at : at + length])
        data[at : at + length] = draw(st.sampled_from([b"", kept + kept]) | st.sampled_from(ODD) | st.binary(max_size=6))
    return bytes(data)


def inputs(name):
    """The inputs for a target."""
    return spoiled(SEEDS[name]) | st.binary(max_size=200)


@pytest.mark.parametrize("name", some(TARGETS, 4))
def test_it_parses_or_refuses(name):
    @settings(max_examples=examples(250))
    @given(data=inputs(name))
    @example(data=b"")
    @example(data=b"[" * 100_000)
    @example(data=b'{"a":' * 50_000)
    def run(data):
        TARGETS[name](data)

    run()

"""What a stream holds is counted in bytes that Python allocated, so it is the same on each machine."""

import pytest

from bench.held import SHAPES, held

KIB = 1024
LIMITS = {"1 KB": 25, "141 KB": 26}
"""KiB. The client's body is held until the first text arrives; then neither it, nor the prompt's ids, nor their echo. Twenty
tokens have arrived."""
SLACK = 1.02


@pytest.mark.parametrize("title", SHAPES)
def test_a_stream_holds_no_more(title):
    found = held(SHAPES[title])
    assert found.size <= SLACK * LIMITS[title] * KIB
    assert found.coroutines <= 9

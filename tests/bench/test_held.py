"""What a stream holds is counted in bytes that Python allocated, so it is the same on each machine."""

import pytest

from bench.held import SIZES, held

KIB = 1024
LIMITS = {"1 KB": 52, "141 KB": 205}
"""KiB. Of 141 KB, 138 are the client's body; neither the request to the engine nor the prompt's ids or their echo are held."""
SLACK = 1.02


@pytest.mark.parametrize("title", SIZES)
def test_a_stream_holds_no_more(title):
    found = held(SIZES[title])
    assert found.size <= SLACK * LIMITS[title] * KIB
    assert found.coroutines <= 15

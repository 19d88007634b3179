"""Token ids as bytes, and log probabilities without loss."""

import json
import math
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.settings import MANY
from tokencache.core import ids

token = st.integers(0, 3) | st.sampled_from([255, 256, 257, 65536, 16777216, 2**31 - 1]) | st.integers(-(2**31), 2**31 - 1)
tokens = st.lists(token, max_size=12)
few = st.lists(st.sampled_from([0, 1, 256, 65536]), max_size=8)


@MANY
@given(tokens)
def test_packing_loses_nothing(values):
    packed = ids.pack(values)
    assert packed == b"".join(struct.pack("<i", v) for v in values)
    assert ids.unpack(packed) == values
    assert ids.count(packed) == len(values)
    assert json.loads(b"[" + ids.fragment(packed) + b"]") == values


@MANY
@given(tokens, st.integers(0, 14))
def test_head_and_tail(values, n):
    assert ids.unpack(ids.head(ids.pack(values), n)) == values[:n]
    assert ids.unpack(ids.tail(ids.pack(values), n)) == values[n:]


@MANY
@given(st.lists(st.tuples(tokens, st.booleans()), max_size=6))
def test_fragments_grow_in_pieces(lists):
    expected, grown = [], [ids.Fragment()]
    for values, read in lists:
        grown.append(grown[-1].extended(ids.pack(values)))
        expected.append(expected[-1] + values if expected else values)
        if read:
            assert json.loads(b"[%s]" % bytes(grown[-1])) == expected[-1]
    for fragment, values in zip(grown, [[], *expected], strict=True):
        assert (bool(fragment), fragment.tokens) == (bool(values), len(values))
        assert json.loads(b"[%s]" % bytes(fragment)) == values, "a longer one does not change it"
        assert fragment.tokens == len(values)


@pytest.mark.parametrize("lengths", [[1], [2**14], [2**14 + 1], [40_000, 3, 20_000], [5] * 40])
def test_a_fragment_is_written_in_parts_that_stay_whole(lengths):
    rng, fragment, values = random.Random(1), ids.Fragment(), list[int]()
    for length in lengths:
        added = [rng.randrange(150_000) for _ in range(length)]
        fragment, values = fragment.extended(ids.pack(added)), values + added
    parts = 0
    while fragment.write_part():
        parts += 1
        assert fragment.tokens == len(values)
        assert json.loads(b"[%s]" % bytes(fragment.extended(b""))) == values, "another call may read it in between"
    assert parts >= max(1, len(values) // 2**14)
    assert json.loads(b"[%s]" % bytes(fragment)) == values


def test_pieces_of_a_fragment_do_not_grow_in_number():
    fragment = ids.Fragment((b"0",))
    for value in range(1, 1000):
        fragment = fragment.extended(ids.pack([value]))
        assert len(fragment.pieces) < 100
    assert json.loads(b"[%s]" % bytes(fragment)) == list(range(1000))


@MANY
@given(few, st.lists(st.sampled_from([0, 1, 256, 65536]), min_size=1, max_size=3))
def test_find_sees_whole_tokens_only(values, wanted):
    naive = next((i for i in range(len(values)) if values[i : i + len(wanted)] == wanted), -1)
    assert ids.find(ids.pack(values), ids.pack(wanted)) == naive


def test_find_is_not_fooled_by_bytes():
    assert ids.find(ids.pack([256, 65536]), ids.pack([1])) == -1
    assert ids.find(ids.pack([256, 0, 1]), ids.pack([1])) == 2


@MANY
@given(few, few, few)
def test_common_head_and_end(shared, a, b):
    def naive(x, y):
        return next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))

    assert ids.common_head(ids.pack(shared + a), ids.pack(shared + b)) == naive(shared + a, shared + b)
    assert ids.common_end(ids.pack(a + shared), ids.pack(b + shared)) == naive((a + shared)[::-1], (b + shared)[::-1])


def bits(values):
    return [struct.pack("<d", v) for v in values]


@MANY
@given(st.lists(st.floats(width=32, allow_nan=False), max_size=8))
def test_float32_takes_four_bytes_and_loses_nothing(values):
    packed = ids.pack_logprobs(values)
    assert bits(ids.unpack_logprobs(packed)) == bits(values)
    assert len(packed) == (1 + 4 * len(values) if values else 0)


@MANY
@given(st.lists(st.floats(allow_nan=False), max_size=8))
def test_float64_loses_nothing(values):
    assert bits(ids.unpack_logprobs(ids.pack_logprobs(values))) == bits(values)


@pytest.mark.parametrize("value", [-math.inf, math.inf, -0.0, 0.0, -0.1, -1e300, 5e-324, struct.unpack("<f", struct.pack("<f", -0.1))[0]])
def test_a_value_comes_back_to_the_bit(value):
    assert bits(ids.unpack_logprobs(ids.pack_logprobs([value, -1.5]))) == bits([value, -1.5])


def test_not_a_number_comes_back_as_such():
    back = ids.unpack_logprobs(ids.pack_logprobs([math.nan, -0.5]))
    assert math.isnan(back[0])
    assert back[1] == -0.5


@pytest.mark.parametrize("values", [[2**31], [0, -(2**31) - 1], [2**70]])
def test_what_is_no_32_bit_integer_is_refused(values):
    with pytest.raises(OverflowError):
        ids.pack(values)


def test_what_is_no_number_is_refused():
    with pytest.raises(TypeError):
        ids.pack([1.5])
    with pytest.raises(TypeError):
        ids.pack_logprobs([None])

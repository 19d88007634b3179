"""How a reply and the tail behind it meet."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.settings import SOME
from tokencache.core import ids
from tokencache.core.ids import pack
from tokencache.core.splice import OPEN, REPLACED, SHARED, join, junction

IM_END, NEWLINE, USER, OBSERVATION, RETURN, END, CALL = 900, 10, 901, 902, 903, 904, 905


@pytest.mark.parametrize(
    ("reply", "tail", "stops", "kind", "prompt"),
    [
        pytest.param([1, IM_END], [IM_END, NEWLINE, 7], {IM_END}, SHARED, [1, IM_END, NEWLINE, 7], id="Qwen: one end of turn"),
        pytest.param([1], [IM_END, NEWLINE, 7], {IM_END}, OPEN, [1, IM_END, NEWLINE, 7], id="cut by length"),
        pytest.param([], [IM_END, NEWLINE], {IM_END}, OPEN, [IM_END, NEWLINE], id="aborted before the first token"),
        pytest.param([1, IM_END], [], {IM_END}, OPEN, [1, IM_END], id="nothing behind it"),
        pytest.param([1, USER], [USER, 7], {USER, OBSERVATION}, SHARED, [1, USER, 7], id="GLM: it expected the user"),
        pytest.param([1, USER], [OBSERVATION, 7], {USER, OBSERVATION}, REPLACED, [1, OBSERVATION, 7], id="GLM: a tool's result came"),
        pytest.param([1, RETURN], [END, 7], {RETURN, CALL}, REPLACED, [1, END, 7], id="gpt-oss: return becomes end"),
        pytest.param([1, CALL], [CALL, 7], {RETURN, CALL}, SHARED, [1, CALL, 7], id="gpt-oss: a call"),
        pytest.param([IM_END, IM_END], [IM_END], {IM_END}, SHARED, [IM_END, IM_END], id="one boundary, not all"),
        pytest.param([1, 256], [1, 7], {IM_END}, OPEN, [1, 256, 1, 7], id="tokens, not bytes"),
    ],
)
def test_boundary(reply, tail, stops, kind, prompt):
    where = junction(pack(reply), pack(tail), stops)
    assert where == kind
    assert ids.unpack(join(pack(reply), pack(tail), where)) == prompt


tokens = st.lists(st.integers(0, 5), max_size=6)


@SOME
@given(tokens, tokens, tokens, st.sets(st.integers(0, 5)))
def test_a_join_loses_at_most_the_boundary(before, reply, tail, stops):
    where = junction(pack(reply), pack(tail), stops)
    joined = ids.unpack(join(pack(before + reply), pack(tail), where))
    kept = before + reply[: len(reply) - where.drop]
    assert joined == kept + tail[where.skip :]
    assert where.drop + where.skip <= 1
    if where.drop:
        assert reply[-1] in stops
        assert reply[-1] != tail[0]
    if where.skip:
        assert reply[-1] == tail[0]
    else:
        assert joined[len(joined) - len(tail) :] == tail

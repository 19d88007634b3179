"""Lenient JSON: what strict readers refuse and clients and models write; positions in error messages."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.profiles import examples
from tokencache.core import strict_json
from tokencache.dialects import json_io
from tokencache.dialects.json_io import bracketed, dotted
from tokencache.errors import HarnessError

TEXT = st.text(st.characters(exclude_categories=()), max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def clean(value):
    return json.loads(strict_json.replace_surrogates(json.dumps(value, ensure_ascii=False)))


@settings(max_examples=examples(300))
@given(JSON)
def test_whatever_python_writes_is_read(value):
    for text in (json.dumps(value), json.dumps(value).encode(), json.dumps(value, ensure_ascii=False)):
        assert strict_json.read(text) == clean(value)
    assert json.loads(json_io.write(value).decode()) == clean(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (rb'"\ud83d"', "\ufffd"),
        (rb'"\ud83d\ude00 \\ud83d"', "😀 \\ud83d"),
        (rb'{"\udc00": ["\ud800", 1.50]}', {"\ufffd": ["\ufffd", 1.5]}),
        (b'"\xed\xa0\x80"', "\ufffd"),
        (b"[%s]" % (b"9" * 400), [int("9" * 400)]),
    ],
)
def test_what_strict_readers_refuse(text, value):
    assert strict_json.read(text) == value
    assert json_io.read_body(b'{"a":%s}' % text) == {"a": value}
    assert strict_json.read(json_io.write(value)) == value


NONE = [b"", b"{", b"{} {}", b"NaN", b'{"a": -Infinity}', b"[1e999]", b"\xff", b"9" * 6000, b"[" * 100_000]


@pytest.mark.parametrize("text", NONE, ids=lambda text: text[:12].decode(errors="replace"))
def test_what_is_not_json(text):
    with pytest.raises((ValueError, RecursionError)):
        strict_json.read(text)
    with pytest.raises(HarnessError) as refused:
        json_io.read_body(text)
    assert refused.value.status == 400


def test_what_is_too_deep_to_write():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(HarnessError, match="nested too deeply"):
        json_io.write(deep)


DEEP = ((((("messages", 3), "content"), 0), "source"), "data")


@pytest.mark.parametrize(
    ("place", "dots", "brackets"),
    [
        ("", "", ""),
        (("", "model"), "model", "model"),
        ("thinking.enabled", "thinking.enabled", "thinking.enabled"),
        (("tool_choice.tool", "name"), "tool_choice.tool.name", "tool_choice.tool.name"),
        (DEEP, "messages.3.content.0.source.data", "messages[3].content[0].source.data"),
        ((((("", "a"), 0), 1), "2"), "a.0.1.2", "a[0][1].2"),
    ],
)
def test_how_positions_are_written(place, dots, brackets):
    assert dotted(place) == dots
    assert bracketed(place) == brackets

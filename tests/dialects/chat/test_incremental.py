"""Parsing a body incrementally gives the same result as parsing it whole."""

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.profiles import examples
from tests.support.reading import read_chat
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.errors import HarnessError

LEADING = st.sampled_from(["", '"model":"m",', '"stream":true,"model":"m",', '"note":"\\"messages\\": [",', '"model" : "m" , '])
BEHIND = st.sampled_from(
    ["", ',"tools":[{"type":"function"}]', ',"n":2', ',"model":"other"', ',"x":{"messages":[1]}', ', "stop": "]}"', ',"messages":[]']
)
ENTRY = st.builds(
    lambda role, text, extra: json.dumps({"role": role, "content": text, **extra}),
    st.sampled_from(["user", "assistant", "tool", "system"]),
    st.sampled_from(["", "hi", 'a "messages": [ b', "]}", "☕", "<|im_end|>", None]),
    st.sampled_from(
        [
            {},
            {"tool_call_id": "a"},
            {"tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "oops"}}]},
            {"content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        ]
    ),
)
CUT = st.sampled_from([",", ", ", ",\n "])


def _body(leading: str, entries: list[str], comma: str, behind: str, *, space: bool) -> bytes:
    listed = comma.join(entries)
    return f'{{{leading}"messages":{" " if space else ""}[{listed}]{behind}}}'.encode()


def _seen(body: bytes, bodies: IncrementalParser, session: str):
    try:
        call = read_chat(body, bodies, session)
    except HarnessError as why:
        return str(why)
    fields = {name: bytes(raw) for name, raw in call.fields.items()}
    return (list(fields.items()), list(call.raw_messages), call.conversation, call.plain, call.media, call.malformed, call.model)


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(LEADING, st.lists(ENTRY, max_size=3), CUT, BEHIND, st.booleans(), st.integers(0, 3)), min_size=2, max_size=6))
def test_incremental_parsing_equals_parsing_the_whole(steps):
    bodies, history = IncrementalParser(), []
    leading, comma, space = steps[0][0], steps[0][2], steps[0][4]
    for other_leading, new, other_comma, behind, other_space, deed in steps:
        if deed == 1:
            history = history[:-1]  # a retry, or an edit
        if deed == 2:
            leading, comma, space = other_leading, other_comma, other_space
        history = [*history, *new]
        body = _body(leading, history, comma, behind, space=space)
        assert _seen(body, bodies, "s") == _seen(body, IncrementalParser(), "")


def test_only_new_messages_are_parsed(monkeypatch):
    bodies = IncrementalParser()
    entries = [json.dumps({"role": "user", "content": f"{i}"}) for i in range(50)]
    read_chat(_body('"model":"m",', entries, ",", "", space=False), bodies, "s")
    read = []
    monkeypatch.setattr(bodies.messages, "read", lambda entries, real=bodies.messages.read: read.extend(entries) or real(entries))
    more = [*entries, json.dumps({"role": "assistant", "content": "yes"}), json.dumps({"role": "user", "content": "go"})]
    call = read_chat(_body('"model":"m",', more, ",", ',"stream":true', space=False), bodies, "s")
    assert [json.loads(raw)["content"] for raw in read] == ["yes", "go"]
    assert call.stream
    assert len(call.raw_messages) == 52


def test_memory_is_bounded():
    bodies = IncrementalParser(memory=10_000)
    for i in range(100):
        read_chat(_body("", [json.dumps({"role": "assistant", "content": "x" * 500})], ",", "", space=False), bodies, f"s{i}")
    assert len(bodies._cache) < 10


def test_what_short_sessions_take_is_counted():
    """Otherwise a hundred thousand of them take several times the limit."""
    bodies = IncrementalParser()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for i in range(500):
            read_chat(_body('"model":"m",', [json.dumps({"role": "user", "content": f"hello {i}"})], ",", "", space=False), bodies, f"s{i}")
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < 1.25 * bodies._cache.total


def test_long_histories_take_little_memory(monkeypatch):
    """Of what a harness said nothing is kept but where it stands: thousands of rollouts send long histories."""
    bodies, long = IncrementalParser(memory=200_000), [json.dumps({"role": "tool", "content": "x" * 50_000})] * 2
    for i in range(50):
        read_chat(_body("", long, ",", "", space=False), bodies, f"s{i}")
    read = []
    monkeypatch.setattr(bodies.messages, "read", lambda entries, real=bodies.messages.read: read.extend(entries) or real(entries))
    for i in range(50):
        read_chat(_body("", [*long, '{"role":"user","content":"go"}'], ",", "", space=False), bodies, f"s{i}")
    assert read == [b'{"role":"user","content":"go"}'] * 50


def test_a_changed_head_is_parsed_whole():
    bodies, said = IncrementalParser(), '{"role":"user","content":"%s"}'
    read_chat(_body("", [said % "one", said % "two"], ",", "", space=False), bodies, "s")
    call = read_chat(_body("", [said % "eno", said % "two", said % "go"], ",", "", space=False), bodies, "s")
    assert [json.loads(raw)["content"] for raw in call.raw_messages] == ["eno", "two", "go"]
    assert (
        call.conversation
        == read_chat(_body("", [said % "eno", said % "two", said % "go"], ",", "", space=False), IncrementalParser()).conversation
    )


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"messages":[{"role":"user","content":"a"},', b'{"messages":[{"role":"user","content":"a"},]}']
)
def test_a_broken_body_is_refused_after_a_whole_one(body):
    bodies = IncrementalParser()
    read_chat(b'{"messages":[{"role":"user","content":"a"}]}', bodies, "s")
    with pytest.raises(HarnessError):
        read_chat(body, bodies, "s")

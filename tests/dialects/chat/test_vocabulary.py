"""Rewritten raw messages keep what an engine reads from them."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.profiles import examples
from tests.support.reading import read_chat
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.vocabulary import MessageReader, part_kind, with_reasoning, with_stand_ins

READABLE = {
    "an object": '{"a": 1}',
    "NaN": '{"a": NaN}',
    "Infinity": '{"a": [Infinity, -Infinity]}',
    "beyond every double": '{"a": 1e999, "b": -1E400}',
    "beyond 64 bits": '{"a": 123456789012345678901234567890}',
    "400 digits": f'{{"a": {"9" * 400}}}',
    "more digits than a double has": '{"a": 0.1000000000000000055511151231257827, "b": 1.50}',
    "half a character": r'{"a": "\ud83d"}',
    "a key twice": '{"a": 1, "b": 2, "a": 3}',
    "white space": ' { "a" :\t1 } \n',
    "a list": "[1, NaN]",
    "a number": "5",
    "null": "null",
}
"""Arguments that Python's `json` reads, and so vLLM."""

UNREADABLE = {
    "nothing": "",
    "blank": " ",
    "cut off": '{"cmd": "l',
    "no JSON": '{"cmd": oops}',
    "a control character": '{"cmd": "\t"}',
    "a byte order mark": '\ufeff{"a": 1}',
    "more digits than Python takes": f'{{"a": {"9" * 5000}}}',
    "too deep": '{"a":' * 100_000 + "1" + "}" * 100_000,  # Python 3.13 reads 5,000 levels
}


def entry(*arguments, **members):
    """An assistant's entry with a call for each of the raw `arguments`."""
    calls = ",".join(f'{{"id":"c{i}","type":"function","function":{{"name":"f","arguments":{raw}}}}}' for i, raw in enumerate(arguments))
    more = "".join(f',"{name}":{raw}' for name, raw in members.items())
    return f'{{"role":"assistant","content":null,"tool_calls":[{calls}]{more}}}'.encode()


def read(raw):
    [message] = MessageReader().read([raw])
    return message


def test_messages_before_an_unreadable_one_do_not_pile_up():
    """A harness may send its unreadable message with every call, after others that are new each time."""
    reader = MessageReader(4)
    for number in range(20):
        with pytest.raises(ValueError, match="cannot be read"):
            reader.read([b'{"role":"user","content":"%d"}' % number, b'{"role":1}'])
    assert len(reader._known) <= 6


def test_long_replies_do_not_pile_up():
    """They are kept after their sessions were deleted, for as long as there is room."""
    reader = MessageReader(memory=100_000)
    replies = [entry(json.dumps("x" * 10_000 + str(number))) for number in range(40)]
    first = [reader.read([raw])[0].digest for raw in replies]
    assert len(reader._known) <= 11
    assert [reader.read([raw])[0].digest for raw in replies] == first


def test_long_ids_of_calls_do_not_pile_up():
    reader = MessageReader(memory=100_000)
    for number in range(40):
        reader.read([json.dumps({"role": "tool", "tool_call_id": "x" * 10_000 + str(number), "content": "a"}).encode()])
    assert len(reader._known) <= 11


def arguments_of(raw):
    return [call["function"]["arguments"] for call in json.loads(raw)["tool_calls"]]


@pytest.mark.parametrize("text", READABLE.values(), ids=READABLE)
def test_arguments_that_an_engine_reads_stay_as_they_are(text):
    raw = entry(json.dumps(text))
    assert not read(raw).malformed
    assert arguments_of(with_stand_ins(raw)) == [text]


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_arguments_that_no_engine_reads_get_a_stand_in(text):
    raw = entry(json.dumps(text))
    assert read(raw).malformed
    assert arguments_of(with_stand_ins(raw)) == ["{}"]


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ('{"a": 1.50, "a": 12345678901234567890123}', '{"a": 1.50, "a": 12345678901234567890123}'),
        ('{"ü": "\\u00fc\\n"}', '{"ü": "\\u00fc\\n"}'),
        ("[1, 2]", "[1, 2]"),
        ("null", "{}"),
        ("5", "{}"),
        ("true", "{}"),
    ],
)
def test_arguments_that_are_no_text(given, written):
    """An engine refuses them; an object becomes its own text, so that the engine reads the same value in it."""
    raw = entry(given)
    assert read(raw).malformed
    assert arguments_of(with_stand_ins(raw)) == [written]


def test_a_call_without_arguments():
    raw = b'{"role":"assistant","tool_calls":[{"id":"a","function":{"name":"f"}}]}'
    assert read(raw).malformed
    assert arguments_of(with_stand_ins(raw)) == ["{}"]


def test_only_what_is_refused_is_rewritten():
    """The other calls of the message, and all its other members, keep their bytes."""
    odd = '"{\\"a\\": NaN, \\"b\\": 1e999}"'
    raw = entry(odd, '"oops"', odd, x='{"n":1.50,"n":2 , "big":123456789012345678901234567890}')
    written = with_stand_ins(raw)
    assert written == raw.replace(b'"oops"', b'"{}"')
    assert with_stand_ins(written) == written


@pytest.mark.parametrize("raw", [b'{"role":"user","content":"x"}', b'{"role":"assistant","tool_calls":null}', entry()])
def test_a_message_without_calls_stays_as_it_is(raw):
    assert with_stand_ins(raw) == raw


def test_a_call_with_malformed_arguments_keeps_other_messages():
    fine = entry('"{\\"a\\": NaN}"')
    body = b'{"model":"m","messages":[%s,%s]}'
    call = read_chat(body % (fine, fine), IncrementalParser())
    assert call.malformed == ()
    assert list(call.safe_messages()) == [fine, fine]
    mixed = read_chat(body % (fine, entry('"oops"')), IncrementalParser())
    assert mixed.malformed == (1,)
    assert list(mixed.safe_messages()) == [fine, entry('"{}"')]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(300))
@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), st.booleans())
def test_whatever_python_writes_is_kept(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert arguments_of(with_stand_ins(entry(json.dumps(text), '"oops"'))) == [text, "{}"]


# reasoning under its older name


def test_reasoning_under_its_older_name_is_renamed_and_nothing_else_changes():
    odd = '"{\\"a\\": NaN}"'
    raw = entry(odd, x='{"n": 1.50, "n":1e999}', reasoning_content='"caf\\u00e9"')
    assert with_reasoning([raw]) == [raw.replace(b"reasoning_content", b"reasoning")]


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"reasoning_content": '"a"'}, "a"),
        ({"reasoning_content": '"a"', "reasoning": '"b"'}, "b"),
        ({"reasoning_content": '"a"', "reasoning": '""'}, ""),
        ({"reasoning_content": '"a"', "reasoning": "null"}, "a"),
        ({"reasoning_content": "null", "reasoning": '"b"'}, "b"),
        ({"reasoning\\u005fcontent": '"a"'}, "a"),
    ],
)
def test_which_reasoning_counts(members, said):
    written = json.loads(with_reasoning([entry(**members)])[0])
    assert written["reasoning"] == said
    assert "reasoning_content" not in written


@pytest.mark.parametrize(
    "raw",
    [
        entry('"{\\"reasoning_content\\": 1}"'),
        entry(x='{"reasoning_content": 1}'),
        entry(x='"\\u00fc"'),
        b'{"role":"assistant","reasoning_content":"a","x":NaN}',
        b'{"role":"assistant","reasoning_content":"\\ud800"}',
    ],
)
def test_other_messages_stay_as_they_are(raw):
    """Without that member, or where only the engine can say what the message is."""
    assert with_reasoning([raw]) == [raw]


def test_a_message_that_is_not_json_is_unreadable():
    with pytest.raises(msgspec.DecodeError):
        read(entry('{"a": NaN}'))


PARTS = {
    "text": [
        *({"type": kind, "text": "x"} for kind in ("text", "input_text", "output_text")),
        *({"type": kind, kind: "x"} for kind in ("refusal", "thinking")),
    ],
    "reference": [{"type": "tool_reference", "name": "grep"}],
    "dropped": [{"type": "text", "text": None}, {"type": "text"}, {"type": "refusal", "refusal": None}],
    "media": [
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "input_image", "image_url": "data:,"},
        {"type": "video_embeds"},
        {"type": "text", "text": "x", "image_url": None},
        {"type": "tool_reference", "name": "grep", "image_url": "data:,", "uuid": "1"},
        {"type": "prompt_embeds", "data": "x"},
    ],
    "unsupported": [
        {"type": "wibble"},
        {"type": "file", "file": {"file_data": "x"}},
        {"type": "tool_reference"},
        {"type": "tool_reference", "name": 5},
        {"type": "text", "text": "x", "uuid": "1"},
        {"type": "thinking", "thinking": None},
        {"type": ["text"], "text": "x"},
        {"text": "x"},
        {},
    ],
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_is_what_the_engine_makes_of_it(kind):
    assert {part_kind(part) for part in PARTS[kind]} == {kind}
    for part in PARTS[kind]:
        one = read(json.dumps({"role": "user", "content": [part]}).encode())
        assert [medium.known for medium in one.media] == {"media": [True], "unsupported": [False]}.get(kind, [])


def test_a_reference_is_not_its_name():
    """The template may expand it, so the model's own word is another message."""
    name, reference = ([{"type": "text", "text": "grep"}], [{"type": "tool_reference", "name": "grep"}])
    said = [read(json.dumps({"role": "assistant", "content": content}).encode()) for content in (name, reference)]
    assert said[0].digest != said[1].digest


def test_what_no_template_shows_of_a_result_is_no_evidence():
    """Copilot CLI adds a member to each result when it resumes, and Hermes leaves out the tool's name."""
    result = {"role": "tool", "tool_call_id": "a", "content": "x"}
    added = [{"__copilotMessageSource": {"kind": "tool"}}, {"name": "bash"}, {"cache_control": {"type": "ephemeral"}}]
    changed = [{"content": "y"}, {"content": " x"}, {"tool_call_id": "b"}, {"task": "t"}]
    plain, *others = [read(json.dumps(result | more).encode()) for more in ({}, *added, *changed)]
    assert [other.digest == plain.digest for other in others] == [True] * 3 + [False] * 4
    assert [other.exact == plain.exact for other in others] == [False, False, True] + [False] * 4

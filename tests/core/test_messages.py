"""The differences that canonical rules accept, by name, and those that they do not: one table for `digest` and `judge`."""

import json
import math

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.core.settings import MANY
from tokencache.core.messages import BLANK, Message, ToolCall, canonical_arguments, digest
from tokencache.core.verdict import judge


def said(content=None, reasoning=None, *calls, parts=False, **more):
    return Message("assistant", content, reasoning, tuple(ToolCall(*c) if isinstance(c, tuple) else c for c in calls), parts=parts, **more)


def calls(arguments, name="bash", id="call_1"):  # noqa: A002
    return said(None, None, (id, name, arguments))


ONE = [
    # what was served, what came back, the rules it takes
    ("verbatim", said("hi", "r", ("a", "b", "{}")), said("hi", "r", ("a", "b", "{}")), ()),
    ("null is blank", said(None), said(""), ("content-shape",)),
    ("blank is null", said(" \n\t"), said(None), ("content-shape",)),
    ("blank is empty", said("\n"), said(""), ("content-shape",)),
    ("a list of parts", said("hi"), said("hi", parts=True), ("content-shape",)),
    ("an empty list", said(""), said(None, parts=True), ("content-shape",)),
    ("trimmed", said("\n\nhi \n"), said("hi"), ("whitespace",)),
    ("trimmed by JavaScript", said("\ufeffhi\u2028"), said("hi"), ("whitespace",)),
    ("trimmed by Python", said("\xa0hi\u3000\x1f\x85"), said("hi"), ("whitespace",)),
    ("parts and trimmed", said(" hi"), said("hi", parts=True), ("content-shape", "whitespace")),
    ("key order", calls('{"a": 1, "b": {"d": 1, "c": 2}}'), calls('{"b": {"c": 2, "d": 1}, "a": 1}'), ("args-json",)),
    ("spacing", calls('{"a": [1, 2]}'), calls('{\n  "a":[1,2]}'), ("args-json",)),
    ("escapes", calls('{"a": "\u00e9 \U0001f600"}'), calls('{"a": "\\u00e9 \\ud83d\\ude00"}'), ("args-json",)),
    ("escaped solidus", calls('{"a": "a\\/b"}'), calls('{"a": "a/b"}'), ("args-json",)),
    ("a number without its point", calls('{"a": 10000.0}'), calls('{"a": 10000}'), ("args-json",)),
    ("a number with exponent", calls('{"a": 1e4, "b": 1.50}'), calls('{"a": 10000, "b": 1.5}'), ("args-json",)),
    ("negative zero", calls('{"a": -0.0}'), calls('{"a": 0}'), ("args-json",)),
    ("a double's digits", calls('{"a": 12345678901234567890}'), calls('{"a": 12345678901234567000}'), ("args-json",)),
    ("beyond 64 bits", calls('{"a": 123456789012345678901234567890}'), calls('{"a": 1.2345678901234568e29}'), ("args-json",)),
    ("last duplicate wins", calls('{"a": 1, "a": 2}'), calls('{"a": 2}'), ("args-json",)),
    ("no arguments", calls(""), calls("{}"), ("args-json",)),
    ("blank arguments", calls(" \n"), calls("{ }"), ("args-json",)),
    ("lone surrogate", calls('{"a": "\\ud83d!"}'), calls('{"a": "\ufffd!"}'), ("args-json",)),
    ("lone surrogate as key", calls('{"\\udc00": 1}'), calls('{"\ufffd": 1}'), ("args-json",)),
    ("NaN", calls('{"a":NaN}'), calls('{ "a": NaN }'), ("args-json",)),
    ("too big for a double", calls('{"a":1e400}'), calls('{ "a": 1e400 }'), ("args-json",)),
    ("too small for a double", calls('{"a":1e-999999999}'), calls('{"a":0}'), ("args-json",)),
    ("invalid, verbatim", calls('{"a": "cu'), calls('{"a": "cu'), ()),
    ("inline, from the side", said("hi", "why"), said("<think>\nwhy\n</think>\n\nhi"), ("inline-think",)),
    ("inline, to the side", said("<think>why</think>hi"), said("hi", "why"), ("inline-think",)),
    ("inline, alone", said(None, "why"), said("<think>why</think>"), ("content-shape", "inline-think")),
    ("inline, spaced", said("<think>why</think>hi"), said("<think>\nwhy\n</think>\nhi"), ("whitespace",)),
    ("inline, cut", said("<think>why</think>hi"), said("hi"), ("inline-think", "reasoning-dropped")),
    ("reasoning dropped", said("hi", "why"), said("hi"), ("reasoning-dropped",)),
    ("reasoning emptied", said("hi", "why"), said("hi", ""), ("reasoning-dropped",)),
    ("reasoning trimmed", said("hi", " why\n"), said("hi", "why"), ("whitespace",)),
    ("empty reasoning added", said("hi"), said("hi", ""), ()),
    ("blank reasoning dropped", said("hi", "   "), said("hi"), ()),
    ("two thoughts, one dropped", said("<think>q</think>hi", "why"), said("<think>q</think>hi"), ("reasoning-dropped",)),
    ("two thoughts, one cut", said("<think>q</think>hi", "why"), said("hi", "why"), ("inline-think", "reasoning-dropped")),
    ("ids sanitised", calls("{}", id="functions.bash:0"), calls("{}", id="functions_bash_0"), ("tool-ids",)),
    ("ids renamed", calls("{}", id="call_1"), calls("{}", id="toolu_9"), ("tool-ids",)),
    ("media", said("see", media=b"[1]"), said("see", media=b"[1]"), ()),
]

OTHER = [
    ("text", said("hi"), said("ho")),
    ("text inside", said("a  b"), said("a b")),
    ("line ends inside", said("a\r\nb"), said("a\nb")),
    ("normal form", said("\u00e9"), said("e\u0301")),
    ("zero width joiner", said("<|im_end|>"), said("<\u200d|im_end|>")),
    ("case", said("Hi"), said("hi")),
    ("nothing and something", said(None), said(".")),
    ("(empty)", said(None, "why"), said("(empty)")),
    ("Qwen Code: another text beside a genuine call", calls("{}"), said("Got it. Thanks!", None, ("call_1", "bash", "{}"))),
    ("OpenCode: a call renamed", calls('{"a": 1}'), calls('{"tool": "bash", "error": "?"}', "invalid")),
    ("a call renamed only", calls("{}"), calls("{}", "invalid")),
    ("Claude Code: a directory stripped", calls('{"command": "cd /w && ls"}'), calls('{"command": "ls"}')),
    ("Claude Code: coerced", calls('{"timeout": "5000"}'), calls('{"timeout": 5000}')),
    ("Claude Code: a default added", calls('{"a": 1}'), calls('{"replace_all": false, "a": 1}')),
    ("a call dropped", said("hi", None, ("a", "b", "{}")), said("hi")),
    ("a call added", said("hi", None, ("a", "b", "{}")), said("hi", None, ("a", "b", "{}"), ("c", "b", "{}"))),
    ("calls swapped", said(None, None, ("a", "x", "{}"), ("b", "y", "{}")), said(None, None, ("b", "y", "{}"), ("a", "x", "{}"))),
    ("a value", calls('{"a": 1}'), calls('{"a": 2}')),
    ("a boolean is no number", calls('{"a": true}'), calls('{"a": 1}')),
    ("null is no zero", calls('{"a": null}'), calls('{"a": 0}')),
    ("null is not absent", calls('{"a": null}'), calls("{}")),
    ("text is no number", calls('{"a": "1"}'), calls('{"a": 1}')),
    ("list order", calls('{"a": [1, 2]}'), calls('{"a": [2, 1]}')),
    ("white space inside a value", calls('{"a": "x "}'), calls('{"a": "x"}')),
    ("null is no object", calls("null"), calls("{}")),
    ("encoded twice", calls('{"a": 1}'), calls('"{\\"a\\": 1}"')),
    ("invalid and repaired", calls('{"a": "cu'), calls('{"a": "cu"}')),
    ("invalid and emptied", calls('{"a": "cu'), calls("{}")),
    ("invalid and invalid", calls('{"a": "cu'), calls('{"a": "cut')),
    ("invalid, spaced", calls('{"a": "cu'), calls('{"a":"cu')),
    ("NaN is not null", calls('{"a": NaN}'), calls('{"a": null}')),
    ("infinities", calls('{"a": 1e400}'), calls('{"a": -1e400}')),
    ("a number that is no double, and its name", calls('{"a": 1e400}'), calls('{"a": "\\u0000number:inf"}')),
    ("two lone surrogates", calls('{"a": "\\ud800"}'), calls('{"a": "\\ud800\\ud800"}')),
    ("media", said("see", media=b"[1]"), said("see", media=b"[2]")),
    ("a think that is not at the beginning", said("hi <think>why</think>"), said("hi")),
    ("a think that never ends", said("<think>why"), said("why")),
]

LIES = [
    # the digest is silent on reasoning; the verdict is not
    ("other reasoning", said("hi", "why"), said("hi", "because")),
    ("reasoning from nowhere", said("hi"), said("hi", "why")),
    ("other reasoning inline", said("hi", "why"), said("<think>because</think>hi")),
    ("a part of it", said("hi", "why and how"), said("hi", "why")),
    ("one of two changed", said("<think>q</think>hi", "why"), said("<think>other</think>hi", "why")),
]


@pytest.mark.parametrize(("served", "echoed", "rules"), [row[1:] for row in ONE], ids=[row[0] for row in ONE])
def test_a_difference_is_accepted_by_name(served, echoed, rules):
    assert digest(served) == digest(echoed)
    verdict = judge(served, echoed)
    assert (verdict.kind, verdict.rules) == ("equivalent" if rules else "same", rules)


@pytest.mark.parametrize(("served", "echoed"), [row[1:] for row in OTHER], ids=[row[0] for row in OTHER])
def test_any_other_difference_is_refused(served, echoed):
    assert digest(served) != digest(echoed)
    verdict = judge(served, echoed)
    assert verdict.kind in {"rewritten", "foreign"}
    assert not verdict.supplied


@pytest.mark.parametrize(("served", "echoed"), [row[1:] for row in LIES], ids=[row[0] for row in LIES])
def test_other_reasoning_is_not_the_models_own(served, echoed):
    assert digest(served) == digest(echoed)
    assert judge(served, echoed)[:2] == ("rewritten", ())
    assert not judge(served, echoed).supplied


@pytest.mark.parametrize(
    ("ours", "theirs", "kept"),
    [
        *[("a", "a", True), ("f.b:0", "f_b_0", True), ("f_b_0", "f.b:0", False), ("a", "b", False), ("a", "", False)],
        ("chatcmpl-tool-b9b31a93f1b87adf", "chatcmpltoolb9b31a93f1b87adf", True),
        ("call_7d1e40aa", "call7d1e40aa", True),
        ("f.b:0", "fb0", False),
        ("f.b:10", "fb10", False),
        ("--", "", False),
    ],
)
def test_ids_are_kept_verbatim_or_sanitised(ours, theirs, kept):
    assert judge(calls("{}", id=ours), calls("{}", id=theirs)).ids_kept is kept


def test_ids_are_kept_only_if_all_are():
    two = said(None, None, ("a", "x", "{}"), ("b", "y", "{}"))
    assert not judge(two, said(None, None, ("a", "x", "{}"), ("c", "y", "{}"))).ids_kept
    dotted = said(None, None, ("a", "x", "{}"), ("b.1", "y", "{}"))
    assert not judge(dotted, said(None, None, ("c", "x", "{}"), ("b_1", "y", "{}"))).ids_kept


def test_roles_and_participants_count_and_names_of_tools_and_assistants_do_not():
    assert digest(Message("user", "x")) != digest(Message("system", "x"))
    assert digest(Message("user", "x", name="ann")) != digest(Message("user", "x", name="bob"))
    assert digest(Message("tool", "x", name="bash")) == digest(Message("tool", "x"))
    assert digest(Message("assistant", "x", name="coder")) == digest(Message("assistant", "x"))
    assert digest(Message("user", "<think>a</think>b")) != digest(Message("user", "b"))


def test_fields_cannot_run_into_each_other():
    assert digest(said("x", None, ("", "ab", "{}"))) != digest(said("xa", None, ("", "b", "{}")))
    assert digest(Message("user", "a", name="b")) != digest(Message("user", "b", name="a"))
    assert digest(Message("user", "4:who:1:b")) != digest(Message("user", "", name="b"))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000, "1" * 100_000, '{"a": ' + "1" * 5000 + "}"]
)
def test_hostile_arguments_are_kept_as_they_stand(text):
    assert digest(calls(text)) == digest(calls(text))
    assert digest(calls(text)) != digest(calls(text + " 1"))
    assert judge(calls(text), calls(text)).kind == "same"


def test_a_text_that_no_encoding_takes():
    assert digest(said("\ud800")) != digest(said("\ufffd"))
    assert digest(calls('{"a": "\ud800"}')) == digest(calls('{"a": "\ud800"}'))


scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4), max_leaves=12
)
objects = st.dictionaries(st.text(max_size=4), values, max_size=5)
blanks = st.text(alphabet=BLANK, max_size=4)


def shuffled(value, rng):
    """The same value as another program would write it: other key order, doubles for integers."""
    match value:
        case dict():
            items = [(key, shuffled(item, rng)) for key, item in value.items()]
            rng.shuffle(items)
            return dict(items)
        case list():
            return [shuffled(item, rng) for item in value]
        case bool() | None | str():
            return value
        case float() if value.is_integer() and rng.random() < 0.5:
            return int(value)
        case int() if rng.random() < 0.5:
            return float(value)
        case _:
            return value


@MANY
@given(objects, st.randoms(use_true_random=False), st.booleans(), st.sampled_from([None, 1]), blanks)
def test_arguments_count_by_value(value, rng, ascii_only, indent, blank):
    written = json.dumps(value, ensure_ascii=ascii_only)
    again = blank + json.dumps(shuffled(value, rng), ensure_ascii=not ascii_only, indent=indent)
    assert canonical_arguments(written) == canonical_arguments(again)
    assert judge(calls(written), calls(again)).supplied


def numbers_as_doubles(value):
    """Equal exactly where JSON values are, numbers compared as doubles."""
    match value:
        case dict():
            return ("object", frozenset((key, numbers_as_doubles(item)) for key, item in value.items()))
        case list():
            return ("array", tuple(map(numbers_as_doubles, value)))
        case bool() | None | str():
            return (type(value).__name__, value)
        case _:
            return ("number", float(value))


@MANY
@given(objects, objects)
def test_arguments_of_other_value_differ(a, b):
    same = numbers_as_doubles(a) == numbers_as_doubles(b)
    assert (canonical_arguments(json.dumps(a)) == canonical_arguments(json.dumps(b))) is same


@MANY
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_text_for_arguments_equals_itself_and_no_crash(a, b):
    assert canonical_arguments(a) == canonical_arguments(a)
    if canonical_arguments(a) == canonical_arguments(b) and a != b:
        blank = {text.strip(BLANK) or "{}" for text in (a, b)}
        assert len({repr(json.loads(text)) for text in blank}) == 1 or all(_number(text) for text in blank)


def _number(text):
    value = json.loads(text)
    return isinstance(value, int | float) and not math.isnan(value)


messages = st.builds(
    said,
    st.none() | st.text(max_size=6) | st.sampled_from(["<think>a</think>b", " <think></think>"]),
    st.none() | st.text(max_size=4),
    *[st.builds(ToolCall, st.text(max_size=4), st.sampled_from("xy"), st.sampled_from(["", "{}", '{"a":1}', '{"a": 1.0}', '{"a":2}', "{"]))]
    * 2,
    parts=st.booleans(),
)


@MANY
@given(messages, messages)
def test_verdict_and_digest_agree(served, echoed):
    """What is the same to `judge` has one digest; what has one digest and yet is refused has other reasoning."""
    verdict = judge(served, echoed)
    if verdict.supplied:
        assert digest(served) == digest(echoed)
    elif digest(served) == digest(echoed):
        assert judge(served, msgspec.structs.replace(echoed, reasoning=None, content=echoed.text)).supplied


@MANY
@given(messages, blanks, blanks)
def test_white_space_around_a_reply_and_silence_on_reasoning_change_no_digest(message, before, after):
    assume("<think>" not in (message.content or ""))
    echoed = msgspec.structs.replace(message, content=before + (message.content or "") + after, reasoning=None)
    assert digest(echoed) == digest(message)
    assert judge(message, echoed).supplied


@MANY
@given(messages, messages)
def test_a_digest_covers_the_text_and_the_calls(a, b):
    def says(m):
        return m.text, [(c.name, canonical_arguments(c.arguments)) for c in m.calls]

    assert (digest(a) == digest(b)) is (says(a) == says(b))

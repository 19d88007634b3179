"""Every rule accepts exactly its change: a table of served messages, what came back, and the nearest change that is refused."""

import json
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.core.settings import MANY
from tokencache.core.messages import Message, ToolCall, digest
from tokencache.core.rules import RULES, Leniency, expected_rewritings, explain_call, register, rewritings
from tokencache.core.rules.truncated_json import NotTruncatedJsonError, complete_json
from tokencache.core.verdict import judge

HARNESS_RULES = frozenset(rule.name for rule in RULES.values() if rule.kind == "harness")
OFFERED = frozenset({"bash", "read", "Read", "terminal"})
ALL = Leniency(harness_rules=HARNESS_RULES, tools=OFFERED)


def said(content=None, reasoning=None, *calls):
    return Message("assistant", content, reasoning, tuple(ToolCall(*c) for c in calls))


def call(arguments, name="bash", id="call_1"):  # noqa: A002
    return said(None, None, (id, name, arguments if isinstance(arguments, str) else json.dumps(arguments)))


def bash(command, **more):
    return call({"command": command, **more}, "Bash")


def calls(*each):
    return said(None, None, *[(id, name, *(rest or ("{}",))) for id, name, *rest in each])  # noqa: A001


RANDOM = ("call_1a2b3c4d", "bash", '{"a": 1}')
CUT = '{"command": "ls -1 && echo cu'
LISTED = "Calling tools:\n[{'id': 'call_1', 'type': 'function', 'function': {'name': 'bash', 'arguments': {'a': 1}}}]"
LS = ("ls", "{}")
LISTED_BY_ID = "Calling tools:\n" + str(
    [{"id": name, "type": "function", "function": {"name": "ls", "arguments": {}}} for name in ("a", "b")]
)
KEY = "sk-proj-0123456789abcdef"

REWRITES = [
    # rule, served, echoed, nearest that it does not forgive
    ("cd-prefix", bash("cd /w && ls -1"), bash("ls -1"), bash("ls")),
    ("cd-prefix", bash("cd '/my dir' && ls"), bash("ls"), bash("cd '/my && ls")),
    ("cd-prefix", bash("cd /w && cd x && ls"), bash("cd x && ls"), bash("ls")),
    ("cd-prefix", bash(r"cd /my\ dir && ls"), bash("ls"), bash("dir && ls")),
    ("cd-prefix", call({"command": "cd /w && ls"}, "Bash"), bash("ls"), call({"command": "ls"}, "Shell")),
    ("coerced-values", bash("x", timeout="5000"), bash("x", timeout=5000), bash("x", timeout=500)),
    ("coerced-values", bash("x", timeout="5e3"), bash("x", timeout=5000), bash("x", timeout="5000")),
    ("coerced-values", bash("x", b="false"), bash("x", b=False), bash("x", b=0)),
    ("coerced-values", call({"a": "1", "b": "2"}, "Read"), call({"a": 1, "b": "2"}, "Read"), call({"a": 1, "b": 3}, "Read")),
    ("coerced-values", bash("x", n="1"), bash("x", n=1), bash("x", n=True)),
    ("coerced-values", bash("x", n=" 1"), None, bash("x", n=1)),
    ("trailing-blanks", call({"content": "a  \nb\t\n"}), call({"content": "a\nb\n"}), call({"content": "a\nb"})),
    ("trailing-blanks", call({"content": "a  "}), call({"content": "a"}), call({"content": " a"})),
    ("trailing-blanks", call({"text": "a  "}), None, call({"text": "a"})),
    ("default-inserted", call({"a": 1}, "Edit"), call({"replace_all": False, "a": 1}, "Edit"), call({"replace_all": True, "a": 1}, "Edit")),
    ("default-inserted", call({"a": 1}, "Write"), None, call({"replace_all": False, "a": 1}, "Write")),
    ("default-inserted", call({"a": 1, "replace_all": True}, "Edit"), None, call({"a": 1, "replace_all": False}, "Edit")),
    ("default-inserted", call({"a": 1, "b": 2}, "Edit"), None, call({"a": 1, "replace_all": False}, "Edit")),
    (
        "unparsed-input",
        call('{"a": "\U0001f600'),
        call({"__unparsedToolInput": {"raw": '{"a": "\U0001f600', "len": 9}}),
        call({"__unparsedToolInput": {"raw": '{"a": "\U0001f600', "len": 8}}),
    ),
    ("unparsed-input", call("{}"), None, call({"__unparsedToolInput": {"raw": "{}", "len": 2}})),
    ("secrets-masked", said(f"the key is {KEY}."), said("the key is sk-pro...cdef."), said("the key is sk-pro...cdee.")),
    ("secrets-masked", said("ghp_0123456789"), said("***"), said("ghp_01...6789")),
    ("secrets-masked", said("a sk-y day"), None, said("a *** day")),
    ("markup-removed", said("hi <think>a</think>there"), said("hi there"), said("hi")),
    ("markup-removed", said("hi\n<tool_call>{}</tool_call>\n"), said("hi"), said("hi <tool_call>")),
    ("markup-removed", said("hi <tool>{}</tool>"), None, said("hi")),
    ("empty-marker", said(None, "why"), said("(empty)"), said("[empty]")),
    ("empty-marker", said("\n"), said("(empty)"), said("()")),
    ("empty-marker", said("hi"), None, said("(empty)")),
    ("empty-marker", call("{}"), None, said("(empty)")),
    ("blank-marked", said(" \n"), said("[blank text]"), said("[blank]")),
    ("blank-marked", said(" ", "why"), said("[blank text]"), said("[blank text] ", None, ("call_1", "bash", "{}"))),
    ("blank-marked", said("hi"), None, said("[blank text]")),
    ("blank-marked", call("{}"), None, said("[blank text]")),
    ("name-replaced", call("{}", "run it"), call("{ }", "INVALID_TOOL_NAME"), call("{}", "INVALID_TOOL")),
    ("name-replaced", call({"a": 1}, "a.b"), call({"a": 1}, "INVALID_TOOL_NAME"), call({"a": 2}, "INVALID_TOOL_NAME")),
    ("name-replaced", call("{}", "n" * 65), call("{}", "INVALID_TOOL_NAME"), call("{}", "n" * 64)),
    ("name-replaced", call("{}", "n" * 64), None, call("{}", "INVALID_TOOL_NAME")),
    ("invalid-tool", call("{", "bsh"), call({"tool": "bsh", "error": "?"}, "invalid"), call({"tool": "bash", "error": "?"}, "invalid")),
    ("invalid-tool", call("{}", "bsh"), call({"tool": "bsh", "error": "?"}, "invalid"), call({"tool": "bsh", "error": "?"}, "broken")),
    ("invalid-tool", call("{}", "b"), None, call({"tool": "b", "error": "?", "a": 1}, "invalid")),
    ("name-lowered", call({"a": 1}, "Bash"), call({"a": 1}), call({"a": 2})),
    ("name-lowered", call("{}", "BASH"), call("{}"), call("{}", "Bash")),
    ("name-lowered", call("{}", "bsh"), None, call("{}")),
    ("name-lowered", call("{}", "Edit"), None, call("{}", "edit")),
    ("name-lowered", call("{}", "Read"), None, call("{}", "read")),
    ("name-lowered", call("{}"), None, call("{}", "Bash")),
    ("name-aliased", call("{}", "execute_bash"), call("{}", "terminal"), call("{}")),
    ("name-aliased", call("{}"), None, call("{}", "terminal")),
    ("name-aliased", call("{}", "str_replace"), None, call("{}", "file_editor")),
    ("null-dropped", call({"a": 1, "b": None}), call({"a": 1}), call({"b": None})),
    ("null-dropped", call({"a": 1, "b": ""}), None, call({"a": 1})),
    ("null-dropped", call({"a": {"b": None}}), None, call({"a": {}})),
    ("string-decoded", call({"a": "[1, 2]"}), call({"a": [1, 2]}), call({"a": [1]})),
    ("string-decoded", call({"a": "5"}), None, call({"a": 5})),
    ("string-decoded", call({"a": '{"b": 1} x'}), None, call({"a": {"b": 1}})),
    ("value-wrapped", call("[1]"), call({"value": [1]}), call({"value": [2]})),
    ("value-wrapped", call('"{}"'), call({"value": "{}"}), call({"value": {}})),
    ("value-wrapped", call("null"), call({"value": None}), call("{}")),
    ("value-wrapped", call('{"a": 1}'), None, call({"value": {"a": 1}})),
    ("value-wrapped", call("[1"), None, call({"value": [1]})),
    ("null-emptied", call("null"), call("{}"), call({"value": None})),
    ("null-emptied", call("[]"), None, call("{}")),
    ("repeated-dropped", calls(("a", "x"), ("b", "x")), calls(("a", "x")), calls(("b", "x"))),
    ("repeated-dropped", calls(("a", "x"), ("b", "y"), ("c", "x")), calls(("a", "x"), ("b", "y")), calls(("a", "x"))),
    ("repeated-dropped", calls(("a", "x"), ("b", "x", "{ }")), None, calls(("a", "x"))),
    ("text-dropped", said("Hm.", None, RANDOM), said(None, None, RANDOM), said("H", None, RANDOM)),
    ("text-dropped", said("Hm.", None, RANDOM), said("", None, RANDOM), said(None, None, ("call_1a2b3c4d", "bash", '{"a":1}'))),
    ("text-dropped", said("Hm.", None, RANDOM), said(" ", None, RANDOM), said(None, None, ("call_1a2b3c4e", "bash", '{"a": 1}'))),
    ("text-dropped", said("Hm.", None, ("call_1", "bash", "{}")), None, said(None, None, ("call_1", "bash", "{}"))),
    ("args-repaired", call(CUT), call({"command": "ls -1 && echo cu"}), call({"command": "ls -1 && echo cut"})),
    ("args-repaired", call('{"a": [1, {"b": "x\\'), call({"a": [1, {"b": "x"}]}), call({"a": [1]})),
    ("args-repaired", call('{"a": 1, "b": tr'), call({"a": 1}), call({"a": 1, "b": True})),
    ("args-repaired", call('{"a": 1, "b"'), call({"a": 1}), call({"a": 1, "b": None})),
    ("args-repaired", call('{"a": x, "b": "c'), None, call({"b": "c"})),
    ("args-emptied", call(CUT), call("{}"), call('{"command": ""}')),
    ("args-emptied", call('{"a": 1}'), None, call("{}")),
    ("invalid-json-wrapped", call(CUT), call({"INVALID_JSON": CUT}), call({"INVALID_JSON": CUT + "t"})),
    ("invalid-json-wrapped", call('{"a": 1}'), None, call({"INVALID_JSON": '{"a": 1}'})),
    (
        "malformed-wrapped",
        call(CUT),
        call({"_openhands_malformed_tool_call": True, "error": "?"}),
        call({"_openhands_malformed_tool_call": 1, "error": "?"}),
    ),
    ("malformed-wrapped", call(""), call({"_openhands_malformed_tool_call": True, "error": "?"}), call({"error": "?"})),
    ("malformed-wrapped", call('{"a": 1}'), None, call({"_openhands_malformed_tool_call": True, "error": "?"})),
    ("marker-broken", said("a <|im_end|>"), said("a <\u200d|im_end|>"), said("a <|\u200dim_end|>")),
    ("marker-broken", call({"a": "<|im_end|>"}), call({"a": "<\u200d|im_end|>"}), call({"a": "<\u200b|im_end|>"})),
    ("marker-broken", said("<| a |>"), None, said("<\u200d| a |>")),
    (
        "calls-as-text",
        said("Hm ", None, ("call_1", "bash", '{"a":1}')),
        said("Hm\n" + LISTED),
        said("Hm\n" + LISTED.replace("1}", "2}")),
    ),
    ("calls-as-text", said(None, None, ("call_1", "bash", '{"a":1}')), said(LISTED), said(LISTED.replace("call_1", "call_2"))),
    ("calls-as-text", said(None, None, ("b", *LS), ("a", *LS)), said(LISTED_BY_ID), said(LISTED_BY_ID.replace("'a'", "'c'"))),
    ("reasoning-emptied", said("hi", "why"), said("hi", ""), said("hi", "wh")),
]

COMPOSED = [
    (
        {"cd-prefix", "coerced-values", "default-inserted"},
        said(None, None, ("a", "Bash", '{"command": "cd /w && ls", "timeout": "5"}'), ("b", "Edit", '{"x": 1}')),
        said(None, None, ("a", "Bash", '{"timeout": 5, "command": "ls"}'), ("b", "Edit", '{"replace_all": false, "x": 1.0}')),
    ),
    (
        {"name-lowered", "repeated-dropped", "args-json"},
        calls(("a", "Bash"), ("b", "bash"), ("c", "BASH", '{"x": 1}')),
        calls(("a", "bash"), ("c", "bash", '{"x":1.0}')),
    ),
    (
        {"name-aliased", "null-dropped", "string-decoded"},
        calls(("a", "execute", '{"cmd": "ls", "env": "{\\"A\\": 1}", "timeout": null}')),
        calls(("a", "terminal", '{"cmd": "ls", "env": {"A": 1}}')),
    ),
    (
        {"name-lowered", "invalid-tool"},
        calls(("a", "Bash"), ("b", "bsh")),
        calls(("a", "bash"), ("b", "invalid", '{"tool": "bsh", "error": "?"}')),
    ),
    ({"text-dropped", "reasoning-dropped"}, said("Hm.", "why", RANDOM), said(None, None, RANDOM)),
    ({"markup-removed", "secrets-masked"}, said(f"{KEY}<tool_call>x</tool_call>"), said("sk-pro...cdef")),
    ({"marker-broken", "whitespace"}, said(" <|x|>"), said("<\u200d|x|>")),
    (
        {"cd-prefix", "reasoning-dropped"},
        said(" x", "why", ("a", "Bash", '{"command": "cd /w && ls"}')),
        said(" x", None, ("a", "Bash", '{"command": "ls"}')),
    ),
]

NEVER = [
    (
        "Qwen Code: another text beside a genuine call",
        said(None, "r", ("a", "bash", "{}")),
        said("Got it. Thanks for the additional context!", None, ("a", "bash", "{}")),
    ),
    ("an id of ours, another tool", call("{}"), call("{}", "edit")),
    ("an id of ours, another value", call({"a": 1}), call({"a": 2})),
    ("one of two calls", calls(("a", "x"), ("b", "y")), calls(("a", "x"))),
    ("a rule for one member, none for the other", bash("cd /w && ls", b=1), bash("ls", b=2)),
    ("the summary of a compaction", said("hi"), said("hi, in short")),
]


@pytest.mark.parametrize(("rule", "served", "echoed", "beyond"), REWRITES, ids=[f"{n}-{row[0]}" for n, row in enumerate(REWRITES)])
def test_a_harness_rule_accepts_exactly_its_change(rule, served, echoed, beyond):
    vouched = Leniency(harness_rules=frozenset({rule}), tools=OFFERED)
    if echoed is not None:
        verdict = judge(served, echoed, vouched)
        assert (verdict.kind, verdict.supplied) == ("rewritten", True)
        assert set(verdict.rules) - {"reasoning-dropped", "whitespace"} == {rule}
        if rule != "reasoning-emptied":  # without it, the reasoning is dropped, like any other's
            for other in (
                Leniency(tools=OFFERED),
                Leniency(harness_rules=HARNESS_RULES - {rule}, tools=OFFERED),
                Leniency(harness_rules=HARNESS_RULES, off=frozenset({rule}), tools=OFFERED),
            ):
                refused = judge(served, echoed, other)
                assert (refused.supplied, refused.kind) in {(False, "rewritten"), (True, "rewritten")}
                assert rule not in refused.rules or not refused.supplied
            assert judge(served, echoed, Leniency(tools=OFFERED)).rules
            assert not judge(served, echoed).supplied
    assert not judge(served, beyond, vouched).supplied


@pytest.mark.parametrize(("rules", "served", "echoed"), COMPOSED)
def test_rules_compose_field_by_field(rules, served, echoed):
    verdict = judge(served, echoed, ALL)
    assert verdict.supplied
    assert rules <= set(verdict.rules)
    for rule in rules:
        assert not judge(served, echoed, Leniency(frozenset({rule}), HARNESS_RULES, OFFERED)).supplied


@pytest.mark.parametrize(("served", "echoed"), [row[1:] for row in NEVER], ids=[row[0] for row in NEVER])
def test_a_difference_without_a_rule_is_refused(served, echoed):
    verdict = judge(served, echoed, ALL)
    assert (verdict.kind, verdict.supplied) == ("foreign", False)
    assert verdict.ids_kept is bool({c.id for c in served.calls} & {c.id for c in echoed.calls})


def test_who_changes_a_value_must_keep_the_id():
    served, echoed = bash("cd /w && ls"), bash("ls")
    renamed = said(None, None, ("x", "Bash", echoed.calls[0].arguments))
    assert judge(served, echoed, ALL).supplied
    assert not judge(served, renamed, ALL).supplied
    assert judge(call("{}", id="f.b:0"), call("{ }", id="f_b_0"), ALL).supplied


@pytest.mark.parametrize(
    ("rule", "served", "echoed"),
    [
        ("content-shape", said(None), said("")),
        ("whitespace", said("hi "), said("hi")),
        ("args-json", call('{"a":1}'), call('{"a": 1.0}')),
        ("inline-think", said("hi", "why"), said("<think>why</think>hi")),
        ("reasoning-dropped", said("hi", "why"), said("hi")),
        ("tool-ids", call("{}", id="a.b"), call("{}", id="a_b")),
    ],
)
def test_a_canonical_rule_can_be_switched_off(rule, served, echoed):
    assert judge(served, echoed)[:2] == ("equivalent", (rule,))
    refused = judge(served, echoed, Leniency(off=frozenset({rule})))
    assert refused[:2] == ("rewritten", (rule,))
    assert not refused.supplied
    assert judge(served, served, Leniency(off=frozenset(RULES))).kind == "same"


@pytest.mark.parametrize(
    ("served", "returned"),
    [
        ('{"patch": "x"}', '{"patch": "x"}'),
        ("{}", "{}"),
        ('{"input": 5}', '{"input": 5}'),
        ('["x"]', '["x"]'),
        ("*** Begin \ud800", "*** Begin \ufffd"),
        ('{"input": "cut', '{"input": "cut'),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"input": "x", "why": 1}', None),
    ],
)
def test_arguments_of_a_custom_tool_return_as_its_input(served, returned):
    ours = call(served, "patch")
    for text in ("", "x", served + " ", "a"):
        assert not judge(ours, call({"input": text}, "patch")).supplied
    if returned is not None:
        verdict = judge(ours, call({"input": returned}, "patch"))
        assert (verdict.kind, verdict.rules, verdict.supplied) == ("rewritten", ("input-as-served",), True)
        for other in (call({"input": returned}, "other"), call({"input": returned, "more": 1}, "patch"), call({"text": returned}, "patch")):
            assert not judge(ours, other).supplied
        assert not judge(ours, call({"input": returned}, "patch", "call_2")).supplied


def test_of_two_explanations_the_one_that_is_vouched_for_counts():
    served, echoed = call("{"), call("{}")  # emptied, or closed
    for rule in ("args-emptied", "args-repaired"):
        assert judge(served, echoed, Leniency(harness_rules=frozenset({rule}))).rules == (rule,)


def test_every_rule_is_defined_once_and_has_a_harness_and_a_source():
    with pytest.raises(ValueError, match="defined twice"):
        register(RULES["whitespace"])
    assert all(rule.harnesses and rule.what and rule.source for rule in RULES.values())
    tried = {row[0] for row in REWRITES}
    assert tried == HARNESS_RULES
    assert {rule.name for rule in RULES.values() if rule.kind == "canonical"} == {
        *("content-shape", "whitespace", "args-json", "inline-think", "reasoning-dropped", "tool-ids"),
        *("interrupted", "stop-restored", "words-added", "input-as-served", "calls-hidden"),
    }
    for rule in RULES.values():
        assert Leniency().allows(rule.name) is (rule.kind != "harness")
        assert not Leniency(frozenset({rule.name}), HARNESS_RULES).allows(rule.name)


def test_the_predicted_text_is_what_comes_back():
    served = said(f"{KEY} <tool_call>x</tool_call>")
    assert expected_rewritings(served, Leniency()) == []
    hermes = Leniency(harness_rules=frozenset({"secrets-masked", "markup-removed", "empty-marker"}))
    assert said("sk-pro...cdef") in expected_rewritings(served, hermes)
    assert expected_rewritings(said("nothing to change"), hermes) == []
    assert [m.content for m in expected_rewritings(said(None, "why"), hermes)] == ["(empty)"]
    assert all(judge(served, told, hermes).supplied for told in expected_rewritings(served, hermes))


texts = st.text(alphabet="ab <>|/_\n", max_size=12) | st.sampled_from([KEY, "<|x|>", "<think>a</think>b", "(empty)", "<code>x", ""])


@MANY
@given(texts, texts)
def test_a_text_is_accepted_only_if_the_rules_make_it(a, b):
    served, echoed = said(a), said(b)
    expected = {message.text for _, message in rewritings(served)} | {served.text}
    supplied = judge(served, echoed, ALL).supplied
    assert digest(echoed) is not None
    if echoed.thought:  # other reasoning than the model's is refused, whatever the text
        assert not supplied or echoed.text in expected
    else:
        assert supplied is (echoed.text in expected)


values = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4), lambda v: st.lists(v, max_size=3), max_leaves=4)
objects = st.dictionaries(st.sampled_from(["command", "content", "timeout", "replace_all", "x"]), values, max_size=4)


@MANY
@given(objects, objects, st.sampled_from(["Bash", "Edit", "x"]))
def test_other_arguments_are_explained_by_their_members_or_not_at_all(a, b, name):
    ours, theirs = ToolCall("i", name, json.dumps(a)), ToolCall("i", name, json.dumps(b))
    for rules in explain_call(ours, theirs):
        for member in a.keys() | b.keys():
            if member not in a:
                assert (name, member, b[member]) == ("Edit", "replace_all", False)
            elif member not in b:
                assert a[member] is None
            elif a[member] != b[member]:
                assert rules
                assert isinstance(a[member], str)


@MANY
@given(objects, st.integers(1, 60))
def test_what_is_repaired_was_sampled(value, cut):
    text = json.dumps(value, ensure_ascii=False)
    assume(cut < len(text))
    head = text[: len(text) - cut]
    try:
        found = complete_json(head)
    except NotTruncatedJsonError:
        assert head == ""
        return
    assert begins(found, value)


def begins(head, whole):
    match whole:
        case dict():
            return all(name in whole and begins(member, whole[name]) for name, member in head.items())
        case list():
            return len(head) <= len(whole) and all(map(begins, head, whole))
        case str():
            return whole.startswith(head)
        case _:
            return head == whole


def test_hostile_beginnings_are_no_objects():
    for text in ("", "[1", "{" * 100_000, '{"a":' * 5_000, '{"a": "' + "x" * 100_000, "{" + "}" * 10, '{"a": 1,, "b": 2', '{"a": 1} x'):
        try:
            complete_json(text)
        except NotTruncatedJsonError:
            continue
        assert text.startswith(('{"a": "x', '{"a":'))


def test_similarity_never_counts():
    rng = random.Random(1)
    words = ["ls", "cd /w && ls", "5", 5, "a  \n", "", "<|x|>", None, False, "false"]
    for _ in range(3000):
        served = call({"command": rng.choice(words), "content": rng.choice(words)}, "Bash")
        echoed = call({"command": rng.choice(words), "content": rng.choice(words)}, "Bash")
        verdict = judge(served, echoed, ALL)
        if verdict.supplied and verdict.kind == "rewritten":
            assert not judge(served, echoed, Leniency()).supplied
            assert set(verdict.rules) <= {"cd-prefix", "coerced-values", "trailing-blanks", "marker-broken", "args-json"}

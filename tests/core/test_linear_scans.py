"""Each scan that replaced a quadratic search finds the same: compared with the plain definition, which tries every place."""

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.core.settings import MANY
from tokencache.core.chain import build_conversation
from tokencache.core.messages import BLANK, Message, ToolCall, inline_end
from tokencache.core.rules import RULES, STRICT, Leniency, rewritings
from tokencache.core.rules.truncated_json import NotTruncatedJsonError, complete_json
from tokencache.core.turn import Turn
from tokencache.core.verdict import Cut, bare_id, delivered_prefix, is_unique, judge, keeps_id, may_be_delivered, pack_cuts

HARNESS_RULES = frozenset(rule.name for rule in RULES.values() if rule.kind == "harness")
ALL = Leniency(harness_rules=HARNESS_RULES)


def said(content=None, reasoning=None, *calls):
    return Message("assistant", content, reasoning, calls)


ends = st.text("ab1-\n", max_size=6)
names = st.builds(lambda scheme, drawn, end: scheme + drawn + end, ends, st.text("a1", min_size=6, max_size=10), ends)
RANDOM = re.compile(r"[0-9A-Za-z]{8,}$")


@MANY
@given(names, names)
@example("11111111\n", "11111111")
def test_the_random_end_of_an_id(ours, theirs):
    one, other = RANDOM.search(ours), RANDOM.search(theirs)
    assert is_unique(ours) is (one is not None and any(map(str.isdigit, one[0])))
    same = one is not None and other is not None and ours[: one.start()] == theirs[: other.start()] and len(one[0]) == len(other[0])
    bare = bare_id(ours[: one.start()]) if one else ""
    same |= bool(bare) and theirs.isalnum() and theirs.startswith(bare) and len(theirs) == len(bare) + len(one[0])
    verdict = judge(said(None, None, ToolCall(ours, "x", "{}")), said(None, None, ToolCall(theirs, "x", "{}")))
    assert (verdict.kind == "foreign") is (same and not keeps_id(ours, theirs))


@MANY
@given(st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "a", "<", "\n"]), max_size=10).map("".join))
def test_the_markup_in_a_text(text):
    plain = re.sub(r"(?s)<(think|tool_call)>.*?</\1>", "", text).strip(BLANK)
    assert RULES["markup-removed"].rewrites_text(text) == plain


@MANY
@given(st.text(" \tab\n", max_size=12))
def test_the_ends_of_lines(text):
    assert RULES["trailing-blanks"].explains_member("Write", "content", text, re.sub(r"[ \t]+(?=\n|$)", "", text))


@MANY
@given(st.lists(st.sampled_from(["<think>a</think>", "sk-proj-0123456789abcdef", "<|x|>", "<code>", "b", "\n"]), max_size=6).map("".join))
def test_rules_for_texts_together(text):
    served = said(text)
    rules = sorted((rule for rule in RULES.values() if rule.rewrites_text is not None), key=lambda rule: rule.order)
    every: dict[tuple[str, ...], str] = {}
    for chosen in range(1, 2 ** len(rules)):
        used, changed, alike = [rule for n, rule in enumerate(rules) if chosen >> n & 1], served.text, bool(served.text)
        for rule in used:
            before, changed = changed, rule.rewrites_text(changed)
            alike = alike and changed != before
        if alike:
            every[tuple(rule.name for rule in used)] = changed
    found = [(names, form.content) for names, form in rewritings(served) if not RULES[names[0]].rewrites_reply or form.calls or served.text]
    assert dict(found) == every
    assert [len(names) for names, _ in found] == sorted(len(names) for names, _ in found)


HALF_ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?")
HALF_MEMBER = re.compile(r""",?\s*(?:"(?:[^"\\]|\\.)*+(?:\\|"\s*:?\s*)?)?(?:[-+.\w]*)?""", re.DOTALL)


def closing_of(text):
    stack, quoted, at = [], False, 0
    while at < len(text):
        char = text[at]
        if quoted:
            at += char == "\\"
            quoted = char != '"'
        elif char == '"':
            quoted = True
        elif char in "[{":
            stack.append("]" if char == "[" else "}")
        elif char in "]}" and (not stack or stack.pop() != char):
            return ""
        at += 1
    return ('"' if quoted else "") + "".join(reversed(stack))


def completed(text):
    """Try every end, the last one first."""
    text = text.rstrip()
    for end in range(len(text), max(0, len(text) - 256), -1):
        closing = closing_of(text[:end])
        half = HALF_ESCAPE if closing[:1] == '"' else HALF_MEMBER
        if not closing or (end < len(text) and not half.fullmatch(text, end)):
            continue
        try:
            value = json.loads(text[:end] + closing)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return None


PIECES = [
    '{"a":',
    "{",
    "}",
    "[",
    "]",
    '"',
    '"k":',
    '"v"',
    ",",
    ":",
    " ",
    "\u00a0",
    "1",
    "12.",
    "1e",
    "-",
    "tru",
    "true",
    "NaN",
    "\\",
    "\\u1",
    "x",
    "0",
]


@MANY
@given(st.lists(st.sampled_from(PIECES), max_size=9), st.sampled_from([0, 0, 0, 250, 256]))
def test_the_end_of_truncated_json(pieces, repeated):
    text = '{"a":' + "".join(pieces) + "y" * repeated
    try:
        found = complete_json(text)
    except NotTruncatedJsonError:
        found = None
    assert repr(found) == repr(completed(text))


TEXTS = st.lists(st.sampled_from(["<think>", "</think>", " ", "\n", "Hi", "H", "."]), max_size=7).map("".join)


@MANY
@given(TEXTS, TEXTS, st.integers(0, 20), st.booleans(), st.booleans())
def test_the_part_of_a_reply_that_was_received(content, reasoning, length, in_text, exact):
    cuts = [Cut(n, n + 1, 0, n + 1) for n in range(len(reasoning))] + [Cut(n, n + 1, n + 1, len(reasoning)) for n in range(len(content))]
    served = said(content or None, reasoning or None)
    turn = Turn(id="t", call="c", match="root", served=served, messages=1, marks=("aborted",), cuts=pack_cuts(cuts))
    whole = content if in_text else reasoning
    part = whole[:length] if exact else whole[:length].strip()
    echoed = said(part or None, reasoning or None) if in_text else said(None, part or None)
    beginnings = [(cut, said(content[: cut.content] or None, reasoning[: cut.reasoning] or None)) for cut in cuts]
    if echoed.text:
        alike = [(cut, one) for cut, one in beginnings if cut.content and one.text == echoed.text]
    else:
        alike = [
            (cut, one) for cut, one in beginnings if not cut.content and cut.reasoning and not one.text and one.thought == echoed.thought
        ]
    if echoed.text or echoed.thought:
        assert may_be_delivered(turn, echoed) is bool(alike)
    else:
        alike = []
        silent = any(not one.text or cut.content <= inline_end(content) for cut, one in beginnings)  # a harness may hide its thinking
        assert may_be_delivered(turn, echoed) is (silent or not cuts)
    member = "content" if echoed.text else "reasoning"
    sure = [(cut, one) for cut, one in alike if getattr(one, member) == getattr(echoed, member)] or alike
    found = delivered_prefix(turn, echoed, STRICT)
    if len(sure) == 1 and judge(sure[0][1], echoed).supplied:
        assert found is not None
        assert (found.after, found.text) == (sure[0][0].after, getattr(sure[0][1], member))
    else:
        assert found is None


def test_a_result_answers_the_first_call_with_its_id():
    def end(names, answers):
        history = [said(None, None, *(ToolCall(name, "x", "{}") for name in names)), Message("tool", "ok", answers=answers)]
        return build_conversation(b"", history, exacts=[b"", b""]).chain[-1]

    assert len({end("aba", answers) for answers in "abc"}) == 3
    assert [end("aba", answers) for answers in "abc"] == [end("pqp", answers) for answers in "pqc"]
    assert end("aba", "a") != end("baa", "a")


@pytest.mark.parametrize("digits", [4000, 5000, 50_000])
def test_a_number_that_python_does_not_convert_is_another_value(digits):
    served, echoed = (said(None, None, ToolCall("a", "Read", json.dumps({"n": value}))) for value in ("1" * digits, 5))
    assert judge(served, echoed, ALL).kind == "foreign"

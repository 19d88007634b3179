"""The matcher that counts steps finds what `re` finds, and its checker finds expressions that take too many."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.regex_steps import KINDS, Steps, too_many_steps

PATTERNS = (
    *(r"a*b", r"(a|b)*?c", r"<(x|y)>.*?</\1>", r"(?<![ab])a{2,}+(?![b-])", r"[^\"\\]++\"|\\.", r"(?:ab?)*$"),
    *(r"\d+(?:\.\d+)?", r"^\s*+<", "(?>a+)b", r"(a)?b\Z"),
)
QUADRATIC = (
    ("search", r"(?s)\"(?:[^\"\\]++|\\.)*+(?:\"|\Z)"),  # a backslash at the end: the search begins again at each quote
    ("search", r"[0-9A-Za-z]{8,}$"),  # a call's id
    ("search", r"(?s)<(think|tool_call)>.*?</\1>"),
    ("search", r"[ \t]+(?=\n|$)"),
    ("search", r"[ \t]++(?=\n|$)"),  # possessive, but the search begins again at each blank
    ("match", r",?\s*(?:\"k\"\s*:?\s*)?x"),
    ("match", r"\s*\s*x"),
    ("match", r"(?:a+)+\""),
    ("fullmatch", r"(?:a|aa)*b"),
    ("search", r"\"(?:[^\"\\]|\\.)*\"\Z"),
)
LINEAR = (
    ("search", r"(?<![ \t])[ \t]++(?=\n|$)"),
    ("match", r"(\s*+)<think>(.*?)</think>"),
    ("search", r"(?s)\"(?:[^\"\\]++|\\.)*+(?:\"|\\?\Z)"),
    ("search", r"<(?=\|[^<]{1,64}\|>)"),
)


def test_there_are_27_kinds():
    assert len({*KINDS}) == 27


@pytest.mark.parametrize("written", PATTERNS)
@given(text=st.text('abxy<>/\\" -1.\n', max_size=12))
def test_it_finds_what_re_finds(written, text):
    pattern = re.compile(written)
    assert Steps(pattern).search(text) == [found.span() for found in _scan(pattern, text)]
    assert Steps(pattern).match(text) == (found.end() if (found := pattern.match(text)) else None)
    assert (Steps(pattern).fullmatch(text) is None) is (pattern.fullmatch(text) is None)


def _scan(pattern, text):
    at = 0
    while at <= len(text) and (found := pattern.search(text, at)):
        yield found
        at = max(found.end(), found.start() + 1)


@pytest.mark.parametrize(("how", "written"), QUADRATIC)
def test_too_many_steps_are_found(how, written):
    assert too_many_steps(re.compile(written), how, n=20)


@pytest.mark.parametrize(("how", "written"), LINEAR)
def test_a_linear_expression_is_not_reported(how, written):
    assert not too_many_steps(re.compile(written), how, n=100)

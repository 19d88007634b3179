"""One sentence for each turn says what changed in its request, compared with the turn that it could have continued."""

import pytest

from tests.trajectories.rollouts import TOOLS, Talk, result, system, user
from tokencache.core.context import whole_contexts
from tokencache.trajectories.changes import Comparisons

CLOCK, LATER = system("You are careful. It is 13:40:01 in Oslo."), system("You are careful. It is 13:41:07 in Oslo.")
CALL = [("call_1a2b3c4d", "bash", '{"cmd": "ls -la", "timeout": 5}')]


def said(talk, turn=-1):
    """The sentence about a turn."""
    records = talk.records()
    return str(Comparisons(records.turns, whole_contexts(records.turns, records.contexts)).all()[turn])


def started(served="Here is the first of many answers.", **more):
    """A conversation with one answer, and the messages that should come next."""
    talk = Talk()
    first = talk.call([CLOCK, user("Go.")], served, **more)
    return talk, [*talk.history(first), *([result("call_1a2b3c4d", "a.txt")] if more.get("calls") else [user("Next.")])]


def test_a_clock_in_the_system_prompt():
    talk, history = started()
    talk.call([LATER, *history[1:]], match="resplice")
    assert said(talk) == "compared with turn 0: message 0, system, differs: 13:40:01 → 13:41:07"


EDITS = {
    "words": ({}, lambda m: m | {"content": m["content"].replace("first", "1st")}, "differs: first → 1st"),
    "cut": ({}, lambda m: m | {"content": "Here is the first"}, "differs: first of many answers. → first"),
    "arguments": (
        {"calls": CALL},
        lambda m: m | {"tool_calls": [m["tool_calls"][0] | {"function": {"name": "bash", "arguments": '{"cmd": "pwd", "timeout": 5}'}}]},
        'arguments of call 1 (bash) differ: "ls -la", → "pwd",',
    ),
    "no calls": ({"calls": CALL}, lambda m: {**m, "tool_calls": []}, "has 0 calls in place of 1"),
    "reasoning": ({"reasoning": "I add."}, lambda m: m | {"reasoning_content": "I sum."}, "reasoning differs: add. → sum."),
    "another role": ({}, lambda m: user("So you said."), "user in place of assistant: Here is the first of many answers. → So you said."),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_reply(edit):
    more, change, words = EDITS[edit]
    talk, history = started(**more)
    talk.call([*history[:2], change(history[2]), *history[3:]], match="plain")
    assert said(talk) == f"compared with turn 0: message 2, {'' if edit == 'another role' else 'assistant, '}{words}"


def test_a_reply_that_came_back_in_another_form_did_not_change():
    talk, history = started(" Two words.\n", reasoning="I see.", calls=CALL)
    talk.call(history, after="t0")
    assert said(talk) == "compared with turn 0: 1 new message: tool"


def test_the_compared_turn_is_the_one_with_the_deepest_message_in_common():
    talk, history = started()
    second = talk.call(history, "The second answer.", after="t0")
    helper = talk.call([system("You only read."), user("Where?")], "There.")
    assert said(talk) == "no earlier request has one of these messages in its place"
    talk.call([LATER, *talk.history(second)[1:], user("And then?")], "Third.", match="resplice")
    assert said(talk) == "compared with turn 1: message 0, system, differs: 13:40:01 → 13:41:07"
    talk.call([*talk.history(helper)[:2], {"role": "assistant", "content": "Here."}, user("Sure?")], match="plain")
    assert said(talk) == "compared with turn 2: message 2, assistant, differs: There. → Here."


def test_a_branch_is_compared_with_the_other_turn():
    talk, history = started()
    talk.call(history, "One.", after="t0")
    talk.call(history, "Two.", after="t0")
    assert [said(talk, 1), said(talk, 2)] == ["compared with turn 2: the same messages", "compared with turn 1: the same messages"]
    talk.call([*history[:3], user("Another.")], "Three.", after="t0", match="branch")
    assert said(talk) == "compared with turn 1: message 3, user, differs: Next. → Another."
    talk.call(history[:2], "Four.")
    assert said(talk) == "compared with turn 0: the same messages"


def test_other_tools_and_messages_that_are_gone():
    talk, history = started(tools=TOOLS)
    second = talk.call(history, "Two.", after="t0", tools=TOOLS)
    talk.call([*talk.history(second), user("More.")], "Three.", after=second, tools=TOOLS)
    talk.call(history[:3], "Again.", match="plain")
    assert said(talk) == "compared with turn 1: the tools differ: without bash; ends before its message 3"


def test_texts_are_short_and_stay_in_one_line():
    talk, history = started("a\nb " + "word " * 5000)
    talk.call([*history[:2], {"role": "assistant", "content": "a\nc " + "other\n" * 5000}, user("Next.")], match="plain")
    assert len(said(talk)) < 250
    assert "\n" not in said(talk)
    assert said(talk).startswith("compared with turn 0: message 2, assistant, differs: b word word")


def test_requests_that_are_not_kept_are_not_compared():
    talk = Talk()
    talk.call([user("Go.")], "One.", kept=False)
    talk.call([user("Go."), {"role": "assistant", "content": "1."}, user("On.")], match="plain")
    assert [said(talk, 0), said(talk, 1)] == ["the messages are not kept", "no earlier request has one of these messages in its place"]

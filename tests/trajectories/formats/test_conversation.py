"""The messages of a sequence: each one once, and none that is not stored."""

import msgspec
import pytest

from tests.trajectories.rollouts import ROLLOUTS, TASK, TOOLS, Talk, of_forest, result, rollout, system, torn, user
from tokencache.core.context import Context, Raw
from tokencache.trajectories.formats.conversation import exchanges, tools_of


def heard(sequence, contexts):
    return [None if one.messages is None else [(m.role, m.content) for m in one.messages] for one in exchanges(sequence, contexts)]


def replaced(made, turn, messages):
    raw = [Raw(m if isinstance(m, bytes) else msgspec.json.encode(m)) for m in messages]
    return {**made.contexts, turn: Context(raw)}


def test_each_message_occurs_once_and_replies_are_not_repeated():
    made = ROLLOUTS["linear"]
    assert heard(made.sequences[0], made.contexts) == [
        [("system", "You write code."), ("user", "How many lines has a.py?")],
        [("tool", "wc: a.py: no such file")],
        [("tool", "b.py"), ("tool", "/src")],
    ]
    assert tools_of(made.sequences[0], made.contexts) == TOOLS


def test_a_branch_has_all_messages_before_it():
    made = ROLLOUTS["thrown-away"]
    away = next(s for s in made.sequences if s.start == "branch")
    assert heard(away, made.contexts) == [
        [("system", "You write code."), ("user", "How many lines has a.py?"), ("assistant", None), ("tool", "12 a.py")]
    ]


def test_the_answer_is_what_was_served_not_what_the_harness_sent_back():
    made = ROLLOUTS["linear"]
    assert [one.turn.served.calls[0].arguments for one in exchanges(made.sequences[0], made.contexts)[:2]] == [
        '{"cmd":"wc -l a.py"}',
        '{"cmd":"ls"}',
    ]


def test_messages_that_are_not_kept_are_none():
    made = ROLLOUTS["media"]
    assert heard(made.sequences[0], made.contexts) == [None]
    assert heard(made.sequences[1], made.contexts) != [None]


def test_torn_records_have_no_messages():
    for sequence in torn().sequences:
        assert set(heard(sequence, {})) == {None}


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [b'{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}'],
        [b'{"role":"critic","content":"No."}'],
        [b'{"content":"by nobody"}'],
        [b'{"role":"user","content":7}'],
        [b'{"role":"user","content":"\\ud800"}'],
        [b"[" * 10_000 + b"]" * 10_000],
    ],
    ids=["none", "media", "another-role", "no-role", "no-text", "half-a-character", "too-deep"],
)
def test_a_request_with_unreadable_messages_is_none(messages):
    made = ROLLOUTS["linear"]
    assert heard(made.sequences[0], replaced(made, "t0", messages))[0] is None


@pytest.mark.parametrize("messages", [TASK, [*TASK, user("Well?"), user("Well?")], TASK[:1]], ids=["no-reply", "another", "shorter"])
def test_a_request_without_the_reply_before_it_is_none(messages):
    made = ROLLOUTS["linear"]
    assert heard(made.sequences[0], replaced(made, "t1", messages))[1] is None


def test_a_request_after_one_that_is_not_kept_is_none():
    made = ROLLOUTS["linear"]
    contexts = {turn: context for turn, context in made.contexts.items() if turn != "t1"}
    assert heard(made.sequences[0], contexts)[1:] == [None, None]


def test_shapes_of_chat_messages():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    said = [{"role": "developer", "content": parts}, user("?"), {"role": "assistant", "content": None}, result("c0", None)]
    made = ROLLOUTS["unrecognized"]
    assert heard(made.sequences[0], replaced(made, "t0", said)) == [
        [("system", "one\ntwo"), ("user", "?"), ("assistant", None), ("tool", None)]
    ]


def test_no_tools_if_none_are_known():
    talk = Talk()
    talk.call([system("x")], "y")
    for made in (rollout(talk.records()), of_forest(talk)):
        assert tools_of(made.sequences[0], made.contexts) == []

"""What a parser dropped is found, and nothing else is claimed: replies that vLLM 0.32's own parsers read (`lost_text.json`).

`tests/system/e2e/test_lost_text.py` reads the same replies with the parsers themselves. `rendering` is what a template of such a model
makes of the sample conversation.
"""

import json
from pathlib import Path

import pytest

from tokencache.core.lost_text import LostText, find_lost_text, markup_of
from tokencache.core.messages import Message, ToolCall

PARSERS = json.loads(Path(__file__).with_name("lost_text.json").read_text(encoding="utf-8"))
REPLIES = [(parser, kind, mode) for parser, known in PARSERS.items() for kind in known["replies"] for mode in ("whole", "stream")]
HERMES = markup_of(PARSERS["hermes"]["rendering"])


def message(content=None, *calls, reasoning=None):
    return Message("assistant", content, reasoning, tuple(ToolCall("id", *call) for call in calls))


@pytest.mark.parametrize(("parser", "kind", "mode"), REPLIES)
def test_replies_of_real_parsers(parser, kind, mode):
    known = PARSERS[parser]
    reply = known["replies"][kind]
    content, calls = reply[mode]
    found = find_lost_text(reply["text"], message(content, *calls), markup_of(known["rendering"]))
    assert (found.unknown or list(found.texts)) == reply["lost"][mode]


def hermes(arguments):
    return f'I look.\n<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("sampled", "delivered"),
    [
        ('{"cmd":"caf\\u00e9 \\"x\\"\\n"}', '{"cmd": "café \\"x\\"\\n"}'),
        ('{"n": 5e3, "on": true, "of": null}', '{"n": 5000.0, "on": true, "of": null}'),
        ('{"list": [1, {"deep": ""}]}', '{"list": [1, {"deep": ""}]}'),
        ("{}", "{}"),
    ],
)
def test_another_form_of_the_same_value_is_no_loss(sampled, delivered):
    assert find_lost_text(hermes(sampled), message("I look.", ("bash", delivered)), HERMES) == LostText()


@pytest.mark.parametrize(
    "served",
    [
        message("I look.", ("bash", '{"cmd": "pwd"}')),
        message("I look.", ("read", '{"cmd": "ls"}')),
        message("I look closely.", ("bash", '{"cmd": "ls"}')),
        message("I look.", ("bash", '{"cmd": "ls"}'), ("bash", '{"cmd": "ls"}')),
    ],
)
def test_nothing_is_claimed_if_something_was_delivered_that_was_not_sampled(served):
    found = find_lost_text(hermes('{"cmd": "ls"}') + "\nMore.", served, HERMES)
    assert found == LostText(unknown="other-text")


def test_nothing_is_claimed_of_calls_in_an_unknown_form():
    markup = markup_of("qsampleuser qsampletext")
    assert find_lost_text(hermes('{"cmd": "ls"}'), message("I look.", ("bash", '{"cmd": "ls"}')), markup).unknown == "unknown-markup"
    assert find_lost_text("I look. Well.", message("I look."), markup).texts == ("Well.",)


def test_a_thought_counts_if_part_of_it_was_delivered():
    """A request may hide the whole thought; then it was not dropped by a parser."""
    sampled = "<think>\nFirst. Second.\n</think>\n\nI look."
    assert find_lost_text(sampled, message("I look.", reasoning="First."), HERMES).texts == ("Second.",)
    assert find_lost_text(sampled, message("I look."), HERMES) == LostText()
    assert find_lost_text(sampled + " More.", message("I look."), HERMES).texts == ("More.",)


def test_words_of_a_call_in_the_text_before_it_stay_apart():
    sampled = "Use bash to ls, or not.\n" + hermes('{"cmd": "ls"}')
    assert find_lost_text(sampled, message("I look.", ("bash", '{"cmd": "ls"}')), HERMES).texts == ("Use bash to ls, or not.",)


def test_long_replies_are_compared():
    text = " ".join(f"word{n}" for n in range(20_000))
    found = find_lost_text(
        f"{text}\n{hermes(json.dumps({'cmd': text}))}\nlate", message(text + "\nI look.", ("bash", json.dumps({"cmd": text}))), HERMES
    )
    assert found.texts == ("late",)

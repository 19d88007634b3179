"""Assistant messages that the client wrote itself cost full renderings once, not with every question; and what changes is seen."""

import pytest

from tests.engine.template.more_kinds import ALL_KINDS
from tests.system.adversary.test_found import SYSTEM, Talk, result, user
from tokencache.engine.template import edited

THOUGHT = "Secretly so."
EXAMPLE = {"role": "assistant", "content": "Like this.", "reasoning": THOUGHT}
REWRITES = ("Qwen3", "GLM-4.5", "Nemotron-3", "Qwen3.5 think")
"""Templates that show the reasoning of a message only after the last question."""
EDITS = ("gpt-oss", "Mistral-7B v0.3")
"""Templates that change the prompt with every question: one replaces the end of the last reply, one moves the system prompt."""


def full_renderings(talk):
    return talk.stack._model.edited_histories._template.renders["full"]


async def questions(talk, number, words="Answer"):
    """Ask this often; returns the matches with their reasons, and the full renderings of each call."""
    matches, renderings = [], []
    for n in range(number):
        before = full_renderings(talk)
        talk.hear(user(f"And {n}?"))
        called = await talk.ask(f"{words} {n}.")
        matches.append((called.plan.match, called.plan.reason))
        renderings.append(full_renderings(talk) - before)
        assert talk.written(called).count(THOUGHT) == called.text().count(THOUGHT)
    return matches, renderings


async def talk_with(template, *history):
    talk = Talk(template, *history)
    await talk.ask("First.")
    return talk


@pytest.mark.parametrize("template", [name for name in ALL_KINDS if name not in EDITS])
async def test_questions_after_an_example_are_proven_once(template):
    example = {name: value for name, value in EXAMPLE.items() if name != "reasoning" or template in REWRITES}
    talk = await talk_with(template, SYSTEM, user("Like what?"), example, user("Look."))
    matches, renderings = await questions(talk, 5)
    assert set(matches) == {("continue", "")}
    assert renderings[0] > 0
    assert renderings[3:] == [0, 0]


@pytest.mark.parametrize("template", REWRITES)
async def test_a_message_that_the_next_question_rewrites_is_proven_again(template):
    call = {"id": "chatcmpl-tool-11112222", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    talk = await talk_with(template, SYSTEM, user("Look."), {**EXAMPLE, "tool_calls": [call]}, result(call["id"]))
    fork = list(talk.history)
    for words in ("Answer", "Other answer"):  # the second time, a turn after the same parent has settled
        talk.history = list(fork)
        matches, _ = await questions(talk, 4, words)
        assert matches[0] == ("resplice", "past-changes")
        assert set(matches[1:]) == {("continue", "")}


async def test_another_message_of_the_clients_own_is_proven():
    talk = await talk_with("Qwen3", SYSTEM, user("Like what?"), EXAMPLE, user("Look."))
    await questions(talk, 4)
    talk.hear(user("Or that?"), {**EXAMPLE, "content": "Like that."})
    before = full_renderings(talk)
    await questions(talk, 1)
    assert full_renderings(talk) > before
    matches, renderings = await questions(talk, 4)
    assert set(matches) == {("continue", "")}
    assert renderings[0] > 0
    assert renderings[2:] == [0, 0]


@pytest.mark.parametrize(("limit", "value"), [("RECHECK_EVERY", 2), ("DEEPER", 1)])
async def test_a_settled_turn_is_proven_again_after_a_while(limit, value, monkeypatch):
    monkeypatch.setattr(edited, limit, value)
    talk = await talk_with("Qwen3", SYSTEM, user("Like what?"), EXAMPLE, user("Look."))
    matches, renderings = await questions(talk, 9)
    assert set(matches) == {("continue", "")}
    assert sum(map(bool, renderings[3:])) >= 2

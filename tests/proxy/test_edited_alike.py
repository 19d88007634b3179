"""Changes between two calls that the template does not show: proven by rendering, the prompt continues from the exact ids."""

import pytest

from tests.proxy.kit import TOOLS, echo, results, user

SYSTEM = {"role": "system", "content": "You lead."}


async def two_turns(rig, session="s", **first):
    """A system prompt, a question, two turns with calls; the history behind them."""
    history = [SYSTEM, user("EPISODE:demo")]
    for _ in range(2):
        said = await rig.say(session, history, tools=TOOLS, **first)
        history += [echo(said), *results(said)]
    return history


async def last_turn(rig, session="s"):
    turns = await rig.turns(session)
    return turns[-1], [turn["turn"] for turn in turns]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"chat_template_kwargs": {"effort": "low"}}, {"chat_template_kwargs": {"effort": "high"}}),
        ({}, {"reasoning_effort": "high"}),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {}),
    ],
)
async def test_template_arguments_without_effect_lose_nothing(rig, first, then):
    history = await two_turns(rig, **first)
    await rig.say("s", history, tools=TOOLS, **then)
    turn, known = await last_turn(rig)
    assert (turn["match"], turn["reason"], turn["parent"]) == ("continue", "rendered-alike", known[-2])
    exported = await rig.check()
    assert len(exported["sequences"]) == 1


async def test_the_next_call_needs_no_full_rendering(rig):
    history = await two_turns(rig)
    for _ in range(2):
        said = await rig.say("s", history, tools=TOOLS, reasoning_effort="high")
        history += [echo(said), *results(said)]
    turns = await rig.turns("s")
    assert [(turn["match"], turn["reason"]) for turn in turns[2:]] == [("continue", "rendered-alike"), ("continue", "")]
    await rig.check()


async def test_a_message_that_the_template_renders_alike_loses_nothing(rig):
    """Hermes leaves the names of tools out of their results when it resumes a session."""
    history = await two_turns(rig)
    named = [{**message, "name": "bash"} if message["role"] == "tool" else message for message in history]
    await rig.say("s", named, tools=TOOLS)
    turn, known = await last_turn(rig)
    assert (turn["match"], turn["reason"], turn["parent"]) == ("continue", "rendered-alike", known[-2])


@pytest.mark.parametrize("question", ["EPISODE:demo ", "EPISODE:demo\n"])
async def test_white_space_that_the_template_shows_is_another_context(rig, question):
    history = await two_turns(rig)
    await rig.say("s", [SYSTEM, user(question), *history[2:]], tools=TOOLS)
    turn, known = await last_turn(rig)
    assert (turn["match"], turn["reason"]) == ("resplice", "context-edited")
    assert [anchor["turn"] for anchor in turn["anchors"]] == known[:2], "the replies keep their exact ids"
    await rig.check()


async def test_other_reasoning_in_an_older_reply_is_not_hidden(rig):
    """The reply stands as the harness has it now; the one after it is still the model's."""
    history = await two_turns(rig)
    edited = [*history[:2], {**history[2], "reasoning": "I never thought so."}, *history[3:]]
    await rig.say("s", edited, tools=TOOLS)
    turn, known = await last_turn(rig)
    assert (turn["match"], [anchor["turn"] for anchor in turn["anchors"]]) == ("resplice", [known[1]])
    await rig.check()


async def test_the_reasoning_of_the_clients_own_example_is_context(rig):
    example = [user("Like this?"), {"role": "assistant", "content": "Like this.", "reasoning": "An example."}]
    history = [SYSTEM, *example, user("EPISODE:demo")]
    said = await rig.say("s", history, tools=TOOLS)
    history += [echo(said), *results(said)]
    await rig.say("s", history, tools=TOOLS)
    other = [SYSTEM, example[0], {**example[1], "reasoning": "Another."}, *history[3:]]
    await rig.say("s", other, tools=TOOLS)
    turns = await rig.turns("s")
    assert [turn["match"] for turn in turns[:2]] == ["plain", "continue"]
    assert turns[2]["reason"] in {"rendered-alike", "context-edited"}, "it was proven, whatever this template shows"
    await rig.check()


async def test_one_unusual_conversation_does_not_affect_other_sessions(rig):
    """A developer's message and a later system message become one in front: that is this conversation's, not the shape's."""
    odd = [{"role": "developer", "content": "You lead."}, user("EPISODE:talk")]
    said = await rig.say("odd", odd)
    await rig.say("odd", [*odd, echo(said), {"role": "system", "content": "Hurry."}, user("go on")])
    for n in range(3):
        history = [{"role": "system", "content": "You lead."}, user("EPISODE:talk")]
        for _ in range(3):
            said = await rig.say(f"s{n}", history)
            history += [echo(said), user("go on")]
        assert [turn["match"] for turn in await rig.turns(f"s{n}")] == ["root", "continue", "continue"]

"""Replies that come back as a harness understood them: with mended names, without repeated calls, or without the text beside calls."""

import json

import pytest

from tests.proxy.kit import TOOLS, proxied, results, user
from tokencache.testing import SimulatedEngine


def called(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


LIST, ECHO = '{"cmd": "ls  -la"}', '{"cmd": "echo \\u00e9"}'
EPISODES = {
    "names": [
        f"<think>\nLook.\n</think>\n\n{called('Bash', LIST)}",
        f"<think>\nMore.\n</think>\n\nHm.\n{called('BASH', ECHO)}\n{called('bash', LIST)}",
        "<think>\nOk.\n</think>\n\nDone.  ",
    ],
    "twice": [
        "<think>\nLook.\n</think>\n\nTwice.\n"
        + "\n".join([called("bash", LIST), called("Bash", LIST), called("bash", ECHO), called("bash", LIST)]),
        "<think>\nOk.\n</think>\n\nDone.",
    ],
    "text": [
        f"<think>\nx\n</think>\n\nLet me look.\n{called('bash', LIST)}\n{called('bash', ECHO)}",
        f"<think>\ny\n</think>\n\nOnce more.\n{called('bash', LIST)}",
        "<think>\nz\n</think>\n\nDone.",
    ],
}


def kept(message):
    """A served message as the harness stores it, without its reasoning."""
    return {name: value for name, value in message.items() if name in {"role", "content", "tool_calls"}}


def with_calls(message, change):
    calls = [{**call, "function": {**call["function"]}} for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": change(calls)} if calls else message


def lowered(message):
    def lower(calls):
        for call in calls:
            call["function"]["name"] = call["function"]["name"].lower()
        return calls

    return with_calls(message, lower)


def without_repeated(message):
    return with_calls(
        message, lambda calls: [call for n, call in enumerate(calls) if call["function"] not in [c["function"] for c in calls[:n]]]
    )


def textless(message):
    return {**message, "content": None} if message.get("tool_calls") else message


async def conversation(rig, episode, understood, harness="", turns=3, **more):
    """Run an episode in which the harness keeps what it `understood`; returns the recorded turns."""
    history = [user(f"EPISODE:{episode}")]
    at = {"url": f"{rig.url}/s/s" + (f"/h/{harness}" if harness else ""), "model": "sim", "tools": TOOLS} | more
    for _ in range(turns):
        message = kept(await rig.say("s", history, **at))
        echoed = understood(message)
        history += [*(echoed if isinstance(echoed, list) else [echoed]), *results(echoed if isinstance(echoed, dict) else message)]
    await rig.check()
    return await rig.turns()


def matches(turns):
    return [turn["match"] + ("/" + turn["reason"] if turn["reason"] else "") for turn in turns]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("harness", ["opencode", "hermes"])
async def test_calls_with_mended_names_stay_on_the_line(harness, stream):
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        turns = await conversation(rig, "names", lowered, harness, stream=stream)
        assert matches(turns) == ["root", "continue", "continue"]
        assert all("name-lowered" in turn["forgiven"] for turn in turns[1:])


def named(name):
    def change(calls):
        calls[0]["function"]["name"] = name
        return calls

    return lambda message: with_calls(message, change)


def with_another_value(message):
    def change(calls):
        calls[0]["function"]["arguments"] = json.dumps({"cmd": "ls -la"})
        return calls

    return with_calls(lowered(message), change)


EDIT = [*TOOLS, {"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {}}}}]
BOTH = [*TOOLS, {"type": "function", "function": {"name": "Bash", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    ("understood", "tools", "harness"),
    [
        pytest.param(named("edit"), EDIT, "opencode", id="another tool"),
        pytest.param(named("BASH"), TOOLS, "opencode", id="a name of no tool"),
        pytest.param(lowered, BOTH, "opencode", id="the served name is a tool"),
        pytest.param(lowered, EDIT[1:], "hermes", id="no tool of that name"),
        pytest.param(with_another_value, TOOLS, "opencode", id="another value, too"),
        pytest.param(lambda message: {**lowered(message), "content": "So."}, TOOLS, "hermes", id="another text, too"),
        pytest.param(lowered, TOOLS, "", id="an unknown harness"),
        pytest.param(lowered, TOOLS, "codex", id="a harness that does not mend"),
    ],
)
async def test_another_name_is_refused(understood, tools, harness):
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        turns = await conversation(rig, "names", understood, harness, turns=2, tools=tools)
        assert turns[1]["match"] == "plain"


async def test_a_repeated_call_that_hermes_drops_is_no_break():
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        turns = await conversation(rig, "twice", lambda message: without_repeated(lowered(message)), "hermes", turns=2)
        assert matches(turns) == ["root", "continue"]
        assert {"name-lowered", "repeated-dropped"} <= set(turns[1]["forgiven"])


@pytest.mark.parametrize(
    ("dropped", "harness"),
    [
        pytest.param(lambda calls: [calls[0], *calls[2:]], "hermes", id="a repeated call stays"),
        pytest.param(lambda calls: calls[:1], "hermes", id="a call that is not repeated"),
        pytest.param(lambda calls: calls[1:3], "hermes", id="not the first"),
        pytest.param(lambda calls: [calls[0], calls[2]], "opencode", id="a harness that keeps them"),
    ],
)
async def test_other_dropped_calls_are_refused(dropped, harness):
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        turns = await conversation(rig, "twice", lambda message: with_calls(lowered(message), dropped), harness, turns=2)
        assert turns[1]["match"] == "plain"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("harness", ["", "crewai"])
async def test_calls_without_the_text_beside_them_stay_on_the_line(harness, stream):
    """Also in a session of an unknown harness: calls as they were issued, under their ids, are this reply and no other."""
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        turns = await conversation(rig, "text", textless, harness, stream=stream)
        assert matches(turns) == ["root", "continue", "continue"]
        assert all("text-dropped" in turn["forgiven"] for turn in turns[1:])


def spelled_otherwise(calls):
    calls[0]["function"]["arguments"] = calls[0]["function"]["arguments"].replace(": ", ":")
    return calls


def under_another_id(calls):
    calls[0]["id"] = calls[0]["id"][:-4] + "0000"
    return calls


@pytest.mark.parametrize(
    ("understood", "harness"),
    [
        pytest.param(lambda message: {**message, "content": "Let me see."}, "crewai", id="replaced"),
        pytest.param(lambda message: {**message, "content": "Let me"}, "crewai", id="shortened"),
        pytest.param(lambda message: with_another_value(textless(message)), "crewai", id="a changed argument"),
        pytest.param(lambda message: with_calls(textless(message), spelled_otherwise), "crewai", id="arguments in other words"),
        pytest.param(lambda message: with_calls(textless(message), under_another_id), "crewai", id="another id"),
        pytest.param(lambda message: with_calls(textless(message), lambda calls: calls[:1]), "crewai", id="one call"),
        pytest.param(textless, "hermes", id="a harness that keeps text"),
        pytest.param(lambda message: [{"role": "assistant", "content": message["content"]}, textless(message)], "crewai", id="moved"),
    ],
)
async def test_another_text_beside_calls_is_refused(understood, harness):
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        turns = await conversation(rig, "text", understood, harness, turns=2)
        assert turns[1]["match"] == "plain"


async def test_the_rule_for_dropped_text_can_be_switched_off():
    async with proxied(SimulatedEngine(episodes=EPISODES), rules_off=("text-dropped",)) as rig:
        assert matches(await conversation(rig, "text", textless, turns=2))[1] == "plain/rewritten-reply"


async def test_a_reply_without_its_text_keeps_its_ids_in_an_edited_context():
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        message = await rig.say("s", [user("EPISODE:text")], tools=TOOLS)
        await rig.say("s", [user("EPISODE:text, in short"), textless(kept(message)), *results(message)], tools=TOOLS)
        turn = (await rig.turns())[-1]
        assert (turn["match"], turn["reason"], len(turn["anchors"])) == ("resplice", "context-edited", 1)
        await rig.check()

"""The harness of a request and its model aliases: named by key, path, header or User-Agent, and the rules that follow."""

import json
import sys

import pytest

from tests.proxy.kit import CHAT, HEADER, proxied, user
from tokencache.adapters.load import load_all
from tokencache.config import Settings
from tokencache.core.rules import Leniency
from tokencache.errors import HarnessError
from tokencache.proxy.harness_profile import HarnessProfiles, ModelAliases

KEYS = "/tokencache/v1/keys"
ASK = {"messages": [user("EPISODE:demo")]}


async def post(rig, path, body, **headers):
    async with rig.http.post(
        rig.url + path, json=body, headers={name.replace("_", "-"): value for name, value in headers.items()}
    ) as answer:
        return answer.status, json.loads(await answer.text())


def test_harness_specific_rules_apply_to_their_harness_only():
    habits = HarnessProfiles(load_all(), off=["cd-prefix"])
    assert habits.leniency("") == Leniency(frozenset({"cd-prefix"}), frozenset({"text-dropped"}))
    assert habits.leniency("openai") == habits.leniency(""), "any program with its client"
    claude = habits.leniency("claude-code")
    assert "coerced-values" in claude.harness_rules
    assert "cd-prefix" not in claude.harness_rules
    assert "cd-prefix" in claude.off
    with pytest.raises(HarnessError, match=r"no adapter 'nobody'; the adapters are .*claude-code"):
        habits.leniency("nobody")


@pytest.mark.parametrize(("agent", "harness"), [("claude-cli/2.1.329 (external, cli)", "claude-code"), ("curl/8.5.0", ""), ("", "")])
def test_a_harness_is_recognised_by_its_user_agent(agent, harness):
    assert HarnessProfiles(load_all()).recognise(agent) == harness


def test_a_long_user_agent_is_recognised_and_not_remembered():
    profiles, agent = HarnessProfiles(load_all()), f"claude-cli/2.1.329 {'x' * 60_000}"
    before = sys.getrefcount(agent)
    assert profiles.recognise(agent) == "claude-code"
    assert sys.getrefcount(agent) == before


async def test_an_unknown_harness_is_a_400(rig):
    for path, headers in ((f"/s/r1/h/nobody{CHAT}", {}), (CHAT, {HEADER: "r1", "X-Tokencache-Harness": "nobody"})):
        status, said = await post(rig, path, ASK, **headers)
        assert (status, said["error"]["param"]) == (400, "harness")
        assert "claude-code" in said["error"]["message"]
    assert (await post(rig, KEYS, {"session": "r1", "harness": "nobody"}))[0] == 400


async def test_a_key_names_the_harness_and_its_models(rig):
    status, made = await post(rig, KEYS, {"session": "r1", "harness": "codex", "models": {"gpt-*": "sim", "o?": "sim"}})
    assert (status, made["harness"], made["models"]) == (201, "codex", {"gpt-*": "sim", "o?": "sim"})
    bearer = f"Bearer {made['key']}"
    for model in ("gpt-5.5-codex", "o4", "sim"):
        assert (await post(rig, CHAT, {**ASK, "model": model}, Authorization=bearer))[0] == 200
        assert rig.engine.requests[-1]["model"] == "sim"
    status, said = await post(rig, CHAT, {**ASK, "model": "claude-x"}, Authorization=bearer)
    assert (status, "claude-x" in said["error"]["message"]) == (404, True)
    assert {turn["model"] for turn in await rig.turns("r1")} == {"sim"}


@pytest.mark.parametrize(
    "body", [{"session": ""}, {"session": 1}, {"session": "a", "models": []}, {"session": "a", "models": {"x": 1}}, [], "x"]
)
async def test_a_key_without_a_session_is_a_400(rig, body):
    status, said = await post(rig, KEYS, body)
    assert (status, said["error"]["type"]) == (400, "invalid_request_error")


async def test_the_server_has_model_aliases_too():
    async with proxied(model_aliases='{"claude-*": "sim"}') as rig:
        said = [await rig.say("s", ASK["messages"], model=model) for model in ("claude-opus-5", "claude-haiku-5", "sim")]
        assert all(message["content"] is not None for message in said)
        # One model under three names: a conversation begun under one goes on under another.
        history = [*ASK["messages"], {"role": "assistant", "content": said[0]["content"]}, user("go on")]
        if not said[0].get("tool_calls"):
            await rig.say("s", history, model="claude-other")
        assert {turn["model"] for turn in await rig.turns()} == {"sim"}


def test_the_sessions_own_aliases_come_first():
    aliases = ModelAliases({"*": "general", "x": "never"})
    assert [aliases.served(name, {"small-*": "tiny"}) for name in ("small-1", "x", "large")] == ["tiny", "general", "general"]
    assert ModelAliases({}).served("as it is", {}) == "as it is"


async def test_a_key_in_the_query_is_not_sent_to_the_engine(rig):
    status, _ = await post(rig, f"{CHAT}?key=tcs-r1&alt=sse", {**ASK, "model": "sim"})
    assert status == 200
    assert [turn["match"] for turn in await rig.turns("r1")] == ["root"]


async def test_an_alias_is_listed_as_a_model():
    """Claude Code asks for its model by name before it uses it, and takes no for an answer."""
    async with proxied(model_aliases='{"claude-*": "sim"}') as rig:
        for name, status in (("sim", 200), ("claude-opus-5", 200), ("gpt-5", 404)):
            for extra in ({}, {"anthropic-version": "2023-06-01"}):
                async with rig.http.get(f"{rig.url}/v1/models/{name}", headers={HEADER: "s", **extra}) as answer:
                    assert (answer.status, name in await answer.text()) == (status, True)


def test_an_unknown_rule_cannot_be_switched_off():
    with pytest.raises(ValueError, match=r"no such rule: cd-prefx; there are .*cd-prefix"):
        Settings(rules_off="tool-ids, cd-prefx")


async def test_a_rule_that_is_switched_off_does_not_apply():
    async with proxied(rules_off="reasoning-dropped") as rig:
        said = await rig.say("s", [user("EPISODE:talk")])
        for reasoning in (None, said["reasoning"]):
            await rig.say("s", [user("EPISODE:talk"), {**said, "reasoning": reasoning}, user("go on")])
        assert [(turn["match"], turn["reason"]) for turn in await rig.turns()][1:] == [("plain", "rewritten-reply"), ("continue", "")]

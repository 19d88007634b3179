"""Through the proxy to NeMo Gym's model server: the last assistant message carries the ids, and the tail is the engine's."""

import json
import logging

import pytest

from tests.proxy.kit import TOOLS, echo, results, user
from tests.system.nemo.agents import AGENTS, chat
from tests.system.nemo.kit import before_gym
from tests.system.nemo.test_nemo_rl import Changing, forgetful, shortened
from tests.system.nemo.worker import TOKEN_FIELDS

ASK = [user("EPISODE:demo")]
IN_ONE_LINE = ["root"] + ["continue"] * 3
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", AGENTS)
async def test_an_agent_with_tools(dialect, stream):
    async with before_gym() as (rig, gym):
        await AGENTS[dialect](rig, "s", 4, stream=stream)
        turns = await rig.turns()
        assert [turn["match"] for turn in turns] == IN_ONE_LINE
        assert [turn["reason"] for turn in turns[1:]] == ["tail-by-engine"] * 3
        assert [len(sequence["turns"]) for sequence in (await rig.check())["sequences"]] == [4]
        assert (await rig.info())["incidents"] == []
        for call, before in zip(gym.calls[1:], rig.ground_truth()[:-1], strict=True):
            *others, last = [message for message in call["messages"] if message["role"] == "assistant"]
            given = [last[name] for name in TOKEN_FIELDS]
            assert given == [before.prompt_ids, before.completion_ids, before.logprobs]
            assert not any(message.keys() & set(TOKEN_FIELDS) for message in others)
        assert not any("stream" in call for call in gym.calls)


async def test_the_detected_driver_and_level():
    async with before_gym() as (rig, _):
        (model,) = {model["model"]: model for model in (await rig.readiness())["engine"]["models"]}.values()
        assert (model["model"], model["level"], model["driver"], model["tokenizes"]) == ("sim", "exact", "nemo-gym", False)
        assert model["how"].startswith("the ids on the last assistant's message begin the prompt; its tail is the engine's")


async def test_members_that_gym_does_not_know_are_sent_in_its_metadata():
    own = {"extra_body": '{"min_p": 0.1, "repetition_penalty": 1.1}', "task": "t"}
    async with before_gym() as (rig, gym):
        await rig.say("s", ASK, metadata=own, top_k=7, min_p=0.2, chat_template_kwargs={"enable_thinking": False}, stop=None)
        (call,) = gym.calls
        metadata = call["metadata"]
        assert json.loads(metadata.pop("extra_body")) == {"min_p": 0.2, "repetition_penalty": 1.1, "top_k": -1}
        assert json.loads(metadata.pop("chat_template_kwargs")) == {"enable_thinking": False}
        assert metadata == {"task": "t"}
        assert (await rig.turns())[0]["replaced"] == {"temperature": None, "top_p": None, "top_k": 7}


async def test_an_edited_context_cannot_be_rendered_and_is_sent_plainly():
    async with before_gym() as (rig, gym):
        message = await rig.say("s", ASK, tools=TOOLS)
        history = [echo(message), *results(message)]
        await rig.say("s", [{"role": "system", "content": "It is ten."}, *ASK, *history], tools=TOOLS)
        assert [(turn["match"], turn["reason"]) for turn in await rig.turns()][1:] == [("plain", "no-rendering")]
        foreign = [{"role": "assistant", "content": "Nobody said this."}, user("And?")]
        await rig.say("s", [*ASK, *history, *foreign], tools=TOOLS)
        assert [(turn["match"], turn["reason"]) for turn in await rig.turns()][2:] == [("plain", "prefix-ends-before-last-reply")]
        assert not any(message.keys() & set(TOKEN_FIELDS) for call in gym.calls for message in call["messages"])
        await rig.check()


@pytest.mark.parametrize("otherwise", [forgetful, shortened])
async def test_a_prompt_that_does_not_begin_with_the_history_is_no_continuation(otherwise):
    async with before_gym(Changing) as (rig, gym):
        message = await rig.say("s", ASK, tools=TOOLS)
        gym.behind.otherwise = otherwise
        await rig.say("s", [*ASK, echo(message), *results(message)], tools=TOOLS)
        last = (await rig.turns())[-1]
        assert (last["match"], last["reason"], last["marks"]) == ("plain", "engine-disagrees", ["engine-disagrees"])
        await rig.check()


async def test_a_server_that_does_not_return_the_ids_is_logged_as_an_error(caplog):
    with caplog.at_level(logging.INFO):
        async with before_gym(gym={"return_token_id_information": False}) as (rig, _):
            await chat(rig, "s", 2, stream=True)
            info = await rig.info()
    assert (info["complete"], info["turns"]) == (False, 0)
    assert {(incident["kind"], incident["hole"]) for incident in info["incidents"]} == {("no-token-ids", True)}
    assert any(record.levelname == "ERROR" and "NOTHING IS RECORDED" in record.message for record in caplog.records)

"""Handles: the opaque member that a dialect makes the harness echo says which of our replies came back, and never what it says."""

import copy
import json

import pytest

from tests.proxy.kit import HEADER, proxied
from tokencache.testing import SimulatedEngine

EPISODES = {"talk": ["<think>\nI look first.\n</think>\n\nThe answer is twenty-seven.", "<think>\nok\n</think>\n\nYes."]}


class Messages:
    """Anthropic's: the handle is the thinking block's signature."""

    path = "/v1/messages"

    @staticmethod
    def body(said=None, follow="and?"):
        history = [{"role": "user", "content": "EPISODE:talk"}]
        if said:
            history += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": follow}]
        return {"model": "sim", "max_tokens": 99, "messages": history}

    @staticmethod
    def without_handle(said):
        for block in said["content"]:
            block.pop("signature", None)
        return said

    @staticmethod
    def with_other_words(said):
        said["content"][-1]["text"] = "The answer is twenty-eight."
        return said


class Responses:
    """OpenAI's: the handle is in the ids of the items."""

    path = "/v1/responses"

    @staticmethod
    def body(said=None, follow="and?"):
        history = [{"role": "user", "content": "EPISODE:talk"}]
        if said:
            history += [*said["output"], {"role": "user", "content": follow}]
        return {"model": "sim", "input": history, "store": False}

    @staticmethod
    def without_handle(said):
        for item in said["output"]:
            item.pop("id", None)
            item.pop("encrypted_content", None)
        return said

    @staticmethod
    def with_other_words(said):
        said["output"][-1]["content"][0]["text"] = "The answer is twenty-eight."
        return said


class Gemini:
    """Google's: the handle is the thought signature of the first text."""

    path = "/v1beta/models/sim:generateContent"

    @staticmethod
    def body(said=None, follow="and?"):
        history = [{"role": "user", "parts": [{"text": "EPISODE:talk"}]}]
        if said:
            history += [said["candidates"][0]["content"], {"role": "user", "parts": [{"text": follow}]}]
        return {"contents": history, "generationConfig": {"thinkingConfig": {"includeThoughts": True}}}

    @staticmethod
    def without_handle(said):
        for part in said["candidates"][0]["content"]["parts"]:
            part.pop("thoughtSignature", None)
        return said

    @staticmethod
    def with_other_words(said):
        said["candidates"][0]["content"]["parts"][-1]["text"] = "The answer is twenty-eight."
        return said


DIALECTS = [Messages, Responses, Gemini]


async def ask(rig, dialect, said=None, session="s"):
    async with rig.http.post(rig.url + dialect.path, json=dialect.body(said), headers={HEADER: session}) as answer:
        assert answer.status == 200, await answer.text()
        return json.loads(await answer.text())


@pytest.fixture
async def rig():
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=11, drift=0.6)) as made:
        yield made


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("which", [0, 1])
async def test_the_handle_identifies_one_of_two_replies_with_the_same_text(rig, dialect, which):
    said = [await ask(rig, dialect), await ask(rig, dialect)]
    await ask(rig, dialect, said[which])
    *tried, turn = await rig.turns()
    assert len({tuple(entry.completion_ids) for entry in rig.ground_truth()[:2]}) == len(said), "other tokens for the same words"
    assert (turn["match"], turn["parent"]) == ("continue", tried[which]["turn"])
    await rig.check()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_without_a_handle_the_reply_is_ambiguous(rig, dialect):
    said = [await ask(rig, dialect), await ask(rig, dialect)]
    await ask(rig, dialect, dialect.without_handle(copy.deepcopy(said[1])))
    turn = (await rig.turns())[-1]
    assert (turn["match"], turn["reason"]) == ("plain", "ambiguous-reply")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_without_a_handle_a_unique_text_is_sufficient(rig, dialect):
    await ask(rig, dialect, dialect.without_handle(await ask(rig, dialect)))
    assert (await rig.turns())[-1]["match"] == "continue"


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_beside_other_words_it_proves_nothing(rig, dialect):
    await ask(rig, dialect, dialect.with_other_words(await ask(rig, dialect)))
    turn = (await rig.turns())[-1]
    assert turn["match"] == "plain"
    assert turn["reason"] in {"rewritten-reply", "foreign-reply"}
    prompt = rig.engine.tokenizer.decode(rig.ground_truth()[-1].prompt_ids)
    assert "twenty-eight" in prompt


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_it_is_worth_nothing_in_another_session(rig, dialect):
    said = await ask(rig, dialect, session="s")
    await ask(rig, dialect, session="other")
    await ask(rig, dialect, said, session="other")
    turns = await rig.turns("other")
    assert [turn["match"] for turn in turns][-1] in {"continue", "plain"}
    own = rig.ground_truth("other")
    if turns[-1]["match"] == "continue":  # by its words, which were said here, too: in the tokens that were sampled here
        assert own[-1].prompt_ids[: len(own[0].prompt_ids) + len(own[0].completion_ids)] == own[0].prompt_ids + own[0].completion_ids
    await rig.check("other")

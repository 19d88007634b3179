"""Weight versions: whatever form an engine says them in, a turn has spans; a harness sees only what it asked for."""

import json

import pytest

from tests.proxy.kit import EPISODES, proxied, user
from tests.support.plugin_engine import PluginEngine

ASK = [user("EPISODE:talk")]
SHAPES = pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}], ids=["whole", "stream", "two"])


def engine(style):
    made = PluginEngine(episodes=EPISODES, seed=7, weight_versions=style)
    made.weights.label = "step-3"
    return made


@SHAPES
@pytest.mark.parametrize("style", ["spans", "header"])
async def test_one_version_is_one_span_of_every_turn(style, more):
    async with proxied(engine(style)) as rig:
        await rig.say("s", ASK, **more)
        turns = await rig.turns()
        assert len(turns) == more.get("n", 1)
        for turn in turns:
            assert turn["weight_versions"] == [{"version": "step-3", "start": 0, "end": turn["completion_tokens"]}]


async def test_weights_that_change_in_mid_reply_are_two_spans():
    made = engine("spans")

    def script(_):
        yield "Said by the old ones, "
        made.weights.label = "step-4"
        yield "and by the new."

    async with proxied(made) as rig:
        made.replies.script = script
        await rig.say("s", ASK, stream=True)
        ((turn,),) = [await rig.turns()]
    first, second = turn["weight_versions"]
    assert (first["version"], second["version"]) == ("step-3", "step-4")
    assert (first["start"], first["end"], second["end"]) == (0, second["start"], turn["completion_tokens"])
    assert 0 < first["end"] < turn["completion_tokens"]


async def test_members_of_the_reply_are_those_of_its_first_choice():
    """SGLang's `metadata` is that of the first choice; what sampled the second is not said."""
    async with proxied(engine("metadata")) as rig:
        await rig.say("s", ASK, n=2)
        first, second = await rig.turns()
        assert [span["version"] for span in first["weight_versions"]] == ["step-3"]
        assert second["weight_versions"] == []


@SHAPES
async def test_no_messages_is_an_empty_list(rig, more):
    await rig.say("s", ASK, **more)
    assert all(turn["weight_versions"] == [] for turn in await rig.turns())
    assert all(body["return_weight_versions"] is True for body in rig.engine.requests[-1:])  # a 0.32 passes over the question


@SHAPES
@pytest.mark.parametrize("all_else", [{}, {"return_token_ids": True, "logprobs": True}], ids=["", "ids"])
async def test_a_harness_sees_them_if_it_asked(more, all_else):
    async with proxied(engine("spans")) as rig:
        for asked in ({}, {"return_weight_versions": False}, {"return_weight_versions": True}):
            status, said = await rig.post("s", messages=ASK, **more, **all_else, **asked)
            assert status == 200
            assert ("weight_versions" in json.dumps(said)) == (asked == {"return_weight_versions": True})
            assert json.dumps(said).count("[DONE]") == 0
        assert all(turn["weight_versions"] for turn in await rig.turns())


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/completions"])
async def test_in_other_dialects(path):
    body = {"model": "sim", "max_tokens": 50}
    body |= {"/v1/messages": {"messages": ASK}, "/v1/responses": {"input": "hello"}, "/v1/completions": {"prompt": "hello"}}[path]
    body.pop("max_tokens") if path == "/v1/responses" else None
    async with proxied(engine("spans")) as rig:
        status, said = await rig.post("s", path, **body)
        assert (status, "step-3" in json.dumps(said)) == (200, False)
        (turn,) = await rig.turns()
        assert [span["version"] for span in turn["weight_versions"]] == ["step-3"]

"""`include_reasoning: false` also starts the grammar at the first token: so it does in a session, or the turn says that it does not."""

import pytest

from tests.images import image
from tests.proxy.kit import EPISODES, TOOLS, assembled, echo, proxied, user
from tests.proxy.test_images import EPISODES as SEEN
from tests.proxy.test_images import shown
from tests.support.plugin_engine import PluginEngine
from tokencache.engine.drivers import bound_replies
from tokencache.errors import EngineError
from tokencache.testing import SimulatedEngine

CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}}
BOUND = {
    "choice": CHOICE,
    "format": {"response_format": {"type": "json_object"}},
    "required": {"tools": TOOLS, "tool_choice": "required"},
}
FREE = {
    "shown": {**CHOICE, "include_reasoning": True},
    "text": {"response_format": {"type": "text"}, "include_reasoning": False},
    "tools": {"tools": TOOLS, "include_reasoning": False},
    "nothing": {"include_reasoning": False},
}
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def made(*, derenders):
    return SimulatedEngine(logprobs_mode="processed_logprobs", episodes=EPISODES, seed=7, derenders=derenders)


@STREAMS
@pytest.mark.parametrize("kind", BOUND)
async def test_the_grammar_starts_where_it_does_for_a_direct_client(kind, stream):
    async with proxied(made(derenders=True)) as rig:
        history = [user("EPISODE:demo")]
        for _ in range(2):
            rig.engine.generated.clear()
            asked = {"messages": history, "include_reasoning": False, "stream": stream, **BOUND[kind]}
            status, said = await rig.post(**asked)
            assert status == 200
            message = assembled(said) if stream else said["choices"][0]["message"]
            assert not message.get("reasoning")
            (sent,) = rig.engine.generated
            assert sent["reasoning_ended"] is True
            assert sent["sampling_params"]["structured_outputs"]
            history = [*history, echo(message), user("go on")]
        turns = await rig.turns()
        assert [(turn["match"], turn["marks"]) for turn in turns] == [("root", []), ("continue", [])]
        assert sent["token_ids"] == rig.engine.ground_truth[-1].prompt_ids
        assert (await rig.info())["complete"]


@STREAMS
async def test_where_the_engine_cannot_do_that_the_turn_says_so(stream):
    async with proxied(made(derenders=False)) as rig:
        await rig.say("s", [user("EPISODE:demo")], include_reasoning=False, stream=stream, **CHOICE)
        (turn,) = await rig.turns()
        assert turn["marks"] == ["late-grammar"]
        assert (await rig.info())["complete"]


@pytest.mark.parametrize("images", ["plugin", "stock"])
async def test_with_an_image_the_turn_says_so(images):
    """Also where the request goes to `generate` for its image: that one does not hide the reasoning."""
    async with proxied(PluginEngine(episodes=SEEN, seed=7, images=images, derenders=True)) as rig:
        history = [shown("EPISODE:see", image(0))]
        for _ in range(2):
            reply = await rig.say("s", history, include_reasoning=False, **CHOICE)
            history = [*history, echo(reply), user("go on")]
        assert all("late-grammar" in turn["marks"] for turn in await rig.turns())


@pytest.mark.parametrize("derenders", [False, True])
@pytest.mark.parametrize("kind", FREE)
async def test_other_calls_go_to_chat(kind, derenders):
    async with proxied(made(derenders=derenders)) as rig:
        await rig.say("s", [user("EPISODE:demo")], **FREE[kind])
        (turn,) = await rig.turns()
        assert turn["marks"] == []
        assert not rig.engine.generated


async def test_an_engine_without_the_routes_is_not_asked_for_them(monkeypatch):
    asked = []

    async def refused(_, fields, __=None):
        asked.append(fields)
        raise EngineError("no such route", status=404)

    monkeypatch.setattr(bound_replies, "render_request", refused)
    async with proxied(made(derenders=False)) as rig:
        for more in (FREE["tools"], {"include_reasoning": False, **CHOICE}):
            await rig.say("s", [user("EPISODE:demo")], **more)
        assert not asked
        assert [turn["marks"] for turn in await rig.turns()] == [[], ["late-grammar"]]


async def test_a_schema_that_the_engine_refuses_is_refused():
    """By the engine's own chat, in its own words."""
    async with proxied(made(derenders=True)) as rig:
        body = {"messages": [user("EPISODE:demo")], "include_reasoning": False, "temperature": -1, **CHOICE}
        assert await rig.post("s", **body) == await rig.post(None, **body)
        assert not await rig.turns()

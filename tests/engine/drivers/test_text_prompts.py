"""Exact prompts as text completions, parsed by derender, on a simulated engine that ignores ids in chat requests."""

import contextlib
import itertools
import json

import pytest

from tests.proxy.kit import CHAT, EPISODES, TOOLS, echo, proxied, results, user
from tests.support.plugin_engine import PluginEngine
from tests.system.nemo.agents import AGENTS
from tokencache.errors import EngineError
from tokencache.testing import SimulatedEngine
from tokencache.testing.faults import Fault

ASK = [user("EPISODE:demo")]
DERENDER = CHAT + "/derender"
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")


@contextlib.asynccontextmanager
async def before(engine=None, **settings):
    """The proxy in front of an engine with derender; the requests of the probe are discarded."""
    engine = engine or SimulatedEngine(episodes=EPISODES, seed=7, honours_ids=False, derenders=True)
    async with proxied(engine, **{"engine_kind": "completions", **settings}) as rig:
        await rig.proxy.engine.model("sim")
        engine.completions.clear()
        engine.derendered.clear()
        yield rig


async def found(rig):
    return (await rig.readiness())["engine"]["models"][0]


async def two_turns(rig, **more):
    """The reply to a call with an exact prompt."""
    message = await rig.say("s", ASK, tools=TOOLS)
    return await rig.post(messages=[*ASK, echo(message), *results(message)], tools=TOOLS, **more)


@STREAMS
@pytest.mark.parametrize("dialect", AGENTS)
async def test_an_agent_with_tools(dialect, stream):
    async with before() as rig:
        await AGENTS[dialect](rig, "s", 4, stream=stream)
        assert [turn["match"] for turn in await rig.turns()] == ["root"] + ["continue"] * 3
        assert [len(sequence["turns"]) for sequence in (await rig.check())["sequences"]] == [4]
        assert (await rig.info())["incidents"] == []
        ground_truth = rig.ground_truth()
        assert [call["prompt"] for call in rig.engine.completions] == [entry.prompt_ids for entry in ground_truth[1:]]
        for earlier, later in itertools.pairwise(ground_truth):
            prefix = earlier.prompt_ids + earlier.completion_ids
            assert later.prompt_ids[: len(prefix)] == prefix


@pytest.mark.parametrize("kind", ["auto", "completions"])
async def test_what_the_probe_finds(kind):
    async with before(engine_kind=kind) as rig:
        model = await found(rig)
        assert (model["level"], model["driver"]) == ("exact", "completions")


async def test_it_takes_no_images():
    async with before(PluginEngine(episodes=EPISODES, seed=7, honours_ids=False, derenders=True, images="plugin")) as rig:
        model = await found(rig)
        assert (model["level"], model["images"]) == ("exact", "")
        assert "completions" in model["images_why"]


async def test_chat_is_preferred_if_it_takes_ids():
    async with before(SimulatedEngine(episodes=EPISODES, derenders=True), engine_kind="auto") as rig:
        assert (await found(rig))["driver"] == "vllm"
        assert rig.engine.derendered == []


async def test_without_derender_calls_are_recorded():
    async with before(SimulatedEngine(episodes=EPISODES, honours_ids=False)) as rig:
        model = await found(rig)
        assert (model["level"], model["driver"]) == ("record", "completions")
        assert DERENDER in model["why"]
        await two_turns(rig)
        assert [turn["reason"] for turn in await rig.turns()] == ["", "record-only"]


class WithoutToolParser(SimulatedEngine):
    """A sidecar that was started without a parser for tool calls: it leaves them in the text."""

    async def _derender(self, http):
        body = await http.json()
        body["chat_request"].pop("tools", None)
        http._read_bytes = json.dumps(body).encode()
        return await super()._derender(http)


async def test_a_parser_that_misses_calls_is_not_trusted():
    async with before(WithoutToolParser(episodes=EPISODES, honours_ids=False, derenders=True)) as rig:
        model = await found(rig)
        assert model["level"] == "record"
        assert "does not find the tool call" in model["why"]


async def test_a_sidecar_parses():
    async with (
        SimulatedEngine(derenders=True).serve() as sidecar,
        before(SimulatedEngine(episodes=EPISODES, seed=7, honours_ids=False), derender=sidecar) as rig,
    ):
        await AGENTS["chat"](rig, "s", 4, stream=False)
        assert [turn["match"] for turn in await rig.turns()] == ["root"] + ["continue"] * 3
        assert rig.engine.derendered == []
        await rig.check()


async def test_an_engine_waits_for_its_sidecar():
    with pytest.raises(EngineError, match="cannot be reached"):
        async with before(SimulatedEngine(episodes=EPISODES, honours_ids=False), derender="http://127.0.0.1:9"):
            pass


async def test_the_harness_gets_what_chat_would_return():
    shown = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    answers = []
    for engine in (
        SimulatedEngine(episodes=EPISODES, seed=7, honours_ids=False, derenders=True),
        SimulatedEngine(episodes=EPISODES, seed=7),
    ):
        async with before(engine, engine_kind="auto") as rig:
            status, said = await two_turns(rig, **shown)
            assert status == 200
            (choice,) = said["choices"]
            assert said["prompt_token_ids"] == rig.ground_truth()[1].prompt_ids
            assert choice["token_ids"] == rig.ground_truth()[1].completion_ids
            assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == rig.ground_truth()[1].logprobs
            assert {len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]} == {2}
            message = choice["message"]
            words = [message["content"], message["reasoning"], [call["function"] for call in message["tool_calls"]]]
            answers.append((words, choice["finish_reason"], said["object"]))
    assert answers[0] == answers[1]


async def test_a_stop_string_cuts_the_text_and_not_the_tokens():
    async with before() as rig:
        asked = [user("EPISODE:talk")]
        message = await rig.say("s", asked)
        status, said = await rig.post(messages=[*asked, echo(message), user("go on")], stop=["con"])
        assert status == 200
        assert said["choices"][0]["message"]["content"].endswith("Se")
        assert said["choices"][0]["stop_reason"] == "con"
        await rig.check()


@STREAMS
async def test_a_reply_that_was_cut_short_is_continued(stream):
    async with before() as rig:
        message = await rig.say("s", ASK, tools=TOOLS, max_tokens=9)
        history = [*ASK, echo(message), *results(message)]
        message = await rig.say("s", history, tools=TOOLS, stream=stream, max_tokens=5)
        await rig.say("s", [*history, echo(message), *results(message)], tools=TOOLS, stream=stream)
        turns = await rig.turns()
        assert [turn["match"] for turn in turns] == ["root", "continue", "continue"]
        assert [turn["finish_reason"] for turn in turns][:2] == ["length", "length"]
        await rig.check()


async def test_a_required_tool_constrains_the_text_completion_as_in_chat():
    async with before() as rig:
        await two_turns(rig, tool_choice="required")
        (asked,) = rig.engine.completions
        assert asked["structured_outputs"] == {"structural_tag": '{"type": "structural_tag"}'}
        assert "tools" not in asked
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]


async def test_without_guidance_the_call_goes_to_chat():
    async with before() as rig:
        rig.engine.faults.append(Fault.answer(500, path=CHAT + "/render"))
        status, _ = await two_turns(rig, tool_choice="required")
        assert status == 200
        assert rig.engine.completions == []
        assert [turn["reason"] for turn in await rig.turns()] == ["", "not-for-completions"]
        await rig.check()


async def test_the_default_limit_is_the_remaining_context():
    async with before() as rig:
        await two_turns(rig)
        (asked,) = rig.engine.completions
        assert asked["max_tokens"] == rig.engine.max_model_len - len(asked["prompt"])


@STREAMS
async def test_nothing_is_lost_if_derender_fails(stream):
    async with before() as rig:
        message = await rig.say("s", ASK, tools=TOOLS)
        rig.engine.faults.append(Fault.answer(500, "no parser today", path=DERENDER))
        history = [*ASK, echo(message), *results(message)]
        status, said = await rig.post(messages=history, tools=TOOLS, stream=stream)
        assert status == 502
        assert "no parser today" in said["error"]["message"]
        turn = (await rig.turns())[1]
        assert turn["completion_tokens"] == len(rig.ground_truth()[1].completion_ids)
        assert "engine-error" in turn["marks"]
        await rig.say("s", history, tools=TOOLS, stream=stream)
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "branch"]
        await rig.check()


async def test_several_choices():
    async with before() as rig:
        status, said = await two_turns(rig, n=2)
        assert status == 200
        assert [choice["index"] for choice in said["choices"]] == [0, 1]
        assert [choice["token_ids"] for choice in said["choices"]] == [None, None]
        assert len(await rig.turns()) == 3
        await rig.check()


@pytest.mark.parametrize(("given", "calls"), [(False, 1), (0, 1), (None, 2), (True, 2)])
async def test_only_one_call_without_parallel_tool_calls(given, calls):
    async with before() as rig:
        _, said = await two_turns(rig, parallel_tool_calls=given)
        assert len(said["choices"][0]["message"]["tool_calls"]) == calls
        assert said["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_reply_that_only_ends_has_no_text():
    async with before() as rig:
        message = await rig.say("s", ASK, tools=TOOLS)
        rig.engine.derendered.clear()
        end = rig.engine.tokenizer.stop_id
        status, said = await rig.post(messages=[*ASK, echo(message), *results(message)], allowed_token_ids=[end])
        assert status == 200
        assert not said["choices"][0]["message"]["content"]
        assert rig.engine.derendered == []
        await rig.check()

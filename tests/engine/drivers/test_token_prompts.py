"""Behind a proxy that disaggregates prefill: chat loses the exact prompt and says so, and the driver `generate` keeps it."""

import asyncio
import contextlib
import itertools
import json
import logging

import pytest

from tests.engine.drivers.test_text_prompts import ASK, STREAMS, found, two_turns
from tests.engine.prefill_relay import PrefillRelay
from tests.ports import free_port
from tests.proxy.kit import CHAT, EPISODES, TOOLS, calls_held, echo, proxied, results, user
from tests.support.waiting import PATIENCE, until
from tests.system.nemo.agents import AGENTS
from tokencache.engine.derender import Derender
from tokencache.engine.drivers.parsed_completion import ReplacedChat, parse_generated
from tokencache.engine.upstream import Upstream
from tokencache.proxy import dispatch
from tokencache.testing import SimulatedEngine
from tokencache.testing.faults import Fault

ADVICE = "use --engine generate"
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")


def simulated(**more):
    return SimulatedEngine(**{"episodes": EPISODES, "seed": 7, "derenders": True, **more})


@contextlib.asynccontextmanager
async def behind_relay(kind, *, decode=None, shortest=0, **settings):
    """The proxy in front of a relay to two engines. `rig.engine` decodes, `rig.prefill` prefills; what the probe sent is discarded."""
    prefill, decode = simulated(seed=1), decode or simulated()
    async with prefill.serve() as first, decode.serve() as second:
        relay = PrefillRelay(first, second, shortest=shortest)
        async with relay.serve() as url, proxied(decode, upstream=url, engine_kind=kind, **settings) as rig:
            rig.prefill, rig.relay = prefill, relay
            await rig.proxy.engine.model()
            for engine in (prefill, decode):
                engine.generated.clear()
                engine.ground_truth.clear()
            relay.prefilled.clear()
            yield rig


# --- the usual driver says so


async def test_the_probe_says_that_the_exact_prompt_is_replaced(caplog):
    async with behind_relay("vllm") as rig:
        model = await found(rig)
        assert (model["level"], model["driver"]) == ("record", "vllm")
        assert "although the engine itself takes them" in model["why"]
        assert ADVICE in model["why"]
        (logged,) = [record for record in caplog.records if "RECORD ONLY" in record.message]
        assert ADVICE in logged.message
        await AGENTS["chat"](rig, "s", 3, stream=False)
        assert [turn["reason"] for turn in await rig.turns()] == ["", "record-only", "record-only"]
        await rig.check()


async def test_an_old_vllm_is_not_taken_for_such_a_proxy():
    async with behind_relay("vllm", decode=simulated(honours_ids=False)) as rig:
        assert (await found(rig))["why"] == "supplied ids are ignored"


@STREAMS
async def test_the_first_call_whose_prompt_is_replaced_says_so(stream, caplog):
    """A proxy may disaggregate only long prompts, so that the probe's reach the engine unchanged."""
    async with behind_relay("vllm", shortest=4000) as rig:
        assert (await found(rig))["level"] == "exact"
        start = [user("EPISODE:demo " + "and more " * 500)]
        message = await rig.say("s", start, tools=TOOLS)
        assert (await rig.info())["incidents"] == []
        history = [*start, echo(message), *results(message)]
        message = await rig.say("s", history, tools=TOOLS, stream=stream)
        assert rig.relay.prefilled == [CHAT, CHAT]
        (incident,) = (await rig.info())["incidents"]
        assert incident["kind"] == "engine-disagrees"
        assert ADVICE in incident["detail"]
        assert [record.levelno for record in caplog.records if ADVICE in record.message] == [logging.WARNING]
        await rig.say("s", [*history, echo(message), *results(message)], tools=TOOLS, stream=stream)
        turns = await rig.turns()
        assert [turn["match"] for turn in turns] == ["root", "plain", "plain"]
        assert [turn["reason"] for turn in turns] == ["", "engine-disagrees", "engine-disagrees"]
        await rig.check()


# --- generate


@STREAMS
@pytest.mark.parametrize("dialect", AGENTS)
async def test_both_engines_get_the_exact_prompts_of_an_agent(dialect, stream):
    async with behind_relay("generate") as rig:
        await AGENTS[dialect](rig, "s", 4, stream=stream)
        assert [turn["match"] for turn in await rig.turns()] == ["root"] + ["continue"] * 3
        assert [len(sequence["turns"]) for sequence in (await rig.check())["sequences"]] == [4]
        assert (await rig.info())["incidents"] == []
        ground_truth = rig.ground_truth()
        for engine in (rig.prefill, rig.engine):
            assert [call["token_ids"] for call in engine.generated] == [entry.prompt_ids for entry in ground_truth[1:]]
        for earlier, later in itertools.pairwise(ground_truth):
            prefix = earlier.prompt_ids + earlier.completion_ids
            assert later.prompt_ids[: len(prefix)] == prefix


async def test_what_the_probe_finds():
    async with behind_relay("generate") as rig:
        model = await found(rig)
        assert (model["level"], model["driver"], model["why"]) == ("exact", "generate", "")


async def test_auto_finds_a_driver_whose_prompts_arrive():
    async with behind_relay("auto") as rig:
        assert (await found(rig))["level"] == "exact"
        await AGENTS["chat"](rig, "s", 3, stream=False)
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue"]
        await rig.check()


async def test_without_the_routes_calls_are_recorded():
    async with behind_relay("generate", decode=simulated(derenders=False)) as rig:
        model = await found(rig)
        assert (model["level"], model["driver"]) == ("record", "generate")
        assert CHAT + "/render" in model["why"]
        await two_turns(rig)
        assert [turn["reason"] for turn in await rig.turns()] == ["", "record-only"]
        await rig.check()


async def test_the_harness_gets_what_chat_would_return():
    shown = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    answers = []
    for kind, start in (("generate", behind_relay("generate")), ("vllm", proxied(SimulatedEngine(episodes=EPISODES, seed=7)))):
        async with start as rig:
            rig.engine.ground_truth.clear()
            status, said = await two_turns(rig, **shown)
            assert status == 200
            (choice,) = said["choices"]
            entry = rig.ground_truth()[1]
            assert (said["prompt_token_ids"], choice["token_ids"]) == (entry.prompt_ids, entry.completion_ids), kind
            assert [one["logprob"] for one in choice["logprobs"]["content"]] == entry.logprobs
            message = choice["message"]
            answers.append(
                (message["content"], message["reasoning"], [call["function"] for call in message["tool_calls"]], choice["finish_reason"])
            )
    assert answers[0] == answers[1]


async def test_a_stop_string_cuts_the_text_and_not_the_tokens():
    async with behind_relay("generate") as rig:
        asked = [user("EPISODE:talk")]
        message = await rig.say("s", asked)
        status, said = await rig.post(messages=[*asked, echo(message), user("go on")], stop=["con"])
        assert status == 200
        assert said["choices"][0]["message"]["content"].endswith("Se")
        await rig.check()


@pytest.mark.parametrize("reasoning", [True, False])
async def test_a_required_tool_binds_the_reply_where_it_does_in_chat(reasoning):
    async with behind_relay("generate") as rig:
        await two_turns(rig, tool_choice="required", include_reasoning=reasoning)
        for engine in (rig.prefill, rig.engine):
            asked = engine.generated[-1]
            assert asked["sampling_params"]["structured_outputs"] == {"structural_tag": '{"type": "structural_tag"}'}
            assert asked.get("reasoning_ended") == (None if reasoning else True)
        turns = await rig.turns()
        assert [turn["match"] for turn in turns] == ["root", "continue"]
        assert "late-grammar" not in turns[1]["marks"]


async def test_without_sampling_parameters_the_call_goes_to_chat():
    async with behind_relay("generate") as rig:
        rig.engine.faults.append(Fault.answer(500, path=CHAT + "/render"))
        status, _ = await two_turns(rig)
        assert status == 200
        assert rig.engine.generated == []
        assert [turn["reason"] for turn in await rig.turns()] == ["", "not-for-generate"]
        await rig.check()


@STREAMS
async def test_nothing_is_lost_if_derender_fails(stream):
    async with behind_relay("generate") as rig:
        message = await rig.say("s", ASK, tools=TOOLS)
        rig.engine.faults.append(Fault.answer(500, "no parser today", path=CHAT + "/derender"))
        history = [*ASK, echo(message), *results(message)]
        status, said = await rig.post(messages=history, tools=TOOLS, stream=stream)
        assert (status, "no parser today" in said["error"]["message"]) == (502, True)
        assert (await rig.turns())[1]["completion_tokens"] == len(rig.ground_truth()[1].completion_ids)
        await rig.say("s", history, tools=TOOLS, stream=stream)
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "branch"]
        await rig.check()


async def test_a_reply_without_its_text_is_not_cut_blindly():
    """As of an older vLLM, which does not know `output_mode`."""
    choice = {"index": 0, "token_ids": [1, 2], "finish_reason": "stop", "stop_reason": "con"}
    answer = {"request_id": "x", "prompt_token_ids": [1], "choices": [choice]}
    parsed = await parse_generated(Derender(), ReplacedChat(Upstream("http://127.0.0.1:9"), {}), json.dumps(answer).encode())
    assert "did not return the text before the stop string" in parsed.error
    assert json.loads(parsed.body)["choices"][0]["token_ids"] == [1, 2]


async def test_an_engine_whose_sidecar_restarts_is_not_down(monkeypatch):
    """Its calls wait. It is the same process with the same weights, so their version stays known."""
    monkeypatch.setattr(dispatch, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(dispatch, "LONGEST_PAUSE", 0.02)
    port, running = free_port(), contextlib.AsyncExitStack()
    async with running, contextlib.AsyncExitStack() as opened:
        await running.enter_async_context(simulated().serve(port=port))
        settings = {"engine_kind": "generate", "derender": f"http://127.0.0.1:{port}", "hold": PATIENCE}
        rig = await opened.enter_async_context(proxied(simulated(), **settings))
        message = await rig.say("s", ASK, tools=TOOLS)
        async with rig.http.put(f"{rig.url}/tokencache/v1/weights", json={"version": "7"}) as answer:
            assert answer.status == 200
        await running.aclose()
        before = calls_held("down")
        call = asyncio.create_task(rig.say("s", [*ASK, echo(message), *results(message)], tools=TOOLS))
        await until(lambda: calls_held("down") > before)
        await opened.enter_async_context(simulated().serve(port=port))
        await call
        last = (await rig.turns())[-1]
        assert (last["match"], [span["version"] for span in last["weight_versions"]]) == ("continue", ["7"])

"""Engines, and routers in front of them, that do less than they should: the proxy finds them, names them, and serves them safely."""

import contextlib
import logging

import pytest

from tests.engine.intermediary import Intermediary
from tests.proxy.kit import CHAT, EPISODES, TOOLS, echo, proxied, results, user
from tests.system.nemo.worker import Worker
from tokencache.testing import SimulatedEngine

ASK = [user("EPISODE:demo")]


@contextlib.asynccontextmanager
async def standing(change=None, *, worker=False):
    """A proxy in front of an engine or NeMo RL's worker, with an intermediary; yields the rig and the intermediary."""
    engine = SimulatedEngine(episodes=EPISODES, seed=7)
    async with engine.serve() as up, contextlib.AsyncExitStack() as stack:
        behind = await stack.enter_async_context(Worker(up, engine.tokenizer.stop_id).serve()) if worker else up
        intermediary = Intermediary(behind, change)
        async with intermediary.serve() as url, proxied(engine, upstream=url) as rig:
            await rig.proxy.engine.model("sim")
            yield rig, intermediary


async def found(rig):
    return {model["model"]: model for model in (await rig.readiness())["engine"]["models"]}["sim"]


async def episode(rig, turns, *, messages=None, stream=False):
    messages = messages or list(ASK)
    for _ in range(turns):
        message = await rig.say("s", messages, tools=TOOLS, stream=stream)
        messages += [echo(message), *results(message)]
    return messages


def matches(turns):
    return [(turn["match"], turn["reason"]) for turn in turns]


# ---- /tokenize


def ids_for_chat_alone(route, body):
    names = {"kv_transfer_params", "required_prefix_token_ids"} if route == "/tokenize" else set()
    return {name: value for name, value in body.items() if name not in names}


@pytest.mark.parametrize("worker", [False, True], ids=["vllm", "nemo-rl"])
async def test_ids_honoured_for_chat_but_not_for_tokenize(worker):
    """Tails come from small renderings, which need no ids."""
    async with standing(ids_for_chat_alone, worker=worker) as (rig, _):
        assert ((await found(rig))["level"], (await found(rig))["driver"]) == ("exact", "nemo-rl" if worker else "vllm")
        await episode(rig, 3)
        assert matches(await rig.turns()) == [("root", ""), ("continue", ""), ("continue", "")]
        await rig.check()


@pytest.mark.parametrize("status", [204, 307])
async def test_an_answer_that_is_no_error_is_not_passed_on_as_the_proxys_own(status):
    """A client that gets 204 for a count of tokens takes it for a success."""
    async with (
        SimulatedEngine().serve() as up,
        Intermediary(up, lambda _route, _body: status).serve() as url,
        proxied(upstream=url) as rig,
    ):
        assert (await rig.post("s", "/v1/messages/count_tokens", model="sim", messages=ASK))[0] == 502


def no_tokenize(route, body):
    return 404 if route == "/tokenize" else body


async def test_an_engine_without_tokenize_is_recorded_only():
    async with standing(no_tokenize) as (rig, _):
        model = await found(rig)
        assert (model["level"], model["driver"], model["tokenizes"]) == ("record", "vllm", False)
        assert "no rendering" in model["why"]
        await episode(rig, 2)
        assert matches(await rig.turns()) == [("root", ""), ("plain", "record-only")]
        await rig.check()


async def test_a_worker_without_tokenize_adds_the_tail_itself():
    """It uses supplied ids nevertheless; each turn records that its tail was not proven."""
    async with standing(no_tokenize, worker=True) as (rig, _):
        assert ((await found(rig))["level"], (await found(rig))["tokenizes"]) == ("exact", False)
        await episode(rig, 3)
        assert matches(await rig.turns()) == [("root", ""), ("continue", "tail-by-engine"), ("continue", "tail-by-engine")]
        await rig.check()


# ---- a prompt that is cut


def cut(route, body):
    if route == CHAT and "kv_transfer_params" in body:
        body["kv_transfer_params"]["prompt_token_ids"] = body["kv_transfer_params"]["prompt_token_ids"][-10:]
    return body


async def test_an_engine_that_truncates_the_prompt():
    async with standing(cut) as (rig, _):
        model = await found(rig)
        assert (model["level"], model["why"]) == ("record", "the engine cuts prompts: of 21 ids the last 10 were used")
        await episode(rig, 2)
        assert matches(await rig.turns()) == [("root", ""), ("plain", "record-only")]
        await rig.check()


async def test_an_engine_that_starts_to_truncate_is_marked_and_probed_again():
    async with standing() as (rig, intermediary):
        messages = await episode(rig, 1)
        intermediary.change = cut
        messages = await episode(rig, 2, messages=messages)
        assert matches(await rig.turns()) == [("root", ""), ("plain", "engine-disagrees"), ("plain", "record-only")]
        (incident,) = (await rig.info())["incidents"]
        assert incident["kind"] == "engine-disagrees"
        assert "the engine cut the prompt: it used the last 10 of" in incident["detail"]
        await rig.check()


# ---- another vocabulary


async def test_a_tokenizer_that_changes_during_a_session():
    """The engine refuses ids of the old vocabulary; the call is sent plainly, and new sequences continue as usual."""
    async with standing() as (rig, intermediary):
        messages = await episode(rig, 1)
        (old,) = rig.ground_truth()
        probes = len(rig.engine.tokenizations)

        def refuse(route, body):
            ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") or []
            return 400 if ids[: len(old.prompt_ids)] == old.prompt_ids else body

        intermediary.change = refuse
        await episode(rig, 1, messages=messages)
        assert matches(await rig.turns()) == [("root", ""), ("plain", "engine-refused-ids")]
        await rig.proxy.engine.model("sim")
        assert len(rig.engine.tokenizations) > probes  # probed anew
        assert (await found(rig))["level"] == "exact"
        said = [user("EPISODE:talk")]
        await episode(rig, 2, messages=said)
        assert matches(await rig.turns())[2:] == [("root", ""), ("continue", "")]
        assert (await rig.check())["complete"]


# ---- a router that knows less than the engine behind it


def dropping(route, body):
    return {name: value for name, value in body.items() if name not in {"return_token_ids", "logprobs", "top_logprobs"}}


@pytest.mark.parametrize("under_way", [False, True])
async def test_a_router_that_drops_the_request_for_ids(under_way, caplog):
    with caplog.at_level(logging.ERROR):
        async with standing(None if under_way else dropping) as (rig, intermediary):
            messages = await episode(rig, 1) if under_way else list(ASK)
            intermediary.change = dropping
            await episode(rig, 2, messages=messages)
            model, info = await found(rig), await rig.info()
    assert (model["level"], model["why"]) == ("relay", "the engine reports no token ids")
    assert not info["complete"]
    assert info["turns"] == under_way
    assert [(incident["kind"], incident["hole"]) for incident in info["incidents"]] == [("no-token-ids", True)] * 2
    assert any("NOTHING IS RECORDED" in record.message for record in caplog.records)


async def test_a_fault_of_every_call_does_not_cause_a_probe_with_every_call():
    """Sessions of an old vocabulary are refused each time, but the engine is probed once."""
    async with standing() as (rig, intermediary):
        histories = {name: await rig.say(name, ASK, tools=TOOLS) for name in ("a", "b", "c")}
        asked = len(rig.engine.tokenizations)
        old = [entry.prompt_ids for entry in rig.engine.ground_truth if entry.session in histories]
        probes = []

        def refuse(route, body):
            ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") or []
            probes.extend([body] if ids and len(ids) < 60 and body["max_tokens"] == 1 else [])  # the probe's first question
            return 400 if any(ids[: len(prompt)] == prompt for prompt in old) else body

        intermediary.change = refuse
        for name, message in histories.items():
            await rig.say(name, [*ASK, echo(message), *results(message)], tools=TOOLS)
            assert matches(await rig.turns(name)) == [("root", ""), ("plain", "engine-refused-ids")]
        assert len(rig.engine.tokenizations) > asked
        assert len(probes) == 1

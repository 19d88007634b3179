"""The engine comes up late, goes, comes back as another, or does not do with ids what it is asked to."""

import json

import pytest

from tests.ports import free_port
from tests.proxy.kit import CHAT, EPISODES, TOOLS, echo, proxied, results, user
from tests.support.reading import read_chat
from tests.support.waiting import until
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.testing import Fault, SimulatedEngine

ASK = {"messages": [user("EPISODE:demo")], "tools": TOOLS}


@pytest.fixture
def unused_tcp_port():
    return free_port()


async def test_an_engine_that_comes_up_later(unused_tcp_port):
    engine = SimulatedEngine(episodes=EPISODES)
    async with proxied(upstream=f"http://127.0.0.1:{unused_tcp_port}") as rig:
        async with rig.http.get(rig.url + "/readyz") as answer:
            assert (answer.status, (await answer.json())["ready"]) == (503, False)
        status, said = await rig.post("s", **ASK)
        assert (status, said["error"]["type"]) == (502, "upstream_error")
        assert [i["kind"] for i in (await rig.info())["incidents"]] == ["upstream-down"]
        async with engine.serve(port=unused_tcp_port):
            rig.engine = engine
            message = await rig.say("s", **ASK)
            await rig.say("s", [*ASK["messages"], echo(message), *results(message)], tools=TOOLS)
            assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
            async with rig.http.get(rig.url + "/readyz") as answer:
                assert (answer.status, (await answer.json())["ready"]) == (200, True)


async def test_readiness_comes_without_any_call(unused_tcp_port, monkeypatch):
    """A load balancer sends nothing to a proxy that is not ready: it must find the engine by itself, also again."""
    monkeypatch.setattr("tokencache.engine.health.CHECK_EVERY", 0.01)
    async with proxied(upstream=f"http://127.0.0.1:{unused_tcp_port}") as rig:
        for _ in range(2):
            engine = SimulatedEngine(episodes=EPISODES)
            async with engine.serve(port=unused_tcp_port):
                await until_ready(rig, 200)
            assert (await rig.post("s", **ASK))[0] == 502
            await until_ready(rig, 503)


async def until_ready(rig, status):
    async def ready():
        async with rig.http.get(rig.url + "/readyz") as answer:
            return answer.status == status

    await until(ready)


async def test_an_engine_that_is_restarted_is_probed_again(unused_tcp_port):
    """Another process stands there now, and this one does not take ids: found out at the next call."""
    old, new = SimulatedEngine(episodes=EPISODES), SimulatedEngine(episodes=EPISODES, honours_ids=False)
    async with proxied(upstream=f"http://127.0.0.1:{unused_tcp_port}") as rig:
        async with old.serve(port=unused_tcp_port):
            message = await rig.say("s", **ASK)
        messages = [*ASK["messages"], echo(message), *results(message)]
        assert (await rig.post("s", messages=messages, tools=TOOLS))[0] == 502
        async with new.serve(port=unused_tcp_port):
            await rig.say("s", messages, tools=TOOLS)
            last = (await rig.turns())[-1]
            assert (last["match"], last["reason"], last["marks"]) == ("plain", "record-only", [])
            async with rig.http.get(rig.url + "/readyz") as answer:
                assert {m["level"] for m in (await answer.json())["engine"]["models"]} == {"record"}


async def test_an_engine_that_ignores_ids_is_recorded_only(caplog):
    engine = SimulatedEngine(episodes=EPISODES, honours_ids=False)
    async with proxied(engine) as rig:
        messages = list(ASK["messages"])
        for _ in range(3):
            message = await rig.say("s", messages, tools=TOOLS)
            messages += [echo(message), *results(message)]
        assert [(t["match"], t["reason"]) for t in await rig.turns()] == [("root", ""), ("plain", "record-only"), ("plain", "record-only")]
        await rig.check()
        ready = await rig.readiness()
        assert ready["engine"]["models"][0]["level"] == "record"
        assert "ignored" in ready["engine"]["models"][0]["why"]
    assert any(record.levelname == "WARNING" and "RECORD ONLY" in record.message for record in caplog.records)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_stops_honouring_ids(rig, stream):
    """It says so itself: the turn is recorded as what it was, marked, and not continued."""
    message = await rig.say("s", **ASK)
    messages = [*ASK["messages"], echo(message), *results(message)]
    rig.engine.honours_ids = False
    message = await rig.say("s", messages, tools=TOOLS, stream=stream)
    exported = await rig.check()
    last = exported["sequences"][-1]["turns"][-1]
    assert (last["match"], last["reason"], last["marks"]) == ("plain", "engine-disagrees", ["engine-disagrees"])
    assert "engine-disagrees" in {i["kind"] for i in exported["incidents"]}
    assert exported["complete"]
    rig.engine.honours_ids = True
    await rig.say("s", [*messages, echo(message), *results(message)], tools=TOOLS)
    exported = await rig.check()
    of_each = [[(t["match"], t["reason"], t["marks"]) for t in sequence["turns"]] for sequence in exported["sequences"]]
    disagreed = [("plain", "engine-disagrees", ["engine-disagrees"])]
    assert of_each == [[("root", "", []), ("continue", "engine-disagrees", [])], disagreed]  # the last turn continues the first


async def test_an_engine_that_refuses_the_ids_gets_a_plain_call_and_is_probed_again(rig):
    message = await rig.say("s", **ASK)
    refusal = Fault.answer(400, '{"error":{"message":"no ids","type":"BadRequestError","param":null,"code":400}}')
    rig.engine.choose_fault = lambda route, body: refusal if route == CHAT and body.get("kv_transfer_params") else None
    for stream, reason in ((False, "engine-refused-ids"), (True, "record-only")):
        await rig.say("s", [*ASK["messages"], echo(message), *results(message)], tools=TOOLS, stream=stream)
        last = (await rig.turns())[-1]
        assert (last["match"], last["reason"]) == ("plain", reason)
    assert (await rig.check())["complete"]
    (found,) = (await rig.readiness())["engine"]["models"]
    assert (found["level"], found["driver"]) == ("record", "vllm")
    assert "supplied ids are refused" in found["why"]


@pytest.mark.parametrize(
    "fault", [Fault.answer(500, "x", path="/tokenize"), Fault.close(path="/tokenize"), Fault.truncated_json(path="/tokenize")]
)
async def test_no_tail_no_splice(rig, fault):
    message = await rig.say("s", **ASK)
    messages = [*ASK["messages"], echo(message), *results(message)]
    rig.engine.choose_fault = lambda route, body: fault if route == "/tokenize" else None
    await rig.say("s", messages, tools=TOOLS)
    assert (await rig.turns())[-1]["match"] == "plain"
    assert (await rig.check())["complete"]


@pytest.mark.parametrize("known", [True, False])
async def test_tails_come_back_with_tokenize(rig, known):
    """What failed for a while is asked again; `known`: whether both renderings were compared before."""
    message = await rig.say("s", **ASK)
    messages = [*ASK["messages"], echo(message), *results(message)]
    if known:
        await (await rig.proxy.engine.model("sim")).renders_alike(chat_args())
    fault = Fault.answer(500, "x", path="/tokenize")
    rig.engine.choose_fault = lambda route, body: fault if route == "/tokenize" else None
    await rig.say("s", messages, tools=TOOLS)
    assert (await rig.turns())[-1]["match"] == "plain"
    rig.engine.choose_fault = None
    for _ in range(9):  # what was refused is tried again, but not by every call
        await rig.say("s", messages, tools=TOOLS)
    assert {turn["match"] for turn in (await rig.turns())[2:]} >= {"continue"}
    await rig.check()


def chat_args():
    return read_chat(json.dumps({"model": "sim", **ASK}).encode(), IncrementalParser()).args

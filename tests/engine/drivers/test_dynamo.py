"""Dynamo's frontend as the engine, simulated before the simulated vLLM."""

import asyncio
import contextlib
import json

import pytest
from multidict import CIMultiDict

from tests.engine.drivers.dynamo_frontend import DynamoFrontend
from tests.proxy.kit import CHAT, EPISODES, TOOLS, calls_held, echo, proxied, results, user
from tests.support.waiting import PATIENCE, until
from tests.system.nemo.agents import AGENTS
from tokencache.engine.drivers.dynamo import Dynamo, StreamReader
from tokencache.testing import SimulatedEngine

ASK = [user("EPISODE:demo")]
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")


@contextlib.asynccontextmanager
async def before(kind="dynamo", *, engine=None, change=lambda _frontend: None, probed=True, **settings):
    """The proxy before a simulated frontend; the requests of the probe are discarded."""
    engine = engine or SimulatedEngine(episodes=EPISODES, seed=7)
    async with engine.serve() as up:
        frontend = DynamoFrontend(up)
        change(frontend)
        async with frontend.serve() as url, proxied(None, upstream=url, engine_kind=kind, **settings) as rig:
            if probed:
                await rig.proxy.engine.model("sim")
            for kept in (frontend.asked, frontend.rendered, frontend.headers, engine.ground_truth):
                kept.clear()
            rig.engine = engine
            yield rig, frontend


async def found(rig):
    return (await rig.readiness())["engine"]["models"][0]


@pytest.mark.parametrize("kind", ["auto", "dynamo"])
async def test_what_the_probe_finds(kind):
    async with before(kind) as (rig, _):
        model = await found(rig)
        assert (model["level"], model["driver"], model["max_model_len"], model["tokenizes"]) == ("exact", "dynamo", 4096, True)
        assert not any("moved" in caution for caution in model["cautions"])


async def test_options_that_cannot_be_checked_are_named_at_start(caplog):
    async with before(change=lambda frontend: setattr(frontend, "migrated", 3)) as (rig, _):
        sampling, migration = (await found(rig))["cautions"]
    assert "--enable-rl" in sampling
    assert "--migration-limit 0" in migration
    assert migration.endswith("it has moved 3 requests")
    assert {record.message.partition("CHECK ITS OPTIONS: ")[2] for record in caplog.records} >= {sampling, migration}


@STREAMS
@pytest.mark.parametrize("dialect", AGENTS)
async def test_an_agent_with_tools(dialect, stream):
    async with before() as (rig, frontend):
        await AGENTS[dialect](rig, "s", 4, stream=stream)
        assert [turn["match"] for turn in await rig.turns()] == ["root"] + ["continue"] * 3
        assert [len(sequence["turns"]) for sequence in (await rig.check())["sequences"]] == [4]
        assert (await rig.info())["incidents"] == []
        sent = [call["nvext"].get("token_data") for call in frontend.asked]
        truth = [entry.prompt_ids for entry in rig.ground_truth()]
        assert sent[1:] == truth[1:]
        assert sent[0] == (truth[0] if stream else None)


async def test_a_client_gets_what_it_asked_for_only():
    """Neither ids nor the usage of each chunk; its own members of `nvext` arrive, and so does what it asked for there."""
    own = {"nvext": {"extra_fields": ["worker_id"], "agent_hints": {"osl": 9}}, "priority": 3}
    async with before() as (rig, frontend):
        for stream in (False, True):
            body = {"model": "sim", "messages": ASK, "stream": stream, **own}
            async with rig.http.post(rig.url + "/s/s" + CHAT, json=body) as answer:
                text = await answer.text()
            assert answer.status == 200, text
            assert "completion_token_ids" not in text
            assert '"worker_id"' in text
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")] if stream else [json.loads(text)]
            assert not any(event.get("prompt_token_ids") for event in events)
            assert not any(choice.get("token_ids") for event in events for choice in event["choices"])
            assert not stream or not any(event.get("usage") for event in events)
        assert {json.dumps(call["nvext"]["agent_hints"], sort_keys=True) for call in frontend.asked} == {'{"osl": 9, "priority": -3}'}


async def test_a_prompt_of_the_clients_own_is_refused():
    async with before() as (rig, frontend):
        body = {"model": "sim", "messages": ASK, "nvext": {"token_data": [1, 2]}}
        async with rig.http.post(rig.url + "/s/s" + CHAT, json=body) as answer:
            assert (answer.status, "nvext.token_data" in await answer.text()) == (400, True)
        assert frontend.asked == []


async def asked(rig, at, **more):
    """The messages of a first call, or of one after a reply."""
    if at == "root":
        return ASK
    message = await rig.say("s", ASK, **more)
    return [*ASK, echo(message), *results(message)]


@pytest.mark.parametrize("at", ["root", "later"])
async def test_a_worker_dies_in_mid_reply(at):
    """What arrived is recorded with its prompt, which the count of its tokens proves; the reply is a hole."""
    async with before() as (rig, frontend):
        messages = await asked(rig, at, tools=TOOLS)
        frontend.dies_after = 5
        async with rig.http.post(
            rig.url + "/s/s" + CHAT, json={"model": "sim", "messages": messages, "tools": TOOLS, "stream": True}
        ) as answer:
            assert "worker died" in await answer.text()
        turn = (await rig.turns())[-1]
        assert "engine-error" in turn["marks"]
        assert turn["completion_tokens"] > 0
        assert turn["prompt_tokens"] == len(frontend.asked[-1]["nvext"]["token_data"])
        assert [incident["kind"] for incident in (await rig.info())["incidents"]] == ["engine-error"]


async def test_a_count_that_is_not_that_of_the_ids_proves_nothing():
    async with before() as (rig, frontend):
        frontend.dies_after, frontend.miscounts = 5, 1
        async with rig.http.post(rig.url + "/s/s" + CHAT, json={"model": "sim", "messages": ASK, "stream": True}) as answer:
            await answer.text()
        assert await rig.turns() == []
        (hole,) = [incident for incident in (await rig.info())["incidents"] if incident["kind"] == "no-token-ids"]
        assert hole["hole"]


@pytest.mark.parametrize("at", ["root", "later"])
async def test_a_frontend_that_uses_other_ids_disagrees(at):
    """Also where the driver had the prompt rendered: the turn is recorded with the ids that were used, and marked."""
    async with before() as (rig, frontend):
        messages = await asked(rig, at, stream=True)
        frontend.drops = 1
        await rig.say("s", messages, stream=True)
        turn = (await rig.turns())[-1]
        assert "engine-disagrees" in turn["marks"]
        assert turn["prompt_tokens"] == len(frontend.asked[-1]["nvext"]["token_data"]) - 1


async def test_several_choices_are_a_hole():
    """The frontend reports ids for one choice only."""
    async with before() as (rig, _):
        async with rig.http.post(rig.url + "/s/s" + CHAT, json={"model": "sim", "messages": ASK, "n": 2}) as answer:
            assert (answer.status, len((await answer.json())["choices"])) == (200, 2)
        assert "no-token-ids" in {incident["kind"] for incident in (await rig.info())["incidents"] if incident["hole"]}


async def test_arguments_that_it_refuses_do_not_end_a_session():
    """They are in the history that a recorded reply continues; in place of them it gets a stand-in, beside the exact ids."""
    async with before() as (rig, _):
        message = await rig.say("s", ASK, tools=TOOLS)
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{oops"}}
        history = [*ASK, echo(message), *results(message), {"role": "assistant", "content": "", "tool_calls": [call]}]
        await rig.say("s", [*history, {"role": "tool", "tool_call_id": "c", "content": "no"}], tools=TOOLS)
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
        assert (await rig.info())["incidents"] == []


async def test_its_refusals_are_errors_of_the_dialect():
    async with before() as (rig, _):
        body = {"model": "sim", "messages": ASK, "max_tokens": 9, "chat_template": "x"}
        async with rig.http.post(rig.url + "/s/s" + CHAT, json=body) as answer:
            assert (answer.status, (await answer.json())["code"]) == (400, 400)  # as a direct call's
        async with rig.http.post(rig.url + "/s/s/v1/messages", json={**body, "model": "other"}) as answer:
            error = await answer.json()
            assert (answer.status, error["type"], error["error"]["message"]) == (404, "error", "Model not found")


async def test_another_mode_of_the_router_samples_to_render():
    def change(frontend):
        frontend.kv = False

    async with before(change=change) as (rig, frontend):
        assert (await found(rig))["level"] == "exact"
        await AGENTS["chat"](rig, "s", 3, stream=True)
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue"]
        assert frontend.rendered == []


async def test_a_frontend_without_workers_is_not_ready_and_calls_wait():
    def change(frontend):
        frontend.ready = False

    async with before("auto", change=change, probed=False, hold=PATIENCE) as (rig, frontend):
        waiting = asyncio.ensure_future(rig.say("s", ASK))
        await until(lambda: _has_waited(rig))
        frontend.ready = True
        assert (await waiting)["content"]
        assert (await found(rig))["driver"] == "dynamo"


async def _has_waited(rig):
    return not (await rig.readiness())["ready"]


async def test_workers_that_leave_and_return():
    async with before(hold=PATIENCE) as (rig, frontend):
        message = await rig.say("s", ASK)
        frontend.ready, times = False, calls_held("down")
        waiting = asyncio.ensure_future(rig.say("s", [*ASK, echo(message), user("go on")]))
        await until(lambda: calls_held("down") > times)
        frontend.ready = True
        await waiting
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]


async def test_an_unknown_model_is_refused_at_once():
    async with before(hold=30) as (rig, _), rig.http.post(rig.url + "/s/s" + CHAT, json={"model": "other", "messages": ASK}) as answer:
        assert answer.status == 404


def headers_of(**sent):
    headers = CIMultiDict({name.replace("_", "-"): value for name, value in sent.items()})
    Dynamo().name_session(headers, "s")
    return {name: value for name, value in headers.items() if name.lower().startswith("x-dynamo")}


def test_a_harnesss_own_headers_do_not_win():
    own = {"X-Dynamo-Session-ID": "s"}
    assert headers_of() == own
    assert headers_of(x_dynamo_session_id="mine", X_Dynamo_Session_Final="true", x_dynamo_parent_session_id="another") == own


async def test_requests_name_the_session():
    async with before() as (rig, frontend):
        await rig.say("s", ASK)
        assert frontend.headers[-1]["X-Dynamo-Session-ID"] == "s"


@STREAMS
async def test_text_completions_are_recorded(stream):
    async with before() as (rig, _):
        async with rig.http.post(
            rig.url + "/s/s/v1/completions", json={"model": "sim", "prompt": "hi", "max_tokens": 4, "stream": stream}
        ) as answer:
            text = await answer.text()
        assert answer.status == 200, text
        (turn,) = await rig.turns()
        assert turn["completion_tokens"] > 0
        assert (await rig.info())["incidents"] == []


ENDS = {"finish": ("post", "/finish"), "seal": ("post", "/seal?force=true"), "delete": ("delete", "")}


@pytest.mark.parametrize("how", ENDS)
async def test_the_end_of_a_session_is_told_once(how):
    """By a request that samples nothing, whichever call ends the session; and not for those that follow."""
    async with before() as (rig, frontend):
        await rig.say("s", ASK)
        for method, path in (ENDS[how], ENDS["finish"], ENDS["delete"]):
            async with rig.http.request(method, f"{rig.url}/tokencache/v1/sessions/s{path}") as answer:
                await answer.read()
        await until(lambda: frontend.ended)
        await rig.say("another", ASK)
        assert frontend.ended == ["s"]


def chunk(ids, logprobs, finish=None):
    """A chunk of the frontend's: the ids of a worker's tokens, and the log probabilities of those whose text the parser lets through."""
    content = None if logprobs is None else {"content": [{"token": "x", "logprob": -0.001 * one} for one in logprobs]}
    choice = {"index": 0, "delta": {}, "logprobs": content, "finish_reason": finish}
    return json.dumps({"choices": [choice], "nvext": {"completion_token_ids": ids} if ids else {}}).encode()


def ids_read(*chunks):
    read = StreamReader(hides_usage=True)
    return [json.loads(read(one).data)["choices"][0].get("token_ids") for one in chunks]


@pytest.mark.parametrize(
    ("chunks", "ids"),
    [
        ([chunk([1, 2, 3], [1, 2]), chunk([4], [3, 4]), chunk([5], [5], "stop")], [[1, 2], [3, 4], [5]]),
        ([chunk([1], [1]), chunk([2, 3], None), chunk([], [2]), chunk([4], [3, 4], "stop")], [[1], [], [2], [3, 4]]),
        ([chunk([1], None), chunk([2], None), chunk([], None, "stop")], [[1], [2], None]),  # without any
        ([chunk([1, 2], [1]), chunk([3], [2], "stop")], [[1], [2, 3]]),  # one is missing, which the counts show
        ([chunk([1], [1, 2]), chunk([2], [], "stop")], [[1], [2]]),  # one comes too early
    ],
)
def test_ids_wait_for_their_log_probabilities(chunks, ids):
    assert ids_read(*chunks) == ids

"""NVIDIA's Dynamo as the engine: its own frontend, before mockers, scripted workers whose every reply drifts, and a real vLLM."""

import asyncio
import itertools

import aiohttp
import pytest
from conftest import proxying
from episodes import EPISODES
from rig.agent import Agent
from rig.dynamo_server import Frontend, dynamo_venv
from rig.exported import assert_exported, generations, generations_of, trajectory, turns
from rig.harness import SESSION_HEADER, TOOLS
from rig.model import make_model
from rig.server import LIMIT_S, MODEL

from tests.support.waiting import until
from tokencache.config import Settings
from tokencache.server.serve import serving
from tokencache.store.memory import MemoryStore

pytestmark = [
    pytest.mark.skipif(not (dynamo_venv() / "bin/python").exists(), reason="Dynamo is not installed: make e2e-engine"),
    pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning"),
]
SESSIONS, TURNS = 24, 4
DIALECTS = ("chat", "messages", "responses", "gemini")


@pytest.fixture(scope="module")
def model(servers, tmp_path_factory):
    """A folder with a tiny model."""
    return make_model(servers.tokenizer_dir("own"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def scripted(model, tmp_path_factory):
    """A frontend with three scripted workers."""
    with Frontend(tmp_path_factory.mktemp("scripted"), EPISODES) as dynamo:
        for _ in range(3):
            dynamo.worker("scripted", model)
        dynamo.wait_for(3)
        yield dynamo


@pytest.fixture
async def proxied(scripted):
    scripted.set_pace(0)
    async with proxying(scripted.url, MemoryStore()) as found:
        yield found


async def play(proxied, **fields):
    """Many sessions at once; returns the harnesses."""
    made = [proxied.harness(f"s{n}", stream=bool(n % 2), tools=TOOLS, **fields) for n in range(SESSIONS)]
    harnesses = [harness.say(f"EPISODE:agent, no. {n}") for n, harness in enumerate(made)]

    async def rollout(harness):
        for _ in range(TURNS):
            await harness.turn()

    await asyncio.gather(*map(rollout, harnesses))
    return harnesses


def extended(harnesses):
    """How many turns of all harnesses extend the one before, and how many there are."""
    return tuple(map(sum, zip(*[harness.contiguous for harness in harnesses], strict=True)))


@pytest.mark.parametrize("most", [1, 6])
async def test_every_turn_extends_the_one_before(proxied, scripted, most):
    """Whole and streamed; each token and log probability is exported once, as the harness received it.

    `most`: how many ids a worker sends at once at most; the frontend then has ids without their log probabilities.
    """
    scripted.set_pace(0, most)
    found = proxied.proxy.engine.models[0].capability
    assert (found.level, found.driver, found.logprobs, found.max_model_len) == ("exact", "dynamo", "processed", 32768)
    harnesses = await play(proxied)
    assert extended(harnesses) == (72, 72)
    for harness in harnesses:
        exported = await trajectory(proxied, harness.session)
        assert (exported["complete"], exported["incidents"]) == (True, [])
        assert [(sequence["start"], len(sequence["turns"])) for sequence in exported["sequences"]] == [("root", TURNS)]
        assert generations(exported) == generations_of(harness.replies)
        for _, sampled, logprobs in generations(exported):
            assert logprobs == pytest.approx([-0.001 * (1 + token % 1000) for token in sampled])  # as the worker gives them
    sampled = {(tuple(heard["prompt"]), tuple(heard["sampled"])) for heard in scripted.heard()}
    assert {(tuple(reply.prompt), tuple(reply.ids)) for harness in harnesses for reply in harness.replies} <= sampled
    assert sum(bool(scripted.heard(n)) for n in range(3)) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_agent_in_each_dialect(proxied, dialect, stream):
    agent = Agent(proxied.url, "line").say("EPISODE:spoken please")
    for _ in range(6):
        await agent.turn(dialect, stream=stream)
    await agent.close()
    assert [len(reply.calls) for reply in agent.replies] == [2, 1, 1, 2, 0, 0]
    assert [turn["match"] for turn in await turns(proxied, "line")] == ["root", *["continue"] * 5]
    exported = await trajectory(proxied, "line")
    assert (exported["complete"], exported["incidents"]) == (True, [])
    prefixes = [prompt + sampled for prompt, sampled, _ in generations(exported)]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(prefixes))


async def test_text_completions_are_recorded(proxied):
    asked = {"model": MODEL, "prompt": "EPISODE:count", "max_tokens": 5}
    body = await proxied.post("/s/t/v1/completions", asked, proxied.url)
    assert body["choices"][0].get("token_ids") is None
    (turn,) = await turns(proxied, "t")
    assert turn["completion_tokens"] == 5
    assert (await trajectory(proxied, "t"))["complete"]


@pytest.mark.parametrize("at", ["first-turn", "later-turn"])
async def test_a_client_that_leaves(proxied, scripted, at):
    """Its worker stops; what it had sampled is recorded, although the frontend reports the prompt only at the end of a stream."""
    harness = proxied.harness("left", stream=True, tools=TOOLS).say("EPISODE:long please")
    if at == "later-turn":
        await harness.turn()
    scripted.set_pace(0.02)
    await leave(proxied, harness)
    exported = await ended(proxied, "left", "aborted")
    assert [incident["kind"] for incident in exported["incidents"]] == ["client-gone"]
    assert exported["complete"]
    prompt, sampled, _ = map(list, generations(exported)[-1])

    async def stopped():
        return any(heard["prompt"] == prompt for heard in scripted.heard())

    await until(stopped)
    (heard,) = [heard["sampled"] for heard in scripted.heard() if heard["prompt"] == prompt]
    assert 0 < len(sampled) <= len(heard) < 400
    assert sampled == heard[: len(sampled)]


async def ended(proxied, session, mark):
    """The trajectory of a session, once its last turn has a mark."""

    async def recorded():
        async with proxied.http.get(f"{proxied.url}/tokencache/v1/sessions/{session}/turns") as answer:
            found = (await answer.json()).get("turns", []) if answer.status == 200 else []
        return bool(found) and mark in found[-1]["marks"]

    await until(recorded)
    return await trajectory(proxied, session)


async def leave(proxied, harness):
    """Close a stream after some events."""
    answer = await proxied.http.post(f"{proxied.url}/v1/chat/completions", json=harness.body(), headers={SESSION_HEADER: harness.session})
    received = b""
    while received.count(b"\n\n") < 10:
        received += await answer.content.readany()
    answer.close()


async def test_a_worker_that_dies_in_mid_reply(model, tmp_path):
    """The reply ends with an error, and is a hole that keeps the tokens that arrived. The session continues on another worker."""
    with Frontend(tmp_path, EPISODES) as dynamo:
        for _ in range(2):
            dynamo.worker("scripted", model)
        dynamo.wait_for(2)
        async with proxying(dynamo.url, MemoryStore()) as proxied:
            harness = proxied.harness("s", stream=True, tools=TOOLS).say("EPISODE:long please")
            await harness.turn()
            (first,) = [n for n in range(2) if any(heard["prompt"] == harness.replies[0].prompt for heard in dynamo.heard(n))]
            dynamo.set_pace(0.02)
            answer = await proxied.http.post(f"{proxied.url}/v1/chat/completions", json=harness.body(), headers={SESSION_HEADER: "s"})
            received = b""
            while received.count(b"\n\n") < 10:
                received += await answer.content.readany()
            dynamo.kill(first)
            received += await answer.content.read()
            assert b'"error"' in received
            exported = await ended(proxied, "s", "engine-error")
            assert [incident["kind"] for incident in exported["incidents"]] == ["engine-error"]
            assert not exported["complete"]
            dynamo.set_pace(0)

            async def answered():  # until the frontend notices that the worker is gone, it answers 500
                (reply,) = await harness.ask()
                return reply.status == 200 and harness.take(reply)

            await until(answered)
            assert [turn["match"] for turn in await turns(proxied, "s")] == ["root", "continue", "branch"]
            assert harness.replies[1].extends(harness.replies[0])
            assert any(heard["prompt"] == harness.replies[1].prompt for heard in dynamo.heard(1 - first))


async def test_calls_wait_for_workers(model, tmp_path):
    """A frontend without a worker answers 404 to model calls; a call waits until one has registered."""
    with Frontend(tmp_path, EPISODES) as dynamo:
        await until(dynamo.is_up)
        settings = Settings(upstream=dynamo.url, port=0, hold=LIMIT_S)
        async with serving(settings, MemoryStore()) as (url, proxy), aiohttp.ClientSession() as http:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "EPISODE:hello"}]}
            call = asyncio.ensure_future(http.post(f"{url}/s/w/v1/chat/completions", json=body))
            await asyncio.sleep(0)
            dynamo.worker("scripted", model)
            answer = await call
            assert answer.status == 200, await answer.text()
            (found,) = {capability.model: capability for capability in proxy.engine.capabilities}.values()
            assert found.level == "exact"
            assert [caution for caution in found.cautions if "--migration-limit 0" in caution]


async def test_sessions_stay_on_a_worker(proxied, scripted):
    """Whatever a harness sends as Dynamo's own headers. The frontend is told when one ends."""
    own = ({"X-Dynamo-Session-ID": "one"}, {"X-Dynamo-Session-ID": "other"}, {"X-Dynamo-Parent-Session-ID": "one"}, {})
    places = []
    for n in range(8):
        found = []
        for headers in own:
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": f"EPISODE:hello from {n} {headers}"}],
                "return_token_ids": True,
            }
            url = f"{proxied.url}/s/pin-{n}/v1/chat/completions"
            async with proxied.http.post(url, json=body, headers=headers) as answer:
                prompt = (await answer.json())["prompt_token_ids"]

            async def heard_by(prompt=prompt):  # a worker may write its log after its reply has arrived
                return [worker for worker in range(3) for heard in scripted.heard(worker) if heard["prompt"] == prompt]

            found += await until(heard_by)
        places.append(found)
    assert all(len(found) == len(own) and len({*found}) == 1 for found in places)
    assert len({found[0] for found in places}) > 1
    await proxied.post("/tokencache/v1/sessions/pin-0/finish", {}, proxied.url)

    async def told():
        async with proxied.http.get(f"{proxied.url}/metrics") as answer:
            return 'tokencache_session_ends_total{result="told"} 1.0' in await answer.text()

    await until(told)


async def test_mockers(model, tmp_path):
    """They sample random ids, without log probabilities or ends of turn: requests name the template's end of turn as a stop id."""
    with Frontend(tmp_path, {}) as dynamo:
        for _ in range(3):
            dynamo.worker("mocker", model)
        dynamo.wait_for(3)
        async with proxying(dynamo.url, MemoryStore()) as proxied:
            for found in proxied.proxy.engine.models:
                found.stop_ids.update(found.capability.turn_ends)
            harnesses = await play(proxied, max_tokens=40)
            assert extended(harnesses) == (72, 72)
            for harness in harnesses:
                exported = await trajectory(proxied, harness.session)
                assert {incident["kind"] for incident in exported["incidents"]} == {"no-logprobs"}
                assert [len(sequence["turns"]) for sequence in exported["sequences"]] == [TURNS]


async def test_a_real_vllm(model, servers, tmp_path):
    """The same as with scripted workers: 72 of 72, and log probabilities of the distribution that was sampled from."""
    servers.stop()  # one vLLM at a time
    with Frontend(tmp_path, EPISODES) as dynamo:
        dynamo.worker("vllm", model)
        dynamo.wait_for(1)
        async with proxying(dynamo.url, MemoryStore()) as proxied:
            found = proxied.proxy.engine.models[0].capability
            assert (found.level, found.logprobs, len(found.stop_ids)) == ("exact", "processed", 1)
            harnesses = await play(proxied)
            assert extended(harnesses) == (72, 72)
            for harness in harnesses:
                assert_exported(await trajectory(proxied, harness.session), harness.replies)

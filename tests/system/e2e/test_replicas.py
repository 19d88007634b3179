"""Several proxies, one Redis, one real vLLM: any proxy serves any call, one is killed, and a retried call is one call.

The proxies are separate processes, as in a deployment. The reference is the engine: the ids that it returns to the harness, and its own
log.
"""

import signal
import time

import aiohttp
import pytest
from conftest import GroundTruth, Proxied
from openai import AsyncOpenAI
from rig.exported import assert_exported, generations, generations_of, get_json, trajectory
from rig.harness import SESSION_HEADER, TOOLS
from rig.replica import replica
from rig.server import LIMIT_S, MODEL

from tests.support.redis_server import RealRedis, find_binary

pytestmark = pytest.mark.skipif(find_binary() is None, reason="no redis-server on this machine")

TURNS = 5
LONG = 24_000
"""Tokens that take a fast machine many seconds to sample."""


@pytest.fixture
async def http():
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session:
        yield session


@pytest.fixture
async def pair(vllm, http):
    """Two proxies on one Redis: their processes, and clients of each."""
    with RealRedis() as redis:
        async with (
            replica(http, "--upstream", vllm, "--store", redis.url) as (one, first),
            replica(http, "--upstream", vllm, "--store", redis.url) as (two, second),
        ):
            yield (one, Proxied(first, vllm, http, None)), (two, Proxied(second, vllm, http, None))


@pytest.mark.parametrize("stream", [False, True])
async def test_every_turn_on_another_replica(pair, stream):
    (_, one), (_, two) = pair
    harness = one.harness("wandering", stream=stream, tools=TOOLS).say("EPISODE:agent please")
    for n in range(TURNS):
        harness.url = (one, two)[n % 2].url
        await harness.turn(then=f"Go on: {n}", answer="total 1\n")
    assert harness.contiguous == (TURNS - 1, TURNS - 1)
    exported = await trajectory(two, "wandering")
    assert_exported(exported, harness.answered)
    assert exported == await trajectory(one, "wandering")


async def test_a_replica_is_killed_in_mid_stream(pair):
    """Its rollouts continue on the other; the reply in progress is a reported hole, and all the rest is exact."""
    (victim, one), (_, two) = pair
    harness = one.harness("bereft", stream=True, seed=3, max_tokens=40).say("EPISODE:long please")
    await harness.turn()
    bystander = two.harness("bystander", stream=True, seed=4, max_tokens=40).say("EPISODE:long please")
    await bystander.turn()
    answer = await one.http.post(f"{one.url}/v1/chat/completions", json=harness.body(max_tokens=LONG), headers={SESSION_HEADER: "bereft"})
    received = b""
    while received.count(b"\n\n") < 20:
        received += await answer.content.readany()
    victim.send_signal(signal.SIGKILL)
    await victim.wait()
    answer.close()
    for walker in (harness, bystander):
        walker.url = two.url
        await walker.turn()
        assert walker.contiguous == (1, 1)
    assert_exported(await trajectory(two, "bystander"), bystander.answered)
    exported = await trajectory(two, "bereft")
    assert not exported["complete"]
    assert {incident["kind"] for incident in exported["incidents"] if incident["hole"]} & {"call-open", "replica-lost"}
    assert sorted(generations(exported)) == sorted(generations_of(harness.answered))


async def test_a_call_that_its_sdk_retries_is_sampled_once(pair, vllm_server, figures):
    """OpenAI's client times out and retries at the other replica: the engine gets one call."""
    (_, one), (_, two) = pair
    ground_truth = GroundTruth(one, vllm_server)
    fields = {"max_tokens": 1500, "seed": 5}
    began = time.monotonic()
    await one.direct(ids=False, system="", **fields).say("EPISODE:long please").ask()
    attempts = iter([(one.url, 0.75 * (time.monotonic() - began)), (two.url, LIMIT_S)])

    async def balance(request):  # as a balancer would, call by call
        url, request.extensions["timeout"]["read"] = next(attempts)
        request.url = request.url.copy_with(port=int(url.rpartition(":")[2]))

    client = AsyncOpenAI(base_url=f"{one.url}/v1", api_key="tcs-repeated", max_retries=1)
    client._client.event_hooks["request"].append(balance)
    await ground_truth.read_new()
    completion = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "EPISODE:long please"}], **fields)
    await client.close()
    sampled = [(prompt, ids) for prompt, ids in await ground_truth.read_new() if "EPISODE:long" in await one.detokenize(prompt)]
    assert [len(ids) for _, ids in sampled] == [completion.usage.completion_tokens]
    exported = await trajectory(two, "repeated")
    assert [(list(prompt), list(ids)) for prompt, ids, _ in generations(exported)] == sampled
    assert exported["complete"]
    assert {incident["kind"] for incident in exported["incidents"]} <= {"retry-joined", "retry-replayed"}
    figures.append(f"a call that OpenAI's client retries at another replica: {[i['kind'] for i in exported['incidents']]}, sampled once")
    info = await get_json(two.http, f"{two.url}/tokencache/v1/sessions/repeated")
    assert (info["turns"], info["open_calls"]) == (1, [])

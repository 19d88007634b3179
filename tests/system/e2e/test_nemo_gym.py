"""NeMo Gym 0.7.0 itself with the proxy in each position that docs/topologies/nemo-gym.md names, on a real vLLM.

Gym's `simple_agent` runs Gym's own task; only RL's worker is a test server (tests/system/nemo/worker.py), because NeMo RL is on no index.
Each test checks what NeMo RL asserts of a rollout (`follow`), and that its ids are those of the engine's own log. Every reply is sampled in
tokens that its text would not be tokenized to, " Skinny" as " Skin" and "ny" among them.
"""

import asyncio
import contextlib
import json
import subprocess
from collections import Counter

import pytest
from conftest import proxying
from rig.exported import trajectory
from rig.gym import POLICY, TOOLS, default_venv, gym_servers, model_server
from rig.server import MODEL
from test_nemo import worker_on

from tests.system.nemo.gym_agent import bare, carrying
from tests.trajectories.formats.readers import follow, token_fields
from tokencache.store.memory import MemoryStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning"),
    pytest.mark.skipif(
        not default_venv().exists(), reason=f"NeMo Gym is not in {default_venv()}: tests/system/e2e/rig/install_nemo_gym.sh"
    ),
]
ROLLOUTS = 6
CALLS = 4
SAMPLED_APART = {" Skinny": (" Skin", "ny"), " Invisible": (" In", "visible"), " Climb": (" Clim", "b")}
OBSERVED = {"observability_enabled": True}
"""Makes Gym's agents put the rollout's id in the path."""


@pytest.fixture
def folder(tmp_path):
    return tmp_path


async def rollouts(gym):
    return await asyncio.gather(*(gym.rollout(number) for number in range(ROLLOUTS)))


def trained(result):
    """A rollout as NeMo RL reads it; raises `AssertionError` where NeMo RL does."""
    return follow(token_fields(item) for item in carrying(result["response"]["output"]))


async def assert_exact(proxied, results, ground_truth):
    """Every rollout passes RL's check and the task's verifier, with the ids that the engine logged, which tokenizing would not give."""
    calls = [token_fields(item)[:2] for result in results for item in carrying(result["response"]["output"])]
    assert len(calls) == ROLLOUTS * CALLS
    assert Counter(map(str, calls)) == Counter(map(str, await ground_truth.read_new_episodes()))
    for result in results:
        trained(result)
    assert [result["reward"] for result in results] == [1.0] * ROLLOUTS
    for _, sampled in calls[:CALLS]:
        assert await tokenized(proxied, await proxied.detokenize(sampled)) != sampled


async def tokenized(proxied, text):
    return (await proxied.post("/tokenize", {"model": MODEL, "prompt": text, "add_special_tokens": False}))["tokens"]


async def assert_sessions(proxied, results):
    """The proxy has each rollout under Gym's name for it, in one line, with the ids of Gym's result."""
    for number, result in enumerate(results):
        exported = await trajectory(proxied, f"7-{number}")
        (sequence,) = exported["sequences"]
        assert exported["complete"]
        assert (sequence["token_ids"], sequence["loss_mask"], sequence["logprobs"]) == trained(result)


def pointed_at(url):
    """The two variables that point a Gym agent process at a model server."""
    return {"NEMO_GYM_MODEL_SERVER_NAME": POLICY, "NEMO_GYM_MODEL_SERVER_BASE_URL": url}


async def test_without_the_proxy_rl_refuses_every_rollout(vllm, proxied, ground_truth, folder):
    server = model_server("vllm_model", vllm, request_prompt_and_generation_token_ids=True)
    async with gym_servers(folder, server) as gym:
        results = await rollouts(gym)
    for result in results:
        with pytest.raises(AssertionError, match="Non-contiguous"):
            trained(result)


async def test_gym_s_model_server_in_front_of_the_proxy(vllm, proxied, ground_truth, folder):
    named = {"forward_session_id_as_conversation_id": True, "request_prompt_and_generation_token_ids": True}
    async with (
        proxying(vllm, MemoryStore(), session_from="body:conversation_params.conversation_id") as before,
        gym_servers(folder, model_server("vllm_model", before.url, **named)) as gym,
    ):
        await assert_exact(proxied, await rollouts(gym), ground_truth)


@pytest.mark.parametrize("observed", [True, False], ids=["rollout-id", "cookie"])
async def test_our_model_server_gives_each_rollout_a_session(vllm, proxied, ground_truth, folder, observed):
    async with (
        proxying(vllm, MemoryStore()) as before,
        gym_servers(folder, model_server("tokencache_model", before.url), observability_enabled=observed) as gym,
    ):
        results = await rollouts(gym)
        await assert_exact(proxied, results, ground_truth)
        if observed:
            await assert_sessions(before, results)


@pytest.mark.parametrize("tokenizer", ["qwen3"], indirect=True)
async def test_the_tokens_of_nemo_rl_s_stored_test_vectors(vllm, proxied, ground_truth, folder):
    """What Qwen3 once sampled and NeMo RL keeps (`maybe_correct_merged_tokens_test_data.json`): " Skin" + "ny" for " Skinny"."""
    async with (
        proxying(vllm, MemoryStore()) as before,
        gym_servers(folder, model_server("tokencache_model", before.url), **OBSERVED) as gym,
    ):
        results = await rollouts(gym)
        await assert_exact(proxied, results, ground_truth)
        await assert_sessions(before, results)
    for word, halves in SAMPLED_APART.items():
        apart = [await tokenized(proxied, half) for half in halves]
        assert [len(half) for half in apart] == [1, 1]
        merged = await tokenized(proxied, word)
        for result in results:
            ids = trained(result).token_ids
            assert spelled([token for half in apart for token in half], ids)
            assert not spelled(merged, ids)


def spelled(part, ids):
    """Whether these ids are consecutive."""
    return any(ids[at : at + len(part)] == part for at in range(len(ids)))


async def test_the_proxy_as_gym_s_model_server(vllm, proxied, ground_truth, folder):
    async with (
        proxying(vllm, MemoryStore(), return_token_id_information=True) as before,
        gym_servers(folder, {}, environment=pointed_at(before.url), **OBSERVED) as gym,
    ):
        results = await rollouts(gym)
        await assert_exact(proxied, results, ground_truth)
        await assert_sessions(before, results)


async def test_the_proxy_as_gym_s_model_server_in_front_of_rl_s_worker(vllm, proxied, ground_truth, folder):
    async with (
        worker_on(vllm, proxied.http) as (_, worker),
        proxying(worker, MemoryStore(), return_token_id_information=True) as before,
        gym_servers(folder, {}, environment=pointed_at(before.url), **OBSERVED) as gym,
    ):
        results = await rollouts(gym)
        await assert_exact(proxied, results, ground_truth)
        await assert_sessions(before, results)


async def test_the_proxy_in_front_of_gym_s_model_server_and_rl_s_worker(vllm, proxied, ground_truth, folder):
    (folder / "inner").mkdir()
    async with contextlib.AsyncExitStack() as stack:
        _, worker = await stack.enter_async_context(worker_on(vllm, proxied.http))
        inner = await stack.enter_async_context(gym_servers(folder / "inner", model_server("vllm_model", worker), agent=False))
        settings = {"engine": "nemo-gym", "return_token_id_information": True}
        before = await stack.enter_async_context(proxying(inner.urls[POLICY], MemoryStore(), **settings))
        gym = await stack.enter_async_context(gym_servers(folder, {}, environment=pointed_at(before.url), **OBSERVED))
        results = await rollouts(gym)
        await assert_exact(proxied, results, ground_truth)
        await assert_sessions(before, results)


CHAT_TOOLS = [{"type": "function", "function": {name: tool[name] for name in ("name", "description", "parameters")}} for tool in TOOLS]


async def test_gym_s_capture_puts_the_ids_into_the_result_of_a_harness_that_drops_them(vllm, proxied, ground_truth, folder):
    captures = folder / "tokens"
    async with (
        proxying(vllm, MemoryStore()) as before,
        gym_servers(
            folder,
            model_server("tokencache_model", before.url),
            agent=False,
            token_id_capture={"enabled": True, "all_agents": True, "dir": str(captures)},
        ) as gym,
    ):
        url = f"{gym.urls[POLICY]}/ng-rollout/5-1/training-token-capture/v1/chat/completions"
        messages = [{"role": "user", "content": "EPISODE:gym please"}]
        for _ in range(CALLS):
            async with gym.http.post(url, json={"model": MODEL, "messages": messages, "tools": CHAT_TOOLS}) as answer:
                served = (await answer.json())["choices"][0]["message"]
            message = {name: value for name, value in bare(served).items() if value is not None}
            calls = message.get("tool_calls") or []
            messages += [message, *({"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in calls)]
        (sequence,) = (await trajectory(before, "5-1"))["sequences"]
        rebuilt = finalized(gym.python, captures, {"_ng_rollout_id": "5-1", "response": answered(message)})
    assert not rebuilt.get("mask_sample"), rebuilt
    assert (sequence["token_ids"], sequence["loss_mask"], sequence["logprobs"]) == trained(rebuilt)
    calls = [token_fields(item)[:2] for item in carrying(rebuilt["response"]["output"])]
    assert [(prompt, completion) for prompt, completion in calls] == [
        (list(prompt), list(completion)) for prompt, completion in await ground_truth.read_new_episodes()
    ]


async def test_a_harness_that_sends_no_identity_is_logged_once(vllm, folder):
    async with (
        proxying(vllm, MemoryStore()) as before,
        gym_servers(folder, model_server("tokencache_model", before.url), agent=False) as gym,
    ):
        messages = [{"role": "user", "content": "EPISODE:plain please"}]
        for _ in range(3):
            async with gym.http.post(f"{gym.urls[POLICY]}/v1/chat/completions", json={"model": MODEL, "messages": messages}) as answer:
                completion = (await answer.json())["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": completion}, {"role": "user", "content": "go on"}]
    logged = (folder / f"{POLICY}.log").read_text()
    assert logged.count("has neither a rollout id nor the session cookie") == 1


def answered(message):
    """The result of such a harness's agent: the last reply's text, without ids."""
    text = {"type": "output_text", "text": message["content"], "annotations": []}
    return {"model": MODEL, "output": [{"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [text]}]}


FINALIZE = """
import asyncio, json, sys
from nemo_gym.token_id_capture.delivery import finalize_rollout_token_capture
from nemo_gym.token_id_capture.store import TokenCaptureStore
result = json.loads(sys.argv[2])
asyncio.run(finalize_rollout_token_capture(result, TokenCaptureStore(sys.argv[1])))
print(json.dumps(result))
"""


def finalized(python, captures, result):
    """Lets Gym add what it captured to a rollout's result, as its rollout collection does."""
    command = [str(python), "-c", FINALIZE, str(captures), json.dumps(result)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return json.loads(done.stdout.splitlines()[-1])

"""NeMo RL's worker, and NeMo Gym's server in front of it, on a real vLLM. A test server replaces the worker (tests/system/nemo).

Extension is judged from the engine's answers, which contain the ids that it used and sampled, and from the engine's own log.
"""

import contextlib

import pytest
from conftest import proxying
from rig.exported import assert_exported, generations, trajectory, turns
from rig.harness import TOOLS
from rig.server import MODEL

from tests.system.nemo.agents import AGENTS
from tests.system.nemo.gym_server import GymServer
from tests.system.nemo.worker import TOKEN_FIELDS, Worker
from tokencache.store.memory import MemoryStore

TURNS = 5
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")


@contextlib.asynccontextmanager
async def worker_on(vllm, http):
    """A worker in front of the engine, which stops at Qwen3's end of turn."""
    async with http.post(f"{vllm}/tokenize", json={"prompt": "<|im_end|>", "add_special_tokens": False}) as answer:
        (eos,) = (await answer.json())["tokens"]
    async with http.get(f"{vllm}/v1/models") as answer:
        longest = (await answer.json())["data"][0]["max_model_len"]
    worker = Worker(vllm, eos, max_model_len=longest)
    async with worker.serve() as url:
        yield worker, url


@pytest.fixture
async def before_worker(vllm, proxied):
    async with worker_on(vllm, proxied.http) as (worker, url), proxying(url, MemoryStore()) as before:
        await before.proxy.engine.model(MODEL)
        worker.calls.clear()
        yield before, worker


@pytest.fixture
async def before_gym(vllm, proxied):
    async with worker_on(vllm, proxied.http) as (_, between):
        gym = GymServer(between)
        async with gym.serve() as url, proxying(url, MemoryStore()) as before:
            await before.proxy.engine.model(MODEL)
            gym.calls.clear()
            yield before, gym


def episodes(worker):
    return [call for call in worker.calls if "return_weight_versions" in call]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("episode", ["agent", "talk", "odd"])
async def test_every_turn_extends_the_previous_one(before_worker, episode, stream):
    before, worker = before_worker
    harness = before.harness("s", stream=stream, tools=TOOLS).say(f"EPISODE:{episode} please")
    for n in range(TURNS):
        await harness.turn(then=f"Go on: {n} ☕", answer=f"total {n}\n")
    assert harness.contiguous == (TURNS - 1, TURNS - 1)
    assert_exported(await trajectory(before, "s"), harness.answered)
    assert [turn["match"] for turn in await turns(before, "s")] == ["root"] + ["continue"] * (TURNS - 1)
    asked = episodes(worker)
    prefixes = [reply.prefix for reply in harness.answered]
    assert [call.get("required_prefix_token_ids") for call in asked] == [None, *prefixes[:-1]]
    assert not any("stream" in call for call in asked)
    assert not any(message.keys() & set(TOKEN_FIELDS) for call in asked for message in call["messages"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", ["messages", "responses", "gemini"])
async def test_in_every_dialect(before_worker, ground_truth, dialect, stream):
    before, worker = before_worker
    await AGENTS[dialect](before, "s", 3, stream=stream, start="EPISODE:agent please", model=MODEL)
    assert [turn["match"] for turn in await turns(before, "s")] == ["root", "continue", "continue"]
    exported = await trajectory(before, "s")
    assert [(prompt, sampled) for prompt, sampled, _ in generations(exported)] == [
        (tuple(prompt), tuple(sampled)) for prompt, sampled in await ground_truth.read_new_episodes()
    ]
    assert len(episodes(worker)) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_reply_cut_by_its_limit_is_continued(before_worker, stream):
    before, _ = before_worker
    harness = before.harness("s", stream=stream).say("EPISODE:talk please")
    await harness.turn(max_tokens=9)
    await harness.turn()
    assert harness.answered[0].finish_reason == "length"
    assert harness.contiguous == (1, 1)
    assert_exported(await trajectory(before, "s"), harness.answered)


async def test_the_probe_finds_nemo_rls_worker(before_worker):
    before, _ = before_worker
    found = (await before.proxy.engine.model(MODEL)).capability
    assert (found.level, found.driver, found.tokenizes) == ("exact", "nemo-rl", True)
    assert found.stop_ids
    assert found.logprobs == "raw"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_gyms_server_carries_the_ids_on_the_last_message(before_gym, stream):
    before, gym = before_gym
    harness = before.harness("s", stream=stream, tools=TOOLS).say("EPISODE:agent please")
    for n in range(TURNS):
        await harness.turn(then=f"Go on: {n} ☕")
    assert harness.contiguous == (TURNS - 1, TURNS - 1)
    assert_exported(await trajectory(before, "s"), harness.answered)
    assert [turn["reason"] for turn in await turns(before, "s")] == ["", *["tail-by-engine"] * (TURNS - 1)]
    given = [[m for m in call["messages"] if m.keys() & set(TOKEN_FIELDS)] for call in gym.calls]
    assert [len(messages) for messages in given] == [0] + [1] * (TURNS - 1)

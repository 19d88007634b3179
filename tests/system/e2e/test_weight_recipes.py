"""The updates of docs/weights.md on a real vLLM: what each trainer asks of the engine, in its order, with the lines to add for tokencache.

The weights are loaded from a folder, because a CPU has no NCCL.
"""

import asyncio

import pytest
from conftest import proxying
from rig.marks import marks_of
from rig.server import LIMIT_S

from tokencache.client import AsyncClient
from tokencache.store.memory import MemoryStore

RECIPES = {
    "prime-rl, SkyRL": "/pause?mode=keep&clear_cache=false",
    "TRL, asynchronous": "/pause?mode=keep",
    "verl": "/pause?mode=abort&clear_cache=true",
    "TRL, synchronous": "",  # nothing is sampled meanwhile, so it does not pause
    "NeMo RL": "",  # its workers go on sampling (`in_flight_weight_updates`), and keep the prefix cache
}


async def load(proxied, server):
    """What the trainer does to send its weights."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(server.model_dir)}}
    async with proxied.http.post(f"{proxied.vllm}/collective_rpc", json=body) as answer:
        assert answer.status == 200, await answer.text()


async def post(proxied, path):
    async with proxied.http.post(proxied.vllm + path) as answer:
        assert answer.status == 200, await answer.text()


async def versions(proxied):
    """The versions of the last turn's tokens."""
    return [span["version"] for span in (await proxied.store.turns("s"))[-1].versions]


@pytest.mark.parametrize("recipe", RECIPES)
async def test_a_trainer_that_pauses_the_engine_itself(weights_server, recipe):
    async with proxying(weights_server.url, MemoryStore(), hold=LIMIT_S) as proxied, AsyncClient(proxied.url) as client:
        proxied.store = proxied.proxy.store
        await client.set_weights(0)
        harness = proxied.harness("s").say("EPISODE:demo")
        await harness.turn()
        assert await versions(proxied) == ["0"]
        await client.set_weights(phase="updating")
        waiting = asyncio.create_task(harness.turn())
        if RECIPES[recipe]:
            await post(proxied, RECIPES[recipe])
        await load(proxied, weights_server)
        if recipe == "TRL, synchronous":
            await post(proxied, "/reset_prefix_cache")
        assert not waiting.done()
        await client.set_weights(1)
        if RECIPES[recipe]:
            await post(proxied, "/resume")
        await waiting
        assert await versions(proxied) == ["1"]
        turns = await proxied.store.turns("s")
        assert [(turn.prompt_version, marks_of(turn)) for turn in turns] == [("0", []), ("1", [])]


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
async def test_a_trainer_that_lets_the_proxy_pause_the_engine(weights_server, mode):
    async with proxying(weights_server.url, MemoryStore(), hold=LIMIT_S) as proxied, AsyncClient(proxied.url) as client:
        proxied.store = proxied.proxy.store
        await client.set_weights(0)
        harness = proxied.harness("s").say("EPISODE:demo")
        await harness.turn()
        async with client.update_weights(1, mode=mode):
            waiting = asyncio.create_task(harness.turn())
            await load(proxied, weights_server)
            assert not waiting.done()
        await waiting
        assert await versions(proxied) == ["1"]
        async with proxied.http.get(f"{proxied.vllm}/weight_info") as answer:
            assert (await answer.json())["weight_version"] == "1"

"""NeMo RL chooses its workers' ports while it runs: they are added to a proxy that was started without an engine."""

import asyncio
import contextlib

import aiohttp
import pytest

from tests.proxy.kit import EPISODES, Rig
from tests.support.waiting import until
from tests.system.nemo.agents import AGENTS
from tests.system.nemo.worker import Worker
from tokencache.client import AsyncClient
from tokencache.config import Settings
from tokencache.engine import membership
from tokencache.server.serve import serving
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")


@pytest.fixture(autouse=True)
def _briskly(monkeypatch):
    monkeypatch.setattr(membership, "POLL_SECONDS", 0.01)
    monkeypatch.setattr("tokencache.engine.health.CHECK_EVERY", 0.02)


@contextlib.asynccontextmanager
async def training(workers=2):
    """A run of NeMo RL: yields its workers by the URLs that it reports, `/v1` at the end, and the engine's log."""
    engine = SimulatedEngine(episodes=EPISODES, seed=7)
    async with engine.serve() as up, contextlib.AsyncExitStack() as stack:
        made = [Worker(up, engine.tokenizer.stop_id, max_model_len=engine.max_model_len) for _ in range(workers)]
        yield {await stack.enter_async_context(one.serve()) + "/v1": one for one in made}, engine


async def add(client, workers):
    """Add workers, and wait until calls can use each of them."""
    for worker in workers:
        await client.add_engine(worker)

    async def all_serve():
        return [one.serves for one in await client.engines()] == [True] * len(workers)

    await until(all_serve)


@pytest.mark.whole
@pytest.mark.parametrize("dialect", AGENTS)
async def test_workers_are_added_and_one_is_taken_out(dialect):
    async with training() as (workers, engine), aiohttp.ClientSession() as http:
        store = MemoryStore()
        settings = Settings(port=0, hold=0, engine="nemo-rl", require="exact")
        async with serving(settings, store) as (url, proxy), AsyncClient(url) as client:
            rig = Rig(url, "", engine, proxy, store, http)
            assert not (await rig.readiness())["ready"]
            await add(client, workers)
            assert (await rig.readiness())["ready"]
            home = proxy.pool.order("s")[0].upstream.url
            await AGENTS[dialect](rig, "s", 2, stream=False)
            await client.drain_engine(home)

            async def drained():
                return next(one.drained for one in await client.engines() if one.url == home)

            await until(drained)
            await client.remove_engine(home)
            await AGENTS[dialect](rig, "t", 4, stream=False)
            assert [turn["match"] for turn in await rig.turns("s")] == ["root", "continue"]
            assert [turn["match"] for turn in await rig.turns("t")] == ["root"] + ["continue"] * 3
            for session in ("s", "t"):
                assert (await rig.check(session))["complete"]


async def test_a_session_continues_on_another_worker():
    async with training() as (workers, engine), aiohttp.ClientSession() as http:
        store = MemoryStore()
        async with serving(Settings(port=0, hold=0, engine="nemo-rl"), store) as (url, proxy), AsyncClient(url) as client:
            rig = Rig(url, "", engine, proxy, store, http)
            await add(client, workers)
            playing = asyncio.create_task(AGENTS["chat"](rig, "s", 4, stream=True))

            async def begun():
                return (info := await store.session("s")) is not None and info.turns >= 1

            await until(begun)
            await client.remove_engine(proxy.pool.order("s")[0].upstream.url, force=True)
            await playing
            assert [turn["match"] for turn in await rig.turns()] == ["root"] + ["continue"] * 3
            assert (await rig.check())["complete"]
            assert all(any("return_weight_versions" in call for call in worker.calls) for worker in workers.values())

"""Announcing versions of the weights over HTTP, and updates that the proxy carries out: on all replicas, and nothing stays held."""

import contextlib

import aiohttp
import pytest

from tokencache.config import Settings
from tokencache.server.serve import serving
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine

WEIGHTS = "/tokencache/v1/weights"


@contextlib.asynccontextmanager
async def replicas(*engines, count=1):
    """Proxies that share a store, in front of these engines; yields a function that sends a request to one of them."""
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(engine.serve()) for engine in engines]
        http, store = await stack.enter_async_context(aiohttp.ClientSession()), MemoryStore()
        settings = Settings(upstream=",".join(urls), port=0, hold=0)
        proxies = [(await stack.enter_async_context(serving(settings, store)))[0] for _ in range(count)]

        async def send(method, path=WEIGHTS, *, status=200, replica=0, **body):
            async with http.request(method, proxies[replica] + path, json=body or None) as answer:
                said = await answer.json()
                assert answer.status == status, said
                return said

        yield send, urls


async def test_before_any_announcement_the_version_is_unknown():
    async with replicas(SimulatedEngine()) as (send, urls):
        known = await send("GET")
        assert (known["version"], known["phase"]) == ("", "unknown")
        assert known["engines"] == [{"url": urls[0], "version": "", "phase": "unknown"}]


async def test_a_version_is_known_to_all_replicas_at_once():
    async with replicas(SimulatedEngine(), count=2) as (send, _):
        await send("PUT", version=7)
        known = await send("GET", replica=1)
        assert (known["version"], known["phase"]) == ("7", "ready")
        assert [one["version"] for one in known["history"]] == ["7"]


async def test_a_version_may_be_announced_for_one_engine():
    async with replicas(SimulatedEngine(), SimulatedEngine()) as (send, urls):
        await send("PUT", version="7")
        await send("PUT", version="8", engines=[urls[1]])
        assert {one["url"]: one["version"] for one in (await send("GET"))["engines"]} == {urls[0]: "7", urls[1]: "8"}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"version": "default"}, 422, "cannot name a version"),
        ({"phase": "ready"}, 422, "cannot name a version"),
        ({"version": "7", "engines": ["http://nowhere:1"]}, 404, "there is no engine"),
        ({"version": "7", "fase": "ready"}, 422, "did you mean 'phase'"),
        ({"phase": "updating", "timeout": 0}, 400, "timeout"),
    ],
)
async def test_what_cannot_be_announced_is_refused(body, status, words):
    async with replicas(SimulatedEngine()) as (send, _):
        assert words in (await send("PUT", status=status, **body))["error"]["message"]
        assert (await send("GET"))["phase"] == "unknown"


async def test_another_owner_waits_until_the_update_ends():
    async with replicas(SimulatedEngine(), count=2) as (send, _):
        await send("PUT", phase="updating", owner="one")
        refused = await send("PUT", status=409, replica=1, version="9", owner="two")
        assert refused["error"]["type"] == "weights_conflict"
        assert "'one'" in refused["error"]["message"]
        await send("PUT", version="8", owner="one")
        assert (await send("PUT", replica=1, version="9", owner="two"))["version"] == "9"


async def test_an_update_pauses_the_engines_and_resumes_them():
    engine = SimulatedEngine(dev_mode=True)
    async with replicas(engine, count=2) as (send, _):
        begun = await send("POST", WEIGHTS + "/update", status=201, mode="keep", owner="trainer")
        assert begun["phase"] == "updating"
        finish = f"{WEIGHTS}/update/{begun['id']}/finish"
        ended = await send("POST", finish, replica=1, version=3)
        assert (ended["version"], ended["phase"]) == ("3", "ready")
        assert (await send("POST", finish, version=3))["version"] == "3"  # a repeated request
        assert engine.dev_mode.calls[:3] == ["pause keep", "update_weight_version 3", "resume"]
        assert not engine.dev_mode.paused
        assert "announce their version" in (await send("POST", finish, status=409, version=4))["error"]["message"]


async def test_a_cancelled_update_leaves_the_version_unknown_and_nothing_held():
    engine = SimulatedEngine(dev_mode=True)
    async with replicas(engine) as (send, _):
        await send("PUT", version="7")
        begun = await send("POST", WEIGHTS + "/update", status=201, mode="abort")
        cancelled = await send("DELETE", f"{WEIGHTS}/update/{begun['id']}")
        assert (cancelled["version"], cancelled["phase"]) == ("", "unknown")
        assert not engine.dev_mode.paused


async def test_an_update_that_nobody_ends_has_a_timeout():
    engine = SimulatedEngine(dev_mode=True)
    async with replicas(engine, count=2) as (send, _):
        await send("POST", WEIGHTS + "/update", status=201, timeout=0.01)
        while (await send("GET", replica=1))["phase"] == "updating":
            pass
        assert not engine.dev_mode.paused


async def test_an_engine_that_cannot_pause_is_named_and_the_others_are_resumed():
    able, unable = SimulatedEngine(dev_mode=True), SimulatedEngine()
    async with replicas(able, unable) as (send, urls):
        await send("PUT", version="7")
        refused = (await send("POST", WEIGHTS + "/update", status=409, mode="keep"))["error"]
        assert refused["type"] == "engine_not_paused"
        assert urls[1] in refused["message"]
        assert "VLLM_SERVER_DEV_MODE=1" in refused["message"]
        assert not able.dev_mode.paused
        assert ((await send("GET"))["version"], (await send("GET"))["phase"]) == ("7", "ready")

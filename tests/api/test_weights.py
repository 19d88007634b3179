"""Announcing versions of the weights over HTTP, and updates that the proxy carries out: on all replicas, and nothing stays held."""

import contextlib
import time

import aiohttp
import msgspec
import pytest

from tests.support.waiting import until
from tokencache.config import Settings
from tokencache.core.weights import WeightsState
from tokencache.server.serve import serving
from tokencache.store.clock import RECORD_CLOCK
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine
from tokencache.testing.dev_mode import DevMode
from tokencache.testing.responses import json_response

WEIGHTS = "/tokencache/v1/weights"


class LossyStore(MemoryStore):
    """A store that can lose what was announced, as a Redis that starts empty."""

    def lose_weights(self):
        self._weights = WeightsState()


@contextlib.asynccontextmanager
async def replicas(*engines, count=1, upstream=()):
    """Proxies that share a store, in front of these engines and URLs.

    Yields a function that sends a request to one of them, with the attributes `store` and `proxies`, and the URLs of the engines.
    """
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(engine.serve()) for engine in engines]
        http, store = await stack.enter_async_context(aiohttp.ClientSession()), LossyStore()
        settings = Settings(upstream=",".join([*urls, *upstream]), port=0, hold=0)
        served = [await stack.enter_async_context(serving(settings, store)) for _ in range(count)]

        async def send(method, path=WEIGHTS, *, status=200, replica=0, **body):
            async with http.request(method, served[replica][0] + path, json=body or None) as answer:
                said = await answer.json()
                assert answer.status == status, said
                return said

        send.store, send.proxies = store, [proxy for _, proxy in served]
        yield send, urls


async def test_before_any_announcement_the_version_is_unknown():
    async with replicas(SimulatedEngine()) as (send, urls):
        known = await send("GET")
        assert (known["version"], known["phase"]) == ("", "unknown")
        (engine,) = known["engines"]
        assert (engine["url"], engine["version"], engine["phase"], engine["source"]) == (urls[0], "", "unknown", "")
        assert "PUT /tokencache/v1/weights" in engine["hint"]


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
        await send("POST", WEIGHTS + "/update", status=201, timeout=1.0)

        async def over():
            return (await send("GET", replica=1))["phase"] != "updating" and not engine.dev_mode.paused

        await until(over)


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


async def announced(store, transition):
    """Store what another replica would have stored."""
    state = await store.weights()
    assert await store.replace_weights(msgspec.structs.replace(transition(state), revision=state.revision + 1))


async def test_an_engine_that_was_down_has_no_version_until_it_is_announced_again():
    async with replicas(SimulatedEngine(), SimulatedEngine(), count=2) as (send, urls):
        await send("PUT", version="7")
        send.proxies[0].pool.find(urls[1]).mark_down("it refused a connection")
        for replica in (0, 1):
            known = await send("GET", replica=replica)
            assert {one["url"]: one["version"] for one in known["engines"]} == {urls[0]: "7", urls[1]: ""}
        await send("PUT", version="7", replica=1)
        assert [one["version"] for one in (await send("GET"))["engines"]] == ["7", "7"]


async def test_an_engine_that_was_down_has_no_version_though_the_clock_was_set_back(monkeypatch):
    """The replica that sees it down knew the version before, so the time of its clock does not count."""
    real = RECORD_CLOCK.now
    async with replicas(SimulatedEngine(), SimulatedEngine()) as (send, urls):
        for version in ("7", "8"):
            await send("PUT", version=version)
            with monkeypatch.context() as patch:
                patch.setattr(RECORD_CLOCK, "now", lambda: real() - 3600)
                send.proxies[0].pool.find(urls[1]).mark_down("it refused a connection")
                known = await send("GET")
            assert {one["url"]: one["version"] for one in known["engines"]} == {urls[0]: version, urls[1]: ""}


async def test_a_version_is_not_announced_for_an_engine_that_is_down():
    async with contextlib.AsyncExitStack() as up:
        url = await up.enter_async_context(SimulatedEngine().serve())
        async with replicas(SimulatedEngine(), upstream=[url]) as (send, urls):
            await up.aclose()
            known = await send("PUT", version="7")
            assert {one["url"]: one["version"] for one in known["engines"]} == {urls[0]: "7", url: ""}


async def test_an_engine_that_is_added_has_no_version_until_it_is_announced():
    async with contextlib.AsyncExitStack() as up, replicas(SimulatedEngine()) as (send, urls):
        await send("PUT", version="7")
        url = await up.enter_async_context(SimulatedEngine().serve())
        await send("POST", "/tokencache/v1/engines", status=201, url=url)
        assert {one["url"]: one["version"] for one in (await send("GET"))["engines"]} == {urls[0]: "7", url: ""}
        await send("PUT", version="7", engines=[url])
        assert {one["url"]: one["version"] for one in (await send("GET"))["engines"]} == {urls[0]: "7", url: "7"}


async def test_engines_are_resumed_by_another_replica_if_the_one_that_ends_an_update_dies():
    engine = SimulatedEngine(dev_mode=True)
    async with replicas(engine, count=2) as (send, _):
        begun = await send("POST", WEIGHTS + "/update", status=201, mode="keep")
        long_ago = time.time() - 3600  # so that the other replica need not wait for this one
        await announced(send.store, lambda state: state.end_update(begun["id"], "8", long_ago))
        known = await send("GET", replica=1)
        assert (known["version"], known["phase"], engine.dev_mode.paused) == ("8", "ready", "")
        assert (await send.store.weights()).update is None


async def test_an_engine_that_cannot_be_resumed_at_once_is_resumed_later(monkeypatch):
    resume, failing = DevMode._resume, [True]

    async def sometimes(self, http):
        return json_response({"error": "busy"}, status=500) if failing else await resume(self, http)

    monkeypatch.setattr(DevMode, "_resume", sometimes)
    engine = SimulatedEngine(dev_mode=True)
    async with replicas(engine) as (send, _):
        begun = await send("POST", WEIGHTS + "/update", status=201, mode="keep")
        finish = f"{WEIGHTS}/update/{begun['id']}/finish"
        assert "could not be resumed" in (await send("POST", finish, status=502, version="8"))["error"]["message"]
        assert "are being resumed" in (await send("PUT", status=409, version="9"))["error"]["message"]
        failing.clear()
        await announced(send.store, lambda state: msgspec.structs.replace(state, update=msgspec.structs.replace(state.update, until=0.0)))
        assert ((await send("GET"))["version"], engine.dev_mode.paused) == ("8", "")
        assert (await send("PUT", version="9"))["version"] == "9"


async def test_an_owner_that_begins_again_leaves_no_engine_of_its_first_update_paused():
    one, two = SimulatedEngine(dev_mode=True), SimulatedEngine(dev_mode=True)
    async with replicas(one, two) as (send, urls):
        await send("PUT", version="7")
        await send("POST", WEIGHTS + "/update", status=201, mode="keep", owner="me", engines=urls[:1])
        second = await send("POST", WEIGHTS + "/update", status=201, mode="keep", owner="me", engines=urls[1:])
        assert (one.dev_mode.paused, two.dev_mode.paused) == ("", "keep")
        cancelled = await send("DELETE", f"{WEIGHTS}/update/{second['id']}")
        assert [engine["version"] for engine in cancelled["engines"]] == ["", ""]


async def test_a_version_that_its_owner_announces_ends_the_update_and_resumes_the_engines():
    engine = SimulatedEngine(dev_mode=True)
    async with replicas(engine) as (send, _):
        await send("POST", WEIGHTS + "/update", status=201, mode="keep", owner="me")
        assert (await send("PUT", version="8", owner="me"))["phase"] == "ready"
        assert not engine.dev_mode.paused


async def test_a_beginning_that_is_repeated_is_one_update():
    engine = SimulatedEngine(dev_mode=True)
    async with replicas(engine, count=2) as (send, _):
        for replica in (0, 1):
            assert (await send("POST", WEIGHTS + "/update", status=201, replica=replica, id="mine", owner="me"))["id"] == "mine"
        assert (await send("POST", f"{WEIGHTS}/update/mine/finish", version="8"))["update"] > 0
        assert not engine.dev_mode.paused


async def test_a_store_that_lost_its_data_holds_nothing_and_uses_no_ordinal_again():
    engine = SimulatedEngine(dev_mode=True)
    async with replicas(engine) as (send, _):
        first = await send("PUT", version="7")
        await send("POST", WEIGHTS + "/update", status=201, mode="keep")
        send.store.lose_weights()
        assert ((await send("GET"))["phase"], engine.dev_mode.paused) == ("unknown", "")
        assert (await send("PUT", version="7"))["update"] > first["update"]

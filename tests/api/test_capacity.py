"""Capacity as trainers, operators and Prometheus see it."""

import re

import pytest
from aiohttp import web

from tests.engine.test_capacity import HEAD, ONE, info
from tests.proxy.kit import EPISODES, proxied, user
from tests.proxy.test_several_engines import ASK, fleet, serving
from tests.support.waiting import until
from tokencache.client import AsyncClient
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine


class Measured(SimulatedEngine):
    """An engine with metrics."""

    def __init__(self, metrics, **options):
        super().__init__(episodes=EPISODES, seed=7, **options)
        self.metrics, self.asked = metrics, 0

    def app(self):
        app = super().app()

        async def metrics(_request):
            self.asked += 1
            return web.Response(body=self.metrics) if self.metrics is not None else web.Response(status=500)

        app.router.add_get("/metrics", metrics)
        return app


TWO_RANKS = HEAD + info(**ONE) + info(**ONE | {"engine": 1})


def figures(rig):
    async def measured():
        found = (await rig.get("/readyz"))["capacity"]
        return found if all(engine["tokens"] or engine["error"] for engine in found["engines"]) else None

    return until(measured)


async def test_what_fits_is_the_mean_of_ended_sessions():
    engine = Measured(TWO_RANKS)
    async with proxied(engine, of_its_own_kind=True) as rig, AsyncClient(rig.url) as client:
        found = await figures(rig)
        assert (found["tokens"], found["sessions_fit"], found["engines"][0]["ranks"]) == (2 * 76_672, None, {"0": 76_672, "1": 76_672})
        sizes = []
        for name in ("a", "b", "c"):
            await rig.say(name, [user("hello " * 50 * len(sizes))])
            (turn,) = await rig.turns(name)
            sizes.append(turn["prompt_tokens"] + turn["completion_tokens"])
        assert (await client.capacity()).live_tokens == sum(sizes)
        for name in ("a", "b"):
            await client.session(name).finish()
        await client.session("a").finish()  # again: it counts once
        await client.session("a").seal()
        await client.session("b").delete()
        found = await client.capacity()
        mean = sum(sizes[:2]) / 2
        assert (found.ended, found.live_tokens) == (2, sizes[2])
        assert abs(found.footprint - mean) <= 1
        assert found.sessions_fit == int(0.9 * 2 * 76_672 / found.footprint)
        text = await (await rig.http.get(rig.url + "/metrics")).text()
        shown = dict(re.findall(r"^tokencache_(\w+)(?:\{engine=[^}]*\})? (\S+)$", text, re.MULTILINE))
        assert float(shown["engine_kv_tokens"]) == found.tokens
        assert float(shown["engine_live_tokens"]) == found.live_tokens
        assert float(shown["sessions_fit"]) == found.sessions_fit
        assert engine.asked == 2  # once for the ranks, once for the size


@pytest.mark.parametrize(
    ("metrics", "words"),
    [(b"nonsense", "no vllm:cache_config_info"), (info(**ONE | {"kv_cache_size_tokens": 0}), "no session fits"), (None, "answered 500")],
)
async def test_an_engine_that_reports_nonsense_serves_and_says_why_its_capacity_is_unknown(metrics, words):
    async with proxied(Measured(metrics), of_its_own_kind=True) as rig:
        found = await figures(rig)
        assert words in found["engines"][0]["error"]
        assert (found["tokens"], found["sessions_fit"], found["engines"][0]["tokens"]) == (0, None, None)
        await rig.say("s", [user("hi")])
        await rig.check("s")


async def test_an_engine_that_comes_back_is_measured_again(monkeypatch):
    monkeypatch.setattr("tokencache.engine.health.CHECK_EVERY", 0.02)
    engine = Measured(TWO_RANKS)
    async with fleet(engine, Measured(TWO_RANKS)) as (rig, made):
        await figures(rig)
        await made.stop(0)
        await serving(rig, 1)
        engine.metrics = HEAD + info(**ONE | {"kv_cache_size_tokens": 1280})
        await made.start(0)

        async def measured():
            found = (await rig.get("/readyz"))["capacity"]
            return found if found["engines"][0]["tokens"] == 1152 and found["engines"][0]["serves"] else None

        assert (await until(measured))["tokens"] == 1152 + 2 * 76_672


async def test_replicas_agree_on_the_mean_footprint():
    store = MemoryStore()
    async with fleet(store=store) as (one, made), proxied(upstream=",".join(made.urls), store=store) as two:
        await one.say("a", ASK["messages"])
        async with AsyncClient(one.url) as client:
            await client.session("a").finish()
            await one.proxy.membership.synchronize()
            await two.proxy.membership.synchronize()
            found = await client.capacity()
            async with AsyncClient(two.url) as other:
                shown = await other.capacity()
        assert (shown.footprint, shown.ended) == (found.footprint, 1)
        assert found.footprint > 0

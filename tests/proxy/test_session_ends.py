"""The end of a session releases what it holds, and a router behind the URL is told, once."""

import pytest
from aiohttp import web

from tests.proxy.kit import EPISODES, proxied, user
from tests.support.waiting import until
from tokencache import metrics
from tokencache.client import AsyncClient
from tokencache.testing import SimulatedEngine


class Router(SimulatedEngine):
    """Notes which sessions ended, as vllm-router does; `listed` is whether it can be recognized."""

    def __init__(self, status=200, *, listed=False):
        super().__init__(episodes=EPISODES, seed=7)
        self.ended, self.status, self.listed = [], status, listed

    def app(self):
        app = super().app()

        async def finish(request):
            self.ended.append(request.query["session_id"])
            return web.Response(status=self.status)

        async def workers(_request):
            return web.json_response({"urls": ["http://10.0.0.7:8000"] * self.listed})

        app.router.add_post("/finish_session", finish)
        app.router.add_get("/list_workers", workers)
        return app


def told(how):
    return metrics.SESSION_ENDS.labels(how)._value.get()


@pytest.mark.parametrize("placement", ["auto", "none"])
async def test_each_end_is_told_once(placement):
    router = Router(listed=placement == "auto")
    async with proxied(router, of_its_own_kind=True, placement=placement) as rig, AsyncClient(rig.url) as client:
        for name in ("finished", "sealed", "deleted", "odd:name+@=x"):
            await client.create(name)
        await rig.say("finished", [user("hi")])
        assert rig.proxy.pool.placement.holdings(0.0)
        for _ in range(2):
            await client.session("finished").finish()
        assert not rig.proxy.pool.placement.holdings(0.0)
        await client.session("finished").seal()
        await client.session("finished").delete()
        await client.session("sealed").seal(force=True)
        await client.session("deleted").delete()
        await client.session("odd:name+@=x").finish()
        await rig.proxy._ends.close()
        assert sorted(router.ended) == ["deleted", "finished", "odd:name+@=x", "sealed"]


@pytest.mark.parametrize(("status", "how"), [(200, "told"), (404, "no-route"), (500, "failed")])
async def test_what_came_of_it_is_counted_and_nobody_notices(status, how):
    async with proxied(Router(status), of_its_own_kind=True, placement="none") as rig, AsyncClient(rig.url) as client:
        before = told(how)
        await client.create("s")
        await client.session("s").finish()

        async def counted():
            return told(how) == before + 1

        await until(counted)
        assert (await rig.get("/readyz"))["ready"]


@pytest.mark.parametrize("placement", ["auto", "sticky", "hash"])
async def test_engines_that_the_proxy_places_on_are_told_nothing(placement):
    router = Router()
    async with proxied(router, of_its_own_kind=True, placement=placement) as rig, AsyncClient(rig.url) as client:
        await client.create("s")
        await client.session("s").finish()
        await rig.proxy._ends.close()
        assert router.ended == []

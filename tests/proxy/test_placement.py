"""Sessions are placed by load: replicas agree by the store, which no call asks once more, and without it they use the hash."""

import contextlib

import pytest
from aiohttp import web

from tests.proxy.kit import EPISODES, proxied
from tests.proxy.test_several_engines import ASK, SESSIONS, TOOLS, episode, fleet, serving
from tests.proxy.test_store_faults import Flaky
from tests.support.waiting import PATIENCE, until
from tokencache.engine.pool import preference
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine


@contextlib.asynccontextmanager
async def two_replicas():
    store = MemoryStore()
    async with fleet(store=store) as (one, made), proxied(upstream=",".join(made.urls), store=store, hold=PATIENCE) as two:
        two.engine = made
        await serving(two, 3)
        yield one, two, made


async def test_replicas_agree_on_the_engine_of_a_session():
    async with two_replicas() as (one, two, made):
        for session in SESSIONS:
            messages = await episode(one, session, 1)
            home = made.home(session)
            wrong = made.urls[(home + 1) % 3]
            two.proxy.pool.placement.begin("earlier", session, wrong, 10)  # it was there before, as this replica knows
            two.proxy.pool.placement.end("earlier", 0.0)
            messages = await episode(two, session, 1, messages)
            await one.say(session, messages, tools=TOOLS)
            assert made.asked(session) == [home] * 3
            assert (await one.store.session(session)).engine == made.urls[home]
            await one.check(session)


async def test_replicas_share_their_loads():
    async with two_replicas() as (one, two, made):
        busy = one.proxy.pool.placement
        busy.begin("call", "large", made.urls[0], 10**6)
        await one.proxy.membership.synchronize()
        await two.proxy.membership.synchronize()
        for session in SESSIONS:
            await episode(two, session, 1)
        assert 0 not in {made.home(session) for session in SESSIONS}
        busy.end("call", 0.0)
        await one.proxy.membership.synchronize()
        await two.proxy.membership.synchronize()
        assert not two.proxy.pool.placement.others
        await episode(two, "later", 1)
        assert made.home("later") == 0


async def test_while_the_store_is_silent_the_hash_decides():
    store = Flaky()
    async with fleet(store=store) as (rig, made):
        store.broken = {"begin", "commit", "settle"}
        for session in SESSIONS:
            await episode(rig, session, 2)
            assert made.asked(session) == [preference(session, made.urls)[0]] * 2
        store.broken = set()
        await rig.proxy.ledger.settled()
        await rig.say("s0", ASK["messages"], tools=TOOLS)
        assert (await store.session("s0")).engine in made.urls


class Counting(MemoryStore):
    """Notes which operations are called."""

    def __init__(self):
        super().__init__()
        self.asked = []

    async def begin(self, *args, **more):
        self.asked.append("begin")
        return await super().begin(*args, **more)

    async def commit(self, *args, **more):
        self.asked.append(f"commit {more['engine']}")
        await super().commit(*args, **more)

    async def session(self, *args):
        self.asked.append("session")
        return await super().session(*args)


async def test_a_warm_call_asks_the_store_no_more_and_binds_nothing_again():
    store = Counting()
    async with fleet(store=store) as (rig, made):
        messages = await episode(rig, "s", 1)
        assert store.asked == ["begin", f"commit {made.urls[made.home('s')]}"]
        await episode(rig, "s", 1, messages)
        assert store.asked[2:] == ["begin", "commit "]


async def test_a_call_that_was_refused_leaves_no_call_in_flight():
    async with fleet() as (rig, _):
        assert (await rig.post("s", **ASK, temperature=-1))[0] == 400
        rig.proxy.pool.placement.release("s")
        assert rig.proxy.pool.placement.own_loads(0.0) == {}


@pytest.mark.parametrize("placement", ["hash", "none"])
async def test_other_policies_bind_nothing(placement):
    async with fleet(placement=placement) as (rig, made):
        for session in SESSIONS:
            await episode(rig, session, 2)
        assert (await rig.store.session("s0")).engine == ""
        for session in SESSIONS:
            assert made.asked(session) == [preference(session, made.urls)[0]] * 2  # of routers, too: each has bindings of its own


class Listing(SimulatedEngine):
    """Lists engines, as a router does, while it has some."""

    def __init__(self):
        super().__init__(episodes=EPISODES, seed=7)
        self.listed = ["http://10.0.0.7:8000"]

    def app(self):
        app = super().app()

        async def workers(_request):
            return web.json_response({"urls": self.listed})

        app.router.add_get("/list_workers", workers)
        return app


async def test_behind_routers_the_probe_chooses_to_place_nothing(monkeypatch):
    monkeypatch.setattr("tokencache.engine.health.CHECK_EVERY", 0.02)
    async with fleet(Listing(), Listing()) as (rig, made):
        assert [engine["models"][0]["places"] for engine in (await rig.get("/readyz"))["engines"]] == [True, True]
        for session in SESSIONS:
            await episode(rig, session, 2)
            assert made.asked(session) == [preference(session, made.urls)[0]] * 2
        made.engines[0].listed.clear()
        await made.stop(0)
        await serving(rig, 1)
        await made.start(0)
        await serving(rig, 2)
        await until(lambda: rig.proxy.pool.policy == "sticky")  # an engine of its own among them


async def test_the_trainers_choice_beats_what_the_probe_found():
    async with fleet(Listing(), Listing(), placement="sticky") as (rig, _):
        assert rig.proxy.pool.policy == "sticky"

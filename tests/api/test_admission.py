"""Sessions are created while the engines have room; a harness's call never waits for it."""

import asyncio
import contextlib

import pytest

from tests.api.test_capacity import Measured, figures
from tests.engine.test_capacity import HEAD, ONE, info
from tests.proxy.kit import proxied, user
from tests.support.waiting import until
from tokencache.client import AsyncClient, NoRoomError

SMALL = HEAD + info(**ONE | {"kv_cache_size_tokens": 1128})


@contextlib.asynccontextmanager
async def admitting(metrics=SMALL, **settings):
    """A proxy before an engine of 1,000 tokens: one session of 800 fits."""
    async with proxied(Measured(metrics), of_its_own_kind=True, admission=800, **settings) as rig, AsyncClient(rig.url) as client:
        await figures(rig)
        yield rig, client


async def refused(rig, name, **query):
    async with rig.http.post(rig.url + "/tokencache/v1/sessions", json={"session": name}, params=query) as answer:
        return answer.status, answer.headers.get("Retry-After"), (await answer.json()).get("error", {})


async def test_a_session_without_room_gets_429_a_time_and_its_place():
    async with admitting() as (rig, client):
        await client.create("a")
        status, after, error = await refused(rig, "b")
        assert (status, after, error["type"]) == (429, "5", "no_room")
        assert "Its place is 1" in error["message"]
        assert "Its place is 2" in (await refused(rig, "c"))[2]["message"]
        shown = await client.capacity()
        assert [(one.session, one.place) for one in shown.waiting] == [("b", 1), ("c", 2)]
        assert "tokencache_sessions_waiting 2.0" in await (await rig.http.get(rig.url + "/metrics")).text()
        with pytest.raises(NoRoomError, match="no room"):
            await client.create("d")
        await rig.say("e", [user("a call of a session that nobody created never waits")])
        await client.create("a", exist_ok=True)  # it exists
        assert await rig.store.session("b") is None


async def test_waiting_sessions_are_created_in_order_when_others_end():
    async with admitting() as (_, client):
        await client.create("a")
        order = []

        async def create(name):
            await client.create(name, wait=60)
            order.append(name)

        tasks = []
        for n, name in enumerate(("b", "c")):
            tasks.append(asyncio.create_task(create(name)))

            async def waits(count=n + 1):
                return len((await client.capacity()).waiting) == count

            await until(waits)
        await client.session("a").delete()
        await tasks[0]
        assert order == ["b"]
        assert [one.session for one in (await client.capacity()).waiting] == ["c"]
        await client.session("b").delete()
        await tasks[1]
        assert order == ["b", "c"]


@pytest.mark.parametrize("metrics", [b"nonsense", HEAD + info(**ONE | {"kv_cache_size_tokens": 0})])
async def test_without_a_known_size_the_error_says_so(metrics):
    async with admitting(metrics) as (rig, _):
        status, _, error = await refused(rig, "a")
        assert (status, error["type"]) == (503, "capacity_unknown")
        assert "none is known" in error["message"]
        assert rig.up in error["message"]
        await rig.say("a", [user("hi")])


async def test_off_by_default():
    async with proxied(Measured(SMALL), of_its_own_kind=True) as rig:
        await figures(rig)
        assert [(await refused(rig, f"s{n}"))[0] for n in range(5)] == [201] * 5


async def test_a_wait_that_is_no_number_is_refused():
    async with admitting() as (rig, _):
        assert (await refused(rig, "a", wait="long"))[0] == 400

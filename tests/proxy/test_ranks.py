"""Data-parallel ranks: a session stays on one rank of an engine, and what the engine says of its ranks decides."""

import contextlib

import pytest
from aiohttp import web

from tests.proxy.kit import CHAT, EPISODES, HEADER, echo, proxied, results, user
from tokencache.engine.drivers.vllm import Vllm
from tokencache.engine.model import Endpoint, Engine
from tokencache.engine.pool import Pool
from tokencache.engine.ranks import RANK_HEADER
from tokencache.engine.upstream import Upstream
from tokencache.testing import SimulatedEngine
from tokencache.testing.errors import RefusalResponse

ASK = [user("EPISODE:demo")]
SESSIONS = [f"s{n}" for n in range(12)]


class Ranked(SimulatedEngine):
    """vLLM with data-parallel ranks, as far as requests show them; `checks` is false behind a router that drops the header."""

    def __init__(self, ranks, *, checks=True):
        super().__init__(episodes=EPISODES, seed=7)
        self.ranks, self.checks = ranks, checks

    def app(self):
        app = super().app()
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _metrics(self, _):
        series = 'vllm:kv_cache_usage_perc{{engine="{0}",model_name="sim"}} 0.0\nvllm:num_preemptions_total{{engine="{0}"}} 0.0\n'
        return web.Response(text="".join(series.format(rank) for rank in range(self.ranks)) + 'process_open_fds{engine="9"} 4.0\n')

    def _begin_chat(self, body, headers):
        rank = headers.get(RANK_HEADER)
        if self.checks and rank is not None and int(rank) >= self.ranks:
            raise RefusalResponse(f"data_parallel_rank {rank} is out of range [0, {self.ranks}).", by_engine=True)
        return super()._begin_chat(body, headers)


@contextlib.asynccontextmanager
async def before(engine):
    async with proxied(engine) as rig:
        await rig.proxy.engine.model("sim")
        engine.headers.clear()
        yield rig


def named(engine):
    """The rank that each request of a session named; `None` for a request that named none. The proxy's own requests have no session."""
    return [headers.get(RANK_HEADER) for headers in engine.headers if "X-Session-ID" in headers]


async def found(rig):
    return (await rig.readiness())["engine"]["models"][0]["ranks"]


async def test_a_session_stays_on_one_rank_and_sessions_use_all_of_them():
    engine = Ranked(3)
    async with before(engine) as rig:
        assert await found(rig) == 3
        homes = []
        for session in SESSIONS:
            engine.headers.clear()
            message = await rig.say(session, ASK)
            await rig.say(session, [*ASK, echo(message), *results(message)], stream=True)
            first, second = named(engine)
            assert first == second
            homes.append(first)
        assert set(homes) == {"0", "1", "2"}
        assert (await rig.get("/tokencache/v1/capacity"))["live_tokens"] > 0
        assert [turn["match"] for turn in await rig.turns(SESSIONS[0])] == ["root", "continue"]


@pytest.mark.parametrize("engine", [Ranked(1), SimulatedEngine(episodes=EPISODES), Ranked(2, checks=False)], ids=["one", "none", "dropped"])
async def test_nothing_is_pinned_without_ranks_that_the_engine_checks(engine):
    async with before(engine) as rig:
        await rig.say("s", ASK)
        assert await found(rig) == 1
        assert named(engine) == [None]


async def test_a_call_without_a_session_is_not_pinned():
    engine = Ranked(2)
    async with before(engine) as rig:
        assert (await rig.post(None, messages=ASK))[0] == 200
        assert [RANK_HEADER in headers for headers in engine.headers] == [False]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_rank_that_the_client_names_stays(stream):
    engine = Ranked(2)
    async with before(engine) as rig:
        for rank, refused in (("0", False), ("1", False), ("2", True)):
            headers = {HEADER: f"s{rank}", RANK_HEADER: rank}
            asked = {"model": "sim", "messages": ASK, "stream": stream}
            async with rig.http.post(rig.url + CHAT, json=asked, headers=headers) as answer:
                words = await answer.text()
                assert (answer.status, "out of range [0, 2)" in words) == (400 if refused and not stream else 200, refused), words
        assert named(engine) == ["0", "1", "2"]
        message = await rig.say("again", ASK)
        continued = {"model": "sim", "messages": [*ASK, echo(message), *results(message)], "stream": stream}
        async with rig.http.post(rig.url + CHAT, json=continued, headers={HEADER: "again", RANK_HEADER: "2"}) as answer:
            assert "out of range [0, 2)" in await answer.text()
        assert len(await rig.turns("again")) == 1


async def began_on_a_later_rank(rig, engine):
    """The name and the first reply of a session that is placed on a rank other than the first."""
    for session in SESSIONS:
        message = await rig.say(session, ASK)
        if named(engine)[-1] != "0":
            return session, message
    raise AssertionError("all sessions are on one rank")


async def test_an_error_in_a_stream_shows_that_the_engine_lost_a_rank():
    engine = Ranked(4)
    async with before(engine) as rig:
        session, message = await began_on_a_later_rank(rig, engine)
        engine.ranks = 1
        asked = [*ASK, echo(message), *results(message)]
        _, (event,) = await rig.post(session, messages=asked, stream=True)
        assert "out of range [0, 1)" in event["error"]["message"]
        assert await rig.say(session, asked, stream=True)
        assert named(engine)[-1] is None


async def test_a_call_is_made_without_a_rank_that_the_engine_lost():
    engine = Ranked(4)
    async with before(engine) as rig:
        session, message = await began_on_a_later_rank(rig, engine)
        engine.ranks = 1
        await rig.say(session, [*ASK, echo(message), *results(message)])
        assert named(engine)[-1] is None
        await rig.proxy.engine.model("sim")
        assert await found(rig) == 1
        assert [turn["match"] for turn in await rig.turns(session)] == ["root", "continue"]
        await rig.check(session)


@pytest.mark.parametrize("policy", ["sticky", "hash"])
def test_a_session_tries_each_engine_once_and_only_its_own_rank_there(policy):
    pool = Pool(lambda url: Engine(Upstream(url), [Vllm()]), ["http://a", "http://b"], policy)
    for monitor in pool.monitors:
        monitor.engine.endpoints = tuple(Endpoint.of(monitor.engine, rank) for rank in range(4))
    placed = []
    for n, session in enumerate(SESSIONS * 8):
        tried = pool.endpoints_of(f"call {n}", session, "", (), "sim")
        placed.append([(endpoint.engine.upstream.url, endpoint.rank) for endpoint in tried])
        pool.placement.begin(f"call {n}", session, "{}#{}".format(*placed[-1][0]))  # the first one takes it
        pool.placement.end(f"call {n}", 0.0)
    assert {len(order) for order in placed} == {2}
    assert all(order[0][0] != order[1][0] for order in placed)
    assert {first for first, _ in placed[: len(SESSIONS)]} <= {(url, rank) for url in ("http://a", "http://b") for rank in range(4)}
    assert [first for first, _ in placed[: len(SESSIONS)]] == [first for first, _ in placed[len(SESSIONS) : 2 * len(SESSIONS)]]

"""Who is out, who is in: a refused connection counts at once, a slow or bad answer after a few."""

import contextlib

import pytest
from aiohttp import web

from tokencache.engine.drivers.vllm import Vllm
from tokencache.engine.health import STRIKES, Watch
from tokencache.engine.model import Engine
from tokencache.engine.upstream import Upstream
from tokencache.testing import SimulatedEngine


@contextlib.asynccontextmanager
async def watching(engine, **more):
    """An engine, whose /health can be told what to say, and a watch on it that looks when it is told to."""
    said = {"status": 200, "asked": 0}
    app = engine.app()

    @web.middleware
    async def health(request, handler):
        if request.path != "/health":
            return await handler(request)
        said["asked"] += 1
        return web.Response(status=said["status"])

    app.middlewares.append(health)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    upstream = Upstream(f"http://{host}:{port}")
    await upstream.open()
    changes = []
    watch = Watch(Engine(upstream, [Vllm()]), lambda: changes.append(watch.ready), alone=False, **more)
    try:
        yield watch, said, runner, changes
    finally:
        await upstream.close()
        await runner.cleanup()


async def test_an_engine_that_answers_is_probed_once():
    engine = SimulatedEngine()
    async with watching(engine) as (watch, _, _, changes):
        assert not watch.ready
        for _ in range(3):
            await watch.look()
        assert (watch.ready, changes, watch.kind.capability["level"]) == (True, [True], "exact")


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_an_engine_without_health_is_asked_for_it_once(status):
    """NeMo RL's worker has none, and logs every request for it. That it is gone is seen all the same."""
    async with watching(SimulatedEngine()) as (watch, said, runner, changes):
        said["status"] = status
        for _ in range(5):
            await watch.look()
        assert (watch.ready, said["asked"]) == (True, 1)
        await runner.cleanup()
        await watch.look()
        assert (watch.ready, changes) == (False, [True, False])
        assert "cannot be reached" in watch.engine.error


async def test_after_it_was_out_it_is_asked_for_health_again():
    """Another server may stand there then."""
    async with watching(SimulatedEngine()) as (watch, said, _, _):
        said["status"] = 404
        await watch.look()
        watch.out("the engine went away")
        said["status"] = 200
        for _ in range(3):
            await watch.look()
        assert (watch.ready, said["asked"]) == (True, 4)


@pytest.mark.parametrize("status", [404, 401, 204])
async def test_an_answer_is_an_answer(status):
    async with watching(SimulatedEngine()) as (watch, said, _, _):
        said["status"] = status
        await watch.look()
        assert watch.ready


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_a_servers_error_counts_after_a_few(status):
    async with watching(SimulatedEngine()) as (watch, said, _, changes):
        await watch.look()
        said["status"] = status
        for _ in range(STRIKES - 1):
            await watch.look()
            assert watch.ready
        await watch.look()
        assert (watch.ready, str(status) in watch.engine.error) == (False, True)
        said["status"] = 200
        await watch.look()
        assert (watch.ready, changes) == (True, [True, False, True])


async def test_a_good_answer_between_forgives():
    async with watching(SimulatedEngine()) as (watch, said, _, _):
        await watch.look()
        for status in (503, 503, 200, 503, 503):
            said["status"] = status
            await watch.look()
        assert watch.ready


async def test_a_refused_connection_counts_at_once():
    async with watching(SimulatedEngine()) as (watch, _, runner, changes):
        await watch.look()
        await runner.cleanup()
        await watch.look()
        assert (watch.ready, changes) == (False, [True, False])
        assert "cannot be reached" in watch.engine.error


async def test_engines_of_one_kind_and_of_another():
    """What the engine is counts, not which release it is; another template or tokenizer is another kind."""
    kinds = []
    for made in (SimulatedEngine(seed=1), SimulatedEngine(seed=2, version="0.33.0"), SimulatedEngine(honours_ids=False)):
        async with watching(made) as (watch, _, _, _):
            await watch.look()
            kinds.append(watch.kind)
    assert kinds[0] == kinds[1] != kinds[2]
    assert "level is record, not exact" in kinds[2].differences(kinds[0])


async def test_another_template_is_another_kind(monkeypatch):
    kinds = []
    for _ in range(2):
        async with watching(SimulatedEngine()) as (watch, _, _, _):
            await watch.look()
            kinds.append(watch.kind)
        real = SimulatedEngine._render

        def render(self, body, arguments, real=real):
            more = [{"role": "system", "content": "You are another."}] if body["messages"][0]["role"] != "system" else []
            return real(self, body | {"messages": [*more, *body["messages"]]}, arguments)

        monkeypatch.setattr(SimulatedEngine, "_render", render)
    assert kinds[1].differences(kinds[0]) == ["its template or tokenizer writes other ids"]

"""Health checks: a refused connection counts at once, a slow or bad answer after a few in a row."""

import asyncio
import contextlib

import pytest
from aiohttp import web

from tests.support.waiting import PATIENCE
from tokencache.engine import health, model
from tokencache.engine.drivers.vllm import Vllm
from tokencache.engine.health import STRIKES, EngineMonitor
from tokencache.engine.model import Engine
from tokencache.engine.upstream import Upstream
from tokencache.testing import Fault, SimulatedEngine


@contextlib.asynccontextmanager
async def monitored(engine, **more):
    """An engine with a configurable /health, and a monitor of it that checks on request."""
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
    monitor = EngineMonitor(Engine(upstream, [Vllm()]), lambda: changes.append(monitor.ready), alone=False, **more)
    try:
        yield monitor, said, runner, changes
    finally:
        await upstream.close()
        await runner.cleanup()


async def test_an_engine_that_answers_is_probed_once():
    engine = SimulatedEngine()
    async with monitored(engine) as (monitor, _, _, changes):
        assert not monitor.ready
        for _ in range(3):
            await monitor.check()
        assert (monitor.ready, changes, monitor.identity.capability["level"]) == (True, [True], "exact")


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_an_engine_without_health_gets_that_request_once(status):
    """NeMo RL's worker has no /health, and logs every request for it. The monitor notices nevertheless when it is gone."""
    async with monitored(SimulatedEngine()) as (monitor, said, runner, changes):
        said["status"] = status
        for _ in range(5):
            await monitor.check()
        assert (monitor.ready, said["asked"]) == (True, 1)
        await runner.cleanup()
        await monitor.check()
        assert (monitor.ready, changes) == (False, [True, False])
        assert "cannot be reached" in monitor.engine.error


async def test_after_it_was_down_it_gets_the_health_request_again():
    """Another server may run there then."""
    async with monitored(SimulatedEngine()) as (monitor, said, _, _):
        said["status"] = 404
        await monitor.check()
        monitor.mark_down("the engine went away")
        said["status"] = 200
        for _ in range(3):
            await monitor.check()
        assert (monitor.ready, said["asked"]) == (True, 4)


async def test_a_gateway_that_has_no_route_to_the_engine_yet_does_not_decide_which_routes_it_has():
    """Until the engine is there, such a gateway answers 404 to everything."""
    engine = SimulatedEngine()
    async with monitored(engine) as (monitor, said, _, _):
        said["status"], engine.choose_fault = 404, lambda route, _body: Fault.answer(404, "default backend", path=route)
        await monitor.check()
        said["status"], engine.choose_fault = 200, None
        monitor.engine.forget()
        await monitor.check()
        assert (monitor.ready, monitor.has_health) == (True, True)
        said["status"] = 503
        for _ in range(STRIKES):
            await monitor.check()
        assert not monitor.ready


@pytest.mark.parametrize("status", [404, 401, 204])
async def test_any_answer_below_500_is_healthy(status):
    async with monitored(SimulatedEngine()) as (monitor, said, _, _):
        said["status"] = status
        await monitor.check()
        assert monitor.ready


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_server_errors_count_after_a_few(status):
    async with monitored(SimulatedEngine()) as (monitor, said, _, changes):
        await monitor.check()
        said["status"] = status
        for _ in range(STRIKES - 1):
            await monitor.check()
            assert monitor.ready
        await monitor.check()
        assert (monitor.ready, str(status) in monitor.engine.error) == (False, True)
        said["status"] = 200
        await monitor.check()
        assert (monitor.ready, changes) == (True, [True, False, True])


async def test_a_good_answer_in_between_resets_the_count():
    async with monitored(SimulatedEngine()) as (monitor, said, _, _):
        await monitor.check()
        for status in (503, 503, 200, 503, 503):
            said["status"] = status
            await monitor.check()
        assert monitor.ready


async def test_a_refused_connection_counts_at_once():
    async with monitored(SimulatedEngine()) as (monitor, _, runner, changes):
        await monitor.check()
        await runner.cleanup()
        await monitor.check()
        assert (monitor.ready, changes) == (False, [True, False])
        assert "cannot be reached" in monitor.engine.error


async def test_an_unexpected_error_of_a_probe_is_logged_and_the_probe_repeated(monkeypatch, caplog):
    monkeypatch.setattr(health, "CHECK_EVERY", 0.01)
    real, attempts = model.probe, []

    async def failing(*arguments, **more):
        attempts.append(arguments)
        if len(attempts) < 3:
            raise OverflowError("math range error")
        return await real(*arguments, **more)

    monkeypatch.setattr(model, "probe", failing)
    async with monitored(SimulatedEngine()) as (monitor, _, _, _):
        changed = asyncio.Event()
        monitor._on_change = changed.set
        running = asyncio.create_task(monitor.run())
        await asyncio.wait([running, asyncio.create_task(changed.wait())], timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert (monitor.ready, len(attempts)) == (True, 3)
        logged = [record for record in caplog.records if "internal error" in record.getMessage()]
        assert [(monitor.url in record.getMessage(), record.exc_info is not None) for record in logged] == [(True, True)] * 2


async def test_engines_with_the_same_identity_and_with_another():
    """The release does not matter; another template or tokenizer does."""
    identities = []
    for made in (SimulatedEngine(seed=1), SimulatedEngine(seed=2, version="0.33.0"), SimulatedEngine(honours_ids=False)):
        async with monitored(made) as (monitor, _, _, _):
            await monitor.check()
            identities.append(monitor.identity)
    assert identities[0] == identities[1] != identities[2]
    assert "level is record, not exact" in identities[2].differences(identities[0])


async def test_another_template_is_another_identity(monkeypatch):
    identities = []
    for _ in range(2):
        async with monitored(SimulatedEngine()) as (monitor, _, _, _):
            await monitor.check()
            identities.append(monitor.identity)
        real = SimulatedEngine._render

        def render(self, body, arguments, real=real):
            more = [{"role": "system", "content": "You are another."}] if body["messages"][0]["role"] != "system" else []
            return real(self, body | {"messages": [*more, *body["messages"]]}, arguments)

        monkeypatch.setattr(SimulatedEngine, "_render", render)
    assert identities[1].differences(identities[0]) == ["its template or tokenizer gives other ids"]

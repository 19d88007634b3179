"""The probe on a bad connection: its finding is the same, whichever of its requests meets a closed connection."""

import contextlib
import logging

import msgspec
import pytest
from aiohttp import web

from tests.engine.intermediary import Intermediary
from tests.proxy.kit import CHAT, EPISODES, TOOLS, echo, proxied, results, user
from tests.support.waiting import PATIENCE, until
from tests.system.nemo.worker import Worker
from tokencache.engine.drivers.registry import DriverOptions, drivers
from tokencache.engine.model import Engine
from tokencache.engine.upstream import Upstream
from tokencache.errors import EngineError
from tokencache.testing import SimulatedEngine

ASK = [user("EPISODE:demo")]


@pytest.fixture(autouse=True)
def _briskly(monkeypatch):
    monkeypatch.setattr("tokencache.engine.upstream.FIRST_DELAY", 0.001)
    monkeypatch.setattr("tokencache.engine.upstream.LONGEST_DELAY", 0.001)
    monkeypatch.setattr("tokencache.engine.model.FIRST_DELAY", 0.01)
    monkeypatch.setattr("tokencache.engine.model.LONGEST_DELAY", 0.02)
    monkeypatch.setattr("tokencache.engine.health.CHECK_EVERY", 0.01)


class Resetting(Intermediary):
    """Passes requests on to an engine, and resets the connection of those that `resets` selects by number and path."""

    def __init__(self, upstream):
        super().__init__(upstream)
        self.paths = []
        self.resets = lambda _number, _path: False

    async def _pass(self, request):
        body = await request.read()
        self.paths.append(request.path)
        if self.resets(len(self.paths), request.path):
            request.transport.abort()
            return web.Response()
        kept = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with self._http.request(request.method, self.upstream + request.path, data=body, headers=kept) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)


@contextlib.asynccontextmanager
async def resetting_before(engine, *, worker=False):
    """Yields a resetting intermediary in front of an engine or NeMo RL's worker."""
    async with engine.serve() as up, contextlib.AsyncExitStack() as stack:
        behind = await stack.enter_async_context(Worker(up, engine.tokenizer.stop_id).serve()) if worker else up
        intermediary = Resetting(behind)
        async with intermediary.serve() as intermediary.url:
            yield intermediary


@contextlib.asynccontextmanager
async def engine_at(url, kind="auto", **more):
    upstream = Upstream(url)
    await upstream.open()
    try:
        yield Engine(upstream, drivers(kind, DriverOptions()), **more)
    finally:
        await upstream.close()


def as_found(model):
    """The capability without its description of sampled values."""
    return msgspec.structs.replace(model.capability, logprobs_seen="")


@pytest.mark.parametrize(
    ("engine", "worker", "kind"),
    [
        (SimulatedEngine(episodes=EPISODES), False, "auto"),
        pytest.param(SimulatedEngine(episodes=EPISODES), True, "auto", marks=pytest.mark.whole),
        pytest.param(SimulatedEngine(episodes=EPISODES), True, "nemo-rl", marks=pytest.mark.whole),  # a part of what `auto` asks
        pytest.param(SimulatedEngine(episodes=EPISODES, version="0.25.1", honours_ids=False), False, "auto", marks=pytest.mark.whole),
        pytest.param(SimulatedEngine(episodes=EPISODES, honours_ids=False), False, "vllm", marks=pytest.mark.whole),  # its first requests
    ],
    ids=["vllm", "nemo-rl", "nemo-rl-named", "by-derender", "record"],
)
async def test_the_finding_is_the_same_whichever_request_is_reset(engine, worker, kind):
    async with resetting_before(engine, worker=worker) as intermediary:
        async with engine_at(intermediary.url, kind) as one:
            right = as_found(await one.model())
        requests_sent = len(intermediary.paths)
        assert requests_sent > 5
        for number in range(1, requests_sent + 1):
            intermediary.paths.clear()
            intermediary.resets = lambda count, _path, number=number: count == number
            async with engine_at(intermediary.url, kind) as one:
                assert as_found(await one.model()) == right, f"request {number} was reset"


@pytest.mark.parametrize("worker", [False, True], ids=["vllm", "nemo-rl"])
@pytest.mark.parametrize("path", ["/tokenize", CHAT])
async def test_a_request_that_is_never_answered_proves_nothing(path, worker, caplog):
    """The engine is not ready, is probed again at a limited rate, is logged once, and is ready as soon as it answers."""
    caplog.set_level(logging.INFO)
    async with resetting_before(SimulatedEngine(episodes=EPISODES, seed=7), worker=worker) as intermediary:
        intermediary.resets = lambda _count, asked: asked == path
        async with proxied(intermediary, upstream=intermediary.url) as rig:
            before = await until(lambda: _failed(rig))
            assert before["engine"]["models"] == []
            asked = len(intermediary.paths)
            await until(lambda: _more(intermediary, asked + 12))
            said = [record.getMessage() for record in caplog.records if "gave no answer" in record.getMessage()]
            assert len(said) == 1
            assert "NOTHING IS RECORDED" not in caplog.text
            assert "RECORD ONLY" not in caplog.text
            intermediary.resets = lambda _count, _path: False
            after = await until(lambda: _ready(rig))
            assert after["engine"]["models"][0]["level"] == "exact"


async def test_a_failed_probe_is_not_repeated_by_every_call(monkeypatch):
    monkeypatch.setattr("tokencache.engine.model.FIRST_DELAY", 60.0)
    async with resetting_before(SimulatedEngine(episodes=EPISODES)) as intermediary:
        intermediary.resets = lambda _count, asked: asked == "/tokenize"
        async with engine_at(intermediary.url) as engine:
            with pytest.raises(EngineError, match="gave no answer"):
                await engine.model()
            asked = len(intermediary.paths)
            for _ in range(5):
                with pytest.raises(EngineError, match="gave no answer"):
                    await engine.model()
            assert (len(intermediary.paths), engine.state) == (asked, "failed")


async def test_a_temporary_refusal_proves_nothing():
    """`/tokenize` answers 503, as while an engine is paused: nothing is known then; the next probe finds everything."""
    async with resetting_before(SimulatedEngine(episodes=EPISODES)) as intermediary:
        busy = Intermediary(intermediary.url, lambda route, body: 503 if route == "/tokenize" else body)
        async with busy.serve() as url, engine_at(url) as engine:
            with pytest.raises(EngineError, match="503"):
                await engine.model()
            assert (engine.state, engine.capabilities) == ("unprobed", [])
            busy.change = lambda _route, body: body
            assert (await engine.model()).capability.level == "exact"


async def test_a_lowered_level_is_probed_again_until_it_is_back(caplog):
    """Calls are served in the meantime as far as possible; the proxy is not ready, which is logged once."""
    async with SimulatedEngine(episodes=EPISODES, seed=7).serve() as up:
        intermediary = Intermediary(up)
        async with intermediary.serve() as url, proxied(None, upstream=url) as rig:
            await until(lambda: _ready(rig))
            message = await rig.say("s", ASK, tools=TOOLS)
            intermediary.change = lambda route, body: _without_ids(body) if route == CHAT else body
            rig.proxy.engine.forget("as after a restart")
            lowered = await until(lambda: _lowered(rig))
            assert lowered["engine"]["serves"] is False
            assert "its level is record" in lowered["engine"]["error"]
            assert "it was exact before" in lowered["engine"]["error"]
            await rig.say("s", [*ASK, echo(message), *results(message)], tools=TOOLS)
            assert [turn["reason"] for turn in await rig.turns()] == ["", "record-only"]
            intermediary.change = lambda _route, body: body
            await until(lambda: _ready(rig))
            last = await rig.say("t", ASK, tools=TOOLS)
            await rig.say("t", [*ASK, echo(last), *results(last)], tools=TOOLS)
            assert [turn["match"] for turn in await rig.turns("t")] == ["root", "continue"]
    assert len([record for record in caplog.records if "RECORD ONLY" in record.getMessage()]) == 1


@pytest.mark.parametrize(("required", "ready"), [("exact", False), ("record", True)])
async def test_a_level_may_be_required(required, ready):
    engine = SimulatedEngine(episodes=EPISODES, honours_ids=False)
    async with proxied(engine, engine_kind="vllm", require=required) as rig:
        found = await until(lambda: _probed(rig))
        assert found["ready"] is ready
        assert ("--require asks for exact" in found["engine"]["error"]) is not ready
        engine.honours_ids = True
        if not ready:
            await until(lambda: _ready(rig))


def _without_ids(body):
    return {name: value for name, value in body.items() if name not in {"kv_transfer_params", "required_prefix_token_ids"}}


async def _failed(rig):
    found = await rig.readiness()
    return found if not found["ready"] and "gave no answer" in found["engine"]["error"] else None


async def _lowered(rig):
    found = await rig.readiness()
    return found if not found["ready"] and found["engine"]["models"] else None


async def _ready(rig):
    found = await rig.readiness()
    return found if found["ready"] else None


async def _probed(rig):
    found = await rig.readiness()
    return found if found["engine"]["models"] else None


async def _more(intermediary, count):
    return len(intermediary.paths) > count


async def test_a_call_survives_an_engine_that_dies_while_it_is_probed_again(monkeypatch):
    """Its process is being ended: it resets the call, then the probe, and the call that is made again. Then another process is there."""
    monkeypatch.setattr("tokencache.engine.health.CHECK_EVERY", 60.0)
    monkeypatch.setattr("tokencache.proxy.dispatch.FIRST_PAUSE", 0.01)
    calls = []

    def dying(count, path):
        """Everything is reset until the call is made for the second time. The probe's first requests are no calls."""
        if path == CHAT and len(calls) < 2:
            calls.append(count)
        return count <= (calls[1] if len(calls) > 1 else count)

    engine = SimulatedEngine(episodes=EPISODES, derenders=True)
    async with resetting_before(engine) as intermediary, proxied(intermediary, upstream=intermediary.url, hold=PATIENCE) as rig:
        await until(lambda: _ready(rig))
        intermediary.paths.clear()
        intermediary.resets = dying
        status, _ = await rig.post("s", messages=ASK, tools=TOOLS, stream=False)
        assert status == 200
        assert calls[0] == 1 < calls[1] - 1, "the engine was probed in between"


async def test_one_reset_of_a_rendering_breaks_no_sequence():
    """Rendering samples nothing, so it is repeated on a new connection."""
    engine = SimulatedEngine(episodes=EPISODES, seed=7)
    async with resetting_before(engine) as box, proxied(SimulatedEngine(), upstream=box.url) as rig:
        messages = [*ASK]
        for _ in range(4):
            reset = iter([True])
            box.resets = lambda _number, path, reset=reset: path == "/tokenize" and next(reset, False)
            message = await rig.say("s", messages, tools=TOOLS)
            messages += [echo(message), *results(message)]
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue", "continue"]
        assert (await rig.exported())["complete"]

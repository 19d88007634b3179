"""An engine that is probed at a bad moment: what it does then is not remembered as what it can do."""

import asyncio
import contextlib
import itertools
import logging

import pytest

from tests.engine.intermediary import Intermediary
from tests.engine.test_probe_faults import as_found, engine_at
from tests.proxy.kit import CHAT, EPISODES, TOOLS, echo, proxied, results, user
from tests.support.waiting import until
from tokencache.errors import EngineError
from tokencache.testing import Fault, SimulatedEngine

ASK = [user("EPISODE:demo")]
THINK = SimulatedEngine().tokenizer.id_of("<think>")
MOMENTS = {
    "an aborted reply": Fault.abort(1),
    "an aborted reply without a token": Fault.abort(0),
    "a bad gateway": Fault.answer(502, "<html>"),
    "a server error": Fault.answer(500, "Internal Server Error"),
}
REQUESTS = {
    "supplied ids": lambda body: "kv_transfer_params" in body,
    "log probabilities": lambda body: body.get("logprobs"),
    "a stop id": lambda body: body.get("max_tokens") == 2,
    "a streamed text": lambda body: body.get("stream") and body["allowed_token_ids"] != [THINK],
    "a thinking budget": lambda body: "thinking_token_budget" in body,
    "the last request": lambda body: "tokencache_prefix" in body.get("kv_transfer_params", {}),
}


@pytest.fixture(autouse=True)
def _briskly(monkeypatch):
    monkeypatch.setattr("tokencache.engine.model.FIRST_DELAY", 0.01)
    monkeypatch.setattr("tokencache.engine.model.LONGEST_DELAY", 0.02)
    monkeypatch.setattr("tokencache.engine.health.CHECK_EVERY", 0.01)


def made(**options):
    return SimulatedEngine(episodes=EPISODES, seed=7, derenders=True, **options)


def once(engine, happens, fault, path=CHAT):
    """The fault happens to the first request for which this is so, and to no other; returns the faults that have not happened."""
    left = [fault]
    engine.choose_fault = lambda route, body: left.pop() if left and route == path and happens(body) else None
    return left


@contextlib.asynccontextmanager
async def found_by(engine):
    async with engine.serve() as url, engine_at(url) as right:
        yield as_found(await right.model()), url


@pytest.mark.parametrize("fault", MOMENTS.values(), ids=MOMENTS)
@pytest.mark.parametrize("asked", REQUESTS.values(), ids=REQUESTS)
async def test_a_bad_moment_costs_nothing_that_a_later_probe_does_not_find(asked, fault):
    engine = made()
    async with found_by(engine) as (right, url), engine_at(url) as one:
        left = once(engine, asked, fault)

        async def probed():
            try:
                await one.probe_again()
                return as_found(await one.model()) == right
            except EngineError as why:
                assert why.passing, "calls wait for the engine"  # noqa: PT017
                return False

        await until(probed)
        assert not left


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions/derender", "/v1/chat/completions/render"])
async def test_so_it_is_on_other_routes(path):
    engine = made()
    async with found_by(engine) as (right, url):
        for number in range(1, 6):
            count = itertools.count(1)
            once(engine, lambda _body, number=number, count=count: next(count) == number, Fault.answer(502, path=path), path)
            async with engine_at(url) as one:
                await one.model()

                async def is_right(one=one):
                    await one.probe_again()
                    return as_found(await one.model()) == right

                await until(is_right)


async def test_a_busy_router_that_refuses_some_requests_is_probed():
    """A probe has more requests than such a router accepts in a row."""
    numbers = itertools.count(1)
    async with found_by(made()) as (right, up):
        router = Intermediary(up, lambda _route, body: 429 if next(numbers) % 7 == 0 else body)
        async with router.serve() as url, engine_at(url) as one:
            assert as_found(await one.model()) == right


async def test_calls_that_wait_for_the_probe_of_a_busy_engine_do_not_probe_it_one_after_another(monkeypatch):
    monkeypatch.setattr("tokencache.engine.probe.BUSY_PAUSES", ())
    numbers = itertools.count(1)
    async with made().serve() as up:
        busy = Intermediary(up, lambda _route, _body: next(numbers) and 503)
        async with busy.serve() as url, engine_at(url) as one:
            refused = await asyncio.gather(*[one.model("sim") for _ in range(50)], return_exceptions=True)
            assert {(type(why), why.status, why.reached) for why in refused} == {(EngineError, 503, True)}
            assert next(numbers) < 10


async def test_a_call_whose_template_arguments_are_tested_at_a_busy_moment_continues():
    engine = made()
    async with proxied(engine) as rig:
        first = await rig.say("s", ASK, tools=TOOLS)
        left = once(engine, lambda body: body.get("temperature") == 0, Fault.answer(429, "{}"))
        await rig.say("s", [*ASK, echo(first), *results(first)], tools=TOOLS)
        assert ([turn["match"] for turn in await rig.turns()], left) == (["root", "continue"], [])


async def test_an_engine_that_could_only_record_is_exact_as_soon_as_it_can():
    """A gateway that still removes unknown members when the proxy starts: nobody has to start the proxy again."""
    async with made().serve() as up:
        gateway = Intermediary(up, lambda _route, body: {name: value for name, value in body.items() if name != "kv_transfer_params"})
        async with gateway.serve() as url, proxied(made(), upstream=url, engine_kind="vllm") as rig:
            assert (await rig.proxy.engine.model()).capability.level == "record"
            first = await rig.say("s", ASK, tools=TOOLS)
            gateway.change = lambda _route, body: body

            async def is_exact():
                return (await rig.proxy.engine.model()).capability.level == "exact"

            await until(is_exact)
            messages = [*ASK, echo(first), *results(first)]
            await rig.say("s", messages, tools=TOOLS)
            assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]


async def test_an_engine_that_can_only_record_is_served_as_it_is(caplog, monkeypatch):
    """What it can do is said once, however often it is probed; what was learned of it stays."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("tokencache.engine.model.LONGEST_IF_READY", 0.02)
    engine = made(honours_ids=False)
    async with engine.serve() as url, engine_at(url, "vllm") as one:
        known, asked = await one.model(), len(engine.ground_truth)

        async def again():
            await one.probe_again()
            return len(engine.ground_truth) > 2 * asked

        await until(again)
        assert await one.model() is known
        assert one.state == "ready"
    assert len([record for record in caplog.records if "RECORD ONLY" in record.getMessage()]) == 1

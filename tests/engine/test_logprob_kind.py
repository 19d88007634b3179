"""The kind of an engine's log probabilities is identified by a test; without proof nothing is claimed."""

import logging

import aiohttp
import pytest
from aiohttp import web

from tests.proxy.kit import TOOLS, proxied
from tests.support.waiting import until
from tokencache.engine.logprob_kind import NONE, _Alternative, _Token, judge
from tokencache.testing import SimulatedEngine

STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]


def value(own, *others):
    return _Token(own, [_Alternative(logprob) for logprob in (own, *others)])


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([value(0.0, -9999.0), value(0.0, -9999.0)], "processed"),
        ([value(-0.0), value(0.0)], "processed"),
        ([value(-3.0, -0.1, -4.0), value(-12.0, -0.1, -4.0)], "raw"),
        ([value(0.0, -17.0), value(-17.0, 0.0)], "raw"),  # a model that is certain
        ([value(-11.9, -11.9, -11.8), value(-11.9, -11.9)], "raw"),  # one that knows nothing
        ([value(-40.0, -0.5, -1.5), value(-300.0, -0.5, -1.5)], "raw"),
        ([value(0.5, 3.0, 2.0), value(1.0, 3.0, 2.0)], ""),  # logits
        ([value(-0.1, -0.2, -0.2), value(-0.1, -0.2)], ""),  # more than all there is
        ([value(-80.0, -33.0, -34.0), value(-81.0, -33.0)], ""),  # logits of a model whose logits are all far below 0
        ([value(4.0, -9999.0), value(-2.0, -9999.0)], ""),  # logits behind the mask
        ([value(-1e-3, -9999.0), value(0.0, -9999.0)], ""),
        ([value(-2000.0, -1500.0), value(-3.0, -0.1, -4.0)], ""),  # one request has no possible id
        ([value(-3.0, -0.1, -4.0), value(-2000.0, -1500.0)], ""),
        ([value(800.0, 900.0), value(1.0, 3.0, 2.0)], ""),  # logits whose exponential is too large for a float
    ],
)
def test_verdicts(values, kind):
    found = judge(values)
    assert found.kind == kind
    assert found.seen.startswith(NONE) == (kind == "")


MODES = {"raw_logprobs": "raw", "processed_logprobs": "processed", "raw_logits": "", "processed_logits": ""}


@pytest.mark.parametrize(("mode", "kind"), MODES.items())
async def test_the_finding_is_in_the_log_in_readyz_and_in_each_turn(mode, kind, caplog):
    caplog.set_level(logging.INFO, "tokencache.engine.model")
    async with proxied(SimulatedEngine(seed=3, logprobs_mode=mode)) as rig:
        (model,) = (await rig.get("/readyz"))["engine"]["models"]
        await rig.say("s", [{"role": "user", "content": "hello"}])
        (turn,) = await rig.turns()
    assert (model["logprobs"], turn["logprob_kind"]) == (kind, kind)
    assert model["level"] == "exact"
    lines = [record for record in caplog.records if "logprobs=" in record.getMessage()]
    assert all(f"logprobs={kind or '?'} ({model['logprobs_seen']})" in record.getMessage() for record in lines)
    assert lines
    loud = [record for record in caplog.records if "UNUSABLE LOG PROBABILITIES" in record.getMessage()]
    assert bool(loud) == (kind == "")
    assert ("start vLLM with --logprobs-mode processed_logprobs" in caplog.text) == (kind == "raw")


@pytest.mark.parametrize(
    ("mode", "sampling", "marked"),
    [
        ("raw_logprobs", {}, False),
        ("raw_logprobs", {"temperature": 1, "top_p": 1.0, "top_k": -1, "seed": 3}, False),
        ("raw_logprobs", {"temperature": 0.7}, True),
        ("raw_logprobs", {"top_p": 0.9}, True),
        ("raw_logprobs", {"repetition_penalty": 1.1}, True),
        ("raw_logprobs", {"tools": TOOLS}, False),
        ("raw_logprobs", {"tools": STRICT}, True),  # a grammar forces the arguments of their calls
        ("raw_logprobs", {"tools": STRICT, "tool_choice": "none"}, False),
        ("raw_logprobs", {"logits_processors": ["package.processor"]}, True),
        ("processed_logprobs", {"temperature": 0.7}, False),
    ],
)
async def test_values_that_are_not_the_policys_are_marked(mode, sampling, marked):
    async with proxied(SimulatedEngine(seed=3, logprobs_mode=mode)) as rig:
        await rig.say("s", [{"role": "user", "content": "hello"}], **sampling)
        (turn,) = await rig.turns()
    assert turn["marks"] == (["raw-logprobs"] if marked else [])


@pytest.mark.parametrize(("mode", "ready"), [("raw_logprobs", False), ("processed_logprobs", True)])
async def test_processed_values_may_be_required(mode, ready):
    async with proxied(SimulatedEngine(seed=3, logprobs_mode=mode), require="processed") as rig:
        found = await until(lambda: _probed(rig))
    assert found["ready"] is ready
    assert ("start it with --logprobs-mode processed_logprobs" in found["engine"]["error"]) is not ready


async def _probed(rig):
    found = await rig.readiness()
    return found if found["engine"]["models"] else None


async def test_an_engine_that_ignores_the_mask_proves_nothing():
    """It samples any id, so its values show nothing."""

    async def answered(request):
        body = await request.json() if request.can_read_body else {}
        body.pop("allowed_token_ids", None)
        async with http.request(request.method, up + request.path, json=body) as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answered)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        between = f"http://127.0.0.1:{runner.addresses[0][1]}"
        engine = SimulatedEngine(seed=3, logprobs_mode="processed_logprobs")
        async with aiohttp.ClientSession() as http, engine.serve() as up, proxied(SimulatedEngine(), upstream=between) as rig:
            found = (await rig.proxy.engine.model()).capability
        assert (found.level, found.logprobs) == ("exact", "")
        assert not found.logprobs_seen.startswith(NONE)
    finally:
        await runner.cleanup()

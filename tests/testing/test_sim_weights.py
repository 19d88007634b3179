"""The simulated engine's weights: what a stale prefix and a change in mid-reply do to log probabilities, as measured on vLLM 0.32."""

import asyncio
import contextlib

import aiohttp
import pytest

from tokencache.testing import SimulatedEngine

LONG = "One, two, three, four, five, six, seven, eight, nine, ten. " * 8
ASK = {"model": "sim", "messages": [{"role": "user", "content": f"EPISODE:long {LONG}"}], "return_token_ids": True, "logprobs": True}


@contextlib.asynccontextmanager
async def engines(*weights, **more):
    """Engines with these weights, and a function that posts to them."""
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        made = []
        for name in weights:
            engine = SimulatedEngine(episodes={"long": [LONG]}, dev_mode=True, drift=0.0, **more)
            engine.weights.loaded = name
            made.append((engine, await stack.enter_async_context(engine.serve())))

        async def post(place, path="/v1/chat/completions", **body):
            async with http.post(made[place][1] + path, json=body or None) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        yield [engine for engine, _ in made], post


async def sampled(engine, tokens):
    """Wait until the second reply has so many tokens."""
    async with asyncio.timeout(5):
        while len(engine.ground_truth) < 2 or len(engine.ground_truth[1].completion_ids) < tokens:  # noqa: ASYNC110 - no event for a token
            await asyncio.sleep(0.001)


def logprobs(reply):
    return [entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"]]


async def test_a_stale_prefix_shows_and_a_salt_or_an_empty_cache_helps():
    async with engines("v1", "v2") as ((engine, _), post):
        old = logprobs(await post(0, **ASK))
        assert logprobs(await post(0, **ASK)) == old
        cold = logprobs(await post(1, **ASK))
        await post(0, "/collective_rpc", method="reload_weights", kwargs={"weights_path": "v2"})
        stale = logprobs(await post(0, **ASK))
        assert engine.ground_truth[-1].cached > 0
        assert set(engine.ground_truth[-1].prompt_versions) == {"v1", "v2"}
        assert logprobs(await post(0, **ASK, cache_salt="v2")) == cold
        assert len({tuple(old), tuple(cold), tuple(stale)}) == 3
        await post(0, "/reset_prefix_cache")
        assert logprobs(await post(0, **ASK)) == cold


@pytest.mark.parametrize(
    ("pause", "finish", "truth"),
    [
        ("mode=keep", "length", "cold"),
        ("mode=keep&clear_cache=false", "length", "stale"),
        ("mode=wait", "length", "old"),
        ("mode=abort", "abort", "old"),
    ],
)
async def test_what_a_pause_does_to_a_running_reply(pause, finish, truth):
    ask = ASK | {"max_tokens": 60}
    async with engines("v1", "v2", token_delay=0.001) as ((engine, _), post):
        old, cold = [logprobs(await post(place, **ask)) for place in (0, 1)]
        call = asyncio.create_task(post(0, **ask))
        await sampled(engine, 5)
        await post(0, f"/pause?{pause}")
        queued = asyncio.create_task(post(0, **ask, cache_salt="new"))
        await post(0, "/collective_rpc", method="reload_weights", kwargs={"weights_path": "v2"})
        await engine.until(lambda: len(engine.ground_truth) > 2)
        assert not engine.ground_truth[-1].completion_ids
        await post(0, "/resume")
        reply = await call
        assert reply["choices"][0]["finish_reason"] == finish
        assert logprobs(await queued) == cold
        entry, got = engine.ground_truth[1], logprobs(reply)
        changed = entry.versions.index("v2") if "v2" in entry.versions else len(got)
        assert got[:changed] == old[:changed]
        assert (truth == "old") == (changed == len(got))
        assert (got[changed:] == cold[changed : len(got)]) == (truth != "stale")


async def test_an_adapter_of_another_path_has_a_cache_of_its_own_and_one_that_is_overwritten_does_not():
    ask = ASK | {"model": "policy"}
    async with engines("v1") as ((engine,), post):
        weights = engine.weights
        weights.adapters["policy"] = "/a"
        await post(0, **ask)
        weights.adapters["policy"] = "/b"
        await post(0, **ask)
        assert engine.ground_truth[-1].cached == 0
        weights.overwritten["/b"] = "c"
        await post(0, **ask)
        assert engine.ground_truth[-1].cached > 0
        assert set(engine.ground_truth[-1].versions) == {"v1+c"}

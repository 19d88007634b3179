"""How a reply ended is what its ids prove, whatever the engine calls it; the client gets the engine's word."""

import contextlib
import json

import pytest

from tests.proxy.kit import CALLS, CHAT, EPISODES, HEADER, TOOLS, proxied, user
from tests.proxy.spoiling import SpoilingGateway, changed
from tokencache.testing import SimulatedEngine

REASON = "choices.0.finish_reason"


@contextlib.asynccontextmanager
async def relabelled(reason, reply=CALLS, **options):
    """A rig whose engine calls every end of a whole reply `reason`."""
    async with SimulatedEngine(episodes={**EPISODES, "two": [reply]}, seed=7, **options).serve() as up:
        gateway = SpoilingGateway(up)
        async with gateway.serve() as url, proxied(upstream=url) as rig:
            await rig.proxy.engine.model()
            gateway.spoil = lambda sent: [changed(event, REASON, lambda _: reason) for event in sent]
            yield rig


async def ask(rig, **more):
    """The finish reason that the client gets for a whole reply, and the ids of the reply."""
    body = {"model": "sim", "messages": [user("EPISODE:two")], "tools": TOOLS, "return_token_ids": True, **more}
    async with rig.http.post(rig.url + CHAT, json=body, headers={HEADER: "s"}) as answer:
        (choice,) = json.loads(await answer.read())["choices"]
    return choice["finish_reason"], choice["token_ids"]


async def endings(rig):
    """The word of each trainer's format for the end of the session."""
    found = {}
    for name in ("slime", "miles", "skyrl", "nemo-gym", "native"):
        written = await rig.get(f"/tokencache/v1/sessions/s/trajectories?format={name}")
        if name == "skyrl":
            found[name] = written["generator_output"]["stop_reasons"][-1]
        elif name == "nemo-gym":
            found[name] = written["responses"][-1]["response"]["status"]
        elif name == "native":
            turn = written["sequences"][-1]["turns"][-1]
            found[name] = (turn["finish_reason"], turn["engine_reason"])
        else:
            found[name] = written["samples"][-1]["status"]
    return found


CUT = {"slime": "truncated", "miles": "truncated", "skyrl": "length", "nemo-gym": "incomplete"}
DONE = {"slime": "completed", "miles": "completed", "skyrl": "stop", "nemo-gym": "completed"}


@pytest.mark.parametrize("reason", ["tool_calls", "stop"])
@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
async def test_a_reply_that_the_limit_cut_in_its_second_call(reason, limit):
    async with relabelled(reason) as rig:
        said, ids = await ask(rig, **{limit: 20})
        assert (said, len(ids)) == (reason, 20)
        assert await endings(rig) == {**CUT, "native": ("length", reason)}


async def test_a_reply_that_the_context_cut():
    async with relabelled("tool_calls", max_model_len=330) as rig:
        said, _ = await ask(rig, messages=[user("EPISODE:two " + "word " * 100)])
        turn = (await rig.turns())[-1]
        assert turn["prompt_tokens"] + turn["completion_tokens"] == 330
        assert (said, turn["finish_reason"], turn["engine_reason"]) == ("tool_calls", "length", "tool_calls")


async def test_a_reply_that_ends_itself_at_its_limit():
    async with relabelled("tool_calls", drift=0) as rig:
        _, ids = await ask(rig)
        assert await ask(rig, max_tokens=len(ids), seed=1) == ("tool_calls", ids)
        assert await endings(rig) == {**DONE, "native": ("tool_calls", "")}


async def test_a_repeated_call_gets_the_engines_word():
    """The reply that a retry receives is the one that the first call received."""
    async with relabelled("tool_calls") as rig:
        body = {"model": "sim", "messages": [user("EPISODE:two")], "tools": TOOLS, "max_tokens": 20}
        said = []
        for retry in ("0", "1"):
            headers = {HEADER: "s", "X-Stainless-Retry-Count": retry}
            async with rig.http.post(rig.url + CHAT, json=body, headers=headers) as answer:
                said.append((await answer.json())["choices"][0]["finish_reason"])
        assert said == ["tool_calls", "tool_calls"]
        assert [turn["finish_reason"] for turn in await rig.turns()] == ["length"]

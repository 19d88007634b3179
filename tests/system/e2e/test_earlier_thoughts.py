"""A real vLLM whose parser (`deepseek_r1`) reads off an earlier thought that the next reply does not think: no client sees a difference."""

import pytest
from rig.exported import turns
from rig.harness import TOOLS
from test_forced import vllm_server  # noqa: F401 - a fixture

from tokencache.engine.earlier_thoughts import NO_EFFECT

pytestmark = pytest.mark.parametrize("vllm_server", ["its own end"], indirect=True)
CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 1, "seed": 3}


def said(reply):
    """A reply's thought and text. If vLLM's server lags behind, its parser leaves the mark in a thought that arrives with its mark."""
    thought, text = reply.message.get("reasoning"), reply.message.get("content")
    return thought and thought.removeprefix("<think>"), text


async def conversation(made, **fields):
    """Two replies of a harness that does not send reasoning back."""
    harness = made.say("EPISODE:talks")
    for _ in range(2):
        await harness.turn(tools=TOOLS, stream=True, **fields)
    return [said(reply) for reply in harness.replies]


async def test_the_probe_finds_it(proxied):
    found = (await proxied.proxy.engine.model()).capability.earlier_thoughts
    assert found != NO_EFFECT
    assert found.closed == ("stream", "grammar")


async def test_streams(proxied):
    direct, through = await conversation(proxied.direct()), await conversation(proxied.harness("think"))
    assert through == direct
    assert all(thought for thought, _ in through)
    assert [(turn["match"], turn["reason"]) for turn in await turns(proxied, "think")] == [("root", ""), ("continue", "")]


@pytest.mark.parametrize("bound", [False, True], ids=["text", "grammar"])
async def test_thoughts_that_a_harness_sends_back(proxied, bound):
    """The template shows them after the last question, so that they are in a direct call's prompt, too."""
    heard = []
    for made in (proxied.direct(faithful=True), proxied.harness(f"sent-back{bound}", faithful=True)):
        made.say("EPISODE:works")
        for more in ({}, CHOICE if bound else {}):
            await made.turn(tools=TOOLS, stream=True, **more)
        heard.append([said(reply) for reply in made.replies])
    assert heard[0] == heard[1]
    reasoning, text = heard[0][1]
    assert reasoning is None
    assert text in CHOICE["structured_outputs"]["choice"] if bound else text.startswith("<think>")
    assert [(turn["match"], turn["reason"]) for turn in await turns(proxied, f"sent-back{bound}")] == [("root", ""), ("continue", "")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_grammar(proxied, stream):
    heard = []
    for made in (proxied.direct(), proxied.harness(f"grammar{stream}")):
        harness = made.say("EPISODE:talks")
        await harness.turn()
        reply = await harness.turn(stream=stream, **CHOICE)
        heard.append((reply.finish_reason, said(reply)[0], reply.text in CHOICE["structured_outputs"]["choice"]))
    assert heard == [("stop", "\nInvisible second.\n", True)] * 2
    assert (await turns(proxied, f"grammar{stream}"))[1]["reason"] == "earlier-thought"

"""What no item of a response shows comes back all the same: empty replies, blank text, thinking that ends or does not."""

import json

import pytest

from tests.proxy.kit import HEADER, TOOLS, events, proxied
from tests.support.pairwise import cases
from tokencache.testing import SimulatedEngine

CALL = '<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}\n</tool_call>'
REPLIES = {
    "nothing": "",
    "blank": "\n\n",
    "a block without content": "<think></think>",
    "a blank block": "<think>\n\n</think>\n\n",
    "closed thinking": "<think>only</think>",
    "closed thinking and blanks": "<think>only</think>\n\n",
    "cut off": "<think>only",
    "cut off at once": "<think>",
    "cut off within the end": "<think>only</thi",
    "text": "<think>\nr\n</think>\n\nFine.",
    "a call": CALL,
    "blanks and a call": f"\n\n{CALL}",
    "a block without content and a call": f"<think></think>{CALL}",
    "closed thinking, blanks and a call": f"<think>only</think>\n\n{CALL}",
}
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]
GO, ON = ({"type": "message", "role": "user", "content": text} for text in ("EPISODE:said", "on"))


def engine(reply: str, *, parser: bool) -> SimulatedEngine:
    return SimulatedEngine(episodes={"said": [reply, "<think>\nr\n</think>\n\nFine."]}, seed=7, reasoning_parser=parser)


async def respond(rig, *, stream: bool, **body):
    """The response of a call, as the client has it at the end."""
    sent = {"model": "sim", "tools": FUNCTIONS, "stream": stream, **body}
    async with rig.http.post(f"{rig.url}/v1/responses", json=sent, headers={HEADER: "s"}) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    if not stream:
        return json.loads(text)
    return json.loads(events(text)[-1].partition("\n")[2].removeprefix("data: "))["response"]


def results(response) -> list:
    calls = [item["call_id"] for item in response["output"] if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": name, "output": "a.txt"} for name in calls] or [ON]


@pytest.mark.parametrize(("name", "parser", "stream", "by_id"), cases([*REPLIES], [False, True], [False, True], [False, True]))
async def test_a_reply_continues(name, parser, stream, by_id):
    async with proxied(engine(REPLIES[name], parser=parser)) as rig:
        first = await respond(rig, stream=stream, input=[GO])
        assert first["output"], "there is always an item, which carries the handle"
        new = results(first)
        if by_id:
            await respond(rig, stream=False, input=new, previous_response_id=first["id"])
        else:
            await respond(rig, stream=False, input=[GO, *first["output"], *new])
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
        assert len((await rig.check())["sequences"]) == 1


@pytest.mark.parametrize("name", ["closed thinking", "cut off", "cut off at once", "cut off within the end", "a block without content"])
@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_that_the_client_leaves_out_is_dropped_reasoning(name, stream):
    async with proxied(engine(REPLIES[name], parser=False)) as rig:
        await respond(rig, stream=stream, input=[GO])
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "", "annotations": []}]}
        await respond(rig, stream=stream, input=[GO, said, ON])
        turn = (await rig.turns())[-1]
        assert turn["match"] == "continue"
        assert ("reasoning-dropped" in turn["forgiven"]) is ("only" in REPLIES[name])
        await rig.check()


@pytest.mark.parametrize("name", ["closed thinking", "cut off"])
async def test_a_block_that_the_client_closes_or_opens_is_not_the_models(name):
    async with proxied(engine(REPLIES[name], parser=False)) as rig:
        ask = [{"role": "user", "content": "EPISODE:said"}]
        assert (await rig.say("s", ask))["content"] == REPLIES[name]
        other = {"closed thinking": "<think>only", "cut off": "<think>only</think>"}[name]
        await rig.say("s", [*ask, {"role": "assistant", "content": other}, {"role": "user", "content": "on"}])
        assert (await rig.turns())[-1]["match"] == "plain"

"""Turns that did not end well and were continued: cut off by `max_tokens` at any point, and calls that are invalid JSON."""

import json

import pytest
from rig.exported import assert_exported, trajectory, turns
from rig.harness import TOOLS

STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
PLACES = {
    "think": ("<think>\nI look first", ""),
    "think-opener": ("<think>", ""),
    "text": ("</think>\n\nLooking ar", "Looking"),
    "call-opener": ("<tool_call>\n{", "Looking around."),
    "arguments": ('"arguments": {"timeout": 10.0,  "com', "Looking around."),
    "call-closer": ('"command": "ls  -la"}}', "Looking around."),
}


async def limit_at(proxied, harness, marker):
    """How many tokens the first reply takes until it contains `marker`; with a seed it has the same tokens again."""
    probe = proxied.direct(tools=TOOLS, seed=harness.fields["seed"])
    probe.messages = harness.messages
    (whole,) = await probe.ask()
    for n in range(1, len(whole.ids)):
        if marker in await proxied.detokenize(whole.ids[:n]):
            return n
    raise AssertionError(marker)


@STREAMS
@pytest.mark.parametrize("place", PLACES)
async def test_truncated_turn_is_continued(proxied, stream, place):
    """The limit cuts a thought, the text, or a call: the next turn follows exactly the sampled tokens.

    vLLM shows a call with incomplete JSON as a call when streaming, as text when not.
    """
    marker, shown = PLACES[place]
    harness = proxied.harness("cut", stream=stream, tools=TOOLS, seed=5).say("EPISODE:agent please")
    limit = await limit_at(proxied, harness, marker)
    cut = await harness.turn(max_tokens=limit)
    assert len(cut.ids) == limit
    # A call with complete JSON counts as a call when it is not streamed, even without its closing tag.
    assert cut.finish_reason == ("tool_calls" if place == "call-closer" and not stream else "length")
    assert (await proxied.detokenize(cut.ids)).count(marker) == 1
    assert shown in cut.text
    for _ in range(2):
        await harness.turn()
    assert harness.contiguous == (2, 2)
    between = harness.replies[1].prompt[len(cut.prefix) :]
    assert (await proxied.detokenize(between)).startswith("<|im_end|>\n<|im_start|>")
    assert_exported(await trajectory(proxied, "cut"), harness.answered)
    assert [turn["match"] for turn in await turns(proxied, "cut")] == ["root", "continue", "continue"]


@STREAMS
async def test_limit_right_after_the_end_of_turn(proxied, stream):
    """The last token allowed is the stop id itself: the next prompt has one end of turn, not two."""
    harness = proxied.harness("full", stream=stream, tools=TOOLS, seed=5).say("EPISODE:agent please")
    (whole,) = await proxied.direct(tools=TOOLS, seed=5, system=None).say("EPISODE:agent please").ask()
    harness.messages = [{"role": "user", "content": "EPISODE:agent please"}]
    first = await harness.turn(max_tokens=len(whole.ids))
    assert first.ids == whole.ids
    await harness.turn()
    assert harness.contiguous == (1, 1)
    between = harness.replies[1].prompt[len(first.prefix) :]
    assert (await proxied.detokenize(between)).startswith("\n<|im_start|>")
    assert_exported(await trajectory(proxied, "full"), harness.answered)


@STREAMS
async def test_call_that_is_invalid_json(proxied, stream):
    """vLLM 0.32 accepts invalid JSON in the arguments of history: it renders `{}`.

    So a direct client can continue, too, but the model no longer sees what it sampled; through the proxy its own tokens remain. (Releases
    before 0.32 answer 400, to this and every later turn; for these see `test_arguments_that_the_engine_refuses`.)

    When it is not streamed, vLLM shows such a call as text.
    """
    direct = proxied.direct(stream=stream, tools=TOOLS).say("EPISODE:badcall please")
    harness = proxied.harness("bad", stream=stream, tools=TOOLS).say("EPISODE:badcall please")
    for each in (direct, harness):
        bad = await each.turn()
        if stream:
            with pytest.raises(ValueError, match="Expecting"):
                json.loads(bad.calls[0]["function"]["arguments"])
        else:
            assert "oops" in bad.text
        for _ in range(3):
            await each.turn()
    assert direct.contiguous[0] < 3
    assert harness.contiguous == (3, 3)
    assert "oops" in await proxied.detokenize(harness.replies[-1].prompt)
    if stream:
        assert "oops" not in await proxied.detokenize(direct.replies[-1].prompt)
    assert_exported(await trajectory(proxied, "bad"), harness.answered)


# episode, turns before the history is altered, how the arguments of which tool are altered
BENT = {
    "object": ("agent", 1, "bash", json.loads),
    "null": ("odd", 3, "note", lambda _: None),
    "list": ("agent", 1, "bash", lambda text: [text]),
}


def bend(harness, kind):
    _, _, tool, habit = BENT[kind]
    for message in harness.messages:
        for call in message.get("tool_calls") or []:
            if call["function"]["name"] == tool and isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = habit(call["function"]["arguments"])


async def go_on_bent(harness, kind):
    """Statuses of two calls with a history whose arguments are not strings, and the last answer."""
    episode, before, _, _ = BENT[kind]
    harness.say(f"EPISODE:{episode} please")
    for _ in range(before):
        await harness.turn()
    statuses = []
    for _ in range(2):
        bend(harness, kind)
        (reply,) = await harness.ask()
        statuses.append(reply.status)
        if reply.status == 200:
            harness.take(reply)
            if not reply.calls:
                harness.say("Go on.")
    return statuses, reply


@STREAMS
@pytest.mark.parametrize("kind", BENT)
async def test_arguments_that_the_engine_refuses(proxied, stream, kind):
    """A harness keeps arguments as objects, or as null, and sends them back: vLLM 0.32 answers 400 to this and every later turn.

    With the exact ids, the text of old messages no longer matters to the engine: the proxied rollout continues.

    An object with the value of the model's own arguments is recognised as the model's call. `null` is `{}`: it is recognised if the model's
    arguments were empty. A list is not what the model sampled: nothing is spliced for it, and the harness gets the engine's answer.
    """
    direct, refusal = await go_on_bent(proxied.direct(stream=stream, tools=TOOLS), kind)
    harness = proxied.harness("bent", stream=stream, tools=TOOLS)
    statuses, last = await go_on_bent(harness, kind)
    assert direct == [400, 400]
    if kind == "list":
        assert statuses == [400, 400]
        assert last.raw == refusal.raw
        return
    assert statuses == [200, 200]
    done, of = harness.contiguous
    assert done == of > 0
    assert_exported(await trajectory(proxied, "bent"), harness.answered)

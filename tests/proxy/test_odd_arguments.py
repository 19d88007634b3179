"""Arguments that Python's `json` reads and stricter readers refuse stand in a spliced prompt as the engine renders them."""

import pytest

from tests.proxy.kit import TOOLS, echo, results, user

ODD = {
    "NaN": ('{"x": NaN}', '{"x": NaN}'),
    "Infinity": ('{"x": [-Infinity]}', '{"x": [-Infinity]}'),
    "beyond every double": ('{"x":1e999}', '{"x": Infinity}'),
    "beyond 64 bits": ('{"x":123456789012345678901234567890}', '{"x": 123456789012345678901234567890}'),
    "400 digits": (f'{{"x":-{"9" * 400}}}', f'{{"x": -{"9" * 400}}}'),
    "a key twice": ('{"x":1,"y":2,"x":3}', '{"x": 3, "y": 2}'),
}
"""Arguments as a harness writes them, and as the template does."""


def told(arguments):
    """What a harness puts into the history by itself: a call that the model never made, and its result."""
    call = {"id": "own", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "own", "content": "done"}]


async def spliced(rig, messages):
    """Make a call that is recognised; returns its turn, and as text its prompt and the engine's plain rendering."""
    await rig.say("s", messages, tools=TOOLS)
    turn = (await rig.turns())[-1]
    assert turn["match"] in {"continue", "resplice"}, turn
    tokenizer, prompt = rig.engine.tokenizer, rig.ground_truth()[-1].prompt_ids
    status, plain = await rig.post(None, "/tokenize", model="sim", messages=messages, tools=TOOLS)
    assert status == 200
    return turn, tokenizer.decode(prompt), tokenizer.decode(plain["tokens"])


@pytest.mark.parametrize(("arguments", "written"), ODD.values(), ids=ODD)
async def test_before_the_models_words(rig, arguments, written):
    """An edited context: everything before the model's words is rendered afresh."""
    history = [user("EPISODE:demo"), *told(arguments), user("count")]
    first = await rig.say("s", history, tools=TOOLS)
    history = [{"role": "system", "content": "New."}, *history, echo(first), *results(first)]
    turn, prompt, plain = await spliced(rig, history)
    assert turn["match"] == "resplice"
    assert f'"arguments": {written}}}' in plain
    head = plain[: plain.index("<|im_start|>user\ncount")]
    assert prompt.startswith(head)
    await rig.check()


@pytest.mark.parametrize(("arguments", "written"), ODD.values(), ids=ODD)
async def test_after_the_models_text(rig, arguments, written):
    first = await rig.say("s", [user("EPISODE:talk")], tools=TOOLS)
    history = [user("EPISODE:talk"), echo(first), user("look"), *told(arguments), user("go on")]
    _, prompt, plain = await spliced(rig, history)
    at = "<|im_start|>user\nlook"
    assert f'"arguments": {written}}}' in plain[plain.index(at) :]
    assert prompt[prompt.index(at) :] == plain[plain.index(at) :]
    await rig.check()


async def test_beside_a_call_that_no_engine_reads(rig):
    """Of two calls in one message one needs a stand-in: the other keeps its arguments."""
    call = {"id": "cut", "type": "function", "function": {"name": "bash", "arguments": '{"cmd": "l'}}
    odd = told('{"x": NaN}')
    odd[0]["tool_calls"].append(call)
    odd.append({"role": "tool", "tool_call_id": "cut", "content": "no JSON"})
    history = [user("EPISODE:demo"), *odd, user("count")]
    first = await rig.say("s", history, tools=TOOLS)
    history = [{"role": "system", "content": "New."}, *history, echo(first), *results(first)]
    turn, prompt, plain = await spliced(rig, history)
    assert turn["match"] == "resplice"
    assert prompt.startswith(plain[: plain.index("<|im_start|>user\ncount")])
    assert '{"name": "bash", "arguments": {"x": NaN}}' in prompt
    assert '{"name": "bash", "arguments": {}}' in prompt


async def test_the_engine_receives_them_as_they_were_written(rig):
    odd = told('{"x": NaN, "y": 1e999}')
    first = await rig.say("s", [user("EPISODE:talk"), *odd, user("count")], tools=TOOLS)
    await rig.say("s", [user("EPISODE:talk"), *odd, user("count"), echo(first), user("go on")], tools=TOOLS)
    assert (await rig.turns())[-1]["match"] == "continue"
    sent = [body["messages"] for body in rig.engine.requests if body["messages"][0] == user("EPISODE:talk")]
    assert [messages[1] for messages in sent] == [odd[0], odd[0]]

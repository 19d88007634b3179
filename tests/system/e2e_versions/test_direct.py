"""Calls the engine directly: what it does with supplied ids, natively or by the plugin."""

import json

import pytest
from conftest import MAX_MODEL_LEN
from rig.harness import TOOLS, read_body, read_stream, rewritten
from rig.server import MODEL

HI = [{"role": "user", "content": "Hi."}]


@pytest.fixture(autouse=True)
def _takes_ids(case):
    if not case.exact:
        pytest.skip("this one ignores ids")


@pytest.fixture
def by_plugin(case):
    if case.native:
        pytest.skip("native in this version")


async def chat(proxied, messages, *, stream=False, **fields):
    """One choice, with its ids."""
    body = {"model": MODEL, "messages": messages, "tools": TOOLS, "stream": stream, "return_token_ids": True, "logprobs": True, **fields}
    async with proxied.http.post(f"{proxied.vllm}/v1/chat/completions", json=body) as answer:
        raw = await answer.read()
        assert answer.status == 200, raw
        return (read_stream if stream else read_body)(200, raw)[0]


def supplied(ids):
    return {"kv_transfer_params": {"prompt_token_ids": ids}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fields", [{}, {"tool_choice": "none"}, {"include_reasoning": True}], ids=str)
async def test_everything_else_is_unchanged(proxied, stream, fields):
    """Ids equal to the rendering of the messages give the same answer: parsers, thoughts, calls, log probabilities at each id."""
    messages = [{"role": "user", "content": "EPISODE:agent please"}]
    plain = await chat(proxied, messages, stream=stream, **fields)
    given = await chat(proxied, HI, stream=stream, **fields, **supplied(plain.prompt))
    assert given.prompt == plain.prompt
    assert given.finish_reason == plain.finish_reason
    assert await proxied.text(given.ids) == await proxied.text(plain.ids)  # in other tokens: the model never samples the same tokens twice
    assert len(given.logprobs) == len(given.ids)
    assert [call["function"] for call in given.calls] == [call["function"] for call in plain.calls]
    assert {k: v for k, v in given.message.items() if k != "tool_calls"} == {k: v for k, v in plain.message.items() if k != "tool_calls"}


async def test_a_grammar_still_holds(proxied):
    """The grammar excludes what the model would otherwise reply to this prompt."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    fields = {"tools": None, "response_format": form, "max_tokens": 200, "chat_template_kwargs": {"enable_thinking": False}}
    plain = await chat(proxied, [{"role": "user", "content": "EPISODE:agent please"}], **fields)
    given = await chat(proxied, HI, **fields, **supplied(plain.prompt))
    assert given.prompt == plain.prompt
    assert {json.loads(plain.text), json.loads(given.text)} <= {"yes", "no"}


BAD = {"empty": [], "text": "5", "a bool": [True], "negative": [-1], "out of vocabulary": [10**7], "too long": [5] * MAX_MODEL_LEN}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_bad_ids_are_refused(proxied, case, bad, stream):
    """With a status: a stream has not begun yet."""
    if (0, 27) <= case.number < (0, 32):
        pytest.skip("vLLM itself takes the ids, and checks them since 0.32")
    body = {"messages": HI, "stream": stream, **supplied(BAD[bad])}
    status, answer_json = await proxied.answer("/v1/chat/completions", body)
    assert status == 400, answer_json


async def test_tokenize_accepts_them_too(proxied):
    assert (await proxied.post("/tokenize", {"messages": HI, **supplied([5, 6, 7])}))["tokens"] == [5, 6, 7]


@pytest.mark.usefixtures("by_plugin")
@pytest.mark.parametrize("fields", [supplied([5]), {"required_prefix_token_ids": [5]}], ids=["prompt", "prefix"])
async def test_media_is_refused(proxied, fields):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look."}, image]}, {"role": "assistant", "content": "."}, *HI]
    status, answer_json = await proxied.answer("/v1/chat/completions", {"messages": messages, **fields})
    assert status == 400
    assert "not text" in answer_json["error"]["message"]


def taken(message, replies):
    """A history that continues from a reply as harnesses do: text trimmed, thoughts dropped, arguments rewritten."""
    calls = [call | {"function": {**call["function"], "arguments": rewritten(call["function"]["arguments"])}} for call in message.calls]
    reply = {"role": "assistant", "content": message.text.strip()} | ({"tool_calls": calls} if calls else {})
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok: a.txt\n"} for call in calls]
    return [*replies, reply, *(results or [{"role": "user", "content": "Go on — ☕."}])]


@pytest.mark.usefixtures("by_plugin")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("episode", ["agent", "talk", "odd"])
async def test_a_required_prefix(proxied, row, episode, stream):
    """Each turn starts with the previous one, `/tokenize` returns the same, and what follows is the rendering's tail."""
    messages = [{"role": "system", "content": "Be careful."}, {"role": "user", "content": f"EPISODE:{episode} please"}]
    prefix, done = [], 0
    for n in range(5):
        reply = await chat(proxied, messages, stream=stream, required_prefix_token_ids=prefix)
        plain = (await proxied.post("/tokenize", {"messages": messages, "tools": TOOLS}))["tokens"]
        if n:
            done += reply.prompt[: len(prefix)] == prefix
            behind = reply.prompt[len(prefix) :]
            assert plain[len(plain) - len(behind) :] == behind
            asked = {"messages": messages, "tools": TOOLS, "required_prefix_token_ids": prefix}
            assert (await proxied.post("/tokenize", asked))["tokens"] == reply.prompt
        prefix, messages = reply.prefix, taken(reply, messages)
    row.count("prefix", done, 4)
    assert done == 4


@pytest.mark.usefixtures("by_plugin")
async def test_a_required_prefix_that_was_cut_off(proxied):
    """No stop id at its end: the template's end of turn follows."""
    messages = [{"role": "user", "content": "EPISODE:talk please"}]
    reply = await chat(proxied, messages, max_tokens=9)
    assert reply.finish_reason == "length"
    later = [*messages, {"role": "assistant", "content": reply.text or "…"}, *HI]
    found = await chat(proxied, later, required_prefix_token_ids=reply.prefix, max_tokens=1)
    assert found.prompt[: len(reply.prefix)] == reply.prefix
    assert (await proxied.text(found.prompt[len(reply.prefix) :])).startswith("<|im_end|>\n<|im_start|>user\nHi.<|im_end|>")


ASKED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


@pytest.mark.usefixtures("by_plugin")
@pytest.mark.parametrize("place", ["kv_transfer_params", "vllm_xargs"])
@pytest.mark.parametrize("dialect", ["messages", "responses"])
async def test_a_required_prefix_in_other_dialects(proxied, ground_truth, case, dialect, place):
    if dialect == "messages" and (place == "vllm_xargs" or case.version.startswith("0.20.")):
        pytest.skip("this version's Messages have no such member")
    given = {"messages": ASKED, "max_tokens": 2} if dialect == "messages" else {"input": ASKED, "max_output_tokens": 2}
    await proxied.post(f"/v1/{dialect}", {**given, place: {"required_prefix_token_ids": [5, 6, 7]}})
    ((prompt, _),) = await ground_truth()
    assert prompt[:3] == [5, 6, 7]
    assert (await proxied.text(prompt[3:])).startswith("<|im_end|>\n<|im_start|>user\nc<|im_end|>")


@pytest.mark.usefixtures("by_plugin")
async def test_what_cannot_be_proven_is_refused_with_the_reason(proxied):
    status, answer_json = await proxied.answer("/v1/chat/completions", {"messages": HI, "required_prefix_token_ids": [5]})
    assert status == 400
    assert "no assistant message" in answer_json["error"]["message"]

"""Repeated calls in every dialect, and as the official SDKs really repeat them: on a time-out, and on an answer that says so."""

import asyncio
import json

import anthropic
import openai
import pytest
from aiohttp import web
from google import genai
from google.genai import types

from tests.proxy.kit import CHAT, EPISODES, HEADER, TOOLS, proxied, user
from tests.proxy.test_retries import FIRST, RETRY, gate, incidents, open_calls, wanted
from tests.support.waiting import until
from tokencache.testing import SimulatedEngine

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

BASH = {"name": "bash", "description": "Run a command", "input_schema": TOOLS[0]["function"]["parameters"]}
FUNCTIONS = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
DECLARED = [{"functionDeclarations": [{"name": "bash", "parametersJsonSchema": TOOLS[0]["function"]["parameters"]}]}]
MESSAGES = {"model": "sim", "max_tokens": 400, "messages": [user("EPISODE:demo")], "tools": [BASH]}
RESPONSES = {"model": "sim", "input": [user("EPISODE:demo")], "tools": FUNCTIONS}
GEMINI = {"contents": [{"role": "user", "parts": [{"text": "EPISODE:demo"}]}], "tools": DECLARED, "generationConfig": {}}
TEXT = {"model": "sim", "prompt": "EPISODE:talk", "max_tokens": 12}
GENERATE = "/v1beta/models/sim:"

WAYS = {
    "chat": (CHAT, {"model": "sim", "messages": [user("EPISODE:demo")], "tools": TOOLS}),
    "chat choices": (CHAT, {"model": "sim", "messages": [user("EPISODE:talk")], "n": 2}),
    "chat no reasoning": (CHAT, {"model": "sim", "messages": [user("EPISODE:talk")], "include_reasoning": False}),
    "chat limit": (CHAT, {"model": "sim", "messages": [user("EPISODE:talk")], "max_tokens": 9}),
    "completions": ("/v1/completions", TEXT),
    "completions prompts": ("/v1/completions", {**TEXT, "prompt": ["a b", "c d e"], "n": 2}),
    "messages": ("/v1/messages", MESSAGES),
    "responses": ("/v1/responses", RESPONSES),
    "responses unstored": ("/v1/responses", {**RESPONSES, "store": False, "include": ["reasoning.encrypted_content"]}),
    "gemini": (f"{GENERATE}generateContent", GEMINI),
}
STREAMS = {
    "chat": (CHAT, {**WAYS["chat"][1], "stream": True, "stream_options": {"include_usage": True}}),
    "completions": ("/v1/completions", {**TEXT, "stream": True}),
    "messages": ("/v1/messages", {**MESSAGES, "stream": True}),
    "responses": ("/v1/responses", {**RESPONSES, "stream": True}),
    "gemini sse": (f"{GENERATE}streamGenerateContent?alt=sse", GEMINI),
    "gemini array": (f"{GENERATE}streamGenerateContent", GEMINI),
}


ADDED_UP = {"content", "reasoning", "text", "thinking", "name", "arguments", "partial_json", "signature", "thoughtSignature", "delta"} | {
    "finish_reason",
    "finishReason",
}


async def ask(rig, way, **headers):
    path, body = way
    async with rig.http.post(
        rig.url + path, data=json.dumps(body), headers={HEADER: "s", "Content-Type": "application/json", **headers}
    ) as got:
        text = await got.text()
        assert got.status == 200, text
        return got.content_type, text


def _lasting(body):
    """A reply without what is not kept: how many tokens were thoughts, or cached. Members that hold nothing may be left out."""
    left_out = {"system_fingerprint", "created", "created_at"}  # the time is that of the call, not of the engine: it may be a second off
    body = {name: value for name, value in body.items() if value is not None and name not in left_out}
    for name in {"usage", "usageMetadata"} & body.keys():
        body[name] = {kind: count for kind, count in body[name].items() if isinstance(count, int) and "ota" in kind}
    if "choices" in body:
        body["choices"] = [{name: value for name, value in choice.items() if value is not None} for choice in body["choices"]]
    return body


@pytest.mark.parametrize("way", WAYS)
async def test_a_repetition_gets_the_same_reply(rig, way):
    kind, first = await ask(rig, WAYS[way])
    again_kind, again = await ask(rig, WAYS[way], **RETRY)
    assert again_kind == kind == "application/json"
    told, once = json.loads(again), json.loads(first)
    assert _lasting(told) == _lasting(once)
    assert len({entry.request_id for entry in rig.ground_truth()}) == 1
    assert await incidents(rig) == {"retry-replayed": 1}


def words(text):
    """The data of a stream, event by event."""
    if text.startswith("["):
        return json.loads(text)
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("way", STREAMS)
async def test_a_repetition_gets_the_same_stream(rig, way):
    kind, first = await ask(rig, STREAMS[way])
    again_kind, again = await ask(rig, STREAMS[way], **RETRY)
    assert again_kind == kind
    assert len(rig.ground_truth()) == 1
    if way == "responses":  # its last event holds all that was said
        assert [words(text)[-1]["response"]["output"] for text in (first, again)] == [words(first)[-1]["response"]["output"]] * 2
    assert added_up(first) == added_up(again) != {}
    assert first.rstrip().endswith(again.rstrip()[-6:])


def pieces(found):
    """Everything that a client adds up, with the name of the member that it stands in."""
    for value in found if isinstance(found, list) else [found]:
        if str(value.get("type", "")).startswith("response.") and not value["type"].endswith(".delta"):
            continue
        for name, one in value.items():
            if isinstance(one, str) and name in ADDED_UP:
                yield name, one
            elif name == "args":
                yield name, json.dumps(one, sort_keys=True)
            elif isinstance(one, dict) or (isinstance(one, list) and one and isinstance(one[0], dict)):
                yield from pieces(one)


def added_up(text):
    """What a client puts together of a stream: texts, thoughts, names, arguments, signatures."""
    found = {}
    for name, piece in pieces(words(text)):
        found[name] = found.get(name, "") + piece
    return found


async def test_continuing_a_replayed_reply_continues_its_turn(rig):
    """The ids, signatures and handles are those of the first time."""
    for session, way in (("m", "messages"), ("r", "responses")):
        path, body = WAYS[way]
        replies = []
        for headers in ({}, RETRY):
            async with rig.http.post(rig.url + path, data=json.dumps(body), headers={HEADER: session, **headers}) as got:
                replies.append(await got.json(content_type=None))
        reply = replies[1]
        if way == "messages":
            used = [block for block in reply["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "ok"} for block in used]
            more = [*body["messages"], {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": results}]
            body = {**body, "messages": more}
        else:
            calls = [item for item in reply["output"] if item["type"] == "function_call"]
            results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "ok"} for call in calls]
            body = {**body, "previous_response_id": reply["id"], "input": results}
        async with rig.http.post(rig.url + path, data=json.dumps(body), headers={HEADER: session}) as got:
            assert got.status == 200, await got.text()
        assert [turn["match"] for turn in await rig.turns(session)] == ["root", "continue"]
        await rig.check(session)


@pytest.fixture
async def slow():
    """An engine that takes longer than its client waits: it stops within its first reply, until the client has left."""
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.002)) as made:
        stopping = asyncio.create_task(_stop_until_the_client_leaves(made))
        yield made
        await stopping


async def _stop_until_the_client_leaves(rig):
    await rig.engine.until(lambda: rig.ground_truth() and rig.ground_truth()[0].completion_ids)
    rig.engine.dev_mode.paused = "keep"

    async def left():
        return any(call.orphaned for call in await open_calls(rig))

    await until(left)
    rig.engine.dev_mode.paused = ""
    rig.engine.dev_mode.notify()


async def sampled_once(rig):
    """Waits until no call is open; then the ground-truth log must have one whole reply, and so must the export."""

    async def closed():
        return not await open_calls(rig)

    await until(closed)
    (entry,) = rig.ground_truth()
    assert not entry.aborted
    assert (await rig.check())["complete"]


async def test_openai_repeats_after_a_time_out(slow):
    async with openai.AsyncOpenAI(base_url=f"{slow.url}/s/s/v1", api_key="none", max_retries=6, timeout=1.0) as sdk:
        reply = await sdk.chat.completions.create(model="sim", messages=[user("EPISODE:talk")])
    await sampled_once(slow)
    (turn,) = await slow.turns()
    assert (reply.choices[0].message.content, turn["marks"]) == (turn["served"]["content"], ["unanswered"])
    assert sum((await incidents(slow)).values()) == 1


async def test_openai_repeats_responses(slow):
    async with openai.AsyncOpenAI(base_url=f"{slow.url}/s/s/v1", api_key="none", max_retries=6, timeout=1.0) as sdk:
        first = await sdk.responses.create(model="sim", input="EPISODE:talk")
        await sampled_once(slow)
        slow.engine.token_delay = 0
        assert (await sdk.responses.retrieve(first.id)).output_text == first.output_text
        await sdk.responses.create(model="sim", input="go on", previous_response_id=first.id)
    assert [turn["match"] for turn in await slow.turns()] == ["root", "continue"]
    await slow.check()


async def test_anthropic_repeats_after_a_time_out(slow):
    async with anthropic.AsyncAnthropic(base_url=f"{slow.url}/s/s", api_key="none", max_retries=6, timeout=1.0) as sdk:
        reply = await sdk.messages.create(model="sim", max_tokens=400, messages=[user("EPISODE:talk")])
    await sampled_once(slow)
    (turn,) = await slow.turns()
    assert reply.content[-1].text == turn["served"]["content"]


async def test_gemini_retries_when_configured(slow):
    """It says nothing of it: what is byte for byte the same, and unanswered, is the same."""
    options = types.HttpOptions(
        base_url=f"{slow.url}/s/s", timeout=1000, retry_options=types.HttpRetryOptions(attempts=8, initial_delay=2.0)
    )
    async with genai.Client(api_key="none", http_options=options).aio as sdk:
        for _ in range(8):
            try:
                reply = await sdk.models.generate_content(model="sim", contents="EPISODE:talk")
                break
            except TimeoutError:
                continue
    assert reply.text
    await sampled_once(slow)


async def test_a_stream_that_has_not_begun_is_joined_as_one(rig):
    body = (CHAT, {"model": "sim", "messages": [user("EPISODE:talk")], "stream": True})
    go = gate(rig)
    first = asyncio.create_task(ask(rig, body, **FIRST))
    await until(lambda: open_calls(rig))
    second = asyncio.create_task(ask(rig, body, **RETRY))
    await wanted(rig)
    go.set()
    texts = [(await one)[1] for one in (first, second)]
    assert added_up(texts[0]) == added_up(texts[1])
    assert len(rig.ground_truth()) == 1


async def heard(speak):
    """The headers of the requests that a client sends to a server that refuses twice."""
    seen = []

    async def answer(request):
        seen.append(request.headers.copy())
        return web.json_response({"error": {"message": "busy"}}, status=503, headers={"Retry-After": "0"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        with pytest.raises(Exception, match=r"busy|503"):
            await speak(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()
    return seen


async def openais(url):
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=2) as sdk:
        await sdk.chat.completions.create(model="sim", messages=[user("hi")])


async def anthropics(url):
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=2) as sdk:
        await sdk.messages.create(model="sim", max_tokens=9, messages=[user("hi")])


async def googles(url):
    options = types.HttpOptions(base_url=url, retry_options=types.HttpRetryOptions(attempts=3, initial_delay=0.01, max_delay=0.01))
    async with genai.Client(api_key="none", http_options=options).aio as sdk:
        await sdk.models.generate_content(model="sim", contents="hi")


@pytest.mark.parametrize(("speak", "counts"), [(openais, ["0", "1", "2"]), (anthropics, ["0", "1", "2"]), (googles, [None] * 3)])
async def test_retry_headers_of_the_sdks(speak, counts):
    """What `dedup.fingerprint` relies on, and docs/retries.md says: none sends an Idempotency-Key by itself."""
    seen = await heard(speak)
    assert [headers.get("x-stainless-retry-count") for headers in seen] == counts
    assert not any("Idempotency-Key" in headers for headers in seen)

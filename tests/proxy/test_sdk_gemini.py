"""Google's official client, sync and async, streaming and not, with tools: nothing but its base URL, header or key changed."""

import asyncio
import json

import pytest
from google import genai
from google.genai import errors, types

from tests.proxy.kit import CALL, HEADER, TOOLS, proxied
from tests.support.waiting import until
from tokencache.testing import SimulatedEngine

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

FUNCTION = {"name": "bash", "description": "Run a command", "parameters_json_schema": TOOLS[0]["function"]["parameters"]}
MALFORMED = '<tool_call>\n{"name": "bash", "arguments": [1]}\n</tool_call>'
IN_ONE_LINE = ["root"] + ["continue"] * 3


def client(rig, session="s", way="header"):
    options = {
        "header": {"base_url": rig.url, "headers": {HEADER: session}},
        "path": {"base_url": f"{rig.url}/s/{session}"},
        "key": {"base_url": rig.url},
    }[way]
    return genai.Client(api_key=f"tcs-{session}" if way == "key" else "none", http_options=types.HttpOptions(**options))


def config(*, thoughts=True, **more):
    return types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[types.FunctionDeclaration(**FUNCTION)])],
        thinking_config=types.ThinkingConfig(include_thoughts=thoughts),
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        **more,
    )


def said(text):
    return types.Content(role="user", parts=[types.Part(text=text)])


def answers(contents):
    """What an agent adds: the reply as the client gave it, and its functions' responses."""
    calls = [part.function_call for content in contents for part in content.parts if part.function_call]
    results = [types.Part(function_response=types.FunctionResponse(id=c.id, name=c.name, response={"output": "ok"})) for c in calls]
    return [*contents, types.Content(role="user", parts=results) if results else said("go on")]


async def matches(rig, session="s"):
    return [turn["match"] for turn in await rig.turns(session)]


async def streamed(sdk, contents, settings):
    """The contents of a stream's responses as they came, and its last response."""
    responses = [r async for r in await sdk.models.generate_content_stream(model="sim", contents=contents, config=settings)]
    return [response.candidates[0].content for response in responses], responses[-1]


@pytest.mark.parametrize("way", ["header", "path", "key"])
@pytest.mark.parametrize("thoughts", [True, False], ids=["thoughts", "no thoughts"])
async def test_an_agent_with_tools(rig, way, thoughts):
    contents = [said("EPISODE:demo")]
    sdk = client(rig, way=way).aio
    for turn in range(4):
        reply = await sdk.models.generate_content(
            model="sim", contents=contents, config=config(thoughts=thoughts, system_instruction="Be brief.")
        )
        usage, entry = reply.usage_metadata, rig.ground_truth()[-1]
        assert bool(reply.function_calls) == (turn < 2)
        assert usage.prompt_token_count == len(entry.prompt_ids)
        assert usage.candidates_token_count + (usage.thoughts_token_count or 0) == len(entry.completion_ids)
        assert reply.model_version == "sim"
        assert bool(reply.candidates[0].content.parts[0].thought) == thoughts
        contents += answers([reply.candidates[0].content])
    assert await matches(rig) == IN_ONE_LINE
    assert {turn["dialect"] for turn in await rig.turns()} == {"gemini"}
    assert [len(s["turns"]) for s in (await rig.check())["sequences"]] == [4]


@pytest.mark.parametrize("thoughts", [True, False], ids=["thoughts", "no thoughts"])
async def test_an_agent_that_streams(rig, thoughts):
    contents = [said("EPISODE:demo")]
    sdk = client(rig).aio
    for _ in range(4):
        parts, last = await streamed(sdk, contents, config(thoughts=thoughts))
        assert last.candidates[0].finish_reason is types.FinishReason.STOP
        assert last.usage_metadata.prompt_token_count == len(rig.ground_truth()[-1].prompt_ids)
        contents += answers(parts)
    assert await matches(rig) == IN_ONE_LINE
    assert all(turn["stream"] for turn in await rig.turns())
    await rig.check()


async def test_a_stream_is_a_stream(rig):
    """The first response is here long before the engine has said the last token."""
    rig.engine.token_delay = 0.005
    stream = await client(rig).aio.models.generate_content_stream(model="sim", contents=[said("EPISODE:talk")], config=config())
    first = await anext(aiter(stream))
    assert first.candidates[0].content.parts[0].text
    assert rig.ground_truth()[-1].finish_reason is None
    async for _ in stream:
        pass
    assert len(await until(rig.turns)) == 1


async def test_turns_streamed_and_not_are_one_line(rig):
    contents = [said("EPISODE:demo")]
    sdk = client(rig).aio
    for turn in range(4):
        if turn % 2:
            parts, _ = await streamed(sdk, contents, config())
        else:
            parts = [(await sdk.models.generate_content(model="sim", contents=contents, config=config())).candidates[0].content]
        contents += answers(parts)
    assert await matches(rig) == IN_ONE_LINE


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_its_own_chats_keep_the_history(rig, stream):
    """The client's own history: of a stream it keeps each response as a content of its own."""

    def talk():
        sdk = client(rig)  # a client that nobody holds is closed
        chat = sdk.chats.create(model="sim", config=config())
        message = "EPISODE:demo"
        for _ in range(4):
            replies = list(chat.send_message_stream(message)) if stream else [chat.send_message(message)]
            calls = [call for reply in replies for call in reply.function_calls or ()]
            message = [
                types.Part(function_response=types.FunctionResponse(id=c.id, name=c.name, response={"output": "ok"})) for c in calls
            ] or "go on"

    await asyncio.to_thread(talk)
    assert await matches(rig) == IN_ONE_LINE
    await rig.check()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("words", ["", "Look:\n"])
async def test_a_call_that_cannot_be_shown_costs_no_sequence(words, stream):
    """A call whose arguments are a list ends the reply with `MALFORMED_FUNCTION_CALL`, and the client's own history goes on without it."""
    replies = [f"<think>\nhm\n</think>\n\n{words}{said}" for said in (MALFORMED, CALL, "Done.")]
    async with proxied(SimulatedEngine(episodes={"demo": replies}, seed=3)) as rig:
        chat = client(rig).aio.chats.create(model="sim", config=config())

        async def send(message):
            return [r async for r in await chat.send_message_stream(message)] if stream else [await chat.send_message(message)]

        first = await send("EPISODE:demo")
        assert first[-1].candidates[0].finish_reason == types.FinishReason.MALFORMED_FUNCTION_CALL
        second = await send("go on")
        assert await matches(rig) == ["root", "continue"]
        assert "calls-hidden" in (await rig.turns())[-1]["forgiven"]
        calls = [call for reply in second for call in reply.function_calls or ()]
        assert [call.name for call in calls] == ["bash"]
        for content in chat._curated_history:
            content.parts = [part for part in content.parts if not part.function_call]
        await send("go on")
        assert (await matches(rig))[-1] != "continue"
        await rig.check()


async def test_its_own_function_calling(rig):
    """The client calls a Python function by itself, and answers with `{"result": …}`."""

    def bash(cmd: str, timeout: float = 1.0) -> str:
        """Run a command."""
        return f"{cmd} {timeout}"

    reply = await client(rig).aio.models.generate_content(
        model="sim", contents="EPISODE:demo", config=types.GenerateContentConfig(tools=[bash], system_instruction="Be brief.")
    )
    assert reply.text.strip() == "All done ☕, nothing more."
    assert await matches(rig) == ["root", "continue", "continue"]


async def test_the_same_turns_as_in_chat(rig):
    """A conversation begun in Gemini goes on in chat."""
    contents = [said("EPISODE:demo")]
    reply = await client(rig).aio.models.generate_content(model="sim", contents=contents, config=config())
    (call,) = reply.function_calls
    text = "".join(part.text for part in reply.candidates[0].content.parts if part.text and not part.thought)
    function = {"name": call.name, "arguments": json.dumps(call.args)}
    messages = [
        {"role": "user", "content": "EPISODE:demo"},
        {"role": "assistant", "content": text, "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.id, "content": "ok"},
    ]
    await rig.say("s", messages, tools=TOOLS)
    assert await matches(rig) == ["root", "continue"]


async def test_a_stream_without_sse_is_one_array(rig):
    body = {"contents": [{"parts": [{"text": "EPISODE:talk"}]}]}
    async with rig.http.post(f"{rig.url}/s/s/v1beta/models/sim:streamGenerateContent", json=body) as answer:
        responses = json.loads(await answer.text())
    texts = [part["text"] for response in responses for part in response["candidates"][0]["content"]["parts"]]
    assert "".join(texts).strip() == "One, two, three, four, five, six, seven — naïve."
    assert responses[-1]["candidates"][0]["finishReason"] == "STOP"
    assert len(await rig.turns()) == 1


async def test_counting_tokens(rig):
    sdk = client(rig).aio
    counted = await sdk.models.count_tokens(model="sim", contents="EPISODE:talk")
    await sdk.models.generate_content(model="sim", contents="EPISODE:talk")
    assert counted.total_tokens == len(rig.ground_truth()[-1].prompt_ids)


async def test_models(rig):
    sdk = client(rig, way="path").aio
    assert [model.name async for model in await sdk.models.list()] == ["models/sim"]
    assert (await sdk.models.get(model="sim")).input_token_limit == rig.engine.max_model_len
    with pytest.raises(errors.ClientError) as missing:
        await sdk.models.get(model="nope")
    assert missing.value.code == 404
    assert missing.value.status == "NOT_FOUND"


async def ask(sdk, stream, **more):
    if not stream:
        return await sdk.models.generate_content(**more)
    return [response async for response in await sdk.models.generate_content_stream(**more)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_errors_are_the_sdks_own(rig, stream):
    sdk = client(rig).aio
    with pytest.raises(errors.ClientError) as refused:
        await ask(sdk, stream, model="sim", contents="x", config={"tools": [{"google_search": {}}]})
    assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")
    assert "googleSearch" in refused.value.message
    with pytest.raises(errors.ClientError) as missing:
        await ask(sdk, stream, model="nope", contents="x")
    assert (missing.value.code, missing.value.status) == (404, "NOT_FOUND")
    assert "nope" in missing.value.message
    with pytest.raises(errors.ClientError) as embedding:
        await sdk.models.embed_content(model="sim", contents="x")
    assert embedding.value.code == 404
    assert await rig.turns() == []

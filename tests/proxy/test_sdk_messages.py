"""The official Anthropic client, sync and async, streaming and not, with tools: nothing but its base URL, header or key changed."""

import asyncio

import anthropic
import openai
import pytest

from tests.proxy.kit import HEADER, TOOLS, user
from tokencache.testing import Fault

BASH = {"name": "bash", "description": "Run a command", "input_schema": TOOLS[0]["function"]["parameters"]}


def client(rig, kind=anthropic.AsyncAnthropic, session="s", way="header"):
    named = {
        "header": {"base_url": rig.url, "api_key": "none", "default_headers": {HEADER: session}},
        "path": {"base_url": f"{rig.url}/s/{session}", "api_key": "none"},
        "key": {"base_url": rig.url, "api_key": f"tcs-{session}"},
        "token": {"base_url": rig.url, "auth_token": f"tcs-{session}"},
    }
    return kind(max_retries=0, **named[way])


def asked(messages, **more):
    return {"model": "sim", "max_tokens": 400, "messages": messages, "tools": [BASH], **more}


def answers(reply):
    """What an agent adds: the reply as the client gave it, and its tools' results."""
    used = [block for block in reply.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "ok"} for block in used]
    return [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results or "go on"}]


async def matches(rig, session="s"):
    return [turn["match"] for turn in await rig.turns(session)]


IN_ONE_LINE = ["root"] + ["continue"] * 3


@pytest.mark.parametrize("way", ["header", "path", "key", "token"])
async def test_an_agent_with_tools(rig, way):
    messages = [user("EPISODE:demo")]
    async with client(rig, way=way) as sdk:
        for turn in range(4):
            reply = await sdk.messages.create(**asked(messages, system="Be brief."))
            assert reply.stop_reason == ("tool_use" if turn < 2 else "end_turn")
            usage = reply.usage
            assert usage.input_tokens + usage.cache_read_input_tokens == len(rig.ground_truth()[-1].prompt_ids)
            assert usage.output_tokens == len(rig.ground_truth()[-1].completion_ids)
            assert reply.content[0].type == "thinking"
            messages += answers(reply)
    assert await matches(rig) == IN_ONE_LINE
    assert {turn["dialect"] for turn in await rig.turns()} == {"messages"}
    assert [len(s["turns"]) for s in (await rig.check())["sequences"]] == [4]


@pytest.mark.parametrize("beta", [False, True], ids=["stable", "beta"])
async def test_an_agent_that_streams(rig, beta):
    messages = [user("EPISODE:demo")]
    async with client(rig) as sdk:
        for _ in range(4):
            async with (sdk.beta.messages if beta else sdk.messages).stream(**asked(messages)) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_message()
            assert kinds[0] == "message_start"
            assert kinds.count("content_block_stop") == len(final.content)
            assert final.usage.output_tokens == len(rig.ground_truth()[-1].completion_ids)
            messages += answers(final)
    assert await matches(rig) == IN_ONE_LINE
    await rig.check()
    assert all(turn["stream"] for turn in await rig.turns())


async def test_a_stream_reports_the_length_of_the_prompt_at_once(rig):
    async with client(rig) as sdk:
        events = [event async for event in await sdk.messages.create(**asked([user("EPISODE:talk")], stream=True))]
    assert events[0].message.usage.input_tokens == len(rig.ground_truth()[-1].prompt_ids)
    assert sum(event.type == "content_block_delta" for event in events) > 10  # as it came, not in one piece


async def test_the_synchronous_client_streaming_and_not(rig):
    def talk():
        messages = [user("EPISODE:demo")]
        with client(rig, anthropic.Anthropic) as sdk:
            for turn in range(4):
                if turn % 2:
                    messages += answers(sdk.messages.create(**asked(messages)))
                else:
                    with sdk.messages.stream(**asked(messages)) as stream:
                        messages += answers(stream.get_final_message())

    await asyncio.to_thread(talk)
    assert await matches(rig) == IN_ONE_LINE
    await rig.check()


async def test_an_agent_that_drops_thinking_and_moves_its_cache_marks(rig):
    """As Claude Code does: marks on the last message, a billing line that changes, text in other shapes."""
    messages = [user("EPISODE:demo")]
    async with client(rig) as sdk:
        for turn in range(4):
            billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{turn}"}
            sent = [*messages[:-1], marked(messages[-1])]
            reply = await sdk.messages.create(**asked(sent, system=[billing, {"type": "text", "text": "Be brief."}]))
            echoed, after = answers(reply)
            messages += [{**echoed, "content": [block for block in reply.content if block.type != "thinking"]}, after]
    assert await matches(rig) == IN_ONE_LINE
    await rig.check()


def marked(message):
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [*blocks[:-1], {**blocks[-1], "cache_control": {"type": "ephemeral"}}]}


async def test_the_same_conversation_continues_in_another_dialect(rig):
    """The digests know no dialect: what was said in Messages is found again in chat completions, and the other way round."""
    async with client(rig) as ours, openai.AsyncOpenAI(base_url=f"{rig.url}/s/s/v1", api_key="none", max_retries=0) as theirs:
        first = await ours.messages.create(**asked([user("EPISODE:talk")], system="Be brief."))
        spoken = "".join(block.text for block in first.content if block.type == "text")
        chat = [{"role": "system", "content": "Be brief."}, user("EPISODE:talk"), {"role": "assistant", "content": spoken}, user("go on")]
        second = await theirs.chat.completions.create(model="sim", messages=chat, tools=TOOLS, max_tokens=400)
        history = [
            user("EPISODE:talk"),
            *answers(first),
            {"role": "assistant", "content": second.choices[0].message.content},
            user("go on"),
        ]
        await ours.messages.create(**asked(history, system="Be brief."))
    assert await matches(rig) == IN_ONE_LINE[:3]
    await rig.check()


async def test_counting(rig):
    messages = [user("EPISODE:demo")]
    async with client(rig) as sdk:
        for _ in range(2):
            counted = await sdk.messages.count_tokens(model="sim", messages=messages, tools=[BASH], system="Be brief.")
            reply = await sdk.messages.create(**asked(messages, system="Be brief."))
            assert counted.input_tokens == len(rig.ground_truth()[-1].prompt_ids)
            messages += answers(reply)


async def test_models(rig):
    async with client(rig, way="path") as sdk:
        assert [model.id async for model in sdk.models.list()] == ["sim"]
        assert (await sdk.models.retrieve("sim")).display_name == "sim"
        with pytest.raises(anthropic.NotFoundError):
            await sdk.models.retrieve("claude-opus-4-1")


async def test_errors_are_the_sdks_own(rig):
    async with client(rig) as sdk:
        with pytest.raises(anthropic.NotFoundError) as missing:
            await sdk.messages.create(**asked([user("x")], model="nope"))
        assert missing.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="tools of type 'web_search_20250305' are not supported"):
            await sdk.messages.create(**asked([user("x")], tools=[{"type": "web_search_20250305", "name": "web_search"}]))
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
            await sdk.messages.create(**asked([user("long " * 300_000)]))
        with pytest.raises(anthropic.BadRequestError, match="kv_transfer_params"):
            await sdk.messages.create(**asked([user("x")]), extra_body={"kv_transfer_params": {"prompt_token_ids": [1]}})
        await rig.http.post(f"{rig.url}/tokencache/v1/sessions/s/finish")
        with pytest.raises(anthropic.ConflictError):
            await sdk.messages.create(**asked([user("x")]))
    async with anthropic.AsyncAnthropic(base_url=rig.url, api_key="tck-x", max_retries=0) as sdk:
        with pytest.raises(anthropic.AuthenticationError):
            await sdk.messages.create(**asked([user("x")]))


async def test_stop_sequences_and_limits(rig):
    async with client(rig) as sdk:
        reply = await sdk.messages.create(**asked([user("EPISODE:talk")], stop_sequences=["three"]))
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "three")
        async with sdk.messages.stream(**asked([user("EPISODE:talk")], max_tokens=5)) as stream:
            assert (await stream.get_final_message()).stop_reason == "max_tokens"


@pytest.mark.parametrize("status", [400, 429, 503])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_the_engine_keeps_its_text(rig, status, stream):
    fault = Fault.answer(status, f'{{"error":{{"message":"no ü","type":"X","param":null,"code":{status}}}}}')
    rig.engine.faults.append(fault)
    async with client(rig) as sdk:
        with pytest.raises(anthropic.APIStatusError) as refused:
            await sdk.messages.create(**asked([user("x")], stream=stream))
    assert refused.value.status_code == status
    kinds = {400: "invalid_request_error", 429: "rate_limit_error", 503: "overloaded_error"}
    assert refused.value.body == {"type": "error", "error": {"type": kinds[status], "message": "no ü"}}


async def test_an_error_within_a_stream_is_an_error_and_the_session_continues(rig):
    rig.engine.faults.append(Fault.error_event(4))
    messages = [user("EPISODE:demo")]
    async with client(rig) as sdk:
        with pytest.raises(anthropic.APIStatusError, match="Internal server error"):
            async with sdk.messages.stream(**asked(messages)) as stream:
                await stream.get_final_message()
        for _ in range(2):
            messages += answers(await sdk.messages.create(**asked(messages)))
    assert (await matches(rig))[-2:] == ["root", "continue"]

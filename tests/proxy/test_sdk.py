"""The official OpenAI client, sync and async, streaming and not, with tools: nothing but its base URL or a header changed."""

import asyncio
import json

import openai
import pytest

from tests.proxy.kit import HEADER, TOOLS, user


def client(rig, kind=openai.AsyncOpenAI, session="s", way="header"):
    named = {
        "header": {"base_url": f"{rig.url}/v1", "api_key": "none", "default_headers": {HEADER: session}},
        "path": {"base_url": f"{rig.url}/s/{session}/v1", "api_key": "none"},
        "key": {"base_url": f"{rig.url}/v1", "api_key": f"tcs-{session}"},
    }
    return kind(max_retries=0, **named[way])


def answers(message) -> list:
    """What an agent adds: the reply as the client gave it, and its tools' results."""
    echo = message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
    results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in message.tool_calls or ()]
    return [echo, *(results or [user("go on")])]


@pytest.mark.parametrize("way", ["header", "path", "key"])
async def test_an_agent_with_tools(rig, way):
    messages = [user("EPISODE:demo")]
    async with client(rig, way=way) as sdk:
        for turn in range(4):
            reply = await sdk.chat.completions.create(model="sim", messages=messages, tools=TOOLS)
            choice = reply.choices[0]
            assert choice.finish_reason == ("tool_calls" if turn < 2 else "stop")
            assert reply.usage.prompt_tokens == len(rig.ground_truth()[-1].prompt_ids)
            messages += answers(choice.message)
    exported = await rig.check()
    assert [[t["match"] for t in s["turns"]] for s in exported["sequences"]] == [["root"] + ["continue"] * 3]


async def test_an_agent_that_streams(rig):
    messages = [user("EPISODE:demo")]
    async with client(rig) as sdk:
        for _ in range(4):
            async with sdk.chat.completions.stream(
                model="sim", messages=messages, tools=TOOLS, stream_options={"include_usage": True}
            ) as stream:
                async for _event in stream:
                    pass
                final = await stream.get_final_completion()
            assert final.usage.completion_tokens == len(rig.ground_truth()[-1].completion_ids)
            messages += answers(final.choices[0].message)
    exported = await rig.check()
    assert [len(s["turns"]) for s in exported["sequences"]] == [4]
    assert all(t["stream"] for t in await rig.turns())


async def test_the_synchronous_client(rig):
    def talk():
        messages = [user("EPISODE:demo")]
        with client(rig, openai.OpenAI) as sdk:
            for turn in range(4):
                if turn % 2:
                    messages += answers(sdk.chat.completions.create(model="sim", messages=messages, tools=TOOLS).choices[0].message)
                else:
                    with sdk.chat.completions.stream(model="sim", messages=messages, tools=TOOLS) as stream:
                        messages += answers(stream.get_final_completion().choices[0].message)

    await asyncio.to_thread(talk)
    assert [len(s["turns"]) for s in (await rig.check())["sequences"]] == [4]


async def test_logprobs_and_ids_on_request(rig):
    async with client(rig) as sdk:
        reply = await sdk.chat.completions.create(
            model="sim", messages=[user("EPISODE:talk")], logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True}
        )
    entry = rig.ground_truth()[-1]
    assert reply.choices[0].token_ids == entry.completion_ids
    assert reply.prompt_token_ids == entry.prompt_ids
    assert [item.logprob for item in reply.choices[0].logprobs.content] == entry.logprobs
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == 2


async def test_errors_are_the_sdks_own(rig):
    async with client(rig) as sdk:
        with pytest.raises(openai.NotFoundError) as missing:
            await sdk.chat.completions.create(model="nope", messages=[user("x")])
        assert missing.value.body["type"] == "NotFoundError"
        for member in ("prompt_token_ids", "tokencache_prompt", "tokencache_prefix"):
            with pytest.raises(openai.BadRequestError) as bad:
                await sdk.chat.completions.create(model="sim", messages=[user("x")], extra_body={"kv_transfer_params": {member: [1]}})
            assert bad.value.body["param"] == f"kv_transfer_params.{member}"
        await rig.http.post(f"{rig.url}/tokencache/v1/sessions/s/finish")
        with pytest.raises(openai.ConflictError):
            await sdk.chat.completions.create(model="sim", messages=[user("x")])
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="tck-x", max_retries=0) as sdk:
        with pytest.raises(openai.AuthenticationError):
            await sdk.models.list()


async def test_models_within_a_session(rig):
    async with client(rig, way="path") as sdk:
        assert [model.id async for model in sdk.models.list()] == ["sim"]


async def test_several_choices_are_siblings(rig):
    async with client(rig) as sdk:
        reply = await sdk.chat.completions.create(model="sim", messages=[user("EPISODE:demo")], tools=TOOLS, n=3)
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        messages = [user("EPISODE:demo"), *answers(reply.choices[1].message)]
        await sdk.chat.completions.create(model="sim", messages=messages, tools=TOOLS)
    exported = await rig.check()
    assert sorted(len(s["turns"]) for s in exported["sequences"]) == [1, 1, 2]
    turns = await rig.turns()
    assert len({turn["call"] for turn in turns[:3]}) == 1
    assert turns[3]["parent"] == next(turn["turn"] for turn in turns if turn["choice"] == 1)
    assert json.dumps(turns)

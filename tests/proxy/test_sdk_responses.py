"""The official OpenAI client's Responses, streaming and not, with tools, through the real proxy in front of the simulated engine."""

import contextlib
import json

import openai
import pytest

from tests.proxy.kit import HEADER, TOOLS, proxied
from tokencache.testing import Fault, SimulatedEngine

FUNCTIONS = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
START = {"role": "user", "content": "EPISODE:demo"}
SEALED = {"store": False, "include": ["reasoning.encrypted_content"]}


@contextlib.asynccontextmanager
async def client(rig, session="s"):
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0, default_headers={HEADER: session}) as sdk:
        yield sdk


async def ask(sdk, stream, **members):
    members = {"model": "sim", "tools": FUNCTIONS, **members}
    if not stream:
        return await sdk.responses.create(**members)
    async with sdk.responses.stream(**members) as events:
        kinds = [event.type async for event in events]
        response = await events.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    return response


def results(response):
    calls = [item for item in response.output if item.type == "function_call"]
    found = [{"type": "function_call_output", "call_id": item.call_id, "output": "a.txt\n"} for item in calls]
    return found or [{"role": "user", "content": "go on"}]


def echo(response):
    """As openai-agents does: the items as the client gave them."""
    return [item.model_dump(exclude_unset=True) for item in response.output]


def stripped(response):
    """As a harness does that keeps no ids and no reasoning, and writes arguments anew."""
    items = [item for item in echo(response) if item["type"] != "reasoning"]
    for item in items:
        item.pop("id")
        item.pop("status")
        if "arguments" in item:
            item["arguments"] = json.dumps(json.loads(item["arguments"]), sort_keys=True)
    return items


async def matches(rig, session="s"):
    return [turn["match"] for turn in await rig.turns(session)]


@pytest.mark.parametrize("shape", [echo, stripped])
@pytest.mark.parametrize("options", [{}, SEALED])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_sends_its_whole_history(rig, stream, options, shape):
    items = [START]
    async with client(rig) as sdk:
        for turn in range(4):
            response = await ask(sdk, stream, input=items, instructions="You are helpful.", **options)
            assert response.status == "completed"
            assert response.usage.input_tokens == len(rig.ground_truth()[-1].prompt_ids)
            assert response.usage.output_tokens == len(rig.ground_truth()[-1].completion_ids)
            assert response.output[0].type == "reasoning"
            assert ("function_call" in [item.type for item in response.output]) is (turn < 2)
            items += [*shape(response), *results(response)]
    assert await matches(rig) == ["root", "continue", "continue", "continue"]
    exported = await rig.check()
    assert exported["complete"]
    assert [turn["dialect"] for turn in await rig.turns()] == ["responses"] * 4


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_names_the_response_before(rig, stream):
    new, previous, made = [START], openai.omit, []
    async with client(rig) as sdk:
        for _ in range(4):
            response = await ask(sdk, stream, input=new, previous_response_id=previous, instructions="You are helpful.")
            made.append(response)
            new, previous = results(response), response.id
        assert await matches(rig) == ["root", "continue", "continue", "continue"]
        await rig.check()
        got = await sdk.responses.retrieve(made[1].id)
        assert [item.id for item in got.output] == [item.id for item in made[1].output]
        assert (got.status, got.usage, got.tools) == ("completed", made[1].usage, made[1].tools)
        listed = [item.type async for item in sdk.responses.input_items.list(made[1].id, order="asc", limit=2)]
        assert listed == ["message", *[item.type for item in made[0].output], "function_call_output"]
        await sdk.responses.delete(made[1].id)
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(made[1].id)
        with pytest.raises(openai.BadRequestError) as gone:
            await ask(sdk, stream, input="x", previous_response_id=made[1].id)
        assert gone.value.code == "previous_response_not_found"
        branch = await ask(sdk, stream, input="instead", previous_response_id=made[2].id, instructions="You are helpful.")
        assert branch.previous_response_id == made[2].id
    assert (await matches(rig))[-1] == "branch"


async def test_two_sessions_do_not_see_each_others_responses(rig):
    async with client(rig, "a") as one, client(rig, "b") as other:
        made = await one.responses.create(model="sim", input=[START])
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError):
            await other.responses.create(model="sim", input="x", previous_response_id=made.id)


async def test_the_same_conversation_in_chat_continues_in_responses(rig):
    message = await rig.say("s", [START], tools=TOOLS)
    async with client(rig) as sdk:
        items = [
            START,
            {"type": "message", "role": "assistant", "content": message["content"]},
            *[{"type": "function_call", "call_id": call["id"], **call["function"]} for call in message["tool_calls"]],
            *[{"type": "function_call_output", "call_id": call["id"], "output": "ok"} for call in message["tool_calls"]],
        ]
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        await sdk.responses.create(model="sim", input=items, tools=tools)
    assert await matches(rig) == ["root", "continue"]


async def test_limits_errors_and_counting(rig):
    async with client(rig) as sdk:
        cut = await sdk.responses.create(model="sim", input=[START], max_output_tokens=3)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        with pytest.raises(openai.NotFoundError) as missing:
            await sdk.responses.create(model="nope", input=[START])
        assert "nope" in missing.value.body["message"]
        for members in ({"background": True}, {"conversation": "conv_1"}, {"input": [{"type": "mcp_call"}]}):
            with pytest.raises(openai.BadRequestError) as refused:
                await sdk.responses.create(**{"model": "sim", "input": "x", **members})
            assert refused.value.type == "invalid_request_error"
            assert refused.value.param
        with pytest.raises(openai.BadRequestError):
            await sdk.responses.cancel(cut.id)
        counted = await sdk.responses.input_tokens.count(model="sim", input=[START], tools=FUNCTIONS)
        asked = await sdk.responses.create(model="sim", input=[START], tools=FUNCTIONS)
        assert counted.input_tokens == asked.usage.input_tokens


async def test_the_count_of_an_answer_that_is_to_be_continued(rig):
    """No reply is opened behind it: the prompt ends in the middle of the last message, and so does what is counted."""
    begun = {"type": "message", "id": "msg_1", "role": "assistant", "status": "incomplete"}
    items = [START, begun | {"content": [{"type": "output_text", "text": "I was", "annotations": []}]}]
    async with client(rig) as sdk:
        counted = await sdk.responses.input_tokens.count(model="sim", input=items)
        asked = await sdk.responses.create(model="sim", input=items)
        ended = [START, items[1] | {"status": "completed"}]
        assert (await sdk.responses.input_tokens.count(model="sim", input=ended)).input_tokens > counted.input_tokens
    assert counted.input_tokens == asked.usage.input_tokens == len(rig.ground_truth()[-1].prompt_ids)


async def test_custom_tools_and_namespaces(rig):
    """The demo's `bash` as a tool of a namespace: the model is shown its flat name and calls another, which is passed on."""
    async with client(rig) as sdk:
        tools = [
            {"type": "namespace", "name": "shell", "description": "", "tools": FUNCTIONS},
            {"type": "custom", "name": "bash", "description": "Run"},
            {"type": "web_search"},
        ]
        response = await ask(sdk, True, input=[START], tools=tools)
        custom = [item for item in response.output if item.type == "custom_tool_call"]
        assert custom
        items = [START, *echo(response), {"type": "custom_tool_call_output", "call_id": custom[0].call_id, "output": "ok"}]
        await ask(sdk, True, input=items, tools=tools)
    shown = [turn["match"] for turn in await rig.turns()]
    assert shown[0] == "root"
    assert len(shown) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("arguments", ['{"patch": "x"}', "{}", '{"input": 5}', '["x"]', '"*** Begin"'])
async def test_a_custom_tool_called_with_other_arguments_stays_on_the_line(arguments, stream):
    said = f'<think>\nhm\n</think>\n\n<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'
    tools = [{"type": "custom", "name": "apply_patch", "description": "Patch"}]
    async with proxied(SimulatedEngine(episodes={"demo": [said, "<think>\nk\n</think>\n\nDone."]}, seed=3)) as rig:
        async with client(rig) as sdk:
            response = await ask(sdk, stream, input=[START], tools=tools)
            custom = response.output[-1]
            assert (custom.type, custom.input) == ("custom_tool_call", arguments)
            items = [START, *echo(response), {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "wrong"}]
            await ask(sdk, stream, input=items, tools=tools)
        assert await matches(rig) == ["root", "continue"]
        assert (await rig.turns())[-1]["forgiven"] == ["input-as-served"]
        await rig.check()


async def test_tools_that_are_offered_among_the_items(rig):
    items = [{"type": "additional_tools", "role": "developer", "tools": FUNCTIONS}, START]
    async with client(rig) as sdk:
        for _ in range(3):
            response = await ask(sdk, True, input=items, tools=openai.omit)
            items += [*echo(response), *results(response)]
        previous = await ask(sdk, True, input=items, tools=openai.omit)
        await ask(sdk, True, input="go on", tools=openai.omit, previous_response_id=previous.id)
    assert await matches(rig) == ["root", "continue", "continue", "continue", "continue"]
    await rig.check()


async def test_an_error_of_the_engines_within_a_stream(rig):
    rig.engine.faults.append(Fault.error_event(4))
    async with client(rig) as sdk:
        stream = await sdk.responses.create(model="sim", input=[START], tools=FUNCTIONS, stream=True)
        events = [event async for event in stream]
        assert [event.type for event in events][-2:] == ["error", "response.failed"]
        assert events[-1].response.error.code == "server_error"
        items = [START]
        for _ in range(2):  # the session goes on
            response = await ask(sdk, True, input=items)
            items += [*echo(response), *results(response)]
    assert (await matches(rig))[-1] == "continue"


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_refusals_of_the_engines(rig, status):
    said = "This model's maximum context length is 9 tokens. ü"
    body = json.dumps({"error": {"message": said, "type": "BadRequestError", "param": "input_tokens", "code": status}})
    rig.engine.faults.append(Fault.answer(status, body))
    async with client(rig) as sdk:
        with pytest.raises(openai.APIStatusError) as refused:
            await sdk.responses.create(model="sim", input=[START], stream=True)
    assert refused.value.status_code == status
    assert refused.value.body["message"] == said
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "input_tokens"

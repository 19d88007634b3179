"""Responses: chat replies as a response, whole or in events; what a client sends back is what the engine wrote."""

import json

import httpx2 as httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.dialects.responses.kit import Session, call, chunk, chunks, completion, digests, events, said
from tests.dialects.responses.test_request import FUNCTION, PATCH, SPACE, USER, WEB

EVENT = TypeAdapter(ResponseStreamEvent)
TOOLS = [FUNCTION, PATCH, SPACE, WEB]
PATCHED = json.dumps({"input": '*** Begin\n+ "naïve" \\ ☕ 😀\n'}, ensure_ascii=True)

REPLIES = {
    "text": {"content": "Hello — naïve café ☕"},
    "reasoning and text": {"reasoning": "\nhm\n", "content": "\n\nYes."},
    "reasoning alone": {"reasoning": "hm"},
    "nothing": {},
    "a call": {"tool_calls": [call("f", '{"a": 1.50,  "b": "x"}')]},
    "all": {"reasoning": "hm", "content": "Look:", "tool_calls": [call("f", '{"a": 1}'), call("f", "", 1), call("f", "{oops", 2)]},
    "a namespace's": {"tool_calls": [call("agents__spawn", "{}")]},
    "custom": {"tool_calls": [call("patch", PATCHED), call("patch", '{ "input" : ""}', 1)]},
    "unknown": {"tool_calls": [call("nobody", "[1]")]},
}
KEYS = {
    "reasoning": ["id", "type", "summary", "content"],
    "message": ["id", "type", "status", "role", "content"],
    "function_call": ["id", "type", "status", "call_id", "name", "arguments"],
}


def echo(item):
    """An output item as harnesses send it back: without status, annotations and nulls."""
    kept = {k: v for k, v in item.items() if k not in {"status", "encrypted_content", "id"} and v is not None}
    if kept["type"] == "message":
        kept["content"] = [{"type": "output_text", "text": part["text"]} for part in kept["content"]]
    return kept


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", REPLIES)
async def test_an_echoed_response_equals_the_reply(case, stream):
    reply, session = REPLIES[case], Session()
    response = await session.respond(reply, stream=stream, input=[USER], tools=TOOLS, include=["reasoning.encrypted_content"])
    Response.model_validate(response, strict=True)
    assert response["status"] == "completed"
    assert response["id"] == f"resp_{session.handle}"
    assert response["model"] == "m"
    for shape in (lambda item: item, echo):
        items = [shape(item) for item in response["output"]]
        spoken = await session.spoken(input=[USER, *items, USER], tools=TOOLS)
        messages = json.loads(spoken.body)["messages"]
        served = [{"role": "assistant", **reply}] if items else []
        assert digests(messages) == digests([USER, *served, USER])
        for read, meant in zip(messages[1:-1], served, strict=True):
            assert read.get("reasoning") == meant.get("reasoning")
            assert [c["id"] for c in read.get("tool_calls", ())] == [c["id"] for c in meant.get("tool_calls", ())]
        assert spoken.handles == ({1: response["id"][5:]} if items and shape is not echo else {})


@pytest.mark.parametrize("finish", [None, "length", "content_filter", "abort"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("case", REPLIES)
async def test_a_stream_accumulates_to_the_whole(case, size, finish):
    reply = REPLIES[case]
    whole = json.loads((await Session().spoken(input="x", tools=TOOLS)).encoder.whole(completion(reply, finish)))
    spoken = await Session().spoken(input="x", tools=TOOLS, stream=True)
    told = said(spoken.encoder, chunks(reply, finish, size))
    for _, data in told:
        EVENT.validate_python(data, strict=True)
    assert told[-1][1]["response"] == whole
    assert told[-1][0] == ("response.completed" if finish is None else "response.incomplete")
    assert [data["item"] for kind, data in told if kind == "response.output_item.done"] == whole["output"]
    assert await accumulated(told) == texts(whole["output"])


def texts(output):
    """The text of each item."""
    return [
        item["arguments"]
        if "arguments" in item
        else item["input"]
        if "input" in item
        else "".join(part["text"] for part in item["content"])
        for item in output
    ]


async def accumulated(told):
    """The text of each item as its deltas add up, and as its `done` says."""
    added: dict[int, str] = {}
    done: dict[int, str] = {}
    for kind, data in told:
        if kind == "response.output_item.added":
            added[data["output_index"]] = ""
        if kind.endswith(".delta"):
            added[data["output_index"]] += data["delta"]
        if kind.endswith(".done") and kind.split(".")[1] in {
            "output_text",
            "reasoning_text",
            "function_call_arguments",
            "custom_tool_call_input",
        }:
            done[data["output_index"]] = data.get("text", data.get("arguments", data.get("input")))
    assert added == done
    return list(added.values())


async def test_the_events_of_a_reply():
    spoken = await Session().spoken(input="x", tools=TOOLS, stream=True)
    told = said(
        spoken.encoder, chunks({"reasoning": "hm", "content": "Hi", "tool_calls": [call("f", "{}"), call("patch", PATCHED, 1)]}, size=99)
    )
    assert [kind.removeprefix("response.") for kind, _ in told] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    assert told[-1][1]["response"]["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 13,
    }


async def test_each_chunk_is_sent_at_once():
    encoder = (await Session().spoken(input="x", stream=True)).encoder
    for data, last in [
        (chunk({"role": "assistant", "content": ""}), "response.in_progress"),
        (chunk({}), None),
        (chunk({"reasoning": "a"}), "response.reasoning_text.delta"),
        (chunk({"content": "b"}), "response.output_text.delta"),
        (chunk({"content": "c"}), "response.output_text.delta"),
        (chunk({"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f"}}]}), "response.output_item.added"),
        (chunk({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}), "response.function_call_arguments.delta"),
        (chunk({"content": "d"}), "response.output_text.delta"),
        (chunk({"reasoning": "e", "content": "f"}, "stop"), "response.output_item.done"),
    ]:
        text = encoder.chunk(b"", data, 0).decode()
        assert (text.rsplit("event: ", 1)[1].split("\n")[0] if text else None) == last
        assert "token_ids" not in text
    final = json.loads(encoder.end().decode().split("data: ")[1])
    kinds = [item["type"] for item in final["response"]["output"]]
    assert kinds == ["reasoning", "message", "function_call", "message", "reasoning", "message"]


async def test_what_ids_and_names_items_have():
    session = Session()
    response = await session.respond(REPLIES["all"], input="x", tools=TOOLS)
    assert [item["id"] for item in response["output"]] == [
        f"{prefix}_{session.handle}_{i}" for i, prefix in enumerate(["rs", "msg", "fc", "fc", "fc"])
    ]
    for item in response["output"]:
        assert list(item) == KEYS[item["type"]]
    sealed = await session.respond(REPLIES["all"], input="x", include=["reasoning.encrypted_content"])
    assert sealed["output"][0]["encrypted_content"] == session.handle
    spawned = await session.respond(REPLIES["a namespace's"], input="x", tools=TOOLS)
    assert (spawned["output"][0]["name"], spawned["output"][0]["namespace"]) == ("spawn", "agents")
    patched = await session.respond(REPLIES["custom"], input="x", tools=TOOLS)
    assert patched["output"][0]["type"] == "custom_tool_call"
    assert patched["output"][0]["input"] == '*** Begin\n+ "naïve" \\ ☕ 😀\n'
    hidden = await session.respond(REPLIES["all"], input="x", include_reasoning=False)
    assert hidden["output"][0]["type"] == "message"


@pytest.mark.parametrize("size", [1, 2, 5, 50])
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"input": "abc', "abc"),
        ('{"input": "a\\', "a"),
        ('{"input": "\\ud83d', ""),
        ('{"input": "\\ud83d\\ude00"}', "😀"),
        ('{"input": "\\ud83d!"}', "\ufffd!"),
        ('{"input": "a\\qb"}', None),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"input": "a"}}', "a"),
        ('{"why": 1, "input": "a"}', "a"),
        ('{"input": 5}', '{"input": 5}'),
        ("*** bare", "*** bare"),
        ("", ""),
        ("[" * 5000, "[" * 5000),
    ],
)
async def test_a_custom_tools_input_however_broken(arguments, shown, size):
    spoken = await Session().spoken(input="x", tools=TOOLS, stream=True)
    told = said(spoken.encoder, chunks({"tool_calls": [call("patch", arguments)]}, "length", size))
    item = told[-1][1]["response"]["output"][0]
    assert item["status"] == "incomplete"
    if shown is not None:
        assert item["input"] == shown
        assert await accumulated(told) == [shown]


async def test_members_are_repeated():
    members = {
        "instructions": "S",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "max_output_tokens": 9,
        "user": "u",
        "prompt_cache_key": "k",
        "store": False,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
    }
    response = await Session().respond({"content": "x"}, input="x", **members)
    assert {name: response[name] for name in members} == members
    assert response["previous_response_id"] is None
    assert response["truncation"] == "disabled"
    nameless = await Session().respond({"content": "x"}, input="x", model=None)
    assert nameless["model"] == "engine"


@pytest.mark.parametrize("sent", [[], [chunk({"role": "assistant"}), chunk({"content": "Hel"})]])
@pytest.mark.parametrize("how", ["engine", "store", "gone", "unreadable"])
async def test_an_error_within_a_stream(how, sent):
    encoder = (await Session().spoken(input="x", stream=True)).encoder
    said_first = b"".join(encoder.chunk(b"", data, 0) for data in sent)
    match how:
        case "engine":
            text = encoder.chunk(b"", b'{"error": {"message": "boom", "code": 500}}', 0)
        case "unreadable":
            text = encoder.chunk(b"", b'{"choices": 5}', 0)
        case "store":
            text = encoder.error(503, "boom")
        case _:
            text = encoder.end()
    told = events(said_first + text)
    for _, data in told:
        EVENT.validate_python(data)
    assert [kind for kind, _ in told][-2:] == ["error", "response.failed"]
    assert told[0][0] == "response.created"
    failed = told[-1][1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "server_error"
    assert (failed["error"]["message"] == "boom") is (how in {"engine", "store"})
    assert [item["status"] for item in failed["output"]] == ["incomplete"] * (1 if sent else 0)
    assert encoder.end() == encoder.chunk(b"", chunk({"content": "late"}), 0) == b""
    assert encoder.documents() == {}


async def test_a_failure_after_the_end_is_still_sent():
    encoder = (await Session().spoken(input="x", stream=True)).encoder
    told = said(encoder, chunks({"content": "x"}))
    late = encoder.error(503, "the store failed").decode()
    assert told[-1][0] == "response.completed"
    assert "event: response.failed" in late
    assert encoder.documents() == {}


async def test_a_whole_reply_that_cannot_be_read():
    for data in (b"", b"[]", b"{}", b'{"choices":[{"message":5}]}'):
        response = json.loads((await Session().spoken(input="x")).encoder.whole(data))
        Response.model_validate(response)
        assert response["status"] == "failed"


def test_keep_alive_is_a_comment():
    assert events(b"") == []


@pytest.mark.parametrize("case", ["all", "custom", "reasoning and text"])
@pytest.mark.filterwarnings("ignore")
async def test_the_sdk_accumulates_it(case):
    spoken = await Session().spoken(input="x", tools=TOOLS, stream=True)
    sent = chunks(REPLIES[case])
    text = b"".join(spoken.encoder.chunk(b"", data, 0) + spoken.encoder.keep_alive() for data in sent) + spoken.encoder.end()

    def answer(_request):
        return httpx.Response(200, content=text, headers={"content-type": "text/event-stream"})

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    sdk = openai.AsyncOpenAI(base_url="http://x/v1", api_key="k", http_client=http)
    async with sdk, sdk.responses.stream(model="m", input="x") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[-1] == "response.completed"
    whole = json.loads((await Session().spoken(input="x", tools=TOOLS)).encoder.whole(completion(REPLIES[case])))
    assert texts([item.to_dict() for item in final.output]) == texts(whole["output"])

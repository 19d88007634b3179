"""Requests of the Responses API become chat requests, and the same conversation has the same digests in both."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dialects.responses.kit import DIALECT, Session, digests
from tests.support.profiles import examples
from tests.support.reading import read_chat
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.errors import HarnessError

OURS, OTHER = "0123456789abcdef" * 2, "f" * 32
USER = {"role": "user", "content": "hi"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello", "annotations": []}]}
CALLED = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1.50}'}
FILE = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}
OUTPUT = {"type": "function_call_output", "call_id": "c1"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}


def thought(text, **more):
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}], **more}


def chat_call(name, arguments, call_id="c1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CASES = {
    "a text": ("hi", [USER]),
    "messages in their short form": (
        [{"role": "system", "content": "S"}, {"role": "developer", "content": "D"}, USER],
        [{"role": "system", "content": "S"}, {"role": "developer", "content": "D"}, USER],
    ),
    "parts stay parts": (
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    ),
    "an image": (
        [{"role": "user", "content": [{"type": "input_text", "text": "see"}, IMAGE]}],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
            }
        ],
    ),
    "a reply's items are one message": (
        [USER, thought("hm"), SAID, CALLED, {"type": "function_call_output", "call_id": "c1", "output": "ok"}],
        [
            USER,
            {"role": "assistant", "reasoning": "hm", "content": "Hello", "tool_calls": [chat_call("f", '{"a": 1.50}')]},
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ],
    ),
    "text behind a call is the same reply's": (
        [USER, SAID, CALLED, SAID],
        [USER, {"role": "assistant", "content": "HelloHello", "tool_calls": [chat_call("f", '{"a": 1.50}')]}],
    ),
    "a message behind a message is another": (
        [USER, SAID, SAID],
        [USER, {"role": "assistant", "content": "Hello"}, {"role": "assistant", "content": "Hello"}],
    ),
    "reasoning behind a message begins another": (
        [USER, SAID, thought("b"), SAID],
        [USER, {"role": "assistant", "content": "Hello"}, {"role": "assistant", "reasoning": "b", "content": "Hello"}],
    ),
    "one handle, one reply": (
        [USER, {**SAID, "id": f"msg_{OURS}_0"}, thought("b", encrypted_content=OURS), {**SAID, "id": f"msg_{OURS}_2"}],
        [USER, {"role": "assistant", "reasoning": "b", "content": "HelloHello"}],
    ),
    "two handles, two replies": (
        [USER, {**CALLED, "id": f"fc_{OURS}_0"}, {**CALLED, "id": f"fc_{OTHER}_0"}],
        [USER, *[{"role": "assistant", "tool_calls": [chat_call("f", '{"a": 1.50}')]}] * 2],
    ),
    "all parts of a message": (
        [{"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]}],
        [{"role": "assistant", "content": "ab"}],
    ),
    "summaries where there is no content": (
        [
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}],
                "encrypted_content": "gAAAA",
            }
        ],
        [{"role": "assistant", "reasoning": "a\nb", "content": ""}],
    ),
    "reasoning emptied by its harness": (
        [{"type": "reasoning", "summary": [], "content": [], "status": "in_progress"}, CALLED],
        [{"role": "assistant", "tool_calls": [chat_call("f", '{"a": 1.50}')]}],
    ),
    "arguments that are no JSON": (
        [{**CALLED, "arguments": '{"a": oops'}, {"type": "function_call_output", "call_id": "c1", "output": ""}],
        [
            {"role": "assistant", "tool_calls": [chat_call("f", '{"a": oops')]},
            {"role": "tool", "tool_call_id": "c1", "content": ""},
        ],
    ),
    "parallel calls, results in parts, one of nobody's": (
        [
            CALLED,
            {**CALLED, "call_id": "c2", "namespace": "ns"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "x"}, IMAGE]},
            {"type": "function_call_output", "call_id": "nobody", "output": []},
        ],
        [
            {"role": "assistant", "tool_calls": [chat_call("f", '{"a": 1.50}'), chat_call("ns__f", '{"a": 1.50}', "c2")]},
            {
                "role": "tool",
                "tool_call_id": "c2",
                "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
            },
            {"role": "tool", "tool_call_id": "nobody", "content": ""},
        ],
    ),
    "images that a tool returned, as Codex sends them": (
        [
            CALLED,
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{**IMAGE, "detail": "high"}, {**IMAGE, "detail": "original"}],
            },
        ],
        [
            {"role": "assistant", "tool_calls": [chat_call("f", '{"a": 1.50}')]},
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "high"}},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                ],
            },
        ],
    ),
    "files that a tool returned, as AI SDK sends them": (
        [
            CALLED,
            {**OUTPUT, "output": [{"type": "input_text", "text": "PDF read"}, FILE]},
            {**OUTPUT, "output": [FILE]},
        ],
        [
            {"role": "assistant", "tool_calls": [chat_call("f", '{"a": 1.50}')]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "PDF read"}]},
            {"role": "tool", "tool_call_id": "c1", "content": ""},
        ],
    ),
    "what an agent of Codex 0.171 writes to another": (
        [
            {
                "type": "agent_message",
                "author": "/root",
                "recipient": "/root/t1",
                "content": [{"type": "input_text", "text": "Payload:\n"}, {"type": "encrypted_content", "encrypted_content": "Look."}],
            }
        ],
        [{"role": "user", "content": [{"type": "text", "text": "Payload:\n"}, {"type": "text", "text": "Look."}]}],
    ),
    "a custom tool's call": (
        [
            {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": '*** "x"\n☕'},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
        ],
        [
            {"role": "assistant", "tool_calls": [chat_call("patch", '{"input": "*** \\"x\\"\\n\\u2615"}')]},
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_items_are_messages(case):
    items, messages = CASES[case]
    chat_request = await Session().chat(input=items, instructions="Be brief.")
    assert next(iter(chat_request)) == "messages"
    assert digests(chat_request["messages"]) == digests([{"role": "system", "content": "Be brief."}, *messages])
    for read, meant in zip(chat_request["messages"][1:], messages, strict=True):
        assert {k: v for k, v in read.items() if k != "tool_calls"} == {k: v for k, v in meant.items() if k != "tool_calls"}
        assert [c["id"] for c in read.get("tool_calls", ())] == [c["id"] for c in meant.get("tool_calls", ())]


async def test_handles_are_reported_by_index():
    items = [
        USER,
        thought("a", encrypted_content=OURS),
        SAID,
        USER,
        {**SAID, "id": "msg_f59-foreign"},
        USER,
        {**CALLED, "id": f"fc_{OTHER}_7"},
    ]
    spoken = await Session().spoken(input=items)
    assert spoken.handles == {1: OURS, 5: OTHER}
    assert spoken.left_out == ("items-merged",)
    assert (await Session().spoken(input=[CALLED, {**OUTPUT, "output": [FILE]}])).left_out == ("result-parts",)
    assert (await Session().spoken(input=[USER, SAID])).left_out == ()


async def test_members():
    chat_request = await Session().chat(
        input="hi",
        stream=True,
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}, "verbosity": "low"},
        truncation="auto",
        metadata={"a": "b"},
        prompt_cache_key="k",
        client_metadata={"x": 1},
        stream_options={"include_obfuscation": False},
        chat_template_kwargs={"enable_thinking": False},
        seed=None,
    )
    assert chat_request == {
        "messages": [USER],
        "model": "m",
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (await Session().chat(input="x", text={"format": {"type": "json_object"}}))["response_format"] == {"type": "json_object"}


async def test_an_incomplete_last_item_is_continued_as_vllm_does():
    chat_request = await Session().chat(input=[USER, {**SAID, "status": "incomplete"}])
    assert chat_request["continue_final_message"] is True
    assert chat_request["add_generation_prompt"] is False
    assert "continue_final_message" not in await Session().chat(input=[USER, {**SAID, "status": "completed"}])


FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False, "defer_loading": None}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edit files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
}
SPACE = {"type": "namespace", "name": "agents", "description": "…", "tools": [{"type": "function", "name": "spawn", "parameters": {}}]}
WEB = {"type": "web_search", "external_web_access": True}


async def test_tools():
    spoken = await Session().spoken(input="x", tools=[FUNCTION, PATCH, SPACE, WEB])
    tools = [tool["function"] for tool in json.loads(spoken.body)["tools"]]
    assert tools[0] == {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
    assert tools[1]["name"] == "patch"
    assert "start: x" in tools[1]["description"]
    assert tools[1]["parameters"]["required"] == ["input"]
    assert tools[2] == {"name": "agents__spawn", "parameters": {}}
    assert len(tools) == 3
    only = await Session().chat(input="x", tools=[WEB], tool_choice="auto")
    assert "tools" not in only
    assert "tool_choice" not in only


async def test_tools_among_the_items():
    """Codex 0.171 offers its tools only there, for the models that it knows by name."""
    more = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [SPACE, WEB, {**FUNCTION, "description": "new"}]}
    spoken = await Session().spoken(input=[more, USER, SAID, {**more, "tools": [PATCH]}, SAID], tools=[FUNCTION])
    chat_request = json.loads(spoken.body)
    assert [tool["function"]["name"] for tool in chat_request["tools"]] == ["f", "agents__spawn", "patch"]
    assert chat_request["tools"][0]["function"]["description"] == "new"
    assert [message["role"] for message in chat_request["messages"]] == ["user", "assistant", "assistant"]
    chosen = await Session().chat(input=[more, USER], tool_choice={"type": "function", "name": "spawn"})
    assert chosen["tool_choice"]["function"]["name"] == "agents__spawn"


@pytest.mark.parametrize(
    ("choice", "told", "shown"),
    [
        ("auto", None, 3),
        ("none", "none", 3),
        ("required", "required", 3),
        ({"type": "function", "name": "f"}, "f", 3),
        ({"type": "custom", "name": "patch"}, "patch", 3),
        ({"type": "function", "name": "spawn"}, "agents__spawn", 3),
        ({"type": "function", "name": "agents__spawn"}, "agents__spawn", 3),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}]},
            "required",
            1,
        ),
    ],
)
async def test_tool_choice(choice, told, shown):
    chat_request = await Session().chat(input="x", tools=[FUNCTION, PATCH, SPACE, WEB], tool_choice=choice)
    found = chat_request.get("tool_choice")
    assert (found["function"]["name"] if isinstance(found, dict) else found) == told
    assert len(chat_request["tools"]) == shown


REFUSED = [
    ({}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "assistant", "content": [IMAGE]}]}, "input[0].content"),
    ({"input": [{"type": "web_search_call", "id": "ws"}]}, "input[0]"),
    ({"input": [{"type": "local_shell_call", "id": "x"}]}, "input[0]"),
    ({"input": [{"type": ["x"]}]}, "input[0]"),
    ({"input": [{"content": "x"}]}, "input[0]"),
    ({"input": [{"id": f"msg_{OURS}_0"}]}, "input[0].id"),
    ({"input": [{"type": "additional_tools"}]}, "input[0].tools"),
    ({"input": [{"type": "additional_tools", "tools": [{**SPACE, "tools": [5]}]}]}, "input[0].tools[0].tools[0]"),
    ({"input": [{**CALLED, "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": None}]}, "input[0].output"),
    ({"input": [{"type": "item_reference", "id": f"msg_{OURS}_0"}]}, "input[0].id"),
    ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
    ({"input": "x", "instructions": []}, "instructions"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "conversation": "conv_1"}, "conversation"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "x", "metadata": 5}, "metadata"),
    ({"input": "x", "stream": "yes"}, "stream"),
    ({"input": "x", "model": 5}, "model"),
    ({"input": "x", "reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": 5}}}, "text.format.schema"),
    ({"input": "x", "tools": [5]}, "tools[0]"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"input": "x", "tools": [{**FUNCTION, "parameters": 5}]}, "tools[0].parameters"),
    ({"input": "x", "tools": [{**SPACE, "tools": 5}]}, "tools[0].tools"),
    ({"input": "x", "tools": [{**PATCH, "format": "lark"}]}, "tools[0]"),
    ({"input": "x", "tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools[0].format"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ({"input": "x", "tool_choice": "f"}, "tool_choice"),
    ({"input": "x", "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"input": "x", "tools": [WEB], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"input": "x", "previous_response_id": "resp_unknown"}, "previous_response_id"),
    ({"input": "x", "previous_response_id": f"resp_{OURS}"}, "previous_response_id"),
]


@pytest.mark.parametrize(("members", "param"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
async def test_unsupported_requests_are_refused_by_name(members, param):
    with pytest.raises(HarnessError) as refused:
        await Session().spoken(**members)
    assert refused.value.status == 400
    assert refused.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"input":' + b"[" * 100_000,
        b"\xff",
        b'{"input":"x","temperature":NaN}',
        b'{"input":"x","metadata":{"a":' + b'{"a":' * 2000,
    ],
)
async def test_bodies_that_are_not_json(body):
    with pytest.raises(HarnessError):
        await Session().ask(body)


async def test_lone_surrogates_are_read():
    spoken = await Session().ask(b'{"model":"m","instructions":"i \\ud800","input":[{"role":"user","content":"a \\ud83d"}],"store":true}')
    call_read = read_chat(spoken.body, IncrementalParser())
    assert [json.loads(raw)["content"] for raw in call_read.raw_messages] == ["i \ufffd", "a \ufffd"]
    assert "i \ufffd".encode() in spoken.encoder.whole(b'{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}]}')
    assert spoken.encoder.documents()
    spoken = await Session().ask(b'{"model":"m","input":"x","metadata":{"a":"\\ud800"}}')
    assert "\ufffd".encode() in spoken.encoder.whole(b'{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}]}')


async def test_a_thousand_tools_and_repeated_ids():
    tools = [{**FUNCTION, "name": f"f{i}"} for i in range(1000)]
    items = [CALLED, CALLED, {"type": "function_call_output", "call_id": "c1", "output": "1"}] * 3
    chat_request = await Session().chat(input=items, tools=tools)
    assert len(chat_request["tools"]) == 1000
    assert [len(m.get("tool_calls", ())) for m in chat_request["messages"]] == [2, 0] * 3


def test_errors_in_openais_shape():
    def error(*args):
        return json.loads(DIALECT.error(*args))["error"]

    assert error(400, "no", "invalid_request_error", "input") == {
        "message": "no",
        "type": "invalid_request_error",
        "param": "input",
        "code": None,
    }
    assert error(404, "The model `x` does not exist.", "NotFoundError", "model") == {
        "message": "The model `x` does not exist.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert error(404, "gone", "NotFoundError", None)["code"] is None
    assert error(400, "no \ud800", "BadRequestError", "top_p") == {
        "message": "no \ufffd",
        "type": "invalid_request_error",
        "param": "top_p",
        "code": None,
    }
    assert error(500, "oops", "InternalServerError")["type"] == "server_error"
    assert error(401, "who?", "authentication_error")["type"] == "authentication_error"
    long = "This model's maximum context length is 8 tokens. However, your prompt contains at least 9 input tokens"
    assert error(400, long, "BadRequestError", None)["code"] == "context_length_exceeded"
    assert error(400, "Previous …", "previous_response_not_found", None)["code"] == "previous_response_not_found"


@pytest.mark.parametrize(
    ("method", "path", "ours"),
    [
        ("POST", "/v1/responses", True),
        ("GET", "/v1/responses/resp_1/input_items", True),
        ("POST", "/v1/responses/input_tokens", True),
        ("POST", "/v1/responses/render", False),
        ("POST", "/v1/responsesx", False),
        ("POST", "/v1/chat/completions", False),
    ],
)
def test_which_requests_it_matches(method, path, ours):
    assert DIALECT.matches(method, path, {}) is ours


async def test_counting():
    counting = await Session().count(input=[USER], instructions="S", tools=[FUNCTION])
    assert [m["role"] for m in json.loads(counting.body)["messages"]] == ["system", "user"]
    assert json.loads(counting.write(42)) == {"object": "response.input_tokens", "input_tokens": 42}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from(
    ["type", "role", "content", "output", "call_id", "name", "arguments", "input", "id", "summary", "text", "tools", "format"]
)
KINDS = st.sampled_from(
    [
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "item_reference",
        "function",
        "custom",
        "namespace",
    ]
)
MOSTLY = st.recursive(
    KINDS | st.sampled_from(["user", "assistant", "input_text", "output_text", "grammar"]) | JSON,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=15,
)


@settings(max_examples=examples(300))
@given(st.dictionaries(st.sampled_from(["input", "tools", "tool_choice", "text", "reasoning", "include", "instructions", "store"]), MOSTLY))
async def test_any_request_is_parsed_or_refused(members):
    meant = None
    with contextlib.suppress(HarnessError):
        meant = await Session().ask(json.dumps({"model": "m", **members}).encode())
    if meant is None:
        return
    read_chat(meant.body, IncrementalParser())
    meant.encoder.whole(b'{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}]}')
    assert isinstance(meant.encoder.documents(), dict)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": []},
        {"type": "function", "name": ["bash"]},
        {"type": "allowed_tools", "mode": [], "tools": []},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": {}}]},
    ],
)
async def test_an_unknown_choice_is_refused(choice):
    tools = [{"type": "function", "name": "bash", "parameters": {}}]
    with pytest.raises(HarnessError, match="tool_choice"):
        await Session().ask({"model": "m", "input": "x", "tools": tools, "tool_choice": choice})


@pytest.mark.parametrize("odd", [{}, [], 1, "none"])
async def test_unusual_values(odd):
    items = [{**USER, "content": [{**IMAGE, "detail": odd}]}, {**SAID, "status": odd}]
    chat_request = await Session().chat(input=items)
    assert chat_request["messages"][0]["content"] == [{"type": "image_url", "image_url": {"url": IMAGE["image_url"]}}]
    assert "continue_final_message" not in chat_request


@settings(max_examples=examples(200))
@given(JSON)
async def test_any_json_for_a_body(value):
    with pytest.raises(HarnessError):
        await Session().ask(json.dumps(value).encode())

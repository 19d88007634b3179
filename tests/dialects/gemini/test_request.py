"""Gemini requests: a table of conversations in Gemini and in chat, and everything that is refused."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dialects.gemini.kit import GENERATE, HANDLE, STREAM, chat_of, digests, read
from tests.support.profiles import examples
from tokencache.dialects.base import DirectReply, ModelCall, TokenCount
from tokencache.dialects.gemini.routes import GeminiDialect
from tokencache.errors import HarnessError


def text(said, **more):
    return {"text": said, **more}


def call(name="bash", call_id=None, **args):
    return {"functionCall": ({"id": call_id} if call_id else {}) | {"name": name, "args": args}}


def result(response, name="bash", call_id=None, **more):
    return {"functionResponse": ({"id": call_id} if call_id else {}) | {"name": name, "response": response} | more}


def model(*parts):
    return {"role": "model", "parts": list(parts)}


def user(*parts):
    return {"role": "user", "parts": list(parts)}


def asks(*calls):
    return {
        "role": "assistant",
        "tool_calls": [{"id": i, "type": "function", "function": {"name": n, "arguments": json.dumps(a)}} for i, n, a in calls],
    }


def told(call_id, content):
    return {"role": "tool", "tool_call_id": call_id, "content": content}


HI, HI_CHAT = user(text("hi")), {"role": "user", "content": "hi"}
PNG = {"inlineData": {"mimeType": "image/png", "data": "aGk_"}}
PDF = {"inlineData": {"mimeType": "application/pdf", "data": "JVBERi0="}}
LINK = {"fileData": {"mimeType": "image/png", "fileUri": "https://example.com/a.png"}}
FILE = {"fileData": {"mimeType": "application/pdf", "fileUri": "https://example.com/a.pdf"}}
STORED = "https://generativelanguage.googleapis.com/v1beta/files/a"
LINK_PART = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
PNG_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk/"}}

CONVERSATIONS = {
    "a word": ([HI], [HI_CHAT]),
    "no role": ([{"parts": [text("hi")]}], [HI_CHAT]),
    "texts stay parts": (
        [user(text("a"), text("b"))],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    ),
    "a reply": ([HI, model(text("yes"))], [HI_CHAT, {"role": "assistant", "content": "yes"}]),
    "a reply in pieces": (
        [HI, model(text("y")), model(text("es"), text(" and")), model(text(" no")), user(text("so?"))],
        [HI_CHAT, {"role": "assistant", "content": "yes and no"}, {"role": "user", "content": "so?"}],
    ),
    "thoughts": (
        [HI, model(text("hm", thought=True), text("m", thought=True), text("yes"))],
        [HI_CHAT, {"role": "assistant", "content": "yes", "reasoning": "hmm"}],
    ),
    "nothing said": ([HI, model(), HI], [HI_CHAT, {"role": "assistant", "content": ""}, HI_CHAT]),
    "a call with its id": (
        [HI, model(text("look"), call(call_id="c1", cmd="ls", n=1.5)), user(result({"output": "a.txt\n"}, call_id="c1"))],
        [HI_CHAT, {**asks(("c1", "bash", {"cmd": "ls", "n": 1.5})), "content": "look"}, told("c1", "a.txt\n")],
    ),
    "ids as Gemini CLI writes them": (
        [HI, model(call(call_id="bash__c1")), user(result({"output": "x"}, call_id="bash__c1"))],
        [HI_CHAT, asks(("c1", "bash", {})), told("c1", "x")],
    ),
    "calls without ids": (
        [HI, model(call(a=1), call("read"), call(a=2)), user(result({"output": "r"}, "read"), result({"output": "1"}), result({"b": 2}))],
        [
            HI_CHAT,
            asks(("call_1_0", "bash", {"a": 1}), ("call_1_1", "read", {}), ("call_1_2", "bash", {"a": 2})),
            told("call_1_1", "r"),
            told("call_1_0", "1"),
            told("call_1_2", '{"b":2}'),
        ],
    ),
    "the empty text at a stream's end": (
        [HI, model(call(call_id="c1")), model(text("")), user(result({"output": "x"}, call_id="c1"))],
        [HI_CHAT, asks(("c1", "bash", {})), told("c1", "x")],
    ),
    "a result twice": (
        [HI, model(call(call_id="c1")), user(result({"output": "x"}, call_id="c1"), result({"output": "x"}, call_id="c1"))],
        [HI_CHAT, asks(("c1", "bash", {})), told("c1", "x"), told("c1", "x")],
    ),
    "a result of no call": ([HI, user(result({"output": "x"}))], [HI_CHAT, told("call_1", "x")]),
    **{
        f"role {role}": (
            [HI, model(call(call_id="c1")), {"role": role, "parts": [result({"output": "x"}, call_id="c1")]}],
            [HI_CHAT, asks(("c1", "bash", {})), told("c1", "x")],
        )
        for role in ("function", "tool")
    },
    "members beside the data": (
        [user(text("hi", partMetadata={"a": 1}, speechMetadata={}), PNG | {"mediaProcessing": {}, "documentMetadata": {}})],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}, PNG_PART]}],
    ),
    "words after results": (
        [HI, model(call(call_id="c1")), user(text("before"), result({"output": "x"}, call_id="c1"), text("after"))],
        [
            HI_CHAT,
            asks(("c1", "bash", {})),
            told("c1", "x"),
            {"role": "user", "content": [{"type": "text", "text": "before"}, {"type": "text", "text": "after"}]},
        ],
    ),
    "outputs": (
        [
            HI,
            model(call(call_id="a"), call(call_id="b"), call(call_id="c"), call(call_id="d"), call(call_id="e")),
            user(
                result({"output": {"n": [1]}}, call_id="a"),
                result({"error": "no"}, call_id="b"),
                result({"result": "r"}, call_id="c"),
                result({"output": "o", "code": 1}, call_id="d"),
                result({}, call_id="e"),
            ),
        ],
        [
            HI_CHAT,
            asks(*((i, "bash", {}) for i in "abcde")),
            told("a", '{"n":[1]}'),
            told("b", '{"error":"no"}'),
            told("c", '{"result":"r"}'),
            told("d", '{"output":"o","code":1}'),
            told("e", "{}"),
        ],
    ),
    "an image": (
        [user(text("see"), PNG)],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk/"}}],
            }
        ],
    ),
    "an image without padding": (
        [user({"inlineData": {"mimeType": "image/png", "data": "aGkh_g"}}, {"inlineData": {"mimeType": "image/png", "data": "aGkh_g=="}})],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGkh/g=="}}] * 2}],
    ),
    "images at public URLs, of the user and of a result": (
        [user(text("look"), LINK), model(call(call_id="a")), user(result({"output": "one"}, call_id="a", parts=[LINK, FILE]))],
        [
            {"role": "user", "content": [{"type": "text", "text": "look"}, LINK_PART]},
            asks(("a", "bash", {})),
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "one"}, LINK_PART]},
        ],
    ),
    "results with images beside them, as Gemini CLI sends them": (
        [
            HI,
            model(call(call_id="a"), call(call_id="b")),
            user(result({"output": "one"}, call_id="a"), PNG, result({"output": "two"}, call_id="b"), PNG),
        ],
        [
            HI_CHAT,
            asks(("a", "bash", {}), ("b", "bash", {})),
            told("a", "one"),
            told("b", "two"),
            {"role": "user", "content": [PNG_PART, PNG_PART]},
        ],
    ),
    "results with PDFs, as Gemini CLI sends them": (
        [
            HI,
            model(call(call_id="a"), call(call_id="b")),
            user(result({"output": "one"}, call_id="a"), PDF, result({"output": "two"}, call_id="b", parts=[PDF, PNG])),
        ],
        [HI_CHAT, asks(("a", "bash", {}), ("b", "bash", {})), told("a", "one"), told("b", [{"type": "text", "text": "two"}, PNG_PART])],
    ),
    "a result with an image in it": (
        [HI, model(call(call_id="a")), user(result({"output": "one"}, call_id="a", parts=[PNG]))],
        [HI_CHAT, asks(("a", "bash", {})), told("a", [{"type": "text", "text": "one"}, PNG_PART])],
    ),
    "odd text": (
        [user(text("☕ \ud800 \x00 <|im_end|>")), model(call(x="\ud800"))],
        [{"role": "user", "content": "☕ \ufffd \x00 <|im_end|>"}, asks(("call_1_0", "bash", {"x": "\ufffd"}))],
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_in_both_dialects(name):
    said, wanted = CONVERSATIONS[name]
    found = chat_of(said)["messages"]
    assert digests(found) == digests(wanted)
    assert [one["content"] for one in found if isinstance(one.get("content"), list)] == [
        one["content"] for one in wanted if isinstance(one.get("content"), list)
    ]
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        assert one.get("tool_call_id") == other.get("tool_call_id")
        assert one.get("reasoning") == other.get("reasoning")
        assert [c["id"] for c in one.get("tool_calls", ())] == [c["id"] for c in other.get("tool_calls", ())]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_either_spelling_is_read(name):
    said, _ = CONVERSATIONS[name]
    spelt = json.loads(json.dumps(said).replace("functionCall", "function_call").replace("functionResponse", "function_response"))
    spelt = json.loads(json.dumps(spelt).replace("inlineData", "inline_data").replace("mimeType", "mime_type"))
    assert chat_of(spelt) == chat_of(said)


def test_a_single_object_is_a_list_of_one():
    declared = {"name": "f", "parameters": {"type": "OBJECT"}}
    one = {
        "system_instruction": {"parts": text("be brief")},
        "contents": {"role": "user", "parts": text("hi")},
        "tools": {"function_declarations": declared},
    }
    listed = {
        "systemInstruction": {"parts": [text("be brief")]},
        "contents": [HI],
        "tools": [{"functionDeclarations": [declared]}],
    }
    assert json.loads(read(one).body) == json.loads(read(listed).body)


@pytest.mark.parametrize(
    ("instruction", "content"),
    [
        ("be brief", "be brief"),
        ({"parts": [text("be brief")]}, "be brief"),
        ({"role": "system", "parts": [text("a"), text("b")]}, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
    ],
)
def test_the_system_instruction(instruction, content):
    for name in ("systemInstruction", "system_instruction"):
        assert chat_of([HI], **{name: instruction})["messages"] == [{"role": "system", "content": content}, HI_CHAT]
    assert chat_of([HI], systemInstruction={"parts": []})["messages"] == [HI_CHAT]


def test_handles_are_found_and_other_signatures_ignored():
    signed = {**call(call_id="c1"), "thoughtSignature": HANDLE}
    other = "f" * 32
    said = [
        HI,
        model(text("x", thoughtSignature=HANDLE)),
        model(signed),
        user(result({"output": "x"}, call_id="c1")),
        model(text("y", thought_signature=other), {"thoughtSignature": "skip_thought_signature_validator", **call()}),
        user(result({})),
        model(text("z", thoughtSignature=17)),
    ]
    meaning = read({"contents": said})
    assert meaning.handles == {1: HANDLE, 3: other}
    assert json.loads(meaning.body)["messages"][1]["content"] == "x"


def test_what_was_left_out_of_a_result_is_named():
    for parts, left_out in (([PNG], ()), ([PDF], ("result-parts",))):
        assert read({"contents": [HI, model(call()), user(result({}, parts=parts))]}).left_out == left_out


def test_two_handles_in_a_row_are_two_replies():
    said = [HI, model(text("a", thoughtSignature="a" * 32)), model(text("b")), model(text("c", thoughtSignature="c" * 32)), HI]
    meaning = read({"contents": said})
    assert [message.get("content") for message in json.loads(meaning.body)["messages"]] == ["hi", "ab", "c", "hi"]
    assert meaning.handles == {1: "a" * 32, 2: "c" * 32}


def test_the_body_begins_with_its_messages_and_streams_count():
    meaning = read({"contents": [HI]}, STREAM, query={"alt": "sse"})
    assert isinstance(meaning, ModelCall)
    assert meaning.body.startswith(b'{"messages":[')
    assert json.loads(meaning.body) == {
        "messages": [HI_CHAT],
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "include_reasoning": False,
    }


@pytest.mark.parametrize(
    ("path", "name"),
    [("/v1beta/models/Qwen/Q:generateContent", "Qwen/Q"), ("/v1/models/Qwen%2FQ%3A8b%3agenerateContent", "Qwen/Q:8b")],
)
def test_the_model_s_name_is_in_the_path(path, name):
    assert GeminiDialect().matches("POST", path, {})
    assert json.loads(read({"contents": [HI]}, path).body)["model"] == name


CONFIGS = [
    ({"temperature": 0, "topP": 0.5, "topK": 40.0, "seed": 7}, {"temperature": 0, "top_p": 0.5, "top_k": 40, "seed": 7}),
    ({"max_output_tokens": "12", "stop_sequences": ["X"], "stopSequences": None}, {"max_tokens": 12, "stop": ["X"]}),
    ({"temperature": "0.5", "topP": "1"}, {"temperature": 0.5, "top_p": 1.0}),
    ({"presencePenalty": 1, "frequencyPenalty": -1.5}, {"presence_penalty": 1, "frequency_penalty": -1.5}),
    ({"candidateCount": 1, "responseModalities": ["TEXT"], "responseLogprobs": True, "logprobs": 3, "mediaResolution": "X"}, {}),
    ({"responseMimeType": "text/plain"}, {}),
    ({"responseMimeType": "application/json"}, {"response_format": {"type": "json_object"}}),
    (
        {"responseMimeType": "application/json", "responseJsonSchema": {"type": "object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": {"type": "object"}}}},
    ),
    (
        {"responseMimeType": "application/json", "responseSchema": {"type": "STRING"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": {"type": "string"}}}},
    ),
    (
        {"responseFormat": {"text": {"mimeType": "APPLICATION_JSON", "schema": {"type": "object"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": {"type": "object"}}}},
    ),
    ({"response_format": [{"text": {"mime_type": "application/json"}}]}, {"response_format": {"type": "json_object"}}),
    ({"responseFormat": {"text": {"mimeType": "TEXT_PLAIN"}}}, {}),
    ({"thinkingConfig": {"thinkingBudget": 0}}, {"reasoning_effort": "none"}),
    ({"thinkingConfig": {"thinkingBudget": 8192}}, {}),
    ({"thinkingConfig": {"thinkingLevel": "HIGH"}}, {"reasoning_effort": "high"}),
]


@pytest.mark.parametrize(("config", "wanted"), CONFIGS)
def test_generation_settings(config, wanted):
    said = chat_of([HI], generationConfig=config)
    assert {key: value for key, value in said.items() if key not in {"messages", "model", "stream", "include_reasoning"}} == wanted


def test_thoughts_are_recorded_as_shown_where_they_are():
    assert "include_reasoning" not in chat_of([HI], generation_config={"thinking_config": {"include_thoughts": True}})
    assert chat_of([HI])["include_reasoning"] is False


def test_members_without_effect_are_left_out():
    plain = chat_of([HI])
    assert chat_of([HI], safetySettings=[{"category": "X"}], labels={"a": "b"}, tools=[], toolConfig={}, cachedContent="") == plain


def test_schemas_become_json_schemas():
    schema = {
        "type": "OBJECT",
        "properties": {
            "b": {"type": "STRING", "enum": ["x", "y"], "format": "enum", "nullable": True},
            "a": {"type": "ARRAY", "items": {"type": "INTEGER", "format": "int64"}, "min_items": "1", "maxItems": 3},
            "type": {"anyOf": [{"type": "NUMBER"}, {"type": "BOOLEAN"}], "nullable": True, "description": "d", "example": 1},
            "union": {"oneOf": [{"type": "OBJECT"}, {"allOf": [{"type": "STRING"}]}], "nullable": True},
        },
        "required": ["a"],
        "property_ordering": ["a", "b"],
        "additionalProperties": False,
    }
    (tool,) = chat_of([HI], tools=[{"functionDeclarations": [{"name": "f", "description": "F", "parameters": schema}]}])["tools"]
    assert tool == {
        "type": "function",
        "function": {
            "name": "f",
            "description": "F",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "array", "items": {"type": "integer", "format": "int64"}, "minItems": 1, "maxItems": 3},
                    "b": {"type": ["string", "null"], "enum": ["x", "y", None]},
                    "type": {
                        "anyOf": [{"type": "number"}, {"type": "boolean"}, {"type": "null"}],
                        "description": "d",
                        "examples": [1],
                    },
                    "union": {"oneOf": [{"type": "object"}, {"allOf": [{"type": "string"}]}, {"type": "null"}]},
                },
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    assert list(tool["function"]["parameters"]["properties"]) == ["a", "b", "type", "union"]


TOOLS = [{"function_declarations": [{"name": "f", "parametersJsonSchema": {"type": "object"}}, {"name": "g"}]}, {}]


@pytest.mark.parametrize(
    ("choice", "wanted", "left"),
    [
        ({}, None, "fg"),
        ({"mode": "AUTO"}, None, "fg"),
        ({"mode": "NONE"}, "none", "fg"),
        ({"mode": "ANY"}, "required", "fg"),
        ({"mode": "ANY", "allowedFunctionNames": ["g"]}, {"type": "function", "function": {"name": "g"}}, "fg"),
        ({"mode": "ANY", "allowed_function_names": ["g", "f"]}, "required", "fg"),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["g"]}, None, "g"),
    ],
)
def test_tools_and_their_choice(choice, wanted, left):
    said = chat_of([HI], tools=TOOLS, toolConfig={"functionCallingConfig": choice})
    assert [tool["function"]["name"] for tool in said["tools"]] == list(left)
    assert said.get("tool_choice") == wanted


def test_a_thousand_tools_and_duplicate_ids():
    tools = [{"functionDeclarations": [{"name": f"f{i}"} for i in range(1000)]}]
    calls = model(*(call(f"f{i}", call_id="same") for i in range(1000)))
    said = chat_of([HI, calls, user(*(result({}, f"f{i}", "same") for i in range(1000)))], tools=tools)
    assert len(said["tools"]) == 1000
    assert len(said["messages"]) == 1002


REFUSED = [
    (b"", "valid JSON"),
    (b"[]", "must be a JSON object"),
    ({}, "contents is not specified"),
    ({"contents": []}, "contents is not specified"),
    ({"contents": "hi"}, "contents must be a list"),
    ({"contents": [1]}, "contents[0] must be an object"),
    ({"contents": [{"role": "system", "parts": []}]}, "contents[0].role"),
    ({"contents": [{"role": 1}]}, "contents[0].role must be a string"),
    ({"contents": [user({})]}, "contents[0].parts[0] has no data"),
    ({"contents": [user({"text": 1})]}, "contents[0].parts[0].text must be a string"),
    ({"contents": [user({"text": "a", "functionCall": {"name": "f"}})]}, "one kind of data, not text and functionCall"),
    ({"contents": [user(call())]}, "'functionCall' is not supported"),
    ({"contents": [user(FILE)]}, "'application/pdf' is not supported"),
    ({"contents": [user({"fileData": {"fileUri": "gs://a/b", "mimeType": "image/png"}})]}, "fileUri: files are not stored here"),
    ({"contents": [user({"file_data": {"file_uri": STORED, "mime_type": "image/png"}})]}, "fileUri: files are not stored here"),
    ({"contents": [model({"executableCode": {"code": "x"}})]}, "'executableCode' is not supported"),
    ({"contents": [model({"codeExecutionResult": {}})]}, "'codeExecutionResult' is not supported"),
    ({"contents": [model(PNG)]}, "'inlineData' is not supported"),
    ({"contents": [user({"inlineData": {"mimeType": "audio/wav", "data": ""}})]}, "'audio/wav' is not supported"),
    ({"contents": [user(PDF, result({}))]}, "'application/pdf' is not supported"),
    ({"contents": [model({"functionCall": {}})]}, "functionCall.name is missing"),
    ({"contents": [model({"functionCall": {"name": "f", "args": "x"}})]}, "functionCall.args must be an object"),
    ({"contents": [user({"functionResponse": {"name": "f", "response": "x"}})]}, "functionResponse.response must be an object"),
    ({"contents": [user({"functionResponse": {"name": "f", "parts": [{"text": "x"}]}})]}, "only inlineData and fileData are"),
    ({"contents": [HI], "systemInstruction": 5}, "systemInstruction must be"),
    ({"contents": [HI], "systemInstruction": {"parts": [PNG]}}, "'inlineData' is not supported in the system instruction"),
    ({"contents": [HI], "cachedContent": "cachedContents/1"}, "cachedContent is not supported"),
    (
        {"contents": [HI], "generationConfig": {"responseFormat": {"image": {"aspectRatio": "1:1"}}}},
        "generationConfig.responseFormat.image is not supported",
    ),
    (
        {"contents": [HI], "generationConfig": {"responseFormat": {"text": {"mimeType": "TEXT_HTML"}}}},
        "mimeType: 'TEXT_HTML' is not supported",
    ),
    ({"contents": [HI], "tools": [{"googleSearch": {}}]}, "tools[0].googleSearch is not supported"),
    ({"contents": [HI], "tools": [{"code_execution": {}}]}, "tools[0].code_execution is not supported"),
    ({"contents": [HI], "tools": [{"urlContext": {}}]}, "tools[0].urlContext is not supported"),
    ({"contents": [HI], "tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name is missing"),
    *(
        (
            {"contents": [HI], "tools": [{"functionDeclarations": [{"name": "f", member: schema}]}]},
            f"tools[0].functionDeclarations[0].{member} must be an object",
        )
        for member in ("parametersJsonSchema", "parameters")
        for schema in ("{}", [], 5, True)
    ),
    (
        {"contents": [HI], "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": True}},
        "generationConfig.responseJsonSchema must be an object",
    ),
    (b'{"contents":[{"parts":[{"text":"x"}]}],"generationConfig":{"temperature":NaN}}', "NaN is not JSON"),
    (
        {"contents": [HI], "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "FILE"}}]}]},
        "parameters.type: unknown type 'FILE'",
    ),
    (
        {"contents": [HI], "tools": TOOLS, "toolConfig": {"functionCallingConfig": {"mode": "SOME"}}},
        "toolConfig.functionCallingConfig.mode: unknown mode 'SOME'",
    ),
    ({"contents": [HI], "tools": TOOLS, "toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["f"]}}}, "in mode ANY only"),
    (
        {"contents": [HI], "tools": TOOLS, "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["h"]}}},
        "no function is declared as h",
    ),
    ({"contents": [HI], "generationConfig": {"candidateCount": 2}}, "only one candidate"),
    ({"contents": [HI], "generationConfig": {"temperature": "hot"}}, "generationConfig.temperature must be a number"),
    ({"contents": [HI], "generationConfig": {"topK": 1.5}}, "generationConfig.topK must be a whole number"),
    ({"contents": [HI], "generationConfig": {"maxOutputTokens": True}}, "generationConfig.maxOutputTokens must be a whole number"),
    ({"contents": [HI], "generationConfig": {"stopSequences": [1]}}, "generationConfig.stopSequences[0] must be a string"),
    ({"contents": [HI], "generationConfig": {"responseMimeType": "text/x.enum"}}, "'text/x.enum' is not supported"),
    ({"contents": [HI], "generationConfig": {"responseModalities": ["AUDIO"]}}, "AUDIO is not supported"),
    ({"contents": [HI], "generationConfig": {"speechConfig": {}}}, "speechConfig is not supported"),
    ({"contents": [HI], "generationConfig": {"thinkingConfig": {"thinkingLevel": "ENORMOUS"}}}, "unknown level 'ENORMOUS'"),
    ({"contents": [HI], "generationConfig": {"thinkingConfig": {"includeThoughts": "yes"}}}, "includeThoughts must be true or false"),
]


@pytest.mark.parametrize(("body", "why"), REFUSED)
def test_what_is_unsupported_is_refused_by_name(body, why):
    with pytest.raises(HarnessError) as refused:
        read(body)
    assert why in str(refused.value)
    assert refused.value.status == 400


@pytest.mark.parametrize("depth", [200, 900, 3000, 100_000])
def test_deep_nesting(depth):
    for opening, closing in (("[", "]"), ('{"items":', "}")):
        inner = opening * depth + ("1" if opening == "[" else "{}") + closing * depth
        for body in (
            f'{{"contents":[{{"parts":[{{"text":"hi"}}]}}],"tools":[{{"functionDeclarations":[{{"name":"f","parameters":{inner}}}]}}]}}',
            f'{{"contents":[{{"role":"model","parts":[{{"functionCall":{{"name":"f","args":{{"x":{inner}}}}}}}]}}]}}',
        ):
            with contextlib.suppress(HarnessError):
                read(body.encode())


def test_other_methods_are_not_found():
    for method in ("embedContent", "batchEmbedContents", "predict"):
        with pytest.raises(HarnessError) as refused:
            read({}, f"/v1beta/models/m:{method}")
        assert refused.value.status == 404
        assert method in str(refused.value)


def test_counting():
    for body in ({"contents": [HI]}, {"generateContentRequest": {"model": "models/m", "contents": [HI], "systemInstruction": "s"}}):
        meaning = read(body, "/v1beta/models/m:countTokens")
        assert isinstance(meaning, TokenCount)
        assert json.loads(meaning.body)["messages"][-1] == HI_CHAT
        assert json.loads(meaning.write(12)) == {"totalTokens": 12}


def test_models():
    listed = read(path="/v1beta/models", method="GET")
    assert isinstance(listed, DirectReply)
    assert [model["name"] for model in json.loads(listed.body)["models"]] == ["models/m", "models/Qwen/Qwen3-8B"]
    one = json.loads(read(path="/v1alpha/models/Qwen%2FQwen3-8B", method="GET").body)
    assert one["name"] == "models/Qwen/Qwen3-8B"
    assert json.loads(read(path="/v1beta/models/m", method="GET").body)["inputTokenLimit"] == 4096
    with pytest.raises(HarnessError) as missing:
        read(path="/v1beta/models/none", method="GET")
    assert missing.value.status == 404


@pytest.mark.parametrize(
    ("method", "path", "headers", "ours"),
    [
        ("POST", GENERATE, {}, True),
        ("POST", "/v1alpha/models/m:countTokens", {}, True),
        ("POST", "/v1/models/m:generateContent", {}, True),
        ("GET", "/v1beta/models", {}, True),
        ("GET", "/v1/models", {}, False),
        ("GET", "/v1/models/m", {"x-goog-api-key": "k"}, True),
        ("POST", "/v1beta/models", {}, False),
        ("GET", GENERATE, {}, True),
        ("POST", "/v1/chat/completions", {}, False),
        ("DELETE", "/v1beta/models/m", {}, False),
    ],
)
def test_which_requests_it_matches(method, path, headers, ours):
    assert GeminiDialect().matches(method, path, headers) is ours


def test_the_shape_of_errors():
    said = json.loads(GeminiDialect().error(400, "no", "invalid_request_error", "contents"))
    assert said == {"error": {"code": 400, "message": "no", "status": "INVALID_ARGUMENT"}}
    assert json.loads(GeminiDialect().error(418, "x", "y"))["error"]["status"] == "INVALID_ARGUMENT"
    assert json.loads(GeminiDialect().error(507, "x", "y"))["error"]["status"] == "INTERNAL"


NAMED = (
    "contents role parts text thought functionCall functionResponse id name args response inlineData mimeType data tools type "
    "functionDeclarations parameters properties items anyOf enum generationConfig thinkingConfig toolConfig functionCallingConfig mode "
    "systemInstruction responseSchema responseMimeType thoughtSignature allowedFunctionNames nullable topK $defs"
)
NAMES = st.sampled_from(NAMED.split())
WORDS = st.text(max_size=4) | st.sampled_from(["model", "user", "ANY", "STRING", "\ud800"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | WORDS
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=4))
PARTS = st.lists(st.dictionaries(NAMES, JSON, max_size=2) | JSON, max_size=3)
CONTENTS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "model", None]), "parts": PARTS}), max_size=4)


MORE = st.dictionaries(NAMES, JSON, max_size=5)


@settings(max_examples=examples(200))
@given(MORE | st.builds(lambda contents, more: {**more, "contents": contents}, CONTENTS, MORE))
def test_any_request_is_parsed_or_refused(body):
    for method in ("generateContent", "countTokens"):
        with contextlib.suppress(HarnessError):
            json.loads(read(body, f"/v1beta/models/m:{method}").body)

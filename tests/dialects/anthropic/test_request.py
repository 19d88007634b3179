"""Anthropic requests: a table of conversations, compared with the same conversation in chat; then the other members."""

import json
import re

import pytest

from tests.dialects.anthropic.kit import HANDLE, OTHER, chat_of, digests, read
from tokencache.dialects.base import ModelCall, TokenCount
from tokencache.errors import HarnessError

MARK = {"cache_control": {"type": "ephemeral"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}


def text(words, **more):
    return {"type": "text", "text": words, **more}


def use(call="c1", given=None, name="bash"):
    return {"type": "tool_use", "id": call, "name": name, "input": given}


def called(call="c1", arguments="{}", name="bash"):
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call="c1", **content):
    return {"type": "tool_result", "tool_use_id": call, **content}


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def said(*blocks):
    return {"role": "assistant", "content": list(blocks)}


HI = {"role": "user", "content": "hi"}
CONVERSATIONS = {
    "a string": (None, [HI], [HI]),
    "a system prompt": ("Be terse.", [HI], [{"role": "system", "content": "Be terse."}, HI]),
    "no system prompt": ("", [HI], [HI]),
    "system blocks are joined with nothing": (
        [text("Be"), text(" terse.", **MARK)],
        [HI],
        [{"role": "system", "content": "Be terse."}, HI],
    ),
    "a billing block goes": (
        [text("x-anthropic-billing-header: cc_version=2.1; cch=1"), text("Be terse.")],
        [HI],
        [{"role": "system", "content": "Be terse."}, HI],
    ),
    "a billing line goes": ("x-anthropic-billing-header: a\nBe terse.", [HI], [{"role": "system", "content": "Be terse."}, HI]),
    "system in the middle": (
        None,
        [HI, {"role": "system", "content": [text("It is "), text("May.")]}, {"role": "system", "content": "x-anthropic-billing-header: b"}],
        [HI, {"role": "system", "content": "It is May."}],
    ),
    "a lone block": (None, [user(text("hi", **MARK))], [HI]),
    "two blocks": (None, [user(text("a"), text(""), text("b"))], [{"role": "user", "content": [text("a"), text("b")]}]),
    "nothing said": (None, [user(), user(text("")), {"role": "user", "content": None}], [{"role": "user", "content": ""}]),
    "an image": (None, [user(text("see"), IMAGE)], [{"role": "user", "content": [text("see"), IMAGE_PART]}]),
    "an image by URL": (
        None,
        [user({"type": "image", "source": {"type": "url", "url": "https://a/b.png"}})],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}]}],
    ),
    "a document that is text": (
        None,
        [user({"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "hi"}})],
        [HI],
    ),
    "a document of blocks": (
        None,
        [user({"type": "document", "source": {"type": "content", "content": [text("a"), IMAGE]}})],
        [{"role": "user", "content": [text("a"), IMAGE_PART]}],
    ),
    "an assistant's string": (None, [HI, {"role": "assistant", "content": " yes\n"}], [HI, {"role": "assistant", "content": " yes\n"}]),
    "a whole turn": (
        None,
        [HI, said({"type": "thinking", "thinking": "hm", "signature": "s"}, text("I look."), use(given={"a": 1.5, "é": ["☕"]}))],
        [HI, {"role": "assistant", "reasoning": "hm", "content": "I look.", "tool_calls": [called(arguments='{"a":1.5,"é":["☕"]}')]}],
    ),
    "a turn that was taken apart": (
        None,
        [
            said({"type": "thinking", "thinking": "a"}, text("One, "), use("c1", {}), {"type": "thinking", "thinking": "b"}),
            said(text("two."), {"type": "redacted_thinking", "data": "xx"}, use("c2")),
        ],
        [{"role": "assistant", "reasoning": "ab", "content": "One, two.", "tool_calls": [called("c1"), called("c2")]}],
    ),
    "an empty turn": (None, [HI, said()], [HI, {"role": "assistant", "content": ""}]),
    "arguments that are no object": (
        None,
        [said(use("c1", [1]), use("c2", "x"), use("c3", {"__unparsed_arguments": '{"a": oops'}))],
        [{"role": "assistant", "tool_calls": [called("c1", "[1]"), called("c2", '"x"'), called("c3", '{"a": oops')]}],
    ),
    "what only looks wrapped": (
        None,
        [said(use("c1", {"__unparsed_arguments": 1}))],
        [{"role": "assistant", "tool_calls": [called("c1", '{"__unparsed_arguments":1}')]}],
    ),
    "results in every shape": (
        None,
        [
            user(
                text("before"),
                result("c1", content="ok", is_error=True),
                result("c2"),
                result("c3", content=[text("a"), text(""), text("b", **MARK)]),
                text("after"),
            )
        ],
        [
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
            {"role": "tool", "tool_call_id": "c2", "content": ""},
            {"role": "tool", "tool_call_id": "c3", "content": "a\n\nb"},
            {"role": "user", "content": [text("before"), text("after")]},
        ],
    ),
    "a result with an image": (
        None,
        [user(result("c1", content=[text("shot"), IMAGE]), result("c2", content=[]))],
        [
            {"role": "tool", "tool_call_id": "c1", "content": "shot"},
            {"role": "user", "content": [IMAGE_PART]},
            {"role": "tool", "tool_call_id": "c2", "content": ""},
        ],
    ),
    "parallel results with images only, as Claude Code sends them": (
        None,
        [user(result("c1", content=[IMAGE]), result("c2", content=[IMAGE, IMAGE]), text("[Image: original 9x9]"))],
        [
            {"role": "tool", "tool_call_id": "c1", "content": ""},
            {"role": "user", "content": [IMAGE_PART]},
            {"role": "tool", "tool_call_id": "c2", "content": ""},
            {"role": "user", "content": [IMAGE_PART, IMAGE_PART]},
            {"role": "user", "content": "[Image: original 9x9]"},
        ],
    ),
    "a result that names tools": (
        None,
        [user(result("c1", content=[{"type": "tool_reference", "tool_name": "grep"}]))],
        [
            {"role": "tool", "tool_call_id": "c1", "content": ""},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "tool_reference", "name": "grep"}]},
        ],
    ),
    "references as vLLM reads them: by either name, and nowhere else": (
        [text("Hi."), {"type": "tool_reference", "tool_name": "grep"}],
        [
            user(
                {"type": "tool_reference", "tool_name": "grep"},
                result("c1", content=[text("found"), {"type": "tool_reference", "name": "grep"}, {"type": "tool_reference"}]),
            ),
            said(text("so"), {"type": "tool_reference", "tool_name": "grep"}),
        ],
        [
            {"role": "system", "content": "Hi."},
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "tool_reference", "name": "grep"}]},
            {"role": "assistant", "content": "so"},
        ],
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_a_conversation_is_equal_in_both_dialects(name):
    system, messages, expected = CONVERSATIONS[name]
    got = (await chat_of(messages=messages, **({} if system is None else {"system": system})))["messages"]
    assert got == expected
    assert digests(got) == digests(expected)


async def test_messages_come_first_for_incremental_parsing():
    """So a body is read from where the session's last one ended (`dialects.chat.incremental`)."""
    first = (await read({"stream": True, "max_tokens": 1, "model": "m", "messages": [user(text("a", **MARK))]})).body
    later = (await read({"model": "m", "max_tokens": 2, "messages": [user(text("a")), said(text("b")), user(text("c", **MARK))]})).body
    head = first[: first.index(b"]")]
    assert head.startswith(b'{"messages":[{"role":"user"')
    assert later.startswith(head)


@pytest.mark.parametrize(
    ("blocks", "handles"),
    [
        ([said({"type": "thinking", "thinking": "a", "signature": HANDLE}, text("b"))], {1: HANDLE}),
        ([said({"type": "thinking", "thinking": "a", "signature": "EqQBCkYIBBgCKkA="})], {}),
        ([said({"type": "thinking", "thinking": "a", "signature": 7})], {}),
        ([said({"type": "thinking", "signature": HANDLE}, text("b"))], {1: HANDLE}),
        ([said({"type": "thinking", "thinking": None}, text("b"))], {}),
        (
            [
                said(
                    {"type": "thinking", "thinking": "a", "signature": HANDLE},
                    use(),
                    {"type": "thinking", "thinking": "b", "signature": HANDLE},
                )
            ],
            {1: HANDLE},
        ),
        (  # neighbours were merged by the client
            [
                said(
                    {"type": "thinking", "thinking": "a", "signature": HANDLE},
                    text("b"),
                    {"type": "thinking", "thinking": "c", "signature": OTHER},
                )
            ],
            {1: HANDLE, 2: OTHER},
        ),
        ([said(text("a summary")), said({"type": "thinking", "thinking": "c", "signature": OTHER}, text("d"))], {2: OTHER}),
        ([said(text("a")), said(text("b")), HI, said({"type": "thinking", "thinking": "", "signature": OTHER})], {3: OTHER}),
    ],
)
async def test_handles_are_found_by_index(blocks, handles):
    spoken = await read({"model": "m", "max_tokens": 9, "messages": [HI, *blocks]})
    assert isinstance(spoken, ModelCall)
    assert dict(spoken.handles) == handles
    roles = [message["role"] for message in json.loads(spoken.body)["messages"]]
    assert all(roles[place] == "assistant" for place in handles)


@pytest.mark.parametrize(
    ("members", "left_out"),
    [
        ({"messages": [HI]}, ()),
        ({"messages": [user(text("a", **MARK))]}, ("cache-marks",)),
        ({"messages": [user(result(content=[text("a", **MARK)]))]}, ("cache-marks",)),
        ({"messages": [HI], "tools": [{"name": "t", "input_schema": {}, **MARK}]}, ("cache-marks",)),
        ({"messages": [HI], **MARK}, ("cache-marks",)),
        ({"messages": [HI], "system": [text("x-anthropic-billing-header: a", **MARK)]}, ("billing-line", "cache-marks")),
        ({"messages": [HI], "system": "x-anthropic-billing-header: a"}, ("billing-line",)),
    ],
)
async def test_rules_for_left_out_parts_are_named(members, left_out):
    assert (await read({"model": "m", "max_tokens": 9, **members})).left_out == left_out


@pytest.mark.parametrize(
    "block",
    [
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}},
        {"type": "search_result", "source": "u", "title": "t", "content": [text("x")]},
        {"type": "document", "source": {"type": ["text"]}},
    ],
)
async def test_what_no_chat_shows_of_a_result_is_left_out(block):
    """As vLLM does: Claude Code's `Read` returns PDFs, and a refusal would end the rollout."""
    call = await read({"model": "m", "max_tokens": 9, "messages": [HI, said(use()), user(result(content=[text("PDF file read"), block]))]})
    assert json.loads(call.body)["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "PDF file read"}
    assert call.left_out == ("result-parts",)


SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}
TOOL = {"name": "bash", "description": "Run", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "function": {"name": "bash", "description": "Run", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
MEMBERS = [
    ({}, {"max_tokens": 9}),
    (
        {"temperature": 1, "top_p": 0.5, "top_k": 3, "stop_sequences": ["a"]},
        {"max_tokens": 9, "temperature": 1, "top_p": 0.5, "top_k": 3, "stop": ["a"]},
    ),
    (  # as vLLM reads numbers
        {"max_tokens": "5", "temperature": "0.5", "top_k": 3.0, "thinking": {"type": "enabled", "budget_tokens": "2048"}},
        {"max_tokens": 5, "temperature": 0.5, "top_k": 3, "thinking_token_budget": 2048},
    ),
    ({"stop_sequences": [], "temperature": None, "tools": [], "tool_choice": {"type": "auto"}}, {"max_tokens": 9}),
    ({"metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": {"edits": []}, "wibble": 1}, {"max_tokens": 9}),
    ({"stream": True}, {"max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}),
    ({"stream": False}, {"max_tokens": 9}),
    ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, {"max_tokens": 9, "thinking_token_budget": 2048}),
    ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}}, {"max_tokens": 9, "reasoning_effort": "xhigh"}),
    ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, {"max_tokens": 9, "reasoning_effort": "none"}),
    (
        {"output_config": {"format": FORMAT}},
        {"max_tokens": 9, "response_format": {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": SCHEMA}}},
    ),
    (
        {"output_format": FORMAT},
        {"max_tokens": 9, "response_format": {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": SCHEMA}}},
    ),
    ({"tools": [{**TOOL, "type": "custom", **MARK}]}, {"max_tokens": 9, "tools": [FUNCTION]}),
    (
        {"tools": [{"name": "t", "input_schema": {}, "strict": True, "defer_loading": True}]},
        {
            "max_tokens": 9,
            "tools": [
                {"type": "function", "function": {"name": "t", "parameters": {"type": "object"}, "strict": True, "defer_loading": True}}
            ],
        },
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, {"max_tokens": 9, "tools": [FUNCTION], "tool_choice": "auto"}),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {"max_tokens": 9, "tools": [FUNCTION], "tool_choice": "required"}),
    ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"max_tokens": 9, "tools": [FUNCTION], "tool_choice": "none"}),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "bash", "disable_parallel_tool_use": True}},
        {
            "max_tokens": 9,
            "tools": [FUNCTION],
            "tool_choice": {"type": "function", "function": {"name": "bash"}},
            "parallel_tool_calls": False,
        },
    ),
    ({"chat_template_kwargs": {"enable_thinking": False}}, {"max_tokens": 9, "chat_template_kwargs": {"enable_thinking": False}}),
]


@pytest.mark.parametrize(("given", "expected"), MEMBERS)
async def test_members(given, expected):
    assert await chat_of(messages=[HI], **given) == {"messages": [HI], "model": "m", **expected}


async def test_a_count_has_the_same_prompt():
    asked = {"model": "m", "messages": [HI], "system": "s", "tools": [TOOL], "thinking": {"type": "disabled"}}
    counting = await read(asked, path="/v1/messages/count_tokens")
    assert isinstance(counting, TokenCount)
    called_for = json.loads((await read({**asked, "max_tokens": 9})).body)
    del called_for["max_tokens"]
    assert json.loads(counting.body) == called_for
    assert json.loads(counting.write(17)) == {"input_tokens": 17}


def _changed(kind, **tool):
    return {"type": kind, "tool": tool}


def _by_name(kind, name):
    return _changed(kind, type="tool_reference", name=name)


def _defined(name):
    return _changed("tool_addition", type="tool_definition", definition={"name": name, "input_schema": {}, "defer_loading": True})


CHANGES = {
    "added by name: no longer deferred": ([_by_name("tool_addition", "b")], [("a", None), ("b", None)]),
    "removed": ([_by_name("tool_removal", "a")], [("b", True)]),
    "added with a definition: at the end": ([_defined("c")], [("a", None), ("b", True), ("c", True)]),
    "defined anew: in its place": ([_defined("a")], [("a", True), ("b", True)]),
    "removed and added again": ([_by_name("tool_removal", "a"), _by_name("tool_addition", "a")], [("a", None), ("b", True)]),
    "added and removed": ([_defined("c"), _by_name("tool_removal", "c")], [("a", None), ("b", True)]),
    "all removed": ([_by_name("tool_removal", "a"), _by_name("tool_removal", "b")], None),
}
"""Changes, and the tools that vLLM 0.32 (`_resolve_tools`) leaves: names, and whether they are deferred."""
DECLARED = [{"name": "a", "input_schema": {}}, {"name": "b", "input_schema": {}, "defer_loading": True}]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("apart", [True, False])
async def test_changes_of_tools_are_resolved_as_vllm_resolves_them(name, apart):
    blocks, expected = CHANGES[name]
    system = [{"role": "system", "content": [block]} for block in blocks] if apart else [{"role": "system", "content": blocks}]
    chat = await chat_of(messages=[HI, *system, user(text("Go"))], tools=DECLARED)
    assert [entry["role"] for entry in chat["messages"]] == ["user", "user"], "a message without text is no message"
    found = [(tool["function"]["name"], tool["function"].get("defer_loading")) for tool in chat.get("tools", ())]
    assert found == (expected or [])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"role": "system", "content": [_by_name("tool_addition", "z")]},
            "messages.1.content.0.tool.name: tool_addition references tool 'z', which is not declared in tools",
        ),
        (
            {"role": "system", "content": [_changed("tool_removal", type="tool_definition", definition=DECLARED[0])]},
            "messages.1.content.0.tool.type: a tool_removal cannot have a tool of type 'tool_definition'",
        ),
        ({"role": "system", "content": [{"type": "tool_removal"}]}, "messages.1.content.0.tool: Field required"),
        (
            user(_by_name("tool_addition", "b")),
            'messages.1.content.0.type: tool_addition blocks are only allowed in messages with role "system"',
        ),
        (
            said(_by_name("tool_removal", "b")),
            'messages.1.content.0.type: tool_removal blocks are only allowed in messages with role "system"',
        ),
    ],
)
async def test_changes_of_tools_that_vllm_refuses_are_refused(entry, message):
    with pytest.raises(HarnessError, match="^" + re.escape(message)):
        await chat_of(messages=[HI, entry], tools=DECLARED)


REFUSED = {
    "model: Field required": {"model": None},
    "model: Input should be a valid string": {"model": 5},
    "messages: Field required": {"messages": None},
    "messages: Input should be a valid list": {"messages": "hi"},
    "max_tokens: Field required": {"max_tokens": None},
    "max_tokens: Input should be a valid integer": {"max_tokens": True},
    "temperature: Input should be a valid number": {"temperature": "hot"},
    "stream: Input should be a valid boolean": {"stream": 1},
    "stop_sequences: Input should be a list of valid strings": {"stop_sequences": ["a", 1]},
    "messages.0: Input should be a valid dictionary": {"messages": ["hi"]},
    "messages.0.role: Input should be 'user', 'assistant' or 'system', not 'tool'": {"messages": [{"role": "tool", "content": "x"}]},
    "messages.0.content: Input should be a valid string or list of content blocks": {"messages": [{"role": "user", "content": 5}]},
    "messages.0.content.0: Input should be a valid dictionary": {"messages": [user("hi")]},
    "messages.0.content.0.type: Field required": {"messages": [user({"text": "hi"})]},
    "messages.0.content.0.text: Field required": {"messages": [user({"type": "text", "text": None})]},
    "messages.0.content.0.type: content blocks of type 'tool_use' are not supported here": {"messages": [user(use())]},
    "messages.0.content.1.type: content blocks of type 'server_tool_use' are not supported here": {
        "messages": [said(text("a"), {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}})]
    },
    "messages.0.content.0.type: content blocks of type 'web_search_tool_result' are not supported here": {
        "messages": [said({"type": "web_search_tool_result", "tool_use_id": "s", "content": []})]
    },
    "messages.0.content.0.type: content blocks of type 'tool_result' are not supported here": {"messages": [said(result())]},
    "messages.0.content.0.type: content blocks of type 'search_result' are not supported here": {
        "messages": [user({"type": "search_result"})]
    },
    "messages.0.content.0.source.type: documents of type 'base64' are not supported here; plain text is": {
        "messages": [user({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}})]
    },
    "messages.0.content.0.source.content.0.type: content blocks of type 'document' are not supported here": {
        "messages": [user({"type": "document", "source": {"type": "content", "content": [{"type": "document"}]}})]
    },
    "messages.0.content.0.source.type: images of type 'file' are not supported here; 'base64' and 'url' are": {
        "messages": [user({"type": "image", "source": {"type": "file", "file_id": "f"}})]
    },
    "messages.0.content.0.tool_use_id: Field required": {"messages": [user({"type": "tool_result"})]},
    "messages.0.content.0.id: Field required": {"messages": [said({"type": "tool_use", "name": "bash"})]},
    "system.0.type: content blocks of type 'image' are not supported here": {"system": [IMAGE]},
    "tools.0: Input should be a valid dictionary": {"tools": ["bash"]},
    "tools.0.input_schema: Field required": {"tools": [{"name": "bash"}]},
    "tools.0.input_schema: Input should be a valid dictionary": {"tools": [{"name": "bash", "input_schema": []}]},
    "output_config.format.schema: Input should be a valid dictionary": {"output_config": {"format": {"type": "json_schema", "schema": 5}}},
    "tools.0.type: tools of type 'web_search_20250305' are not supported here: only those with an 'input_schema' of their own": {
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]
    },
    "tool_choice.type: Input should be 'auto', 'any', 'tool' or 'none', not 'some'": {"tools": [TOOL], "tool_choice": {"type": "some"}},
    "tool_choice.type: Input should be a valid string": {"tool_choice": {"type": ["auto"]}},
    "tool_choice.tool.name: Field required": {"tools": [TOOL], "tool_choice": {"type": "tool"}},
    "mcp_servers: MCP servers that the API itself connects to are not supported here": {"mcp_servers": [{"type": "url"}]},
    "thinking.enabled.budget_tokens: Field required": {"thinking": {"type": "enabled"}},
    "output_config.effort: Input should be a valid string": {"output_config": {"effort": 3}},
}


@pytest.mark.parametrize("message", REFUSED)
async def test_unsupported_members_are_refused_by_name(message):
    with pytest.raises(HarnessError) as refused:
        await chat_of(**{"messages": [HI], **REFUSED[message]})
    assert str(refused.value) == message
    assert refused.value.status == 400
    assert refused.value.param == message.partition(": ")[0]

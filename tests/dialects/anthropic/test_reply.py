"""Anthropic replies: exact events for sequences of chunks, whole replies, and what comes back of both in the next turn."""

import json

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.dialects.anthropic.kit import HANDLE, call, chat_of, chunk, completion, digests, events, streamed, usage
from tokencache.dialects.anthropic.reply import AnthropicReplyEncoder

EVENT = TypeAdapter(RawMessageStreamEvent)
ROLE = chunk({"role": "assistant", "content": ""})
USED = {"input_tokens": 12, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 5}
START = {
    "type": "message_start",
    "message": {
        "id": f"msg_{HANDLE}",
        "type": "message",
        "role": "assistant",
        "model": "claude-x",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**USED, "output_tokens": 0},
    },
}
PING = {"type": "ping"}
LS = '{"cmd": "ls  -la"}'


def finish(reason="stop", stop=None, delta=None):
    return chunk(delta, finish_reason=reason, stop_reason=stop)


def begun(index, kind, **empty):
    return {"type": "content_block_start", "index": index, "content_block": {"type": kind, **empty}}


def delta(index, kind, words):
    name = {"input_json_delta": "partial_json"}.get(kind, kind.removesuffix("_delta"))
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: words}}


def stopped(index):
    return {"type": "content_block_stop", "index": index}


def thinking(index, *words):
    spoken = [delta(index, "thinking_delta", word) for word in words]
    return [begun(index, "thinking", thinking="", signature=""), *spoken, delta(index, "signature_delta", HANDLE), stopped(index)]


def texts(index, *words):
    return [begun(index, "text", text=""), *(delta(index, "text_delta", word) for word in words), stopped(index)]


def tool(index, call_id, *pieces, name="bash"):
    begins = begun(index, "tool_use", id=call_id, name=name, input={})
    return [begins, *(delta(index, "input_json_delta", piece) for piece in pieces), stopped(index)]


def over(reason, sequence=None, **counts):
    return [
        {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": {**USED, **counts}},
        {"type": "message_stop"},
    ]


STREAMS = {
    "text": (
        [ROLE, chunk({"content": "One, "}), chunk(), chunk({"content": "two."}), finish(), usage()],
        [*texts(0, "One, ", "two."), *over("end_turn")],
    ),
    "thinking, text, call": (
        [
            ROLE,
            chunk({"reasoning": "\nI look"}),
            chunk({"reasoning": ".\n"}),
            chunk({"content": "\n\nLet me"}),
            chunk(call(0, id="c1", name="bash")),
            chunk(call(0, LS[:7])),
            chunk(call(0, LS[7:])),
            finish("tool_calls"),
            usage(),
        ],
        [*thinking(0, "\nI look", ".\n"), *texts(1, "\n\nLet me"), *tool(2, "c1", LS[:7], LS[7:]), *over("tool_use")],
    ),
    "reasoning under its old name": (
        [ROLE, chunk({"reasoning_content": "hm"}), finish(), usage()],
        [*thinking(0, "hm"), *over("end_turn")],
    ),
    "parallel calls": (
        [
            ROLE,
            chunk(call(0, LS, id="c1", name="bash")),
            chunk(call(1, id="c2", name="bash")),
            chunk(call(1, "{}")),
            finish("tool_calls"),
            usage(),
        ],
        [*tool(0, "c1", LS), *tool(1, "c2", "{}"), *over("tool_use")],
    ),
    "parallel calls in one chunk": (
        [
            ROLE,
            chunk({"tool_calls": call(0, LS, id="c1", name="bash")["tool_calls"] + call(1, "{}", id="c2", name="bash")["tool_calls"]}),
            finish("tool_calls"),
            usage(),
        ],
        [*tool(0, "c1", LS), *tool(1, "c2", "{}"), *over("tool_use")],
    ),
    "parallel calls interleaved": (
        [
            ROLE,
            chunk(call(0, id="c1", name="bash")),
            chunk(call(1, id="c2", name="bash")),
            chunk(call(1, "{}")),
            chunk(call(0, LS)),
            finish("tool_calls"),
            usage(),
        ],
        [
            begun(0, "tool_use", id="c1", name="bash", input={}),
            begun(1, "tool_use", id="c2", name="bash", input={}),
            delta(1, "input_json_delta", "{}"),
            delta(0, "input_json_delta", LS),
            stopped(0),
            stopped(1),
            *over("tool_use"),
        ],
    ),
    "text behind a call": (
        [ROLE, chunk({"content": "a"}), chunk(call(0, "{}", id="c1", name="bash")), chunk({"content": "b"}), finish("tool_calls"), usage()],
        [*texts(0, "a"), *tool(1, "c1", "{}"), *texts(2, "b"), *over("tool_use")],
    ),
    "thinking again": (
        [ROLE, chunk({"reasoning": "a"}), chunk({"content": "b"}), chunk({"reasoning": "c", "content": "d"}), finish(), usage()],
        [*thinking(0, "a"), *texts(1, "b"), *thinking(2, "c"), *texts(3, "d"), *over("end_turn")],
    ),
    "cut off, words in the last chunk": (
        [ROLE, chunk({"reasoning": "I"}), finish("length", delta={"reasoning": " list"}), usage()],
        [*thinking(0, "I", " list"), *over("max_tokens")],
    ),
    "cut off within a call": (
        [ROLE, chunk(call(0, '{"cm', id="c1", name="bash")), finish("length"), usage()],
        [*tool(0, "c1", '{"cm'), *over("max_tokens")],
    ),
    "arguments that are no object": (
        [
            ROLE,
            chunk(call(0, " [1", id="c1", name="bash")),
            chunk(call(0, "]")),
            chunk(call(1, '"{}', id="c2", name="bash")),
            chunk(call(1, '"')),
            chunk(call(2, LS, id="c3", name="bash")),
            finish("tool_calls"),
            usage(),
        ],
        [
            *tool(0, "c1", '{"__unparsed_arguments":" [1]"}'),
            *tool(1, "c2", '{"__unparsed_arguments":"\\"{}\\""}'),
            *tool(2, "c3", LS),
            *over("tool_use"),
        ],
    ),
    "a stop string": ([ROLE, chunk({"content": "a"}), finish("stop", "HERE"), usage()], [*texts(0, "a"), *over("stop_sequence", "HERE")]),
    "a stop string behind a whole call": (
        [ROLE, chunk(call(0, "{}", id="c1", name="bash")), finish("tool_calls", "HERE"), usage()],
        [*tool(0, "c1", "{}"), *over("tool_use")],
    ),
    "a stop string within a call": (
        [ROLE, chunk(call(0, '{"a', id="c1", name="bash")), finish("tool_calls", "HERE"), usage()],
        [*tool(0, "c1", '{"a'), *over("stop_sequence", "HERE")],
    ),
    "a stop id": ([ROLE, chunk({"content": "a"}), finish("stop", 11), usage()], [*texts(0, "a"), *over("end_turn")]),
    "a named tool": (
        [ROLE, chunk(call(0, "{}", id="c1", name="bash")), finish("stop"), usage()],
        [*tool(0, "c1", "{}"), *over("tool_use")],
    ),
    "refused": ([ROLE, chunk({"content": "a"}), finish("content_filter"), usage()], [*texts(0, "a"), *over("refusal")]),
    "aborted": ([ROLE, chunk({"content": "a"}), finish("abort"), usage()], [*texts(0, "a"), *over(None)]),
    "nothing": ([ROLE, chunk(), finish(), usage()], [*texts(0), *over("end_turn")]),
    "cached": (
        [ROLE, chunk({"content": "a"}), finish(), usage(cached_tokens=8)],
        [*texts(0, "a"), *over("end_turn", input_tokens=4, cache_read_input_tokens=8)],
    ),
    "no usage": ([ROLE, chunk({"content": "a"}), finish()], [*texts(0, "a"), *over("end_turn", input_tokens=0, output_tokens=0)]),
    "other choices": (
        [ROLE, chunk({"content": "x"}, index=1), chunk({"content": "a"}), finish(), usage()],
        [*texts(0, "a"), *over("end_turn")],
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream(name):
    chunks, expected = STREAMS[name]
    assert events(streamed(chunks)) == [START, PING, *expected]
    for event in [START, *expected]:
        EVENT.validate_python(event)


@pytest.mark.parametrize("name", STREAMS)
def test_each_chunk_is_sent_at_once(name):
    """What was said up to any chunk is the beginning of the whole; nothing that a chunk brought is held back."""
    chunks, _ = STREAMS[name]
    whole, words = streamed(chunks), ""
    for cut in range(1, len(chunks) + 1):
        early = streamed(chunks[:cut], done=False)
        assert whole.startswith(early)
        for choice in json.loads(chunks[cut - 1])["choices"]:
            if choice["index"] == 0:
                words = (choice["delta"].get("content") or "")[-4:]
        assert json.dumps(words, ensure_ascii=False)[1:-1] in early.decode()


def accumulated(found):
    """The message that a client puts together."""
    message = json.loads(json.dumps(found[0]["message"]))
    for event in found:
        match event["type"]:
            case "content_block_start":
                message["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                block, said = message["content"][event["index"]], dict(event["delta"])
                kind = said.pop("type")
                name, words = said.popitem()
                name = "raw" if kind == "input_json_delta" else name
                block[name] = block.get(name, "") + words
            case "message_delta":
                message.update(event["delta"], usage=event["usage"])
    for block in message["content"]:
        if "raw" in block:
            block["input"] = json.loads(block.pop("raw"))
    return message


WHOLES = {
    "text": {"content": "One, two."},
    "thinking, text, call": {"reasoning": "\nI look.\n", "content": "\n\nLet me", "tool_calls": [("c1", LS)]},
    "parallel calls": {"content": None, "tool_calls": [("c1", LS), ("c2", "{}")]},
    "a named tool": {"content": None, "tool_calls": [("c1", "{}")]},
    "arguments that are no object": {"content": None, "tool_calls": [("c1", " [1]"), ("c2", '"{}"'), ("c3", LS)]},
    "nothing": {"content": None},
    "cached": {"content": "a"},
    "cut off, words in the last chunk": {"content": None, "reasoning": "I list"},
    "a stop string": {"content": "a"},
    "refused": {"content": "a"},
    "aborted": {"content": "a"},
}


def message_of(said):
    calls = [{"id": i, "type": "function", "function": {"name": "bash", "arguments": a}} for i, a in said.get("tool_calls", ())]
    return {"role": "assistant", **said, **({"tool_calls": calls} if calls else {})}


@pytest.mark.parametrize("name", WHOLES)
def test_a_whole_reply_equals_its_accumulated_stream(name):
    chunks, _ = STREAMS[name]
    last = next(choice for data in reversed(chunks) for choice in json.loads(data)["choices"])
    details = {"cached_tokens": 8} if name == "cached" else {}
    data = completion(message_of(WHOLES[name]), last["finish_reason"], last["stop_reason"], **details)
    whole = json.loads(AnthropicReplyEncoder("claude-x", HANDLE).whole(data))
    assert whole == accumulated(events(streamed(chunks)))
    Message.model_validate(whole)


SERVED = [
    {"content": " One\n"},
    {
        "reasoning": "hm",
        "content": "\n\nI look",
        "tool_calls": [("c1", '{"timeout": 10.0, "cmd": "a\\u00e9\\ud800/", "n": 12345678901234567890}')],
    },
    {"content": None, "tool_calls": [("c1", ""), ("c2", '{"a": 1, "a": 2}')]},
    {
        "content": "x",
        "tool_calls": [("c1", '{"cmd": oops}}'), ("c2", "[1]"), ("c3", '"x"'), ("c4", "null"), ("c5", '{"a": NaN}'), ("c6", '{"cm')],
    },
    {"reasoning": "only", "content": None},
    {"content": None},
]


@pytest.mark.parametrize("said", SERVED)
async def test_an_echoed_whole_reply_equals_the_original(said):
    """Whole answers, sent back as they are: the same digest as the engine's message, whatever its arguments are."""
    served = message_of(said)
    answer = json.loads(AnthropicReplyEncoder("m", HANDLE).whole(completion(served)))
    assert all(isinstance(block["input"], dict) for block in answer["content"] if block["type"] == "tool_use")
    back = (await chat_of(messages=[{"role": "assistant", "content": answer["content"]}]))["messages"]
    assert digests(back) == digests([served])


@pytest.mark.parametrize("name", [n for n in STREAMS if not n.endswith("within a call")])
async def test_an_echoed_stream_equals_the_original(name):
    chunks, _ = STREAMS[name]
    choices = [choice["delta"] for data in chunks for choice in json.loads(data)["choices"] if choice["index"] == 0]
    calls = {}
    for piece in (piece for said in choices for piece in said.get("tool_calls") or ()):
        made = calls.setdefault(piece["index"], {"id": piece.get("id"), "function": {"name": "bash", "arguments": ""}})
        made["function"]["arguments"] += piece["function"].get("arguments", "")
    served = {"role": "assistant", "content": "".join(said.get("content") or "" for said in choices), "tool_calls": list(calls.values())}
    back = accumulated(events(streamed(chunks)))["content"]
    assert digests((await chat_of(messages=[{"role": "assistant", "content": back}]))["messages"]) == digests([served])


def test_engine_members_are_hidden():
    for out in (streamed(STREAMS["thinking, text, call"][0]), AnthropicReplyEncoder("m", HANDLE).whole(completion({"content": "a"}))):
        for word in (b"token_ids", b"logprobs", b"chatcmpl", b'"engine"'):
            assert word not in out


FAILURE = {"type": "error", "error": {"type": "api_error", "message": "Internal server error"}}


@pytest.mark.parametrize("before", [[], [ROLE], [ROLE, chunk({"content": "a"})]])
def test_an_engines_error_ends_the_stream(before):
    error = b'{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}'
    assert events(streamed([*before, error, chunk({"content": "b"})]))[-1] == FAILURE


def test_an_error_of_the_proxy_within_a_stream():
    encoder = AnthropicReplyEncoder("m", HANDLE)
    said = events(encoder.error(503, "the store failed"))
    assert said == [{"type": "error", "error": {"type": "overloaded_error", "message": "the store failed"}}]
    assert encoder.end() == b""


def test_a_stream_without_an_end_is_an_error():
    assert events(streamed([ROLE, chunk({"content": "a"})]))[-1]["type"] == "error"


@pytest.mark.parametrize("data", [b"", b"oops", b"[]", b"{}", b'{"choices":5}', b'{"choices":[{"delta":5}]}', b"[" * 9000])
def test_what_is_not_a_chunk_is_dropped(data):
    kinds = {event["type"] for event in events(streamed([data], done=False))}
    assert kinds <= {"message_start", "ping"}
    assert AnthropicReplyEncoder("m", HANDLE).whole(data) == data


def test_keep_alive_is_a_ping():
    assert events(AnthropicReplyEncoder("m", HANDLE).keep_alive()) == [PING]
    assert AnthropicReplyEncoder("m", HANDLE).documents() == {}

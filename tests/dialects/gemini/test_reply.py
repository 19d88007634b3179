"""Gemini replies: chat chunks → responses, whole and streamed; what clients send back is the message that they got."""

import json

import pytest
from google.genai import types
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dialects.gemini.kit import HANDLE, STREAM, chat_of, chunks, completion, digests, merged, read, served
from tests.support.profiles import examples
from tokencache.core.messages import digest
from tokencache.dialects.gemini.reply import GeminiReplyEncoder

SIGNED = {"thoughtSignature": HANDLE}
PLAIN_USAGE = {"promptTokenCount": 9, "candidatesTokenCount": 7, "totalTokenCount": 16}


def encoder(*, thoughts=True, sse=True):
    return GeminiReplyEncoder(model="as-written", handle=HANDLE, shows_thoughts=thoughts, sse=sse)


def tool(index, call_id=None, name=None, arguments=None):
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"index": index, "function": function} | ({"id": call_id, "type": "function"} if call_id else {})


def calls(*items):
    return {"content": None, "tool_calls": list(items)}


def whole_call(call_id, name, arguments):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def shown(call_id, name, args, **more):
    return {"functionCall": {"id": call_id, "name": name, "args": args}, **more}


# name → deltas, the whole message, finish reason, parts with thoughts, Gemini's reason
REPLIES = {
    "text": ([{"content": "Hel"}, {"content": "lo"}], {"content": "Hello"}, "stop", [{"text": "Hello", **SIGNED}], "STOP"),
    "thought and text": (
        [{"reasoning": "h"}, {"reasoning": "m"}, {"content": "☕"}],
        {"content": "☕", "reasoning": "hm"},
        "stop",
        [{"text": "hm", "thought": True}, {"text": "☕", **SIGNED}],
        "STOP",
    ),
    "both in one delta": (
        [{"reasoning_content": "hm", "content": "x"}],
        {"content": "x", "reasoning": "hm"},
        "stop",
        [{"text": "hm", "thought": True}, {"text": "x", **SIGNED}],
        "STOP",
    ),
    "a call in pieces": (
        [
            {"content": "look"},
            calls(tool(0, "c1", "bash")),
            calls(tool(0, arguments='{"cmd" : "ls",')),
            calls(tool(0, arguments='\n "n": 1.50}')),
        ],
        {"content": "look", "tool_calls": [whole_call("c1", "bash", '{"cmd" : "ls",\n "n": 1.50}')]},
        "tool_calls",
        [{"text": "look", **SIGNED}, shown("c1", "bash", {"cmd": "ls", "n": 1.5}, **SIGNED)],
        "STOP",
    ),
    "parallel calls": (
        [
            calls(tool(0, "a", "f")),
            calls(tool(0, arguments="{}")),
            calls(tool(1, "b", "g", '{"x":')),
            calls(tool(1, arguments='"\\ud800"}')),
        ],
        {"tool_calls": [whole_call("a", "f", "{}"), whole_call("b", "g", '{"x":"\\ud800"}')]},
        "tool_calls",
        [shown("a", "f", {}, **SIGNED), shown("b", "g", {"x": "\ufffd"})],
        "STOP",
    ),
    "several calls in one delta": (
        [calls(tool(0, "a", "f", ""), tool(1, "b", "f", '{"a":1}'))],
        {"tool_calls": [whole_call("a", "f", ""), whole_call("b", "f", '{"a":1}')]},
        "tool_calls",
        [shown("a", "f", {}, **SIGNED), shown("b", "f", {"a": 1})],
        "STOP",
    ),
    "cut in a text": ([{"content": "Hel"}], {"content": "Hel"}, "length", [{"text": "Hel", **SIGNED}], "MAX_TOKENS"),
    "cut in a call": (
        [{"content": "x"}, calls(tool(0, "a", "f", '{"x": "'))],
        {"content": "x", "tool_calls": [whole_call("a", "f", '{"x": "')]},
        "length",
        [{"text": "x", **SIGNED}],
        "MAX_TOKENS",
    ),
    "no JSON": (
        [calls(tool(0, "a", "f", '{"x": oops}')), calls(tool(1, "b", "g", "{}"))],
        {"tool_calls": [whole_call("a", "f", '{"x": oops}'), whole_call("b", "g", "{}")]},
        "tool_calls",
        [shown("b", "g", {}, **SIGNED)],
        "MALFORMED_FUNCTION_CALL",
    ),
    "no object": (
        [calls(tool(0, "a", "f", "[1]"))],
        {"tool_calls": [whole_call("a", "f", "[1]")]},
        "tool_calls",
        [{"text": "", **SIGNED}],
        "MALFORMED_FUNCTION_CALL",
    ),
    "no number": (
        [calls(tool(0, "a", "f", '{"x": NaN}'))],
        {"tool_calls": [whole_call("a", "f", '{"x": NaN}')]},
        "tool_calls",
        [{"text": "", **SIGNED}],
        "MALFORMED_FUNCTION_CALL",
    ),
    "thoughts alone": (
        [{"reasoning": "hm"}],
        {"reasoning": "hm"},
        "stop",
        [{"text": "hm", "thought": True}, {"text": "", **SIGNED}],
        "STOP",
    ),
    "nothing": ([], {}, "stop", [{"text": "", **SIGNED}], "STOP"),
    "an abort": ([{"content": "x"}], {"content": "x"}, "abort", [{"text": "x", **SIGNED}], "OTHER"),
}
"""Text after a call is a part of its own: in the stream alone, for a whole chat message does not know where a text stood."""


def said(spoken):
    return [json.loads(event.removeprefix("data: ")) for event in spoken.decode().split("\n\n") if event and not event.startswith(":")]


def feed(speaks, listed):
    return b"".join(speaks.chunk(b"", json.dumps(chunk, ensure_ascii=False).encode(), 3) for chunk in listed) + speaks.end()


def parts_of(responses):
    return [part for response in responses for part in response["candidates"][0]["content"]["parts"]]


@pytest.mark.parametrize("name", REPLIES)
def test_a_stream_equals_the_whole_reply(name):
    deltas, message, finish, parts, reason = REPLIES[name]
    responses = said(feed(encoder(), chunks(*deltas, finish=finish)))
    whole = json.loads(encoder().whole(json.dumps(completion(message, finish)).encode()))
    assert merged(parts_of(responses)) == merged(whole["candidates"][0]["content"]["parts"]) == parts
    last = responses[-1]
    assert last["candidates"][0]["finishReason"] == whole["candidates"][0]["finishReason"] == reason
    assert last["usageMetadata"] == whole["usageMetadata"] == PLAIN_USAGE
    assert all("finishReason" not in response["candidates"][0] for response in responses[:-1])
    for response in [*responses, whole]:
        assert response["modelVersion"] == "as-written"
        assert response["responseId"] == "chatcmpl-1"
        types.GenerateContentResponse.model_validate(response)
        assert not {"token_ids", "logprobs", "prompt_token_ids"} & set(json.dumps(response).replace('"', " ").split())


@pytest.mark.parametrize("name", REPLIES)
def test_the_array_holds_the_same_responses(name):
    deltas, _, finish, _, _ = REPLIES[name]
    listed = chunks(*deltas, finish=finish)
    array = encoder(sse=False)
    assert json.loads(array.keep_alive() + feed(array, listed)) == said(feed(encoder(), listed))


@pytest.mark.parametrize("name", REPLIES)
def test_thoughts_stay_hidden_unless_asked_for(name):
    deltas, message, finish, parts, _ = REPLIES[name]
    kept = [part for part in parts if not part.get("thought")]
    assert merged(parts_of(said(feed(encoder(thoughts=False), chunks(*deltas, finish=finish))))) == kept
    whole = json.loads(encoder(thoughts=False).whole(json.dumps(completion(message, finish)).encode()))
    assert merged(whole["candidates"][0]["content"]["parts"]) == kept


ECHOED = [name for name, case in REPLIES.items() if case[4] != "MALFORMED_FUNCTION_CALL" and name != "cut in a call"]


@pytest.mark.parametrize("name", ECHOED)
def test_an_echoed_reply_is_the_served_message(name):
    deltas, message, finish, parts, _ = REPLIES[name]
    hi = {"role": "user", "parts": [{"text": "hi"}]}
    as_chunks = [response["candidates"][0]["content"] for response in said(feed(encoder(), chunks(*deltas, finish=finish)))]
    for echoed in (as_chunks, [{"role": "model", "parts": parts}], [{"role": "model", "parts": merged(parts_of_contents(as_chunks))}]):
        asked = {"contents": [hi, *echoed, hi]}
        assert digests(chat_of(asked["contents"])["messages"])[1:-1] == [digest(served(completion(message, finish)))]
        assert read(asked).handles == {1: HANDLE}


def parts_of_contents(contents):
    return [part for content in contents for part in content["parts"]]


def test_events_of_a_stream():
    speaks = encoder()
    deltas = [{"reasoning": "h"}, {}, {"content": "a"}, calls(tool(0, "c", "f")), calls(tool(0, arguments="{}")), {"content": "b"}]
    left = [
        [part for response in said(speaks.chunk(b"", json.dumps(chunk).encode(), 3)) for part in parts_of([response])]
        for chunk in chunks(*deltas)
    ]
    assert left == [
        [],
        [{"text": "h", "thought": True}],
        [],
        [{"text": "a", **SIGNED}],
        [],
        [],
        [shown("c", "f", {}, **SIGNED), {"text": "b"}],
        [],
        [{"text": ""}],
    ]
    assert speaks.end() == b""


def test_without_usage_the_reason_is_sent_at_the_end():
    speaks = encoder()
    for chunk in chunks({"content": "x"})[:-1]:
        speaks.chunk(b"", json.dumps(chunk).encode(), 3)
    (last,) = said(speaks.end())
    assert last["candidates"][0]["finishReason"] == "STOP"
    assert last["usageMetadata"] == {}


def test_usage():
    more = {"completion_tokens_details": {"reasoning_tokens": 3}, "prompt_tokens_details": {"cached_tokens": 5}}
    wanted = PLAIN_USAGE | {"candidatesTokenCount": 4, "thoughtsTokenCount": 3, "cachedContentTokenCount": 5}
    assert said(feed(encoder(), chunks({"content": "x"}, **more)))[-1]["usageMetadata"] == wanted
    assert json.loads(encoder().whole(json.dumps(completion({"content": "x"}, **more)).encode()))["usageMetadata"] == wanted


ERROR = b'{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}'
SAID_ERROR = {"error": {"code": 500, "message": "Internal server error", "status": "INTERNAL"}}


@pytest.mark.parametrize("before", [0, 3])
def test_an_error_ends_the_stream(before):
    listed = [json.dumps(chunk).encode() for chunk in chunks({"content": "x"}, {"content": "y"})[:before]]
    for sse in (True, False):
        speaks = encoder(sse=sse)
        spoken = b"".join(speaks.chunk(b"", chunk, 3) for chunk in [*listed, ERROR]) + speaks.end()
        responses = said(spoken) if sse else json.loads(spoken)
        assert responses[-1] == SAID_ERROR
        assert all("error" not in response for response in responses[:-1])


@pytest.mark.parametrize("error", [b'{"error": "gone"}', b'{"error": {}}', b'{"error": {"code": "x", "message": 1}}'])
def test_unusual_errors(error):
    (response,) = said(encoder().chunk(b"", error, 0))
    assert response["error"]["code"] == 500


@pytest.mark.parametrize("data", [b"", b"oops", b"[]", b'{"choices":5}', b"[" * 9000])
def test_what_is_not_a_chunk_is_dropped(data):
    assert encoder().chunk(b"", data, 0) == b""
    assert encoder().whole(data) == data


def test_an_error_of_the_proxy_ends_the_stream():
    assert said(encoder().error(503, "the store failed")) == [
        {"error": {"code": 503, "message": "the store failed", "status": "UNAVAILABLE"}}
    ]
    for begun in ([], chunks({"content": "x"})):
        array = encoder(sse=False)
        spoken = b"".join(array.chunk(b"", json.dumps(chunk).encode(), 3) for chunk in begun)
        assert json.loads(spoken + array.error(503, "x"))[-1]["error"]["code"] == 503


def test_an_empty_array_is_one():
    assert json.loads(encoder(sse=False).end()) == []
    assert encoder().end() == b""


def test_the_encoder_follows_the_request():
    body = {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
    listed = chunks({"reasoning": "h"}, {"content": "x"})
    spoken = feed(read(body, STREAM, query={"alt": "sse"}).encoder, listed)
    assert spoken.startswith(b"data: ")
    assert parts_of(said(spoken))[0] == {"text": "h", "thought": True}
    assert feed(read(body, STREAM).encoder, listed).startswith(b"[{")
    del body["generationConfig"]
    assert "h" not in [part["text"] for part in parts_of(said(feed(read(body, STREAM, query={"alt": "sse"}).encoder, listed)))]


PIECES = st.lists(
    st.one_of(
        st.builds(lambda t: {"content": t}, st.text(max_size=3)),
        st.builds(lambda t: {"reasoning": t}, st.text(max_size=3)),
        st.just({}),
        st.builds(lambda a: ("call", a), st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2)),
    ),
    max_size=8,
)


@settings(max_examples=examples(200))
@given(PIECES, st.data())
def test_any_stream_cut_anywhere_gives_the_same_turn(pieces, data):
    """Calls are numbered and cut as vLLM does it; what is echoed is the message that the engine said."""
    deltas, message, count = [], {"content": "", "tool_calls": []}, 0
    for piece in pieces:
        if isinstance(piece, tuple):
            arguments = json.dumps(piece[1], ensure_ascii=False, indent=data.draw(st.sampled_from([None, 1])))
            cut = data.draw(st.integers(0, len(arguments)))
            deltas.append(calls(tool(count, f"c{count}", "f")))
            deltas += [calls(tool(count, arguments=text)) for text in (arguments[:cut], arguments[cut:])]
            message["tool_calls"].append(whole_call(f"c{count}", "f", arguments))
            count += 1
        else:
            deltas.append(piece)
            message["content"] += piece.get("content", "")
    contents = [response["candidates"][0]["content"] for response in said(feed(encoder(), chunks(*deltas)))]
    assert digests(chat_of([{"parts": [{"text": "hi"}]}, *contents])["messages"])[1:] == [digest(served(completion(message)))]

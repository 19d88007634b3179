"""A whole reply split into a stream: in every dialect the same as the engine's own stream of that reply, except where texts are cut.

The seed is pinned, so a call is answered alike each time, token by token.
"""

import itertools
import json

import msgspec
import pytest

from tests.proxy.kit import CHAT, HEADER, TOOLS, proxied, user
from tokencache.engine.chunks import as_chunks
from tokencache.testing import SimulatedEngine

FUNCTION = TOOLS[0]["function"]
RESPONSES = {"tools": [{"type": "function", **FUNCTION, "strict": False}], "stream": True, "model": "sim"}
MESSAGES = {"tools": [{"name": "bash", "input_schema": FUNCTION["parameters"]}], "stream": True, "model": "sim", "max_tokens": 500}
GEMINI = {"tools": [{"functionDeclarations": [{"name": "bash", "parametersJsonSchema": FUNCTION["parameters"]}]}]}
CHATTED = {"tools": TOOLS, "stream": True, "model": "sim"}
THOUGHTS = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
CALL_AND_TEXT, TWO_CALLS, TEXT = [user("EPISODE:demo")], [user("EPISODE:two")], [user("EPISODE:talk")]


def contents(messages):
    return [{"role": "user", "parts": [{"text": message["content"]}]} for message in messages]


ASKS = {
    "chat": lambda said: (CHAT, {**CHATTED, "messages": said}),
    "chat, all shown": lambda said: (
        CHAT,
        {**CHATTED, "messages": said, "return_token_ids": True, "logprobs": True, "stream_options": {"include_usage": True}},
    ),
    "chat, no reasoning": lambda said: (CHAT, {**CHATTED, "messages": said, "include_reasoning": False}),
    "chat, two choices": lambda said: (CHAT, {**CHATTED, "messages": said, "n": 2}),
    "messages": lambda said: ("/v1/messages", {**MESSAGES, "messages": said}),
    "responses": lambda said: ("/v1/responses", {**RESPONSES, "input": said}),
    "gemini": lambda said: ("/v1beta/models/sim:streamGenerateContent?alt=sse", {**GEMINI, **THOUGHTS, "contents": contents(said)}),
}
EPISODES = {
    "demo": [
        '<think>\nI look ☕.\n</think>\n\n  Let me look.\n<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls  -la"}}\n</tool_call>'
    ],
    "two": [
        (
            '<think>\nAh.\n</think>\n\nTwo. <tool_call>\n{"name": "bash", "arguments": {"cmd": "a"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "bash", "arguments": {"cmd": "ü"}}\n</tool_call>'
        )
    ],
    "talk": ["<think>\nHm — naïve.\n</think>\n\nIt is so.  "],
}
_CHANGING = {"id", "item_id", "call_id", "created", "created_at", "completed_at", "signature", "encrypted_content", "sequence_number"}
_CHANGING |= {"responseId", "createTime", "thoughtSignature", "system_fingerprint"}


def steady(value):
    """The same without members that differ each time."""
    if isinstance(value, dict):
        return {name: "~" if name in _CHANGING and inner else steady(inner) for name, inner in value.items()}
    return [steady(inner) for inner in value] if isinstance(value, list) else value


def course(text):
    """A stream's events in order, with adjacent pieces of the same member joined."""
    steps = []
    for block in text.split("\n\n"):
        data = "".join(line.removeprefix("data: ") for line in block.split("\n") if line.startswith("data: "))
        if not data or data == "[DONE]":
            steps += [data] if data else []
            continue
        for step in pieces(steady(json.loads(data))):
            if not (steps and joined(steps[-1], step)):
                steps.append(step)
    return steps


def pieces(event):
    """The members of an event one by one; chat's chunks and Gemini's responses are split."""
    if "candidates" in event:
        (candidate,) = event.pop("candidates")
        parts = [{name: value for name, value in part.items() if name != "thoughtSignature"} for part in candidate["content"]["parts"]]
        said = [{"type": "part", "delta": part.pop("text"), **part} if "text" in part else part for part in parts]
        rest = {"type": "end", "reason": candidate["finishReason"], **event} if candidate.get("finishReason") else None
        return [*[part for part in said if part != {"type": "part", "delta": ""}], *([rest] if rest else [])]
    if event.get("object") != "chat.completion.chunk":
        return [event]
    out = [{"type": "usage", "usage": event["usage"]}] if event.get("usage") else []
    if event.get("prompt_token_ids"):
        out.append({"type": "prompt", "ids": event["prompt_token_ids"]})
    for choice in event["choices"]:
        out += [{"type": "ids", "index": choice["index"], "ids": choice["token_ids"]}] if choice.get("token_ids") else []
        out += [{"type": "logprobs", "index": choice["index"], "ids": choice["logprobs"]["content"]}] if choice.get("logprobs") else []
        for name, value in choice["delta"].items():
            calls = value if name == "tool_calls" else ()
            out += [{"type": name, "index": choice["index"], "delta": value}] if isinstance(value, str) and value and not calls else []
            for call in calls:
                named = call["function"].get("name")
                out += [{"type": "call", "index": choice["index"], "n": call["index"], "name": named, "id": call["id"]}] if named else []
                words = call["function"].get("arguments")
                out += [{"type": "arguments", "index": choice["index"], "n": call["index"], "delta": words}] if words else []
        if choice["finish_reason"]:
            out.append({"type": "end", "index": choice["index"], "reason": choice["finish_reason"], "stop": choice["stop_reason"]})
    return out


def joined(last, step):
    """Join a piece with the one before if both belong to the same member."""
    if not isinstance(last, dict) or last.keys() != step.keys() or "delta" not in step:
        return False
    if any(last[name] != step[name] for name in step if name not in {"delta", "logprobs", "obfuscation"}):
        return False
    if isinstance(step["delta"], str):
        last["delta"] += step["delta"]
        return True
    words = [name for name in step["delta"] if name in {"text", "thinking", "partial_json"}]
    if not words or last["delta"].keys() != step["delta"].keys():
        return False
    last["delta"][words[0]] += step["delta"][words[0]]
    return True


def in_order(steps):
    """Chat's pieces by choice and member: ids, texts and choices may arrive in any order."""
    kinds = ("role", "prompt", "reasoning", "content", "call", "arguments", "ids", "logprobs", "end", "usage")
    found = {}
    for step in steps[:-1]:
        place = (step.get("index", -1), step.get("n", -1), kinds.index(step["type"]))
        if place not in found:
            found[place] = step
        elif "ids" in step:
            found[place]["ids"] += step["ids"]
        else:
            found[place]["delta"] += step["delta"]
    return [found[place] for place in sorted(found)] + steps[-1:]


@pytest.mark.parametrize("said", [CALL_AND_TEXT, TWO_CALLS, TEXT], ids=["call", "two calls", "text"])
@pytest.mark.parametrize("dialect", ASKS)
async def test_a_split_reply_equals_the_streamed_one(dialect, said):
    path, body = ASKS[dialect](said)
    heard = []
    for whole_replies in (False, True):
        async with proxied(SimulatedEngine(episodes=EPISODES, seed=3), sampling={"seed": 5}, whole_replies=whole_replies) as rig:
            rig.engine._calls = itertools.count(1000)  # the probe of an engine that streams asks more
            async with rig.http.post(rig.url + path, json=body, headers={HEADER: "s"}) as answer:
                assert (answer.status, answer.content_type) == (200, "text/event-stream")
                steps = course(await answer.text())
                heard.append(in_order(steps) if path == CHAT else steps)
            turns = await rig.turns()
            assert {turn["stream"] for turn in turns} == {True}
            assert rig.engine.requests[-1].get("stream", False) != whole_replies
            await rig.check()
    streamed, recited = heard
    assert recited == streamed


def whole(**more):
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop", "token_ids": [5]}
    return msgspec.json.encode({"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **more})


def test_an_error_is_an_error_in_a_stream_too():
    error = b'{"error":{"message":"no","type":"X","param":null,"code":500}}'
    assert as_chunks(error, {}) == [error]


@pytest.mark.parametrize("body", [b"", b"[]", b"oops", b'{"choices":5}', b'{"choices":[{}]}', b'{"choices":[{"message":5}]}', b"[" * 9000])
def test_anything_but_a_completion_is_refused(body):
    with pytest.raises(ValueError, match="not a chat completion"):
        as_chunks(body, {})


def test_a_reply_without_text_has_a_first_and_a_last_chunk():
    body = whole().replace(b'"content":"Hi"', b'"content":null')
    first, last = map(json.loads, as_chunks(body, {}))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (last["choices"][0]["delta"], last["choices"][0]["token_ids"], last["choices"][0]["finish_reason"]) == ({}, [5], "stop")

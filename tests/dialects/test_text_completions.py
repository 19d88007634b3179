"""Text completions: the engine's request, the client's reply, and the record."""

import contextlib
import io
import json
import re

import aiohttp
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokencache.core import ids
from tokencache.dialects import text_completions
from tokencache.dialects.chat.sampling import recorded
from tokencache.dialects.sse import DONE, EventSplitter, data_of, event_of
from tokencache.dialects.text_completions import TextReplyEncoder, for_engine
from tokencache.engine.prompt_echo import read_ids
from tokencache.engine.reply import Reply
from tokencache.errors import HarnessError
from tokencache.testing import SimulatedEngine


def call(**body):
    return text_completions.read(json.dumps({"model": "m", **body}).encode())


def chances(*values):
    return {"text_offset": [0], "token_logprobs": list(values), "tokens": ["x"] * len(values), "top_logprobs": [{}] * len(values)}


def chunk(index, text, tokens, *, prompt=None, finish=None, logprobs=None):
    """A chunk with vLLM 0.32's members in vLLM's order."""
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": None}
    choice |= {"prompt_token_ids": prompt, "token_ids": tokens}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}


def compact(value):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


ASKED = {"return_token_ids": True, "return_weight_versions": True}
STREAM = [
    chunk(0, "Hé", [5, 6], prompt=[1, 2], logprobs=chances(-0.5, -1.0)),
    chunk(1, "No", [7], prompt=[3], logprobs=chances(-2.0)),
    chunk(0, "", [8], finish="stop", logprobs=chances(-0.25)),
    chunk(1, "w", [9], finish="length", logprobs=chances(-0.125)),
]
PLAIN = [chunk(0, "Hé", None), chunk(1, "No", None), chunk(0, "", None, finish="stop"), chunk(1, "w", None, finish="length")]


@pytest.mark.parametrize(
    ("prompt", "n", "choices"),
    [("a", 1, 1), ("a", 3, 3), ([1, 2, 3], 1, 1), (["a", "b"], 2, 4), ([[1], [2, 3], [4]], 1, 3), (["a"], 1, 1)],
)
def test_how_many_choices_a_request_has(prompt, n, choices):
    assert call(prompt=prompt, n=n).n == choices


def test_the_request_asks_for_ids_and_log_probabilities():
    asked = json.loads(for_engine(call(prompt="a", top_p=0.5, extra={"x": 1})))
    assert asked == {"model": "m", "prompt": "a", "top_p": 0.5, "extra": {"x": 1}, **ASKED, "logprobs": 0}
    assert json.loads(for_engine(call(prompt="a", logprobs=3)))["logprobs"] == 3
    assert recorded(call(prompt="a", temperature=0, stop=["x"]).fields) == {"temperature": 0, "stop": ["x"]}


@pytest.mark.parametrize(
    ("more", "why"), [({"echo": True}, "echo"), ({"use_beam_search": True}, "beam-search"), ({"prompt_embeds": "x"}, "prompt-embeds")]
)
def test_a_request_that_cannot_be_recorded_is_unchanged(more, why):
    body = {"model": "m", "prompt": "a", **more}
    read = text_completions.read(compact(body))
    assert text_completions.unrecorded(read.fields) == why
    assert msgspec.json.encode(read.safe_fields()) == compact(body)


def test_members_not_asked_for_become_null():
    encoder = TextReplyEncoder(call(prompt=["a", "b"], stream=True))
    shown = b"".join(encoder.chunk(b"", compact(full), 2) for full in STREAM)
    assert shown + encoder.end() == b"".join(event_of(compact(plain)) for plain in PLAIN) + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"return_token_ids": True}, {"token_ids", "prompt_token_ids"}),
        ({"logprobs": 0}, {"logprobs"}),
        ({"logprobs": 2, "return_token_ids": True}, {"token_ids", "prompt_token_ids", "logprobs"}),
    ],
)
def test_members_asked_for_are_passed_on(asked, kept):
    shown = json.loads(TextReplyEncoder(call(prompt="a", **asked)).whole(compact(STREAM[0])))["choices"][0]
    for name in ("token_ids", "prompt_token_ids", "logprobs"):
        assert shown[name] == (STREAM[0]["choices"][0][name] if name in kept else None)


@pytest.mark.parametrize("data", [b"", b"oops", b"[]", b'{"choices": 1}', b'{"error": {"message": "x"}}'])
def test_what_cannot_be_read_is_passed_on(data):
    encoder = TextReplyEncoder(call(prompt="a"))
    assert encoder.whole(data) == data
    assert encoder.chunk(b"as it came", data, 0) == b"as it came"


def test_a_usage_chunk_stays_as_it_is():
    data = compact({"id": "cmpl-1", "choices": [], "usage": {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1}})
    assert TextReplyEncoder(call(prompt="a")).chunk(b"", data, 0) == event_of(data)


BODIES = [
    {"prompt": "EPISODE:talk"},
    {"prompt": ["EPISODE:talk", "x"], "n": 2, "stream": True},
    {"prompt": [7, 8, 9], "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"prompt": "EPISODE:talk", "stream": True, "logprobs": 2, "stop": "seven"},
    {"prompt": "EPISODE:talk", "return_token_ids": True},
]


async def answered(body, call=None):
    """What an engine answers: to a harness that asks for itself, or as it is presented to one."""
    sent = compact({"max_tokens": 20, **body}) if call is None else for_engine(call)
    encoder = None if call is None else TextReplyEncoder(call)
    engine = SimulatedEngine(episodes={"talk": ["One, two — naïve ☕, seven."]}, seed=3)
    headers = {"Content-Type": "application/json", "X-Request-Id": "same"}
    async with (
        engine.serve() as url,
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/completions", data=io.BytesIO(sent), headers=headers) as answer,
    ):
        data = await answer.read()
    if encoder is not None and not body.get("stream"):
        data = encoder.whole(data)
    elif encoder is not None:
        found = [(event, data_of(event)) for event in EventSplitter().feed(data)]
        data = b"".join(encoder.end() if inner == DONE else encoder.chunk(event, inner, 0) for event, inner in found)
    return re.sub(rb'"created":\d+', b'"created":1', data)


@pytest.mark.parametrize("body", BODIES)
async def test_the_client_gets_the_bytes_of_a_direct_call(body):
    assert await answered(body, text_completions.read(compact({"max_tokens": 20, **body}))) == await answered(body)


def whole():
    """The same reply in one body."""
    choices = []
    for index in (0, 1):
        mine = [c["choices"][0] for c in STREAM if c["choices"][0]["index"] == index]
        values = [value for part in mine for value in part["logprobs"]["token_logprobs"]]
        choices.append(
            {
                "index": index,
                "text": "".join(part["text"] for part in mine),
                "logprobs": chances(*values),
                "finish_reason": mine[-1]["finish_reason"],
                "stop_reason": None,
                "token_ids": [token for part in mine for token in part["token_ids"]],
                "prompt_logprobs": None,
                "prompt_token_ids": mine[0]["prompt_token_ids"],
            }
        )
    return {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": choices, "usage": {}}


@pytest.mark.parametrize("bodies", [STREAM, [whole()]], ids=["stream", "whole"])
def test_each_choice_is_collected_with_its_own_prompt(bodies):
    reply = Reply(2)
    for body in bodies:
        assert not reply.finished
        reply.add(compact(body))
    assert reply.finished
    first, second = reply.choices[0], reply.choices[1]
    assert ([*first.ids], [*first.logprobs], first.finish_reason) == ([5, 6, 8], [-0.5, -1.0, -0.25], "stop")
    assert ([*second.ids], [*second.logprobs], second.finish_reason) == ([7, 9], [-2.0, -0.125], "length")
    assert first.message(with_reasoning=True).content == "Hé"
    assert second.message(with_reasoning=True).content == "Now"
    assert read_ids(reply.choices[0].prompt) == read_ids(reply.prompt.raw) == ids.pack([1, 2])
    assert read_ids(reply.choices[1].prompt) == ids.pack([3])


@pytest.mark.parametrize("body", [b"", b"[]", b'{"prompt": 5}', b'{"stream": "x"}', b'{"n": "x"}', b'{"model": []}', b'{"echo": "x"}'])
def test_bad_requests(body):
    with pytest.raises(HarnessError) as refused:
        text_completions.read(body)
    assert refused.value.status == 400


@settings(derandomize=True, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["prompt", "model", "n", "stream", "logprobs", "echo", "return_token_ids", "x"]),
        st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3)),
    )
)
def test_any_request_is_parsed_or_refused(body):
    with contextlib.suppress(HarnessError):
        json.loads(for_engine(text_completions.read(json.dumps(body).encode())))

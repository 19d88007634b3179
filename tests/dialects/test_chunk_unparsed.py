"""Translated streams: a chunk encoded without parsing gives the same events as the parsed chunk."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokencache.dialects.anthropic.reply import AnthropicReplyEncoder
from tokencache.dialects.completion_reader import text_piece
from tokencache.dialects.gemini.reply import GeminiReplyEncoder
from tokencache.dialects.responses.reply import ResponsesReplyEncoder
from tokencache.dialects.responses.vocabulary import ToolName
from tokencache.dialects.sse import event_of

HANDLE = "0123456789abcdef" * 2
NAMES = {"patch": ToolName("patch", custom=True)}


def responses(**more):
    how = {"model": "m", "members": {}, "names": NAMES, "thoughts": True, "sealed": True, "as_gym": False, "keep": lambda _: {}}
    return ResponsesReplyEncoder(HANDLE, **{**how, **more})


ENCODERS = {
    "messages": lambda: AnthropicReplyEncoder("m", HANDLE),
    "responses": responses,
    "responses without thoughts": lambda: responses(thoughts=False),
    "gemini": lambda: GeminiReplyEncoder(model="m", handle=HANDLE, shows_thoughts=True, sse=True),
    "gemini without thoughts": lambda: GeminiReplyEncoder(model="m", handle=HANDLE, shows_thoughts=False, sse=True),
    "gemini, an array": lambda: GeminiReplyEncoder(model="m", handle=HANDLE, shows_thoughts=True, sse=False),
}

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ['{"input": "', '"}', '{"a":', "1}", "\\", '\\"', "\x1b", "<think>", "</think>", "<th", "ink>"]
)


def arguments(number, text):
    return {"content": None, "tool_calls": [{"index": number, "function": {"arguments": text}}]}


def begun(number, name):
    first = {"id": f"call_{number}", "type": "function", "index": number, "function": {"name": name, "arguments": ""}}
    return {"content": None, "tool_calls": [first]}


calls = st.integers(0, 2)
deltas = st.one_of(
    st.builds(lambda text: {"content": text}, texts),
    st.builds(lambda text: {"reasoning": text}, texts),
    st.builds(arguments, calls, texts),
    st.builds(begun, calls, st.sampled_from(["f", "patch"])),
    st.builds(lambda text, thought: {"content": text, "reasoning": thought}, texts, texts),
    st.just({}),
)


def chunk(delta, *, index=0, finish=None):
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": [7]}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 17, "model": "engine", "choices": [choice]}


chunks = st.builds(chunk, deltas, index=st.sampled_from([0, 0, 0, 0, 1])) | st.just({"error": {"message": "broke", "code": 500}})


def written(value, *, ascii_only=False):
    return json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":")).encode()


@pytest.mark.parametrize("dialect", ENCODERS)
@given(told=st.lists(st.tuples(chunks, st.booleans()), max_size=30))
def test_encoded_as_if_it_had_been_parsed(dialect, told):
    read, unread = ENCODERS[dialect](), ENCODERS[dialect]()
    parsed_out, unparsed_out = [], []
    first, last = written(chunk({"role": "assistant", "content": ""})), written(chunk({}, finish="stop"))
    for encoder, said in ((read, parsed_out), (unread, unparsed_out)):
        said.append(encoder.chunk(event_of(first), first, 3))
    for made, ascii_only in told:
        data = written(made, ascii_only=ascii_only)
        parsed_out.append(read.chunk(event_of(data), data, 3))
        passed = unread.chunk_unparsed(event_of(data))
        unparsed_out.append(unread.chunk(event_of(data), data, 3) if passed is None else passed)
    for encoder, said in ((read, parsed_out), (unread, unparsed_out)):
        said += [encoder.chunk(event_of(last), last, 3), encoder.end()]
    assert unparsed_out == parsed_out


@pytest.mark.parametrize("dialect", ENCODERS)
@pytest.mark.parametrize("begins", [{"content": "a"}, begun(0, "f")], ids=["text", "call"])
def test_a_piece_of_an_open_block_is_not_parsed(dialect, begins):
    """The point of it: nearly all of a stream takes this way."""
    encoder = ENCODERS[dialect]()
    data = written(chunk(begins))
    encoder.chunk(event_of(data), data, 3)
    more = {"content": "b"} if "tool_calls" not in begins else arguments(0, '{"a":')
    assert encoder.chunk_unparsed(event_of(written(chunk(more)))) is not None


@pytest.mark.parametrize("dialect", ENCODERS)
@pytest.mark.parametrize("text", [b'"\xff"', b'"\\q"', b'"\\ud800"', b'"\n"'], ids=["bytes", "escape", "half a character", "control"])
def test_text_that_is_not_json_is_parsed(dialect, text):
    encoder = ENCODERS[dialect]()
    data = written(chunk({"content": "a"}))
    encoder.chunk(event_of(data), data, 3)
    assert encoder.chunk_unparsed(event_of(data.replace(b'"a"', text))) is None


def test_a_piece_of_another_choice_is_ignored():
    assert text_piece(event_of(written(chunk({"content": "a"})))) == (b"content", 0, "a")
    assert text_piece(event_of(written(chunk({"content": "a"}, index=1)))) is None

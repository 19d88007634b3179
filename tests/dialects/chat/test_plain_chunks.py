"""Plain chunks: passed on without parsing they equal parsed ones, and parsed later they give the same reply."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.reading import read_chat
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.reply import ChatReplyEncoder
from tokencache.dialects.completion_reader import CHOICE_BEGIN, CHOICE_END, hide_tokens
from tokencache.dialects.sse import event_of
from tokencache.engine.reply import AT_ONCE, Reply

CALL = read_chat(b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}', IncrementalParser())
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def written(value, *, ascii_only=False):
    return json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":")).encode()


def chance(token, logprob):
    return {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}


def chunk(delta, tokens=(("a", -0.5),), index=0, **more):
    ids = list(range(100, 100 + len(tokens)))
    logprobs = {"content": [chance(*token) for token in tokens]} if tokens else None
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None, "token_ids": ids, **more}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 17, "model": "m", "choices": [choice]}


deltas = st.one_of(
    st.builds(lambda text: {"content": text}, texts),
    st.builds(lambda text: {"reasoning": text}, texts),
    st.builds(lambda n, text: {"content": None, "tool_calls": [{"index": n, "function": {"arguments": text}}]}, st.integers(0, 3), texts),
    st.just({}),
)
tokens = st.lists(st.tuples(texts, st.floats(-50, 0, width=32)), max_size=3)
chunks = st.builds(chunk, deltas, tokens, st.integers(0, 2))


def as_if_read(data):
    return ChatReplyEncoder(CALL).chunk(event_of(data), data, 0)


def choice_of(data):
    event = event_of(data)
    return event[event.find(CHOICE_BEGIN) : CHOICE_END]


def gathered(reply):
    return {
        index: (c.ids, c.logprobs, c.steps, c.message(with_reasoning=True), c.finish_reason) for index, c in sorted(reply.choices.items())
    }


@given(chunks, st.booleans())
def test_passed_on_as_if_it_had_been_parsed(made, ascii_only):
    data = written(made, ascii_only=ascii_only)
    assert hide_tokens(event_of(data)) == as_if_read(data)


@given(st.lists(st.tuples(chunks, st.booleans()), max_size=80))
def test_parsing_later_equals_parsing_at_once(told):
    at_once, later = Reply(3), Reply(3)
    for made, waits in told:
        data = written(made)
        at_once.add(data)
        if waits:
            later.later.append(choice_of(data))
            if len(later.later) >= AT_ONCE:
                later.read_later()
        else:
            later.add(data)
    assert gathered(later) == gathered(at_once)
    assert later.unreadable == 0


def test_a_name_is_not_mistaken_for_the_choice():
    data = written(chunk({"content": "x"}) | {"id": '{"index":7,', "model": '\\{"index":8,"delta":{"content":"y"}}'})
    assert hide_tokens(event_of(data)) is not None
    reply = Reply()
    reply.later.append(choice_of(data))
    assert reply.choices[0].content == ["x"]
    assert reply.unreadable == 0


NOT_PLAIN = {
    "an end": chunk({"content": "x"}, finish_reason="stop"),
    "a stop reason": chunk({"content": "x"}, stop_reason=None),
    "who speaks": chunk({"role": "assistant", "content": ""}),
    "an end that says nothing": chunk({}, finish_reason="stop", stop_reason=None),
    "somebody, who says nothing": chunk({"role": "assistant"}),
    "text and reasoning": chunk({"content": "x", "reasoning": "y"}),
    "a call's name": chunk({"content": None, "tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}),
    "versions": chunk({"content": "x"}, weight_versions=[["1", 0, 1]]),
    "experts": chunk({"content": "x"}, routed_experts=None),
    "no ids": {**chunk({"content": "x"}), "choices": [{"index": 0, "delta": {"content": "x"}, "logprobs": None, "finish_reason": None}]},
    "two choices": {**chunk({"content": "x"}), "choices": chunk({"content": "x"})["choices"] * 2},
    "a prompt": {**chunk({"content": "x"}), "prompt_token_ids": [1, 2]},
    "a usage": {**chunk({"content": "x"}), "usage": {"prompt_tokens": 1}},
    "an error": {"error": {"message": "x", "code": 500}},
    "members within a text": chunk({"content": '","finish_reason":"stop","token_ids":[1]}]}'}) | {"usage": None},
}


@pytest.mark.parametrize("made", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_other_chunks_are_parsed(made):
    assert hide_tokens(event_of(written(made))) is None


@pytest.mark.parametrize("event", [b"data: [DONE]\n\n", b": ping\n\n", b"", b'event: x\ndata: {"id":"a"}\n\n', event_of(b"{")])
def test_what_is_not_a_chunk_is_parsed(event):
    assert hide_tokens(event) is None


@pytest.mark.parametrize("between", [b"\n\n", b"\r\r", b"\n", b"\\\n\n"])
def test_a_match_is_one_event(between):
    """What the network brings is looked at before anybody cut it into events: a line break is never within a text."""
    event = event_of(written(chunk({"content": "x"})))
    assert hide_tokens(event) is not None
    assert hide_tokens(event.replace(b'"x"', b'"x%sx"' % between)) is None
    assert hide_tokens(event * 2) is None
    assert hide_tokens(event[:-1]) is None


def test_unreadable_chunks_are_counted():
    """The expression looks for members, not whether a text's bytes are UTF-8 or its escapes are known."""
    good, bad = written(chunk({"content": "x"})), written(chunk({"content": "x"})).replace(b'"x"', b'"\xff\\q"')
    reply = Reply()
    for data in (good, bad, good):
        assert hide_tokens(event_of(data)) is not None
        reply.later.append(choice_of(data))
    assert "".join(reply.choices[0].content) == "xx"
    assert reply.unreadable == 1

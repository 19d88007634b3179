"""Long values are cut out of a reply and parsed by themselves; record and harness get the same as if the reply were parsed at once."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.reading import read_chat
from tokencache.core import ids
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.reply import ChatReplyEncoder
from tokencache.engine.reply import Reply

CALL = read_chat(b'{"model":"m","messages":[{"role":"user","content":"x"}]}', IncrementalParser())
SENT = ids.Fragment((b"1,22",)).extended(ids.pack([333]))
IDS = [1, 22, 333]


def written(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def token_logprob(token, logprob, others=()):
    return {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": list(others)}


texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.sampled_from(['"top_logprobs":[]}]}', '"logprobs":{"content":[', '"prompt_token_ids":[', "=", "=0", "]}]}", '"']),
)
values = st.one_of(st.floats(-50, 0), st.floats(-50, 0, width=32), st.integers(-9, 0), st.sampled_from([None, "x"]))
others = st.lists(st.builds(lambda token: {"token": token, "logprob": -2.5, "bytes": []}, texts), max_size=2)
token_logprobs = st.lists(st.builds(token_logprob, texts, values, st.one_of(st.just(()), others)), max_size=3)
logprobs = st.one_of(
    st.none(),
    st.builds(lambda content: {"content": content}, token_logprobs),
    st.builds(lambda content: {"content": content, "refusal": []}, token_logprobs),
    st.builds(lambda content: {"refusal": None, "content": content}, token_logprobs),
    st.builds(lambda told: {"token_logprobs": told}, st.lists(values, max_size=2)),
    st.sampled_from([{}, []]),
)
echoes = st.one_of(
    st.none(), st.just(IDS), st.lists(st.integers(0, 2**31 - 1), max_size=3), st.sampled_from([[2**31], [1.5], [[7], 8], ["]"], {}])
)


@st.composite
def members(draw, **may):
    """An object with some of these members, in any order."""
    names = draw(st.lists(st.sampled_from(sorted(may)), unique=True))
    return {name: draw(may[name]) for name in names}


said = members(content=texts, logprobs=logprobs, prompt_token_ids=echoes)
choices = members(
    index=st.integers(0, 1),
    message=said,
    text=texts,
    logprobs=logprobs,
    token_ids=st.lists(st.integers(0, 9), max_size=3),
    prompt_token_ids=echoes,
    finish_reason=st.sampled_from([None, "stop"]),
)
replies = members(
    choices=st.lists(choices, max_size=2, unique_by=lambda choice: choice.get("index", 0)),
    prompt_token_ids=echoes,
    kv_transfer_params=members(prompt_token_ids=echoes, logprobs=logprobs),
    error=st.one_of(st.none(), members(logprobs=logprobs)),
    model=texts,
)


def usual(**more):
    told = {"content": [token_logprob("a", -0.5), token_logprob('"]}', -1.25)]}
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "logprobs": told, "finish_reason": "stop", "token_ids": [5, 6]}
    return {"choices": [choice], "prompt_token_ids": IDS, **more}


def content_of(reply):
    return (
        reply.unreadable,
        reply.error,
        reply.model,
        reply.finished,
        reply.prompt.raw,
        reply.prompt.packed,
        reply.prompt.tokens,
        {
            index: (c.ids, c.logprobs, c.message(with_reasoning=True), c.finish_reason, c.prompt or reply.prompt.raw)
            for index, c in sorted(reply.choices.items())
        },
    )


@given(replies, st.sampled_from([ids.Fragment(), SENT]), st.integers(1, 2), st.one_of(st.none(), st.integers(1, 60)))
@example(usual(), ids.Fragment(), 1, None)
@example({"prompt_token_ids": IDS}, SENT, 1, None)
@example(usual(), SENT, 1, None)
@example(usual(kv_transfer_params={"prompt_token_ids": IDS}), SENT, 1, None)
@example({"error": {"logprobs": usual()["choices"][0]["logprobs"]}, **usual()}, SENT, 1, None)
def test_parsing_in_parts_gives_the_same(made, sent, number, lost):
    data = written(made)[:-lost] if lost else written(made)
    parted, whole = Reply(number), Reply(number)
    parted.prompt.sent = sent
    whole.prompt.stop_cutting()
    brief = parted.add(data, hide_logprobs=True)
    whole.add(data)
    assert content_of(parted) == content_of(whole)
    encoder = ChatReplyEncoder(CALL)
    assert encoder.whole(brief) == encoder.whole(data)


@pytest.mark.parametrize("sent", [ids.Fragment(), SENT])
def test_a_usual_reply_becomes_short(sent):
    reply = Reply()
    reply.prompt.sent = sent
    brief = reply.add(written(usual()), hide_logprobs=True)
    left = json.loads(brief)
    assert (left["prompt_token_ids"], left["choices"][0]["logprobs"]) == ("=0", "=0")
    assert list(reply.choices[0].logprobs) == [-0.5, -1.25]


def test_log_probabilities_that_the_harness_gets_stay():
    brief = Reply().add(written(usual()))
    assert json.loads(brief)["choices"] == usual()["choices"]


def test_the_ids_of_a_text_completion_stay_with_its_choice():
    data = written({"choices": [{"index": 0, "text": "x", "prompt_token_ids": IDS}]})
    reply = Reply()
    assert reply.add(data, hide_logprobs=True) == data
    assert (reply.choices[0].prompt, reply.prompt.raw) == (b"[1,22,333]", b"[1,22,333]")

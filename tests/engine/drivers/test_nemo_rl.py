"""Ids and log probabilities in NeMo's replies are moved to where vLLM has them."""

import json

import pytest

from tokencache.engine.drivers.nemo_rl import ids_from_messages
from tokencache.engine.reply import Reply

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.5, -1.0]}


def answer(message, **choice):
    said = {"index": 0, "message": {"role": "assistant", "content": "Hi", **message}, "finish_reason": "stop", "logprobs": None, **choice}
    return json.dumps({"model": "m", "choices": [said], "usage": None}).encode()


def read(body):
    reply = Reply()
    reply.add(ids_from_messages(body))
    return reply


def test_they_are_moved_from_the_message():
    body = ids_from_messages(answer(TOKENS))
    reply = read(answer(TOKENS))
    assert (reply.prompt.raw, list(reply.choices[0].ids), list(reply.choices[0].logprobs)) == (b"[1, 2]", [3, 4], [-0.5, -1.0])
    said = json.loads(body)["choices"][0]
    assert said["message"] == {"role": "assistant", "content": "Hi"}
    assert [entry["token"] for entry in said["logprobs"]["content"]] == ["token_id:3", "token_id:4"]


def test_log_probabilities_that_a_harness_requested_stay_unchanged():
    shown = {"content": [{"token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": [{"token": "H", "logprob": -0.5}]}] * 2}
    assert json.loads(ids_from_messages(answer(TOKENS, logprobs=shown)))["choices"][0]["logprobs"] == shown


def test_routed_experts_are_moved_from_the_message_too():
    assert json.loads(ids_from_messages(answer({**TOKENS, "routed_experts": "=0"})))["choices"][0]["routed_experts"] == "=0"


@pytest.mark.parametrize("body", [b"", b"oops", b'{"error":{}}', answer({}), answer({}, token_ids=[3])])
def test_a_reply_without_them_is_unchanged(body):
    assert ids_from_messages(body) is body


@pytest.mark.parametrize(
    "message",
    [
        {**TOKENS, "generation_log_probs": None},
        {name: TOKENS[name] for name in ("prompt_token_ids", "generation_token_ids")},
        {**TOKENS, "generation_log_probs": [-0.5]},
        {**TOKENS, "generation_log_probs": [-0.5, -0.5, -0.7]},
    ],
)
def test_missing_log_probabilities_are_not_invented(message):
    reply = read(answer(message))
    assert list(reply.choices[0].ids) == [3, 4]
    assert len(reply.choices[0].logprobs) < 2


@pytest.mark.parametrize("wrong", ["x", [1.5], {"a": 1}, [None]])
def test_a_reply_with_malformed_ids_is_not_recorded(wrong):
    reply = read(answer({**TOKENS, "generation_token_ids": wrong}))
    assert not (reply.choices and reply.choices[0].ids)


def test_a_truncated_reply_is_unreadable():
    assert read(answer(TOKENS)[:-30]).unreadable == 1

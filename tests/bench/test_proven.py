"""The floor with verification, on the mock engine: ids are sent and kept, unrequested fields are hidden, errors are noticed."""

import array
import json

import msgspec
import pytest

from bench import mock
from bench.proven import Proven
from bench.talk import Talk


@pytest.fixture
async def proven(serve):
    return await serve(Proven)


def words(reply):
    return json.loads(reply)["choices"][0]["message"]["content"]


async def test_it_sends_the_ids_keeps_the_turns_and_hides_both(proven, asked):
    talk = Talk("proven", size=3000, messages=4, mock_tokens=8)
    for _ in range(3):
        status, reply = await proven.ask(talk.body())
        answer = json.loads(reply)
        assert status == 200
        assert (answer["choices"][0]["logprobs"], answer["choices"][0]["token_ids"], answer["prompt_token_ids"]) == (None, None, [])
        talk.add_turn(words(reply), 100)
    sent = json.loads(asked[-1][1])["kv_transfer_params"]["prompt_token_ids"]
    kept = proven.sessions["s"].turns
    read = [array.array("I", turn) for turn in kept[::2]]  # the first prompt and each tail
    sampled = [msgspec.msgpack.decode(turn) for turn in kept[1::2]]
    assert [len(turn[0]) for turn in sampled] == [32, 32, 32]
    assert array.array("f", sampled[0][1])[:2].tolist() == [-1 / 64, -2 / 64]
    prompt = [*read[0], *array.array("I", sampled[0][0]), *read[1], *array.array("I", sampled[1][0]), *read[2]]
    assert prompt == sent
    assert sent[: len(read[0])] == json.loads(b"[%s]" % mock.render(talk.entries[:4], generation=True))


@pytest.mark.parametrize("what", ["history", "reply"])
async def test_a_call_that_does_not_continue_is_refused(proven, what):
    talk = Talk("changed", size=3000, messages=4, mock_tokens=8)
    _, reply = await proven.ask(talk.body())
    talk.add_turn(words(reply) + ("!" if what == "reply" else ""), 100)
    if what == "history":
        talk.entries[1] = msgspec.Raw(b'{"role":"user","content":"another"}')
    assert (await proven.ask(talk.body()))[0] == 500


async def test_an_engine_that_used_another_prompt_is_noticed(proven, monkeypatch):
    talk = Talk("echo", size=3000, messages=4, mock_tokens=8)
    _, reply = await proven.ask(talk.body())
    talk.add_turn(words(reply), 100)
    monkeypatch.setattr(mock, "_SUPPLIED", b"no such words")  # it renders the messages itself, and returns those ids
    assert (await proven.ask(talk.body()))[0] == 500

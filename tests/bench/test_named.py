"""The floor with the plugin, on the mock engine: it names prompts, compares the hash of the answer, keeps the turns."""

import array
import base64
import json

import msgspec
import pytest

from bench import mock
from bench.named import Named
from bench.talk import Talk
from tests.bench.conftest import RecordingEngine


@pytest.fixture
def kept():
    return mock.kept_prompts()


@pytest.fixture
async def floor(kept, serve, monkeypatch):
    made = RecordingEngine.__init__
    monkeypatch.setattr(RecordingEngine, "__init__", lambda self: made(self, kept))
    return await serve(Named)


def grown(talk, reply):
    talk.add_turn(json.loads(reply)["choices"][0]["message"]["content"], 100)


async def test_it_names_the_prompts_and_keeps_the_turns(floor, asked):
    talk = Talk("named", size=3000, messages=4, mock_tokens=8)
    for _ in range(3):
        status, reply = await floor.ask(talk.body())
        assert status == 200
        assert not {"tokencache"} & json.loads(reply)["choices"][0].keys()
        grown(talk, reply)
    turns = floor.sessions["s"].turns
    prompts = [array.array("i", turn) for turn in turns[::2]]  # the first prompt and each tail
    sampled = [array.array("i", msgspec.msgpack.decode(turn)[0]) for turn in turns[1::2]]
    assert [*map(len, sampled)] == [8, 8, 8]
    assert prompts[0].tolist() == json.loads(b"[%s]" % mock.render(talk.entries[:4], generation=True))
    sent = json.loads(asked[-1][1])
    named = sent["kv_transfer_params"]["tokencache_prefix"]
    assert len(sent["messages"]) == 1
    assert array.array("i", base64.b64decode(named["tail"])) == prompts[2]
    assert named["length"] == len(prompts[0]) + len(sampled[0]) + len(prompts[1]) + len(sampled[1])


async def test_an_engine_that_used_another_prompt_is_noticed(floor, kept):
    talk = Talk("other", size=3000, messages=4, mock_tokens=8)
    grown(talk, (await floor.ask(talk.body()))[1])
    (digest, ids) = next(iter(kept.items()))
    kept[digest] = ids[:-4] + bytes(4)
    assert (await floor.ask(talk.body()))[0] == 500


async def test_a_prefix_that_the_engine_does_not_have_is_noticed(floor, kept):
    talk = Talk("lost", size=3000, messages=4, mock_tokens=8)
    grown(talk, (await floor.ask(talk.body()))[1])
    kept.clear()
    assert (await floor.ask(talk.body()))[0] == 500

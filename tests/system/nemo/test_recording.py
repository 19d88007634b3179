"""A real recording of NeMo Gym's: two calls of Qwen3-0.6B with their ids, as Gym returns and accepts them."""

import json

import pytest

from tests.support import invariants
from tests.support.material import SHARED, needs
from tests.support.reading import read_chat
from tokencache.core import ids
from tokencache.core.chain import lookup_keys, turn_keys
from tokencache.core.match import Hit, match
from tokencache.core.turn import Tokens, Turn, hash_ids
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.engine.drivers.nemo_rl import ids_from_messages
from tokencache.engine.reply import Reply

FILE = SHARED / "data/gym/round_trip_test_data.json"
pytestmark = needs("../shared", FILE.exists())


@pytest.fixture(scope="module")
def messages():
    return json.loads(FILE.read_text())["expected_output_return_token_id_information"]["messages"]


def reply_of(message):
    """What the driver reads from an answer with this message."""
    answer = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "model": "m"}
    reply = Reply()
    reply.add(ids_from_messages(json.dumps(answer).encode()))
    return reply


def replies(messages):
    return [(place, reply_of(message)) for place, message in enumerate(messages) if message["role"] == "assistant"]


def turn_of(reply, n, **more):
    prompt, choice = ids.pack(json.loads(reply.prompt.raw)), reply.choices[0]
    completion = ids.pack(choice.ids)
    turn = Turn(
        id=f"t{n}",
        call=f"c{n}",
        prompt_tokens=ids.count(prompt),
        completion_tokens=len(choice.ids),
        prefix_hash=hash_ids(prompt + completion),
        completion_hash=hash_ids(completion),
        served=choice.message(with_reasoning=True),
        **more,
    )
    return turn, Tokens(prompt, completion, ids.pack_logprobs(choice.logprobs))


def test_the_ids_are_read_from_the_messages(messages):
    for place, reply in replies(messages):
        choice, message = reply.choices[0], messages[place]
        assert json.loads(reply.prompt.raw) == message["prompt_token_ids"]
        assert (list(choice.ids), list(choice.logprobs)) == (message["generation_token_ids"], message["generation_log_probs"])
        assert choice.message(with_reasoning=True).content == message["content"]


def test_the_second_call_breaks_the_line_and_it_is_noticed(messages):
    """Its prompt was rendered again: the model's thinking is missing, from the second sampled token on."""
    (_, first), (_, second) = replies(messages)
    one, two = turn_of(first, 0, match="root"), turn_of(second, 1, match="continue", parent="t0")
    seen = [*json.loads(first.prompt.raw), *first.choices[0].ids]
    prompt = json.loads(second.prompt.raw)
    assert ids.common_head(ids.pack(seen), ids.pack(prompt)) == len(json.loads(first.prompt.raw)) + 1
    (found,) = invariants.extension([one[0], two[0]], {"t0": one[1], "t1": two[1]})
    assert "t1" in found
    mended = [*seen, *prompt[len(seen) :]]
    fixed = turn_of(reply_of({**messages[replies(messages)[1][0]], "prompt_token_ids": mended}), 1, match="continue", parent="t0")
    assert invariants.extension([one[0], fixed[0]], {"t0": one[1], "t1": fixed[1]}) == []


def test_its_messages_are_recognised_when_they_come_back(messages):
    """With or without their ids: the reply is the model's own, in its place."""
    (place, first), _ = replies(messages)
    asked = read_chat(json.dumps({"model": "m", "messages": messages[:place]}).encode(), IncrementalParser())
    turn, _ = turn_of(first, 0, match="root", position_key=asked.chain[-1])
    known = {}
    for key in turn_keys(asked.conversation, turn.served, read_digest(messages[place])):
        known.setdefault(key, []).append(Hit(turn))
    last = max(n for n, message in enumerate(messages[: replies(messages)[1][0]])) + 1
    for history in (messages[:last], [bare(message) for message in messages[:last]]):
        call = read_chat(json.dumps({"model": "m", "messages": history}).encode(), IncrementalParser())
        found = match(call.conversation, {key: known.get(key, []) for key in lookup_keys(call.conversation)})
        assert (found.kind, found.parent.id, found.at, found.applied_rules) == ("continue", "t0", place + 1, ())


def bare(message):
    return {name: value for name, value in message.items() if not name.endswith(("_token_ids", "_log_probs"))}


def read_digest(message):
    call = read_chat(json.dumps({"model": "m", "messages": [message]}).encode(), IncrementalParser())
    return call.conversation.digests[0]

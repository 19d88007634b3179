"""Format `nemo-gym`: NeMo Gym accepts it, and NeMo RL reads exactly the sequence from each response."""

import copy
import json

import msgspec
import pytest
from pydantic import TypeAdapter

from tests.support.material import require_package
from tests.trajectories.formats.readers import follow, read_nemo_gym, token_fields
from tests.trajectories.formats.schemas import GymMessages, GymResult
from tests.trajectories.rollouts import ROLLOUTS, TASK, Talk, rewarded, rollout, torn, user
from tokencache.core.outcome import Outcome
from tokencache.trajectories.formats.nemo_gym import nemo_gym
from tokencache.trajectories.formats.registry import FORMATS, write


def written(made):
    return json.loads(msgspec.json.encode(nemo_gym(made)))


def all_rows(made):
    out = written(made)
    return out["responses"] + out["untrainable"]


def carrying(row):
    return [item for item in row["response"]["output"] if "generation_token_ids" in item]


@pytest.mark.parametrize("shape", ROLLOUTS)
def test_gym_accepts_it(shape):
    for row in all_rows(ROLLOUTS[shape]):
        GymResult.model_validate(row)
        GymMessages.validate_python(row["messages"])


def test_the_classes_of_gym_accept_it():
    gym = require_package("nemo_gym", "nemo_gym.openai_utils")
    for row in [row for made in ROLLOUTS.values() for row in all_rows(made)]:
        gym.NeMoGymResponseCreateParamsNonStreaming.model_validate(row["responses_create_params"])
        TypeAdapter(list[gym.NeMoGymChatCompletionMessageParam]).validate_python(row["messages"])
        read = gym.NeMoGymResponse.model_validate(row["response"])
        ids = [getattr(item, "generation_token_ids", None) for item in read.output]
        assert ids == [item.get("generation_token_ids") for item in row["response"]["output"]]


def test_gym_measures_no_failed_rollout_whatever_reward_its_verifier_adds():
    server = require_package("nemo_gym", "nemo_gym.base_resources_server")
    profile = require_package("nemo_gym", "nemo_gym.reward_profile")
    failed = msgspec.structs.replace(ROLLOUTS["linear"], outcome=Outcome("sandbox", "no disk"))
    (bad,), (good,) = (json.loads(write(failed, FORMATS["nemo-gym"]))["untrainable"], written(ROLLOUTS["linear"])["responses"])
    results = [server.BaseVerifyResponse.model_validate({**row, "reward": 0.0}).model_dump() for row in (bad, good)]
    _, measured, masked, _ = profile.select_measured([], results)
    assert [(one["failure_kind"], one["failure_reason"]) for one in masked] == [("tokencache:sandbox", "no disk")]
    assert [one["failure_kind"] for one in measured] == [None]


@pytest.mark.parametrize("shape", ROLLOUTS)
def test_nemo_rl_reads_the_sequences(shape):
    made = ROLLOUTS[shape]
    trained = [s for s in made.sequences if s.trainable]
    for row, sequence in zip(read_nemo_gym(written(made)), trained, strict=True):
        end = len(row.token_ids)  # NeMo RL does not see tokens after the last trained one
        assert row.token_ids == sequence.token_ids[:end]
        assert row.mask == sequence.loss_mask[:end]
        assert row.logprobs == sequence.logprobs[:end]
        assert not any(sequence.loss_mask[end:])


@pytest.mark.parametrize("shape", ROLLOUTS)
def test_chat_messages_carry_the_same_tokens(shape):
    for row in all_rows(ROLLOUTS[shape]):
        in_messages = [token_fields(m) for m in row["messages"] if "prompt_token_ids" in m]
        assert in_messages == [token_fields(item) for item in carrying(row)]


@pytest.mark.parametrize("place", [0, 40, -1])
def test_nemo_rl_notices_a_prompt_that_was_tokenized_again(place):
    row = copy.deepcopy(written(ROLLOUTS["linear"])["responses"][0])
    item = carrying(row)[1]
    seen = len(carrying(row)[0]["prompt_token_ids"]) + len(carrying(row)[0]["generation_token_ids"])
    item["prompt_token_ids"][place % seen] += 1
    with pytest.raises(AssertionError, match="Non-contiguous"):
        read_nemo_gym({"responses": [row]})


def test_items_are_in_the_order_of_the_conversation():
    row = written(ROLLOUTS["linear"])["responses"][0]
    assert [(item["type"], item.get("role"), "prompt_token_ids" in item) for item in row["response"]["output"]] == [
        ("reasoning", None, False),
        ("message", "assistant", False),
        ("function_call", None, True),
        ("function_call_output", None, False),
        ("function_call", None, False),
        ("function_call", None, True),
        ("function_call_output", None, False),
        ("function_call_output", None, False),
        ("reasoning", None, False),
        ("message", "assistant", True),
    ]
    asked = row["responses_create_params"]
    assert [item["role"] for item in asked["input"]] == ["system", "user"]
    assert [tool["name"] for tool in asked["tools"]] == ["bash"]
    assert (asked["temperature"], asked["top_p"], asked["max_output_tokens"]) == (0.7, 0.95, 512)
    assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant", "tool", "assistant", "tool", "tool", "assistant"]


def test_replies_of_another_sequence_are_input_without_tokens():
    row = written(ROLLOUTS["respliced"])["responses"][1]
    assert [item["type"] for item in row["responses_create_params"]["input"]] == [
        "message",
        "message",
        "function_call",
        "function_call_output",
        "message",
        "message",
    ]
    assert not any("prompt_token_ids" in item for item in row["responses_create_params"]["input"])
    assert row["tokencache"]["start"] == "resplice"
    assert row["tokencache"]["parent"] == "t0"


def test_a_turn_without_log_probabilities_is_context_of_the_next():
    row = written(ROLLOUTS["without-logprobs"])["responses"][0]
    assert ["prompt_token_ids" in item for item in row["response"]["output"] if item.get("role") == "assistant"] == [True, False, True]
    first, last = (token_fields(item) for item in carrying(row))
    assert last[0][: len(first[0] + first[1])] == first[0] + first[1]


def test_sequences_that_nemo_rl_refuses_are_listed_separately():
    talk = Talk()
    first = talk.call(TASK, "Twelve.", logprobs=[])
    talk.call([*talk.history(first), user("Well?")], "", after=first, cut=0)
    out = written(rollout(talk.records()))
    assert out["responses"] == []
    assert [row["tokencache"]["id"] for row in out["untrainable"]] == [first]
    with pytest.raises(AssertionError, match="no generation data"):
        follow([])


def test_a_reward_that_was_given():
    rows = list(all_rows(rewarded(ROLLOUTS["sub-agent"])))
    assert {row["reward"] for row in rows} == {0.5}
    assert rows[0]["tokencache"]["group"] == "prompt-7"


def test_there_are_labels_and_no_reward():
    for row in all_rows(ROLLOUTS["sub-agent"]):
        assert "reward" not in row
        assert {"session", "complete", "id", "parent", "start", "reason", "continued", "tools", "weight", "turns"} <= set(row["tokencache"])


def test_a_truncated_reply_is_incomplete():
    talk = Talk()
    talk.call(TASK, "One, two, three, four.", cut=3)
    response = written(rollout(talk.records()))["responses"][0]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert written(ROLLOUTS["linear"])["responses"][0]["response"]["status"] == "completed"


def test_images_are_parts_with_a_reference():
    row = written(ROLLOUTS["pictures"])["responses"][0]
    (asked,) = row["responses_create_params"]["input"]
    assert [part["type"] for part in asked["content"]] == ["input_text", "input_image", "input_text"]
    (seen,) = (item for item in row["response"]["output"] if item["type"] == "function_call_output")
    assert [part["image_url"][:7] for part in seen["output"]] == ["media:b", "media:a"]
    asked, _, result, shown, _ = row["messages"]
    assert [part["type"] for part in asked["content"]] == ["text", "image_url", "text"]
    assert (result["role"], result["content"]) == ("tool", "")
    assert (shown["role"], [part["type"] for part in shown["content"]]) == ("user", ["image_url", "image_url"])


def test_missing_messages_are_named():
    row = written(ROLLOUTS["media"])["responses"][0]
    assert row["responses_create_params"]["input"] == []
    assert row["tokencache"]["wordless"] == [row["tokencache"]["id"]]
    out = written(torn())
    assert (out["complete"], out["responses"]) == (False, [])
    assert [one["kind"] for one in out["incidents"]] == ["torn-record"]

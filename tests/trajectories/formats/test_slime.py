"""Format `slime`: the fields of `Sample` in slime and miles as published, and the conditions of miles' `validate`."""

import pytest

from tests.trajectories.rollouts import ROLLOUTS, TASK, linear, rewarded, text
from tokencache.trajectories.formats.registry import FORMATS
from tokencache.trajectories.formats.slime import slime
from tokencache.trajectories.rollout import rollout

BOTH = {
    "group_index",
    "index",
    "prompt",
    "tokens",
    "multimodal_inputs",
    "multimodal_train_inputs",
    "response",
    "response_length",
    "label",
    "reward",
    "loss_mask",
    "weight_versions",
    "rollout_log_probs",
    "rollout_routed_experts",
    "remove_sample",
    "status",
    "metadata",
    "generate_function_path",
    "train_metadata",
    "session_id",
    "non_generation_time",
    "spec_info",
    "prefix_cache_info",
}
"""The fields that `Sample` has in both: slime/utils/types.py at 0d234f3e, miles/utils/types.py of miles-rl 0.0.2."""
STATUS = {"pending", "completed", "truncated", "aborted", "failed"}


@pytest.mark.parametrize("shape", ROLLOUTS)
def test_from_dict_reads_every_sample(shape):
    samples = slime(ROLLOUTS[shape])["samples"]
    assert len(samples) == len(ROLLOUTS[shape].sequences)
    for sample in samples:
        assert set(sample) <= BOTH  # another name would become an attribute that nobody reads
        assert sample["status"] in STATUS
        assert len(sample["loss_mask"]) == len(sample["rollout_log_probs"]) == sample["response_length"] <= len(sample["tokens"])
        assert sample["reward"] is None
        assert set(sample["metadata"]) == {"tokencache"}
        assert all(isinstance(version, str) for version in sample["weight_versions"])


def test_the_reward_is_that_of_the_sequence_or_of_the_session():
    _, second, _ = (sequence.id for sequence in ROLLOUTS["sub-agent"].sequences)
    samples = slime(rewarded(ROLLOUTS["sub-agent"], **{second: -1.0}))["samples"]
    assert [sample["reward"] for sample in samples] == [0.5, -1.0, 0.5]


def test_miles_reads_the_same():
    assert FORMATS["miles"].write is FORMATS["slime"].write


@pytest.mark.parametrize(
    ("shape", "status"),
    [
        ("linear", ["completed"]),
        ("aborted", ["completed", "aborted"]),
        ("speechless", ["aborted"]),
        ("unrecognized", ["completed", "completed"]),
    ],
)
def test_the_status_is_that_of_the_last_turn(shape, status):
    assert [sample["status"] for sample in slime(ROLLOUTS[shape])["samples"]] == status


def test_the_prompt_has_the_messages_if_they_are_kept():
    (sample,) = slime(ROLLOUTS["linear"])["samples"]
    assert sample["prompt"] == TASK
    image, plain = slime(ROLLOUTS["media"])["samples"]
    assert (image["prompt"], plain["prompt"]) == ("", TASK)
    assert text(image["tokens"][-image["response_length"] :]) == "A cat.<|end|>"


def test_weight_versions_are_in_the_order_of_their_spans():
    (sample,) = slime(ROLLOUTS["cut-off"])["samples"]
    assert sample["weight_versions"] == ["7", "7", "8"]


def test_the_versions_of_turns_that_a_fork_shares_are_not_those_of_the_sample():
    talk = linear()
    talk.change("t0", marks=("shared",), logprobs=b"", logprobs_hash=b"")
    (sample,) = slime(rollout(talk.records()))["samples"]
    assert sample["weight_versions"] == ["7", "7"]

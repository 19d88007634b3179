"""Format `skyrl`: the fields of `GeneratorOutput` as published, and the rules of `validate_generator_output`."""

import msgspec
import pytest

from tests.trajectories.rollouts import ROLLOUTS, rewarded
from tokencache.core.session import Reward
from tokencache.trajectories.formats.skyrl import skyrl

FIELDS = {
    "prompt_token_ids",
    "response_ids",
    "rewards",
    "loss_masks",
    "stop_reasons",
    "rollout_metrics",
    "rollout_logprobs",
    "trajectory_ids",
    "trajectory_generation_times",
    "rollout_expert_indices",
    "is_last_step",
    "env_metrics",
    "pixel_values",
    "image_grid_thw",
}
"""From skyrl 0.3.0, skyrl/train/generators/base.py."""


@pytest.mark.parametrize("shape", ROLLOUTS)
def test_every_batch_is_valid_except_for_the_rewards(shape):
    batch = skyrl(ROLLOUTS[shape])["generator_output"]
    assert set(batch) - FIELDS == {"tokencache"}
    assert not batch.pop("rewards")
    assert {len(column) for column in batch.values()} == {len(ROLLOUTS[shape].sequences)}
    for response, mask, logprobs in zip(batch["response_ids"], batch["loss_masks"], batch["rollout_logprobs"], strict=True):
        assert len(response) == len(mask) == len(logprobs)
    assert batch["is_last_step"] == [False] * (len(batch["is_last_step"]) - 1) + [True] * bool(batch["is_last_step"])


def test_rewards_are_given_for_all_responses_or_for_none():
    made = ROLLOUTS["sub-agent"]
    first, second, third = (sequence.id for sequence in made.sequences)
    assert skyrl(rewarded(made, **{second: -1.0}))["generator_output"]["rewards"] == [0.5, -1.0, 0.5]
    some = msgspec.structs.replace(made, reward=Reward(None, sequences={first: 1.0}))
    assert skyrl(some)["generator_output"]["rewards"] is None
    every = msgspec.structs.replace(made, reward=Reward(None, sequences={first: 1.0, second: 0.0, third: 0.0}))
    assert skyrl(every)["generator_output"]["rewards"] == [1.0, 0.0, 0.0]


def test_a_reply_with_a_call_ends_with_stop():
    assert skyrl(ROLLOUTS["sub-agent"])["generator_output"]["stop_reasons"] == ["stop"] * 3
    assert skyrl(ROLLOUTS["aborted"])["generator_output"]["stop_reasons"] == ["stop", "abort"]

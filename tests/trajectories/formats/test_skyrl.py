"""Format `skyrl`: the fields of `GeneratorOutput` as published, and the rules of `validate_generator_output`."""

import pytest

from tests.trajectories.rollouts import ROLLOUTS
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
    assert batch.pop("rewards") is None
    assert {len(column) for column in batch.values()} == {len(ROLLOUTS[shape].sequences)}
    for response, mask, logprobs in zip(batch["response_ids"], batch["loss_masks"], batch["rollout_logprobs"], strict=True):
        assert len(response) == len(mask) == len(logprobs)
    assert batch["is_last_step"] == [False] * (len(batch["is_last_step"]) - 1) + [True] * bool(batch["is_last_step"])


def test_a_reply_with_a_call_ends_with_stop():
    assert skyrl(ROLLOUTS["sub-agent"])["generator_output"]["stop_reasons"] == ["stop"] * 3
    assert skyrl(ROLLOUTS["aborted"])["generator_output"]["stop_reasons"] == ["stop", "abort"]

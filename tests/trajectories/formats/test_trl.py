"""Format `trl`: what `_generate` of TRL requires of a `rollout_func`, and how it uses the result."""

import pytest

from tests.trajectories.rollouts import ROLLOUTS
from tokencache.trajectories.formats.trl import trl

REQUIRED = {"prompt_ids", "completion_ids", "logprobs"}
"""From trl 1.16.0, trl/trainer/grpo_trainer.py, `GRPOTrainer._generate`; `env_mask` is popped from the rest."""


@pytest.mark.parametrize("shape", ROLLOUTS)
def test_rows_make_the_dict_that_a_rollout_func_returns(shape):
    rows = trl(ROLLOUTS[shape])["rows"]
    assert len(rows) == len(ROLLOUTS[shape].sequences)
    for row in rows:
        assert set(row) == REQUIRED | {"env_mask", "tokencache"}
        assert len(row["completion_ids"]) == len(row["logprobs"]) == len(row["env_mask"])
        assert all(isinstance(value, float) for value in row["logprobs"])  # one number each, not a list of the likeliest


def test_ones_mark_the_tokens_of_the_model():
    (row,) = trl(ROLLOUTS["linear"])["rows"]
    assert row["env_mask"][0] == row["env_mask"][-1] == 1  # it begins with what the model said, and ends so
    assert 0 in row["env_mask"]
    assert sum(row["env_mask"]) == ROLLOUTS["linear"].figures.trainable_tokens

"""Failed rollouts in every format: a trainer learns nothing from them, and its groups are those of the valid rollouts alone."""

import json
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.forest import grow
from tests.core.settings import SOME
from tests.trajectories.rollouts import ROLLOUTS, of_forest
from tokencache.batching import mean_std
from tokencache.core.outcome import Outcome
from tokencache.core.session import Reward
from tokencache.trajectories.formats.registry import FORMATS, write
from tokencache.trajectories.verify_rows import verify_row

READERS = {  # format: the reward that its trainer sees of each row, and the mask
    "native": lambda out: [(out["reward"] if out["valid"] else None, s["loss_mask"] if out["valid"] else []) for s in out["sequences"]],
    "verl": lambda out: [(row["reward_score"], row["response_mask"]) for row in out["outputs"]],
    "slime": lambda out: [(row["reward"], row["loss_mask"]) for row in out["samples"]],
    "skyrl": lambda out: [
        ((out["generator_output"]["rewards"] or [None] * (n + 1))[n], mask) for n, mask in enumerate(out["generator_output"]["loss_masks"])
    ],
    "trl": lambda out: [(row["tokencache"]["session_reward"], row["env_mask"]) for row in out["rows"]],
    "tinker": lambda out: [(row["tokencache"]["session_reward"], row["loss_fn_inputs"]["mask"]["data"]) for row in out["data"]],
    "nemo-gym": lambda out: [
        (None if row.get("mask_sample") else row.get("reward"), ["generation_token_ids" in item for item in row["response"]["output"]])
        for row in [*out["responses"], *out["untrainable"]]
    ],
    "verifiers": lambda out: [
        (out["rewards"]["reward"]["score"] if out["ok"] and out["rewards"] else None, [any(node.get("mask", ())) for node in out["nodes"]])
    ],
    "atif": lambda out: [
        (row["extra"]["session_reward"], ["logprobs" in step.get("metrics", {}) for step in row["steps"]]) for row in out["trajectories"]
    ],
}
READERS["miles"], READERS["prime-rl"] = READERS["slime"], READERS["verifiers"]


def as_read(form, rollout):
    """The rewards that the trainer sees of a rollout's rows, and whether any of its tokens is trained."""
    rows = READERS[form](json.loads(write(rollout, FORMATS[form])))
    return {reward for reward, _ in rows}, any(any(mask) for _, mask in rows)


def test_every_format_has_a_reader():
    assert set(READERS) == set(FORMATS)


@pytest.mark.parametrize("form", FORMATS)
@SOME
@given(st.integers(0, 2**32))
def test_the_statistics_of_a_group_are_those_of_its_valid_rollouts(form, seed):
    rng = random.Random(seed)
    group = [
        msgspec.structs.replace(
            of_forest(grow(rng), f"s{n}"),
            complete=rng.random() < 0.8,
            outcome=Outcome(rng.choice(["ok", "ok", "engine", "timeout", "own-word"])),
            reward=Reward(rng.choice([0.0, 1.0, -0.5])),
        )
        for n in range(4)
    ]
    valid = [one.reward.reward for one in group if one.complete and one.outcome.ok]
    seen = [as_read(form, one) for one in group]
    rewards = [reward for read, _ in seen for reward in read if reward is not None]
    assert mean_std(rewards) == mean_std(valid)
    assert not any(trained for one, (_, trained) in zip(group, seen, strict=True) if not one.valid)


@pytest.mark.parametrize("shape", ROLLOUTS)
@pytest.mark.parametrize("form", FORMATS)
def test_a_failed_rollout_passes_every_check_and_says_why_it_is_not_trained(form, shape):
    failed = msgspec.structs.replace(ROLLOUTS[shape], outcome=Outcome("sandbox", "no disk"), reward=Reward(1.0))
    out = json.loads(write(failed, FORMATS[form]))
    said = out["info"]["tokencache"] if form in {"verifiers", "prime-rl"} else out
    assert (said["outcome"], said["outcome_detail"], said["valid"]) == ("sandbox", "no disk", False)
    rows = out[FORMATS[form].rows] if FORMATS[form].rows and form != "native" else [out]
    assert [failure for row in rows for failure in verify_row(row).failures] == []


def test_trainers_that_have_a_member_for_failures_get_it():
    failed = msgspec.structs.replace(ROLLOUTS["linear"], outcome=Outcome("own-word", "no disk"))
    (response,) = json.loads(write(failed, FORMATS["nemo-gym"]))["untrainable"]
    names = ("mask_sample", "failure_kind", "failure_reason")
    assert [response[name] for name in names] == [True, "tokencache:own_word", "no disk"]
    trace = json.loads(write(failed, FORMATS["verifiers"]))
    assert (trace["ok"], trace["errors"]) == (False, [{"type": "own-word", "message": "no disk"}])
    assert [sample["remove_sample"] for sample in json.loads(write(failed, FORMATS["slime"]))["samples"]] == [True]
    for form, member in (("nemo-gym", "mask_sample"), ("verifiers", '"errors":[{')):
        assert member not in write(ROLLOUTS["linear"], FORMATS[form]).decode()

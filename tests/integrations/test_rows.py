"""Row policies: what each keeps, what it refuses, and that nothing is left out in silence."""

import logging
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.forest import grow
from tests.trajectories.rollouts import ROLLOUTS, of_forest
from tokencache.integrations.rows import RowsError, check_policy, choose_rows
from tokencache.trajectories.formats.native import native
from tokencache.trajectories.values import Trajectory


def trajectory_of(rollout):
    return msgspec.convert(native(rollout), Trajectory)


TRAJECTORIES = {name: trajectory_of(made) for name, made in ROLLOUTS.items()}


def kept(shape, rows, *, several=False):
    return [row.sequence.id for row in choose_rows(TRAJECTORIES[shape], rows, several=several).kept]


def silent_losses(trajectory, chosen):
    """Check: every row is either kept, or listed with a reason. Returns what is wrong."""
    listed = [row.sequence.id for row in chosen.kept] + [one.row.sequence.id for one in chosen.dropped]
    wrong = [f"{sequence.id} is in no list" for sequence in trajectory.sequences if sequence.id not in listed]
    wrong += [f"{name} is listed twice" for name in set(listed) if listed.count(name) > 1]
    return wrong + [f"{one.row.sequence.id} has no reason" for one in chosen.dropped if not one.reason]


@given(st.integers(0, 10_000), st.sampled_from(["single", "main", "longest", "all"]), st.booleans())
def test_each_row_is_kept_or_listed_with_a_reason(seed, rows, several):
    trajectory = trajectory_of(of_forest(grow(random.Random(seed))))
    trainable = [sequence.id for sequence in trajectory.sequences if sum(sequence.loss_mask)]
    refused = ""
    try:
        chosen = choose_rows(trajectory, rows, several=several)
    except RowsError as error:
        refused = str(error)
    if refused:
        assert rows in {"single", "main"} or not several or not trainable
        assert rows == "main" or all(f"sequence {name}: " in refused for name in trainable)
        return
    assert not silent_losses(trajectory, chosen)
    assert all(sum(row.sequence.loss_mask) for row in chosen.kept)
    assert chosen.kept
    if not several or rows in {"single", "longest"}:
        assert len(chosen.kept) == 1
    if rows == "all":
        assert [row.sequence.id for row in chosen.kept] == trainable


def test_the_check_of_silent_losses_can_fail():
    trajectory = TRAJECTORIES["thrown-away"]
    chosen = choose_rows(trajectory, "longest", several=False)
    assert silent_losses(trajectory, chosen._replace(dropped=[])) == ["t1 is in no list"]
    assert silent_losses(trajectory, chosen._replace(dropped=[chosen.dropped[0]._replace(reason="")])) == ["t1 has no reason"]
    assert silent_losses(trajectory, chosen._replace(kept=chosen.kept * 2)) == ["t0 is listed twice"]


def test_what_each_policy_keeps():
    assert kept("linear", "single") == ["t0"]
    assert kept("thrown-away", "main") == ["t0"]
    assert kept("thrown-away", "longest") == ["t0"]
    assert kept("thrown-away", "all", several=True) == ["t0", "t1"]
    assert kept("respliced", "main", several=True) == ["t0", "t2"]
    assert kept("respliced", "longest") == ["t0"]


def test_an_error_names_the_rows_and_says_what_to_do():
    with pytest.raises(RowsError, match=r"2 rows, and one is allowed .*sequence t0: 49 .*sequence t1: 5 .*rows='main' or rows='longest'"):
        kept("thrown-away", "single")
    with pytest.raises(RowsError, match=r"sequence t0: 42 .*sequence t2: 41 .*Use rows='longest'"):
        kept("respliced", "main")
    with pytest.raises(RowsError, match="no call was recorded"):
        kept("empty", "main")
    with pytest.raises(RowsError, match=r"no row to train on.* t0 with 0 trainable tokens"):
        kept("speechless", "longest")


def test_left_out_tokens_are_logged(caplog):
    with caplog.at_level(logging.WARNING):
        kept("linear", "main")
        assert not caplog.records
        kept("thrown-away", "main")
    assert "leaves out trainable tokens" in caplog.text
    assert "t1 with 5 trainable tokens" in caplog.text


def test_a_policy_that_the_trainer_cannot_take_is_refused_at_the_start():
    check_policy("all", several=True)
    with pytest.raises(ValueError, match="this trainer accepts one row"):
        check_policy("all", several=False)
    with pytest.raises(ValueError, match="'mian' is none of single, main, longest, all"):
        check_policy("mian", several=True)

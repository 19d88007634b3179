"""Group advantages: compared with numpy, over sessions and not over rows."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batching.made import rows_of, shape
from tests.core.settings import SOME
from tokencache.batching.advantages import EPSILON, group_advantages, leave_one_out, mean_std, row_advantages

REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8).filter(lambda rewards: max(rewards) - min(rewards) > 1e-3)


@SOME
@given(REWARDS)
def test_mean_and_standard_deviation(rewards):
    wanted = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + EPSILON)
    assert mean_std(rewards) == pytest.approx(wanted.tolist(), abs=1e-6)
    assert mean_std(rewards, scale=False) == pytest.approx((np.array(rewards) - np.mean(rewards)).tolist(), abs=1e-6)


@SOME
@given(REWARDS)
def test_leave_one_out(rewards):
    wanted = [reward - np.mean(rewards[:n] + rewards[n + 1 :]) for n, reward in enumerate(rewards)]
    assert leave_one_out(rewards) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("method", [mean_std, leave_one_out])
@pytest.mark.parametrize("rewards", [[], [0.7], [0.1, 0.1, 0.1], [1e300, 1e300]])
def test_nothing_to_compare_with_is_exactly_zero(method, rewards):
    assert method(rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("method", [mean_std, leave_one_out])
def test_the_largest_rewards_that_are_accepted_do_not_overflow(method):
    assert all(map(math.isfinite, method([1e300, -1e300, 1e300, 0.0])))


@pytest.mark.parametrize("method", [mean_std, leave_one_out])
@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_finite_number_is_refused(method, reward):
    with pytest.raises(ValueError, match="is not a finite number"):
        method([0.0, reward])


def test_a_session_counts_once_in_its_group_however_many_rows_it_has():
    many = shape("sub-agent", session="many", group="g", reward=1.0)
    one = shape("linear", session="one", group="g", reward=0.0)
    other = shape("linear", session="other", group="h", reward=5.0)
    advantages = group_advantages([many, one, other], leave_one_out)
    assert advantages == {"many": 1.0, "one": -1.0, "other": 0.0}
    assert row_advantages(rows_of(many, one), advantages) == [1.0, 1.0, 1.0, -1.0]


def test_sessions_without_a_group_are_not_compared():
    sessions = [shape("linear", session=name, reward=reward) for name, reward in (("a", 1.0), ("b", 0.0))]
    assert group_advantages(sessions) == {"a": 0.0, "b": 0.0}


def test_missing_rewards_repeated_sessions_and_unknown_rows_are_refused():
    with pytest.raises(ValueError, match="session 'linear' has no reward"):
        group_advantages([shape("linear")])
    with pytest.raises(ValueError, match="session 'linear' occurs twice"):
        group_advantages([shape("linear", reward=1.0)] * 2)
    with pytest.raises(ValueError, match="session 'linear' has no advantage"):
        row_advantages(rows_of(shape("linear")), {"other": 1.0})


OUTCOMES = st.lists(
    st.tuples(st.sampled_from(["ok", "ok", "engine", "own-word"]), st.booleans(), st.none() | st.floats(-1e3, 1e3)), min_size=1, max_size=8
)


@SOME
@given(OUTCOMES, st.sampled_from([mean_std, leave_one_out]), st.integers(1, 3))
def test_a_group_is_compared_as_if_it_had_only_its_valid_members(drawn, method, min_valid):
    members = [
        shape("linear", session=f"s{n}", group="g", outcome=outcome, complete=complete, reward=0.5 if reward is None else reward)
        for n, (outcome, complete, reward) in enumerate(drawn)
    ]
    valid = [one for one, (outcome, complete, _) in zip(members, drawn, strict=True) if outcome == "ok" and complete]
    wanted = dict.fromkeys((one.session for one in members), 0.0)
    if len(valid) >= min_valid:
        wanted |= group_advantages(valid, method)
    unrewarded = [msgspec.structs.replace(one, reward=None) if one not in valid else one for one in members]
    assert group_advantages(members, method, min_valid=min_valid) == group_advantages(unrewarded, method, min_valid=min_valid) == wanted


def test_a_group_needs_a_valid_member():
    with pytest.raises(ValueError, match="min_valid is 0"):
        group_advantages([], min_valid=0)

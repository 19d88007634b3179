"""Compares the rewards of the sessions of a group: group-relative advantages.

The group is a set of sessions, not of rows. A session with ten rows counts once in the mean of its group, and all its rows have the same
advantage.

==================  =================================================================================================================
`mean_std`          (reward - mean) / (std + epsilon), as in GRPO (arXiv 2402.03300). `scale=False` leaves the division out (Dr. GRPO,
                    arXiv 2503.20783). `std` is the sample standard deviation, as in verl and TRL (`torch.std`)
`leave_one_out`     reward - mean of all others, as in RLOO (arXiv 2402.14740)
==================  =================================================================================================================

A session that is not valid (`Trajectory.valid`) counts in no group. A group of one has nothing to compare with: its advantage is 0.0. (verl
uses the reward itself.) If all rewards of a group are equal, all advantages are exactly 0.0.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from tokencache.batching.selection import TrainingRow
from tokencache.trajectories.values import Trajectory

EPSILON = 1e-6
"""The value that verl adds to the standard deviation (`verl/trainer/ppo/core_algos.py`, 0.9.1)."""


def mean_std(rewards: Sequence[float], *, scale: bool = True, epsilon: float = EPSILON) -> list[float]:
    """Return (reward - mean) / (std + epsilon) for each reward of a group; without the division if `scale` is false.

    Raises:
        ValueError: a reward is not a finite number.
    """
    if _nothing_to_compare(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(reward / len(rewards) for reward in rewards)
    deviations = [reward - mean for reward in rewards]
    if not scale:
        return deviations
    std = math.hypot(*deviations) / math.sqrt(len(rewards) - 1)  # `hypot` does not overflow where the sum of squares would
    return [deviation / (std + epsilon) for deviation in deviations]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Return for each reward of a group its difference from the mean of all others.

    Raises:
        ValueError: a reward is not a finite number.
    """
    if _nothing_to_compare(rewards):
        return [0.0] * len(rewards)
    others = len(rewards) - 1
    mean = math.fsum(reward / len(rewards) for reward in rewards)
    return [(reward - mean) / others * len(rewards) for reward in rewards]  # equal to reward - (sum - reward) / others


def _nothing_to_compare(rewards: Sequence[float]) -> bool:
    """Whether a group has one member, or equal rewards only."""
    for reward in rewards:
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward} is not a finite number")
    return len(set(rewards)) <= 1


def group_advantages(
    trajectories: Iterable[Trajectory], method: Callable[[Sequence[float]], list[float]] = mean_std, *, min_valid: int = 1
) -> dict[str, float]:
    """Compute the advantage of each session over the valid members of its group, from `reward` and `group` of the trajectories.

    Sessions without a group (`""`) are groups of one. An invalid session counts in no group, whatever its reward, and its advantage is 0.0.

    Args:
        trajectories: whole groups. Sessions that are left out are missing in the mean.
        method: `mean_std`, `leave_one_out` or any other function from the rewards of a group to its advantages.
        min_valid: in a group with fewer valid members than this, all advantages are 0.0.

    Returns:
        The advantage of each session, by name.

    Raises:
        ValueError: a valid session has no reward, a session occurs twice, or `min_valid` is less than 1.
    """
    if min_valid < 1:
        raise ValueError(f"min_valid is {min_valid}: a group needs at least 1 valid member")
    rewards: dict[str, float] = {}
    advantages: dict[str, float] = {}
    groups: dict[tuple[str, str], list[str]] = {}
    for trajectory in trajectories:
        session = trajectory.session
        if session in advantages:
            raise ValueError(f"session {session!r} occurs twice")
        advantages[session] = 0.0
        if not trajectory.valid:
            continue
        if trajectory.reward is None:
            raise ValueError(f"session {session!r} has no reward: set one, or leave the session out")
        rewards[session] = trajectory.reward
        groups.setdefault((trajectory.group, "" if trajectory.group else session), []).append(session)
    for members in groups.values():
        if len(members) >= min_valid:
            advantages.update(zip(members, method([rewards[session] for session in members]), strict=True))
    return advantages


def row_advantages(rows: Iterable[TrainingRow], by_session: Mapping[str, float]) -> list[float]:
    """Return the advantage of each row: that of its session. Raises `ValueError` if the session of a row has no advantage."""
    found = []
    for row in rows:
        if row.trajectory.session not in by_session:
            raise ValueError(f"session {row.trajectory.session!r} has no advantage")
        found.append(by_session[row.trajectory.session])
    return found

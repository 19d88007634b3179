"""Trajectories for the tests: of the rollouts of every shape, and of random forests."""

import random

import msgspec

from tests.core.forest import grow
from tests.trajectories.rollouts import ROLLOUTS, of_forest
from tokencache.batching.selection import TrainingRow
from tokencache.trajectories.formats.native import native
from tokencache.trajectories.values import Trajectory


def as_trajectory(made, **changes):
    """The trajectory that a client reads from a rollout."""
    read = msgspec.convert(msgspec.json.decode(msgspec.json.encode(native(made))), Trajectory)
    return msgspec.structs.replace(read, **changes)


def shape(name, **changes):
    return as_trajectory(ROLLOUTS[name], **changes)


def rows_of(*trajectories):
    return [TrainingRow(trajectory, sequence) for trajectory in trajectories for sequence in trajectory.sequences]


def random_rows(seed, sessions=3):
    """Rows of random sessions over a tiny vocabulary, so that they share many prefixes. No row begins with a sampled token."""
    rng = random.Random(seed)
    made = [as_trajectory(of_forest(grow(rng), f"s{n}")) for n in range(sessions)]
    return [row for row in rows_of(*made) if row.sequence.loss_mask[:1] != [1]]


def with_tokens(sequence, token_ids, loss_mask=None, logprobs=None):
    """A sequence with other tokens; without a mask none is trained."""
    return msgspec.structs.replace(
        sequence,
        token_ids=token_ids,
        loss_mask=loss_mask or [0] * len(token_ids),
        logprobs=logprobs or [-0.5 if mask else 0.0 for mask in loss_mask or [0] * len(token_ids)],
        tokens=len(token_ids),
    )


def row(token_ids, loss_mask=None, *, session="s", sequence="q", logprobs=None):
    """A row of given tokens."""
    base = shape("linear", session=session)
    made = msgspec.structs.replace(with_tokens(base.sequences[0], token_ids, loss_mask, logprobs), id=sequence)
    return TrainingRow(base, made)

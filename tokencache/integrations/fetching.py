"""Reads a finished rollout in the format of a trainer, with the rows that the trainer gets."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from tokencache.batching.selection import Selection
from tokencache.client import AsyncSession, Trajectory
from tokencache.integrations.rows import RowPolicy, choose_rows
from tokencache.trajectories.lengths import ExportOptions


class FinishedRollout(NamedTuple):
    """A valid rollout that is over.

    Attributes:
        trajectory: in the native format.
        export: in the requested format.
        rows: which sequences are trained, and which are not.
        media: the bytes of the images in the rows that are trained, by digest.
    """

    trajectory: Trajectory
    export: dict[str, Any]
    rows: Selection
    media: Mapping[str, bytes]

    @property
    def kept(self) -> set[str]:
        """The ids of the sequences to train."""
        return {row.sequence.id for row in self.rows.kept}

    @property
    def dropped(self) -> list[dict[str, Any]]:
        """The sequences that are not trained: id, number of trainable tokens, and why."""
        return [
            {"sequence": one.row.sequence.id, "trainable_tokens": sum(one.row.sequence.loss_mask), "reason": one.reason}
            for one in self.rows.dropped
        ]


class Fetching(msgspec.Struct, frozen=True, kw_only=True):
    """What to fetch of a rollout: `Rollouts.read` of the trainers that have an export format.

    Attributes:
        form: the export format of the trainer.
        rows: which rows of a rollout are trained (`tokencache.integrations.rows`).
        several: whether the trainer accepts several rows for each prompt.
        images: whether the trainer gets the images of the rows. Otherwise rows with images are refused.
        lengths: limits for the length of rows, as for the trajectory.
    """

    form: str
    rows: RowPolicy
    several: bool
    images: bool = False
    lengths: ExportOptions = msgspec.field(default_factory=ExportOptions)

    async def __call__(self, session: AsyncSession, trajectory: Trajectory) -> FinishedRollout:
        """Choose the rows, and fetch them and their images.

        Raises:
            RowsError: the rows do not fit the policy, or have images that the trainer does not get.
            ClientError: the proxy refused a request.
        """
        chosen = choose_rows(trajectory, self.rows, several=self.several, images=self.images)
        wanted = {medium.sha256 for row in chosen.kept for medium in row.sequence.media if medium.sha256}
        export = await session.fetch(self.form, **self.lengths)
        return FinishedRollout(trajectory, export, chosen, {sha256: await session.medium(sha256) for sha256 in sorted(wanted)})

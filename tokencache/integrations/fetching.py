"""Reads a finished rollout in the format of a trainer, with the rows that the trainer gets."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from tokencache.batching.selection import DroppedRow, Selection, TrainingRow
from tokencache.client import AsyncSession, Trajectory
from tokencache.integrations.rows import NothingToTrainError, RowPolicy, choose_rows
from tokencache.trajectories.lengths import ExportOptions


class FinishedRollout(NamedTuple):
    """A valid rollout that is over.

    Attributes:
        trajectory: in the native format, within the limits.
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
        lengths: limits for the length of rows. They do not change which rows are chosen: without a main line that is too long, a call
            that makes a title would be the main line. With `model`, they are chosen among the rows of that model.
    """

    form: str
    rows: RowPolicy
    several: bool
    images: bool = False
    lengths: ExportOptions = msgspec.field(default_factory=ExportOptions)

    async def __call__(self, session: AsyncSession, trajectory: Trajectory) -> FinishedRollout:
        """Choose the rows of the whole rollout, limit their length, and fetch them and their images.

        Raises:
            NothingToTrainError: no row has a trainable token, or none fits the limits.
            RowsError: the rows do not fit the policy, or have images that the trainer does not get.
            ClientError: the proxy refused a request.
        """
        if model := self.lengths.get("model"):
            trajectory = await session.trajectory(drift="off", model=model)
        chosen = choose_rows(trajectory, self.rows, several=self.several, images=self.images)
        export = await session.fetch(self.form, **self.lengths)
        if self.lengths:  # after the export: weights that are announced in between leave out more rows (`max_lag`), never fewer
            trajectory = await session.trajectory(drift="off", **self.lengths)
            chosen = _within(trajectory, chosen)
        wanted = {medium.sha256 for row in chosen.kept for medium in row.sequence.media if medium.sha256}
        return FinishedRollout(trajectory, export, chosen, {sha256: await session.medium(sha256) for sha256 in sorted(wanted)})


def _within(limited: Trajectory, chosen: Selection) -> Selection:
    """Return a selection of a whole rollout as it is with limits of length and lag.

    Raises:
        NothingToTrainError: no row that was kept has a trainable token within the limits.
    """
    left = {sequence.id: sequence for sequence in limited.sequences if any(sequence.loss_mask)}
    kept = [TrainingRow(limited, left[row.sequence.id]) for row in chosen.kept if row.sequence.id in left]
    lost = [_beyond(row, limited) for row in chosen.kept if row.sequence.id not in left]
    if not kept:
        reasons = "; ".join(f"sequence {one.row.sequence.id} {one.reason}" for one in lost)
        raise NothingToTrainError(f"session {limited.session!r} has no row to train on: {reasons}")
    return chosen._replace(kept=kept, dropped=[*chosen.dropped, *lost])


def _beyond(row: TrainingRow, limited: Trajectory) -> DroppedRow:
    """Say which limit left out a row."""
    stale = limited.figures.stale
    if stale is not None and row.sequence.turns[0].turn in stale.turns:
        return DroppedRow(row, "max_lag", f"lags more than {stale.max_lag} policy versions, or its lag is not known")
    return DroppedRow(row, "lengths", "is longer than the limits")

"""Chooses the rows of a rollout that a trainer gets. A row is one sequence of the session's trajectory.

A session has several sequences if the harness branched off, edited its history, compacted it, or made calls beside the rollout. Many
trainers accept one row for each prompt. So every integration has the option `rows`, and reports each row that it leaves out:

============  ====================================================================================================================
`single`      the rollout must have one row with trainable tokens. Otherwise `RowsError`
`main`        the main line of the rollout, without side calls, sub-agents and discarded retries. `RowsError` if the trainer accepts
              one row and the main line has several (after an edit of the history, or a compaction)
`longest`     the row with the most trainable tokens, the first of these
`all`         every row with trainable tokens. Only where the trainer accepts several rows for each prompt
============  ====================================================================================================================

Rows without a trainable token, and rows with sampled placeholders of images, are always left out. A rollout without any other row raises
`NothingToTrainError`.
"""

import logging
from typing import Literal, get_args

from tokencache.batching.selection import DroppedRow, Selection, at_least, main_line, no_placeholders, select
from tokencache.trajectories.values import Trajectory

log = logging.getLogger(__name__)

RowPolicy = Literal["single", "main", "longest", "all"]


class RowsError(ValueError):
    """The rows of a rollout do not fit the policy, or the trainer. The message lists them and says what to do."""


class NothingToTrainError(RowsError):
    """A rollout has no row with trainable tokens. The message says why each was left out."""


def check_policy(rows: str, *, several: bool) -> None:
    """Check the option `rows`.

    Args:
        rows: the option.
        several: whether the trainer accepts several rows for each prompt.

    Raises:
        ValueError: there is no such policy, or the trainer accepts one row and the policy may return several.
    """
    known = [name for name in get_args(RowPolicy) if several or name != "all"]
    if rows not in known:
        reason = "" if several or rows != "all" else ": this trainer accepts one row for each prompt"
        raise ValueError(f"rows: {rows!r} is none of {', '.join(known)}{reason}")


def choose_rows(trajectory: Trajectory, rows: RowPolicy, *, several: bool, images: bool = False) -> Selection:
    """Choose rows of a rollout, and log a warning if trainable tokens are left out.

    Args:
        trajectory: the rollout.
        rows: the policy.
        several: whether the trainer accepts several rows for each prompt.
        images: whether the trainer gets the images of the rows.

    Returns:
        The rows to train on, at least one, and all others with the reason why each was left out.

    Raises:
        NothingToTrainError: no row has a trainable token, or the rollout is not valid.
        RowsError: several rows remain where one is allowed, or a row has images and the trainer gets none, or their places are not known.
    """
    rules = (no_placeholders, at_least(1))
    chosen = select([trajectory], *rules, *((main_line,) if rows == "main" else ()))
    if rows == "longest" and chosen.kept:
        longest = max(chosen.kept, key=lambda row: sum(row.sequence.loss_mask))
        shorter = [
            DroppedRow(row, "longest", "another row has as many trainable tokens or more") for row in chosen.kept if row is not longest
        ]
        chosen = chosen._replace(kept=[longest], dropped=[*chosen.dropped, *shorter])
    if not chosen.kept:
        raise NothingToTrainError(f"session {trajectory.session!r} has no row to train on. {_listed(chosen)}")
    if len(chosen.kept) > 1 and (rows == "single" or not several):
        found = "; ".join(f"sequence {row.sequence.id}: {sum(row.sequence.loss_mask)} trainable tokens" for row in chosen.kept)
        other = " rows='main' or" if rows == "single" else ""
        advice = "Use" + other + " rows='longest' to take one of them, or a trainer that accepts several rows for each prompt"
        raise RowsError(
            f"session {trajectory.session!r} has {len(chosen.kept)} rows, and one is allowed (rows={rows!r}): {found}. {advice}"
        )
    if unplaced := [row.sequence.id for row in chosen.kept if row.sequence.has_unplaced_media]:
        raise RowsError(
            f"session {trajectory.session!r} has images in {', '.join(unplaced)}: the engine did not report which tokens stand for them, "
            "and a trainer would train them as text. Install tokencache's plugin in the engine (docs/images.md)"
        )
    if not images and (seeing := [row.sequence.id for row in chosen.kept if row.sequence.media]):
        raise RowsError(
            f"session {trajectory.session!r} has images in {', '.join(seeing)}, and this integration passes none to its trainer, which "
            "would train their placeholders as text. Fetch the native format, and load the images with tokencache.batching.load_images"
        )
    if any(sum(dropped.row.sequence.loss_mask) for dropped in chosen.dropped):
        log.warning("session %r: rows=%r leaves out trainable tokens. %s", trajectory.session, rows, _listed(chosen))
    return chosen


def _listed(chosen: Selection) -> str:
    if not chosen.dropped:
        return "It has no sequence: no call was recorded"
    return "Left out: " + "; ".join(
        f"sequence {one.row.sequence.id} with {sum(one.row.sequence.loss_mask)} trainable tokens: {one.reason}" for one in chosen.dropped
    )

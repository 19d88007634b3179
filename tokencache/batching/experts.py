"""Loads the routed experts of a sequence, for training that replays the routing of the rollout (R3).

The proxy stores only the rows that are new in each turn (`serve --experts`). This puts them together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokencache.batching.files import read_file
from tokencache.core.experts import joined, read_npy

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

    from tokencache.trajectories.values import Sequence


def load_experts(sequence: Sequence, root: str | Path) -> NDArray[Any]:
    """Return the routed experts of a sequence: integers of shape (tokens - 1, layers, experts for each token).

    Row `i` is of token `i`, as it was computed when the token was first part of a call. The last token has no row: nothing was computed
    from it.

    Args:
        sequence: the sequence.
        root: where the trainer finds the files: the directory or URL of `serve --experts`. A URL needs the extra `experts`.

    Raises:
        ValueError: tokens have no rows (their reply was streamed, or a file was lost), or the files do not fit together.
        OSError: a file cannot be read.
    """
    import numpy as np  # noqa: PLC0415 - needs the extra `batching`

    rows = joined((part.start, read_npy(read_file(root, part.path)).between(0, part.end - part.start)) for part in sequence.experts)
    if sequence.experts[0].start or len(rows) != sequence.tokens - 1:
        have = f"{sequence.experts[0].start} to {sequence.experts[0].start + len(rows)}"
        raise ValueError(f"sequence {sequence.id} has routed experts only for its tokens from {have}, not for all {sequence.tokens - 1}")
    return np.frombuffer(rows.data, rows.kind).reshape(len(rows), *rows.shape)

"""Defines `Sink`, the interface of all export files, and `PartFile`, a file that is called `FILE.part` until it is complete.

A file gets its own name when all data is written and on the disk. So a file with its own name is always complete. After an interruption
`FILE.part` contains the data that was written, and can be read.
"""

import os
from pathlib import Path
from typing import Protocol

import msgspec

from tokencache.dialects.json_io import FIELDS, VALUES
from tokencache.trajectories.formats.registry import Format

PART, MANIFEST = ".part", ".manifest.json"
"""Endings of a file that is not complete, and of the file beside it that says how it was made (`manifest`)."""


class FileError(Exception):
    """A file cannot be written or read as requested. The message explains what to do instead."""


class Sink(Protocol):
    """Writes rollouts, as the proxy returns them, to a file."""

    rows: int
    """The number of rows written: training samples, or calls of a trace."""

    def write(self, rollout: bytes) -> None:
        """Write one rollout.

        Raises:
            FileError: this kind of file cannot hold it.
        """

    def finish(self) -> None:
        """Flush everything to the disk and give the file its name."""

    def leave(self) -> Path | None:
        """Stop early: close the file so that its data can be read, and return its path."""


class PartFile:
    """A file that is called `FILE.part` until it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.part = path.with_name(path.name + PART)

    def publish(self) -> None:
        """Give the file its name. When this returns, data and name are on the disk. The manifest of a file that it replaces is removed."""
        with self.part.open("rb") as written:
            os.fsync(written.fileno())
        self.path.with_name(self.path.name + MANIFEST).unlink(missing_ok=True)
        self.part.replace(self.path)
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def rows_of(rollout: bytes, wanted: Format) -> list[msgspec.Raw]:
    """Return the rows of a rollout in a format as JSON: one for each training sample."""
    return VALUES.decode(FIELDS.decode(rollout)[wanted.rows]) if wanted.rows else [msgspec.Raw(rollout)]

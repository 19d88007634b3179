"""Defines `Sink`, the interface of all export files, and `PartFile`, a file that is called `FILE.part` until it is complete.

A file gets its own name when all data is written and on the disk. So a file with its own name is always complete. After an interruption
`FILE.part` contains the data that was written, and can be read.
"""

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from typing import IO, Protocol

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
        """Write one rollout. Raises `FileError` if this kind of file cannot hold it."""

    def finish(self) -> None:
        """Flush everything to the disk and give the file its name."""

    def leave(self) -> Path | None:
        """Stop early: close the file so that its data can be read, and return its path."""


class PartFile:
    """A file that is called `FILE.part` until it is complete. It is locked, so that one process writes it at a time.

    Raises:
        FileError: another process writes it.
        OSError: it cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.part = part_of(path)
        self._lock = _locked(self.part)

    def publish(self) -> None:
        """Give the file its name. When this returns, data and name are on the disk. The manifest of a file that it replaces is removed."""
        with self._lock:
            self.path.with_name(self.path.name + MANIFEST).unlink(missing_ok=True)
            _publish(self.part, self.path)

    def leave(self) -> Path:
        """Leave the file as it is, and return its path."""
        self._lock.close()
        return self.part


def part_of(path: Path) -> Path:
    """Return the name of a file until it is complete."""
    return path.with_name(path.name + PART)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that has its name only when it is complete. Several processes may do so at once: until then each uses a name of its own.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        part.write_bytes(content)
        _publish(part, path)
    finally:
        part.unlink(missing_ok=True)


def _locked(part: Path) -> IO[bytes]:
    """Create a file if it does not exist, and lock it until it is closed or this process ends."""
    while True:
        file = part.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise FileError(f"{part} is being written by another process: choose another name, or wait until it has ended") from None
        except OSError:
            return file  # a file system without locks
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(part.stat(), os.fstat(file.fileno())):
                return file
        file.close()  # it has got its own name since it was opened


def _publish(part: Path, path: Path) -> None:
    with part.open("rb") as written:
        os.fsync(written.fileno())
    part.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def rows_of(rollout: bytes, wanted: Format) -> list[msgspec.Raw]:
    """Return the rows of a rollout in a format as JSON: one for each training sample."""
    return VALUES.decode(FIELDS.decode(rollout)[wanted.rows]) if wanted.rows else [msgspec.Raw(rollout)]

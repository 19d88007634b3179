"""Rollouts in files: JSON lines, one rollout or one row a line, and the choice between them and Parquet.

A file that is being written has the name `FILE.part`. It gets its own name when all is in it and on the disk, so that a file
with a good name is a whole one. What was written before an interruption stays in `FILE.part`, and can be read.
"""

import gzip
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from tokencache.errors import extra_missing
from tokencache.trajectories.formats.registry import Format

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ROWS = msgspec.json.Decoder(list[msgspec.Raw])

JSONL, GZIP, PARQUET, JSON, PART = ".jsonl", ".jsonl.gz", ".parquet", ".json", ".part"


class FileError(Exception):
    """A file that cannot be written or read as it is wanted; the message says what to do instead."""


class Sink(Protocol):
    """Takes rollouts, as the proxy answers them, and writes them down."""

    rows: int
    """How many rows (training samples) were written."""

    def write(self, rollout: bytes) -> None:
        """Write one.

        Raises:
            FileError: this kind of file cannot hold it.
        """

    def finish(self) -> None:
        """Put all of it on the disk, and give the file its name."""

    def leave(self) -> Path | None:
        """Stop early: close what was written so far so that it can be read, and say where it is."""


class Unfinished:
    """A file under a name of its own until it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.part = path.with_name(path.name + PART)

    def publish(self) -> None:
        """Give it its name; when this returns, data and name are on the disk."""
        with self.part.open("rb") as written:
            os.fsync(written.fileno())
        self.part.replace(self.path)
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def create(path: str, wanted: Format, *, overwrite: bool) -> Sink:
    """Make a sink for a path; its ending says what is written, `-` is the standard output.

    Raises:
        FileError: the ending is none that is known, the file is there already, its directory is not, or Parquet is not installed.
    """
    if path == "-":
        return JsonLines(sys.stdout.buffer, wanted)
    target = Path(path)
    if not target.name.endswith((JSONL, GZIP, PARQUET)):
        raise FileError(f"{path}: the name must end with {JSONL}, {GZIP} or {PARQUET}, or be - for the standard output")
    if target.exists() and not overwrite:
        raise FileError(f"{path} is there already: name another file, or say --overwrite")
    if not target.parent.is_dir():
        raise FileError(f"{path}: there is no directory {target.parent}")
    file = Unfinished(target)
    if target.suffix == PARQUET:
        sink: Sink = _parquet().create(file, wanted)
        return sink
    if target.suffix == ".gz":
        return JsonLines(gzip.GzipFile(file.part, "wb"), wanted, file)
    return JsonLines(file.part.open("wb"), wanted, file)


class JsonLines:
    """Writes JSON lines: `native` a rollout a line, every other format a row (training sample) a line.

    A native rollout stays whole, for what is known of all of it (incidents, figures, which sequence branched off which) is what
    `verify` checks and a trainer filters by. The rows of other formats each say what a trainer must know of them.
    """

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, wanted: Format, file: Unfinished | None = None) -> None:
        self._stream = stream
        self._format = wanted
        self._file = file
        self.rows = 0

    def write(self, rollout: bytes) -> None:
        """Write a rollout as it came: numbers keep every digit."""
        rows = rows_of(rollout, self._format)
        self.rows += len(rows)
        for line in [rollout] if self._format.name == "native" else rows:
            self._stream.write(bytes(line) + b"\n")

    def finish(self) -> None:
        """Put all of it on the disk."""
        self._stream.flush()
        if self._file is not None:
            self._stream.close()
            self._file.publish()

    def leave(self) -> Path | None:
        """Close what was written so far."""
        if self._file is None:
            return None
        self._stream.close()
        return self._file.part


def rows_of(rollout: bytes, wanted: Format) -> list[msgspec.Raw]:
    """The rows of a rollout in this format, as JSON: one for each training sample."""
    return _ROWS.decode(_MEMBERS.decode(rollout)[wanted.rows]) if wanted.rows else [msgspec.Raw(rollout)]


def read(path: Path) -> Iterator[tuple[int, Any]]:
    """Read the native rollouts of a file, each with its place (line, or place in a Parquet file, from 1), as JSON values.

    Raises:
        FileError: the file cannot be read, or a line of it is no JSON.
    """
    name = path.name.removesuffix(PART)
    try:
        if name.endswith(PARQUET):
            yield from enumerate(_parquet().read(path), 1)
        elif name.endswith(JSON):
            yield 1, _decoded(path.read_bytes(), f"{path}")
        else:
            with gzip.open(path, "rb") if name.endswith(".gz") else path.open("rb") as lines:
                for n, line in enumerate(lines, 1):
                    if line.strip():
                        yield n, _decoded(line, f"{path}, line {n}")
    except (OSError, EOFError) as why:
        raise FileError(f"{path} cannot be read: {why}") from None


def _decoded(text: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as why:
        raise FileError(f"{where}: not valid JSON: {why}") from None


def _parquet() -> Any:
    try:
        from tokencache.commands import parquet  # noqa: PLC0415 - needs the extra `parquet`
    except ModuleNotFoundError as why:
        raise FileError(extra_missing("Parquet", "parquet", why.name)) from None
    return parquet

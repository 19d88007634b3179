"""Opens files of rollouts for writing and reading: JSON lines here, Parquet in `parquet`.

In JSON lines, a `native` rollout is one line. It is not split into rows, because `verify` and trainers need the facts about the whole
rollout (incidents, figures, which sequence branched off which). In every other format a line is one row (training sample), which repeats
what a trainer must know about the rollout.
"""

import gzip
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from tokencache.commands.sink import PART, FileError, PartFile, Sink, rows_of
from tokencache.errors import extra_missing
from tokencache.trajectories.formats.registry import Format

if TYPE_CHECKING:
    from tokencache.commands.parquet import Inspection

JSONL, GZIP, PARQUET, JSON = ".jsonl", ".jsonl.gz", ".parquet", ".json"
EXPORTS = (JSONL, GZIP, PARQUET, JSON)
ENDINGS = (*EXPORTS, PART)
"""A name with one of these endings is a file, not a session."""


def is_file(target: str) -> bool:
    """Whether a target of a command is a file, and not a session."""
    return target.endswith(ENDINGS) or Path(target).is_file()


def create(path: str, wanted: Format, *, overwrite: bool) -> Sink:
    """Create a file for rollouts in a format. The ending selects the kind of file; `-` is standard output.

    Raises:
        FileError: the ending is unknown, the file exists already, its directory does not exist, or Parquet is not installed.
    """
    if path == "-":
        return JsonLines(sys.stdout.buffer, wanted)
    target = Path(path)
    if not target.name.endswith((JSONL, GZIP, PARQUET)):
        raise FileError(f"{path}: the name must end with {JSONL}, {GZIP} or {PARQUET}, or be - for standard output")
    if target.exists() and not overwrite:
        raise FileError(f"{path} exists already: choose another name, or use --overwrite")
    if not target.parent.is_dir():
        raise FileError(f"{path}: there is no directory {target.parent}")
    file = PartFile(target)
    if target.suffix == PARQUET:
        sink: Sink = _parquet().create(file, wanted)
        return sink
    if target.suffix == ".gz":
        return JsonLines(gzip.GzipFile(file.part, "wb"), wanted, file)
    return JsonLines(file.part.open("wb"), wanted, file)


def require_parquet() -> None:
    """Check that Parquet files can be written.

    Raises:
        FileError: they cannot; the message says what is missing.
    """
    _parquet()


def inspect(path: Path) -> "Inspection | None":
    """Read a Parquet file as a whole and compare it with its digest; `None` if it is a file of another kind.

    Raises:
        FileError: the file cannot be read.
    """
    return _parquet().inspect(path) if path.name.removesuffix(PART).endswith(PARQUET) else None


def read(path: Path) -> Iterator[tuple[int, Any]]:
    """Read the rollouts or rows of a file as JSON values, each with its number (line, or place in a Parquet file, from 1).

    Raises:
        FileError: the file cannot be read, or a line is not JSON.
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
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"{path} cannot be read: {error}") from None


class JsonLines:
    """Writes JSON lines."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, wanted: Format, file: PartFile | None = None) -> None:
        self._stream = stream
        self._format = wanted
        self._file = file
        self.rows = 0

    def write(self, rollout: bytes) -> None:
        """Write a rollout without decoding it, so that numbers keep all digits."""
        rows = rows_of(rollout, self._format)
        self.rows += len(rows)
        for line in [rollout] if self._format.name == "native" else rows:
            self._stream.write(bytes(line) + b"\n")

    def finish(self) -> None:
        """Flush everything to the disk and give the file its name."""
        self._stream.flush()
        if self._file is not None:
            self._stream.close()
            self._file.publish()

    def leave(self) -> Path | None:
        """Close the file and return its path; `None` for standard output."""
        if self._file is None:
            return None
        self._stream.close()
        return self._file.part


def _decoded(text: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise FileError(f"{where}: not valid JSON: {error}") from None


def _parquet() -> Any:
    try:
        from tokencache.commands import parquet  # noqa: PLC0415 - needs the extra `parquet`
    except ModuleNotFoundError as error:
        raise FileError(extra_missing("Parquet", "parquet", error.name)) from None
    return parquet

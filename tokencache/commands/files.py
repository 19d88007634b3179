"""Opens files of rollouts for writing and reading: JSON lines here, Parquet in `parquet`.

In JSON lines, a `native` rollout is one line. It is not split into rows, because `verify` and trainers need the facts about the whole
rollout (incidents, figures, which sequence branched off which). In every other format a line is one row (training sample), which repeats
what a trainer must know about the rollout. A trace is written at the end, because its rollouts share blocks and a first call.
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
from tokencache.trajectories.formats.registry import TRACES, Format, TraceFormat
from tokencache.trajectories.formats.traces import BLOCK_SIZE, Trace
from tokencache.trajectories.values import Trajectory

if TYPE_CHECKING:
    from tokencache.commands.parquet import Inspection

JSONL, GZIP, PARQUET, JSON = ".jsonl", ".jsonl.gz", ".parquet", ".json"
EXPORTS = (JSONL, GZIP, PARQUET, JSON)
ENDINGS = (*EXPORTS, PART)
"""A name with one of these endings is a file, not a session."""


def is_file(target: str) -> bool:
    """Whether a target of a command is a file, and not a session."""
    return target.endswith(ENDINGS) or Path(target).is_file()


def create(path: str, wanted: Format | TraceFormat, *, overwrite: bool, block_size: int | None = None) -> Sink:
    """Create a file for rollouts in a format. The ending selects the kind of file; `-` is standard output.

    The sink of a trace takes rollouts of the native format. `block_size` are the tokens of its blocks; `None` uses `traces.BLOCK_SIZE`.

    Raises:
        FileError: the ending is unknown or not one of the format, the file exists already or another process writes it, its directory does
            not exist, Parquet is not installed, or the format has no blocks.
    """
    if block_size is not None and not isinstance(wanted, TraceFormat):
        raise FileError(f"format {wanted.name} has no blocks: --block-size is for {' and '.join(TRACES)}")
    if path == "-":
        return _lines(sys.stdout.buffer, wanted, block_size)
    target = Path(path)
    if not target.name.endswith((JSONL, GZIP, PARQUET)):
        raise FileError(f"{path}: the name must end with {JSONL}, {GZIP} or {PARQUET}, or be - for standard output")
    if target.exists() and not overwrite:
        raise FileError(f"{path} exists already: choose another name, or use --overwrite")
    if not target.parent.is_dir():
        raise FileError(f"{path}: there is no directory {target.parent}")
    if target.suffix == PARQUET and isinstance(wanted, TraceFormat):
        raise FileError(f"{path}: a trace has lines of several kinds: the name must end with {JSONL} or {GZIP}")
    if target.suffix == PARQUET:
        sink: Sink = _parquet().create(PartFile(target), wanted)
        return sink
    file = PartFile(target)
    if target.suffix == ".gz":
        return _lines(gzip.GzipFile(file.part, "wb"), wanted, block_size, file)
    return _lines(file.part.open("wb"), wanted, block_size, file)


def _lines(
    stream: IO[bytes] | gzip.GzipFile, wanted: Format | TraceFormat, block_size: int | None, file: PartFile | None = None
) -> "JsonLines | TraceLines":
    if isinstance(wanted, TraceFormat):
        return TraceLines(stream, wanted, Trace(block_size or BLOCK_SIZE), file)
    return JsonLines(stream, wanted, file)


def require_parquet() -> None:
    """Check that Parquet files can be written. Raises `FileError` if they cannot; the message says what is missing."""
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


class _Lines:
    """A file of lines."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, file: PartFile | None) -> None:
        self._stream = stream
        self._file = file
        self.rows = 0

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
        try:
            self._stream.close()
        finally:
            part = self._file.leave()
        return part


class JsonLines(_Lines):
    """Writes JSON lines."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, wanted: Format, file: PartFile | None = None) -> None:
        super().__init__(stream, file)
        self._format = wanted

    def write(self, rollout: bytes) -> None:
        """Write a rollout without decoding it, so that numbers keep all digits."""
        rows = rows_of(rollout, self._format)
        self.rows += len(rows)
        for line in [rollout] if self._format.name == "native" else rows:
            self._stream.write(bytes(line) + b"\n")


class TraceLines(_Lines):
    """Collects native rollouts, and writes their trace when all are there. Its rows are calls."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, wanted: TraceFormat, trace: Trace, file: PartFile | None = None) -> None:
        super().__init__(stream, file)
        self._trace = trace
        self._pending = wanted.lines(trace)  # begins with the first line that is taken

    def write(self, rollout: bytes) -> None:
        """Add a native rollout."""
        self._trace.add(msgspec.json.decode(rollout, type=Trajectory))
        self.rows = len(self._trace.calls)

    def finish(self) -> None:
        """Write the trace, and give the file its name."""
        self._write_lines()
        super().finish()

    def leave(self) -> Path | None:
        """Write the trace of the rollouts so far, close the file and return its path; `None` for standard output."""
        try:
            self._write_lines()
        finally:
            part = super().leave()
        return part

    def _write_lines(self) -> None:
        for line in self._pending:
            self._stream.write(msgspec.json.encode(line) + b"\n")


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

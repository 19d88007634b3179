"""The journal of a run of `tokencache score`: a file with one line for each row that is done, in the order in which they were done.

A run that is interrupted leaves it, and `--resume` continues it. Its first line holds what the scores depend on. A last line that was not
written to its end is cut off. When all rows are done, the result is written from it, in the order of the input.
"""

import contextlib
import fcntl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from tokencache.scoring.rows import Row

ENDING = ".scored"
"""What the name of a journal adds to the name of the result."""


class JournalError(Exception):
    """The journal belongs to a run with other settings, or cannot be read. The message says what to do."""


class _Line(msgspec.Struct):
    """A row that is done. `error`: why it has no scores; `""` if it has."""

    key: str
    row: msgspec.Raw
    error: str = ""


_LINE = msgspec.json.Decoder(_Line)


class Journal:
    """Appends rows to a journal, and reads them. Use it as a context manager.

    Args:
        path: the journal.
        settings: what the scores depend on.
        resume: whether to continue a journal that is there. Otherwise a new one is begun.

    Attributes:
        failed: keys of the rows without scores → why.

    Raises:
        JournalError: the journal that should be continued has other settings, or cannot be read, or another process writes it.
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        self.failed: dict[str, str] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._file = path.open("a+b")
        try:
            self._lock()
            if not resume:
                self._file.truncate(0)
            self._file.seek(0)
            self._read(settings)
        except msgspec.DecodeError as error:
            self._file.close()
            raise JournalError(f"{path} is no journal of scores ({error}): remove it") from None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the journal. One without rows is removed: there is nothing to continue."""
        self._file.close()
        if not self._places:
            self.path.unlink()

    def _lock(self) -> None:
        with contextlib.suppress(OSError):  # a file system may have no locks
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JournalError(f"{self.path} is being written by another run: wait until it has ended") from None

    def _read(self, settings: Mapping[str, Any]) -> None:
        head = self._file.readline()
        if not head.endswith(b"\n"):
            self._file.seek(0)
            self._file.truncate()
            self._file.write(msgspec.json.encode(settings) + b"\n")
            self._file.flush()
            return
        if (found := msgspec.json.decode(head)) != settings:
            other = ", ".join(
                f"{name} {found.get(name)!r} instead of {value!r}" for name, value in settings.items() if found.get(name) != value
            )
            raise JournalError(f"{self.path} was written with {other}: use the same settings, or remove it")
        at = self._file.tell()
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            self._note(_LINE.decode(line), at, len(line))
            at += len(line)
        self._file.seek(at)
        self._file.truncate()

    def __contains__(self, key: str) -> bool:
        """Whether the row has scores."""
        return key in self._places and key not in self.failed

    def append(self, key: str, row: Row, error: str = "") -> None:
        """Write a row that is done."""
        line = msgspec.json.encode(_Line(key, msgspec.Raw(msgspec.json.encode(row)), error)) + b"\n"
        at = self._file.seek(0, 2)
        self._file.write(line)
        self._file.flush()
        self._note(msgspec.json.decode(line, type=_Line), at, len(line))

    def row(self, key: str) -> bytes:
        """Return a row as JSON."""
        at, size = self._places[key]
        self._file.seek(at)
        return bytes(_LINE.decode(self._file.read(size)).row)

    def _note(self, line: _Line, at: int, size: int) -> None:
        self._places[line.key] = (at, size)
        self.failed.pop(line.key, None)
        if line.error:
            self.failed[line.key] = line.error

"""The clock of a file store, which all processes share that use the file.

It is a `SteadyClock` that does not start anew with each process: the file says how far it is from the machine's monotonic clock, which is
one for all processes until the machine restarts (Linux: `/proc/sys/kernel/random/boot_id`). After a restart it goes on from the system
clock, less the steps that this was set by while the store was in use.
"""

import logging
import os
import sqlite3
from pathlib import Path

import msgspec

from tokencache.store.clock import RECORD_CLOCK, TOLERANCE, SteadyClock, monotonic, system_time
from tokencache.store.encoding import pack, unpack

log = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Saved(msgspec.Struct):
    """What the file says about the clock.

    Attributes:
        boot: id of the machine's last start; empty if unknown.
        offset: see `SteadyClock`.
        latest: the time when this was saved.
        ahead: the system clock less this one at that time, in seconds.
    """

    boot: str
    offset: float
    latest: float
    ahead: float


class FileClock(SteadyClock):
    """The clock of the store in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._wrong = path, 0.0

    def measure(self) -> None:
        """Compare this process's clock with that of the file system, which all processes with this file share; log a difference.

        If they differ, the latter counts: otherwise a process whose clock is wrong would delete the sessions of the others.
        """
        before = system_time()
        try:
            os.utime(self._path)  # the file system fills in its own time
            wrong = before - self._path.stat().st_mtime
        except OSError:  # the file belongs to another user
            return
        self._wrong = wrong if abs(wrong) >= TOLERANCE else 0.0
        if self._wrong:
            log.warning(
                "file: THE CLOCK IS WRONG: this process's clock is %.0f s %s that of the file system of %s. The store uses the file "
                "system's; set the clock",
                abs(wrong),
                "ahead of" if wrong > 0 else "behind",
                self._path,
            )

    def system(self) -> float:
        """Return the time of the system clock, as far as the file system agrees with it."""
        return system_time() - self._wrong

    def join(self, db: sqlite3.Connection) -> None:
        """Go on with the time of the processes that use the file, or used it last."""
        row = db.execute("SELECT value FROM meta WHERE name = 'clock'").fetchone()
        saved = unpack(row["value"], _Saved) if row else _Saved("", 0.0, 0.0, 0.0)
        if saved.boot and saved.boot == _boot():
            self.offset = saved.offset
        else:
            self.offset = max(saved.latest, self.system() - saved.ahead) - monotonic()
        RECORD_CLOCK.follow(self.now(), monotonic())
        self.save(db)

    def save(self, db: sqlite3.Connection) -> None:
        """Save what `join` needs."""
        now = self.now()
        saved = _Saved(_boot(), self.offset, now, self.system() - now)
        db.execute("INSERT OR REPLACE INTO meta VALUES ('clock', ?)", (pack(saved),))


def _boot() -> str:
    try:
        return _BOOT_ID.read_text()
    except OSError:
        return ""

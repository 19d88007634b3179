"""Keeps room on the disk, so that sessions can be finished and deleted when it is full.

SQLite writes what changes to its log (`PATH-wal`) first, and later to the file, also when it deletes. On a full disk it could do neither.
So there are two kinds of operations. Those that *end* something (a call, a session, a delivery) are always possible:

- `PATH-reserve` is a file of up to 8 MiB. If such an operation fails, the reserve is released, and the operation runs again. Then the log
  is moved to the file, and the reserve is taken back as soon as the disk has room for it.
- All other operations may let the file grow by half of what is free, and not at all while the reserve is released. So what is in the log
  has room in the file. Other programs may still use up the disk; that is what the reserve is for.

Deleted sessions leave free pages in the file, which all operations may use. The file itself does not shrink.
"""

import logging
import os
import sqlite3
import time
from pathlib import Path

from tokencache.store.base import StoreError, StoreFullError

log = logging.getLogger(__name__)

RESERVE = 8 * 2**20
"""Bytes of the reserve. A disk of less than 16 times as much gives a sixteenth."""
_ROOM = 2**20
"""Bytes that must be free in the file, or be granted to it, for a new session, and for readiness after a write has failed."""
_PLENTY, _KEPT_SECONDS = 2**30, 0.1
"""While more bytes than this are free, a limit is kept for so long, because to compute it takes 20 µs."""
_MOST_PAGES = 2**30
"""More pages than any file has: SQLite's default limit."""
_SHARE = 0.9
"""Without `--max-store-bytes`, sessions may take this share of what they take and what is free."""
_FULL = "database or disk is full"


class Disk:
    """The disk of a database, as its writer sees it. `path` is the file.

    Attributes:
        has_reserve: whether the reserve is taken.
        failure: how the last write failed; `""` once a commit has succeeded, or once there is room again.
        removed: says that the path no longer names the open file; `""` if it does. Then the file ends with the processes that have it open,
            and a worker that starts later would begin another one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reserve = -1
        self._overwrites: int | None = None
        self._until = 0.0
        self.has_reserve = False
        self.failure = self.removed = ""

    def open(self) -> None:
        """Take the reserve, and note which file is open. Raises `OSError` if the file of the reserve cannot be made."""
        self._opened = self._path.stat()
        self._reserve = os.open(f"{self._path}-reserve", os.O_CREAT | os.O_RDWR, 0o600)
        self._take()

    def close(self) -> None:
        """Let go of the reserve. The file stays, so that sessions can be deleted after a restart, too."""
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1

    def free(self) -> int:
        """Return how many bytes are free, apart from the reserve."""
        found = os.fstatvfs(self._reserve)
        return found.f_bavail * found.f_frsize

    def prepare(self, database: sqlite3.Connection, *, ends: bool) -> None:
        """Limit by how much the next transaction may let the file grow; `ends` is whether it only ends something.

        SQLite may be built to overwrite what it deletes (`SECURE_DELETE`, Debian). Its log may then grow by as much as the file has, and
        gives that room back only once all of it is in the file. So that is done only while the disk has as much room.
        """
        if self.has_reserve and not self.failure and time.monotonic() < self._until:
            return
        if self._overwrites is None:
            self._overwrites = _pragma(database, "secure_delete")
        free, size, pages = self.free(), self._size(database), _MOST_PAGES
        database.execute(f"PRAGMA secure_delete = {self._overwrites if self.has_reserve and free > size else 'FAST'}")
        if not ends:
            room = free // 2 if self.has_reserve else 0
            pages = max((size + room) // _pragma(database, "page_size"), 1)
            self._until = time.monotonic() + (_KEPT_SECONDS if free > _PLENTY else 0.0)
        database.execute(f"PRAGMA max_page_count = {pages}")

    def release_reserve(self) -> bool:
        """Release the reserve; false if nothing of it is left."""
        self.has_reserve = False
        left = os.fstat(self._reserve).st_blocks > 0
        if left:
            log.warning("file: the disk of %s is full: the reserve is released, so that sessions can be finished and deleted", self._path)
            os.ftruncate(self._reserve, 0)
        return left

    def restore_reserve(self, database: sqlite3.Connection) -> None:
        """Move SQLite's log to the file, and then take the reserve back if there is room."""
        busy, _, _ = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if not busy:
            self._take()
            if self.has_reserve:
                log.info("file: the reserve on the disk of %s is taken again", self._path)

    def check(self, database: sqlite3.Connection) -> None:
        """Check whether the file is in place and, after a write has failed, whether there is room again. Raises `StoreError` if not."""
        if self.removed:
            raise StoreError(self.removed)
        if self.failure and _room(database) < _ROOM:
            raise StoreError(self.failure)

    def check_capacity(self, database: sqlite3.Connection, most: int) -> None:
        """Check whether a session may be added; `most` is `--max-store-bytes`, 0 if it is not set. Raises `StoreFullError` if none may."""
        used, limit = self.usage(database, most)
        if most and used >= most:
            raise StoreFullError(f"the file holds {used} bytes, and --max-store-bytes is {most}")
        if _room(database) < _ROOM or used >= limit:
            raise StoreFullError(f"the disk of {self._path} is nearly full: sessions take {used} bytes, and {self.free()} are free")

    def usage(self, database: sqlite3.Connection, most: int) -> tuple[int, int]:
        """Return the bytes that sessions take, and how many they may; `most` as in `check_capacity`."""
        pages, unused, size = (_pragma(database, name) for name in ("page_count", "freelist_count", "page_size"))
        return (pages - unused) * size, most or int(_SHARE * (pages * size + self.free()))

    def describe(self, why: sqlite3.Error) -> str:
        """Describe an error, and what to do if the disk is full."""
        if str(why) != _FULL:
            return str(why)
        return f"{why}: {self.free():,} bytes are free on the disk of {self._path}; free space there, or delete sessions"

    def _size(self, database: sqlite3.Connection) -> int:
        """Return the size of the file; of one that was removed, and is still open, the size of the database."""
        try:
            found = self._path.stat()
        except OSError:
            found = None
        if found is not None and os.path.samestat(found, self._opened):
            self.removed = ""
            return found.st_size
        if not self.removed:
            self.removed = f"file: {self._path} was removed or replaced: put it back, or export its sessions. They end with this process"
            log.error("%s", self.removed)
        return _pragma(database, "page_count") * _pragma(database, "page_size")

    def _take(self) -> None:
        """Take the reserve, if the disk has room for it."""
        found = os.fstatvfs(self._reserve)
        try:
            os.posix_fallocate(self._reserve, 0, max(min(RESERVE, found.f_blocks * found.f_frsize // 16), 1))
        except OSError as why:
            log.debug("file: no reserve for %s: %s", self._path, why)
            self.has_reserve = False
        else:
            self.has_reserve = True


def _room(database: sqlite3.Connection) -> int:
    """Return how many bytes the transaction may add."""
    limit, pages, unused, size = (_pragma(database, name) for name in ("max_page_count", "page_count", "freelist_count", "page_size"))
    return (limit - pages + unused) * size


def _pragma(database: sqlite3.Connection, name: str) -> int:
    return int(database.execute(f"PRAGMA {name}").fetchone()[0])

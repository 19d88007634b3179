"""Runs operations on a SQLite database in a thread. Operations that wait together share one transaction and one flush to the disk.

A flush takes milliseconds, so one for each operation would limit a proxy to some hundred operations a second. With shared transactions the
number of operations for each flush grows with the load.
"""

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from tokencache.store.base import StoreError
from tokencache.store.file.disk import Disk

R = TypeVar("R")
AT_ONCE = 64
"""Largest number of operations in one transaction."""
_LOCKED_SECONDS = 0.01
"""Pause before a locked database is opened again."""
_PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "journal_size_limit=67108864", "temp_store=MEMORY")

_PROVES = frozenset({"commit", "ping"})
"""Operations that show, if they succeed, that the disk has room."""


class _Job(NamedTuple):
    """An operation; `ends` is whether it only ends or removes something, so that it may use the reserve (`Disk`)."""

    name: str
    work: Callable[[sqlite3.Connection], Any]
    done: Future[Any]
    ends: bool


class Worker:
    """A thread with a connection to a database.

    Args:
        path: the file.
        timeout_seconds: how long to wait for other processes that write.
        disk: the disk, if its operations write. Then each transaction starts with the lock for writing.
    """

    def __init__(self, path: Path, timeout_seconds: float, disk: Disk | None = None) -> None:
        self._path = path
        self._disk = disk
        self._timeout = timeout_seconds
        self._begin = "BEGIN IMMEDIATE" if disk is not None else "BEGIN"
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def open(self) -> None:
        """Connect. Raises `StoreError` if the file cannot be opened."""
        connected: Future[None] = Future()
        self._thread = threading.Thread(target=self._serve, args=(connected,), name="tokencache-store", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(connected)

    async def close(self) -> None:
        """Finish the operations that wait, and disconnect. Operations that come later are refused."""
        thread, self._thread = self._thread, None  # at once: nothing would ever run an operation that is queued behind the end
        if thread is not None:
            self._jobs.put(None)
            await asyncio.to_thread(thread.join)

    async def run(self, name: str, work: Callable[[sqlite3.Connection], R], *, ends: bool = False) -> R:
        """Run an operation, and wait until what it wrote is on the disk. `ends` is whether it only ends or removes something.

        If it raises an error, nothing of it is written. It may run twice, if the first transaction is given up.

        Raises:
            StoreError: the database fails.
        """
        if self._thread is None:
            raise StoreError(f"file: {name}: the store is closed")
        done: Future[R] = Future()
        self._jobs.put(_Job(name, work, done, ends))
        return await asyncio.wrap_future(done)

    def _serve(self, connected: Future[None]) -> None:
        try:
            database = self._open()
        except sqlite3.Error as why:
            connected.set_exception(StoreError(f"file: {self._path} cannot be opened: {why}"))
            return
        connected.set_result(None)
        job = self._jobs.get()
        while job is not None:
            batch = [one for one in self._batch(job) if one.done.set_running_or_notify_cancel()]
            try:
                if batch:
                    _transact(database, self._begin, batch, self._disk)
            except Exception as why:  # noqa: BLE001 - such as a file system with errors; who waits must not wait for ever
                for one in batch:
                    if not one.done.done():
                        one.done.set_exception(StoreError(f"file: {one.name}: {why}"))
            if self._disk is not None and not self._disk.has_reserve:
                with contextlib.suppress(sqlite3.Error, OSError):  # after the next operation, then
                    self._disk.restore_reserve(database)
            job = self._jobs.get()
        database.close()

    def _open(self) -> sqlite3.Connection:
        """Open the database. SQLite's own timeout does not cover the change of a new file to a write-ahead log, so that is tried again.

        Raises:
            sqlite3.Error: it cannot be opened, or other processes have locked it for too long.
        """
        database = sqlite3.connect(self._path, timeout=self._timeout, isolation_level=None)
        database.row_factory = sqlite3.Row
        until = time.monotonic() + self._timeout
        while True:
            try:
                for pragma in _PRAGMAS:
                    database.execute(f"PRAGMA {pragma}")
            except sqlite3.OperationalError as why:
                if why.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(_LOCKED_SECONDS)
            else:
                return database

    def _batch(self, first: _Job) -> list[_Job]:
        """Return an operation, and those that wait."""
        batch = [first]
        while len(batch) < AT_ONCE:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                break
            if job is None:
                self._jobs.put(None)  # the end, after this batch
                break
            batch.append(job)
        return batch


def _transact(database: sqlite3.Connection, begin: str, batch: list[_Job], disk: Disk | None) -> None:
    """Run operations in one transaction. If the database fails, run each alone, so that only those fail that must.

    While another process holds the lock, none can run. Then all fail, so that none waits for the lock once for each that came before it.
    """
    try:
        if disk is not None:
            disk.prepare(database, ends=all(job.ends for job in batch))
        outcomes = _attempt(database, begin, batch)
    except sqlite3.Error as why:
        locked = getattr(why, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
        if len(batch) > 1 and not locked:
            for job in batch:
                _transact(database, begin, [job], disk)
        elif batch[0].ends and not locked and disk is not None and disk.release_reserve():
            _transact(database, begin, batch, disk)
        else:
            for job in batch:
                _fail(job, why, disk)
        return
    if disk is not None and any(job.name in _PROVES and error is None for job, (_, error) in zip(batch, outcomes, strict=True)):
        disk.failure = ""
    for job, (result, error) in zip(batch, outcomes, strict=True):
        if error is None:
            job.done.set_result(result)
        else:
            job.done.set_exception(error)


def _attempt(database: sqlite3.Connection, begin: str, batch: list[_Job]) -> list[tuple[Any, Exception | None]]:
    """Run operations in one transaction: for each its result, or its own error.

    Raises:
        sqlite3.Error: the database failed, and nothing is written.
    """
    outcomes: list[tuple[Any, Exception | None]] = []
    try:
        database.execute(begin)
        for job in batch:
            database.execute("SAVEPOINT operation")
            try:
                outcomes.append((job.work(database), None))
            except sqlite3.Error:
                raise
            except Exception as why:  # noqa: BLE001 - it is raised where the operation was started
                database.execute("ROLLBACK TO operation")
                outcomes.append((None, why))
            database.execute("RELEASE operation")
        database.execute("COMMIT")
    except sqlite3.Error:
        if database.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # then the next transaction cannot begin, and is rolled back with this one
                database.execute("ROLLBACK")
        raise
    return outcomes


def _fail(job: _Job, why: sqlite3.Error, disk: Disk | None) -> None:
    words = f"file: {job.name}: {why if disk is None else disk.describe(why)}"
    if disk is not None and not job.ends:
        disk.failure = words
    job.done.set_exception(StoreError(words))

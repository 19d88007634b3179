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

R = TypeVar("R")
AT_ONCE = 64
"""Largest number of operations in one transaction."""
_LOCKED_SECONDS = 0.01
"""Pause before a locked database is opened again."""
_PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "journal_size_limit=67108864", "temp_store=MEMORY")


class _Job(NamedTuple):
    name: str
    work: Callable[[sqlite3.Connection], Any]
    done: Future[Any]


class Worker:
    """A thread with a connection to a database.

    Args:
        path: the file.
        timeout_seconds: how long to wait for other processes that write.
        writes: whether its operations write. Then each transaction starts with the lock for writing.
    """

    def __init__(self, path: Path, timeout_seconds: float, *, writes: bool) -> None:
        self._path = path
        self._timeout = timeout_seconds
        self._begin = "BEGIN IMMEDIATE" if writes else "BEGIN"
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def open(self) -> None:
        """Connect.

        Raises:
            StoreError: the file cannot be opened.
        """
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

    async def run(self, name: str, work: Callable[[sqlite3.Connection], R]) -> R:
        """Run an operation, and wait until what it wrote is on the disk.

        If it raises an error, nothing of it is written. It may run twice, if the first transaction is given up.

        Raises:
            StoreError: the database fails.
        """
        if self._thread is None:
            raise StoreError(f"file: {name}: the store is closed")
        done: Future[R] = Future()
        self._jobs.put(_Job(name, work, done))
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
            if batch:
                _transact(database, self._begin, batch)
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


def _transact(database: sqlite3.Connection, begin: str, batch: list[_Job]) -> None:
    """Run operations in one transaction. If the database fails, run each alone, so that only those fail that must."""
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
    except sqlite3.Error as why:
        if database.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # then the next transaction cannot begin, and is rolled back with this one
                database.execute("ROLLBACK")
        if len(batch) > 1:
            for job in batch:
                _transact(database, begin, [job])
        else:
            batch[0].done.set_exception(StoreError(f"file: {batch[0].name}: {why}"))
        return
    for job, (result, error) in zip(batch, outcomes, strict=True):
        if error is None:
            job.done.set_result(result)
        else:
            job.done.set_exception(error)

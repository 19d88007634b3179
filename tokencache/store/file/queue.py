"""The queue of finished sessions, and the times of watched ones, in a file. `store.FileStore` contains it."""

import sqlite3
from collections.abc import Callable, Sequence

from tokencache.store.base import MOST_OVERDUE, REMEMBER_SECONDS, Overdue, QueueEntry, RemoveOutcome
from tokencache.store.encoding import text, untext
from tokencache.store.file.operations import ends, reads, writes
from tokencache.store.file.worker import Worker

_PARTS = "delivery = ? AND session IN (SELECT session FROM deliveries WHERE delivery = ?)"
"""The sessions that a delivery still has."""


class FileQueue:
    """The methods of `base.Store` for the queue and for watched sessions."""

    reader: Worker
    writer: Worker
    now: Callable[[], float]

    @writes
    def watch(self, db: sqlite3.Connection, session: str, seconds: float) -> None:
        db.execute("INSERT OR REPLACE INTO watched VALUES (?, ?)", (text(session), self.now() + seconds))

    @reads
    def overdue(self, db: sqlite3.Connection) -> Overdue:
        now = self.now()
        found = db.execute("SELECT session FROM watched WHERE due <= ? ORDER BY due LIMIT ?", (now, MOST_OVERDUE))
        return Overdue(now, [untext(session) for (session,) in found])

    @ends
    def unwatch(self, db: sqlite3.Connection, session: str) -> None:
        db.execute("DELETE FROM watched WHERE session = ? AND due <= ?", (text(session), self.now()))

    @ends
    def offer(self, db: sqlite3.Connection, session: str, epoch: str, at: float) -> None:
        known = (text(session), epoch)
        if not db.execute("SELECT 1 FROM removed_sessions WHERE session = ? AND epoch = ?", known).fetchone():
            db.execute("DELETE FROM queue WHERE session = ? AND epoch != ?", known)
            db.execute("INSERT OR IGNORE INTO queue (session, epoch, at) VALUES (?, ?, ?)", (*known, at))

    @reads
    def queue(self, db: sqlite3.Connection) -> list[QueueEntry]:
        now = self.now()
        return [
            QueueEntry(untext(session), epoch, at, delivery, consumer, until, attempt, leased=until > now)
            for session, epoch, at, delivery, consumer, until, attempt in db.execute(
                "SELECT session, epoch, at, delivery, consumer, until, attempt FROM queue ORDER BY at, session"
            )
        ]

    @reads
    def queue_length(self, db: sqlite3.Connection) -> int:
        (count,) = db.execute("SELECT count(*) FROM queue").fetchone()
        return int(count)

    @ends
    def lease(self, db: sqlite3.Connection, sessions: Sequence[str], delivery: str, consumer: str, seconds: float) -> bool:
        now = self.now()
        former = set()
        for session in sessions:
            entry = db.execute("SELECT delivery, until FROM queue WHERE session = ?", (text(session),)).fetchone()
            if entry is None or (entry["until"] > now and entry["delivery"] != delivery):
                return False
            former.add(entry["delivery"])
        former.add(delivery)
        db.executemany("DELETE FROM deliveries WHERE delivery = ?", [(one,) for one in former])
        db.executemany("INSERT INTO deliveries VALUES (?, ?)", [(delivery, text(session)) for session in sessions])
        db.executemany(
            "UPDATE queue SET delivery = ?, consumer = ?, until = ?, attempt = attempt + 1 WHERE session = ?",
            [(delivery, consumer, now + seconds, text(session)) for session in sessions],
        )
        return True

    @ends
    def extend(self, db: sqlite3.Connection, delivery: str, seconds: float) -> bool:
        known = _known(db, delivery)
        if known:
            db.execute(f"UPDATE queue SET until = ? WHERE {_PARTS}", (self.now() + seconds, delivery, delivery))  # noqa: S608
        return known

    @ends
    def release(self, db: sqlite3.Connection, delivery: str) -> bool:
        known = _known(db, delivery)
        if known:
            db.execute(f"UPDATE queue SET until = 0, delivery = '', consumer = '' WHERE {_PARTS}", (delivery, delivery))  # noqa: S608
            db.execute("DELETE FROM deliveries WHERE delivery = ?", (delivery,))
        return known

    @ends
    def remove(self, db: sqlite3.Connection, delivery: str) -> RemoveOutcome:
        now = self.now()
        if not _known(db, delivery):
            before = db.execute("SELECT 1 FROM removed_deliveries WHERE delivery = ?", (delivery,)).fetchone()
            return RemoveOutcome.REPEATED if before else RemoveOutcome.EXPIRED
        removed = f"INSERT OR REPLACE INTO removed_sessions SELECT session, epoch, ? FROM queue WHERE {_PARTS}"  # noqa: S608
        db.execute(removed, (now, delivery, delivery))
        db.execute("INSERT OR REPLACE INTO removed_deliveries VALUES (?, ?)", (delivery, now))
        db.execute(f"DELETE FROM queue WHERE {_PARTS}", (delivery, delivery))  # noqa: S608
        db.execute("DELETE FROM deliveries WHERE delivery = ?", (delivery,))
        for table in ("removed_sessions", "removed_deliveries"):
            db.execute(f"DELETE FROM {table} WHERE at < ?", (now - REMEMBER_SECONDS,))  # noqa: S608 - a constant
        return RemoveOutcome.REMOVED

    @ends
    def withdraw(self, db: sqlite3.Connection, session: str, epoch: str) -> None:
        db.execute("DELETE FROM queue WHERE session = ? AND epoch = ?", (text(session), epoch))

    @writes
    def put_demand(self, db: sqlite3.Connection, consumer: str, demand: bytes) -> None:
        db.execute("INSERT OR REPLACE INTO demands VALUES (?, ?)", (text(consumer), demand))

    @ends
    def drop_demand(self, db: sqlite3.Connection, consumer: str) -> None:
        db.execute("DELETE FROM demands WHERE consumer = ?", (text(consumer),))

    @reads
    def demands(self, db: sqlite3.Connection) -> list[bytes]:
        return [demand for (demand,) in db.execute("SELECT demand FROM demands")]


def _known(db: sqlite3.Connection, delivery: str) -> bool:
    return db.execute("SELECT 1 FROM deliveries WHERE delivery = ?", (delivery,)).fetchone() is not None

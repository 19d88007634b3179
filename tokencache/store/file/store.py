"""The file store: each operation is a transaction."""

import asyncio
import logging
import os
import secrets
import sqlite3
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote

from tokencache.core.incidents import Incident, sealed_early
from tokencache.core.match import Hit
from tokencache.core.media import StoredMedium
from tokencache.core.outcome import LatestTurn, Outcome
from tokencache.core.session import REWARDS_KEPT, LabelChanges, Labels, Reward, SessionSettings
from tokencache.core.turn import Prefix, Tokens, Turn, TurnMark
from tokencache.core.weights import WeightsState
from tokencache.store import base
from tokencache.store.clock import NOT_USED, ClockWatch
from tokencache.store.encoding import milliseconds_of, pack, pack_tokens, text, unpack, unpack_prefix, unpack_tokens, untext
from tokencache.store.file import schema
from tokencache.store.file.clock import FileClock
from tokencache.store.file.disk import Disk
from tokencache.store.file.operations import ends, reads, writes
from tokencache.store.file.queue import FileQueue
from tokencache.store.file.worker import Worker

log = logging.getLogger(__name__)

PAGE = 1000
_SELECT_IDS = "SELECT ids FROM turns JOIN tokens ON tokens.n = coalesce(shares, turns.n) WHERE session = ? AND turn = ?"
"""A turn has its own tokens, or those of the turn that it names in `shares`."""
_SELECT_TOKENS = _SELECT_IDS.replace("ids", "ids, CASE WHEN shares IS NULL THEN logprobs ELSE x'' END AS logprobs, context", 1)
_LOOKS, _LOOK_SECONDS = 20, 0.05
"""How often, and how far apart, an empty file is looked at."""
_RENEW_BELOW = 0.99
"""The time to live of a binding is renewed if less than this share of it is left."""


def _size(path: Path) -> int | None:
    """Return the size of a file in bytes; `None` if there is none."""
    return path.stat().st_size if path.is_file() else None


def read_path(url: str) -> Path:
    """Read the URL of a file store: `file:PATH` or `file:///PATH`, with `%` escapes as in any URL; `~` is the home directory.

    Raises:
        ValueError: it names no path, or another machine.
    """
    path = url.removeprefix("file:")
    if path.startswith("//"):
        host, slash, rest = path[2:].partition("/")
        path = slash + rest if host in {"", "localhost"} else ""
    if not path or "?" in path or path.endswith("/"):
        raise ValueError("the URL of a file store is file:PATH, such as file:/var/lib/tokencache/sessions.db (docs/store.md)")
    return Path(unquote(path)).expanduser()


class FileStore(FileQueue):
    """Sessions in a SQLite file. `Store` documents the methods.

    Args:
        url: see `read_path`.
        ttl_seconds: delete a session that has not been used for this long.
        timeout_seconds: how long to wait for another process that writes.
        tombstone_seconds: how long a deleted session refuses late calls.
        max_sessions: refuse new sessions at this number. 0 sets no limit.
        max_bytes: refuse new sessions while the file's contents take this many bytes. 0: nine tenths of them and what is free on the disk.

    Raises:
        ValueError: the URL names no path.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_seconds: float = 7 * 86400,
        timeout_seconds: float = 5.0,
        tombstone_seconds: float = 3600.0,
        max_sessions: int = 0,
        max_bytes: int = 0,
    ) -> None:
        self._path = read_path(url)
        self._ttl, self._tombstone = ttl_seconds, tombstone_seconds
        self._max_sessions, self._max_bytes = max_sessions, max_bytes
        self._clock = FileClock(self._path)
        self._watch = ClockWatch("system", NOT_USED)
        self.now = self._clock.now
        self._disk = Disk(self._path)
        self.writer = Worker(self._path, timeout_seconds, self._disk)
        self.reader = Worker(self._path, timeout_seconds)

    async def open(self) -> None:
        await self._check_not_truncated()
        try:
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))  # it contains conversations; SQLite would let all users read it
            self._disk.open()
        except OSError as why:
            raise base.StoreError(
                f"file: {self._path} cannot be opened: {why.strerror}; its directory must exist and be writable"
            ) from None
        self._clock.measure()
        try:
            await self.writer.open()
            await self._create_tables()
            await self.reader.open()
        except BaseException:
            await self.close()
            raise

    async def _check_not_truncated(self) -> None:
        """Report a file without content: a new store begins in it.

        Raises:
            StoreError: SQLite's log beside it shows that it had content.
        """
        for _ in range(_LOOKS):
            if _size(self._path) != 0:
                return
            await asyncio.sleep(_LOOK_SECONDS)  # another worker may be making it
        log_file = Path(f"{self._path}-wal")
        if _size(log_file):
            raise base.StoreError(
                f"file: {self._path} was truncated: it is empty, and {log_file.name} beside it is not. Restore it, or remove both to begin "
                "anew"
            )
        log.warning("file: %s was there and is empty: a new store begins in it. If it had sessions, they are lost", self._path)

    async def close(self) -> None:
        await self.reader.close()
        await self.writer.close()
        self._disk.close()

    @ends  # sessions of a full disk can be deleted after a restart, too
    def _create_tables(self, db: sqlite3.Connection) -> None:
        for statement in schema.TABLES.split(";"):
            db.execute(statement)
        db.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (schema.VERSION,))
        schema.add_columns(db)
        with decoding("clock"):
            self._clock.join(db)
        _check_version(db, self._path)

    @writes
    def ping(self, db: sqlite3.Connection) -> None:
        self._disk.check(db)
        _check_version(db, self._path)

    @reads
    def usage(self, db: sqlite3.Connection) -> base.StoreUsage:
        used, limit = self._disk.usage(db, self._max_bytes)
        return base.StoreUsage.of(used, limit, _count(db), self._max_sessions)

    @writes
    def secret(self, db: sqlite3.Connection, known: bytes = b"") -> bytes:
        db.execute("INSERT OR IGNORE INTO meta VALUES ('secret', ?)", (known or secrets.token_bytes(32),))
        (secret,) = db.execute("SELECT value FROM meta WHERE name = 'secret'").fetchone()
        return bytes(secret)

    @writes
    def define(
        self,
        db: sqlite3.Connection,
        session: str,
        settings: SessionSettings,
        labels: Labels,
        *,
        exist_ok: bool = False,
        adopt: bool = False,
    ) -> bool:
        row = self._find(db, session)
        if row is None:
            self._check_capacity(db)
            db.execute("DELETE FROM tombstones WHERE name = ?", (text(session),))
            self._create(db, session, settings, labels)
            return True
        if not exist_ok and not adopt:
            raise base.SessionExistsError(session)
        own = _settings(row)
        if settings and settings != own:
            if own or not adopt:
                raise base.SettingsConflictError(session, settings.differences(own))
            db.execute("UPDATE sessions SET digest = ?, settings = ? WHERE id = ?", (settings.digest, pack(settings), row["id"]))
        self._set_labels(db, row, labels.changes)
        return False

    @reads
    def settings(self, db: sqlite3.Connection, session: str) -> SessionSettings | None:
        row = self._find(db, session)
        return _settings(row) if row else None

    @writes
    def begin(
        self,
        db: sqlite3.Connection,
        session: str,
        call: str,
        keys: Sequence[bytes],
        *,
        fingerprint: bytes = b"",
        replica: str = "",
        join: base.Join = "never",
        settings: bytes = b"",
    ) -> base.BeginResult:
        row = self._find(db, session)
        if row is None:
            if db.execute("SELECT 1 FROM tombstones WHERE name = ? AND expires > ?", (text(session), self.now())).fetchone():
                raise base.SessionDeletedError(session)
            self._check_capacity(db)
        elif row["sealed"]:
            raise base.SessionSealedError(session)
        elif row["finished"] is not None:
            raise base.SessionFinishedError(session)
        if (row["digest"] if row else b"") != settings:
            raise base.SettingsChangedError(_settings(row) if row else SessionSettings())
        row = row or self._create(db, session, SessionSettings(), Labels())
        number, name = row["id"], text(call)
        known = db.execute("SELECT 1 FROM calls WHERE session = ? AND call = ?", (number, name)).fetchone()
        duplicate = None if known or not fingerprint else _join(db, number, fingerprint, join)
        begun, now = row["begun"] + (known is None and duplicate is None), self.now()
        if duplicate is None:
            db.execute("DELETE FROM calls WHERE session = ? AND call = ?", (number, name))
            opened = "INSERT INTO calls (session, call, since, fingerprint, replica) VALUES (?, ?, ?, ?, ?)"
            db.execute(opened, (number, name, now, fingerprint, text(replica)))
            db.execute("UPDATE sessions SET used = ?, begun = ? WHERE id = ?", (now, begun, number))
        self._renew(db, number)
        with decoding(session):
            hits = _hits(db, number, keys, early=True)
            return base.BeginResult(row["epoch"], hits, duplicate, begun, row["sampled"], now - row["created"], untext(row["engine"]))

    @ends
    def mark_orphaned(self, db: sqlite3.Connection, session: str, call: str) -> bool:
        mine = self._id(db, session), text(call)
        was = db.execute("SELECT wanted FROM calls WHERE session = ? AND call = ?", mine).fetchone()
        if db.execute("UPDATE calls SET orphaned = 1, wanted = 0 WHERE session = ? AND call = ?", mine).rowcount:
            self._renew(db, mine[0])
        return bool(was and was["wanted"])

    @ends
    def mark_wanted(self, db: sqlite3.Connection, session: str, call: str, *, given_up: bool = False) -> None:
        flag = "given_up" if given_up else "wanted"
        mine = self._id(db, session), text(call)
        if db.execute(f"UPDATE calls SET {flag} = 1 WHERE session = ? AND call = ?", mine).rowcount:  # noqa: S608 - a constant
            self._renew(db, mine[0])

    @ends
    def heartbeat(self, db: sqlite3.Connection, replica: str, seconds: float) -> None:
        self._watch.check(self._clock.system())
        self._clock.save(db)
        now = self.now()
        db.execute("DELETE FROM replicas WHERE expires <= ?", (now,))
        db.execute("INSERT OR REPLACE INTO replicas VALUES (?, ?)", (text(replica), now + seconds))

    @reads
    def live_replicas(self, db: sqlite3.Connection, replicas: Sequence[str]) -> set[str]:
        return {untext(name) for (name,) in db.execute("SELECT replica FROM replicas WHERE expires > ?", (self.now(),))} & set(replicas)

    @reads
    def find(self, db: sqlite3.Connection, session: str, keys: Sequence[bytes]) -> list[list[Hit]]:
        with decoding(session):
            return _hits(db, self._id(db, session), keys, early=False)

    @reads
    def prefix(self, db: sqlite3.Connection, session: str, turn: str) -> Prefix:
        with decoding(session):
            return unpack_prefix(turn, _line(db, self._id(db, session), turn))

    @writes
    def commit(  # noqa: PLR0917 - the interface, and the connection
        self,
        db: sqlite3.Connection,
        session: str,
        epoch: str,
        call: str,
        entries: Sequence[base.Entry],
        incidents: Sequence[Incident] = (),
        *,
        documents: Mapping[str, bytes] = MappingProxyType({}),
        engine: str = "",
    ) -> None:
        number = self._use_epoch(db, session, epoch)
        _add(db, number, entries, text(engine))
        for name, data in documents.items():
            db.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", (number, text(name), data))
        _end(db, number, call, incidents, self.now())

    @ends
    def settle(self, db: sqlite3.Connection, session: str, epoch: str, call: str, incidents: Sequence[Incident] = ()) -> None:
        _end(db, self._use_epoch(db, session, epoch), call, incidents, self.now())

    @ends
    def add_incidents(self, db: sqlite3.Connection, session: str, incidents: Sequence[Incident]) -> None:
        row = self._use(db, session)
        if row is None:
            if db.execute("SELECT 1 FROM tombstones WHERE name = ? AND expires > ?", (text(session), self.now())).fetchone():
                return
            row = self._create(db, session, SessionSettings(), Labels())
        _add_incidents(db, row["id"], incidents)

    async def sessions(self) -> AsyncIterator[base.SessionInfo]:
        cursor = b""
        while True:
            page = await self.page(cursor, PAGE)
            for info in page.sessions:
                yield info
            cursor = page.cursor
            if not cursor:
                break

    @reads
    def page(self, db: sqlite3.Connection, cursor: bytes, limit: int) -> base.Page:
        try:
            untext(cursor)  # the name that the last page ended with; no session has an empty name
        except UnicodeDecodeError:
            raise base.CursorError("it is not a cursor of this store") from None
        query = "SELECT * FROM sessions WHERE name > ? AND expires > ? ORDER BY name LIMIT ?"
        found = db.execute(query, (cursor, self.now(), limit)).fetchall()
        return base.Page([_info(db, row) for row in found], found[-1]["name"] if len(found) == limit else b"")

    @reads
    def states(self, db: sqlite3.Connection, sessions: Sequence[str]) -> list[base.SessionInfo | None]:
        return [_info(db, row) if row else None for row in (self._find(db, session) for session in sessions)]

    @reads
    def session(self, db: sqlite3.Connection, session: str) -> base.SessionInfo | None:
        row = self._find(db, session)
        return _info(db, row) if row else None

    @reads
    def turns(self, db: sqlite3.Connection, session: str) -> list[Turn]:
        found = db.execute("SELECT record FROM turns WHERE session = ? ORDER BY n", (self._id(db, session),))
        with decoding(session):
            return [unpack(record, Turn) for (record,) in found]

    @reads
    def tokens(self, db: sqlite3.Connection, session: str, turns: Sequence[str]) -> dict[str, Tokens]:
        number = self._id(db, session)
        found = {turn: _tokens(db, number, turn) for turn in turns}
        with decoding(session):
            return {turn: unpack_tokens(row["ids"], row["logprobs"]).tokens for turn, row in found.items()}

    @reads
    def contexts(self, db: sqlite3.Connection, session: str, turns: Sequence[str]) -> dict[str, bytes]:
        number = self._id(db, session)
        return {turn: _tokens(db, number, turn)["context"] for turn in turns}

    @writes
    def share(self, db: sqlite3.Connection, session: str, source: str, turns: Sequence[Turn]) -> None:
        row, other = self._use(db, session), self._use(db, source)
        if row is None or other is None:
            raise base.SessionGoneError(source if row is not None else session)
        _share(db, row["id"], other["id"], turns)

    @ends
    def finish(self, db: sqlite3.Connection, session: str, outcome: Outcome | None = None) -> bool:
        row = self._use(db, session)
        if row is None:
            return False
        with decoding(session):
            stored = _outcome(row)
        if outcome is not None and (row["sealed"] if stored is None else stored.kind != outcome.kind):
            raise base.OutcomeConflictError(session, outcome.kind, stored.kind if stored is not None else "")
        finish = "UPDATE sessions SET finished = coalesce(finished, ?), outcome = coalesce(outcome, ?), engine = x'' WHERE id = ?"
        db.execute(finish, (self.now(), pack(outcome) if outcome is not None else None, row["id"]))
        return True

    @ends
    def seal(self, db: sqlite3.Connection, session: str, *, force: bool = False, at: float = 0.0) -> base.SealOutcome:
        row = self._find(db, session)
        if row is None:
            return base.SealOutcome.MISSING
        if row["sealed"]:
            return base.SealOutcome.SEALED
        (calls,) = db.execute("SELECT count(*) FROM calls WHERE session = ?", (row["id"],)).fetchone()
        finished = row["finished"] is not None
        if not finished or calls:
            if not force:
                return base.SealOutcome.CALLS_IN_FLIGHT if finished else base.SealOutcome.UNFINISHED
            _add_incidents(db, row["id"], [sealed_early(finished=finished, open_calls=calls, at=at)])
        db.execute("UPDATE sessions SET sealed = 1, engine = x'', expires = ? WHERE id = ?", (self.now() + self._ttl, row["id"]))
        return base.SealOutcome.SEALED

    @ends
    def set_labels(self, db: sqlite3.Connection, session: str, changes: LabelChanges) -> bool:
        row = self._find(db, session)
        if row is not None:
            self._set_labels(db, row, changes)
        return row is not None

    @ends
    def add_reward(self, db: sqlite3.Connection, session: str, reward: Reward) -> bool:
        row = self._use(db, session)
        if row is not None:
            number = row["id"]
            db.execute("INSERT INTO rewards (session, record) VALUES (?, ?)", (number, pack(reward)))
            db.execute("UPDATE sessions SET rewards = rewards + 1 WHERE id = ?", (number,))
            db.execute(
                "DELETE FROM rewards WHERE session = ? AND n NOT IN (SELECT n FROM rewards WHERE session = ? ORDER BY n DESC LIMIT ?)",
                (number, number, REWARDS_KEPT),
            )
        return row is not None

    @reads
    def rewards(self, db: sqlite3.Connection, session: str) -> list[Reward]:
        found = db.execute("SELECT record FROM rewards WHERE session = ? ORDER BY n", (self._id(db, session),))
        with decoding(session):
            return [unpack(record, Reward) for (record,) in found]

    @ends
    def delete(self, db: sqlite3.Connection, session: str, *, reuse: bool = False) -> bool:
        row = self._find(db, session)
        db.execute("DELETE FROM sessions WHERE name = ?", (text(session),))
        until = self.now() + self._tombstone
        if row is not None:
            db.execute("INSERT INTO deleted VALUES (?, ?)", (row["epoch"], until))
        if reuse:
            db.execute("DELETE FROM tombstones WHERE name = ?", (text(session),))
        elif row is not None:
            db.execute("INSERT OR REPLACE INTO tombstones VALUES (?, ?)", (row["name"], until))
        return row is not None

    @reads
    def documents(self, db: sqlite3.Connection, session: str, names: Sequence[str]) -> list[bytes | None]:
        number = self._id(db, session)
        found = [db.execute("SELECT data FROM documents WHERE session = ? AND name = ?", (number, text(name))).fetchone() for name in names]
        return [row and row["data"] for row in found]

    @ends
    def delete_document(self, db: sqlite3.Connection, session: str, name: str) -> bool:
        mine = self._id(db, session), text(name)
        return db.execute("DELETE FROM documents WHERE session = ? AND name = ?", mine).rowcount > 0

    @writes
    def put_media(self, db: sqlite3.Connection, session: str, epoch: str, medium: StoredMedium, content: bytes, *, limit: int) -> bool:
        number = self._use_epoch(db, session, epoch)
        if db.execute("SELECT 1 FROM media WHERE session = ? AND sha256 = ?", (number, medium.sha256)).fetchone():
            return True
        (stored,) = db.execute("SELECT coalesce(sum(length(data)), 0) FROM media WHERE session = ?", (number,)).fetchone()
        if stored + len(content) > limit:
            return False
        db.execute("INSERT INTO media VALUES (?, ?, ?, ?)", (number, medium.sha256, text(medium.media_type), content))
        return True

    @reads
    def media(self, db: sqlite3.Connection, session: str, sha256: str) -> tuple[str, bytes] | None:
        mine = self._id(db, session), sha256
        found = db.execute("SELECT media_type, data FROM media WHERE session = ? AND sha256 = ?", mine).fetchone()
        return (untext(found["media_type"]), found["data"]) if found else None

    @reads
    def stored_media(self, db: sqlite3.Connection, session: str) -> list[StoredMedium]:
        query = "SELECT sha256, media_type, length(data) FROM media WHERE session = ? ORDER BY rowid"
        found = db.execute(query, (self._id(db, session),))
        return [StoredMedium(sha256, untext(media_type), size) for sha256, media_type, size in found]

    @writes
    def bind_key(self, db: sqlite3.Connection, key: str, binding: base.Binding) -> None:
        now = self.now()
        db.execute("DELETE FROM bindings WHERE expires <= ?", (now,))
        db.execute("INSERT OR REPLACE INTO bindings VALUES (?, ?, ?)", (key, pack(binding), now + self._ttl))

    async def binding_of_key(self, key: str) -> base.Binding | None:
        found = await self._binding(key)
        if found is not None and found[1] < self.now() + _RENEW_BELOW * self._ttl:  # not at each call, because it is a write
            await self._renew_binding(key)
        return found and found[0]

    @reads
    def _binding(self, db: sqlite3.Connection, key: str) -> tuple[base.Binding, float] | None:
        row = db.execute("SELECT record, expires FROM bindings WHERE key = ? AND expires > ?", (key, self.now())).fetchone()
        with decoding(key):
            return (unpack(row["record"], base.Binding), row["expires"]) if row else None

    @writes
    def _renew_binding(self, db: sqlite3.Connection, key: str) -> None:
        db.execute("UPDATE bindings SET expires = ? WHERE key = ?", (self.now() + self._ttl, key))

    @ends
    def unbind_key(self, db: sqlite3.Connection, key: str) -> bool:
        return db.execute("DELETE FROM bindings WHERE key = ?", (key,)).rowcount > 0

    @writes
    def put_engine(self, db: sqlite3.Connection, entry: base.EngineEntry) -> None:
        db.execute("INSERT OR REPLACE INTO engines VALUES (?, ?, ?)", (entry.url, entry.replica, pack(entry)))

    @writes
    def drop_engine(self, db: sqlite3.Connection, url: str, replica: str = "") -> None:
        db.execute("DELETE FROM engines WHERE url = ? AND replica = ?", (url, replica))

    @reads
    def engines(self, db: sqlite3.Connection) -> list[base.EngineEntry]:
        with decoding("engines"):
            return [unpack(record, base.EngineEntry) for (record,) in db.execute("SELECT record FROM engines")]

    @reads
    def weights(self, db: sqlite3.Connection) -> WeightsState:
        return _weights(db)

    @writes
    def replace_weights(self, db: sqlite3.Connection, state: WeightsState) -> bool:
        stored = _weights(db)
        if state.revision == stored.revision + 1:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('weights', ?)", (pack(state),))
            stored = state
        return stored == state

    def _check_capacity(self, db: sqlite3.Connection) -> None:
        self._delete_expired(db)
        if self._max_sessions and (count := _count(db)) >= self._max_sessions:
            raise base.StoreFullError(f"there are {count} sessions, and --max-sessions is {self._max_sessions}")
        self._disk.check_capacity(db, self._max_bytes)

    def _delete_expired(self, db: sqlite3.Connection) -> None:
        """Delete what has expired, and the entries of the queue that are void since then."""
        now = self.now()
        db.execute("DELETE FROM tombstones WHERE expires <= ?", (now,))
        db.execute("DELETE FROM deleted WHERE expires <= ?", (now,))
        if expired := db.execute("DELETE FROM sessions WHERE expires <= ?", (now,)).rowcount:
            log.info("file: %d sessions have expired and are deleted: they were not used for %g s", expired, self._ttl)
            db.execute(
                "DELETE FROM queue WHERE at < ? AND until <= ? AND NOT EXISTS "
                "(SELECT 1 FROM sessions WHERE sessions.name = queue.session AND sessions.epoch = queue.epoch)",
                (now - self._ttl, now),
            )

    def _create(self, db: sqlite3.Connection, session: str, settings: SessionSettings, labels: Labels) -> sqlite3.Row:
        now, name = self.now(), text(session)
        db.execute("DELETE FROM sessions WHERE name = ?", (name,))  # it may be there and have expired
        created: sqlite3.Row = db.execute(
            "INSERT INTO sessions (name, epoch, created, used, expires, digest, settings, labels) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
            "RETURNING *",
            (
                name,
                secrets.token_hex(8),
                now,
                now,
                now + self._ttl,
                settings.digest,
                pack(settings) if settings else None,
                pack(labels) if labels.changes.given else None,
            ),
        ).fetchone()
        return created

    def _renew(self, db: sqlite3.Connection, number: int) -> None:
        db.execute("UPDATE sessions SET expires = ? WHERE id = ?", (self.now() + self._ttl, number))

    def _find(self, db: sqlite3.Connection, session: str) -> sqlite3.Row | None:
        live = "SELECT * FROM sessions WHERE name = ? AND expires > ?"
        found: sqlite3.Row | None = db.execute(live, (text(session), self.now())).fetchone()
        return found

    def _id(self, db: sqlite3.Connection, session: str) -> int:
        """Return the id of a session; 0, which none has, if it does not exist."""
        row = self._find(db, session)
        return row["id"] if row is not None else 0

    def _use(self, db: sqlite3.Connection, session: str) -> sqlite3.Row | None:
        """Look up a session, and renew its time to live."""
        row = self._find(db, session)
        if row is not None:
            self._renew(db, row["id"])
        return row

    def _use_epoch(self, db: sqlite3.Connection, session: str, epoch: str) -> int:
        row = self._find(db, session)
        if row is None or row["epoch"] != epoch:
            deleted = db.execute("SELECT 1 FROM deleted WHERE epoch = ? AND expires > ?", (epoch, self.now())).fetchone()
            raise base.SessionGoneError(session, deleted=deleted is not None)
        self._renew(db, row["id"])
        return int(row["id"])

    def _set_labels(self, db: sqlite3.Connection, row: sqlite3.Row, changes: LabelChanges) -> None:
        db.execute("UPDATE sessions SET labels = ? WHERE id = ?", (pack(_labels(row).changed(changes)), row["id"]))
        self._renew(db, row["id"])


@contextmanager
def decoding(session: str) -> Iterator[None]:
    """Report values that cannot be decoded as damage of the session."""
    try:
        yield
    except (ValueError, TypeError) as why:
        raise base.DamagedError(f"file: the data of session {session} is damaged: {why}") from None


def _weights(db: sqlite3.Connection) -> WeightsState:
    row = db.execute("SELECT value FROM meta WHERE name = 'weights'").fetchone()
    with decoding("weights"):
        return unpack(row["value"], WeightsState) if row else WeightsState()


def _count(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT count(*) FROM sessions").fetchone()[0])


def _check_version(db: sqlite3.Connection, path: Path) -> None:
    (version,) = db.execute("UPDATE meta SET value = value WHERE name = 'schema' RETURNING value").fetchone()
    if version != schema.VERSION:
        raise base.StoreError(
            f"file: the stored form of {path} is {version!r}, but this version of tokencache reads {schema.VERSION!r}. "
            "Use another file, or the version of tokencache that wrote it"
        )


def _settings(row: sqlite3.Row) -> SessionSettings:
    return unpack(row["settings"], SessionSettings) if row["settings"] else SessionSettings()


def _labels(row: sqlite3.Row) -> Labels:
    return unpack(row["labels"], Labels) if row["labels"] else Labels()


def _outcome(row: sqlite3.Row) -> Outcome | None:
    return unpack(row["outcome"], Outcome) if row["outcome"] else None


def _info(db: sqlite3.Connection, row: sqlite3.Row) -> base.SessionInfo:
    number, name = row["id"], untext(row["name"])
    with decoding(name):
        turn = db.execute("SELECT record FROM turns WHERE session = ? ORDER BY n DESC LIMIT 1", (number,)).fetchone()
        reward = db.execute("SELECT record FROM rewards WHERE session = ? ORDER BY n DESC LIMIT 1", (number,)).fetchone()
        incidents = db.execute("SELECT record FROM incidents WHERE session = ? ORDER BY n", (number,))
        settings, latest = _settings(row), unpack(turn["record"], LatestTurn) if turn else None
        if latest is not None and latest.created < row["began"]:  # its call ended after that of a later one
            turn = db.execute("SELECT record FROM turns WHERE n = ?", (row["latest"],)).fetchone()
            latest = unpack(turn["record"], LatestTurn)
        return base.SessionInfo(
            id=name,
            created=row["created"],
            used=row["used"],
            sealed=bool(row["sealed"]),
            turns=row["turns"],
            open_calls=tuple(map(_open_call, db.execute("SELECT * FROM calls WHERE session = ? ORDER BY n", (number,)))),
            incidents=tuple(unpack(record, Incident) for (record,) in incidents),
            epoch=row["epoch"],
            finished=row["finished"],
            settings=settings,
            labels=_labels(row),
            reward=unpack(reward["record"], Reward) if reward else None,
            rewards=row["rewards"],
            sampled=row["sampled"],
            call_ms=row["call_ms"],
            harness=settings.harness or (latest.harness if latest else ""),
            model=latest.model if latest else "",
            latest=latest,
            outcome=_outcome(row),
            engine=untext(row["engine"]),
        )


def _open_call(row: sqlite3.Row) -> base.OpenCall:
    flags = bool(row["orphaned"]), bool(row["wanted"]), bool(row["given_up"])
    return base.OpenCall(untext(row["call"]), row["since"], row["fingerprint"], untext(row["replica"]), *flags)


def _join(db: sqlite3.Connection, number: int, fingerprint: bytes, join: base.Join) -> base.OpenCall | None:
    """Find an open call that may be joined, and mark it as wanted."""
    found = db.execute(
        "UPDATE calls SET wanted = 1 WHERE n = (SELECT min(n) FROM calls WHERE session = ? AND fingerprint = ? AND NOT given_up "
        "AND (? = 'any' OR ? = 'orphaned' AND orphaned)) RETURNING *",
        (number, fingerprint, join, join),
    ).fetchone()
    return _open_call(found) if found else None


def _hits(db: sqlite3.Connection, number: int, keys: Sequence[bytes], *, early: bool) -> list[list[Hit]]:
    """Look up keys. With `early` it ends after the first known chain key."""
    found: list[list[Hit]] = [[] for _ in keys]
    for position, key in enumerate(keys):
        rows = db.execute(
            "SELECT record, continued FROM hits JOIN turns USING (n) WHERE hits.session = ? AND key = ? ORDER BY n", (number, key)
        )
        found[position] = [Hit(unpack(record, Turn), bool(continued)) for record, continued in rows]
        if early and found[position] and key[:1] == b"c":
            break
    return found


def _tokens(db: sqlite3.Connection, number: int, turn: str) -> sqlite3.Row:
    row: sqlite3.Row | None = db.execute(_SELECT_TOKENS, (number, text(turn))).fetchone()
    if row is None:
        raise KeyError(turn)
    return row


def _line(db: sqlite3.Connection, number: int, turn: str) -> Iterator[bytes]:
    """Read the ids of a turn, of its base, and so on."""
    name: str | None = turn
    while name is not None:
        row = db.execute(_SELECT_IDS, (number, text(name))).fetchone()
        if row is None:
            return
        yield row["ids"]
        name = unpack_tokens(row["ids"]).base


def _add(db: sqlite3.Connection, number: int, entries: Sequence[base.Entry], engine: bytes) -> None:
    for entry in entries:
        _add_entry(db, number, entry)
    sampled = sum(entry.turn.completion_tokens for entry in entries)
    db.execute(
        "UPDATE sessions SET sampled = sampled + ?, call_ms = call_ms + ?, "
        "engine = CASE WHEN ? = x'' OR finished IS NOT NULL OR sealed THEN engine ELSE ? END WHERE id = ?",
        (sampled, milliseconds_of(entries), engine, engine, number),
    )


def _add_entry(db: sqlite3.Connection, number: int, entry: base.Entry) -> None:
    turn = entry.turn
    (n,) = db.execute(
        "INSERT INTO turns (session, turn, record) VALUES (?, ?, ?) "
        "ON CONFLICT (session, turn) DO UPDATE SET record = excluded.record, continued = 0 RETURNING n",
        (number, text(turn.id), pack(turn)),
    ).fetchone()
    data = (n, pack_tokens(turn, entry.tokens), entry.tokens.logprobs, entry.context)
    db.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?)", data)
    db.executemany("INSERT OR IGNORE INTO hits VALUES (?, ?, ?)", [(number, key, n) for key in entry.keys])
    db.execute("UPDATE sessions SET latest = ?, began = ? WHERE id = ? AND began <= ?", (n, turn.created, number, turn.created))
    if turn.parent is not None:
        db.execute("UPDATE turns SET continued = 1 WHERE session = ? AND turn = ?", (number, text(turn.parent)))


def _share(db: sqlite3.Connection, number: int, other: int, turns: Sequence[Turn]) -> None:
    """Record turns of another session, with their keys; they name the rows with the tokens."""
    for turn in turns:
        name = text(turn.id)
        found = db.execute("SELECT n, coalesce(shares, n) AS own FROM turns WHERE session = ? AND turn = ?", (other, name)).fetchone()
        if found is None:
            raise KeyError(turn.id)
        insert = "INSERT INTO turns (session, turn, record, shares) VALUES (?, ?, ?, ?) RETURNING n"
        (n,) = db.execute(insert, (number, name, pack(turn), found["own"])).fetchone()
        if TurnMark.NOT_IN_HISTORY not in turn.marks:
            db.execute("INSERT INTO hits SELECT ?, key, ? FROM hits WHERE session = ? AND n = ?", (number, n, other, found["n"]))
        db.execute("UPDATE turns SET continued = 1 WHERE session = ? AND turn = ?", (number, text(turn.parent or "")))
    counts = len(turns), len({turn.call for turn in turns}), sum(turn.completion_tokens for turn in turns)
    db.execute("UPDATE sessions SET turns = ?, begun = begun + ?, sampled = sampled + ? WHERE id = ?", (*counts, number))


def _end(db: sqlite3.Connection, number: int, call: str, incidents: Sequence[Incident], now: float) -> None:
    """Close a call."""
    db.execute("DELETE FROM calls WHERE session = ? AND call = ?", (number, text(call)))
    db.execute("UPDATE sessions SET used = ?, turns = (SELECT count(*) FROM turns WHERE session = id) WHERE id = ?", (now, number))
    _add_incidents(db, number, incidents)


def _add_incidents(db: sqlite3.Connection, number: int, incidents: Sequence[Incident]) -> None:
    db.executemany("INSERT INTO incidents (session, record) VALUES (?, ?)", [(number, pack(incident)) for incident in incidents])

"""The tables of a file store. Times are Unix time in seconds; names are encoded by `encoding.text`.

`sessions.latest` is the turn whose call began last, and `sessions.began` when that was.
"""

import sqlite3

VERSION = b"1"
"""Version of the tables. A file with another version is refused and not changed."""

TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS sessions (
  id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, epoch TEXT NOT NULL, created REAL NOT NULL, used REAL NOT NULL, expires REAL NOT NULL,
  finished REAL, sealed INTEGER NOT NULL DEFAULT 0, begun INTEGER NOT NULL DEFAULT 0, turns INTEGER NOT NULL DEFAULT 0,
  sampled INTEGER NOT NULL DEFAULT 0, rewards INTEGER NOT NULL DEFAULT 0, digest BLOB NOT NULL DEFAULT x'', settings BLOB, labels BLOB,
  outcome BLOB, call_ms INTEGER NOT NULL DEFAULT 0, engine BLOB NOT NULL DEFAULT x'', latest INTEGER, began REAL NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS sessions_expire ON sessions (expires);

CREATE TABLE IF NOT EXISTS tombstones (name BLOB PRIMARY KEY, expires REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS deleted (epoch TEXT PRIMARY KEY, expires REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS deleted_expire ON deleted (expires);

CREATE TABLE IF NOT EXISTS turns (
  n INTEGER PRIMARY KEY, session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE, turn BLOB NOT NULL,
  continued INTEGER NOT NULL DEFAULT 0, record BLOB NOT NULL, shares INTEGER, UNIQUE (session, turn));
CREATE INDEX IF NOT EXISTS turns_in_order ON turns (session);

CREATE TABLE IF NOT EXISTS tokens (
  n INTEGER PRIMARY KEY REFERENCES turns ON DELETE CASCADE, ids BLOB NOT NULL, logprobs BLOB NOT NULL, context BLOB NOT NULL);

CREATE TABLE IF NOT EXISTS hits (
  session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE, key BLOB NOT NULL, n INTEGER NOT NULL,
  PRIMARY KEY (session, key, n)) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS calls (
  n INTEGER PRIMARY KEY, session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE, call BLOB NOT NULL, since REAL NOT NULL,
  fingerprint BLOB NOT NULL, replica BLOB NOT NULL, orphaned INTEGER NOT NULL DEFAULT 0, wanted INTEGER NOT NULL DEFAULT 0,
  given_up INTEGER NOT NULL DEFAULT 0, UNIQUE (session, call));

CREATE TABLE IF NOT EXISTS incidents (
  n INTEGER PRIMARY KEY, session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE, record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS incidents_in_order ON incidents (session);

CREATE TABLE IF NOT EXISTS rewards (
  n INTEGER PRIMARY KEY, session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE, record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS rewards_in_order ON rewards (session);

CREATE TABLE IF NOT EXISTS documents (
  session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE, name BLOB NOT NULL, data BLOB NOT NULL, PRIMARY KEY (session, name));

CREATE TABLE IF NOT EXISTS media (
  session INTEGER NOT NULL REFERENCES sessions ON DELETE CASCADE, sha256 TEXT NOT NULL, media_type BLOB NOT NULL, data BLOB NOT NULL,
  PRIMARY KEY (session, sha256));

CREATE TABLE IF NOT EXISTS bindings (key TEXT PRIMARY KEY, record BLOB NOT NULL, expires REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS replicas (replica BLOB PRIMARY KEY, expires REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS engines (url TEXT, replica TEXT, record BLOB NOT NULL, PRIMARY KEY (url, replica)) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS watched (session BLOB PRIMARY KEY, due REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS watched_due ON watched (due);
CREATE TABLE IF NOT EXISTS queue (
  session BLOB PRIMARY KEY, epoch TEXT NOT NULL, at REAL NOT NULL, delivery TEXT NOT NULL DEFAULT '', consumer TEXT NOT NULL DEFAULT '',
  until REAL NOT NULL DEFAULT 0, attempt INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS deliveries (delivery TEXT, session BLOB, PRIMARY KEY (delivery, session)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS removed_deliveries (delivery TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS removed_sessions (session BLOB, epoch TEXT, at REAL NOT NULL, PRIMARY KEY (session, epoch)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS demands (consumer BLOB PRIMARY KEY, demand BLOB NOT NULL) WITHOUT ROWID;
"""

_ADDED = {
    "sessions": {
        "outcome": "BLOB",
        "call_ms": "INTEGER NOT NULL DEFAULT 0",
        "engine": "BLOB NOT NULL DEFAULT x''",
        "latest": "INTEGER",
        "began": "REAL NOT NULL DEFAULT 0",
    },
    "turns": {"shares": "INTEGER"},
}
"""Columns that files of earlier releases lack: table → name → type. Those releases ignore them."""

HAND_OVER = (
    "CREATE INDEX IF NOT EXISTS turns_that_share ON turns (shares) WHERE shares IS NOT NULL",
    """
CREATE TRIGGER IF NOT EXISTS hand_over BEFORE DELETE ON sessions BEGIN
  UPDATE tokens SET n = (SELECT min(heirs.n) FROM turns AS heirs WHERE heirs.shares = tokens.n AND heirs.session <> OLD.id)
    WHERE n IN (SELECT own.n FROM turns AS own JOIN turns AS heirs ON heirs.shares = own.n
                WHERE own.session = OLD.id AND heirs.session <> OLD.id);
  UPDATE turns SET shares = moved.heir
    FROM (SELECT heirs.shares AS n, min(heirs.n) AS heir FROM turns AS heirs JOIN turns AS own ON own.n = heirs.shares
          WHERE own.session = OLD.id AND heirs.session <> OLD.id GROUP BY heirs.shares) AS moved
    WHERE turns.shares = moved.n;
END""",
)
"""A turn of a fork (`Store.share`) names in `shares` the turn whose tokens it reads. When the session of that turn is deleted, the tokens
move to the first turn that shares them, and the others name this one."""


def add_columns(db: sqlite3.Connection) -> None:
    """Add the columns that a file of an earlier release lacks. A file of another version is not changed."""
    if db.execute("SELECT 1 FROM meta WHERE name = 'schema' AND value = ?", (VERSION,)).fetchone() is None:
        return
    for table, columns in _ADDED.items():
        there = {row["name"] for row in db.execute(f"PRAGMA table_info({table})")}
        for name, kind in columns.items():
            if name not in there:
                db.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")
    for statement in HAND_OVER:
        db.execute(statement)

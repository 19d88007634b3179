"""The file store: crashes, torn logs, several processes, bounds, and errors."""

import asyncio
import errno
import logging
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.store.conformance import build, check_replicas, record
from tests.store.machine import machine_of
from tests.support.invariants import audit
from tests.support.waiting import PATIENCE, until
from tokencache.core.incidents import Incident
from tokencache.core.outcome import Outcome
from tokencache.core.session import Labels, Reward, SessionSettings
from tokencache.store import StoreOptions, open_store
from tokencache.store.base import Binding, SessionDeletedError, SessionGoneError, StoreError, StoreFullError
from tokencache.store.file import FileStore
from tokencache.store.file import worker as file_worker
from tokencache.store.file.disk import Disk
from tokencache.store.file.store import read_path
from tokencache.store.file.worker import Worker, _transact

WRITER = """
import asyncio, sys
from tokencache.core.incidents import Incident
from tests.store.conformance import build
from tokencache.store.file import FileStore

async def line(store, session):
    last, n = None, 0
    while True:
        begun = await store.begin(session, f"k{n}", [])
        last = build(f"t{n}", last, tail=range(n % 7), reply=range(n % 5 + 1), keys=(b"c%d" % n,), call=f"k{n}")
        await store.commit(session, begun.epoch, f"k{n}", [last.entry], [Incident(f"t{n}")], documents={"d": b"%d" % n})
        print(session, n, flush=True)
        n += 1

async def main():
    store = FileStore(sys.argv[1])
    await store.open()
    print("open", -1, flush=True)
    await asyncio.gather(*(line(store, f"s{n}") for n in range(3)))

asyncio.run(main())
"""
"""Records turns in three sessions without end, and prints each turn after it was committed."""


@pytest.fixture
def url(tmp_path):
    return f"file:{tmp_path}/sessions.db"


@pytest.fixture
def machine():
    with machine_of() as made:
        yield made


@pytest.fixture
async def store(url):
    made = FileStore(url)
    await made.open()
    yield made
    await made.close()


def start_writer(url):
    return subprocess.Popen([sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE, text=True)


def line_of(turns):
    """The entries that the writer records."""
    built = []
    for n in range(turns):
        built.append(build(f"t{n}", built[-1] if built else None, range(n % 7), range(n % 5 + 1), keys=(b"c%d" % n,), call=f"k{n}"))
    return built


async def whole_turns(store, session):
    """Check that a session contains whole commits only, from the first one on. Returns how many."""
    info = await store.session(session)
    if info is None:
        return 0
    turns = await store.turns(session)
    wanted = line_of(len(turns))
    assert [turn.id for turn in turns] == [one.turn.id for one in wanted]
    assert (info.turns, info.sampled) == (len(turns), sum(one.turn.completion_tokens for one in wanted))
    assert [incident.kind for incident in info.incidents] == [turn.id for turn in turns]
    assert await store.documents(session, ["d"]) == [b"%d" % (len(turns) - 1) if turns else None]
    assert {call.call for call in info.open_calls} <= {f"k{len(turns)}"}
    tokens = await store.tokens(session, [turn.id for turn in turns])
    assert audit(turns, tokens) == []
    assert [(await store.prefix(session, one.turn.id)).ids for one in wanted[-3:]] == [one.prefix for one in wanted[-3:]]
    assert [[hit.turn.id for hit in under] for under in await store.find(session, [b"c%d" % n for n in range(len(turns))])] == [
        [turn.id] for turn in turns
    ]
    return len(turns)


async def test_what_was_acknowledged_survives_kill_9(url):
    """Processes are killed in the middle of commits, again and again, over one file."""
    for seed in range(6):
        path = Path(f"{url.removeprefix('file:')}-{seed}")
        writer = start_writer(f"file:{path}")
        acknowledged = {f"s{n}": -1 for n in range(3)}
        lines = random.Random(seed).randrange(5, 150)
        for _ in range(lines):
            session, n = writer.stdout.readline().split()
            acknowledged[session] = int(n)
        writer.send_signal(signal.SIGKILL)
        for line in writer.stdout:  # what it had printed before it died
            session, n = line.split()
            acknowledged[session] = int(n)
        assert writer.wait() == -signal.SIGKILL
        store = FileStore(f"file:{path}")
        await store.open()
        for session in ("s0", "s1", "s2"):
            assert await whole_turns(store, session) > acknowledged[session]
        begun = await store.begin("s0", "next", [])
        await store.commit("s0", begun.epoch, "next", [build("next").entry])
        await store.close()


async def test_a_log_that_was_cut_contains_whole_commits(tmp_path, url):
    """As after a loss of power, with a disk that had not written the end of the write-ahead log."""
    store = FileStore(url)
    await store.open()
    for n, one in enumerate(line_of(40)):
        begun = await store.begin("s", f"k{n}", [])
        await store.commit("s", begun.epoch, f"k{n}", [one.entry], [Incident(one.turn.id)], documents={"d": b"%d" % n})
    path = read_path(url)
    log = path.with_name(f"{path.name}-wal").read_bytes()
    shutil.copy(path, tmp_path / "copy.db")
    await store.close()
    found, chance = set(), random.Random(1)
    for _ in range(25):
        copy = tmp_path / "cut.db"
        for old in tmp_path.glob("cut.db*"):
            old.unlink()
        shutil.copy(tmp_path / "copy.db", copy)
        (tmp_path / "cut.db-wal").write_bytes(log[: chance.randrange(len(log))])
        cut = FileStore(f"file:{copy}")
        await cut.open()
        found.add(await whole_turns(cut, "s"))
        await cut.close()
    assert len(found) > 5


async def test_it_survives_a_restart(url):
    store = FileStore(url)
    await store.open()
    secret = await store.secret()
    await store.define("s", SessionSettings("codex"), Labels("g"))
    await store.bind_key("h", Binding("s"))
    await store.offer("s", "e", 1.0)
    await store.lease(["s"], "d", "c", 600)
    await store.close()
    again = FileStore(url)
    await again.open()
    assert await again.secret() == secret
    assert await again.binding_of_key("h") == Binding("s")
    assert (await again.session("s")).settings == SessionSettings("codex")
    assert [entry.delivery for entry in await again.queue()] == ["d"]
    await again.close()


async def test_stores_share_a_file(url):
    one, other = FileStore(url), FileStore(url)
    await asyncio.gather(one.open(), other.open())
    await check_replicas(one, other)
    await one.close()
    await other.close()


@pytest.mark.whole
async def test_processes_share_a_file(url):
    writers = [start_writer(url) for _ in range(2)]
    for writer in writers:
        for _ in range(60):
            assert writer.stdout.readline()
    for writer in writers:
        writer.kill()
        writer.wait()
    store = FileStore(url)
    await store.open()
    for session in ("s0", "s1", "s2"):
        turns = await store.turns(session)
        assert len({turn.id for turn in turns}) == len(turns) >= 10
    await store.close()


async def test_many_operations_share_a_transaction(store, monkeypatch):
    """The thread is busy at first. What waits meanwhile is one transaction, in which each operation has its own result."""
    await record(store, "sealed", build("a"))
    await store.seal("sealed", force=True)
    busy, free = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold(_database):
        loop.call_soon_threadsafe(busy.set)
        asyncio.run_coroutine_threadsafe(free.wait(), loop).result()

    holding = asyncio.create_task(store.writer.run("hold", hold))
    await busy.wait()
    waiting = [asyncio.create_task(store.begin(name, "k", [])) for name in ("a", "sealed", "b")]
    await asyncio.sleep(0)
    commits = []
    await store.reader.run("nothing", lambda _database: None)
    monkeypatch.setattr("tokencache.store.file.worker._transact", lambda *args: commits.append(len(args[2])) or _transact(*args))
    free.set()
    await holding
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["BeginResult", "SessionSealedError", "BeginResult"]
    assert commits == [3]


async def test_an_operation_that_fails_leaves_nothing_and_disturbs_no_other(store):
    def fails(why):
        def work(database):
            database.execute("INSERT INTO meta VALUES (?, 'x')", (type(why).__name__,))
            raise why

        return work

    jobs = [
        store.writer.run("value", fails(ValueError("x"))),
        store.begin("a", "k", []),
        store.writer.run("disk", fails(sqlite3.OperationalError("database or disk is full"))),
        store.begin("b", "k", []),
    ]
    value, begun, disk, other = await asyncio.gather(*jobs, return_exceptions=True)
    assert isinstance(value, ValueError)
    assert isinstance(disk, StoreError)
    assert str(disk).startswith("file: disk: database or disk is full: ")
    assert (begun.calls, other.calls) == (1, 1)
    names = await store.reader.run("names", lambda database: [name for (name,) in database.execute("SELECT name FROM meta")])
    assert names == ["clock", "schema"]


async def test_a_full_disk_refuses_whole_commits(store, monkeypatch):
    monkeypatch.setattr("tokencache.store.file.disk._KEPT_SECONDS", 0.0)
    epoch = await record(store, "s", build("a", keys=(b"c1",)))
    await record(store, "large", build("a", tail=range(50_000)))
    await store.begin("s", "k", [])
    entries = [build("b", keys=(b"c1",)).entry, build("c", build("a"), tail=range(100_000)).entry]

    monkeypatch.setattr(Disk, "free", lambda _: 0)
    for operation in (store.commit("s", epoch, "k", entries, [Incident("x")]), store.begin("s", "k2", [], fingerprint=bytes(10_000))):
        with pytest.raises(StoreError, match=r"database or disk is full: 0 bytes are free on the disk of .*sessions\.db"):
            await operation
        with pytest.raises(StoreError, match="disk is full"):
            await store.ping()
    info = await store.session("s")
    assert (info.turns, info.incidents, [call.call for call in info.open_calls]) == (1, (), ["k"])
    assert [[hit.turn.id for hit in under] for under in await store.find("s", [b"c1"])] == [["a"]]
    with pytest.raises(StoreFullError, match=r"the disk of .*sessions\.db is nearly full: sessions take \d+ bytes, and 0 are free"):
        await store.begin("t", "k", [])
    assert await store.delete("large") is True  # this makes room
    await store.begin("s", "k2", [], fingerprint=bytes(10_000))
    monkeypatch.undo()
    await store.ping()
    await store.commit("s", epoch, "k", entries, [Incident("x")])
    assert [turn.id for turn in await store.turns("s")] == ["a", "b", "c"]


class BrokenOnce(sqlite3.Connection):
    """A connection whose first rollback fails."""

    broken = False

    def execute(self, sql, *args):
        if sql == "ROLLBACK" and not self.broken:
            self.broken = True
            raise sqlite3.OperationalError("disk I/O error")
        return super().execute(sql, *args)


async def test_a_rollback_that_fails_ends_no_later_operation(tmp_path, monkeypatch):
    monkeypatch.setattr("tokencache.store.file.worker.sqlite3.connect", partial(sqlite3.connect, factory=BrokenOnce))
    worker = Worker(tmp_path / "database", 1.0)
    await worker.open()
    await worker.run("create", lambda database: database.execute("CREATE TABLE numbers (number INTEGER UNIQUE)"))

    def twice(database):
        return [database.execute("INSERT INTO numbers VALUES (1)") for _ in range(2)]

    for _ in range(2):
        with pytest.raises(StoreError):
            await worker.run("twice", twice)
    await worker.run("once", lambda database: database.execute("INSERT INTO numbers VALUES (2)"))
    assert await worker.run("read", lambda database: [row[0] for row in database.execute("SELECT number FROM numbers")]) == [2]
    await worker.close()


async def test_another_process_that_holds_the_lock(url):
    store = FileStore(url, timeout_seconds=0.05)
    await store.open()
    await record(store, "s", build("a"))
    other = sqlite3.connect(read_path(url), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="file: begin: database is locked"):
        await store.begin("s", "k", [])
    assert len(await store.turns("s")) == 1  # reading goes on
    other.execute("ROLLBACK")
    other.close()
    assert (await store.begin("s", "k", [])).calls == 2
    await store.close()


async def test_operations_wait_for_a_lock_together(url, monkeypatch, caplog):
    """Not one after the other, each as long again. The disk is not full then, either."""
    waits, attempt = [], file_worker._attempt
    monkeypatch.setattr(file_worker, "_attempt", lambda *args: waits.append(args) or attempt(*args))
    store = FileStore(url, timeout_seconds=0.05)
    await store.open()
    epoch = await record(store, "s", build("a"))
    other = sqlite3.connect(read_path(url), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waits.clear()
    answers = await asyncio.gather(*(store.settle("s", epoch, f"{n}") for n in range(10)), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["file: settle: database is locked"] * 10
    assert len(waits) < 10
    assert "is full" not in caplog.text
    other.close()
    await store.close()


async def test_a_call_that_is_cancelled_while_it_waits(store):
    task = asyncio.create_task(store.begin("s", "k", []))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await store.begin("t", "k", [])).calls == 1


async def test_only_its_owner_can_read_the_file(url, tmp_path):
    mask = os.umask(0)
    try:
        store = FileStore(url)
        await store.open()
        await record(store, "s", build("a"))
        assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
        await store.close()
    finally:
        os.umask(mask)


@pytest.mark.parametrize(("refusals", "opens"), [(3, True), (10**6, False)])
async def test_sqlite_refuses_at_once_while_another_process_makes_the_log(tmp_path, monkeypatch, refusals, opens):
    """Of four processes that open a new file at once, one in some tens is refused, whatever SQLite's timeout is."""
    refused = iter(range(refusals))

    class Contended(sqlite3.Connection):
        def execute(self, statement, *more):
            if statement.startswith("PRAGMA journal_mode") and next(refused, None) is not None:
                why = sqlite3.OperationalError("database is locked")
                why.sqlite_errorcode = sqlite3.SQLITE_BUSY
                raise why
            return super().execute(statement, *more)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Contended))
    store = FileStore(f"file:{tmp_path}/new.db", timeout_seconds=5.0 if opens else 0.05)
    if opens:
        await store.open()
        assert (await store.begin("s", "k", [])).epoch
        await store.close()
    else:
        with pytest.raises(StoreError, match="database is locked"):
            await store.open()


async def test_files_that_cannot_be_opened(tmp_path):
    (tmp_path / "text").write_text("not a database\n" * 100)
    for name, why in (("missing/x.db", "its directory must exist"), (".", "directory"), ("text", "not a database")):
        store = FileStore(f"file:{tmp_path}/{name}")
        with pytest.raises(StoreError, match=why):
            await store.open()
        await store.close()
    assert (tmp_path / "text").read_text() == "not a database\n" * 100


async def test_a_file_of_another_version_is_refused(url):
    store = FileStore(url)
    await store.open()
    await store.writer.run("age", lambda database: database.execute("UPDATE meta SET value = x'39' WHERE name = 'schema'").rowcount)
    with pytest.raises(StoreError, match="this version of tokencache reads"):
        await store.ping()
    await store.close()
    refused = FileStore(url)
    with pytest.raises(StoreError, match="Use another file"):
        await refused.open()
    with pytest.raises(StoreError, match="closed"):  # it keeps no connection
        await refused.ping()


async def test_a_file_of_an_earlier_release_is_opened_and_takes_outcomes(url):
    store = FileStore(url)
    await store.open()
    await record(store, "s", build("a"))
    await store.writer.run("age", lambda database: database.execute("ALTER TABLE sessions DROP COLUMN outcome").rowcount)
    await store.close()
    store = FileStore(url)
    await store.open()
    assert (await store.session("s")).outcome is None
    await store.finish("s", Outcome("sandbox"))
    assert (await store.session("s")).outcome == Outcome("sandbox")
    await store.close()


async def test_damaged_data_is_reported(store):
    await record(store, "s", build("a"))
    await store.writer.run("damage", lambda database: database.execute("UPDATE turns SET record = x'00'").rowcount)
    with pytest.raises(StoreError, match="session s is damaged"):
        await store.turns("s")
    with pytest.raises(StoreError, match="session s is damaged"):
        await store.session("s")
    await store.writer.run("damage", lambda database: database.execute("UPDATE sessions SET outcome = x'00'").rowcount)
    with pytest.raises(StoreError, match="session s is damaged"):
        await store.finish("s", Outcome("ok"))


async def test_a_closed_store_says_so(url):
    store = FileStore(url)
    await store.open()
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.session("s")


async def test_what_comes_while_a_store_closes_is_refused(url):
    store = FileStore(url)
    await store.open()
    await record(store, "s", build("a"))
    closing = asyncio.create_task(store.writer.close())
    await asyncio.sleep(0)  # it waits for the thread
    with pytest.raises(StoreError, match="closed"):
        await asyncio.wait_for(store.begin("s", "k", []), PATIENCE)
    await closing
    await store.close()


@pytest.mark.parametrize("failing", ["fstatvfs", "ftruncate"])
async def test_a_file_system_that_fails_answers_every_operation(url, monkeypatch, failing):
    """A disk with errors is mounted anew, for reading only: nothing can be written then, and the reserve cannot be released."""

    def fail(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    def refuse(*_):
        raise sqlite3.OperationalError("attempt to write a readonly database")

    store = FileStore(url)
    await store.open()
    epoch = await record(store, "s", build("a"))
    with monkeypatch.context() as broken:
        broken.setattr(os, failing, fail)
        broken.setattr("tokencache.store.file.worker._attempt", refuse)
        for operation in (store.begin("s", "k", []), store.settle("s", epoch, "k"), store.begin("s", "k", [])):
            with pytest.raises(StoreError, match=r"file: (begin|settle): .*[Rr]ead.?only"):
                await asyncio.wait_for(operation, PATIENCE)
    assert (await store.begin("s", "k", [])).epoch == epoch
    await store.close()


async def test_times_to_live(url, machine):
    store = FileStore(url, ttl_seconds=100, tombstone_seconds=10)
    await store.open()
    used, unused = await record(store, "used", build("a")), await record(store, "unused", build("a"))
    await store.offer("unused", unused, machine.system)
    await store.offer("used", used, machine.system)
    await store.bind_key("h", Binding("s"))
    await store.bind_key("h2", Binding("s"))
    for n in range(4):
        machine.go_on(60)
        assert (await store.begin("used", f"k{n}", [])).epoch == used
        assert await store.binding_of_key("h") == Binding("s")
    assert await store.session("unused") is None
    assert await store.binding_of_key("h2") is None
    with pytest.raises(SessionGoneError):
        await store.settle("unused", unused, "k")
    assert (await store.begin("unused", "k", [])).calls == 1
    assert [entry.session for entry in await store.queue()] == ["used"]
    uses = [
        lambda: store.settle("used", used, "k0"),
        lambda: store.mark_orphaned("used", "k1"),
        lambda: store.mark_wanted("used", "k1"),
        lambda: store.set_labels("used", Labels("g").changes),
        lambda: store.add_reward("used", Reward(1.0)),
        lambda: store.define("used", SessionSettings(), Labels(), exist_ok=True),
        lambda: store.finish("used"),
        lambda: store.seal("used", force=True),
        lambda: store.add_incidents("used", []),
    ]
    for use in uses:
        machine.go_on(60)
        await use()
    assert [info.id async for info in store.sessions()] == ["used"]
    await store.delete("used")
    with pytest.raises(SessionDeletedError):
        await store.begin("used", "k", [])
    machine.go_on(11)
    assert (await store.begin("used", "k", [])).epoch != used
    await store.close()


@pytest.mark.parametrize("days", [8, -8])
async def test_a_process_whose_clock_is_wrong_deletes_no_running_session(url, monkeypatch, caplog, days):
    """The clocks differ by more than the time to live. All processes measure it by the file system's."""
    caplog.set_level(logging.INFO, "tokencache.store.file")
    real, ahead = time.time, [0.0]
    monkeypatch.setattr("time.time", lambda: real() + ahead[0])

    async def elsewhere(operation):
        """Run an operation in a process with another clock."""
        ahead[0] = days * 86400.0
        try:
            return await operation
        finally:
            ahead[0] = 0.0

    one, other = FileStore(url), FileStore(url)
    await one.open()
    begun = await one.begin("s", "k", [])
    assert "CLOCK" not in caplog.text
    await elsewhere(other.open())
    assert f"this process's clock is 691200 s {'ahead of' if days > 0 else 'behind'} that of the file system" in caplog.text
    there = await elsewhere(other.begin("there", "k", []))
    await elsewhere(other.begin("there2", "k", []))  # a new session deletes what has expired
    await one.begin("here", "k", [])
    await one.commit("s", begun.epoch, "k", [build("a").entry])
    await one.commit("there", there.epoch, "k", [build("a").entry])
    assert {info.id async for info in one.sessions()} == {"s", "there", "there2", "here"}
    assert abs((await one.session("there")).created - (await one.session("s")).created) < 3600
    assert "expired" not in caplog.text
    await one.close()
    await elsewhere(other.close())


async def test_sessions_that_expire_are_counted_in_the_log(url, machine, caplog):
    caplog.set_level(logging.INFO, "tokencache.store.file")
    store = FileStore(url, ttl_seconds=100)
    await store.open()
    for name in ("a", "b"):
        await store.begin(name, "k", [])
    machine.go_on(101)
    await store.begin("c", "k", [])
    assert "file: 2 sessions have expired and are deleted: they were not used for 100 s" in caplog.text
    await store.close()


async def test_bounds(url):
    store = open_store(url, StoreOptions(max_sessions=2))
    await store.open()
    for name in "ab":
        await record(store, name, build("a"))
    for refused in (store.begin("c", "k", []), store.define("c", SessionSettings(), Labels())):
        with pytest.raises(StoreFullError, match="--max-sessions is 2"):
            await refused
    assert (await store.begin("a", "k2", [])).calls == 2
    await store.delete("b")
    assert (await store.begin("c", "k", [])).calls == 1
    await store.close()
    full = open_store(url, StoreOptions(max_bytes=300_000))
    await full.open()
    await record(full, "a", build("large", tail=range(100_000)))
    with pytest.raises(StoreFullError, match="--max-store-bytes is 300000"):
        await full.begin("d", "k", [])
    await full.delete("a", reuse=True)
    assert (await full.begin("d", "k", [])).calls == 1
    await full.close()


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:/var/x.db", "/var/x.db"),
        ("file:x.db", "x.db"),
        ("file:///var/a%20b.db", "/var/a b.db"),
        ("file://localhost/x.db", "/x.db"),
        ("file:~/x.db", str(Path.home() / "x.db")),
    ],
)
def test_urls(url, path):
    assert read_path(url) == Path(path)


@pytest.mark.parametrize("url", ["file:", "file://", "file://host/x.db", "file:/var/", "file:x.db?mode=ro"])
def test_other_urls(url):
    with pytest.raises(ValueError, match="the URL of a file store is file:PATH"):
        open_store(url)


async def test_a_file_that_was_truncated_is_reported(url, tmp_path, caplog):
    (tmp_path / "sessions.db").touch()
    made = FileStore(url)
    await made.open()
    await made.close()
    assert "was there and is empty" in caplog.text


async def test_a_file_that_was_removed_or_replaced_is_reported(url, tmp_path, caplog):
    """Its sessions are still there for who has it open, and end with that process; another process would begin another file."""
    store = FileStore(url)
    await store.open()
    try:
        await record(store, "s", build("t", None, tail=[1], reply=[2]))
        path = tmp_path / "sessions.db"
        path.rename(tmp_path / "elsewhere")
        for _ in range(2):
            await until(partial(_fails, store))
            assert (await store.session("s")).turns == 1
            path.touch()
        (tmp_path / "elsewhere").rename(path)
        await until(partial(_answers, store))
    finally:
        await store.close()
    assert caplog.text.count("was removed or replaced: put it back") == 1


async def _fails(store):
    try:
        await store.ping()
    except StoreError as why:
        return "was removed or replaced" in str(why)
    return False


async def _answers(store):
    return not await _fails(store)


async def test_a_truncated_file_with_its_log_is_refused(url, tmp_path, store):
    await store.define("s", SessionSettings(), Labels())
    log = (tmp_path / "sessions.db-wal").read_bytes()
    (tmp_path / "cut.db").touch()
    (tmp_path / "cut.db-wal").write_bytes(log)
    with pytest.raises(StoreError, match="was truncated"):
        await FileStore(url.replace("sessions", "cut")).open()

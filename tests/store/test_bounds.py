"""Limits of a store: sizes, times to live, servers that evict sessions, and data of another version."""

import asyncio
import contextlib
import logging
from functools import partial

import pytest
from redis.asyncio import Redis

from tests.store.conformance import build, record
from tests.store.machine import machine_of
from tests.support.redis_server import RealRedis
from tokencache import wakeup
from tokencache.core.incidents import Incident
from tokencache.core.media import StoredMedium
from tokencache.core.outcome import Outcome
from tokencache.core.session import LabelChanges, Labels, Reward, SessionSettings
from tokencache.store.base import (
    Binding,
    OutcomeConflictError,
    SessionDeletedError,
    SessionExistsError,
    SessionFinishedError,
    SessionGoneError,
    SettingsConflictError,
    StoreError,
    StoreFullError,
)
from tokencache.store.file import FileStore
from tokencache.store.memory import MemoryStore
from tokencache.store.redis import RedisStore, capacity

MEGABYTE = 2**20


@pytest.fixture
def server():
    with RealRedis() as running:
        yield running


@pytest.fixture
async def redis(server):
    async with Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
async def opened(server):
    """Opens stores on the server that check the capacity only on request."""
    made = []

    async def make(**settings):
        store = RedisStore(server.url, **settings)
        made.append(store)
        await store.open()
        return store

    yield make
    for store in made:
        await store.close()


async def look(store):
    """Check the capacity, as the background task does every second."""
    if isinstance(store, RedisStore):
        store._capacity._count_at = 0.0  # sessions were counted long ago
        await store._capacity.check()


async def fill(redis, megabytes):
    """Use memory with small values: a large one is also in the buffers."""
    for n in range(2 * megabytes):
        await redis.set(f"else {n}", b"x" * (MEGABYTE // 2))


async def is_full(store, session, match):
    with pytest.raises(StoreFullError, match=match):
        await store.begin(session, "k", [])
    assert await store.session(session) is None
    return True


async def keeps_the_bound(store, match):
    """At the limit only existing sessions go on. A deleted session frees capacity, and a tombstone uses none."""
    epoch = await record(store, "a", build("a"))
    await record(store, "b", build("a"))
    await look(store)
    assert await is_full(store, "c", match)
    await store.begin("a", "k", [])
    await store.commit("a", epoch, "k", [build("b").entry])
    await store.add_incidents("a", [Incident("x")])
    await store.delete("b")
    await look(store)
    with pytest.raises(SessionDeletedError):
        await store.begin("b", "k", [])
    assert (await store.begin("c", "k", [])).calls == 1


async def test_sessions_in_memory_are_limited():
    await keeps_the_bound(MemoryStore(max_sessions=2), "there are 2 sessions, and --max-sessions is 2")


async def test_bytes_in_memory_are_limited():
    store = MemoryStore(max_bytes=3000)
    await record(store, "a", build("a", tail=range(500)))
    assert (await store.begin("b", "k", [])).calls == 1
    await record(store, "a", build("b", tail=range(500)))
    assert await is_full(store, "c", r"the records take \d+ bytes, and --max-store-bytes is 3000")
    assert (await store.usage()).share > 1
    await store.delete("a")
    assert (await store.begin("c", "k", [])).calls == 1


async def test_replaced_and_deleted_documents_use_no_bytes():
    store = MemoryStore(max_bytes=3000)
    epoch = (await store.begin("a", "k", [])).epoch
    for _ in range(10):
        await store.commit("a", epoch, "k", [], documents={"d": bytes(2000)})
    assert (await store.begin("b", "k", [])).calls == 1
    await store.commit("a", epoch, "k", [], documents={"e": bytes(2000)})
    assert await is_full(store, "c", "the records take 4000 bytes")
    assert await store.delete_document("a", "d")
    assert (await store.begin("c", "k", [])).calls == 1


@pytest.mark.redis
async def test_sessions_in_redis_are_limited(opened, redis):
    store = await opened(max_sessions=2)
    for n in range(10):
        await store.bind_key(f"h{n}", Binding("s"))  # other keys than sessions do not count
    await keeps_the_bound(store, "there are 2 sessions, and --max-sessions is 2")
    await look(store)
    assert (await store.usage()).share == 1


@pytest.mark.redis
async def test_bytes_in_redis_are_limited(opened, redis):
    store = await opened(max_bytes=30 * MEGABYTE)
    await record(store, "a", build("a"))
    await fill(redis, 30)
    await look(store)
    assert await is_full(store, "b", r"Redis uses \d+ bytes, and --max-store-bytes is 31457280")
    assert (await store.usage()).share > 1
    await record(store, "a", build("b"))
    await redis.delete(*await redis.keys("else*"))
    await look(store)
    assert (await store.begin("b", "k", [])).calls == 1


@pytest.mark.redis
async def test_new_sessions_are_refused_before_redis_refuses_old_ones(opened, redis):
    store = await opened()
    epoch = await record(store, "a", build("a"))
    await redis.config_set("maxmemory", 100 * MEGABYTE)
    await look(store)
    await record(store, "b", build("a"))
    await fill(redis, 94)
    await look(store)
    assert await is_full(store, "c", r"the limit is nine tenths of its maxmemory, 104857600")
    await store.begin("a", "k", [])
    await store.commit("a", epoch, "k", [build("b").entry])


@pytest.mark.redis
async def test_the_background_task_checks_by_itself(opened, redis):
    store = await opened(max_bytes=30 * MEGABYTE)
    await fill(redis, 30)

    async def begin_many():
        for n in range(100_000):
            await store.begin(f"s{n}", "k", [])

    with pytest.raises(StoreFullError):
        await begin_many()
    assert not store._capacity._task.done()


async def test_a_store_closes_whatever_its_background_task_does(fake_store, monkeypatch):
    """redis-py swallows a cancellation in the step in which it has sent a command, on Python 3.11."""
    monkeypatch.setattr(capacity, "SECONDS", 0)
    monkeypatch.setattr(wakeup, "CANCEL_AGAIN_SECONDS", 0.01)
    for steps in range(12):
        store = fake_store()
        await store.open()
        for _ in range(steps):
            await asyncio.sleep(0)
        await store.close()
        assert store._capacity._task.done()


@pytest.mark.redis
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_server_that_evicts_is_refused(opened, redis, policy, caplog):
    await redis.config_set("maxmemory-policy", policy)
    await opened()  # without a maxmemory it drops nothing
    assert caplog.text == ""
    await redis.config_set("maxmemory", 100 * MEGABYTE)
    with pytest.raises(StoreError, match=rf"maxmemory-policy is {policy}.*--store-may-evict"):
        await opened()
    caplog.clear()
    store = await opened(may_evict=True)
    await record(store, "a", build("a"))
    assert f"SESSIONS MAY BE LOST: its maxmemory-policy is {policy}" in caplog.text


@pytest.mark.redis
async def test_a_changed_policy_is_logged_once(opened, redis, caplog):
    store = await opened()
    await redis.config_set("maxmemory", 100 * MEGABYTE)
    await redis.config_set("maxmemory-policy", "allkeys-lfu")
    for _ in range(3):
        await look(store)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.redis
async def test_data_of_a_newer_version_is_not_touched(opened, redis):
    """After a rollback the data of the newer release stays unchanged, and a running proxy reports it."""
    store = await opened()
    assert await redis.get("tokencache:schema") == b"1"
    await redis.set("tokencache:schema", "2")
    for refused in (store.ping, opened):
        with pytest.raises(StoreError, match=r"stored form is '2', but this version of tokencache reads form 1"):
            await refused()
    assert await redis.get("tokencache:schema") == b"2"
    await redis.set("tokencache:schema", "1")
    await store.ping()
    await redis.flushall()
    await store.ping()
    assert await redis.get("tokencache:schema") == b"1"


def _expire_row(name, database):
    database.execute("UPDATE sessions SET expires = 1 WHERE name = ?", (name,))


async def _expire(store, sessions):
    """Let sessions expire, as if nobody had used them for their time to live."""
    for session in sessions:
        if isinstance(store, RedisStore):
            await store._command("expire", "UNLINK", store._keys.session(session))
        elif isinstance(store, MemoryStore):
            del store._sessions[session]
        else:
            await store.writer.run("expire", partial(_expire_row, session.encode()))


@pytest.mark.parametrize("store", ["memory", "file", pytest.param("redis", marks=pytest.mark.redis)], indirect=True)
async def test_entries_of_expired_sessions_leave_the_queue(store, monkeypatch):
    """Without a consumer that reads the queue, and also if the session's name is used again."""
    monkeypatch.setattr("tokencache.store.pruning.EVERY", 5)
    old = {name: await record(store, name, build("a")) for name in ("gone", "used", "again", "taken")}
    for name, epoch in old.items():
        await store.offer(name, epoch, 1000.0)
    await store.lease(["taken"], "d", "c", 600)
    await _expire(store, ["gone", "again", "taken"])
    await record(store, "again", build("a"))
    await store.offer("new", "e", 1e10)
    await record(store, "any", build("a"))
    assert [entry.session for entry in await store.queue()] == ["taken", "used", "new"]
    await store.remove("d")
    await store.withdraw("used", old["used"])
    await store.withdraw("new", "e")


async def refused(store):
    """What a session refuses, or what has no effect on it: of calls that began before it had its name, and of what it is or is not."""
    before = await record(store, "again", build("a"))
    await store.delete("again", reuse=True)
    await store.begin("again", "k", [])
    await store.finish("again", Outcome("sandbox"))
    return [
        (SessionGoneError, lambda: store.commit("again", before, "late", [build("b").entry])),
        (SessionGoneError, lambda: store.settle("again", before, "late")),
        (SessionGoneError, lambda: store.put_media("again", before, StoredMedium("0" * 64, "image/png", 1), b"x", limit=9)),
        (None, lambda: store.mark_orphaned("again", "late")),
        (None, lambda: store.mark_wanted("again", "late")),
        (SessionFinishedError, lambda: store.begin("again", "late", [])),
        (SessionExistsError, lambda: store.define("again", SessionSettings(), Labels())),
        (SettingsConflictError, lambda: store.define("again", SessionSettings("h"), Labels(), exist_ok=True)),
        (OutcomeConflictError, lambda: store.finish("again", Outcome("engine"))),
        (None, lambda: store.seal("again")),  # a call is in flight
    ]


async def attempt(error, operation):
    with pytest.raises(error) if error is not None else contextlib.nullcontext():
        await operation()


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_what_is_refused_does_not_renew_a_session(kind, tmp_path):
    with machine_of() as machine:
        store = MemoryStore(ttl_seconds=100) if kind == "memory" else FileStore(f"file:{tmp_path}/sessions.db", ttl_seconds=100)
        await store.open()
        for one in await refused(store):
            machine.go_on(60)
            await attempt(*one)
            assert await store.session("again") is not None
            machine.go_on(60)
            assert await store.session("again") is None
            await refused(store)
        await store.close()


@pytest.mark.redis
async def test_what_is_refused_does_not_renew_a_session_in_redis(opened, redis):
    for one in await refused(await opened()):
        await redis.pexpire("tokencache:{again}", 60_000)
        await attempt(*one)
        assert 0 < await redis.pttl("tokencache:{again}") <= 60_000


async def test_times_to_live_in_memory(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    store = MemoryStore(ttl_seconds=100, tombstone_seconds=10)
    used, unused = await record(store, "used", build("a")), await record(store, "unused", build("a"))
    await store.bind_key("h", Binding("s"))
    await store.bind_key("h2", Binding("s"))
    for n in range(4):
        now[0] += 60
        assert (await store.begin("used", f"k{n}", [])).epoch == used
        assert await store.binding_of_key("h") == Binding("s")
    assert await store.session("unused") is None
    assert await store.binding_of_key("h2") is None
    with pytest.raises(SessionGoneError):
        await store.settle("unused", unused, "k")
    assert (await store.begin("unused", "k", [])).calls == 1
    uses = [
        lambda: store.settle("used", used, "k0"),
        lambda: store.mark_orphaned("used", "k1"),
        lambda: store.mark_wanted("used", "k1"),
        lambda: store.set_labels("used", LabelChanges("g")),
        lambda: store.add_reward("used", Reward(1.0)),
        lambda: store.define("used", SessionSettings(), Labels(), exist_ok=True),
        lambda: store.finish("used"),
        lambda: store.seal("used", force=True),
        lambda: store.add_incidents("used", []),
    ]
    for use in uses:
        now[0] += 60
        await use()
    assert [info.id async for info in store.sessions()] == ["used"]
    await store.delete("used")
    with pytest.raises(SessionDeletedError):
        await store.begin("used", "k", [])
    now[0] += 11
    assert (await store.begin("used", "k", [])).epoch != used

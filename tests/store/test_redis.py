"""The Redis store: round trips, times to live, atomic scripts, retries, and error messages."""

import asyncio

import pytest
from redis import exceptions
from redis.asyncio.connection import AbstractConnection

from tests.store.conformance import build, record
from tests.support.redis_server import RealRedis
from tests.support.waiting import PATIENCE, until
from tokencache.core.incidents import Incident
from tokencache.core.session import LabelChanges, Labels, Reward, SessionSettings
from tokencache.store.base import (
    Binding,
    CursorError,
    RemoveOutcome,
    SealOutcome,
    SessionDeletedError,
    SessionExistsError,
    SessionGoneError,
    SessionSealedError,
    StoreError,
)
from tokencache.store.encoding import pack
from tokencache.store.redis import RedisStore
from tokencache.store.redis.shared import Pipelined
from tokencache.store.redis.store import HASHES

pytestmark = pytest.mark.redis
SETTINGS = SessionSettings("codex", sampling={"temperature": 1.0})
WEEK = 7 * 86400 * 1000


@pytest.fixture
def store(emptied_redis_store):
    return emptied_redis_store


@pytest.fixture
def sent(monkeypatch):
    """Records the commands that are sent."""
    counted = []
    send = AbstractConnection.send_packed_command

    async def counting(self, command, *args, **kwargs):
        whole = b"".join(command) if isinstance(command, list) else command
        if not any(word in whole for word in (b"INFO", b"DBSIZE", b"\r\nTIME\r\n")):  # asked in the background
            counted.append(whole)
        return await send(self, command, *args, **kwargs)

    write = Pipelined._write

    def counting_shared(self):
        counted.append(b"".join(self._unsent))
        write(self)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", counting)
    monkeypatch.setattr(Pipelined, "_write", counting_shared)
    return counted


async def test_every_operation_is_one_round_trip(store, redis, sent):
    for script in HASHES:
        await redis.script_load(script)  # as after the first of each kind
    begun = await store.begin("s", "k", [b"c1", b"r1"])
    first = build("a", keys=(b"c1", b"r1"))
    operations = [
        lambda: store.commit(
            "s", begun.epoch, "k", [first.entry, build("b", first).entry], [Incident("x")], documents={"d": b"1", "e": b"2"}
        ),
        lambda: store.begin("s", "k", [b"c0", b"c1", b"r1"], fingerprint=b"same", replica="r"),
        lambda: store.begin("s", "k2", [b"c0", b"c1", b"r1"], fingerprint=b"same", replica="r", join="any"),
        lambda: store.mark_orphaned("s", "k"),
        lambda: store.mark_wanted("s", "k"),
        lambda: store.heartbeat("r", 5),
        lambda: store.live_replicas(["r", "r2"]),
        store.secret,
        lambda: store.prefix("s", "b"),
        lambda: store.find("s", [b"c1"] * 50),
        lambda: store.settle("s", begun.epoch, "k", [Incident("x")]),
        lambda: store.add_incidents("s", [Incident("x")]),
        lambda: store.session("s"),
        lambda: store.turns("s"),
        lambda: store.tokens("s", ["a", "b"]),
        lambda: store.settings("s"),
        lambda: store.states(["s", "t"]),
        lambda: store.set_labels("s", LabelChanges("g", {"a": 1}, ("t",))),
        lambda: store.add_reward("s", Reward(1.0)),
        lambda: store.rewards("s"),
        lambda: store.finish("s"),
        lambda: store.settle("s", begun.epoch, "call"),
        lambda: store.seal("s"),
        lambda: store.define("s", SessionSettings("h"), Labels("g"), adopt=True),
        lambda: store.offer("s", begun.epoch, 1.0),
        store.queue,
        store.queue_length,
        lambda: store.lease(["s"], "d", "c", 60),
        lambda: store.extend("d", 60),
        lambda: store.release("d"),
        lambda: store.remove("d"),
        lambda: store.withdraw("s", begun.epoch),
        lambda: store.put_demand("c", b"d"),
        store.demands,
        lambda: store.drop_demand("c"),
        lambda: store.watch("s", 60),
        store.overdue,
        lambda: store.unwatch("s"),
        lambda: store.documents("s", ["d", "e"]),
        lambda: store.delete_document("s", "d"),
        lambda: store.bind_key("k", Binding("s")),
        lambda: store.binding_of_key("k"),
        lambda: store.unbind_key("k"),
        store.ping,
        lambda: store.delete("s"),
    ]
    for operation in operations:
        sent.clear()
        await operation()
        assert len(sent) == 1, sent


async def test_scripts_are_sent_to_a_server_that_does_not_know_them(store, redis, sent):
    begun = await store.begin("s", "k", [])
    await redis.script_flush()
    await store.commit("s", begun.epoch, "k", [build("a").entry])
    sent.clear()
    await store.prefix("s", "a")
    assert len(sent) == 2
    sent.clear()
    await store.prefix("s", "a")
    assert len(sent) == 1


async def test_a_session_is_one_key_that_use_renews(store, redis):
    epoch = await record(store, "s", build("a"))
    assert await redis.keys("*{s}*") == [b"tokencache:{s}"]
    uses = [
        lambda: store.begin("s", "k", [], fingerprint=b"same"),
        lambda: store.begin("s", "k2", [], fingerprint=b"same", join="any"),
        lambda: store.mark_orphaned("s", "k"),
        lambda: store.mark_wanted("s", "k"),
        lambda: store.commit("s", epoch, "k", [build("b").entry]),
        lambda: store.settle("s", epoch, "k"),
        lambda: store.add_incidents("s", [Incident("x")]),
        lambda: store.define("s", SessionSettings("h"), Labels("g"), adopt=True),
        lambda: store.set_labels("s", LabelChanges("g")),
        lambda: store.add_reward("s", Reward(1.0)),
        lambda: store.finish("s"),
        lambda: store.seal("s", force=True),
    ]
    for use in uses:
        await redis.pexpire("tokencache:{s}", 60_000)
        await use()
        assert 60_000 < await redis.pttl("tokencache:{s}") <= WEEK
    await store.define("defined", SessionSettings(), Labels())
    assert 60_000 < await redis.pttl("tokencache:{defined}") <= WEEK
    await store.add_incidents("new", [])
    assert 60_000 < await redis.pttl("tokencache:{new}") <= WEEK


async def test_use_renews_a_binding(store, redis):
    await store.bind_key("h", Binding("s"))
    assert 60_000 < await redis.pttl("tokencache:key:h") <= WEEK
    await redis.pexpire("tokencache:key:h", 60_000)
    assert await store.binding_of_key("h") == Binding("s")
    assert 60_000 < await redis.pttl("tokencache:key:h") <= WEEK


async def test_everything_expires_except_shared_keys(store, redis):
    await store.secret()
    await store.heartbeat("r", 60)
    await record(store, "gone", build("a"))
    await store.delete("gone")
    await store.bind_key("h", Binding("s"))
    await record(store, "s", build("a", keys=(b"c1",)))
    stays = {key for key in await redis.keys("*") if await redis.pttl(key) == -1}
    assert stays == {b"tokencache:schema", b"tokencache:secret"}
    assert 0 < await redis.pttl("tokencache:{gone}") <= 3_600_000


async def test_a_tombstone_expires(store, redis):
    await record(store, "s", build("a"))
    await store.delete("s")
    with pytest.raises(SessionDeletedError):
        await store.begin("s", "k", [])
    await redis.pexpireat("tokencache:{s}", 1)
    assert (await store.begin("s", "k", [])).calls == 1


async def test_other_clients_do_not_wait_for_the_memory_of_a_deleted_session(store, redis):
    """The server frees it in a thread of its own: a big one would take it tens of milliseconds."""
    await record(store, "s", build("a"))
    await redis.hset("tokencache:{s}", mapping=dict.fromkeys(map(str, range(1000)), b"x" * 1000))

    async def freed():
        return (await redis.info("memory"))["lazyfreed_objects"]

    before = await freed()
    await store.delete("s")

    async def freed_more():
        return await freed() > before

    await until(freed_more)


async def test_a_call_of_an_ended_epoch_writes_nothing(store, redis):
    begun = await store.begin("s", "k", [])
    await redis.pexpireat("tokencache:{s}", 1)
    with pytest.raises(SessionGoneError):
        await store.commit("s", begun.epoch, "k", [build("a").entry])
    assert await redis.keys("*{s}*") == []


async def test_ttl_and_prefix_are_settings(redis_server, redis):
    one, other = (RedisStore(redis_server.url, prefix=prefix, ttl_seconds=5) for prefix in ("a*[b]?\\c", "axb"))
    await record(one, "s", build("a"))
    await record(other, "t", build("a"))
    assert [info.id async for info in one.sessions()] == ["s"]
    assert [info.id async for info in other.sessions()] == ["t"]
    assert 0 < await redis.pttl("axb:{t}") <= 5000
    await one.close()
    await other.close()


async def test_many_sessions_are_listed_in_pages(store, redis):
    pipeline = redis.pipeline(transaction=False)
    for n in range(3000):
        pipeline.set(f"somebody-else:{{{n}}}", "x")
    await pipeline.execute()
    await asyncio.gather(*(store.add_incidents(f"s{n}", []) for n in range(300)))
    assert sorted([info.id async for info in store.sessions()]) == sorted(f"s{n}" for n in range(300))


async def test_more_concurrent_calls_than_connections(store):
    begun = await asyncio.gather(*(store.begin("s", f"k{n}", [b"c"]) for n in range(300)))
    assert len({one.epoch for one in begun}) == 1
    assert len((await store.session("s")).open_calls) == 300


async def test_many_documents_are_read_at_once(store):
    epoch = (await store.begin("s", "k", [])).epoch
    await store.commit("s", epoch, "k", [], documents={"d700": b"1", "d9999": b"2"})
    found = await store.documents("s", [f"d{n}" for n in range(10_000)])
    assert len(found) == 10_000
    assert {n: data for n, data in enumerate(found) if data is not None} == {700: b"1", 9999: b"2"}


@pytest.fixture
def loses_replies(store, monkeypatch):
    """Loses the first reply of every operation, after it was done."""
    send = store._send
    lost = set()

    async def losing(script, *args, **how):
        reply = await send(script, *args, **how)
        if script not in lost:
            lost.add(script)
            raise exceptions.ConnectionError("Connection closed by server.")
        return reply

    monkeypatch.setattr(store, "_send", losing)
    return lost


async def test_an_operation_whose_reply_was_lost_is_done_once(store, loses_replies):
    begun = await store.begin("s", "k", [], fingerprint=b"same", join="any")
    assert (begun.duplicate, begun.calls) == (None, 1)
    assert (await store.begin("s", "k2", [], fingerprint=b"same", join="any")).duplicate.call == "k"
    entry = build("a", keys=(b"c1",)).entry
    await store.commit("s", begun.epoch, "k", [entry], [Incident("x")])
    await store.add_incidents("s", [Incident("y"), Incident("y")])
    await store.add_incidents("s", [Incident("y")])
    info = await store.session("s")
    assert (info.turns, info.open_calls) == (1, ())
    assert [incident.kind for incident in info.incidents] == ["x", "y", "y", "y"]
    assert [hit.turn.id for hit in (await store.find("s", [b"c1"]))[0]] == ["a"]
    assert (await store.begin("s", "k3", [])).tokens == entry.turn.completion_tokens
    assert len(loses_replies) == 5


async def test_a_definition_whose_reply_was_lost_is_done_once(store, loses_replies):
    assert await store.define("s", SETTINGS, Labels("g")) is True
    with pytest.raises(SessionExistsError):
        await store.define("s", SETTINGS, Labels("g"))
    assert await store.define("s", SETTINGS, Labels("h"), exist_ok=True) is False
    await store.add_reward("s", Reward(1.0, at=1.5))
    loses_replies.clear()
    await store.add_reward("s", Reward(2.0, at=2.5))
    await store.begin("s", "k", [], settings=SETTINGS.digest)
    assert await store.finish("s") is True
    assert await store.seal("s", force=True, at=3.5) is SealOutcome.SEALED
    info = await store.session("s")
    assert (info.rewards, [one.reward for one in await store.rewards("s")]) == (2, [1.0, 2.0])
    assert [incident.kind for incident in info.incidents] == ["sealed-early"]


async def test_a_delivery_whose_replies_were_lost_is_counted_once(store, loses_replies):
    for n, session in enumerate("ab"):
        await store.offer(session, "e", float(n))
    assert await store.lease(["a", "b"], "d", "c", 600) is True
    assert [entry.attempt for entry in await store.queue()] == [1, 1]
    assert await store.extend("d", 600) is True
    assert await store.release("d") is True
    assert await store.release("d") is False
    await store.lease(["a"], "d2", "c", 600)
    assert await store.remove("d2") is RemoveOutcome.REMOVED
    assert await store.remove("d2") is RemoveOutcome.REPEATED
    assert await store.remove("d") is RemoveOutcome.EXPIRED
    await store.withdraw("b", "e")
    assert await store.queue() == []
    assert len(loses_replies) == 7


async def test_data_of_older_versions_is_read(store, redis):
    """Sessions without what this version adds, one of them sealed, and a key that carries settings."""
    await record(store, "s", build("a"))
    older = {b"life", b"created", b"used", b"turns", b"begun", b"sampled", b"open", b"#a", b"H1", b"T1", b"L1"}
    assert set(await redis.hkeys("tokencache:{s}")) == older | {b"newest"}
    await redis.hdel("tokencache:{s}", "newest")
    await redis.hset("tokencache:{sealed}", mapping=await redis.hgetall("tokencache:{s}"))
    await redis.hset("tokencache:{sealed}", "sealed", "1")
    info, sealed = await store.states(["s", "sealed"])
    assert (info.state, info.finished, info.settings, info.labels, info.rewards) == ("open", None, SessionSettings(), Labels(), 0)
    assert info.latest.id == "a"
    assert (sealed.state, sealed.finished) == ("sealed", None)
    assert await store.settings("s") == SessionSettings()
    await redis.set("tokencache:key:h", pack(Binding("s", SETTINGS.harness, sampling=SETTINGS.sampling)))
    binding = await store.binding_of_key("h")
    assert await store.define(binding.session, binding.settings, Labels(), adopt=True) is False
    assert (await store.begin("s", "k", [], settings=SETTINGS.digest)).calls == 2


async def test_a_walk_ends_when_another_server_has_taken_over(store, redis, monkeypatch):
    """A cursor of SCAN means nothing to another server: sessions would be left out without a word."""
    names = {f"s{n}" for n in range(50)}
    for name in names:
        await store.define(name, SessionSettings(), Labels())
    page = await store.page(b"", 10)
    walk = store.sessions()
    found = [await anext(walk)]

    async def run_id(_run):
        return b"another"

    monkeypatch.setattr("tokencache.store.redis.store.run_id", run_id)
    with pytest.raises(CursorError, match="taken over"):
        await store.page(page.cursor, 10)
    found += [info async for info in walk]
    assert sorted(info.id for info in found) == sorted(names)


async def test_sessions_start_again_when_another_server_takes_over(store, redis, monkeypatch):
    names = {f"s{n}" for n in range(50)}
    for name in names:
        await store.define(name, SessionSettings(), Labels())
    monkeypatch.setattr("tokencache.store.redis.store.PAGE", 5)
    servers = iter([b"one", b"one"])

    async def run_id(_run):
        return next(servers, b"another")

    monkeypatch.setattr("tokencache.store.redis.store.run_id", run_id)
    assert sorted([info.id async for info in store.sessions()]) == sorted(names)


async def test_a_wanted_call_stays_wanted_when_the_reply_was_lost(store, loses_replies):
    """The first attempt clears the flag, and the second must not report the call as unwanted."""
    begun = await store.begin("s", "k", [], fingerprint=b"same")
    await store.mark_wanted("s", "k")
    assert await store.mark_orphaned("s", "k") is True
    assert await store.mark_orphaned("s", "k") is False
    await store.settle("s", begun.epoch, "k")
    loses_replies.clear()
    assert await store.mark_orphaned("s", "k") is False  # it has ended


async def test_a_deletion_is_not_sent_twice(store, loses_replies):
    """The second reply would be wrong: that there was no such session."""
    await store.add_incidents("s", [])
    with pytest.raises(StoreError, match=r"delete: Connection closed"):
        await store.delete("s")
    assert await store.session("s") is None


async def test_a_broken_connection_is_replaced(store, redis):
    begun = await store.begin("s", "k", [])
    await redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await store.commit("s", begun.epoch, "k", [build("a").entry])
    assert [turn.id for turn in await store.turns("s")] == ["a"]


async def test_a_cancelled_operation_does_not_leave_its_reply_to_the_next(store):
    for n in range(50):
        task = asyncio.create_task(store.begin(f"gone{n}", "k", []))
        for _ in range(n % 10):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await store.find("s", [b"c1", b"c2"]) == [[], []]
        assert await store.binding_of_key("none") is None


async def test_a_full_server_refuses_whole_commits(store, redis):
    epoch = await record(store, "s", build("a", keys=(b"c1",)))
    await store.begin("s", "k", [])
    await record(store, "d", build("a"))
    await record(store, "gone", build("a"))
    await store.delete("gone")
    await store.offer("s", epoch, 1.0)
    entries = [build("b", keys=(b"c1",)).entry, build("c", build("a")).entry]
    await redis.config_set("maxmemory", 1)
    try:
        refused = [
            store.commit("s", epoch, "k", entries, [Incident("x")]),
            store.settle("s", epoch, "k", [Incident("x")]),
            store.begin("s", "k2", []),
            store.begin("t", "k", []),
            store.add_incidents("t", []),
            store.define("t", SessionSettings("h"), Labels("g")),
            store.define("gone", SessionSettings("h"), Labels("g")),
            store.define("s", SessionSettings("h"), Labels("g"), adopt=True),
            store.set_labels("s", LabelChanges("g")),
            store.add_reward("s", Reward(1.0)),
            store.finish("s"),
            store.seal("s", force=True),
            store.offer("d", epoch, 1.0),
            store.lease(["s"], "d", "c", 60),
            store.bind_key("h", Binding("s")),
            store.ping(),
        ]
        for operation in refused:
            with pytest.raises(StoreError, match=r"maxmemory"):
                await operation
        info = await store.session("s")
        assert (info.turns, info.incidents, info.sealed, [call.call for call in info.open_calls]) == (1, (), False, ["k"])
        assert [(hit.turn.id, hit.continued) for hit in (await store.find("s", [b"c1"]))[0]] == [("a", False)]
        assert (info.state, info.settings, info.labels, info.reward) == ("open", SessionSettings(), Labels(), None)
        assert await store.session("t") is None
        assert [(entry.session, entry.delivery) for entry in await store.queue()] == [("s", "")]
        with pytest.raises(SessionDeletedError):
            await store.begin("gone", "k", [])
        assert await store.delete("d") is True  # where memory is short, deleting is what helps
        with pytest.raises(SessionDeletedError):
            await store.begin("d", "k", [])
    finally:
        await redis.config_set("maxmemory", 0)
    await store.commit("s", epoch, "k", entries)
    assert [turn.id for turn in await store.turns("s")] == ["a", "b", "c"]


async def test_a_server_that_is_a_replica_for_a_moment_has_no_effect(store, redis, redis_server, monkeypatch):
    """As in a failover: refused operations are retried, and succeed when there is a primary."""
    begun = await store.begin("s", "k", [])
    refused, seen = asyncio.Event(), []

    def watched(run):
        async def watching(*command):
            try:
                return await run(*command)
            except exceptions.ResponseError as why:
                seen.append(str(why))
                if len(seen) >= 3:
                    refused.set()
                raise

        return watching

    for name in ("run", "run_shared"):
        monkeypatch.setattr(store._backend, name, watched(getattr(store._backend, name)))
    await redis.execute_command("REPLICAOF", "127.0.0.1", str(redis_server.port))
    calls = (store.begin("s", "k2", []), store.commit("s", begun.epoch, "k", [build("a").entry]), store.ping())
    waiting = asyncio.gather(*calls)
    try:
        await asyncio.wait_for(refused.wait(), PATIENCE)
    finally:
        await redis.execute_command("REPLICAOF", "NO", "ONE")
    await waiting
    assert all("READONLY" in one or "read only" in one for one in seen)
    info = await store.session("s")
    assert (info.turns, [call.call for call in info.open_calls]) == (1, ["k2"])


async def test_a_server_that_stays_a_replica_is_refused(redis, redis_server):
    store = RedisStore(redis_server.url, timeout_seconds=1.0)
    await redis.execute_command("REPLICAOF", "127.0.0.1", str(redis_server.port))
    try:
        with pytest.raises(StoreError, match=r"read only|READONLY"):
            await store.begin("s", "k", [])
    finally:
        await redis.execute_command("REPLICAOF", "NO", "ONE")
        await store.close()


async def test_errors_contain_no_password():
    with RealRedis("--requirepass", "open sesame") as server:
        place = f"127.0.0.1:{server.port}/0"
        right = RedisStore(f"redis://:open%20sesame@{place}")
        await right.open()
        await record(right, "s", build("a"))
        await right.close()
        for url in (f"redis://:wr%20ong@{place}", f"redis://me:wr%20ong@{place}", f"redis://{place}?password=wr%20ong", f"redis://{place}"):
            store = RedisStore(url)
            with pytest.raises(StoreError) as error:
                await store.open()
            assert "AUTH" in str(error.value).upper() or "password" in str(error.value)
            assert "wr ong" not in str(error.value)
            assert "wr%20ong" not in str(error.value)
            assert error.value.__cause__ is None
            await store.close()


async def test_overwritten_data_is_reported_as_damaged(store, redis):
    await record(store, "s", build("a", keys=(b"c1",)))
    await redis.hset("tokencache:{s}", mapping={"H1": b"+zrubbish", "T1": b"short", "I1": b"m\xc1", "incidents": 1})
    for reading in (store.find("s", [b"c1"]), store.turns("s"), store.prefix("s", "a"), store.tokens("s", ["a"]), store.session("s")):
        with pytest.raises(StoreError, match="is damaged"):
            await reading
    await redis.set("tokencache:{t}", "x")
    for reading in (store.begin("t", "k", []), store.turns("t"), store.add_incidents("t", [])):
        with pytest.raises(StoreError, match="WRONGTYPE"):
            await reading


async def test_sealed_and_gone_are_not_store_errors(store):
    begun = await store.begin("s", "k", [])
    await store.seal("s", force=True)
    with pytest.raises(SessionSealedError):
        await store.begin("s", "k", [])
    await store.delete("s")
    with pytest.raises(SessionGoneError):
        await store.settle("s", begun.epoch, "k")

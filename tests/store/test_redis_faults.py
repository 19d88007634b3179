"""Servers that die, hang or restart empty cause a `StoreError` in time, and nothing worse."""

import asyncio

import pytest
from redis import exceptions

from tests.store.conformance import build, record
from tests.support.material import needs
from tests.support.redis_server import RealRedis, find_binary
from tests.support.waiting import PATIENCE
from tokencache.core.incidents import Incident
from tokencache.core.media import StoredMedium
from tokencache.core.session import LabelChanges, Labels, Reward, SessionSettings
from tokencache.core.weights import WeightsState
from tokencache.store.base import Binding, EngineEntry, SessionGoneError, StoreError
from tokencache.store.redis import RedisStore

pytestmark = [pytest.mark.redis, needs("redis-server", find_binary())]


@pytest.fixture
def server():
    with RealRedis() as running:
        yield running


@pytest.fixture
async def store(server):
    made = RedisStore(server.url, timeout_seconds=PATIENCE)
    await made.open()
    await made._capacity.close()  # only the operations of the test: any other reply means that the server responds
    yield made
    await made.close()


def operations(store, epoch):
    return {
        "ping": store.ping,
        "begin": lambda: store.begin("s", "k", [b"c1"]),
        "find": lambda: store.find("s", [b"c1"]),
        "prefix": lambda: store.prefix("s", "a"),
        "commit": lambda: store.commit("s", epoch, "k", [build("b").entry]),
        "settle": lambda: store.settle("s", epoch, "k"),
        "add_incidents": lambda: store.add_incidents("s", [Incident("x")]),
        "session": lambda: store.session("s"),
        "page": lambda: store.page(b"", 10),
        "states": lambda: store.states(["s"]),
        "define": lambda: store.define("s", SessionSettings("h"), Labels("g"), adopt=True),
        "settings": lambda: store.settings("s"),
        "set_labels": lambda: store.set_labels("s", LabelChanges("g")),
        "add_reward": lambda: store.add_reward("s", Reward(1.0)),
        "rewards": lambda: store.rewards("s"),
        "offer": lambda: store.offer("s", epoch, 1.0),
        "queue": store.queue,
        "queue_length": store.queue_length,
        "lease": lambda: store.lease(["s"], "d", "c", 60),
        "extend": lambda: store.extend("d", 60),
        "release": lambda: store.release("d"),
        "remove": lambda: store.remove("d"),
        "withdraw": lambda: store.withdraw("s", epoch),
        "put_demand": lambda: store.put_demand("c", b"d"),
        "drop_demand": lambda: store.drop_demand("c"),
        "demands": store.demands,
        "finish": lambda: store.finish("s"),
        "watch": lambda: store.watch("s", 60),
        "overdue": store.overdue,
        "unwatch": lambda: store.unwatch("s"),
        "turns": lambda: store.turns("s"),
        "tokens": lambda: store.tokens("s", ["a"]),
        "mark_orphaned": lambda: store.mark_orphaned("s", "k"),
        "mark_wanted": lambda: store.mark_wanted("s", "k"),
        "heartbeat": lambda: store.heartbeat("r", 5),
        "live_replicas": lambda: store.live_replicas(["r"]),
        "secret": store.secret,
        "contexts": lambda: store.contexts("s", ["a"]),
        "seal": lambda: store.seal("s", force=True),
        "delete": lambda: store.delete("s"),
        "documents": lambda: store.documents("s", ["d"]),
        "delete_document": lambda: store.delete_document("s", "d"),
        "bind_key": lambda: store.bind_key("h", Binding("s")),
        "binding_of_key": lambda: store.binding_of_key("h"),
        "unbind_key": lambda: store.unbind_key("h"),
        "put_engine": lambda: store.put_engine(EngineEntry("http://e")),
        "drop_engine": lambda: store.drop_engine("http://e"),
        "engines": store.engines,
        "weights": store.weights,
        "replace_weights": lambda: store.replace_weights(WeightsState(revision=1)),
        "put_media": lambda: store.put_media("s", epoch, StoredMedium("0" * 64, "image/png", 1), b"x", limit=100),
        "media": lambda: store.media("s", "0" * 64),
        "stored_media": lambda: store.stored_media("s"),
    }


async def all_fail(store, epoch):
    """The first operation uses all its time. Then the store knows that the server hangs, and the others fail at once."""
    async with asyncio.timeout(PATIENCE):
        store._client.timeout = 0.3
        with pytest.raises(StoreError, match="redis: ping: no answer within"):
            await store.ping()
        store._client.timeout = 10 * PATIENCE
        for name, operation in operations(store, epoch).items():
            with pytest.raises(StoreError, match=f"redis: {name}: not sent"):
                await operation()
    store._client.timeout = PATIENCE


async def answers_again(store):
    """Wait until the store has noticed on its own that its server is back."""
    await asyncio.wait_for(store._client._probe, PATIENCE)


async def test_a_killed_server_restarts_empty(server, store):
    epoch = await record(store, "s", build("a"))
    server.kill()
    await all_fail(store, epoch)
    server.start()
    async with asyncio.timeout(PATIENCE):
        await answers_again(store)
        assert await store.session("s") is None
        with pytest.raises(SessionGoneError):
            await store.commit("s", epoch, "k", [build("b").entry])
        with pytest.raises(KeyError):
            await store.prefix("s", "a")
        await record(store, "s", build("a"))
        assert [turn.id for turn in await store.turns("s")] == ["a"]


async def test_a_server_that_is_back_in_time_has_no_effect(store, server):
    """Operations during a restart are done when the server is up, also those that must not be done twice."""
    epoch = await record(store, "s", build("a"))
    server.kill()
    fingerprint = {name: asyncio.create_task(operation()) for name, operation in operations(store, epoch).items()}
    for _ in range(100):
        await asyncio.sleep(0)
    server.start()
    done = dict(zip(fingerprint, await asyncio.gather(*fingerprint.values(), return_exceptions=True), strict=True))
    assert [name for name, result in done.items() if isinstance(result, StoreError)] == []
    assert {type(done[name]) for name in ("commit", "settle")} == {SessionGoneError}  # nothing was saved


async def test_operations_wait_for_a_server_that_loads_its_data(store):
    """LOADING: the server accepts connections, but no commands yet."""
    refused = []
    run = store._backend.run

    async def loading(*command):
        if len(refused) < 3:
            refused.append(command[0])
            raise exceptions.BusyLoadingError("Redis is loading the dataset in memory")
        return await run(*command)

    store._backend.run = loading
    assert await store.delete("none") is False
    assert refused == ["EVALSHA"] * 3


async def test_a_refused_probe_counts_as_a_reply(server, store):
    """A server that refuses is up. The next operation gets its refusal."""
    store._client.timeout = 0.3
    server.pause()
    with pytest.raises(StoreError, match="no answer within"):
        await store.ping()
    run = store._backend.run

    async def refusing(*command):
        await run(*command)
        raise exceptions.NoPermissionError("no permissions")

    store._backend.run = refusing
    server.resume()
    await answers_again(store)
    with pytest.raises(StoreError, match="no permissions"):
        await store.ping()


async def test_one_slow_operation_does_not_mean_that_the_server_hangs(server, store):
    """A slow operation uses all its time; others get replies before and after, and none fails."""
    slow = store._client.call("slow", lambda _: asyncio.sleep(PATIENCE))
    store._client.timeout = 0.5
    waiting = asyncio.create_task(slow)
    await asyncio.sleep(0)
    store._client.timeout = PATIENCE
    await store.ping()
    with pytest.raises(StoreError, match="slow: no answer"):
        await waiting
    await store.ping()


async def test_an_operation_ends_though_the_library_swallows_the_end_of_its_time(store):
    async def swallow(_lost):
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            raise exceptions.TimeoutError("its own") from None

    store._client.timeout = 0.1
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(StoreError, match=r"swallow: no answer within 0\.1 s: its own"):
            await store._client.call("swallow", swallow)


async def test_a_server_that_hangs(server, store):
    epoch = await record(store, "s", build("a", keys=(b"c1",)))
    server.pause()
    try:
        store._client.timeout = 0.3
        async with asyncio.timeout(PATIENCE):
            results = await asyncio.gather(*(store.begin("s", f"k{n}", []) for n in range(100)), return_exceptions=True)
        assert {type(result) for result in results} == {StoreError}
        store._client.timeout = 10 * PATIENCE
        async with asyncio.timeout(PATIENCE):
            for name, operation in operations(store, epoch).items():
                with pytest.raises(StoreError, match=f"redis: {name}: not sent"):
                    await operation()
    finally:
        server.resume()
    store._client.timeout = PATIENCE
    await answers_again(store)
    assert await store.delete("s", reuse=True) in {True, False}  # what was sent meanwhile may be done by now, the deletion too
    await record(store, "s", build("a", keys=(b"c1",)))
    for _ in range(10):  # no reply of the past is taken for one of now
        assert [turn.id for turn in await store.turns("s")] == ["a"]
        assert (await store.prefix("s", "a")).ids == build("a").prefix
        assert [hit.turn.id for hit in (await store.find("s", [b"c1"]))[0]] == ["a"]


async def test_operations_that_time_out_together_start_one_probe(server, store):
    def probes():
        return [task for task in asyncio.all_tasks() if task.get_coro().__name__ == "_probe_until_reply"]

    store._client.timeout = 0.3
    server.pause()
    try:
        await asyncio.gather(*(store.session("s") for _ in range(20)), return_exceptions=True)
        assert probes() == [store._client._probe]
        await store._client.close()
        assert probes() == []
    finally:
        server.resume()


async def test_a_missing_server():
    server = RealRedis()
    with server:
        url = server.url
    store = RedisStore(url, timeout_seconds=0.3)
    with pytest.raises(StoreError, match="ping"):
        await store.open()
    await store.close()


async def test_a_server_with_another_protocol():
    async def answer(reader, writer):
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        store = RedisStore(f"redis://127.0.0.1:{other.sockets[0].getsockname()[1]}/0", timeout_seconds=5)
        with pytest.raises(StoreError):
            await store.open()
        await store.close()


async def test_waiting_for_a_connection_does_not_count_as_time(store):
    """There are fewer connections than operations, and each has a time limit far below the time that all take together."""
    client = store._client
    client.timeout, client._queue = 0.3, asyncio.Semaphore(1)

    async def slow(_lost):
        await asyncio.sleep(0.1)

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(client.call("slow", slow) for _ in range(20)))


async def test_queued_operations_fail_when_the_server_stops_responding(server, store):
    """The first uses all its time; those that wait after it fail at once."""
    store._client.timeout, store._client._queue = 0.3, asyncio.Semaphore(1)
    server.pause()
    try:
        async with asyncio.timeout(PATIENCE):
            told = await asyncio.gather(*(store.session("s") for _ in range(200)), return_exceptions=True)
    finally:
        server.resume()
    words = [str(why) for why in told]
    assert all(isinstance(why, StoreError) for why in told)
    assert sum("no answer within" in one for one in words) == 1
    assert sum("not sent" in one for one in words) == 199

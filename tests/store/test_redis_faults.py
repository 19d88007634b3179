"""A server that dies, hangs or comes back empty: a `StoreError` in time, and nothing worse."""

import asyncio

import pytest

from tokencache.store.conformance import build, record
from tokencache.store.contract import Binding, Incident, SessionGoneError, StoreError
from tokencache.store.redis import RedisStore
from tokencache.testing.redis_server import RealRedis, find_binary

pytestmark = [pytest.mark.redis, pytest.mark.skipif(find_binary() is None, reason="no redis-server on this machine")]
LIMIT = 30  # far above every time limit in here: an operation that hangs fails, a slow machine does not


@pytest.fixture
def server():
    with RealRedis() as running:
        yield running


@pytest.fixture
async def store(server):
    made = RedisStore(server.url, timeout_seconds=LIMIT)
    await made.open()
    yield made
    await made.close()


def operations(store, life):
    return {
        "ping": store.ping,
        "begin": lambda: store.begin("s", "k", [b"c1"]),
        "find": lambda: store.find("s", [b"c1"]),
        "prefix": lambda: store.prefix("s", "a"),
        "commit": lambda: store.commit("s", life, "k", [build("b").entry]),
        "settle": lambda: store.settle("s", life, "k"),
        "note": lambda: store.note("s", [Incident("x")]),
        "session": lambda: store.session("s"),
        "sessions": lambda: anext(store.sessions()),
        "turns": lambda: store.turns("s"),
        "tokens": lambda: store.tokens("s", ["a"]),
        "seal": lambda: store.seal("s"),
        "delete": lambda: store.delete("s"),
        "documents": lambda: store.documents("s", ["d"]),
        "forget": lambda: store.forget("s", "d"),
        "bind_key": lambda: store.bind_key("h", Binding("s")),
        "binding_of_key": lambda: store.binding_of_key("h"),
    }


async def all_fail(store, life):
    store._timeout = 0.3
    for name, operation in operations(store, life).items():
        async with asyncio.timeout(LIMIT):
            with pytest.raises(StoreError, match=f"redis: {name}: "):
                await operation()
    store._timeout = LIMIT


async def test_a_killed_server_and_its_empty_successor(server, store):
    life = await record(store, "s", build("a"))
    server.kill()
    await all_fail(store, life)
    server.start()
    async with asyncio.timeout(LIMIT):
        assert await store.session("s") is None
        with pytest.raises(SessionGoneError):
            await store.commit("s", life, "k", [build("b").entry])
        with pytest.raises(KeyError):
            await store.prefix("s", "a")
        await record(store, "s", build("a"))
        assert [turn.id for turn in await store.turns("s")] == ["a"]


async def test_a_server_that_hangs(server, store):
    life = await record(store, "s", build("a", keys=(b"c1",)))
    server.pause()
    try:
        await all_fail(store, life)
        store._timeout = 0.3
        async with asyncio.timeout(LIMIT):
            results = await asyncio.gather(*(store.begin("s", f"k{n}", []) for n in range(100)), return_exceptions=True)
        assert {type(result) for result in results} == {StoreError}
    finally:
        server.resume()
    store._timeout = LIMIT
    assert await store.delete("s") in {True, False}  # what was sent meanwhile may be done by now, the deletion too
    await record(store, "s", build("a", keys=(b"c1",)))
    for _ in range(10):  # no reply of the past is taken for one of now
        assert [turn.id for turn in await store.turns("s")] == ["a"]
        assert (await store.prefix("s", "a")).ids == build("a").prefix
        assert [hit.turn.id for hit in (await store.find("s", [b"c1"]))[0]] == ["a"]


async def test_a_store_that_is_not_there():
    server = RealRedis()
    with server:
        url = server.url
    store = RedisStore(url, timeout_seconds=0.3)
    with pytest.raises(StoreError, match="ping"):
        await store.open()
    await store.close()


async def test_a_server_that_speaks_something_else():
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

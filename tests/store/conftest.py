"""The stores to test: memory, a file, Redis on fakeredis, and Redis on a real server."""

import secrets

import fakeredis
import pytest
from redis.asyncio import Redis

from tests.support.material import require
from tests.support.redis_server import RealRedis, find_binary
from tokencache.store.file import FileStore
from tokencache.store.memory import MemoryStore
from tokencache.store.redis import RedisStore


@pytest.fixture(scope="session")
def redis_server():
    require("redis-server", find_binary())
    with RealRedis() as server:
        yield server


@pytest.fixture
async def redis(redis_server):
    """A client of the real server, which is emptied."""
    async with Redis.from_url(redis_server.url) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def emptied_redis_store(redis_server, redis):
    """A store with the default settings on the real server, without data of other tests."""
    made = RedisStore(redis_server.url)
    await made.open()
    yield made
    await made.close()


@pytest.fixture(scope="session")
def fake_store():
    """Makes stores on fakeredis. Stores on one `FakeServer` share its data."""

    def make(server=None):
        client = fakeredis.FakeAsyncRedis(server=server or fakeredis.FakeServer())
        return RedisStore("redis://fake", client=client, timeout_seconds=60)

    return make


OTHERS = [
    "file",
    pytest.param("fakeredis", marks=[pytest.mark.whole] if find_binary() else []),  # a real server is faster, and what counts
    pytest.param("redis", marks=pytest.mark.redis),
]
KINDS = ["memory", *OTHERS]


@pytest.fixture(params=KINDS)
async def store(request):
    match request.param:
        case "memory":
            made = MemoryStore()
        case "file":
            made = FileStore(f"file:{request.getfixturevalue('tmp_path')}/sessions.db")
        case "fakeredis":
            made = request.getfixturevalue("fake_store")()
        case _:
            made = RedisStore(request.getfixturevalue("redis_server").url, prefix=secrets.token_hex(8))
    await made.open()
    yield made
    await made.close()

"""Which URL makes which store."""

import pytest

from tokencache.store import open_store
from tokencache.store.memory import MemoryStore
from tokencache.store.redis import RedisStore


def test_memory_is_the_default():
    assert isinstance(open_store(), MemoryStore)
    assert isinstance(open_store("memory:"), MemoryStore)


@pytest.mark.parametrize(
    "url", ["redis://localhost:6379/0", "redis://:p%40ss@host/3", "rediss://me:secret@host:6380", "unix:///tmp/r.sock?db=1"]
)
def test_redis_urls(url):
    made = open_store(url, ttl_seconds=5, timeout_seconds=1)
    assert isinstance(made, RedisStore)


@pytest.mark.parametrize("url", ["", "memory", "memory:x", "Redis://x", "http://host", "host:6379", "redis", "redis+cluster://x", "unix"])
def test_other_urls(url):
    with pytest.raises(ValueError, match=r"wanted: .*redis://"):
        open_store(url)


@pytest.mark.parametrize(
    "url", ["redis://me:hunter2@host:port", "redis://:hunter2@[::1", "redis://:hun#ter2@host", "redis://:hunter2@host?db=x"]
)
def test_an_unreadable_url_keeps_its_password(url):
    with pytest.raises(ValueError, match="wanted") as error:
        open_store(url)
    assert "hun" not in str(error.value)
    assert error.value.__cause__ is None

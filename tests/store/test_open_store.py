"""URLs and the stores that they select."""

import pytest

from tokencache.store import StoreOptions, open_store
from tokencache.store.memory import MemoryStore
from tokencache.store.redis import RedisStore
from tokencache.store.redis.url import read_url


def test_memory_is_the_default():
    assert isinstance(open_store(), MemoryStore)
    assert isinstance(open_store("memory:"), MemoryStore)


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost:6379/0",
        "redis://:p%40ss@host/3",
        "rediss://me:secret@host:6380",
        "rediss://host?ssl_ca_certs=/ca.pem&ssl_certfile=/me.pem&ssl_keyfile=/me.key",
        "valkey://host",
        "valkeys://host:1/2",
        "unix:///tmp/r.sock?db=1",
        "redis+sentinel://h1,h2:26380/mymaster",
        "redis+sentinel://me:secret@h1:26379,h2/mymaster/2?sentinel_username=s&sentinel_password=p",
        "rediss+sentinel://h1/mymaster?ssl_ca_certs=/ca.pem",
        "redis+cluster://127.0.0.1:7000,127.0.0.1:7001",
        "valkeys+cluster://me:secret@127.0.0.1?ssl_check_hostname=false",
    ],
)
def test_redis_urls(url):
    made = open_store(url, StoreOptions(ttl_seconds=5, timeout_seconds=1))
    assert isinstance(made, RedisStore)


@pytest.mark.parametrize(
    "url", ["", "memory", "memory:x", "Redis://x", "http://host", "host:6379", "redis", "redis+x://h", "unix+cluster://x", "unix"]
)
def test_other_urls(url):
    with pytest.raises(ValueError, match=r"redis://|memory:$"):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:hunter2@host:port",
        "redis://:hunter2@[::1",
        "redis://:hun#ter2@host",
        "redis://:hunter2@host?db=x",
        "redis://:hunter2@host?such=thing",
        "redis://:hunter2@host,host2",
        "redis+sentinel://:hunter2@host",
        "redis+sentinel://:hunter2@host/mymaster/x",
        "redis+sentinel://:hunter2@host:port/mymaster",
        "redis+cluster://:hunter2@127.0.0.1:port",
        "redis+cluster://:hunter2@127.0.0.1/3",
        "redis+cluster://:hunter2@127.0.0.1?such=thing",
    ],
)
def test_an_error_of_a_url_contains_no_password(url):
    with pytest.raises(ValueError, match=r"; use .*redis://") as error:
        open_store(url)
    assert "hun" not in str(error.value)
    assert error.value.__cause__ is None


def test_parts_of_a_url():
    read = read_url("rediss+sentinel://me:s%40crt@h1,h2:1/my%20master/2?sentinel_password=p%40p&ssl_ca_certs=/ca.pem")
    assert (read.kind, read.tls, read.hosts, read.service) == ("sentinel", True, (("h1", 26379), ("h2", 1)), "my master")
    assert read.options == {"username": "me", "password": "s@crt", "db": 2, "ssl_ca_certs": "/ca.pem"}
    assert read.sentinel == {"password": "p@p", "ssl_ca_certs": "/ca.pem"}
    assert set(read.secrets) == {"s@crt", "s%40crt", "p@p", "p%40p"}
    read = read_url("valkey+cluster://[::1]:7000,other")
    assert (read.kind, read.tls, read.hosts, read.options) == ("cluster", False, (("::1", 7000), ("other", 6379)), {})

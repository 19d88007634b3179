"""The store: what is kept of a session, in memory or in Redis.

=============  =====================================================================================================
`contract`     what a store must do, the values it takes and gives, its errors
`memory`       for one process: the reference
`redis`        for many replicas; `redis_lua` and `packing` are its scripts and its bytes
`conformance`  checks that any store keeps the contract; import it to test one of your own
=============  =====================================================================================================
"""

from tokencache.store.contract import Store
from tokencache.store.memory import MemoryStore


def open_store(url: str = "memory:", *, ttl_seconds: float = 7 * 86400, timeout_seconds: float = 5.0) -> Store:
    """Make the store that a URL names: `memory:`, `redis://…`, `rediss://…` or `unix://…`; `Store.open` connects it.

    Raises:
        ValueError: the URL names no store.
    """
    scheme = url.partition(":")[0]
    if url == "memory:":
        return MemoryStore()
    if scheme in {"redis", "rediss", "unix"}:
        from tokencache.store.redis import RedisStore  # noqa: PLC0415  (who stays in memory needs no Redis client)

        return RedisStore(url, ttl_seconds=ttl_seconds, timeout_seconds=timeout_seconds)
    raise ValueError(f"no store is named {scheme[:20]!r}; wanted: memory: redis://host:port/db rediss://host:port/db unix:///path")

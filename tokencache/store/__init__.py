"""The store: what is kept of a session, in memory or in Redis.

=============  =====================================================================================================
`contract`     what a store must do, the values it takes and gives, its errors
`memory`       for one process: the reference; `held` and `fading` are its parts
`redis`        for many replicas; `packing` are its bytes
`conformance`  checks that any store keeps the contract; import it to test one of your own
=============  =====================================================================================================
"""

from tokencache.store.base import Store
from tokencache.store.memory import MemoryStore


def open_store(
    url: str = "memory:",
    *,
    ttl_seconds: float = 7 * 86400,
    timeout_seconds: float = 5.0,
    max_sessions: int = 0,
    max_bytes: int = 0,
    may_evict: bool = False,
) -> Store:
    """Make the store that a URL names: `memory:`, or one of those of `tokencache.store.redis.url`; `Store.open` connects it.

    The options are those of `MemoryStore` and `RedisStore`.

    Raises:
        ValueError: the URL names no store, or cannot be read.
    """
    if url == "memory:":
        return MemoryStore(ttl_seconds=ttl_seconds, max_sessions=max_sessions, max_bytes=max_bytes)
    from tokencache.store.redis import RedisStore  # noqa: PLC0415  (who stays in memory needs no Redis client)
    from tokencache.store.redis.url import SCHEMES, WANTED  # noqa: PLC0415

    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise ValueError(f"no store is named {scheme[:20]!r}; wanted: memory:, {WANTED}")
    return RedisStore(
        url,
        ttl_seconds=ttl_seconds,
        timeout_seconds=timeout_seconds,
        max_sessions=max_sessions,
        max_bytes=max_bytes,
        may_evict=may_evict,
    )

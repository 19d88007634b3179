"""Stores sessions: in memory, in a file, in Redis, or in a store of your own.

=============  =====================================================================================================
`base`         the interface of a store, its values and its errors
`memory`       for one process, and the reference for the others
`memory_queue` the queue of finished sessions in the memory of a process
`file`         for one machine: one SQLite file
`redis`        for several replicas
`pruning`      removes entries of the queue whose session has expired
`encoding`     records and tokens as bytes
`clock`        keeps the ages of sessions right if a clock is set
=============  =====================================================================================================

To add a store: write a class with the methods of `base.Store`, check it with `tests.store.conformance`, and add its URL scheme to `STORES`.
"""

from collections.abc import Callable
from typing import NamedTuple

from tokencache.store.base import Store


class StoreOptions(NamedTuple):
    """Settings of a store.

    Attributes:
        ttl_seconds: delete a session that has not been used for this long.
        timeout_seconds: how long one operation may take.
        max_sessions: refuse new sessions at this number. 0 sets no limit.
        max_bytes: refuse new sessions while the store uses this many bytes. 0 leaves the limit to the store.
        may_evict: accept a database that deletes sessions when its memory is full.
    """

    ttl_seconds: float = 7 * 86400
    timeout_seconds: float = 5.0
    max_sessions: int = 0
    max_bytes: int = 0
    may_evict: bool = False


def _memory(url: str, options: StoreOptions) -> Store:
    from tokencache.store.memory import MemoryStore  # noqa: PLC0415

    if url != "memory:":
        raise ValueError("the URL of the memory store is memory:")
    return MemoryStore(ttl_seconds=options.ttl_seconds, max_sessions=options.max_sessions, max_bytes=options.max_bytes)


def _file(url: str, options: StoreOptions) -> Store:
    from tokencache.store.file import FileStore  # noqa: PLC0415

    bounds = {"max_sessions": options.max_sessions, "max_bytes": options.max_bytes}
    return FileStore(url, ttl_seconds=options.ttl_seconds, timeout_seconds=options.timeout_seconds, **bounds)


def _redis(url: str, options: StoreOptions) -> Store:
    from tokencache.store.redis import RedisStore  # noqa: PLC0415 - the Redis client is loaded only if it is used

    return RedisStore(url, **options._asdict())


REDIS_SCHEMES = [name + kind for name in ("redis", "rediss", "valkey", "valkeys") for kind in ("", "+sentinel", "+cluster")] + ["unix"]
"""Schemes of `tokencache.store.redis.url`."""
STORES: dict[str, Callable[[str, StoreOptions], Store]] = {"memory": _memory, "file": _file, **dict.fromkeys(REDIS_SCHEMES, _redis)}
"""Makes a store, by the scheme of its URL. `Store.open` connects it."""


def open_store(url: str = "memory:", options: StoreOptions | None = None) -> Store:
    """Make the store that a URL names. Raises `ValueError` if no store has this scheme, or the URL cannot be read."""
    scheme, colon, _ = url.partition(":")
    if not colon or scheme not in STORES:
        known = ", ".join(f"{name}:" for name in STORES)
        raise ValueError(
            f"no store has the scheme {scheme[:20]!r}; use memory:, file:PATH, redis://host:port/db or another of {known} (docs/store.md)"
        )
    return STORES[scheme](url, options or StoreOptions())

"""Removes entries of the queue whose session has expired, in deployments in which no consumer reads the queue."""

from tokencache.store.base import Store
from tokencache.store.clock import RECORD_CLOCK

EVERY = 1000
"""Number of offers after which a store prunes its queue."""


async def prune_queue(store: Store, ttl_seconds: float) -> None:
    """Withdraw the entries that are older than a session's time to live and whose session is gone.

    Args:
        store: the store.
        ttl_seconds: the time to live of a session that is not used.
    """
    old = [entry for entry in await store.queue() if entry.at < RECORD_CLOCK.now() - ttl_seconds and not entry.leased]
    for entry, info in zip(old, await store.states([entry.session for entry in old]), strict=True):
        if info is None or info.epoch != entry.epoch:
            await store.withdraw(entry.session, entry.epoch)

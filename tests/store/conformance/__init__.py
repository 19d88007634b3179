"""Checks that a store does what `tokencache.store.base` promises. Use them to test a store of your own.

    from tests.store.conformance import CHECKS, check_replicas

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_my_store(check):
        store = MyStore()
        await store.open()
        await check(store)

Each check gets an open store and raises `AssertionError` if the store breaks a promise. It works in sessions of its own, so a store in
use is not disturbed. `check_replicas` gets two stores over one database. No test framework is needed.

`sessions`, `lifecycle`, `listing`, `deletion`   sessions, from their creation to their end
`lookup`, `duplicates`, `concurrency`            calls and turns: found again, written once, by several writers
`queue`, `media`, `forks`                        the queue of finished sessions; images; sessions that share turns
`support`                                        builds the records that the checks write
"""

from collections.abc import Awaitable, Callable

from tests.store.conformance import concurrency, deletion, duplicates, forks, lifecycle, listing, lookup, media, queue, sessions
from tests.store.conformance.concurrency import check_replicas
from tests.store.conformance.support import Built, build, record
from tokencache.store.base import Store

__all__ = ["CHECKS", "Built", "build", "check_replicas", "record"]

CHECKS: tuple[Callable[[Store], Awaitable[None]], ...] = tuple(
    check
    for module in (sessions, lifecycle, listing, lookup, deletion, forks, duplicates, concurrency, queue, media)
    for name, check in vars(module).items()
    if name.startswith("check_") and check is not check_replicas
)
"""All checks of one store."""

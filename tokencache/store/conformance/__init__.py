"""Conformance: does a store keep the contract? For tests of the project's own stores and of yours.

    from tokencache.store.conformance import CHECKS, check_replicas

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_my_store(check):
        store = MyStore()
        await store.open()
        await check(store)

Each check takes an open store, works in sessions of its own names (a store that is in use is not disturbed), and raises
`AssertionError` where the contract is broken. `check_replicas` takes two stores over one database. Nothing here
needs a test framework.
"""

from collections.abc import Awaitable, Callable

from tokencache.store.base import Store
from tokencache.store.conformance.bearing import check_concurrency, check_isolation, check_large_turn, check_long_session, check_replicas
from tokencache.store.conformance.ending import check_delete, check_reuse, check_seal
from tokencache.store.conformance.finding import (
    check_binary,
    check_choices,
    check_contexts,
    check_continued,
    check_look_up,
    check_odd_values,
    check_prefix,
    check_round_trip,
    check_tokens,
)
from tokencache.store.conformance.joining import (
    check_a_call_is_not_its_own_twin,
    check_beats,
    check_figures,
    check_giving_up,
    check_joining_at_once,
    check_lingering,
    check_secret,
    check_twins,
)
from tokencache.store.conformance.kit import Built, build, record
from tokencache.store.conformance.living import (
    check_begin,
    check_documents,
    check_engines,
    check_incidents,
    check_keys,
    check_names,
    check_open_calls,
    check_ping,
    check_sessions,
)

__all__ = ["CHECKS", "Built", "build", "check_replicas", "record"]

CHECKS: tuple[Callable[[Store], Awaitable[None]], ...] = (
    check_ping,
    check_begin,
    check_open_calls,
    check_round_trip,
    check_odd_values,
    check_binary,
    check_look_up,
    check_continued,
    check_choices,
    check_prefix,
    check_tokens,
    check_contexts,
    check_seal,
    check_delete,
    check_reuse,
    check_twins,
    check_lingering,
    check_a_call_is_not_its_own_twin,
    check_joining_at_once,
    check_figures,
    check_giving_up,
    check_beats,
    check_secret,
    check_incidents,
    check_documents,
    check_keys,
    check_engines,
    check_names,
    check_sessions,
    check_isolation,
    check_concurrency,
    check_long_session,
    check_large_turn,
)
"""All checks of one store."""

"""The engine of a session: the same on every replica, and different only if its own engine goes away."""

import asyncio
from collections import Counter

import pytest

from tokencache.engine.drivers.vllm import Vllm
from tokencache.engine.health import EngineIdentity
from tokencache.engine.model import Engine
from tokencache.engine.pool import Pool, preference
from tokencache.engine.upstream import Upstream
from tokencache.errors import EngineError

URLS = [f"http://10.0.0.{n}:8000" for n in range(1, 8)]
SESSIONS = [f"rollout-{n}" for n in range(3000)]


def homes(urls):
    return {session: urls[preference(session, urls)[0]] for session in SESSIONS}


def test_replicas_agree_whatever_the_order_of_their_engines():
    assert homes(URLS) == homes(URLS[::-1]) == homes(sorted(URLS, key=hash))


@pytest.mark.parametrize("gone", URLS)
def test_an_engine_that_goes_moves_only_its_own_sessions(gone):
    before, after = homes(URLS), homes([url for url in URLS if url != gone])
    assert all(after[session] == home for session, home in before.items() if home != gone)
    moved = Counter(after[session] for session, home in before.items() if home == gone)
    assert set(moved) == set(URLS) - {gone}  # and they do not all move to the same


def test_sessions_are_spread_evenly():
    counted = Counter(homes(URLS).values())
    assert all(0.8 < count * len(URLS) / len(SESSIONS) < 1.2 for count in counted.values())


def test_a_session_moves_to_its_second_choice_if_the_first_is_gone():
    for session in SESSIONS[:100]:
        first, second, *_ = (URLS[place] for place in preference(session, URLS))
        rest = [url for url in URLS if url != first]
        assert rest[preference(session, rest)[0]] == second


@pytest.fixture
def differing():
    """A pool of two engines that are not connected to: the first serves, the second differs from it."""
    pool = Pool(lambda url: Engine(Upstream(url), [Vllm()]), URLS[:2])
    for monitor, level in zip(pool.monitors, ("exact", "record"), strict=True):
        monitor.identity = EngineIdentity({"level": level}, "")
    pool._changed()
    assert [monitor.mismatched for monitor in pool.monitors] == [False, True]
    assert "it waits" in pool.why_unused(pool.monitors[1])
    return pool


@pytest.mark.parametrize("order", [URLS[:2], URLS[1::-1]])
def test_no_engine_is_mismatched_when_all_are_drained(differing, order):
    for url in order:
        differing.drain(url)
    assert not any(monitor.mismatched for monitor in differing.monitors)
    assert not any(differing._logged.values())


def test_an_engine_of_unknown_identity_is_not_mismatched(differing):
    differing.drain(URLS[0])
    differing.monitors[1].identity, differing.monitors[1].mismatched = None, True
    differing._changed()
    assert not differing.monitors[1].mismatched


async def test_an_engine_that_is_added_again_has_no_reason_from_before(differing):
    second = differing.monitors[1]
    differing._tasks[second] = asyncio.create_task(asyncio.sleep(60))
    await differing.remove(second.url)
    differing.monitors.append(second)
    assert "it waits" not in differing.why_unused(second)


def test_an_adapter_that_only_an_engine_lists_that_waits_is_not_served(differing):
    differing.monitors[0].engine.names, differing.monitors[1].engine.names = ("sim",), ("sim", "adapter")
    for asked in (
        lambda: differing.order("s", "adapter"),
        lambda: differing.order(None, "adapter"),
    ):
        with pytest.raises(EngineError, match="differ"):
            asked()
    assert not [*differing.endpoints_of("c", "s", "", [], "adapter")]
    assert differing.engine_of("s", "adapter")  # it still answers what begins no call

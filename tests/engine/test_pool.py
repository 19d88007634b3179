"""The engine of a session: the same on every replica, and different only if its own engine goes away."""

from collections import Counter

import pytest

from tokencache.engine.pool import preference

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

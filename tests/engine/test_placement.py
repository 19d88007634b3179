"""Placement by load: where a new session goes, when a session moves, and what counts as load."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokencache.engine.placement import IDLE_SECONDS, LEAST_DIFFERENCE, MOST_GUESSED, RESERVE, TIE, Placement

ENGINES = ["a", "b", "c", "d"]


def paused(placement, session, endpoint, tokens, now=0.0):
    placement.begin(session, session, endpoint, tokens)
    placement.end(session, now)


@pytest.fixture
def placement():
    return Placement()


def test_sessions_that_begin_together_are_spread(placement):
    """Also over replicas that see no load yet: the choice among equals rotates."""
    chosen = [placement.choose(f"s{n}", "", ENGINES, 0.0) for n in range(12)]
    assert Counter(chosen) == dict.fromkeys(ENGINES, 3)


def test_a_new_session_uses_the_engine_with_the_least_load(placement):
    for endpoint, tokens in zip(ENGINES, (9000, 3000, 5000, 4000), strict=True):
        placement.begin(endpoint, endpoint, endpoint, tokens)
    assert placement.choose("new", "", ENGINES, 0.0) == "b"
    placement.others = {"b": TIE + 1001}
    assert placement.choose("new", "", ENGINES, 0.0) == "d"
    assert placement.choose("new", "", ["a", "c"], 0.0) == "c"


@pytest.mark.parametrize(
    ("load", "own", "stays"),
    [
        (2 * (10_000 + 2000 + RESERVE), 2000, True),
        (2 * (10_000 + 2000 + RESERVE) + 1, 2000, False),
        (10_000 + 3 * LEAST_DIFFERENCE, 60_000, True),  # the session is what makes the difference
    ],
)
def test_a_session_moves_only_by_the_margin(placement, load, own, stays):
    placement.begin("other", "other", "a", load)
    for endpoint in "bcd":
        placement.begin(endpoint, endpoint, endpoint, 10_000)
    paused(placement, "s", "a", own)
    assert (placement.choose("s", "a", ENGINES, 0.0) == "a") is stays


@pytest.mark.parametrize(("difference", "stays"), [(LEAST_DIFFERENCE, True), (LEAST_DIFFERENCE + 1, False)])
def test_a_small_difference_moves_no_session(placement, difference, stays):
    placement.begin("other", "other", "a", difference)
    assert (placement.choose("s", "a", ["a", "b"], 0.0) == "a") is stays


def test_a_session_with_another_call_in_flight_does_not_move(placement):
    placement.begin("other", "other", "a", 10**6)
    placement.begin("k1", "s", "a", 100)
    assert placement.choose("s", "a", ENGINES, 0.0) == "a"
    placement.end("k1", 0.0)
    assert placement.choose("s", "a", ENGINES, 0.0) != "a"
    assert placement.choose("s", "gone", ENGINES, 0.0) != "a"  # its engine does not serve


def test_a_pause_counts_for_three_seconds(placement):
    paused(placement, "s", "a", 700, now=1.0)
    assert placement.own_loads(1.0 + IDLE_SECONDS - 0.01) == {"a": 700}
    assert placement.own_loads(1.0 + IDLE_SECONDS) == {}
    assert placement.endpoint_of("s") == "a"


def test_a_call_counts_by_its_exact_length_as_soon_as_that_is_known(placement):
    placement.begin("k", "s", "a", messages=[b"x" * 400, b"y" * 400])
    assert placement.own_loads(0.0) == {"a": 200 + RESERVE}
    placement.begin("k", "s", "a", 150)
    assert placement.own_loads(0.0) == {"a": 150}
    placement.begin("k", "s", "b", 150)  # the first engine refused it
    placement.begin("k", "s", "b", 190)
    placement.end("k", 0.0)
    assert (placement.own_loads(0.0), placement.endpoint_of("s")) == ({"b": 190}, "b")
    placement.begin("k2", "s", "b", messages=[b"x" * 10**9])
    assert placement.own_loads(0.0) == {"b": 190 + RESERVE}


def test_the_load_of_images_is_bounded(placement):
    placement.begin("k", "s", "a", messages=[b"x" * 10**7])
    assert placement.own_loads(0.0) == {"a": MOST_GUESSED + RESERVE}


def test_a_session_that_ended_has_no_load(placement):
    paused(placement, "s", "a", 700)
    placement.begin("k", "t", "a", 50)
    placement.release("s")
    placement.release("t")
    assert placement.own_loads(0.0) == {"a": 50}
    placement.end("k", 0.0)
    assert (placement.own_loads(0.0), placement.endpoint_of("t")) == ({}, "")


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "end", "release", "wait"]), st.integers(0, 3), st.integers(0, 3), st.integers(1, 99)),
        max_size=60,
    )
)
def test_loads_are_the_sum_of_what_is_in_flight_and_of_short_pauses(steps):
    placement, now, calls, pauses = Placement(), 0.0, {}, {}
    for what, n, m, tokens in steps:
        session, call = f"s{n}", f"s{n}/{m}"
        if what == "begin":
            placement.begin(call, session, ENGINES[m], tokens)
            if call not in calls:
                pauses.pop(session, None)
            calls[call] = ENGINES[m], tokens, calls.get(call, (0, 0, False))[2]
        elif what == "end" and call in calls:
            placement.end(call, now)
            endpoint, counted, released = calls.pop(call)
            if not released and not any(other.startswith(f"{session}/") and not calls[other][2] for other in calls):
                pauses[session] = endpoint, counted, now
        elif what == "release":
            placement.release(session)
            pauses.pop(session, None)
            calls = {k: (*v[:2], v[2] or k.startswith(f"{session}/")) for k, v in calls.items()}
        elif what == "wait":
            now += tokens / 20
        expected = Counter()
        for endpoint, counted, _ in calls.values():
            expected[endpoint] += counted
        for endpoint, counted, since in pauses.values():
            expected[endpoint] += counted if now - since < IDLE_SECONDS else 0
        assert placement.own_loads(now) == +expected

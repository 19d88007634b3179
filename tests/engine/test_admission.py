"""Admission: sessions begin in order, while they fit, and always where an engine is empty."""

import pytest

from tokencache.engine.admission import CREATED_SECONDS, KEPT_SECONDS, Admission
from tokencache.engine.placement import IDLE_SECONDS, Placement

ROOM = {"capacity": 100_000, "empty": 0}
"""Room for three sessions of 30,000 tokens in nine tenths."""


@pytest.fixture
def placement():
    return Placement()


@pytest.fixture
def admission(placement):
    return Admission(placement, 30_000)


def test_sessions_that_were_created_claim_their_expected_length_until_they_call(admission, placement):
    assert [admission.admits(name, 0.0, 0.0, **ROOM) for name in "abcd"] == [True, True, True, False]
    placement.begin("k", "a", "e", 100)
    assert admission.claims(0.0) == 90_000  # it will grow
    placement.begin("k", "a", "e", 50_000)
    assert admission.claims(0.0) == 110_000
    placement.end("k", 1.0)
    assert not admission.admits("d", 0.0, 1.0, **ROOM)
    assert admission.admits("d", 0.0, 1.0 + IDLE_SECONDS, **ROOM)  # a long pause claims nothing
    assert not admission.admits("e", 0.0, CREATED_SECONDS - 1, **ROOM)
    assert admission.admits("e", 0.0, CREATED_SECONDS + IDLE_SECONDS + 1, **ROOM)


def test_a_session_that_is_deleted_before_its_first_call_claims_nothing(admission, placement):
    for name in "abc":
        admission.admits(name, 0.0, 0.0, **ROOM)
    placement.release("b")
    assert admission.admits("d", 0.0, 0.0, **ROOM)


def test_the_expected_length_is_the_mean_of_those_that_ended(admission, placement):
    placement.release("x", 9_000)
    assert [admission.admits(f"s{n}", 0.0, 0.0, **ROOM) for n in range(11)] == [True] * 10 + [False]


def test_the_oldest_is_admitted_first_and_nobody_overtakes_it(admission, placement):
    for name in "abc":
        admission.admits(name, 0.0, 0.0, **ROOM)
    assert not admission.admits("old", 1.0, 1.0, **ROOM)
    assert not admission.admits("young", 2.0, 2.0, **ROOM)
    assert (admission.place("old"), admission.place("young")) == (1, 2)
    placement.release("a")
    assert not admission.admits("young", 2.0, 3.0, **ROOM)
    assert admission.admits("old", 3.0, 3.0, **ROOM)
    assert admission.waiting(3.0) == {"young": 2.0}
    admission.others = [1.5]  # another replica has an older one
    placement.release("b")
    assert not admission.admits("young", 3.0, 3.0, **ROOM)
    assert admission.place("young") == 2
    admission.others = []
    assert admission.admits("young", 3.0, 3.0, **ROOM)


def test_a_session_that_is_not_asked_for_again_loses_its_place(admission):
    assert not admission.admits("gone", 0.0, 0.0, capacity=10, empty=0)
    assert not admission.admits("next", 0.0, KEPT_SECONDS, capacity=10, empty=1)
    assert admission.admits("next", 0.0, KEPT_SECONDS + 1, capacity=10, empty=1)


def test_there_is_no_limit_while_an_engine_is_empty(admission):
    assert admission.admits("huge", 0.0, 0.0, capacity=1000, empty=2)
    assert admission.admits("huge 2", 0.0, 0.0, capacity=1000, empty=2)
    assert not admission.admits("huge 3", 0.0, 0.0, capacity=1000, empty=2)


def test_what_other_replicas_claim_counts(admission):
    admission.other_claims = 60_001
    assert not admission.admits("a", 0.0, 0.0, **ROOM)
    admission.other_claims = 60_000
    assert admission.admits("a", 0.0, 0.0, **ROOM)

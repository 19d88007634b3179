"""How a rollout ended: from what was given, from its incidents, from its newest turn, or because there is none."""

import msgspec
import pytest

from tokencache.core.incidents import IncidentKind
from tokencache.core.outcome import CAUSES, MAX_DETAIL, LatestTurn, Outcome, OutcomeKind, outcome_of

LATEST = LatestTurn("t7", created=100.0)
BEFORE, AFTER = 99.0, 101.0


def outcome(*incidents, given=None, latest=LATEST, over=True):
    return outcome_of(given, incidents, latest, over=over)


def incident(kind, at=AFTER, *, status=500, call=""):
    return kind.incident("why", at=at, status=status, call=call)


@pytest.mark.parametrize("kind", IncidentKind)
def test_each_incident_leads_to_the_failure_of_the_table_or_to_none(kind):
    wanted = CAUSES[kind].kind if kind in CAUSES else OutcomeKind.OK
    found = outcome(incident(kind))
    assert (found.kind, kind in found.detail) == (wanted, wanted != OutcomeKind.OK)


@pytest.mark.parametrize("kind", [kind for kind in IncidentKind if kind in CAUSES])
def test_a_harness_that_went_on_made_up_for_all_but_lasting_failures(kind):
    assert outcome(incident(kind, BEFORE)).ok == (not CAUSES[kind].lasting)


BLAMED = {500: "engine", 503: "engine", 429: "engine", 307: "engine", 400: "ok", 404: "ok", 0: "ok"}


@pytest.mark.parametrize(("status", "kind"), BLAMED.items())
def test_a_refused_call_is_a_failure_of_the_engine_if_its_status_blames_the_engine(status, kind):
    assert outcome(incident(IncidentKind.ENGINE_REFUSED, status=status)).kind == kind


def test_what_was_given_decides():
    failure = incident(IncidentKind.UPSTREAM_DOWN)
    for given in (Outcome("sandbox", "oom"), Outcome("ok"), Outcome("my-grader_2")):
        assert outcome(failure, given=given) == given


def test_lasting_failures_go_before_others_and_among_others_the_newest_decides():
    engine, left = incident(IncidentKind.UPSTREAM_DOWN, 102.0), incident(IncidentKind.CLIENT_GONE, 103.0)
    assert outcome(engine, left).kind == outcome(left, engine).kind == "harness"
    assert outcome(engine, left, incident(IncidentKind.BUDGET_SPENT, BEFORE)).kind == "budget"
    assert outcome(incident(IncidentKind.BUDGET_SPENT), incident(IncidentKind.STORE_ERROR, BEFORE)).kind == "store"


def test_a_reply_that_nobody_received_is_a_failure_unless_a_retry_got_it():
    unanswered = LatestTurn("t7", call="k7", marks=("unanswered",), created=100.0)
    assert outcome(latest=unanswered).kind == "harness"
    assert outcome(incident(IncidentKind.RETRY_JOINED, call="k7"), latest=unanswered).ok, "also if the call has turns of several choices"
    assert not outcome(incident(IncidentKind.RETRY_JOINED, call="k6"), latest=unanswered).ok


def test_a_call_that_was_answered_before_is_no_failure_if_nobody_received_its_second_sample():
    assert outcome(latest=LatestTurn("t7", marks=("second-sample", "unanswered"), created=100.0)).ok


AGAIN = ("second-sample", "unanswered")


@pytest.mark.parametrize(
    ("kind", "call", "marks", "wanted"),
    [
        (IncidentKind.ENGINE_ABORTED, "k7", AGAIN, "ok"),
        (IncidentKind.ENGINE_ABORTED, "k7", (*AGAIN, "never-answered"), "engine"),
        (IncidentKind.ENGINE_ABORTED, "k7", AGAIN[:1], "engine"),
        (IncidentKind.ENGINE_ABORTED, "k8", AGAIN, "engine"),
        (IncidentKind.CLIENT_GONE, "k7", AGAIN, "harness"),
    ],
)
def test_a_failure_of_the_engine_in_a_second_sample_whose_client_left_is_none(kind, call, marks, wanted):
    """A client that left a retry of it shows that somebody waited."""
    assert outcome(incident(kind, call=call), latest=LatestTurn("t7", call="k7", marks=marks, created=100.0)).kind == wanted


def test_a_second_sample_of_a_call_that_was_never_answered_is_no_excuse():
    assert outcome(latest=LatestTurn("t7", marks=("second-sample", "unanswered", "never-answered"), created=100.0)).kind == "harness"


def test_a_retry_that_got_the_newest_reply_makes_up_for_what_was_before():
    turn = LatestTurn("t7", call="k7", created=100.0)
    retries = [incident(IncidentKind.RETRY_REPLAYED, at, call="k7") for at in (103.0, 101.0)]
    for call in ("k7", "k8"):
        for at, kind in ((100.0, "ok"), (102.0, "ok"), (103.0, "harness")):
            assert outcome(*retries, incident(IncidentKind.CLIENT_GONE, at, call=call), latest=turn).kind == kind


def test_a_retry_that_waited_for_the_newest_reply_makes_up_for_its_call_and_what_was_before_the_retry():
    turn, retry = LatestTurn("t7", call="k7", created=100.0), incident(IncidentKind.RETRY_JOINED, 103.0, call="k7")
    for since, call, kind in ((101.0, "k7", "ok"), (101.0, "k8", "harness"), (102.5, "k8", "ok"), (0.0, "k8", "harness")):
        retried = msgspec.structs.replace(retry, since=since)
        assert outcome(retried, incident(IncidentKind.CLIENT_GONE, 102.0, call=call), latest=turn).kind == kind


def test_a_session_that_is_over_without_a_call_is_a_failure_of_its_harness():
    assert outcome(latest=None).kind == "harness"
    assert outcome(latest=None, over=False).ok
    assert outcome(incident(IncidentKind.UPSTREAM_DOWN), latest=None).kind == "engine"


@pytest.mark.parametrize("kind", ["", "Sandbox", "9x", "a b", "x" * 33, "ok\n", "é"])
def test_a_kind_of_another_shape_is_refused_by_name(kind):
    with pytest.raises(ValueError, match="`failed` must be one of ok, engine, harness, sandbox, timeout, budget, canceled, store"):
        Outcome(kind)


def test_a_long_detail_is_cut():
    assert Outcome("sandbox", "x" * (MAX_DETAIL + 1)).detail == "x" * MAX_DETAIL


def test_a_call_that_was_refused_because_the_store_failed_may_be_repeated():
    refused = [IncidentKind.STORE_ERROR.incident("refused", at=at, hole=False) for at in (BEFORE, AFTER)]
    assert [outcome(one).kind for one in refused] == ["ok", "store"]

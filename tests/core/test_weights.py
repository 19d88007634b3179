"""Tests what trainers announce about weights, the spans of a completion, and the lag between versions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokencache.core.weights import MIXED, Update, UpdateConflictError, WeightSpan, WeightsPhase, WeightsState, lag, merged, read_spans

ENGINE, OTHER = "http://one:8000", "http://two:8000"


def update(owner="trainer", since=0.0, until=10.0, engines=()):
    return Update("u1", owner, since, until, engines)


def test_nothing_announced_is_unknown():
    assert WeightsState().of(ENGINE).phase is WeightsPhase.UNKNOWN
    assert WeightsState().current == ""


def test_the_same_version_again_changes_nothing():
    state = WeightsState().announce("7", 1.0)
    assert state.announce("7", 2.0) is state


def test_a_version_that_is_set_back_is_a_new_update():
    first = WeightsState().announce("7", 1.0)
    again = first.announce("8", 2.0).announce("7", 3.0)
    assert again.of(ENGINE).version == first.of(ENGINE).version
    assert again.of(ENGINE).update > first.of(ENGINE).update


def test_engines_can_have_different_versions():
    state = WeightsState().announce("7", 1.0).announce("8", 2.0, engines=[OTHER])
    assert (state.of(ENGINE).version, state.of(OTHER).version) == ("7", "8")


def test_a_version_for_all_replaces_those_of_single_engines():
    state = WeightsState().announce("8", 1.0, engines=[OTHER]).announce("9", 2.0)
    assert state.of(OTHER).version == "9"


def test_an_update_holds_its_engines_until_it_ends():
    state = WeightsState().announce("7", 0.0).begin_update(update(engines=(ENGINE,)))
    assert state.of(ENGINE).phase is WeightsPhase.UPDATING
    assert state.of(OTHER).phase is WeightsPhase.READY
    ended = state.end_update("u1", "8", 5.0)
    assert ended.of(ENGINE).version == "8"
    assert ended.of(ENGINE).phase is WeightsPhase.READY
    assert ended.of(OTHER).version == "7"


def test_another_owner_is_refused_until_the_timeout():
    state = WeightsState().begin_update(update())
    with pytest.raises(UpdateConflictError) as refused:
        state.announce("9", 5.0, owner="other")
    assert refused.value.update == update()
    assert state.announce("9", 10.0, owner="other").of(ENGINE).version == "9"


def test_an_update_whose_timeout_passed_leaves_the_version_unknown():
    state = WeightsState().announce("7", 0.0).begin_update(update())
    assert state.expire(9.9) is state
    over = state.expire(10.0)
    assert over.of(ENGINE).phase is WeightsPhase.UNKNOWN
    assert over.current == ""
    with pytest.raises(UpdateConflictError):
        over.end_update("u1", "8", 11.0)


@pytest.mark.parametrize("name", ["", "mixed", "default", " 7", "a\nb", "x" * 201])
def test_unusable_names_are_refused(name):
    with pytest.raises(ValueError, match="version"):
        WeightsState().announce(name, 1.0)


actions = st.lists(st.tuples(st.sampled_from(["announce", "begin", "end", "expire"]), st.integers(0, 3), st.integers(0, 30)), max_size=20)


@given(actions)
def test_every_change_has_a_new_revision_and_a_version_never_loses_its_update(steps):
    state, seen = WeightsState(), {}
    for what, version, at in steps:
        before = state
        try:
            if what == "announce":
                state = state.announce(f"v{version}", at, owner="trainer")
            elif what == "begin":
                state = state.begin_update(update(since=at, until=at + 5))
            elif what == "end":
                state = state.end_update("u1", f"v{version}", at)
            else:
                state = state.expire(at)
        except UpdateConflictError:
            pass
        assert state is before or state.revision > before.revision
        known = state.of(ENGINE)
        assert seen.setdefault(known.update, known.version) == known.version  # one update, one state of the weights


def test_spans_of_an_engine_are_read_in_order():
    reported = [{"version": 3, "start": 0, "end": 4}, {"version": 4, "start": 4, "end": 9}]
    assert read_spans(reported, 9) == [WeightSpan("3", 0, 4), WeightSpan("4", 4, 9)]


def test_what_a_report_leaves_out_is_mixed():
    assert read_spans([{"version": "3", "start": 2, "end": 4}], 6) == [
        WeightSpan(MIXED, 0, 2),
        WeightSpan("3", 2, 4),
        WeightSpan(MIXED, 4, 6),
    ]


@pytest.mark.parametrize("reported", [[], ["3"], [{"version": "3"}], [{"version": "default", "start": 0, "end": 6}]])
def test_a_report_that_says_nothing_gives_no_spans(reported):
    assert read_spans(reported, 6) == []


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(-2, 12), st.integers(-2, 12)), max_size=6), st.integers(1, 10))
def test_spans_cover_the_completion_exactly(reported, tokens):
    spans = read_spans([{"version": v, "start": s, "end": e} for v, s, e in reported], tokens)
    if spans:
        assert [span.start for span in spans] == [0, *[span.end for span in spans[:-1]]]
        assert spans[-1].end == tokens
        assert merged(spans) == spans


def test_lag_of_numbers_is_their_difference():
    assert lag("5", "7") == 2


def test_lag_of_names_counts_announcements():
    state = WeightsState().announce("a", 1.0).announce("b", 2.0).announce("c", 3.0)
    assert lag("a", state.current, state.history) == 2
    assert lag("z", state.current, state.history) is None
    assert lag(MIXED, "7") is None


HARMLESS = [("abort", False, True), ("wait", False, True), ("keep", True, True), ("keep", False, False), ("", True, False)]


@pytest.mark.parametrize(("mode", "clears_cache", "harmless"), HARMLESS)
def test_an_update_is_harmless_if_no_reply_keeps_the_keys_and_values_of_older_weights(mode, clears_cache, harmless):
    state = WeightsState().announce("7", 0.0)
    begun = state.begin_update(Update("u1", "trainer", 1.0, 9.0, mode=mode, clears_cache=clears_cache))
    assert begun.harmless_since(1) is harmless
    ended = begun.end_update("u1", "8", 2.0)
    assert ended.harmless_since(1) is harmless
    assert ended.harmless_since(2)
    assert not ended.announce("9", 3.0).harmless_since(1)


def test_an_update_that_ended_without_a_version_is_not_harmless():
    begun = WeightsState().announce("7", 0.0).begin_update(Update("u1", "trainer", 1.0, 9.0, mode="abort"))
    assert not begun.expire(9.0).harmless_since(1)

"""The figures of a run, from one line for each of its sessions."""

import itertools
import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokencache.core.incidents import Incident
from tokencache.core.outcome import LatestTurn, Outcome
from tokencache.core.session import Labels, Reward
from tokencache.core.weights import MIXED
from tokencache.store.base import SessionInfo
from tokencache.trajectories.reports import RolloutStage, RunReport
from tokencache.trajectories.runs import Asked, distribution, list_runs, report, selected
from tokencache.trajectories.summaries import SessionSummary, summarize
from tokencache.trajectories.values import GroupState

RUN = Asked("r", limit=1000)
_NUMBERS = itertools.count()


def rollout(session="", reward=None, *, state="finished", outcome="ok", complete=True, group="", **more):
    """A session of a run that began at 100, whose last call ended at 110 and that was finished at 115."""
    name = session or f"s{next(_NUMBERS):04}"  # in the order of their names
    given = {"created": 100.0, "used": 110.0, "finished": 115.0 if state != "open" else None, "tags": ("run:r",), "turns": 2, **more}
    return SessionSummary(
        session=name, state=state, sealed=state == "sealed", complete=complete, outcome=outcome, outcome_detail="",
        valid=complete and outcome == "ok", harness="", model="", group=group, reward=reward, open_calls=0, since=None, incidents={},
        **{"tokens": 10, **given},
    )  # fmt: skip


def figures(*sessions, **asked):
    return report(sessions, RUN._replace(**asked), now=200.0)


def test_failed_rollouts_are_in_no_distribution_until_asked_for():
    """A failure that somebody gave the reward 0 changes neither mean nor pass rate."""
    valid = [rollout(reward=1.0, tokens=30), rollout(reward=0.0, tokens=10), rollout(tokens=20)]
    failed = [rollout(reward=0.0, outcome="engine", tokens=5), rollout(outcome="engine"), rollout(reward=0.0, complete=False)]
    with_failures, alone = figures(*valid, *failed), figures(*valid)
    for name in ("values", "seconds", "pass_rate", "passed", "unrewarded", "valid", "compared", "equal"):
        assert getattr(with_failures, name) == getattr(alone, name), name
    assert (with_failures.valid, with_failures.failed, with_failures.failures) == (3, 3, {"engine": 2, "incomplete": 1})
    assert (with_failures.pass_rate, with_failures.unrewarded, with_failures.values["reward"].mean) == (0.5, 1, 0.5)
    all_of_them = figures(*valid, *failed, with_failed=True)
    assert (all_of_them.values["reward"].count, all_of_them.values["tokens"].count) == (4, 6)
    assert all_of_them.pass_rate == 0.5


def test_a_rollout_that_runs_is_in_no_figure_but_its_own():
    found = figures(rollout(reward=1.0), rollout(reward=0.0, state="open"), rollout(state="open", outcome="engine"))
    assert (found.running, found.valid, found.failed, found.rollouts) == (2, 1, 0, 3)
    assert (found.values["reward"].count, found.pass_rate) == (1, 1.0)


def test_a_session_that_was_played_again_is_no_rollout():
    again = rollout("b", 1.0, group="g", retry_of="a")
    found = figures(rollout("a", outcome="sandbox", group="g"), again)
    assert (found.sessions, found.retried, found.rollouts, found.failed, found.failures) == (2, 1, 1, 0, {})
    assert [one.session for one in found.groups[0].rollouts] == ["b"]
    assert found.groups[0].retried == 1
    hidden = figures(rollout("a", 1.0, group="g"), again)
    assert (hidden.rollouts, hidden.retried) == (2, 0), "a valid session is never left out, whatever names it"


def test_a_group_expects_what_metadata_or_consumers_say():
    sessions = [rollout("a", 1.0, group="g", group_size=4), rollout("b", 0.0, group="g"), rollout("c", 1.0, group="h"), rollout("d", 1.0)]
    waits = {"h": GroupState(group="h", size=3, ready=1, short=True, waits_for=["x"], waited=412.0)}
    found = report(sessions, RUN, now=200.0, queue=waits)
    groups = {one.group: one for one in found.groups}
    assert {name: one.size for name, one in groups.items()} == {"g": 4, "h": 3, "": 1}
    assert found.expected == 2 + 2
    assert groups["h"].waits == "group h: 1 of 3 ready, waits for x since 412 s"
    assert groups["g"].waits == ""
    assert (groups["g"].pass_rate, groups["g"].reward, groups["g"].passed) == (0.5, 0.5, 1)


def test_groups_without_an_advantage():
    equal = [rollout(reward=1.0, group="equal"), rollout(reward=1.0, group="equal"), rollout(reward=0.0, outcome="engine", group="equal")]
    mixed = [rollout(reward=1.0, group="mixed"), rollout(reward=0.0, group="mixed")]
    alone = [rollout(reward=1.0, group="one"), rollout(reward=1.0), rollout(reward=1.0)]
    found = figures(*equal, *mixed, *alone)
    assert (found.compared, found.equal) == (2, 1)


def test_pages_have_each_group_once_and_the_newest_first():
    sessions = [rollout(f"{group}{n}", 1.0, group=f"g{group}", created=100.0 + group) for n in range(2) for group in range(7)]
    sessions += [rollout("alone", created=50.0)]
    pages = [figures(*sessions, offset=offset, limit=3) for offset in (0, 3, 6, 9)]
    assert [[one.group for one in page.groups] for page in pages] == [["g6", "g5", "g4"], ["g3", "g2", "g1"], ["g0", ""], []]
    assert {page.found for page in pages} == {8}
    assert len({msgspec.json.encode(page.values) for page in pages}) == 1, "figures are of the whole run, whatever page is asked for"


def test_time_by_part():
    """Sessions are compared by what they measured: calls that overlap cannot make another part negative."""
    found = figures(rollout(call_seconds=4.0)).seconds
    assert {name: one.mean for name, one in found.items()} == {"all": 15.0, "calls": 4.0, "between": 6.0, "after": 5.0}
    assert figures(rollout(call_seconds=14.0)).seconds["between"].mean == 0.0


def test_versions_and_failures_over_time():
    sessions = [rollout(reward=float(n % 2), version=f"v{n // 10}", used=1000.0 + n, finished=1000.0 + n) for n in range(40)]
    sessions += [rollout(outcome="timeout", version="v3", used=1040.0, finished=1040.0)]
    found = figures(*sessions)
    assert [(one.version, one.rollouts, one.first, one.last) for one in found.versions] == [
        ("v0", 10, 1000.0, 1009.0), ("v1", 10, 1010.0, 1019.0), ("v2", 10, 1020.0, 1029.0), ("v3", 11, 1030.0, 1040.0),
    ]  # fmt: skip
    assert len(found.moments) == 10
    assert sum(one.valid for one in found.moments) == 40
    assert found.moments[-1].failures == {"timeout": 1}
    assert found.moments[0].versions == {"v0": 4}
    assert (found.moments[0].means["reward"], found.moments[0].means["seconds"]) == (0.5, 901.5)
    assert len(figures(rollout(), rollout()).moments) == 1, "all ended at the same time"


@given(st.lists(st.floats(-1e300, 1e300) | st.integers(-3, 3).map(float), min_size=1, max_size=60))
def test_a_distribution_holds_each_value_once(values):
    found = distribution(values)
    assert sum(found.bins) == found.count == len(values)
    assert found.least == min(values)
    assert found.most == max(values)
    assert found.least <= found.p10 <= found.median <= found.p90 <= found.most
    assert all(map(math.isfinite, (found.mean, found.std)))
    ordered = sorted(values)
    assert found.median == ordered[math.ceil(len(values) / 2) - 1]


def test_runs_are_listed_by_their_tags():
    sessions = [
        rollout(reward=1.0, tags=("run:a", "x"), used=10.0, version="1"), rollout(reward=0.0, outcome="engine", tags=("run:a",), used=30.0),
        rollout(tags=("run:b",), state="open", used=20.0), rollout(tags=("other",)),
    ]  # fmt: skip
    assert [(one.run, one.rollouts, one.running, one.valid, one.failed, one.reward) for one in list_runs(sessions)] == [
        ("a", 2, 0, 1, 1, 1.0),
        ("b", 1, 1, 0, 0, None),
    ]
    assert selected(sessions, Asked("a")) == sessions[:2]
    assert selected(sessions, Asked("a", "x")) == sessions[:1]
    assert selected(sessions, Asked()) == sessions


def test_a_run_without_sessions_has_no_figures():
    found = figures()
    assert (found.rollouts, found.values, found.seconds, found.moments, found.pass_rate, found.groups) == (0, {}, {}, [], None, [])
    assert msgspec.json.decode(msgspec.json.encode(found), type=RunReport) == found


def test_a_large_run_is_counted_from_its_lines_alone():
    """Ten thousand rollouts: what is counted is the same in any order, and nothing beyond the lines is read."""
    rng = random.Random(3)
    sessions = [
        rollout(
            f"s{n}", rng.choice([0.0, 1.0, None]), group=f"g{n // 8}", outcome=rng.choice(["ok"] * 9 + ["engine"]), created=float(n // 8)
        )
        for n in range(10_000)
    ]
    found = figures(*sessions, limit=5)
    rng.shuffle(sessions)
    assert msgspec.structs.replace(figures(*sessions, limit=5), failures={}) == msgspec.structs.replace(found, failures={})
    assert (found.found, len(found.groups), found.valid + found.failed) == (1250, 5, 10_000)


def test_metrics_are_flat_numbers():
    found = figures(rollout(reward=1.0), rollout(reward=0.0), rollout(outcome="my-word"), rollout(state="open")).metrics()
    expected = {
        "rollouts/all": 4,
        "rollouts/running": 1,
        "failed/my-word": 1,
        "reward/mean": 0.5,
        "reward/pass_rate": 0.5,
        "seconds/all/mean": 15,
    }
    assert expected.items() <= found.items()
    assert all(isinstance(value, float) and math.isfinite(value) for value in found.values())


def info(**more):
    latest = LatestTurn("t", prompt_tokens=90, completion_tokens=10, versions=more.pop("versions", []), version_source="trainer")
    return SessionInfo("s", 1.0, 2.0, False, 3, (), (), latest=latest, sampled=30, call_ms=2500, **more)


def span(version, start, end):
    return {"version": version, "start": start, "end": end}


def test_a_session_in_one_line():
    labels = Labels("g", {"group_size": 8, "retry_of": "r0"}, ("run:a",))
    found = summarize(info(finished=3.0, labels=labels, reward=Reward(0.5), versions=[span("1", 0, 4), span("2", 4, 10)]), ())
    assert (found.length, found.call_seconds, found.version, found.group_size, found.retry_of) == (100, 2.5, "2", 8, "r0")
    assert (found.state, found.valid, found.reward, found.finished) == ("finished", True, 0.5, 3.0)
    owed = summarize(info(finished=3.0, outcome=Outcome("mine", "why")), (Incident("no-token-ids", hole=True),))
    assert (owed.valid, owed.outcome, owed.incidents) == (False, "mine", {"no-token-ids": 1})


@pytest.mark.parametrize("metadata", [{"group_size": True, "retry_of": 3}, {"group_size": -1}, {"group_size": "8"}, {}])
def test_metadata_of_another_meaning_say_nothing(metadata):
    found = summarize(info(labels=Labels("g", metadata)), ())
    assert (found.group_size, found.retry_of) == (0, "")


@pytest.mark.parametrize(("versions", "version"), [([], ""), ([span("1", 0, 4)], MIXED), ([span("1", 0, 10)], "1")])
def test_a_version_that_is_not_certain_is_not_named(versions, version):
    assert summarize(info(versions=versions), ()).version == version


def test_stages():
    sessions = [rollout(reward=0.5), rollout(reward=0.4), rollout(), rollout(outcome="engine"), rollout(state="open")]
    found = figures(*sessions, passing=0.5)
    assert [group.rollouts[0].stage for group in found.groups] == [
        RolloutStage.PASSED, RolloutStage.MISSED, RolloutStage.UNREWARDED, RolloutStage.FAILED, RolloutStage.RUNNING,
    ]  # fmt: skip

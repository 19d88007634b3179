"""The figures of a run: how its rollouts end, what they are worth, how long they are and take, and which policy version sampled them.

A *run* is the sessions with one tag, `run:ID` (`tag_of`). The integrations of trainers set it; `create(tags=["run:ID"])` does the same.
Everything is computed here from one line for each session (`summaries`), in time that is linear in their number but for sorting.

A rollout is over once its session is finished or sealed. If it is not valid then, it failed: by its outcome, or as `incomplete`. A failed
rollout is in no distribution and in no pass rate, unless failed ones are asked for. A failed session that was played again
(`summaries.RETRY_OF`) is counted as `retried`, and not as a rollout.
"""

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from tokencache.core.outcome import OutcomeKind
from tokencache.trajectories.summaries import SessionSummary
from tokencache.trajectories.values import GroupState

RUN_TAG = "run:"
INCOMPLETE = "incomplete"
"""How a rollout failed whose outcome is `ok`, but of which something is missing."""
PASSING = 1.0
"""A rollout passes if its reward is at least this, if nobody says something else."""
_BINS, _MOMENTS = 20, 40
_QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9}


class RolloutStage(StrEnum):
    """Where a rollout of a run is."""

    RUNNING = "running"
    """Its session is open."""
    FAILED = "failed"
    """It is over, and not valid."""
    PASSED = "passed"
    """It is valid, and its reward is high enough."""
    MISSED = "missed"
    """It is valid, and its reward is too low."""
    UNREWARDED = "unrewarded"
    """It is valid, and has no reward."""


class Distribution(msgspec.Struct, frozen=True):
    """How values are distributed over rollouts.

    Attributes:
        count: number of values.
        mean, std: the mean, and the standard deviation of these values (not of a sample).
        least, p10, median, p90, most: the smallest value, the one that a tenth of all do not exceed, and so on.
        bins: number of values in each of up to 20 parts of equal width from `least` to `most`.
    """

    count: int
    mean: float
    std: float
    least: float
    p10: float
    median: float
    p90: float
    most: float
    bins: list[int]


class RolloutPoint(msgspec.Struct, frozen=True):
    """One rollout of a run.

    Attributes:
        stage: a `RolloutStage`.
        failure: how it failed; `""` if it did not. `detail`: the same in words.
        at: when it was over, or used last, as Unix time in seconds.
        seconds: how long it took until then.
        Others as in `SessionSummary`.
    """

    session: str
    stage: RolloutStage
    failure: str
    detail: str
    reward: float | None
    turns: int
    tokens: int
    length: int
    version: str
    at: float
    seconds: float
    open_calls: int


class GroupFigures(msgspec.Struct, frozen=True):
    """The rollouts of one group; or one rollout that is in no group.

    Attributes:
        group: its name; `""` if there is none.
        size: how many rollouts are expected: what metadata say (`group_size`), or what a consumer of the queue asked for; at least as many
            as there are.
        rollouts: those that were not played again, the oldest first. `retried`: how many were.
        valid, failed, running: how many of them are.
        passed: how many passed. `pass_rate`: their share of the valid ones with a reward, or `None`.
        reward: the mean over the valid ones, or `None`.
        waits: what it waits for in the queue, in words (`GroupState`); `""` if it does not wait.
    """

    group: str
    size: int
    rollouts: list[RolloutPoint]
    retried: int
    valid: int
    failed: int
    running: int
    passed: int
    pass_rate: float | None
    reward: float | None
    waits: str = ""


class VersionUse(msgspec.Struct, frozen=True):
    """A policy version of a run: how many rollouts that are over it sampled last, and from when to when these ended."""

    version: str
    rollouts: int
    first: float
    last: float


class RunMoment(msgspec.Struct, frozen=True):
    """The rollouts that ended in one of up to 40 equal parts of the time of a run.

    Attributes:
        start, end: Unix time in seconds.
        valid: how many valid ones. `failures`: how many failed, by kind.
        versions: how many by policy version.
        means: mean of each value that `RunReport.values` has; those without a value are left out.
    """

    start: float
    end: float
    valid: int
    failures: dict[str, int]
    versions: dict[str, int]
    means: dict[str, float]


class RunLine(msgspec.Struct, frozen=True):
    """A run in one line: counts as in `RunReport`, the mean reward of valid rollouts, and the newest version."""

    run: str
    rollouts: int
    running: int
    valid: int
    failed: int
    reward: float | None
    version: str
    began: float
    used: float


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run, or of all sessions with a tag.

    Attributes:
        run, tag: what was asked for; `""` if it was not. Without both, all sessions are counted.
        sessions: number of sessions. `retried`: those that were played again.
        rollouts: the others. `expected`: rollouts of its groups that have no session yet.
        running, valid, failed: how many rollouts are. `failures`: how many failed, by kind.
        unrewarded: valid ones without a reward. `passed`: those whose reward is at least `passing`.
        pass_rate: share of the valid ones with a reward that passed, or `None`.
        with_failed: whether `values`, `seconds` and `moments.means` count failed rollouts, too.
        values: of `reward`, `turns`, `tokens` (sampled) and `length` (of the newest turn, in tokens), over rollouts that are over.
        seconds: of `all`, from the first to the last moment of a rollout, and of its parts: in `calls`, `between` them (the harness and its
            tools), and `after` the last one until it was finished. Calls that overlap count each.
        tokens: sum of sampled tokens of all sessions.
        versions: the policy versions, in the order in which they ended a rollout first.
        compared: groups with several valid rewards. `equal`: those of them whose rewards are all equal, so that no advantage remains.
        began, used: when the first session began, and when one was used last. `now`: when this was computed. Unix time in seconds.
        moments: what ended when.
        found: number of groups; a rollout without a group counts as one. `offset`: the first one in `groups`.
        groups: a page of them, the newest first.
    """

    run: str = ""
    tag: str = ""
    sessions: int
    retried: int
    rollouts: int
    expected: int
    running: int
    valid: int
    failed: int
    failures: dict[str, int]
    unrewarded: int
    passed: int
    passing: float
    pass_rate: float | None
    with_failed: bool
    values: dict[str, Distribution]
    seconds: dict[str, Distribution]
    tokens: int
    versions: list[VersionUse]
    compared: int
    equal: int
    began: float
    used: float
    now: float
    moments: list[RunMoment]
    found: int
    offset: int
    groups: list[GroupFigures]

    def metrics(self) -> dict[str, float]:
        """Return the figures as flat numbers for experiment trackers. Values that are not known are left out."""
        counts = ("rollouts", "running", "valid", "failed", "retried", "expected", "unrewarded", "passed")
        found = {f"rollouts/{name}" if name != "rollouts" else "rollouts/all": float(getattr(self, name)) for name in counts}
        found |= {f"failed/{kind}": float(count) for kind, count in self.failures.items()}
        found |= {"tokens/sum": float(self.tokens), "groups/compared": float(self.compared), "groups/equal": float(self.equal)}
        if self.pass_rate is not None:
            found["reward/pass_rate"] = self.pass_rate
        parts = {**self.values, **{f"seconds/{name}": one for name, one in self.seconds.items()}}
        for name, one in parts.items():
            found |= {f"{name}/{part}": float(getattr(one, part)) for part in ("mean", "std", "least", "median", "p90", "most")}
        return found


class Asked(NamedTuple):
    """What a report shall be about, as `RunReport` names it; `limit` groups are returned."""

    run: str = ""
    tag: str = ""
    passing: float = PASSING
    with_failed: bool = False
    offset: int = 0
    limit: int = 100


def tag_of(run: str) -> str:
    """Return the tag of all sessions of a run."""
    return RUN_TAG + run


def runs_of(one: SessionSummary) -> list[str]:
    """Return the runs that a session belongs to, nearly always one or none."""
    return [tag.removeprefix(RUN_TAG) for tag in one.tags if tag.startswith(RUN_TAG)]


def selected(sessions: Iterable[SessionSummary], asked: Asked) -> list[SessionSummary]:
    """Return the sessions of the run and with the tag that are asked for."""
    wanted = {tag for tag in (tag_of(asked.run) if asked.run else "", asked.tag) if tag}
    return [one for one in sessions if wanted <= set(one.tags)]


def list_runs(sessions: Iterable[SessionSummary]) -> list[RunLine]:
    """Return all runs, the last used first."""
    members: dict[str, list[SessionSummary]] = {}
    for one in sessions:
        for run in runs_of(one):
            members.setdefault(run, []).append(one)
    lines = [_line(run, _rollouts(found)) for run, found in members.items()]
    return sorted(lines, key=lambda line: (-line.used, line.run))


def report(sessions: Sequence[SessionSummary], asked: Asked, *, now: float, queue: Mapping[str, GroupState] | None = None) -> RunReport:
    """Compute the figures of a run.

    Args:
        sessions: its sessions (`selected`).
        asked: what shall be reported.
        now: Unix time in seconds.
        queue: the groups that wait in the queue, by name.
    """
    rollouts = _rollouts(sessions)
    points = {one.session: _point(one, asked.passing) for one in rollouts}
    over = [one for one in rollouts if _is_over(one)]
    counted = [one for one in over if one.valid or asked.with_failed]
    stages = Counter(point.stage for point in points.values())
    groups = sorted(_groups(sessions, points, queue or {}), key=lambda group: -min(map(_began, group[1])))
    figures = [one for one, _ in groups]
    rewarded = stages[RolloutStage.PASSED] + stages[RolloutStage.MISSED]
    compared = [rewards for one in figures if one.group and len(rewards := _rewards(one.rollouts)) > 1]
    return RunReport(
        run=asked.run,
        tag=asked.tag,
        sessions=len(sessions),
        retried=len(sessions) - len(rollouts),
        rollouts=len(rollouts),
        expected=sum(one.size - len(one.rollouts) for one in figures),
        running=stages[RolloutStage.RUNNING],
        valid=rewarded + stages[RolloutStage.UNREWARDED],
        failed=stages[RolloutStage.FAILED],
        failures=_counted(points[one.session].failure for one in over if not one.valid),
        unrewarded=stages[RolloutStage.UNREWARDED],
        passed=stages[RolloutStage.PASSED],
        passing=asked.passing,
        pass_rate=stages[RolloutStage.PASSED] / rewarded if rewarded else None,
        with_failed=asked.with_failed,
        values=_distributions(_VALUES, counted),
        seconds=_distributions(_SECONDS, counted),
        tokens=sum(one.tokens for one in sessions),
        versions=_versions(over),
        compared=len(compared),
        equal=sum(len(set(rewards)) == 1 for rewards in compared),
        began=min((one.created for one in sessions), default=now),
        used=max((one.used for one in sessions), default=now),
        now=now,
        moments=_moments(over, counted, points),
        found=len(figures),
        offset=asked.offset,
        groups=figures[asked.offset : asked.offset + asked.limit],
    )


def _rollouts(sessions: Sequence[SessionSummary]) -> list[SessionSummary]:
    """Return the sessions that were not played again. One that did not fail is never left out."""
    again = {one.retry_of for one in sessions if one.retry_of}
    return [one for one in sessions if one.session not in again or not has_failed(one)]


def _is_over(one: SessionSummary) -> bool:
    return one.state != "open"


def has_failed(one: SessionSummary) -> bool:
    """Whether a rollout is over, and not valid."""
    return _is_over(one) and not one.valid


def _line(run: str, rollouts: Sequence[SessionSummary]) -> RunLine:
    valid = [one for one in rollouts if _is_over(one) and one.valid]
    rewards = [one.reward for one in valid if one.reward is not None]
    running = sum(not _is_over(one) for one in rollouts)
    newest = max(rollouts, key=lambda one: (bool(one.version), one.used))
    return RunLine(
        run=run,
        rollouts=len(rollouts),
        running=running,
        valid=len(valid),
        failed=len(rollouts) - running - len(valid),
        reward=_mean(rewards) if rewards else None,
        version=newest.version,
        began=min(one.created for one in rollouts),
        used=max(one.used for one in rollouts),
    )


def _stage(one: SessionSummary, passing: float) -> RolloutStage:
    if not _is_over(one):
        return RolloutStage.RUNNING
    if not one.valid:
        return RolloutStage.FAILED
    if one.reward is None:
        return RolloutStage.UNREWARDED
    return RolloutStage.PASSED if one.reward >= passing else RolloutStage.MISSED


def _point(one: SessionSummary, passing: float) -> RolloutPoint:
    stage = _stage(one, passing)
    failed = stage is RolloutStage.FAILED
    kind = one.outcome if one.outcome != OutcomeKind.OK else INCOMPLETE
    return RolloutPoint(
        session=one.session,
        stage=stage,
        failure=kind if failed else "",
        detail=(one.outcome_detail or ", ".join(one.incidents)) if failed else "",
        reward=one.reward,
        turns=one.turns,
        tokens=one.tokens,
        length=one.length,
        version=one.version,
        at=_ended(one),
        seconds=_ended(one) - one.created,
        open_calls=one.open_calls,
    )


def _ended(one: SessionSummary) -> float:
    return max(one.used, one.finished or 0.0)


def _began(point: RolloutPoint) -> float:
    return point.at - point.seconds


def _groups(
    sessions: Sequence[SessionSummary], points: Mapping[str, RolloutPoint], queue: Mapping[str, GroupState]
) -> list[tuple[GroupFigures, list[RolloutPoint]]]:
    members: dict[tuple[str, str], list[SessionSummary]] = {}
    for one in sorted(sessions, key=lambda one: (one.created, one.session)):
        if one.group or one.session in points:
            members.setdefault((one.group, "" if one.group else one.session), []).append(one)
    found = []
    for (group, _), several in members.items():
        own = [points[one.session] for one in several if one.session in points]
        state = queue.get(group) if group else None
        size = max(*(one.group_size for one in several), state.size if state else 0, len(own)) if group else 1
        if own:
            found.append((_figures(group, size, own, len(several) - len(own), str(state) if state and state.waits else ""), own))
    return found


def _figures(group: str, size: int, rollouts: list[RolloutPoint], retried: int, waits: str) -> GroupFigures:
    stages = Counter(one.stage for one in rollouts)
    passed, missed = stages[RolloutStage.PASSED], stages[RolloutStage.MISSED]
    rewards = _rewards(rollouts)
    return GroupFigures(
        group=group,
        size=size,
        rollouts=rollouts,
        retried=retried,
        valid=passed + missed + stages[RolloutStage.UNREWARDED],
        failed=stages[RolloutStage.FAILED],
        running=stages[RolloutStage.RUNNING],
        passed=passed,
        pass_rate=passed / (passed + missed) if rewards else None,
        reward=_mean(rewards) if rewards else None,
        waits=waits,
    )


def _rewards(rollouts: Sequence[RolloutPoint]) -> list[float]:
    """Return the rewards of the valid ones."""
    stages = {RolloutStage.PASSED, RolloutStage.MISSED}
    return [one.reward for one in rollouts if one.reward is not None and one.stage in stages]


_Value = Callable[[SessionSummary], float | None]
_VALUES: dict[str, _Value] = {
    "reward": lambda one: one.reward,
    "turns": lambda one: one.turns,
    "tokens": lambda one: one.tokens,
    "length": lambda one: one.length,
}
_SECONDS: dict[str, _Value] = {
    "all": lambda one: max(0.0, _ended(one) - one.created),
    "calls": lambda one: one.call_seconds,
    "between": lambda one: max(0.0, one.used - one.created - one.call_seconds),
    "after": lambda one: max(0.0, _ended(one) - one.used),
}


def _distributions(values: Mapping[str, _Value], rollouts: Sequence[SessionSummary]) -> dict[str, Distribution]:
    known = {name: [found for one in rollouts if (found := value(one)) is not None] for name, value in values.items()}
    return {name: distribution(found) for name, found in known.items() if found}


def distribution(values: Sequence[float]) -> Distribution:
    """Describe how values, of which there is at least one, are distributed."""
    ordered = sorted(values)
    least, most, mean = ordered[0], ordered[-1], _mean(ordered)
    width = (most - least) / _BINS
    borders = [least + width * n for n in range(1, _BINS)] if width else []
    ends = [bisect.bisect_left(ordered, border) for border in borders]
    return Distribution(
        count=len(ordered),
        mean=mean,
        std=math.hypot(*(value - mean for value in ordered)) / math.sqrt(len(ordered)),
        least=least,
        most=most,
        bins=[end - start for start, end in zip([0, *ends], [*ends, len(ordered)], strict=True)],
        **{name: ordered[max(0, math.ceil(share * len(ordered)) - 1)] for name, share in _QUANTILES.items()},
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values)


def _versions(over: Sequence[SessionSummary]) -> list[VersionUse]:
    times: dict[str, list[float]] = {}
    for one in over:
        if one.version:
            times.setdefault(one.version, []).append(_ended(one))
    found = [VersionUse(version, len(ends), min(ends), max(ends)) for version, ends in times.items()]
    return sorted(found, key=lambda use: (use.first, use.version))


def _moments(over: Sequence[SessionSummary], counted: Sequence[SessionSummary], points: Mapping[str, RolloutPoint]) -> list[RunMoment]:
    if not over:
        return []
    start, end = min(map(_ended, over)), max(map(_ended, over))
    width = (end - start) / _MOMENTS
    parts = _MOMENTS if width else 1

    def part(one: SessionSummary) -> int:
        return min(int((_ended(one) - start) / width), parts - 1) if width else 0

    ended: list[list[SessionSummary]] = [[] for _ in range(parts)]
    measured: list[list[SessionSummary]] = [[] for _ in range(parts)]
    for one in over:
        ended[part(one)].append(one)
    for one in counted:
        measured[part(one)].append(one)
    return [
        RunMoment(
            start=start + width * n,
            end=start + width * (n + 1),
            valid=sum(one.valid for one in several),
            failures=_counted(points[one.session].failure for one in several if not one.valid),
            versions=_counted(one.version for one in several if one.version),
            means={name: one.mean for name, one in _distributions(_VALUES, measured[n]).items()},
        )
        for n, several in enumerate(ended)
    ]


def _counted(kinds: Iterable[Any]) -> dict[str, int]:
    """Count, the most frequent first."""
    return dict(Counter(kinds).most_common())

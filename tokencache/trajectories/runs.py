"""Computes the figures of a run (`reports`): how its rollouts end, what they are worth, how long they are and take, and their versions.

Everything comes from one line for each session (`summaries`), in time that is linear in their number but for sorting.
"""

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tokencache.core.outcome import OutcomeKind
from tokencache.trajectories.reports import (
    PASSING,
    RUN_TAG,
    Distribution,
    GroupFigures,
    RolloutPoint,
    RolloutStage,
    RunLine,
    RunMoment,
    RunReport,
    VersionUse,
    tags_of,
)
from tokencache.trajectories.summaries import SessionSummary
from tokencache.trajectories.values import GroupState

INCOMPLETE = "incomplete"
"""How a rollout failed whose outcome is `ok`, but of which something is missing."""
_BINS, _MOMENTS, _LEAST = 20, 40, 4
"""Parts of a distribution, parts of the time of a run, and how many rollouts a part of the time has at least on average."""
_QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9}


class Asked(NamedTuple):
    """What a report shall be about, as `RunReport` names it; `limit` groups are returned."""

    run: str = ""
    tag: str = ""
    passing: float = PASSING
    with_failed: bool = False
    offset: int = 0
    limit: int = 100


def runs_of(one: SessionSummary) -> list[str]:
    """Return the runs that a session belongs to, nearly always one or none."""
    return [tag.removeprefix(RUN_TAG) for tag in one.tags if tag.startswith(RUN_TAG)]


def selected(sessions: Iterable[SessionSummary], asked: Asked) -> list[SessionSummary]:
    """Return the sessions of the run and with the tag that are asked for."""
    wanted = tags_of(asked.run, asked.tag)
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

_OVER_TIME = {**_VALUES, "seconds": _SECONDS["all"]}


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
    parts = min(_MOMENTS, max(1, len(over) // _LEAST)) if end > start else 1
    width = (end - start) / parts

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
            means=_means(measured[n]),
        )
        for n, several in enumerate(ended)
    ]


def _means(rollouts: Sequence[SessionSummary]) -> dict[str, float]:
    found = {name: [value for one in rollouts if (value := read(one)) is not None] for name, read in _OVER_TIME.items()}
    return {name: _mean(values) for name, values in found.items() if values}


def _counted(kinds: Iterable[Any]) -> dict[str, int]:
    """Count, the most frequent first."""
    return dict(Counter(kinds).most_common())

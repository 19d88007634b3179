"""Defines the figures of a run as typed values: the JSON of `/tokencache/v1/runs`. `runs` computes them.

A *run* is the sessions with one tag, `run:ID` (`tag_of`). The integrations of trainers set it; `create(tags=["run:ID"])` does the same.
A rollout is over once its session is finished or sealed. If it is not valid then, it failed: by its outcome, or as `incomplete`. A failed
rollout is in no distribution and in no pass rate, unless failed ones are asked for. A failed session that was played again (`RETRY_OF`)
is counted as `retried`, and not as a rollout. Sessions that were deleted are in no figure.
"""

from enum import StrEnum

import msgspec

RUN_TAG = "run:"
PASSING = 1.0
"""A rollout passes if its reward is at least this, if nobody says something else."""
GROUP_SIZE, RETRY_OF = "group_size", "retry_of"
"""Members of a session's metadata: how many rollouts its group shall have, and the session that it plays again because that one failed."""


def tag_of(run: str) -> str:
    """Return the tag of all sessions of a run."""
    return RUN_TAG + run


def tags_of(run: str, tag: str) -> set[str]:
    """Return the tags that sessions must have to be of a run and to have a tag, each of which may be empty."""
    return {one for one in (tag_of(run) if run else "", tag) if one}


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
        means: mean of each value that `RunReport.values` has, and of `seconds` (of whole rollouts); those without a value are left out.
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

"""Chooses the rows to train on. A row is one sequence of a trajectory.

    selection = select(trajectories, no_side_calls, at_least(16))
    for row in selection.kept: ...
    print(selection.report())

A rule is a plain function of a trajectory and one of its sequences. It returns why the row is dropped, or `""` to keep it. Every dropped
row is listed with the rule and the reason, so no row is lost silently. Your own rules work in the same way:

    def short(trajectory: Trajectory, sequence: Sequence) -> str:
        return "is longer than 8,192 tokens" if sequence.tokens > 8192 else ""
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tokencache.core.outcome import OutcomeKind
from tokencache.core.turn import UNRECEIVED, TurnMark
from tokencache.core.weights import Announced
from tokencache.trajectories.placeholders import TurnOrigin, with_sampled_placeholders
from tokencache.trajectories.values import Sequence, Trajectory
from tokencache.trajectories.versions import LagLimit

Rule = Callable[[Trajectory, Sequence], str]
"""Returns why a row is dropped; `""` to keep it."""


class TrainingRow(NamedTuple):
    """A sequence, with the trajectory that it belongs to."""

    trajectory: Trajectory
    sequence: Sequence

    def __str__(self) -> str:
        return f"session {self.trajectory.session}, sequence {self.sequence.id}"


class DroppedRow(NamedTuple):
    """A row that was dropped: the name of the rule, and its reason."""

    row: TrainingRow
    rule: str
    reason: str

    def __str__(self) -> str:
        return f"{self.row}: {self.reason} ({self.rule})"


class Selection(NamedTuple):
    """The result of `select`.

    Attributes:
        kept: the rows to train on, in the order of the trajectories and of their sequences.
        dropped: all other rows, in the same order.
        without_rows: sessions of which no row is kept, including those that have no sequence at all.
    """

    kept: list[TrainingRow]
    dropped: list[DroppedRow]
    without_rows: list[str]

    def report(self) -> str:
        """Describe what was dropped: one line for each rule."""
        by_rule: dict[str, list[TrainingRow]] = {}
        for dropped in self.dropped:
            by_rule.setdefault(dropped.rule, []).append(dropped.row)
        lines = [f"kept: {_counted(self.kept)}", f"dropped: {_counted(dropped.row for dropped in self.dropped)}"]
        lines += [f"  {rule}: {_counted(rows)}" for rule, rows in by_rule.items()]
        if self.without_rows:
            lines.append(f"sessions without a row: {', '.join(self.without_rows)}")
        return "\n".join(lines)


def _counted(rows: Iterable[TrainingRow]) -> str:
    tokens = [sum(row.sequence.loss_mask) for row in rows]
    return f"{len(tokens)} row{'s' * (len(tokens) != 1)}, {sum(tokens):,} trainable tokens"


def select(trajectories: Iterable[Trajectory], *rules: Rule, keep_invalid: bool = False) -> Selection:
    """Apply rules to every sequence of trajectories, in the given order. The first rule that drops a row is reported.

    `valid_only` comes before all others, unless `keep_invalid` is set, then `trained_only`.
    """
    rules = (trained_only, *rules) if keep_invalid else (valid_only, trained_only, *rules)
    kept: list[TrainingRow] = []
    dropped: list[DroppedRow] = []
    without_rows: list[str] = []
    for trajectory in trajectories:
        before = len(kept)
        for sequence in trajectory.sequences:
            row = TrainingRow(trajectory, sequence)
            for rule in rules:
                if reason := rule(trajectory, sequence):
                    dropped.append(DroppedRow(row, getattr(rule, "__name__", type(rule).__name__), reason))
                    break
            else:
                kept.append(row)
        if len(kept) == before:
            without_rows.append(trajectory.session)
    return Selection(kept, dropped, without_rows)


def trained_only(trajectory: Trajectory, sequence: Sequence) -> str:  # noqa: ARG001
    """Drop the rows of a model that is not trained (`--not-trainable`): its ids may not be in the vocabulary of the policy."""
    trained = not sequence.turns or any(TurnMark.NOT_TRAINABLE not in turn.marks for turn in sequence.turns)
    return "" if trained else f"the model {sequence.model} is not trained"


def valid_only(trajectory: Trajectory, sequence: Sequence) -> str:
    """Drop all rows of a trajectory that is not valid: its reward says nothing about the policy."""
    if trajectory.valid:
        return ""
    if trajectory.outcome == OutcomeKind.OK:
        return complete_only(trajectory, sequence)
    return f"the rollout failed: {trajectory.outcome}" + (f" ({trajectory.outcome_detail})" if trajectory.outcome_detail else "")


def complete_only(trajectory: Trajectory, sequence: Sequence) -> str:  # noqa: ARG001
    """Drop all rows of a trajectory that is not complete."""
    if trajectory.complete:
        return ""
    kinds = sorted({incident.kind for incident in trajectory.incidents if incident.hole})
    return f"the session is not complete: {', '.join(kinds) or 'no incident says why'}"


def rewarded(trajectory: Trajectory, sequence: Sequence) -> str:  # noqa: ARG001
    """Drop all rows of a trajectory without a reward."""
    return "the session has no reward" if trajectory.reward is None else ""


def no_placeholders(trajectory: Trajectory, sequence: Sequence) -> str:
    """Drop rows in which the model sampled tokens that stand for parts of images, or that repeat such a reply (`docs/images.md`)."""
    tainted = with_sampled_placeholders(
        TurnOrigin(turn.turn, turn.parent, [anchor.turn for anchor in turn.anchors], turn.marks)
        for one in trajectory.sequences
        for turn in one.turns
    )
    return "the model sampled tokens that stand for parts of images" if any(turn.turn in tainted for turn in sequence.turns) else ""


def policy_logprobs(trajectory: Trajectory, sequence: Sequence) -> str:  # noqa: ARG001
    """Drop rows with a turn whose log probabilities are raw although its request changed the distribution (`docs/sampling.md`)."""
    raw = next((turn.turn for turn in sequence.turns if TurnMark.RAW_LOGPROBS in turn.marks), "")
    return raw and f"the log probabilities of turn {raw} are not those of the distribution that it was sampled from"


def at_least(trainable_tokens: int) -> Rule:
    """Return a rule that drops rows with fewer trainable tokens (loss mask 1)."""

    def at_least(trajectory: Trajectory, sequence: Sequence) -> str:  # noqa: ARG001
        own = sum(sequence.loss_mask)
        return "" if own >= trainable_tokens else f"has {own} trainable tokens, {trainable_tokens} are required"

    return at_least


def max_lag(most: int, current: str, history: Iterable[Announced] = ()) -> Rule:
    """Return a rule that drops rows with trainable tokens of a policy version that lags too much, or whose lag is not known.

    Args:
        most: how many versions a token may lag behind the current one.
        current: the current version. `client.weights()` returns it, and the history.
        history: the announced versions, the newest last. Needed only for versions that are not whole numbers.
    """
    limit = LagLimit(most, str(current), tuple(history))

    def max_lag(trajectory: Trajectory, sequence: Sequence) -> str:  # noqa: ARG001
        own = sum(sequence.loss_mask)
        lag = limit.lag(sequence.versions, own)
        if lag is not None:
            return "" if lag <= most else f"lags {lag} policy versions behind {current}, {most} are allowed"
        certain = sum(sequence.versions.values())
        if certain < own:
            return f"the policy version of {own - certain} trainable tokens is not certain"
        return f"how old the policy versions {', '.join(sequence.versions)} are is not known"

    return max_lag


def no_side_calls(trajectory: Trajectory, sequence: Sequence) -> str:
    """Drop calls beside the rollout, such as one that makes a title: they offer no tools, and no later call continues them.

    Another sequence of the session has tools or is continued, or may have been: a limit left out sequences. A call whose answer returned in
    another call (`links`), such as the summary of a compaction, is not a side call.
    """
    if not _is_single(sequence) or _returned(trajectory, sequence):
        return ""
    if all(_is_single(other) for other in trajectory.sequences):
        return "may be a side call of what a limit left out: fetch without limits" if _left_out(trajectory) else ""
    return "is a side call: it offers no tools, and no later call continues it"


def no_discarded_retries(trajectory: Trajectory, sequence: Sequence) -> str:
    """Drop answers that the harness discarded: branches that no later call continues.

    Such a sequence branches off another one, and its answer did not return in another call (`links`).
    """
    if sequence.start != "branch" or sequence.continued or _returned(trajectory, sequence):
        return ""
    return "is a retry or a fork that no later call continues"


def main_line(trajectory: Trajectory, sequence: Sequence) -> str:
    """Keep only the rollout itself: no sub-agents, side calls or retries.

    The main line begins at the root whose tree has the most turns; among equals, at one whose last reply did not break off. It continues
    with the sequence that took over after the last turn: one that took its context from there with edits (`resplice`, `plain`), or one that
    begins with a summary from there. The calls that wrote these summaries (compactions in `links`) are part of it. Other branches, and side
    calls, are not. All rows are dropped if a limit of length or lag left out so many turns that they may have been the main line.
    """
    line = _main_line(trajectory)
    if not line:
        return "which line is the main one is not known, because a limit left out turns: fetch without limits"
    return "" if sequence.id in line else f"is not on the main line, which is {', '.join(line)}"


def _is_single(sequence: Sequence) -> bool:
    """Whether a sequence offers no tools, and no later call continues it."""
    return not sequence.continued and not sequence.tools


def _left_out(trajectory: Trajectory) -> bool:
    """Whether a limit of length or lag left out whole sequences."""
    overlong, stale = trajectory.figures.overlong, trajectory.figures.stale
    return bool((overlong and overlong.dropped) or (stale and stale.turns))


def _returned(trajectory: Trajectory, sequence: Sequence) -> bool:
    """Whether an answer of a sequence returned as text in another call."""
    own = {turn.turn for turn in sequence.turns}
    return any(not own.isdisjoint(link.sources) for link in trajectory.links)


def _main_line(trajectory: Trajectory) -> list[str]:
    """Return the ids of the sequences of the main line, in the order of the trajectory; none if turns are missing that may have been it."""
    summaries = _summaries(trajectory)
    parents = _parents(trajectory, summaries)
    tree_turns, missing = _turns(trajectory)  # of a sequence, and below of all that follow from it
    for sequence in reversed(trajectory.sequences):  # a parent comes before its children
        if parent := parents[sequence.id]:
            tree_turns[parent] += tree_turns[sequence.id]
    successors = [sequence for sequence in trajectory.sequences if not parents[sequence.id]]
    second, first = sorted([0, 0, *(tree_turns[one.id] for one in successors)])[-2:]
    if missing and first <= second + missing:
        return []
    line: set[str] = set()
    while successors:
        last = max(successors, key=lambda one: (tree_turns[one.id], _ended_whole(one)))  # among equals the first
        line.add(last.id)
        successors = [
            one
            for one in trajectory.sequences
            if parents[one.id] == last.id and one.start != "branch" and _began_after(last, one) and not no_side_calls(trajectory, one)
        ]
    line |= {source for target, source in summaries.items() if target in line}
    return [sequence.id for sequence in trajectory.sequences if sequence.id in line]


def _ended_whole(sequence: Sequence) -> bool:
    return all(UNRECEIVED.isdisjoint(turn.marks) for turn in sequence.turns[-1:])


def _began_after(before: Sequence, sequence: Sequence) -> bool:
    """Whether a sequence, which took its context from another one, began when that had ended.

    Of one that is cut the end is not there. What took its context from a turn that is left began before the turns that are not.
    """
    first = sequence.turns[0]
    if before.overlong == "cut":
        return all(turn.turn != first.origin for turn in before.turns)
    return first.created >= before.turns[-1].created


def _turns(trajectory: Trajectory) -> tuple[dict[str, int], int]:
    """Count the recorded turns of each sequence. Also returns how many turns limits left out that may belong to any sequence."""
    turns = {sequence.id: len(sequence.turns) for sequence in trajectory.sequences}
    overlong, stale = trajectory.figures.overlong, trajectory.figures.stale
    missing = {turn for figures in (overlong, stale) if figures is not None for turn in figures.turns}
    cut = [sequence.id for sequence in trajectory.sequences if sequence.overlong == "cut"]
    if len(cut) == 1 and not _left_out(trajectory):
        turns[cut[0]] += len(missing)
        return turns, 0
    return turns, len(missing)


def _summaries(trajectory: Trajectory) -> dict[str, str]:
    """Return for each sequence that begins with a summary the sequence whose turn wrote it. Both are ids."""
    sequence_of = {turn.turn: sequence.id for sequence in trajectory.sequences for turn in sequence.turns}
    found = {}
    for link in trajectory.links:
        if link.kind == "compaction" and len(link.sources) == 1:
            target, source = sequence_of.get(link.turn), sequence_of.get(link.sources[0])
            if target and source:  # a limit of length may leave turns out
                found[target] = source
    return found


def _parents(trajectory: Trajectory, summaries: Mapping[str, str]) -> dict[str, str]:
    """Return for each sequence the one from which it took its context, as tokens or as a summary; `""` if there is none."""
    starts = {sequence.id: sequence.start for sequence in trajectory.sequences}
    parents: dict[str, str] = {}
    for sequence in trajectory.sequences:  # a parent comes before its children
        parent = sequence.parent if sequence.parent in starts else None
        source = summaries.get(sequence.id, "")
        if parent is None and source in parents:
            parent = parents[source] if starts[source] == "branch" else source  # a branch may write the summary of its parent
        parents[sequence.id] = parent or ""
    return parents

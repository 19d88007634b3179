"""Chooses the rows to train on. A row is one sequence of a trajectory.

    selection = select(trajectories, no_side_calls, at_least(16))
    for row in selection.kept: ...
    print(selection.report())

A rule is a plain function of a trajectory and one of its sequences. It returns why the row is dropped, or `""` to keep it. Every dropped
row is listed with the rule and the reason, so no row is lost silently. Your own rules work in the same way:

    def short(trajectory: Trajectory, sequence: Sequence) -> str:
        return "is longer than 8,192 tokens" if sequence.tokens > 8192 else ""
"""

from collections.abc import Callable, Container, Iterable
from functools import partial
from types import FunctionType
from typing import NamedTuple

from tokencache.core.outcome import OutcomeKind
from tokencache.core.turn import UNRECEIVED, TurnMark
from tokencache.core.weights import Announced
from tokencache.trajectories.placeholders import TurnOrigin, with_sampled_placeholders
from tokencache.trajectories.values import Sequence, Trajectory
from tokencache.trajectories.versions import LagLimit

Rule = Callable[[Trajectory, Sequence], str]
"""Returns why a row is dropped; `""` to keep it."""
RowTest = Callable[[Sequence], str]
"""The same for the rows of one trajectory."""


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
        tests = [(rule, _of_trajectory(rule, trajectory)) for rule in rules]
        for sequence in trajectory.sequences:
            row = TrainingRow(trajectory, sequence)
            for rule, test in tests:
                if reason := test(sequence):
                    dropped.append(DroppedRow(row, getattr(rule, "__name__", type(rule).__name__), reason))
                    break
            else:
                kept.append(row)
        if len(kept) == before:
            without_rows.append(trajectory.session)
    return Selection(kept, dropped, without_rows)


def _of_trajectory(rule: Rule, trajectory: Trajectory) -> RowTest:
    """Return the test that a rule is for the sequences of a trajectory."""
    of_trajectory = _OF_TRAJECTORY.get(rule) if isinstance(rule, FunctionType) else None
    return of_trajectory(trajectory) if of_trajectory else partial(rule, trajectory)


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
    return _no_placeholders(trajectory)(sequence)


def _no_placeholders(trajectory: Trajectory) -> RowTest:
    tainted = with_sampled_placeholders(
        TurnOrigin(turn.turn, turn.parent, [anchor.turn for anchor in turn.anchors], turn.marks)
        for one in trajectory.sequences
        for turn in one.turns
    )
    reason = "the model sampled tokens that stand for parts of images"
    return lambda sequence: reason if any(turn.turn in tainted for turn in sequence.turns) else ""


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
    return _no_side_calls(trajectory)(sequence)


def _no_side_calls(trajectory: Trajectory) -> RowTest:
    returned = _returned(trajectory)
    reason = "is a side call: it offers no tools, and no later call continues it"
    if all(_is_single(other) for other in trajectory.sequences):
        reason = "may be a side call of what a limit left out: fetch without limits" if _left_out(trajectory) else ""
    return lambda sequence: "" if not _is_single(sequence) or returned(sequence) else reason


def no_discarded_retries(trajectory: Trajectory, sequence: Sequence) -> str:
    """Drop answers that the harness discarded: branches that no later call continues.

    Such a sequence branches off another one, and its answer did not return in another call (`links`).
    """
    return _no_discarded_retries(trajectory)(sequence)


def _no_discarded_retries(trajectory: Trajectory) -> RowTest:
    returned = _returned(trajectory)
    reason = "is a retry or a fork that no later call continues"
    return lambda sequence: "" if sequence.start != "branch" or sequence.continued or returned(sequence) else reason


def main_line(trajectory: Trajectory, sequence: Sequence) -> str:
    """Keep only the rollout itself: no sub-agents, side calls or retries.

    The main line begins at the root whose tree has the most turns; among equals at the first, but of single calls at one whose reply did
    not break off. It continues with the sequence that took over after the last turn: one that took its context from there with edits
    (`resplice`, `plain`), or one that begins with a summary from there. The calls that wrote these summaries (compactions in `links`) are
    part of it. Other branches, and side calls, are not. If a limit of length or lag left out turns, a row is dropped unless it is on the
    main line whatever these turns were.
    """
    return _main_line(trajectory)(sequence)


def _main_line(trajectory: Trajectory) -> RowTest:
    line = _MainLine(trajectory).ids()
    reason = f"is not on the main line, which is {', '.join(line)}"
    if _turns_left_out(trajectory):
        reason = "may not be on the main line, because a limit left out turns: fetch without limits"
    certain = {*line}
    return lambda sequence: "" if sequence.id in certain else reason


_OF_TRAJECTORY: dict[object, Callable[[Trajectory], RowTest]] = {
    no_placeholders: _no_placeholders,
    no_side_calls: _no_side_calls,
    no_discarded_retries: _no_discarded_retries,
    main_line: _main_line,
}
"""The rules that compare a sequence with all others. Each reads a trajectory once for all its sequences."""


def _is_single(sequence: Sequence) -> bool:
    """Whether a sequence offers no tools, and no later call continues it."""
    return not sequence.continued and not sequence.tools


def _left_out(trajectory: Trajectory) -> bool:
    """Whether a limit of length or lag left out whole sequences."""
    overlong, stale = trajectory.figures.overlong, trajectory.figures.stale
    return bool((overlong and overlong.dropped) or (stale and stale.turns))


def _turns_left_out(trajectory: Trajectory) -> list[str]:
    """Return the ids of the turns that limits of length and lag left out."""
    overlong, stale = trajectory.figures.overlong, trajectory.figures.stale
    return list(dict.fromkeys(turn for figures in (overlong, stale) if figures is not None for turn in figures.turns))


def _returned(trajectory: Trajectory) -> Callable[[Sequence], bool]:
    """Return whether an answer of a sequence returned as text in another call."""
    sources = {source for link in trajectory.links for source in link.sources}
    return lambda sequence: any(turn.turn in sources for turn in sequence.turns)


class _MainLine:
    """Finds the main line of a trajectory.

    Attributes:
        trajectory: the trajectory.
        summaries: for each sequence that begins with a summary the turn that wrote it.
        sequence_of: the sequence of each turn. All sequences are named by their ids.
        parents: for each sequence the one from which it took its context, as tokens or as a summary; `""` if there is none, and `None` if
            a limit left that out.
        turns: for each sequence the number of its turns and of those that follow from it.
        missing: number of turns that may follow from any sequence, or from none: those that limits left out, and those that took their
            context from these.
        last_of_cut: the last turn of the only sequence that a limit cut, if it is known.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self.sequence_of = {turn.turn: sequence.id for sequence in trajectory.sequences for turn in sequence.turns}
        self.summaries = {link.turn: link.sources[0] for link in trajectory.links if link.kind == "compaction" and len(link.sources) == 1}
        left_out = _turns_left_out(trajectory)
        self.parents = self._parents(set(left_out))
        self.turns = {sequence.id: len(sequence.turns) for sequence in trajectory.sequences}
        self.missing, self.last_of_cut = len(left_out), ""
        cut = [sequence.id for sequence in trajectory.sequences if sequence.overlong == "cut"]
        if len(cut) == 1 and not _left_out(trajectory):
            self.turns[cut[0]] += len(left_out)
            self.missing, self.last_of_cut = 0, left_out[-1]
        for sequence in reversed(trajectory.sequences):  # a parent comes before its children
            parent = self.parents[sequence.id]
            if parent is None:
                self.missing += self.turns[sequence.id]
            elif parent:
                self.turns[parent] += self.turns[sequence.id]

    def _parents(self, left_out: Container[str]) -> dict[str, str | None]:
        starts = {sequence.id: sequence.start for sequence in self.trajectory.sequences}
        parents: dict[str, str | None] = {}
        for sequence in self.trajectory.sequences:  # a parent comes before its children
            writer = self.summaries.get(sequence.id, "")
            if sequence.parent in starts:
                parents[sequence.id] = sequence.parent
            elif sequence.parent in left_out or writer in left_out:
                parents[sequence.id] = None
            else:
                source = self.sequence_of.get(writer, "")  # a branch may write the summary of its parent
                parents[sequence.id] = parents[source] if starts.get(source) == "branch" else source
        return parents

    def ids(self) -> list[str]:
        """Return the ids of the sequences that are certainly on the main line, in the order of the trajectory."""
        no_side_call = _no_side_calls(self.trajectory)
        children: dict[str | None, list[Sequence]] = {}
        for sequence in self.trajectory.sequences:
            children.setdefault(self.parents[sequence.id], []).append(sequence)
        line: set[str] = set()
        last = self._largest(children.get("", []))
        while last is not None:
            line.add(last.id)
            taken = [one for one in children.get(last.id, []) if one.start != "branch" and not no_side_call(one)]
            last = self._successor(last, taken)
        line |= {self.sequence_of[self.summaries[one]] for one in line if self.summaries.get(one) in self.sequence_of}
        return [sequence.id for sequence in self.trajectory.sequences if sequence.id in line]

    def _largest(self, sequences: list[Sequence]) -> Sequence | None:
        """Return the one from which the most turns follow; `None` if that depends on turns that are missing.

        Among equals the first: of single calls, which may be attempts at one call, the first whose reply did not break off.
        """
        most = max((self.turns[one.id] for one in sequences), default=0)
        largest = [one for one in sequences if self.turns[one.id] == most]
        others = max((self.turns[one.id] for one in sequences if self.turns[one.id] < most), default=0)
        if self.missing and (len(largest) > 1 or most <= others + self.missing):
            return None
        whole = [one for one in largest if most > 1 or UNRECEIVED.isdisjoint(one.turns[0].marks)]
        return next(iter(whole or largest), None)

    def _successor(self, before: Sequence, taken: list[Sequence]) -> Sequence | None:
        """Return the sequence that certainly took over when another one had ended, of those that took their context from it."""
        if before.overlong != "cut":
            return self._largest([one for one in taken if one.turns[0].created >= before.turns[-1].created])
        largest = self._largest(taken)  # when it ended is not known, only that its last turn came before what took its context from that
        return largest if largest is not None and largest.turns[0].origin == self.last_of_cut else None

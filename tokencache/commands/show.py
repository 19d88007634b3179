"""`tokencache show`: prints a session as a tree of sequences and turns.

Runs of turns that only continue are folded into one line. A sequence that branches off is indented below the turn from which it branches.
From a certain depth on, the indentation stays the same, so that lines do not become too narrow. The heading names that turn.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any

import msgspec
import typer
from rich.text import Text

from tokencache.client import Sequence as TrainingSequence
from tokencache.client import Trajectory, TurnChange, TurnSpan
from tokencache.commands.completion import SESSION
from tokencache.commands.console import (
    PROXY_URL,
    TIMEOUT,
    AdminKeyOption,
    JsonOption,
    ProxyOption,
    calling,
    output,
    plural,
    print_json,
    printable,
)
from tokencache.core.incidents import failed_calls
from tokencache.core.outcome import OutcomeKind
from tokencache.core.turn import TurnMark
from tokencache.trajectories.drift_rates import drift_rates, total

MAX_DEPTH = 8
MAX_LOST = 300
"""Characters of a lost text that are shown."""
MIN_FOLDED = 3
"""Shortest run of turns that is folded."""

_USUAL_FINISH = frozenset({"stop", "tool_calls"})
Part = str | tuple[str, str]
"""A piece of a line, with its style if it has one."""


def show_session(  # noqa: PLR0917 - one parameter per option
    session: Annotated[str, SESSION],
    turns: Annotated[bool, typer.Option("--turns", help="Show every turn; do not fold runs that only continue.")] = False,
    drift: Annotated[
        bool, typer.Option("--drift", help="Also measure drift, as `tokencache drift` does: the engine renders each prompt once more.")
    ] = False,
    as_json: JsonOption = False,
    proxy: ProxyOption = PROXY_URL,
    admin_key: AdminKeyOption = None,
) -> None:
    """Show a session as a tree of turns.

    The tree shows which turn continues which, and why a rollout split. Each
    line is one turn: its number in the order of recording, how it starts or
    continues its sequence, the new tokens of its prompt, the sampled tokens,
    the finish reason, and, if present, a reason, the policy versions that
    sampled it, marks (aborted, no-logprobs, ...), an incident, and the rules
    that were applied to recognize the history. Below a turn that does not
    simply continue another, a line says what changed in its request. Below a
    turn with `lost-text`, lines quote what the model sampled and a parser of
    the engine dropped, so that the harness never saw it. With
    --json: the same as an object, without tokens.

    tokencache show r17
    """
    with calling(proxy, admin_key, timeout=TIMEOUT) as client:
        rollout = client.session(session).fetch(drift="turns" if drift else "off")
        changes = client.session(session).changes()
    if as_json:
        print_json(_without_tokens(rollout) | {"changes": changes})
        return
    console = output()
    for line in tree_lines(rollout, changes, unfold=turns):
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def _without_tokens(rollout: Trajectory) -> dict[str, Any]:
    """Return a rollout as JSON values, without its tokens and messages."""
    shown: dict[str, Any] = msgspec.to_builtins(rollout)
    for sequence in shown["sequences"]:
        for name in ("token_ids", "loss_mask", "logprobs"):
            del sequence[name]
        for turn in sequence["turns"]:
            del turn["served"]
    return shown


def tree_lines(rollout: Trajectory, changes: Sequence[TurnChange], *, unfold: bool = False) -> Iterator[Text]:
    """Draw a rollout, line by line."""
    yield from _heading(rollout)
    yield from _lost_text(changes)
    yield Text()
    yield from _Tree(rollout, changes, unfold=unfold).lines()
    if rollout.incidents:
        yield Text()
        yield Text(f"incidents ({len(rollout.incidents)})", style="bold")
    for incident in rollout.incidents:
        where = " ".join(f"{noun} {name}" for noun, name in (("call", incident.call), ("turn", incident.turn)) if name)
        style, missing = ("red", " (data is missing)") if incident.hole else ("yellow", "")
        yield Text.assemble("  ", (incident.kind, style), missing, f"  {where}", f"  {printable(incident.detail)}")


def _heading(rollout: Trajectory) -> Iterator[Text]:
    figures = rollout.figures
    state = ("complete", "green") if rollout.complete else ("INCOMPLETE", "bold red")
    failure = "" if rollout.outcome == OutcomeKind.OK else (f"  FAILED: {rollout.outcome}", "bold red")
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(rollout.created)) if rollout.created else "not begun"
    sealed = "sealed" if rollout.sealed else "not sealed"
    yield Text.assemble("session ", (rollout.session, "bold"), "  ", state, failure, f"  {sealed}  began {began}")
    if rollout.outcome_detail:
        yield Text(f"{rollout.outcome}: {printable(rollout.outcome_detail)}", style="red")
    counts = [
        plural(figures.calls, "call"),
        plural(figures.turns, "turn"),
        plural(figures.sequences, "sequence"),
        plural(figures.trainable_tokens, "trainable token"),
        f"{figures.masked_tokens:,} masked",
    ]
    spans = [turn for sequence in rollout.sequences for turn in sequence.turns]
    if failures := failed_calls(rollout.incidents, {turn.call for turn in spans}):
        counts.insert(1, plural(len(failures), "failed call"))
    untrained = figures.untrainable_tokens
    marks = {TurnMark.SHARED: "shared with the session that it left", TurnMark.NOT_TRAINABLE: "of models that are not trained"}
    for mark, words in marks.items():
        if tokens := sum(turn.completion_tokens for turn in spans if mark in turn.marks):
            counts.append(f"{tokens:,} {words}")
            untrained -= tokens
    if untrained > 0:
        counts.append(f"{untrained:,} sampled without log probabilities")
    yield Text(", ".join(counts))
    if figures.versions or figures.mixed_tokens:
        unknown = figures.trainable_tokens - sum(figures.versions.values()) - figures.mixed_tokens
        uncertain = {"mixed": figures.mixed_tokens, "not known": unknown}
        yield Text(f"policy versions: {_counted(figures.versions | {name: n for name, n in uncertain.items() if n})} trainable tokens")
    starts = Counter(sequence.start for sequence in rollout.sequences)
    for noun, kinds in (("sequences start as", starts), ("applied rules", figures.forgiven), ("incidents", figures.incidents)):
        if kinds:
            yield Text(f"{noun}: {_counted(kinds)}")
    drift = total(drift_rates([rollout]))
    if drift.measured:
        unmeasured = f", {plural(drift.could_drift - drift.measured, 'turn')} not measured" if drift.could_drift > drift.measured else ""
        yield Text(f"drift avoided: {drift.drifted_tokens:,} tokens, in {drift.drifted} of {drift.measured} turns measured{unmeasured}")


def _lost_text(changes: Sequence[TurnChange]) -> Iterator[Text]:
    """Count what parsers lost, if they lost something."""
    losses = [change.lost for change in changes if change.lost]
    if losses:
        characters = sum(len(text) for texts in losses for text in texts)
        compared = sum(not change.not_compared for change in changes)
        unknown = f", {len(changes) - compared} not compared" if compared < len(changes) else ""
        yield Text(f"lost to the parser: {characters:,} characters, in {len(losses)} of {plural(compared, 'turn')}{unknown}", style="red")


class _Tree:
    """Draws the sequences of one rollout."""

    def __init__(self, rollout: Trajectory, changes: Sequence[TurnChange], *, unfold: bool) -> None:
        self._unfold = unfold
        self._changes = {change.turn: change for change in changes}
        self._links = {link.turn: link for link in rollout.links}
        self._with_incident = {incident.turn for incident in rollout.incidents}
        self._all_versions = {*rollout.figures.versions, *(["mixed"] if rollout.figures.mixed_tokens else [])}
        self._several_models = len({sequence.model for sequence in rollout.sequences}) > 1
        self._known = {turn.turn for sequence in rollout.sequences for turn in sequence.turns}
        self._branches: dict[str, list[TrainingSequence]] = {}
        """The sequences that branch off a turn, by turn id; under `""` those that branch off none."""
        for sequence in rollout.sequences:
            self._branches.setdefault(self._left(sequence), []).append(sequence)

    def lines(self) -> Iterator[Text]:
        """Draw all sequences. Uses a stack, not recursion, because branches may be nested a thousand deep."""
        stack = [self._sequence(sequence, 0) for sequence in reversed(self._branches.get("", []))]
        while stack:
            line = next(stack[-1], None)
            if line is None:
                stack.pop()
            elif isinstance(line, Text):
                yield line
            else:
                stack.append(self._sequence(*line))

    def _left(self, sequence: TrainingSequence) -> str:
        """Return the turn that a sequence branched off or took its context from; `""` if there is none in this rollout."""
        left = (sequence.turns[0].parent or sequence.turns[0].origin or "") if sequence.turns else ""
        return left if left in self._known else ""

    def _sequence(self, s: TrainingSequence, depth: int) -> Iterator[Text | tuple[TrainingSequence, int]]:
        """Yield the lines of a sequence, and in place of each branch the sequence with its depth."""
        margin = "│ " * min(depth, MAX_DEPTH)
        left = self._left(s)
        tools = f", {plural(s.tools, 'tool')}" if s.tools else ", no tools"
        yield Text.assemble(
            (margin, "dim"),
            ("● ", "green" if s.continued else "dim"),
            (s.start, "bold"),
            (f" {s.reason}", "yellow") if s.reason else "",
            f" {s.id}",
            (f" {s.model}", "cyan") if self._several_models else "",
            (f" off {left}", "dim") if left else "",
            f": {plural(len(s.turns), 'turn')}, {s.tokens:,} tokens, {s.trainable_tokens:,} trainable, weight {s.weight:.3g}{tools}",
            "" if s.continued else ", not continued",
        )
        ends = {turn.turn for turn in (*s.turns[:1], *s.turns[-1:])}
        for plain, run in groupby(s.turns, key=lambda turn: self._is_plain(turn) and turn.turn not in ends):
            turns = list(run)
            if plain and len(turns) >= MIN_FOLDED and not self._unfold:
                yield Text.assemble((f"{margin}│ ", "dim"), *_folded(turns, self._versions(turns)))
                continue
            for turn in turns:
                starts = turn.turn == s.id
                yield Text.assemble((f"{margin}│ ", "dim"), *self._turn(turn, s.start if starts else "continue"))
                yield from (Text.assemble((f"{margin}│      ", "dim"), (words, "italic")) for words in self._why(turn, starts=starts))
                yield from ((branch, depth + 1) for branch in self._branches.get(turn.turn, ()))

    def _is_plain(self, turn: TurnSpan) -> bool:
        """Whether a turn only continues the session."""
        lost = turn.turn in self._changes and self._changes[turn.turn].lost
        changed = len(turn.weight_versions) > 1 or turn.pieces or turn.turn in self._links or lost
        noteworthy = turn.reason or turn.marks or changed or turn.turn in self._with_incident or turn.turn in self._branches
        return not noteworthy and turn.finish_reason in _USUAL_FINISH

    def _why(self, turn: TurnSpan, *, starts: bool) -> Iterator[str]:
        """Say what changed in the request of a turn that does not simply continue another, and which answers return in it."""
        change = self._changes.get(turn.turn)
        if change is not None and change.number and (starts or turn.reason):
            yield printable(str(change))
        if (link := self._links.get(turn.turn)) is not None:
            sources = " or ".join(str(self._changes[source].number) for source in link.sources if source in self._changes)
            yield f"{link.kind}: message {link.message} holds the answer of turn {sources}"
        for text in change.lost if change is not None else ():
            yield f"lost to the parser: {printable(text[:MAX_LOST])}"

    def _turn(self, turn: TurnSpan, label: str) -> list[Part]:
        """Return the line of a turn. Its number is its place in the order of recording, from 0, as in the viewer.

        `label` is its place in the finished tree, not `turn.match`: of two turns that extend the same one, the longer line is the main
        one now, but the turn that came first was recorded as `continue`.
        """
        number = self._changes[turn.turn].number if turn.turn in self._changes else ""
        parts: list[Part] = [(f"{number:>4} ", "dim"), f"{turn.turn:<16} {label:<8}", *_tokens([turn])]
        parts.append((f"  {turn.finish_reason or 'no finish reason'}", "" if turn.finish_reason in _USUAL_FINISH else "yellow"))
        if turn.reason:
            parts.append((f"  {turn.reason}", "yellow"))
        if turn.marks:
            parts.append((f"  {' '.join(turn.marks)}", "red"))
        if turn.turn in self._changes and self._changes[turn.turn].lost:
            parts.append((f"  {TurnMark.LOST_TEXT}", "red"))
        if turn.turn in self._with_incident:
            parts.append(("  incident", "red"))
        if turn.pieces:
            parts.append((f"  {len(turn.pieces)} pieces", "yellow"))
        if turn.forgiven:
            parts.append((f"  rules {', '.join(turn.forgiven)}", "cyan"))
        if versions := self._versions([turn]):
            parts.append((f"  {versions}", "magenta"))
        return parts

    def _versions(self, turns: Sequence[TurnSpan]) -> str:
        """Return the policy versions of turns, and those of their prompts that are others; `""` if the whole rollout has only one."""
        sampled = [str(span.get("version", "?")) for turn in turns for span in turn.weight_versions if isinstance(span, dict)]
        prompts = [turn.prompt_version for turn in turns if turn.prompt_version]
        if len(self._all_versions | {*prompts}) <= 1:
            return ""
        others = [name for name in dict.fromkeys(prompts) if name not in sampled]
        prompt = f", prompt {' '.join(others)}" if others else ""
        return f"version {' '.join(dict.fromkeys(sampled)) or 'not known'}{prompt}"


def _folded(turns: Sequence[TurnSpan], versions: str) -> list[Part]:
    rules = _counted(Counter(rule for turn in turns for rule in turn.forgiven))
    return [
        ("   ⋮ ", "dim"),
        f"{f'{len(turns)} turns':<16} {'continue':<8}",
        *_tokens(turns),
        (f"  rules {rules}", "cyan") if rules else "",
        (f"  {versions}", "magenta") if versions else "",
    ]


def _tokens(turns: Sequence[TurnSpan]) -> list[Part]:
    """Return the number of new prompt tokens and of sampled tokens."""
    new = sum(turn.prompt[1] - turn.prompt[0] for turn in turns)
    sampled = sum(turn.completion[1] - turn.completion[0] for turn in turns)
    return [f" {f'+{new:,}':>8}", (f" {sampled:>8,} sampled", "green")]


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))

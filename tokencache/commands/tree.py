"""A session as a tree, for a terminal: each sequence with its turns, and under a turn what branched off it.

Long sessions are mostly turns that just go on: runs of them are folded into one line. A sequence that branches off stands
indented behind the turn that it left; so deep that the lines would grow narrow, it stands no deeper, and its heading says
where it belongs.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich.text import Text

from tokencache.client import Sequence as TokenSequence
from tokencache.client import Trajectory, TurnSpan

DEEPEST = 8
FOLDED = 3
"""Runs of at least so many turns are folded."""

_USUAL = frozenset({"stop", "tool_calls"})


def lines(rollout: Trajectory, *, unfold: bool = False) -> Iterator[Text]:
    """Draw a rollout, line by line."""
    yield from _heading(rollout)
    yield Text()
    yield from _Drawing(rollout, unfold=unfold).all()
    if rollout.incidents:
        yield Text()
        yield Text(f"incidents ({len(rollout.incidents)})", style="bold")
    for incident in rollout.incidents:
        where = " ".join(f"{what} {name}" for what, name in (("call", incident.call), ("turn", incident.turn)) if name)
        style = "red" if incident.hole else "yellow"
        yield Text.assemble(
            "  ", (incident.kind, style), " (something is missing)" if incident.hole else "", f"  {where}", f"  {_flat(incident.detail)}"
        )


def _heading(rollout: Trajectory) -> Iterator[Text]:
    figures = rollout.figures
    state = ("complete", "green") if rollout.complete else ("INCOMPLETE", "bold red")
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(rollout.created)) if rollout.created else "not begun"
    sealed = "sealed" if rollout.sealed else "not sealed"
    yield Text.assemble("session ", (rollout.session, "bold"), "  ", state, f"  {sealed}  began {began}")
    told = (
        ("calls", figures.calls),
        ("turns", figures.turns),
        ("sequences", figures.sequences),
        ("trainable tokens", figures.trainable_tokens),
        ("masked", figures.masked_tokens),
        ("sampled without log probabilities", figures.untrainable_tokens),
    )
    yield Text(", ".join(f"{n:,} {what}" for what, n in told if n or what != told[-1][0]))
    for what, counts in (("matches", figures.matches), ("forgiven", figures.forgiven), ("incidents", figures.incidents)):
        if counts:
            yield Text(f"{what}: {_counted(counts)}")
    if figures.drift is not None and figures.drift.measured:
        yield Text(f"drift avoided: {figures.drift.tokens:,} tokens, in {figures.drift.drifted} of {figures.drift.measured} turns measured")


class _Drawing:
    """Draws the sequences of one rollout."""

    def __init__(self, rollout: Trajectory, *, unfold: bool) -> None:
        self._unfold = unfold
        self._sequences = rollout.sequences
        self._troubled = {incident.turn for incident in rollout.incidents}
        self._known = {turn.turn for sequence in rollout.sequences for turn in sequence.turns}
        self._behind: dict[str, list[TokenSequence]] = {}
        for sequence in rollout.sequences:
            self._behind.setdefault(self._left(sequence), []).append(sequence)

    def all(self) -> Iterator[Text]:
        """Draw all sequences. A stack and no recursion: sequences may hang on one another a thousand deep."""
        waiting = [self._sequence(sequence, 0) for sequence in reversed(self._behind.get("", []))]
        while waiting:
            line = next(waiting[-1], None)
            if line is None:
                waiting.pop()
            elif isinstance(line, Text):
                yield line
            else:
                sequence, depth = line
                waiting.append(self._sequence(sequence, depth))

    def _left(self, sequence: TokenSequence) -> str:
        """The turn that a sequence branched off, or took its context from; `""` if there is none here."""
        first = sequence.turns[0] if sequence.turns else TurnSpan(turn="", prompt=(0, 0), completion=(0, 0))
        left = first.parent or first.origin or ""
        return left if left in self._known else ""

    def _sequence(self, s: TokenSequence, depth: int) -> Iterator[Text | tuple[TokenSequence, int]]:
        margin = "│ " * min(depth, DEEPEST)
        left = self._left(s)
        offered = f", {_plural(s.tools, 'tool')}" if s.tools else ", no tools"
        yield Text.assemble(
            (margin, "dim"),
            ("● ", "green" if s.continued else "dim"),
            (s.start, "bold"),
            (f" {s.reason}", "yellow") if s.reason else "",
            f" {s.id}",
            (f" off {left}", "dim") if left else "",
            f": {_plural(len(s.turns), 'turn')}, {s.tokens:,} tokens, {s.trainable_tokens:,} trainable, weight {s.weight:.3g}{offered}",
            "" if s.continued else ", not continued",
        )
        for plain, run in groupby(
            enumerate(s.turns, 1), key=lambda at: self._is_plain(at[1], first=at[0] == 1, last=at[0] == len(s.turns))
        ):
            turns = list(run)
            if plain and len(turns) >= FOLDED and not self._unfold:
                yield Text.assemble((f"{margin}│ ", "dim"), *_folded([turn for _, turn in turns]))
                continue
            for n, turn in turns:
                yield Text.assemble((f"{margin}│ ", "dim"), *self._turn(n, turn))
                yield from ((branch, depth + 1) for branch in self._behind.get(turn.turn, ()))

    def _is_plain(self, turn: TurnSpan, *, first: bool, last: bool) -> bool:
        """Whether there is nothing to say about a turn but that the session went on."""
        noteworthy = turn.match != "continue" or turn.reason or turn.marks or turn.turn in self._troubled or turn.turn in self._behind
        return not (noteworthy or first or last or turn.finish_reason not in _USUAL)

    def _turn(self, n: int, turn: TurnSpan) -> list[str | tuple[str, str]]:
        said: list[str | tuple[str, str]] = [(f"{n:>4} ", "dim"), f"{turn.turn:<16} {turn.match:<8}", *_tokens([turn])]
        said.append((f"  {turn.finish_reason or 'no finish reason'}", "" if turn.finish_reason in _USUAL else "yellow"))
        if turn.reason:
            said.append((f"  {turn.reason}", "yellow"))
        if turn.marks:
            said.append((f"  {' '.join(turn.marks)}", "red"))
        if turn.turn in self._troubled:
            said.append(("  incident", "red"))
        if turn.forgiven:
            said.append((f"  forgiven {', '.join(turn.forgiven)}", "cyan"))
        return said


def _folded(turns: Sequence[TurnSpan]) -> list[str | tuple[str, str]]:
    forgiven = _counted(Counter(rule for turn in turns for rule in turn.forgiven))
    return [
        ("   ⋮ ", "dim"),
        f"{f'{len(turns)} turns':<16} {'continue':<8}",
        *_tokens(turns),
        (f"  forgiven {forgiven}", "cyan") if forgiven else "",
    ]


def _tokens(turns: Sequence[TurnSpan]) -> list[str | tuple[str, str]]:
    """Tokens that are new in the prompt, and tokens sampled."""
    new = sum(turn.prompt[1] - turn.prompt[0] for turn in turns)
    said = sum(turn.completion[1] - turn.completion[0] for turn in turns)
    return [f" {f'+{new:,}':>8}", (f" {said:>8,} sampled", "green")]


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def _plural(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _flat(text: str) -> str:
    """A text of strangers on one line, without control characters: it goes to a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)

"""The drift of many sessions in figures: a row for each harness and model.

Of a row's turns those *could drift* whose prompt the proxy put together; what is said of drift is about those among them
that were *measured*. What a text-only path would have cost can be said of sequences whose turns were all measured
(`?drift=turns`), and is told of those alone: into how many pieces they would have fallen (`core.drift.breaks`), and how many
trainable tokens stand behind the first break of each.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tokencache.core.drift import MeasuredTurn, breaks
from tokencache.trajectories.values import Sequence as Line
from tokencache.trajectories.values import Trajectory, TurnSpan

_ENGINES_OWN = frozenset({"root", "plain"})


class Cause(msgspec.Struct):
    """What one cause did: in how many turns, at how many sites, and how many of the prompts' tokens stand there."""

    turns: int = 0
    sites: int = 0
    tokens: int = 0


class Rates(msgspec.Struct, kw_only=True):
    """Drift of one harness and model.

    Attributes:
        sessions, sequences: how many there were; a sequence is counted with its first turn.
        could_drift: turns whose prompt the proxy put together; `measured`: of these, those that were compared with a plain
            rendering; `drifted`: of those, the ones that differ.
        prompt_tokens: of the measured turns; `drifted_tokens`: of these, those that the rendering has not.
        causes: by name, the most frequent first.
        whole_sequences: sequences of which every turn was measured; `continuing`: their turns behind the first.
        text_only_sequences: what these would have been if every prompt had been rendered plainly.
        trainable_tokens: theirs; `trainable_tokens_lost`: of these, those behind the first break of each.
    """

    harness: str
    model: str
    sessions: int = 0
    sequences: int = 0
    could_drift: int = 0
    measured: int = 0
    drifted: int = 0
    prompt_tokens: int = 0
    drifted_tokens: int = 0
    causes: dict[str, Cause] = {}
    whole_sequences: int = 0
    continuing: int = 0
    text_only_sequences: int = 0
    trainable_tokens: int = 0
    trainable_tokens_lost: int = 0


def rates(trajectories: Iterable[Trajectory], models: Mapping[str, str] | None = None) -> list[Rates]:
    """Add up the drift of trajectories, in the order of harness and model; `models` renames models."""
    rows: dict[tuple[str, str], Rates] = {}
    for trajectory in trajectories:
        met = set()
        for line in trajectory.sequences:
            for span in line.turns:
                key = (span.harness, (models or {}).get(span.model, span.model))
                row = rows.setdefault(key, Rates(harness=key[0], model=key[1], causes={}))
                if key not in met:
                    met.add(key)
                    row.sessions += 1
                if span is line.turns[0]:
                    _add_sequence(row, line)
                _add_turn(row, span)
    for row in rows.values():
        row.causes = dict(sorted(row.causes.items(), key=lambda one: (-one[1].turns, one[0])))
    return [rows[key] for key in sorted(rows)]


def total(rows: Sequence[Rates]) -> Rates:
    """Add rows up; sessions of several harnesses or models count once for each."""
    whole = Rates(harness="all", model="", causes={})
    for row in rows:
        for name in Rates.__struct_fields__:
            if isinstance(value := getattr(row, name), int):
                setattr(whole, name, getattr(whole, name) + value)
        for name, cause in row.causes.items():
            _add_cause(whole.causes, name, cause)
    return whole


def _add_turn(row: Rates, span: TurnSpan) -> None:
    if span.match in _ENGINES_OWN:
        return
    row.could_drift += 1
    if span.drift is None:
        return
    row.measured += 1
    row.drifted += bool(span.drift.sites)
    row.prompt_tokens += span.completion[0]
    row.drifted_tokens += span.drift.tokens
    for name in {site.cause for site in span.drift.sites}:
        sites = [site for site in span.drift.sites if site.cause == name]
        _add_cause(row.causes, name, Cause(1, len(sites), sum(site.end - site.start for site in sites)))


def _add_cause(causes: dict[str, Cause], name: str, more: Cause) -> None:
    known = causes.setdefault(name, Cause())
    known.turns += more.turns
    known.sites += more.sites
    known.tokens += more.tokens


def _add_sequence(row: Rates, line: Line) -> None:
    row.sequences += 1
    steps = [MeasuredTurn(span.completion[0], span.completion[1], span.drift) for span in line.turns]
    broken = breaks(line.token_ids, steps)
    if broken is None:
        return
    row.whole_sequences += 1
    row.continuing += len(steps) - 1
    row.text_only_sequences += 1 + len(broken)
    row.trainable_tokens += sum(line.loss_mask)
    row.trainable_tokens_lost += sum(line.loss_mask[steps[broken[0] - 1].completion :]) if broken else 0

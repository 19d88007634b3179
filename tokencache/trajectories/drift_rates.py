"""Sums up the drift of many trajectories: one row for each harness and model.

Only spliced prompts can drift. The drift figures of a row cover its measured turns. The cost of a text-only path (`core.drift.breaks`) is
known only for sequences in which every turn was measured (`?drift=turns`), and is summed over these.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tokencache.core.drift import MeasuredTurn
from tokencache.trajectories.rollout import text_only_cost
from tokencache.trajectories.values import Sequence as TrainingSequence
from tokencache.trajectories.values import Trajectory, TurnSpan

_RENDERED_BY_ENGINE = frozenset({"root", "plain"})


class CauseCount(msgspec.Struct):
    """The effect of one cause: the number of turns, of sites, and of prompt tokens at these sites."""

    turns: int = 0
    sites: int = 0
    tokens: int = 0


class DriftRates(msgspec.Struct, kw_only=True):
    """The drift of one harness and model.

    Attributes:
        sessions, sequences: their number. A sequence counts for the harness and model of its first turn.
        could_drift: number of turns with a spliced prompt. `measured`: those that were compared with a plain rendering. `drifted`: those
            of them that differ.
        prompt_tokens: number of tokens of the measured prompts. `drifted_tokens`: those that the plain rendering does not have.
        causes: the effects of each cause by name, the most frequent cause first.
        whole_sequences: number of sequences in which every turn was measured. `continuing`: their turns after the first.
        text_only_sequences: number of sequences that these would have become if every prompt had been rendered plainly.
        trainable_tokens: their trainable tokens. `trainable_tokens_lost`: those after the first break of each sequence.
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
    causes: dict[str, CauseCount] = {}
    whole_sequences: int = 0
    continuing: int = 0
    text_only_sequences: int = 0
    trainable_tokens: int = 0
    trainable_tokens_lost: int = 0

    @property
    def name(self) -> str:
        """Harness and model in a readable form."""
        return f"{self.harness or '(no adapter)'}, {self.model}" if self.model else self.harness


def drift_rates(trajectories: Iterable[Trajectory], models: Mapping[str, str] | None = None) -> list[DriftRates]:
    """Sum up the drift of trajectories, sorted by harness and model. `models` renames models."""
    rows: dict[tuple[str, str], DriftRates] = {}
    for trajectory in trajectories:
        seen = set()
        for sequence in trajectory.sequences:
            for turn in sequence.turns:
                key = (turn.harness, (models or {}).get(turn.model, turn.model))
                row = rows.setdefault(key, DriftRates(harness=key[0], model=key[1], causes={}))
                if key not in seen:
                    seen.add(key)
                    row.sessions += 1
                if turn is sequence.turns[0]:
                    _add_sequence(row, sequence)
                _add_turn(row, turn)
    for row in rows.values():
        row.causes = dict(sorted(row.causes.items(), key=lambda one: (-one[1].turns, one[0])))
    return [rows[key] for key in sorted(rows)]


def total(rows: Sequence[DriftRates]) -> DriftRates:
    """Sum up rows. A session with several harnesses or models counts once for each."""
    whole = DriftRates(harness="all", model="", causes={})
    for row in rows:
        for name in DriftRates.__struct_fields__:
            if isinstance(value := getattr(row, name), int):
                setattr(whole, name, getattr(whole, name) + value)
        for name, cause in row.causes.items():
            _add_cause(whole.causes, name, cause)
    return whole


def _add_turn(row: DriftRates, turn: TurnSpan) -> None:
    if turn.match in _RENDERED_BY_ENGINE:
        return
    row.could_drift += 1
    if turn.drift is None:
        return
    row.measured += 1
    row.drifted += bool(turn.drift.sites)
    row.prompt_tokens += turn.completion[0]
    row.drifted_tokens += turn.drift.tokens
    for name in {site.cause for site in turn.drift.sites}:
        sites = [site for site in turn.drift.sites if site.cause == name]
        _add_cause(row.causes, name, CauseCount(1, len(sites), sum(site.end - site.start for site in sites)))


def _add_cause(causes: dict[str, CauseCount], name: str, more: CauseCount) -> None:
    known = causes.setdefault(name, CauseCount())
    known.turns += more.turns
    known.sites += more.sites
    known.tokens += more.tokens


def _add_sequence(row: DriftRates, sequence: TrainingSequence) -> None:
    row.sequences += 1
    steps = [MeasuredTurn(turn.completion[0], turn.completion[1], turn.drift) for turn in sequence.turns]
    cost = text_only_cost(sequence.token_ids, sequence.loss_mask, steps)
    if cost is None:
        return
    row.whole_sequences += 1
    row.continuing += len(steps) - 1
    row.text_only_sequences += cost[0]
    row.trainable_tokens += sum(sequence.loss_mask)
    row.trainable_tokens_lost += cost[1]

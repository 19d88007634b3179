"""Puts the stored records of one session together: labelled sequences, weights, requests and figures.

A `Rollout` is what every export format (`formats`) writes. It is computed from records alone.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from tokencache.core.context import Context, whole_contexts
from tokencache.core.drift import Drift, MeasuredTurn, break_points
from tokencache.core.ids import ID_BYTES
from tokencache.core.incidents import Incident, IncidentKind
from tokencache.core.lineage import TokenSequence, lineages, sequences
from tokencache.core.outcome import Outcome, OutcomeKind, outcome_of
from tokencache.core.session import Labels, Reward, SessionStage
from tokencache.core.turn import Tokens, Turn
from tokencache.core.weights import Announced
from tokencache.store.base import SessionInfo
from tokencache.trajectories.links import Line
from tokencache.trajectories.values import DriftFigures, Figures
from tokencache.trajectories.versions import VersionCounts, count_versions


class Records(msgspec.Struct, frozen=True):
    """A session as it is stored.

    Attributes:
        tokens: the tokens of each turn, by turn id.
        contexts: the packed request of each turn, by turn id. Empty if no format needs the messages.
        owed: incidents that the store could not save yet.
        drift: the measured drift of turns, by turn id. `unmeasured`: why a turn could not be measured, by turn id.
        announced: the policy versions that trainers announced, the newest last. They tell the order of versions that are names.
    """

    info: SessionInfo
    turns: Sequence[Turn]
    tokens: Mapping[str, Tokens]
    contexts: Mapping[str, bytes]
    owed: Sequence[Incident] = ()
    drift: Mapping[str, Drift] = {}
    unmeasured: Mapping[str, str] = {}
    announced: Sequence[Announced] = ()

    @property
    def token_count(self) -> int:
        """The number of stored tokens."""
        return sum(len(own.delta) + len(own.completion) for own in self.tokens.values()) // ID_BYTES


class Rollout(msgspec.Struct, frozen=True):
    """One session, ready to be written in any format.

    Attributes:
        complete: false if something that the model sampled, or may have sampled, is missing. `incidents` describe it.
        outcome: how the rollout ended (`core.outcome`).
        weights: for each sequence its share of the rollout's trainable tokens. The weights sum to 1, or are all 0 if nothing can be
            trained. So a rollout counts once, however many sequences it has: the sum of each sequence's token mean times its weight is
            the mean over all tokens of the rollout.
        contexts: the whole request messages of each turn, by turn id. If the request of a turn is not kept, it has none.
        stage: where the session is in its life cycle.
        labels: what the trainer noted about the session.
        reward: the newest reward of the session; an empty one if it has none.
        announced: as in `Records`.
        lines: the turns of all sequences, also of those that a limit left out.
    """

    session: str
    complete: bool
    outcome: Outcome
    sealed: bool
    created: float
    incidents: tuple[Incident, ...]
    sequences: tuple[TokenSequence, ...]
    weights: tuple[float, ...]
    contexts: Mapping[str, Context]
    drift: Mapping[str, Drift]
    figures: Figures
    stage: SessionStage
    labels: Labels
    reward: Reward
    announced: Sequence[Announced] = ()
    lines: Sequence[Line] = ()

    @property
    def valid(self) -> bool:
        """Whether its reward says something about the policy: it is complete, and nothing failed."""
        return self.complete and self.outcome.ok

    def sequence_reward(self, sequence: TokenSequence) -> float | None:
        """Return the reward of a sequence for trainers that take one for each: its own, otherwise that of the session."""
        return self.reward.sequences.get(sequence.id, self.reward.reward)


def rollout(records: Records) -> Rollout:
    """Put the rollout of a session together.

    An open call counts as an incident, because its reply is not recorded yet. Torn records are reported as an incident too, not
    raised, so that the trainer sees that the session is incomplete.
    """
    info, turns = records.info, records.turns
    incidents = incidents_of(info, records.owed)
    built: list[TokenSequence] = []
    contexts: dict[str, Context] = {}
    try:
        built = _sequences(records)
        contexts = whole_contexts(turns, records.contexts)
    except (KeyError, ValueError) as error:
        incidents.append(IncidentKind.TORN_RECORD.incident(f"{type(error).__name__}: {error}", at=time.time()))
    reward, outdated = current_reward(info, turns)
    incidents += outdated
    newest = max(reversed(turns), key=attrgetter("created"), default=None)
    return Rollout(
        session=info.id,
        complete=is_complete(incidents),
        outcome=outcome_of(info.outcome, incidents, newest, over=info.state is not SessionStage.OPEN),
        sealed=info.sealed,
        created=info.created,
        incidents=tuple(incidents),
        sequences=tuple(built),
        weights=weights_of(built),
        contexts=contexts,
        drift=records.drift,
        figures=figures_of_sequences(
            turns,
            incidents,
            built,
            _drift_figures(built, records) if records.drift or records.unmeasured else None,
            records.announced,
        ),
        stage=info.state,
        labels=info.labels,
        reward=reward,
        announced=records.announced,
        lines=lines_of(built),
    )


def lines_of(sequences: Iterable[TokenSequence]) -> list[Line]:
    """Return the turns of sequences."""
    return [Line(sequence.root, [span.turn for span in sequence.turns]) for sequence in sequences]


def _sequences(records: Records) -> list[TokenSequence]:
    """Build the sequences of a session.

    Raises:
        KeyError, ValueError: the records are torn.
    """
    turns, recorded = records.turns, records.info.turns
    if len(turns) < recorded:
        raise ValueError(f"{len(turns)} of {recorded} turns are there")
    return [with_versions(sequence, records.announced) for sequence in sequences(turns, records.tokens)]


def current_reward(info: SessionInfo, turns: Sequence[Turn]) -> tuple[Reward, list[Incident]]:
    """Return the newest reward of a session without those sequences whose last turn, when it was set, is now part of another one.

    Returns also an incident that names these, if there are any.
    """
    reward = info.reward or Reward()
    if not reward.sequences or reward.recorded == len(turns):
        return reward, []
    ends = {line[0].id: line[-1].id for line in lineages(turns[: reward.recorded or len(turns)])}
    holder = {turn.id: line[0].id for line in lineages(turns) for turn in line}
    outdated = [name for name in reward.sequences if name not in ends or holder[ends[name]] != name]
    if not outdated:
        return reward, []
    named = ", ".join(f"{name} ({reward.sequences[name]:g})" for name in outdated)
    left = {name: value for name, value in reward.sequences.items() if name not in outdated}
    incident = IncidentKind.REWARD_OUTDATED.incident(f"sequences and their rewards: {named}", at=reward.at)
    return msgspec.structs.replace(reward, sequences=left), [incident]


def with_versions(sequence: TokenSequence, announced: Sequence[Announced]) -> TokenSequence:
    """Count the policy versions of the trainable tokens of a sequence. `announced`: as in `Records`."""
    counts = count_versions(sequence.trained, announced)
    return msgspec.structs.replace(
        sequence,
        versions=counts.versions,
        mixed_tokens=counts.mixed,
        oldest_version=counts.oldest,
        newest_version=counts.newest,
    )


def incidents_of(info: SessionInfo, owed: Sequence[Incident]) -> list[Incident]:
    """Return all incidents of a session: those of `past_incidents`, and one for each open call."""
    detail = "the call has begun and not ended: it is in progress, or its proxy died"
    open_calls = (IncidentKind.CALL_OPEN.incident(detail, call=call.call, at=call.since) for call in info.open_calls)
    return [*past_incidents(info, owed), *open_calls]


def past_incidents(info: SessionInfo, owed: Sequence[Incident]) -> list[Incident]:
    """Return what happened to a session: its incidents that are stored, those not saved yet, and one if it was canceled."""
    given, canceled = info.outcome, []
    if given is not None and given.kind == OutcomeKind.CANCELED:
        canceled = [IncidentKind.ROLLOUT_CANCELED.incident(given.detail, at=info.finished or info.used)]
    return [*info.incidents, *owed, *canceled]


def is_complete(incidents: Sequence[Incident]) -> bool:
    """Whether none of a session's incidents reports missing data."""
    return not any(incident.hole for incident in incidents)


def worth_object(info: SessionInfo, owed: Sequence[Incident]) -> dict[str, Any]:
    """Write as JSON values what a session is worth to a trainer. `owed` are incidents that the store could not save yet."""
    incidents = incidents_of(info, owed)
    outcome = outcome_of(info.outcome, incidents, info.latest, over=info.state is not SessionStage.OPEN)
    complete = is_complete(incidents)
    return {"complete": complete, **outcome_object(outcome, valid=complete and outcome.ok)}


def outcome_object(outcome: Outcome, *, valid: bool) -> dict[str, Any]:
    """Write an outcome as JSON values."""
    return {"outcome": outcome.kind, "outcome_detail": outcome.detail, "valid": valid}


def count_incidents(incidents: Sequence[Incident]) -> dict[str, int]:
    """Count incidents by kind."""
    return dict(Counter(incident.kind for incident in incidents))


def weights_of(sequences: Sequence[TokenSequence]) -> tuple[float, ...]:
    """Return each sequence's share of the trainable tokens of all; 0 if nothing can be trained."""
    trainable = [sequence.trainable for sequence in sequences]
    total = sum(trainable)
    return tuple(n / total if total else 0.0 for n in trainable)


def figures_of_sequences(
    turns: Sequence[Turn],
    incidents: Sequence[Incident],
    sequences: Sequence[TokenSequence],
    drift: DriftFigures | None,
    announced: Sequence[Announced],
) -> Figures:
    """Count the turns, tokens and incidents of a rollout from its sequences. If its records are torn, there are turns without sequences."""
    return figures_of(
        turns,
        incidents,
        sequences=len(sequences),
        tokens=sum(len(sequence.token_ids) for sequence in sequences),
        sampled=sum(span.turn.completion_tokens for sequence in sequences for span in sequence.turns),
        trainable=sum(sequence.trainable for sequence in sequences),
        versions=count_versions((turn for sequence in sequences for turn in sequence.trained), announced),
        drift=drift,
    )


def figures_of(
    turns: Sequence[Turn],
    incidents: Sequence[Incident],
    *,
    sequences: int,
    tokens: int,
    sampled: int,
    trainable: int,
    versions: VersionCounts,
    drift: DriftFigures | None = None,
) -> Figures:
    """Count the turns, tokens and incidents of a rollout.

    Args:
        turns: all its turns.
        incidents: all its incidents.
        sequences: number of sequences.
        tokens: number of tokens of all sequences.
        sampled: number of tokens that were sampled.
        trainable: number of tokens with mask 1.
        versions: their policy versions.
        drift: its drift, if that was measured.
    """
    return Figures(
        calls=len({turn.call for turn in turns}),
        turns=len(turns),
        sequences=sequences,
        trainable_tokens=trainable,
        masked_tokens=tokens - trainable,
        untrainable_tokens=sampled - trainable,
        matches=dict(Counter(turn.match for turn in turns)),
        forgiven=dict(Counter(rule for turn in turns for rule in turn.applied_rules)),
        incidents=count_incidents(incidents),
        versions=versions.versions,
        mixed_tokens=versions.mixed,
        oldest_version=versions.oldest,
        newest_version=versions.newest,
        version_order=versions.order,
        drift=drift,
    )


def _drift_figures(built: Sequence[TokenSequence], records: Records) -> DriftFigures:
    spliced = [turn.id for turn in records.turns if turn.match not in {"root", "plain"}]
    measured = [records.drift[turn] for turn in spliced if turn in records.drift]
    costs = [_text_only_cost(sequence, records.drift) for sequence in built]
    known = [cost for cost in costs if cost is not None]
    all_known = len(known) == len(costs)
    return DriftFigures(
        measured=len(measured),
        drifted=sum(bool(one.sites) for one in measured),
        tokens=sum(one.tokens for one in measured),
        causes=dict(Counter(site.cause for one in measured for site in one.sites)),
        unmeasured=dict(Counter(records.unmeasured.values())),
        text_only_sequences=sum(pieces for pieces, _ in known) if all_known else None,
        trainable_tokens_lost=sum(lost for _, lost in known) if all_known else None,
    )


def _text_only_cost(sequence: TokenSequence, drift: Mapping[str, Drift]) -> tuple[int, int] | None:
    """See `text_only_cost`."""
    steps = [MeasuredTurn(span.completion[0], span.completion[1], drift.get(span.turn.id)) for span in sequence.turns]
    return text_only_cost(sequence.token_ids, sequence.loss_mask, steps)


def text_only_cost(token_ids: Sequence[int], loss_mask: Sequence[int], steps: Sequence[MeasuredTurn]) -> tuple[int, int] | None:
    """Compute what plain rendering of every prompt would have cost a sequence.

    Returns:
        The number of sequences that it would have become, and its trainable tokens after the first break. `None` if the drift of a
        turn was not measured.
    """
    broken = break_points(token_ids, steps)
    if broken is None:
        return None
    kept = steps[broken[0] - 1].completion if broken else len(token_ids)
    return 1 + len(broken), sum(loss_mask[kept:])

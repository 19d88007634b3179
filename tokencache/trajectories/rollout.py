"""Rollouts: what a trainer takes home of one session, before it is put into any format.

The sequences with their labels and weights, what each turn had been asked, and the figures of the whole. Everything is
computed from records that are already there; the formats (`formats`) only write it down.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from tokencache.core.context import Context, whole_contexts
from tokencache.core.drift import Drift, MeasuredTurn, breaks
from tokencache.core.lineage import TokenSequence, sequences
from tokencache.core.turn import Tokens, Turn
from tokencache.store.base import Incident, SessionInfo


class Records(msgspec.Struct, frozen=True):
    """A session as it is stored; `owed` are incidents that the store could not take yet, `contexts` are packed.

    `drift` holds what was measured, by turn; of a turn that should have been and was not, `unmeasured` has the reason.
    """

    info: SessionInfo
    turns: Sequence[Turn]
    tokens: Mapping[str, Tokens]
    contexts: Mapping[str, bytes]
    owed: Sequence[Incident] = ()
    drift: Mapping[str, Drift] = {}
    unmeasured: Mapping[str, str] = {}


class DriftFigures(msgspec.Struct, frozen=True):
    """Drift avoided, as far as it was measured.

    Attributes:
        measured: turns whose prompt the proxy put together, and that was compared with a plain rendering of its messages;
            `drifted`: of them, those that differ.
        tokens: how many of their prompts' tokens a plain rendering would not have had.
        causes: how many sites there are of each cause.
        unmeasured: how many turns could not be measured, by reason.
        text_only_sequences: how many sequences the rollout would have fallen into if every prompt were rendered plainly.
        trainable_tokens_lost: trainable tokens of each sequence from there on where it would first have broken: what
            a trainer loses that keeps one contiguous piece of each. Both are `None` where not every turn was measured.
    """

    measured: int
    drifted: int
    tokens: int
    causes: dict[str, int]
    unmeasured: dict[str, int] = {}
    text_only_sequences: int | None = None
    trainable_tokens_lost: int | None = None


class Figures(msgspec.Struct, frozen=True):
    """A rollout in figures.

    Attributes:
        calls: model calls that brought a turn; `turns` are more where a call had several choices.
        trainable_tokens: tokens with mask 1; `masked_tokens`: all others in the sequences.
        untrainable_tokens: of those, tokens that were sampled, and whose log probabilities are missing.
        matches, forgiven, incidents: how many turns, or incidents, of each kind.
        drift: `None` where nothing was measured.
    """

    calls: int
    turns: int
    sequences: int
    trainable_tokens: int
    masked_tokens: int
    untrainable_tokens: int
    matches: dict[str, int]
    forgiven: dict[str, int]
    incidents: dict[str, int]
    drift: DriftFigures | None = None


class Rollout(msgspec.Struct, frozen=True):
    """One session, ready to be written down.

    Attributes:
        complete: nothing that the model said, or may have said, is missing; `incidents` say what is.
        weights: one for each sequence: its share of the rollout's trainable tokens. They add up to 1 (or are all 0 where
            nothing can be trained), so that a rollout counts once however many sequences it fell into: the mean over a
            sequence's tokens, times its weight, summed, is the mean over the rollout's tokens.
        contexts: for each turn the messages of its request, whole; none for a turn whose request is not kept (media).
    """

    session: str
    complete: bool
    sealed: bool
    created: float
    incidents: tuple[Incident, ...]
    sequences: tuple[TokenSequence, ...]
    weights: tuple[float, ...]
    contexts: Mapping[str, Context]
    drift: Mapping[str, Drift]
    figures: Figures


def rollout(records: Records) -> Rollout:
    """Put a session's rollout together.

    A call that is under way counts as an incident: what it says is not here yet. Records that are torn are reported,
    not raised: the trainer must see that the session is incomplete.
    """
    info, turns = records.info, records.turns
    incidents = incidents_of(info, records.owed)
    built: list[TokenSequence] = []
    contexts: dict[str, Context] = {}
    try:
        built = sequences(turns, records.tokens)
        contexts = whole_contexts(turns, records.contexts)
    except (KeyError, ValueError) as why:
        incidents.append(Incident("torn-record", f"{type(why).__name__}: {why}", hole=True, at=time.time()))
    trainable = [sequence.trainable for sequence in built]
    total = sum(trainable)
    return Rollout(
        session=info.id,
        complete=is_complete(incidents),
        sealed=info.sealed,
        created=info.created,
        incidents=tuple(incidents),
        sequences=tuple(built),
        weights=tuple(n / total if total else 0.0 for n in trainable),
        contexts=contexts,
        drift=records.drift,
        figures=_figures(turns, built, incidents, records),
    )


def incidents_of(info: SessionInfo, owed: Sequence[Incident]) -> list[Incident]:
    """All there is to say about a session; a call that is under way, or whose proxy died, counts as an incident."""
    return [*info.incidents, *owed, *(_open(call.call, call.since) for call in info.open_calls)]


def is_complete(incidents: Sequence[Incident]) -> bool:
    """Whether nothing is missing of a session of which this is all there is to say."""
    return not any(incident.hole for incident in incidents)


def _open(call: str, since: float) -> Incident:
    return Incident("call-open", "the call has begun and not ended: it is under way, or its proxy died", hole=True, call=call, at=since)


def _figures(turns: Sequence[Turn], built: Sequence[TokenSequence], incidents: Sequence[Incident], records: Records) -> Figures:
    trainable = sum(sequence.trainable for sequence in built)
    sampled = sum(span.turn.completion_tokens for sequence in built for span in sequence.turns)
    return Figures(
        calls=len({turn.call for turn in turns}),
        turns=len(turns),
        sequences=len(built),
        trainable_tokens=trainable,
        masked_tokens=sum(len(sequence.token_ids) for sequence in built) - trainable,
        untrainable_tokens=sampled - trainable,
        matches=dict(Counter(turn.match for turn in turns)),
        forgiven=dict(Counter(rule for turn in turns for rule in turn.forgiven)),
        incidents=dict(Counter(incident.kind for incident in incidents)),
        drift=_drift_figures(built, records) if records.drift or records.unmeasured else None,
    )


def _drift_figures(built: Sequence[TokenSequence], records: Records) -> DriftFigures:
    spliced = [turn.id for turn in records.turns if turn.match not in {"root", "plain"}]
    measured = [records.drift[turn] for turn in spliced if turn in records.drift]
    costs = [_text_only(sequence, records.drift) for sequence in built]
    known = [cost for cost in costs if cost is not None]
    whole = len(known) == len(costs)
    return DriftFigures(
        measured=len(measured),
        drifted=sum(bool(one.sites) for one in measured),
        tokens=sum(one.tokens for one in measured),
        causes=dict(Counter(site.cause for one in measured for site in one.sites)),
        unmeasured=dict(Counter(records.unmeasured.values())),
        text_only_sequences=sum(pieces for pieces, _ in known) if whole else None,
        trainable_tokens_lost=sum(lost for _, lost in known) if whole else None,
    )


def _text_only(sequence: TokenSequence, drift: Mapping[str, Drift]) -> tuple[int, int] | None:
    """Into how many sequences a plain rendering breaks this one, and its trainable tokens from the first break on."""
    steps = [MeasuredTurn(span.completion[0], span.completion[1], drift.get(span.turn.id)) for span in sequence.turns]
    broken = breaks(sequence.token_ids, steps)
    if broken is None:
        return None
    kept = steps[broken[0] - 1].completion if broken else len(sequence.token_ids)
    return 1 + len(broken), sum(sequence.loss_mask[kept:])

"""Leaves out parts of a rollout: by length (`lengths`), lag (`versions`) and model, what no trainer can use, and what failed."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable

import msgspec

from tokencache.core.lineage import TokenSequence
from tokencache.core.session import Reward
from tokencache.core.turn import TurnMark
from tokencache.trajectories.lengths import LIMITS, MOST, Lengths
from tokencache.trajectories.placeholders import TurnOrigin, are_unplaced, with_sampled_placeholders
from tokencache.trajectories.rollout import Rollout, figures_of_sequences, weights_of, with_versions
from tokencache.trajectories.values import ModelFigures, OverlongFigures, PlaceholderFigures, StaleFigures
from tokencache.trajectories.versions import LagLimit

_Report = ModelFigures | OverlongFigures | PlaceholderFigures | StaleFigures


def limit(rollout: Rollout, lengths: Lengths) -> Rollout:
    """Apply limits to the sequences of a rollout.

    Weights and figures are those of the sequences that remain, except that `figures.drift` describes the whole rollout.
    """
    limited = (_limited(sequence, lengths) for sequence in rollout.sequences)
    kept = [with_versions(one, rollout.announced) for one in limited if one is not None]
    left = {span.turn.id for sequence in kept for span in sequence.turns}
    trainable = sum(sequence.trainable for sequence in kept)
    overlong = OverlongFigures(
        policy=lengths.overlong,
        limits={name: value for name in LIMITS if (value := getattr(lengths, name)) < MOST},
        dropped=len(rollout.sequences) - len(kept),
        cut=sum(sequence.overlong == "cut" for sequence in kept),
        masked=sum(sequence.overlong == "masked" for sequence in kept),
        trainable_tokens_lost=rollout.figures.trainable_tokens - trainable,
        turns=[span.turn.id for sequence in rollout.sequences for span in sequence.turns if span.turn.id not in left],
    )
    if not (overlong.dropped or overlong.cut or overlong.masked):
        return msgspec.structs.replace(rollout, figures=msgspec.structs.replace(rollout.figures, overlong=overlong))
    return _only(rollout, kept, overlong=overlong)


def limit_lag(rollout: Rollout, most: LagLimit) -> Rollout:
    """Leave out the sequences whose trainable tokens lag more than that behind the current policy version, or whose lag is not known.

    A sequence without trainable tokens stays: it is context. Weights and figures are those of the sequences that remain.
    """
    lags = {sequence.id: most.lag(sequence.versions, sequence.trainable) for sequence in rollout.sequences}
    kept = [sequence for sequence in rollout.sequences if (own := lags[sequence.id]) is not None and own <= most.most]
    lost = [sequence for sequence in rollout.sequences if sequence not in kept]
    unknown = sum(lags[sequence.id] is None for sequence in lost)
    stale = StaleFigures(
        max_lag=most.most,
        current=most.current,
        dropped=len(lost) - unknown,
        unknown=unknown,
        trainable_tokens_lost=sum(sequence.trainable for sequence in lost),
        turns=[span.turn.id for sequence in lost for span in sequence.turns],
    )
    return _only(rollout, kept, stale=stale)


def only_model(rollout: Rollout, model: str) -> Rollout:
    """Leave out the sequences of all models but one. Weights and figures are those of the sequences that remain."""
    return _of_models(rollout, model, lambda sequence: sequence.model == model)


def without_untrained_models(rollout: Rollout) -> Rollout:
    """Leave out the sequences of models that are not trained: their ids may not even be in the vocabulary of the policy.

    They stay if somebody selected their model (`only_model`).
    """
    if rollout.figures.models is not None:
        return rollout
    return _of_models(rollout, "", lambda one: any(TurnMark.NOT_TRAINABLE not in span.turn.marks for span in one.turns))


def _of_models(rollout: Rollout, selected: str, keeps: Callable[[TokenSequence], bool]) -> Rollout:
    lost = [sequence for sequence in rollout.sequences if not keeps(sequence)]
    if not (lost or selected):
        return rollout
    report = ModelFigures(
        selected=selected,
        dropped=dict(Counter(sequence.model for sequence in lost)),
        trainable_tokens_lost=sum(sequence.trainable for sequence in lost),
        turns=[span.turn.id for sequence in lost for span in sequence.turns],
    )
    return _only(rollout, [sequence for sequence in rollout.sequences if keeps(sequence)], models=report)


def without_placeholders(rollout: Rollout) -> Rollout:
    """Let no trainer use placeholders of images for which it has no image (`placeholders`).

    Sequences in which the model sampled some are left out. Those with images whose places are not known are masked: their placeholders
    would be trained as text. Weights and figures are those of the sequences that remain.
    """
    tainted = _tainted(rollout.sequences)
    lost = [sequence for sequence in rollout.sequences if any(span.turn.id in tainted for span in sequence.turns)]
    kept = [sequence for sequence in rollout.sequences if sequence not in lost]
    unplaced = [one for one in kept if are_unplaced(one.media, (span.turn.marks for span in one.turns))]
    if not (lost or unplaced):
        return rollout
    report = PlaceholderFigures(
        dropped=len(lost),
        trainable_tokens_lost=sum(sequence.trainable for sequence in (*lost, *unplaced)),
        turns=[span.turn.id for sequence in lost for span in sequence.turns],
        masked=len(unplaced),
    )
    return _only(rollout, [_masked(one) if one in unplaced else one for one in kept], placeholders=report)


def without_training(rollout: Rollout) -> Rollout:
    """Let a trainer learn nothing from an invalid rollout: its tokens have mask 0, and it has no reward. A valid one stays as it is."""
    if rollout.valid:
        return rollout
    return msgspec.structs.replace(_only(rollout, [_masked(one) for one in rollout.sequences]), reward=Reward())


def _masked(sequence: TokenSequence) -> TokenSequence:
    """Let nothing of a sequence be trained."""
    size = len(sequence.token_ids)
    mask, logprobs = [0] * size, [0.0] * size
    none = {"versions": {}, "mixed_tokens": 0, "oldest_version": "", "newest_version": ""}
    return msgspec.structs.replace(sequence, loss_mask=mask, logprobs=logprobs, **none)


def _tainted(sequences: Iterable[TokenSequence]) -> set[str]:
    """Return the ids of the turns that have a sampled placeholder, in their reply or in their prompt."""
    return with_sampled_placeholders(
        TurnOrigin(span.turn.id, span.turn.parent, [anchor.turn for anchor in span.turn.anchors], span.turn.marks)
        for sequence in sequences
        for span in sequence.turns
    )


def _marked(sequence: TokenSequence, tainted: Collection[str]) -> TokenSequence:
    """Mark some turns of a sequence as those with a sampled placeholder."""
    if all(span.turn.id not in tainted for span in sequence.turns):
        return sequence
    turns = []
    for span in sequence.turns:
        marks = (*span.turn.marks, TurnMark.SAMPLED_PLACEHOLDER) if span.turn.id in tainted else span.turn.marks
        turns.append(msgspec.structs.replace(span, turn=msgspec.structs.replace(span.turn, marks=marks)))
    return msgspec.structs.replace(sequence, turns=turns)


def _only(rollout: Rollout, kept: list[TokenSequence], **reports: _Report) -> Rollout:
    """Return a rollout with some sequences only. `reports` go into its figures.

    A turn that repeats a sampled placeholder of a turn that is left out gets its mark: nothing else shows it any more.
    """
    if tainted := _tainted(rollout.sequences) - _tainted(kept):
        kept = [_marked(sequence, tainted) for sequence in kept]
    turns = [span.turn for sequence in kept for span in sequence.turns]
    old = rollout.figures
    figures = figures_of_sequences(turns, rollout.incidents, kept, old.drift, rollout.announced)
    earlier = {"overlong": old.overlong, "stale": old.stale, "placeholders": old.placeholders, "models": old.models}
    figures = msgspec.structs.replace(figures, **earlier)
    return msgspec.structs.replace(
        rollout,
        sequences=tuple(kept),
        weights=weights_of(kept),
        figures=msgspec.structs.replace(figures, **reports),
    )


def _limited(sequence: TokenSequence, lengths: Lengths) -> TokenSequence | None:
    """Apply limits to a sequence; `None` if it is left out."""
    allowed = lengths.allowed_end(sequence)
    if len(sequence.token_ids) <= allowed:
        return sequence
    if lengths.overlong == "mask":
        return msgspec.structs.replace(_masked(sequence), overlong="masked")
    turns = [span for span in sequence.turns if span.completion[1] <= allowed]
    end = turns[-1].completion[1] if turns else 0
    if lengths.overlong == "drop" or end <= sequence.response_start:
        return None
    return msgspec.structs.replace(
        sequence,
        token_ids=sequence.token_ids[:end],
        loss_mask=sequence.loss_mask[:end],
        logprobs=sequence.logprobs[:end],
        turns=turns,
        overlong="cut",
        experts=[msgspec.structs.replace(part, end=min(part.end, end - 1)) for part in sequence.experts if part.start < end - 1],
        media=tuple(medium for medium in sequence.media if medium.start < end),
    )

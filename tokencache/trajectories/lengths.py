"""Limits the length of sequences, before a rollout is written in a format.

A limit never changes a token that stays: each kept row begins as recorded and ends after a whole turn. Each sampled token is still trained
at most once. What was left out or masked is reported in `figures.overlong` of the rollout, and as the label `overlong` of the sequence.
`complete` does not change: it describes the recording.

What happens to a sequence that is longer than a limit:

========  ============================================================================================================
`drop`    it is left out
`cut`     it ends after its last whole turn that fits. Without such a turn, or without a sampled token before it, it is left out
`mask`    it stays whole, so it stays too long. None of its tokens is trained: mask 0 and log probability 0.0
========  ============================================================================================================
"""

from collections.abc import Mapping
from typing import TypedDict

import msgspec

from tokencache.core.lineage import TokenSequence
from tokencache.errors import HarnessError
from tokencache.trajectories.rollout import Rollout, figures_of_sequences, weights_of
from tokencache.trajectories.values import OverlongFigures

POLICIES = ("drop", "cut", "mask")
LIMITS = {
    "max_length": "Tokens that a sequence may have.",
    "max_prompt_length": "Tokens that a sequence may have before its first sampled token.",
    "max_response_length": "Tokens that a sequence may have from its first sampled token on.",
}
"""The names of the limits and what they count."""

_MOST = 2**31


class LengthOptions(TypedDict, total=False):
    """Limits for the length of sequences, as options. A limit that is `None` does not apply. With a limit, `overlong` is required."""

    max_length: int | None
    max_prompt_length: int | None
    max_response_length: int | None
    overlong: str | None


class Lengths(msgspec.Struct, frozen=True):
    """Limits for the length of sequences, in tokens, and what happens to longer ones: `overlong` is one of `POLICIES`."""

    overlong: str
    max_length: int = _MOST
    max_prompt_length: int = _MOST
    max_response_length: int = _MOST

    def allowed_end(self, sequence: TokenSequence) -> int:
        """Return the number of tokens after which a sequence must end: 0 if its prompt is too long."""
        start = sequence.response_start
        return min(self.max_length, start + self.max_response_length) if start <= self.max_prompt_length else 0


def lengths_of(given: Mapping[str, str]) -> Lengths | None:
    """Read limits from query parameters; `None` if there are none.

    Raises:
        HarnessError: a limit is not a positive number, `overlong` is not a policy, or only one of them is given.
    """
    limits = {name: _limit(name, given[name]) for name in LIMITS if given.get(name)}
    policy = given.get("overlong", "")
    if not limits and not policy:
        return None
    if not limits:
        raise HarnessError(f"overlong needs a limit: {', '.join(LIMITS)}", param="overlong")
    if policy not in POLICIES:
        raise HarnessError(f"with a maximum length, overlong must be one of: {', '.join(POLICIES)}", param="overlong")
    return Lengths(policy, **limits)


def parameters_of(options: LengthOptions) -> dict[str, str]:
    """Return the query parameters for options."""
    return {name: str(value) for name, value in options.items() if value is not None}


def _limit(name: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 0 < int(value[:12]) <= _MOST:
        raise HarnessError(f"{name} must be a number from 1 to {_MOST}", param=name)
    return int(value)


def limit(rollout: Rollout, lengths: Lengths) -> Rollout:
    """Apply limits to the sequences of a rollout.

    Weights and figures are those of the sequences that remain, except that `figures.drift` describes the whole rollout.
    """
    kept = [one for sequence in rollout.sequences if (one := _limited(sequence, lengths)) is not None]
    left = {span.turn.id for sequence in kept for span in sequence.turns}
    trainable = sum(sequence.trainable for sequence in kept)
    overlong = OverlongFigures(
        policy=lengths.overlong,
        limits={name: value for name in LIMITS if (value := getattr(lengths, name)) < _MOST},
        dropped=len(rollout.sequences) - len(kept),
        cut=sum(sequence.overlong == "cut" for sequence in kept),
        masked=sum(sequence.overlong == "masked" for sequence in kept),
        trainable_tokens_lost=rollout.figures.trainable_tokens - trainable,
        turns=[span.turn.id for sequence in rollout.sequences for span in sequence.turns if span.turn.id not in left],
    )
    if not (overlong.dropped or overlong.cut or overlong.masked):
        return msgspec.structs.replace(rollout, figures=msgspec.structs.replace(rollout.figures, overlong=overlong))
    turns = [span.turn for sequence in kept for span in sequence.turns]
    figures = figures_of_sequences(turns, rollout.incidents, kept, rollout.figures.drift)
    return msgspec.structs.replace(
        rollout,
        sequences=tuple(kept),
        weights=weights_of(kept),
        figures=msgspec.structs.replace(figures, overlong=overlong),
    )


def _limited(sequence: TokenSequence, lengths: Lengths) -> TokenSequence | None:
    """Apply limits to a sequence; `None` if it is left out."""
    allowed = lengths.allowed_end(sequence)
    size = len(sequence.token_ids)
    if size <= allowed:
        return sequence
    if lengths.overlong == "mask":
        return msgspec.structs.replace(sequence, loss_mask=[0] * size, logprobs=[0.0] * size, overlong="masked")
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
    )

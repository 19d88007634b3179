"""Splits each sequence into a prompt and a response: one training sample, in the form that most trainers need.

The prompt is everything before the first sampled token of the sequence; what a fork shares before its own replies is prompt. The response
is the rest: replies, tool results and the template tokens between them. The response mask is 1 for tokens that the policy sampled in this
sequence. All other tokens have mask 0 and log probability 0.0; verl, SkyRL, TRL, slime and Tinker write them the same way.

Facts for which a trainer has no field are exported as *labels* under the single name `tokencache`, so that they cannot be mistaken for a
field of the trainer. A reward that was not given is absent or `None`, never 0. So is the reward of an invalid rollout, whose rows all have
mask 0 (`limiting.without_training`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from tokencache.core.finish import Ending, ending
from tokencache.core.lineage import TokenSequence
from tokencache.trajectories.formats.native import incident_object, labels_object, outline_object, reward_object, span_object
from tokencache.trajectories.rollout import Rollout, outcome_object

TURN_LABELS = (
    "turn",
    "call",
    "match",
    "reason",
    "forgiven",
    "prompt",
    "completion",
    "prompt_tokens",
    "completion_tokens",
    "prefix_hash",
    "completion_hash",
    "logprobs_hash",
    "finish_reason",
    "model",
    "harness",
    "weight_versions",
    "version_source",
    "prompt_version",
    "forced",
    "sampling",
    "replaced",
    "logprob_kind",
    "experts",
    "marks",
    "reward",
)
"""The members of a turn in the native format that the labels repeat."""


class Row(NamedTuple):
    """One sequence as prompt and response.

    `response_ids`, `response_mask` and `response_logprobs` have one entry for each token of the response. The response is empty if nothing
    was sampled. `ending` is how the last turn ended, or `length` if later turns were cut off. `reward` is that of the sequence, otherwise
    that of the session, and `None` if neither was given. `labels` are JSON values.
    """

    sequence: TokenSequence
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    ending: Ending
    reward: float | None
    labels: dict[str, Any]


class ExportedTokens(NamedTuple):
    """The tokens of a row in a file: of prompt and response, and mask and log probabilities of the response."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]


class ExportedRow(NamedTuple):
    """A row in a file, as its format reads it back for `verify`: its labels, and its tokens, if they stand in one sequence."""

    labels: Mapping[str, Any]
    tokens: ExportedTokens | None = None


def rows_of(rollout: Rollout) -> list[Row]:
    """Return the sequences of a rollout as rows, in order."""
    return [_row(rollout, sequence, weight) for sequence, weight in zip(rollout.sequences, rollout.weights, strict=True)]


def session_object(rollout: Rollout) -> dict[str, Any]:
    """Write the facts about the whole rollout, which formats add to its rows."""
    return {
        "session": rollout.session,
        "complete": rollout.complete,
        **outcome_object(rollout.outcome, valid=rollout.valid),
        "state": rollout.stage,
        **reward_object(rollout.reward),
        **labels_object(rollout.labels),
        "incidents": [incident_object(incident) for incident in rollout.incidents],
        "figures": msgspec.to_builtins(rollout.figures),
    }


def _row(rollout: Rollout, sequence: TokenSequence, weight: float) -> Row:
    ids = sequence.token_ids
    at, last = sequence.response_start, sequence.turns[-1].turn
    turns = (span_object(span, rollout.reward) for span in sequence.turns)
    return Row(
        sequence=sequence,
        prompt_ids=ids[:at],
        response_ids=ids[at:],
        response_mask=sequence.loss_mask[at:],
        response_logprobs=sequence.logprobs[at:],
        ending="length" if sequence.overlong == "cut" else ending(last.finish_reason, stopped=last.stopped),
        reward=rollout.sequence_reward(sequence),
        labels={
            "session": rollout.session,
            "complete": rollout.complete,
            **outcome_object(rollout.outcome, valid=rollout.valid),
            **labels_object(rollout.labels),
            "session_reward": rollout.reward.reward,
            "reward_components": rollout.reward.components,
            **outline_object(sequence, weight, rollout.reward),
            "turns": [{name: turn[name] for name in TURN_LABELS} for turn in turns],
        },
    )

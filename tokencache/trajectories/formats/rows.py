"""Rows: a sequence as one training sample, the way most trainers want it.

A trainer that grew up with one question and one answer takes a *prompt* and a *response*. Of a whole conversation the
prompt is everything before the sequence's first sampled token, and the response all behind it: replies, tool results and
what the template put between them. The mask over the response says which of its tokens the policy sampled here; all others
(mask 0) have log probability 0.0, as verl, SkyRL, TRL, slime and Tinker write it themselves.

What a trainer has no field for travels as *labels*, always under the one name `tokencache`, so that nothing of ours is
mistaken for something of theirs. Rewards are not ours to give: they are absent or `None`, never 0.
"""

from typing import Any, Literal, NamedTuple

import msgspec

from tokencache.core.lineage import TokenSequence
from tokencache.core.turn import Turn
from tokencache.trajectories.formats.native import incident_object, outline_object, span_object
from tokencache.trajectories.rollout import Rollout

Ending = Literal["stop", "length", "abort"]

OF_TURN = (
    "turn",
    "call",
    "match",
    "reason",
    "forgiven",
    "prompt",
    "completion",
    "finish_reason",
    "model",
    "harness",
    "weight_versions",
    "sampling",
    "replaced",
    "logprob_kind",
    "experts",
    "marks",
)
"""What the labels say of each turn; the names are the native format's."""


class Row(NamedTuple):
    """One sequence as prompt and response.

    `response_ids`, `response_mask` and `response_logprobs` have one entry per token of the response. Where nothing was
    sampled the response is empty. `ending` is how the last turn ended, `labels` are JSON values.
    """

    sequence: TokenSequence
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    ending: Ending
    labels: dict[str, Any]


def rows_of(rollout: Rollout) -> list[Row]:
    """Lay out a rollout's sequences as rows, in their order."""
    return [_row(rollout, sequence, weight) for sequence, weight in zip(rollout.sequences, rollout.weights, strict=True)]


def session_object(rollout: Rollout) -> dict[str, Any]:
    """What is to be said once of a rollout, beside its rows."""
    return {
        "session": rollout.session,
        "complete": rollout.complete,
        "incidents": [incident_object(incident) for incident in rollout.incidents],
        "figures": msgspec.to_builtins(rollout.figures),
    }


def _row(rollout: Rollout, sequence: TokenSequence, weight: float) -> Row:
    ids = sequence.token_ids
    at = next((span.completion[0] for span in sequence.turns if span.turn.completion_tokens), len(ids))
    return Row(
        sequence=sequence,
        prompt_ids=ids[:at],
        response_ids=ids[at:],
        response_mask=sequence.loss_mask[at:],
        response_logprobs=sequence.logprobs[at:],
        ending=ending(sequence.turns[-1].turn),
        labels={
            "session": rollout.session,
            "complete": rollout.complete,
            **outline_object(sequence, weight),
            "turns": [_turn_labels(span_object(span)) for span in sequence.turns],
        },
    )


def _turn_labels(turn: dict[str, Any]) -> dict[str, Any]:
    return {name: turn[name] for name in OF_TURN}


def ending(turn: Turn) -> Ending:
    """Say how a reply ended, in the words of an engine.

    A chat completion says `tool_calls` where the engine said `stop`; trainers that mask or punish whatever is not `stop`
    (SkyRL's `apply_overlong_filtering`) mean the engine's word. Whatever else is no normal end is an `abort`.
    """
    if turn.finish_reason == "length":
        return "length"
    return "stop" if turn.finish_reason in ("stop", "tool_calls", "function_call") else "abort"

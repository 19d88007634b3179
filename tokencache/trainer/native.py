"""The native trajectory format: the sequences of a session, ready for a loss.

    {"session": "r1", "complete": true, "incidents": [], "sequences": [{"id", "parent", "start", "reason",
      "token_ids": [...], "loss_mask": [...], "logprobs": [...],
      "turns": [{"turn", "prompt": [0, 812], "completion": [812, 940], "finish_reason", "model", "match", …}]}]}

`complete` is false whenever something that the model said, or may have said, is missing: the incidents say what.
"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from tokencache.core.lineage import SequenceTurn, TokenSequence, sequences
from tokencache.core.turn import Tokens, Turn
from tokencache.store.contract import Incident, SessionInfo


def trajectory(info: SessionInfo, turns: Sequence[Turn], tokens: dict[str, Tokens], owed: Sequence[Incident] = ()) -> dict[str, Any]:
    """Build a session's trajectory; `owed` are incidents that the store could not take yet.

    A call that is under way counts as an incident: what it says is not here yet. Records that are torn are reported,
    not raised: the trainer must see that the session is incomplete.
    """
    incidents = [*info.incidents, *owed, *(_open(call.call, call.since) for call in info.open_calls)]
    built: list[TokenSequence] = []
    try:
        built = sequences(turns, tokens)
    except (KeyError, ValueError) as why:
        incidents.append(Incident("torn-record", f"{type(why).__name__}: {why}", hole=True, at=time.time()))
    return {
        "session": info.id,
        "complete": not any(incident.hole for incident in incidents),
        "sealed": info.sealed,
        "incidents": [incident_object(incident) for incident in incidents],
        "sequences": [sequence_object(sequence) for sequence in built],
    }


def _open(call: str, since: float) -> Incident:
    return Incident("call-open", "the call has begun and not ended: it is under way, or its proxy died", hole=True, call=call, at=since)


def incident_object(incident: Incident) -> dict[str, Any]:
    """An incident as JSON, every member there."""
    return {name: getattr(incident, name) for name in ("kind", "detail", "hole", "call", "turn", "at")}


def sequence_object(sequence: TokenSequence) -> dict[str, Any]:
    """A sequence as JSON."""
    return {
        "id": sequence.id,
        "parent": sequence.parent,
        "start": sequence.start,
        "reason": sequence.reason,
        "token_ids": sequence.token_ids,
        "loss_mask": sequence.loss_mask,
        "logprobs": sequence.logprobs,
        "turns": [_span(span) for span in sequence.turns],
    }


def _span(span: SequenceTurn) -> dict[str, Any]:
    return {**turn_object(span.turn), "prompt": span.prompt, "completion": span.completion}


def turn_object(turn: Turn) -> dict[str, Any]:
    """A turn as JSON, without its tokens."""
    return {
        "turn": turn.id,
        "call": turn.call,
        "match": turn.match,
        "reason": turn.reason,
        "parent": turn.parent,
        "origin": turn.origin,
        "forgiven": turn.forgiven,
        "anchors": [msgspec.to_builtins(anchor) for anchor in turn.anchors],
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "finish_reason": turn.finish_reason,
        "stop_reason": turn.stop_reason,
        "model": turn.model,
        "weight_versions": turn.versions,
        "sampling": turn.sampling,
        "dialect": turn.dialect,
        "stream": turn.stream,
        "choice": turn.choice,
        "messages": turn.messages,
        "tools": turn.tools,
        "marks": turn.marks,
        "created": turn.created,
        "seconds": turn.seconds,
        "served": {
            "content": turn.served.content,
            "reasoning": turn.served.reasoning,
            "tool_calls": [msgspec.to_builtins(call) for call in turn.served.calls],
        },
    }

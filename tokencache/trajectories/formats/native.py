"""Writes rollouts in the native format: all sequences of a session with everything that is recorded about them.

    {"session": "r1", "complete": true, "outcome": "ok", "outcome_detail": "", "valid": true, "state": "sealed",
     "incidents": [], "figures": {…},
     "reward": 0.5, "reward_components": {…}, "group": "prompt-7", "metadata": {…}, "tags": [...],
     "sequences": [{"id", "parent", "root", "start", "reason", "continued", "tools", "model", "weight", "reward",
        "token_ids": [...], "loss_mask": [...], "logprobs": [...],
        "turns": [{"turn", "prompt": [0, 812], "completion": [812, 940], "finish_reason", "model", "match", …}]}],
     "links": [{"kind": "delegation", "sources": [turn], "turn", "message", "evidence"}]}

`complete` is false if something that the model sampled, or may have sampled, is missing. The incidents describe it. `valid` is
whether it is complete and its `outcome` is `ok`.
`trajectories.values` reads this format.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokencache.core.context import Context, added_messages
from tokencache.core.drift import Drift
from tokencache.core.incidents import Incident
from tokencache.core.lineage import SequenceTurn, TokenSequence
from tokencache.core.session import Labels, Reward
from tokencache.core.turn import Turn
from tokencache.trajectories.links import links
from tokencache.trajectories.rollout import Rollout, outcome_object

_NESTING = 100
"""Depth to spare: a message may be so deeply nested that it can be read by itself, but not inside an export."""


def native(rollout: Rollout) -> dict[str, Any]:
    """Write a rollout in the native format, without the text of its requests."""
    return {
        "session": rollout.session,
        "complete": rollout.complete,
        **outcome_object(rollout.outcome, valid=rollout.valid),
        "state": rollout.stage,
        "sealed": rollout.sealed,
        "created": rollout.created,
        **reward_object(rollout.reward),
        **labels_object(rollout.labels),
        "incidents": [incident_object(incident) for incident in rollout.incidents],
        "figures": msgspec.to_builtins(rollout.figures),
        "sequences": [
            sequence_object(sequence, weight, rollout.drift, rollout.reward)
            for sequence, weight in zip(rollout.sequences, rollout.weights, strict=True)
        ],
        "links": [msgspec.to_builtins(link) for link in links(rollout.lines, rollout.contexts)],
    }


def native_with_text(rollout: Rollout) -> dict[str, Any]:
    """Write a rollout in the native format, each turn with its request (`values.TurnRequest`). No message is written twice."""
    written = native(rollout)
    turns = {span.turn.id: span.turn for sequence in rollout.sequences for span in sequence.turns}
    for sequence in written["sequences"]:
        for turn in sequence["turns"]:
            turn["request"] = _request_object(turns[turn["turn"]], turns, rollout.contexts)
    return written


def _request_object(turn: Turn, turns: Mapping[str, Turn], contexts: Mapping[str, Context]) -> dict[str, Any] | None:
    """Write the request of a turn; `None` if it is not kept. The base of a request may be missing: a limit of length left it out."""
    context = contexts.get(turn.id)
    if context is None:
        return None
    if turn.context_base in turns and turn.context_base in contexts:
        base, shared, own = turn.context_base, turn.context_shared, Context(list(added_messages(context, turn)))
    else:
        base, shared, own = None, 0, context
    named = {"tools": own.tools, "members": own.members, "kwargs": own.kwargs}
    return {"base": base, "shared": shared, "messages": _readable(own.messages), **named}


def _readable(messages: Sequence[msgspec.Raw]) -> list[msgspec.Raw | None]:
    """Replace messages that are not valid JSON by `None`."""
    return [raw if _is_json(raw) else None for raw in messages]


def _is_json(raw: msgspec.Raw) -> bool:
    try:
        msgspec.json.decode(_NESTING * b"[" + bytes(raw) + _NESTING * b"]")
    except (ValueError, RecursionError):
        return False
    return True


def reward_object(reward: Reward) -> dict[str, Any]:
    """Write the reward of a session as a whole."""
    return {"reward": reward.reward, "reward_components": reward.components}


def labels_object(labels: Labels) -> dict[str, Any]:
    """Write what the trainer noted about a session."""
    return {"group": labels.group, "metadata": labels.metadata, "tags": labels.tags}


def sequence_object(sequence: TokenSequence, weight: float, drift: Mapping[str, Drift], reward: Reward) -> dict[str, Any]:
    """Write a sequence with its tokens and turns. `drift` holds the measured drift, by turn id."""
    return {
        **outline_object(sequence, weight, reward),
        "token_ids": sequence.token_ids,
        "loss_mask": sequence.loss_mask,
        "logprobs": sequence.logprobs,
        "turns": [span_object(span, reward, drift.get(span.turn.id)) for span in sequence.turns],
    }


def incident_object(incident: Incident) -> dict[str, Any]:
    """Write an incident with all its members, defaults included."""
    return {name: getattr(incident, name) for name in ("kind", "detail", "hole", "call", "turn", "at", "status")}


def outline_object(sequence: TokenSequence, weight: float, reward: Reward) -> dict[str, Any]:
    """Write the labels of a sequence, without its tokens and turns."""
    return {
        "id": sequence.id,
        "parent": sequence.parent,
        "root": sequence.root,
        "start": sequence.start,
        "reason": sequence.reason,
        "continued": sequence.continued,
        "tools": sequence.tools,
        "model": sequence.model,
        "weight": weight,
        "tokens": len(sequence.token_ids),
        "trainable_tokens": sequence.trainable,
        "overlong": sequence.overlong,
        "reward": reward.sequences.get(sequence.id),
        "experts": [msgspec.to_builtins(part) for part in sequence.experts],
        "media": [msgspec.to_builtins(medium) for medium in sequence.media],
        "versions": sequence.versions,
        "mixed_tokens": sequence.mixed_tokens,
        "oldest_version": sequence.oldest_version,
        "newest_version": sequence.newest_version,
    }


def span_object(span: SequenceTurn, reward: Reward, drift: Drift | None = None) -> dict[str, Any]:
    """Write a turn with the ranges of its tokens in its sequence."""
    return {**turn_object(span.turn, reward, drift), "prompt": span.prompt, "completion": span.completion}


def turn_object(turn: Turn, reward: Reward, drift: Drift | None = None) -> dict[str, Any]:
    """Write a turn without its tokens. `reward` is that of its session. `drift` is `None` if it was not measured."""
    return {
        "turn": turn.id,
        "call": turn.call,
        "match": turn.match,
        "reason": turn.reason,
        "parent": turn.parent,
        "origin": turn.origin,
        "forgiven": turn.applied_rules,
        "anchors": [msgspec.to_builtins(anchor) for anchor in turn.anchors],
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "prefix_hash": turn.prefix_hash.hex(),
        "completion_hash": turn.completion_hash.hex(),
        "logprobs_hash": turn.logprobs_hash.hex(),
        "finish_reason": turn.finish_reason,
        "engine_reason": turn.engine_reason,
        "stop_reason": turn.stop_reason,
        "stopped": turn.stopped,
        "model": turn.model,
        "harness": turn.harness,
        "agent": None if turn.agent is None else msgspec.structs.asdict(turn.agent),
        "weight_versions": turn.versions,
        "version_source": turn.version_source,
        "prompt_version": turn.prompt_version,
        "pieces": [msgspec.to_builtins(piece) for piece in turn.pieces],
        "again": turn.again,
        "kv": turn.kv,
        "forced": turn.forced,
        "begun": turn.begun,
        "sampling": turn.sampling,
        "replaced": turn.replaced,
        "logprob_kind": turn.logprob_kind,
        "experts": turn.experts,
        "experts_start": turn.experts_start,
        "dialect": turn.dialect,
        "stream": turn.stream,
        "choice": turn.choice,
        "messages": turn.messages,
        "tools": turn.tools,
        "marks": turn.marks,
        "created": turn.created,
        "seconds": turn.seconds,
        "drift": None if drift is None else drift_object(drift),
        "served": {
            "content": turn.served.content,
            "reasoning": turn.served.reasoning,
            "tool_calls": [msgspec.to_builtins(call) for call in turn.served.calls],
        },
        "reward": reward.turns.get(turn.id),
    }


def drift_object(drift: Drift) -> dict[str, Any]:
    """Write the drift of a turn. `at` is the first token that differs, or `None`."""
    return {
        "rendered": drift.rendered,
        "tokens": drift.tokens,
        "at": drift.at,
        "sites": [msgspec.to_builtins(site) for site in drift.sites],
    }

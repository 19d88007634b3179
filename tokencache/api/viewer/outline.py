"""The outline: a session's turns as a tree of sequences, with its figures.

It is made of the turns alone: who opens a page does not want a hundred thousand tokens yet. The sequences are those that a
trainer is given (`core.lineage.lines`), and so are the figures (`trajectories.rollout.Figures`), less the drift.
"""

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from tokencache.core.lineage import lineages
from tokencache.core.turn import Turn
from tokencache.store.base import Incident, SessionInfo
from tokencache.trajectories.formats.native import incident_object
from tokencache.trajectories.rollout import incidents_of, is_complete

_PREVIEW = 160
"""Characters of a reply that stand beside its turn."""


def outline(info: SessionInfo, turns: Sequence[Turn], owed: Sequence[Incident]) -> dict[str, Any]:
    """Write a session's outline as JSON values; `owed` are incidents that the store could not take yet."""
    incidents = incidents_of(info, owed)
    found = lineages(turns)
    number = {line[0].id: n for n, line in enumerate(found)}
    place = {turn.id: n for n, line in enumerate(found) for turn in line}
    parents = {turn.parent for turn in turns}
    return {
        "session": info.id,
        "created": info.created,
        "used": info.used,
        "sealed": info.sealed,
        "complete": is_complete(incidents),
        "open_calls": [msgspec.to_builtins(call) for call in info.open_calls],
        "incidents": [incident_object(incident) for incident in incidents],
        "figures": _figures(turns, found, incidents),
        "sequences": [_sequence(number[line[0].id], line, place, parents) for line in found],
        "turns": _turns(turns, place),
    }


def scored(turn: Turn) -> bool:
    """Whether the tokens that a turn sampled have log probabilities, so that they can be trained."""
    return "no-logprobs" not in turn.marks


def _figures(turns: Sequence[Turn], found: Sequence[Sequence[Turn]], incidents: Sequence[Incident]) -> dict[str, Any]:
    trainable = sum(turn.completion_tokens for turn in turns if scored(turn))
    return {
        "calls": len({turn.call for turn in turns}),
        "turns": len(turns),
        "sequences": len(found),
        "trainable_tokens": trainable,
        "masked_tokens": sum(line[-1].prompt_tokens + line[-1].completion_tokens for line in found) - trainable,
        "untrainable_tokens": sum(turn.completion_tokens for turn in turns) - trainable,
        "matches": dict(Counter(turn.match for turn in turns)),
        "forgiven": dict(Counter(rule for turn in turns for rule in turn.forgiven)),
        "incidents": dict(Counter(incident.kind for incident in incidents)),
    }


def _sequence(number: int, line: Sequence[Turn], place: dict[str, int], parents: AbstractSet[str | None]) -> dict[str, Any]:
    first, last = line[0], line[-1]
    from_turn = first.parent or first.origin
    return {
        "number": number,
        "id": first.id,
        "parent": place.get(from_turn) if from_turn else None,
        "from_turn": from_turn if from_turn in place else None,
        "start": "branch" if first.match == "continue" else first.match,
        "reason": first.reason,
        "continued": any(turn.id in parents for turn in line),
        "tools": first.tools,
        "turns": len(line),
        "tokens": last.prompt_tokens + last.completion_tokens,
        "trainable_tokens": sum(turn.completion_tokens for turn in line if scored(turn)),
    }


def _turns(turns: Sequence[Turn], place: dict[str, int]) -> list[dict[str, Any]]:
    parents = {turn.parent for turn in turns}
    went_on = {turn.place for turn in turns if turn.id in parents and turn.place}
    return [
        {
            "number": number,
            "id": turn.id,
            "call": turn.call,
            "sequence": place[turn.id],
            "match": turn.match,
            "reason": turn.reason,
            "parent": turn.parent,
            "origin": turn.origin,
            "forgiven": turn.forgiven,
            "anchors": len(turn.anchors),
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": turn.completion_tokens,
            "finish_reason": turn.finish_reason,
            "marks": turn.marks,
            "replaced": sorted(turn.replaced),
            "model": turn.model,
            "harness": turn.harness,
            "dialect": turn.dialect,
            "stream": turn.stream,
            "choice": turn.choice,
            "messages": turn.messages,
            "tools": turn.tools,
            "created": turn.created,
            "seconds": turn.seconds,
            "continued": turn.id in parents,
            # another answer to the very same conversation was gone on from
            "thrown_away": turn.id not in parents and turn.place in went_on,
            "says": preview(turn),
        }
        for number, turn in enumerate(turns)
    ]


def preview(turn: Turn) -> str:
    """The beginning of what a turn said: its text, or else its calls, or else its reasoning."""
    served = turn.served
    text = " ".join((served.content or "").split())
    calls = " ".join(f"{call.name}({' '.join(call.arguments.split())})" for call in served.calls)
    said = " ".join(filter(None, (text, calls))) or " ".join((served.reasoning or "").split())
    return said if len(said) <= _PREVIEW else said[:_PREVIEW] + "…"

"""The outline of one session: its turns as a tree of sequences, with figures and incidents. It is made without reading tokens."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from tokencache.api.reader import state_object
from tokencache.core.incidents import Incident, failed_calls
from tokencache.core.lineage import lineages
from tokencache.core.session import Reward
from tokencache.core.turn import UNTRAINED, Turn
from tokencache.core.weights import Announced
from tokencache.store.base import SessionInfo
from tokencache.trajectories.formats.native import incident_object
from tokencache.trajectories.rollout import current_reward, figures_of, incidents_of
from tokencache.trajectories.versions import count_versions

_PREVIEW = 160
"""Characters of a reply that are shown next to its turn."""
_NAMES = ("id", "call", "match", "reason", "parent", "origin", "finish_reason", "marks", "model", "harness", "dialect")
_FIGURES = ("prompt_tokens", "completion_tokens", "stream", "choice", "messages", "tools", "created", "seconds")
"""Members of a turn that are shown as they are."""


def outline(info: SessionInfo, turns: Sequence[Turn], owed: Sequence[Incident], announced: Sequence[Announced] = ()) -> dict[str, Any]:
    """Write the outline of a session as JSON values.

    The sequences and the figures (except drift) are those of an export. `turns` are in the order in which they were recorded, `owed` are
    incidents that the store could not save yet, and `announced` the policy versions that trainers announced, the newest last.
    """
    reward, outdated = current_reward(info, turns)
    owed = [*owed, *outdated]
    incidents = incidents_of(info, owed)
    found = lineages(turns)
    sequence_of = {turn.id: number for number, line in enumerate(found) for turn in line}
    parents = {turn.parent for turn in turns}
    figures = figures_of(
        turns,
        incidents,
        sequences=len(found),
        tokens=sum(line[-1].prompt_tokens + line[-1].completion_tokens for line in found),
        sampled=sum(turn.completion_tokens for turn in turns),
        trainable=sum(turn.chosen_tokens for turn in turns if is_scored(turn)),
        versions=count_versions((turn for turn in turns if is_scored(turn)), announced),
    )
    return {
        **state_object(info, owed),
        "incidents": [incident_object(incident) for incident in incidents],
        "figures": {name: value for name, value in msgspec.to_builtins(figures).items() if name != "drift"},
        "sequences": [_sequence(number, line, sequence_of, parents, reward) for number, line in enumerate(found)],
        "turns": _turns(turns, sequence_of, parents),
        "failed_calls": [incident_object(one) for one in failed_calls(incidents, {turn.call for turn in turns})],
    }


def is_scored(turn: Turn) -> bool:
    """Whether the sampled tokens of a turn can be trained: they have log probabilities, and are the policy's."""
    return UNTRAINED.isdisjoint(turn.marks)


def _sequence(
    number: int, line: Sequence[Turn], sequence_of: Mapping[str, int], parents: AbstractSet[str | None], reward: Reward
) -> dict[str, Any]:
    first, last = line[0], line[-1]
    from_turn = first.parent or first.origin
    return {
        "number": number,
        "id": first.id,
        "parent": sequence_of.get(from_turn) if from_turn else None,
        "from_turn": from_turn if from_turn in sequence_of else None,
        "start": "branch" if first.match == "continue" else first.match,
        "reason": first.reason,
        "continued": any(turn.id in parents for turn in line),
        "tools": first.tools,
        "model": first.model,
        "turns": len(line),
        "tokens": last.prompt_tokens + last.completion_tokens,
        "trainable_tokens": sum(turn.chosen_tokens for turn in line if is_scored(turn)),
        "reward": reward.sequences.get(first.id),
    }


def _turns(turns: Sequence[Turn], sequence_of: Mapping[str, int], parents: AbstractSet[str | None]) -> list[dict[str, Any]]:
    continued_places = {turn.position_key for turn in turns if turn.id in parents and turn.position_key}
    return [
        {
            "number": number,
            "sequence": sequence_of[turn.id],
            **{name: getattr(turn, name) for name in _NAMES + _FIGURES},
            "forgiven": turn.applied_rules,
            "anchors": len(turn.anchors),
            "replaced": sorted(turn.replaced),
            "agent": None if turn.agent is None else msgspec.structs.asdict(turn.agent),
            "continued": turn.id in parents,
            # the harness continued with another answer to the same conversation
            "thrown_away": turn.id not in parents and turn.position_key in continued_places,
            "says": preview(turn),
        }
        for number, turn in enumerate(turns)
    ]


def preview(turn: Turn) -> str:
    """Return the beginning of a reply: its text and calls, or else its reasoning."""
    served = turn.served
    text = " ".join((served.content or "").split())
    calls = " ".join(f"{call.name}({' '.join(call.arguments.split())})" for call in served.calls)
    shown = " ".join(filter(None, (text, calls))) or " ".join((served.reasoning or "").split())
    return shown if len(shown) <= _PREVIEW else shown[:_PREVIEW] + "…"

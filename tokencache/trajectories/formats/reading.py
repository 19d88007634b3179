"""Reads a rollout back from the native format, so that a file can be converted to any other format without a proxy.

The formats that write messages need an export with text. What they write is then the same as the proxy would have written.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from tokencache.core.context import Context
from tokencache.core.lineage import SequenceTurn, TokenSequence
from tokencache.core.messages import Message
from tokencache.core.outcome import Outcome
from tokencache.core.session import Labels, Reward, SessionStage
from tokencache.core.turn import Turn
from tokencache.core.weights import Announced
from tokencache.trajectories.rollout import Rollout, lines_of
from tokencache.trajectories.values import Sequence, Trajectory, TurnRequest, TurnSpan

_UNREADABLE = msgspec.Raw(b"")
_RENAMED = {"turn": "id", "forgiven": "applied_rules", "weight_versions": "versions"}
_HASHES = ("prefix_hash", "completion_hash", "logprobs_hash")


def read_native(value: Mapping[str, Any]) -> Rollout:
    """Read a native rollout, given as decoded JSON.

    Raises:
        ValueError: it is not a native rollout, or the request of a turn names a base that comes later or is missing.
    """
    trajectory = msgspec.convert(value, Trajectory)
    spans = [turn for sequence in trajectory.sequences for turn in sequence.turns]
    sequences = tuple(map(_sequence, trajectory.sequences))
    return Rollout(
        session=trajectory.session,
        complete=trajectory.complete,
        outcome=Outcome(trajectory.outcome, trajectory.outcome_detail),
        sealed=trajectory.sealed,
        created=trajectory.created,
        incidents=tuple(trajectory.incidents),
        sequences=sequences,
        weights=tuple(sequence.weight for sequence in trajectory.sequences),
        contexts=_contexts({turn.turn: turn.request for turn in spans if turn.request is not None}),
        drift={turn.turn: turn.drift for turn in spans if turn.drift is not None},
        figures=trajectory.figures,
        stage=SessionStage(trajectory.state or ("sealed" if trajectory.sealed else "open")),
        labels=Labels(trajectory.group, trajectory.metadata, tuple(trajectory.tags)),
        reward=Reward(
            trajectory.reward,
            trajectory.reward_components,
            {turn.turn: turn.reward for turn in spans if turn.reward is not None},
            {sequence.id: sequence.reward for sequence in trajectory.sequences if sequence.reward is not None},
        ),
        announced=[Announced(name, 0, 0.0) for name in trajectory.figures.version_order],
        lines=lines_of(sequences),
    )


def has_text(value: Mapping[str, Any]) -> bool:
    """Whether a native rollout, given as decoded JSON, was exported with text. Without turns there is no text to miss."""
    return all("request" in turn for sequence in value["sequences"] for turn in sequence["turns"])


def _sequence(sequence: Sequence) -> TokenSequence:
    members = {name: getattr(sequence, name) for name in TokenSequence.__struct_fields__ if name != "turns"}
    members["model"] = sequence.model or (sequence.turns[0].model if sequence.turns else "")
    return TokenSequence(**members, turns=[SequenceTurn(_turn(span), span.prompt, span.completion) for span in sequence.turns])


def _turn(span: TurnSpan) -> Turn:
    """Make the turn of a span. It has all members that formats read; what only matching needs is not exported."""
    given = {name: getattr(span, name) for name in TurnSpan.__struct_fields__}
    members = {_RENAMED.get(name, name): value for name, value in given.items() if _RENAMED.get(name, name) in Turn.__struct_fields__}
    members |= {name: bytes.fromhex(given[name]) for name in _HASHES}
    members |= {name: tuple(members[name]) for name in ("applied_rules", "anchors", "marks", "pieces", "forced")}
    served = Message("assistant", span.served.content, span.served.reasoning, tuple(span.served.tool_calls))
    request = span.request or TurnRequest()
    return Turn(**(members | {"served": served, "context_base": request.base, "context_shared": request.shared}))


def _contexts(requests: Mapping[str, TurnRequest]) -> dict[str, Context]:
    """Put the whole requests of turns together, by turn id."""
    whole: dict[str, Context] = {}
    for name in requests:
        line = [name]
        while (base := requests[line[-1]].base) is not None and base not in whole:
            if base not in requests or base in line:
                raise ValueError(f"the request of turn {line[-1]} begins with that of turn {base}, which is missing")
            line.append(base)
        for turn in reversed(line):
            whole[turn] = _whole(requests[turn], whole)
    return whole


def _whole(request: TurnRequest, whole: Mapping[str, Context]) -> Context:
    own = [_UNREADABLE if message is None else msgspec.Raw(msgspec.json.encode(message)) for message in request.messages]
    if request.base is None:
        tools = None if request.tools is None else msgspec.Raw(msgspec.json.encode(request.tools))
        return Context(
            own, tools, {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in request.members.items()}, request.kwargs
        )
    base = whole[request.base]
    return msgspec.structs.replace(base, messages=[*base.messages[: request.shared], *own])

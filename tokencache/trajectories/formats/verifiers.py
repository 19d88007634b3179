"""Writes rollouts for verifiers: a `Trace`, on which prime-rl trains.

A trace is a graph of messages. Each node holds the tokens that its message adds. Each path from a root to a leaf is a branch, which is one
training sample: the `token_ids`, `mask` and `logprobs` of its nodes, concatenated. Nothing is tokenized again. prime-rl makes one
`TrainingSample` of each branch and gives all of them the advantage of the trace, so `prime-rl` needs no separate format.

Each sequence becomes a separate branch, with its context repeated at mask 0. Branches could share common nodes, but the version of prime-rl
decides whether a shared node is trained once or twice (`trace_to_samples`: in each branch at 004274e; later only in the first branch that
holds it). Without shared nodes every version trains each sampled token once.

The positions of single messages in a prompt are not recorded. So the node of an answer carries all new tokens of its prompt, with mask 0,
and the message nodes before it carry none. verifiers does the same if its renderer returns no spans (`graph.py`).

The URL of an image is `media:<sha256>`: the bytes are in the files of `tokencache media`.

`ok` is true if the rollout is valid (prime-rl trains on no other), `errors` says why it is not, `is_completed` is true if its session is
finished or sealed. `rewards` has the reward of the session under `reward`, and is empty if none was given; `metrics` has its components.
A trace that verifiers writes to disk (`to_record`) rounds log probabilities to four decimals; this one does not.

Source: verifiers 0.4.0, `verifiers/v1/trace.py` (`WireTrace`, `Branch`), `graph.py` (`MessageNode`), `types.py`; prime-rl,
`src/prime_rl/orchestrator/trajectories.py`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tokencache.core.finish import FinishReason
from tokencache.core.incidents import Incident
from tokencache.core.lineage import TokenSequence
from tokencache.core.messages import Message
from tokencache.core.outcome import Outcome
from tokencache.core.session import SessionStage
from tokencache.core.turn import Turn, TurnMark
from tokencache.trajectories.formats.conversation import TurnMessages, chat_content, exchanges, sampled, tools_of, without_messages
from tokencache.trajectories.formats.rows import ExportedRow, Row, rows_of, session_object
from tokencache.trajectories.rollout import Rollout

_IMAGE = 1
"""The type of an image's tokens (verifiers, `Branch.mm_token_type_ids`)."""
FINISHED: dict[str, str | None] = {
    FinishReason.STOP: "stop",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.FUNCTION_CALL: None,
    FinishReason.LENGTH: "length",
    FinishReason.REPETITION: None,
    FinishReason.CONTENT_FILTER: None,
    FinishReason.ABORT: None,
    FinishReason.ERROR: None,
}
"""Finish reasons as verifiers writes them: it knows three of them, and `None`."""


def verifiers(rollout: Rollout) -> dict[str, Any]:
    """Write a rollout as a trace."""
    nodes: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    tools: dict[str, dict[str, Any]] = {}
    branches = []
    for row in rows_of(rollout):
        sequence = row.sequence
        found = exchanges(sequence, rollout.contexts)
        offered = [_tool(tool) for tool in tools_of(sequence, rollout.contexts)]
        tools |= {tool["name"]: tool for tool in offered}
        root = len(nodes)
        for exchange in found:
            nodes += _nodes(sequence, exchange, root, len(nodes))
            if TurnMark.SHARED not in exchange.turn.marks:
                calls.append(_call(exchange.turn, len(nodes) - 1))
        nodes[root]["tools"] = offered
        branches.append({**row.labels, "wordless": without_messages(found), "leaf": len(nodes) - 1})
    calls.sort(key=lambda call: call["time"]["end"])  # verifiers reads from the last one whether the trace was truncated
    return {
        "version": 1,
        "id": rollout.session,
        "task": {"type": "tokencache", "data": {"id": rollout.session}},
        "agent": {"config": {"model": next((call["model"] for call in calls), None)}},
        "tools": list(tools.values()),
        "nodes": nodes,
        "mm_token_type_id_map": _image_ids(rows_of(rollout)),
        "calls": calls,
        "info": {"tokencache": {**session_object(rollout), "sequences": branches}},
        "rewards": {} if rollout.reward.reward is None else {"reward": {"score": rollout.reward.reward, "weight": 1.0}},
        "metrics": rollout.reward.components,
        "is_completed": rollout.stage is not SessionStage.OPEN,
        "ok": rollout.valid,
        "errors": [_error(incident) for incident in rollout.incidents if incident.hole] + _failure(rollout.outcome),
        "timing": {"start": rollout.created},
    }


def read_verifiers(trace: Mapping[str, Any]) -> list[ExportedRow]:
    """Read the labels of a trace back: its tokens are spread over nodes."""
    return [ExportedRow(trace["info"]["tokencache"])]


def _image_ids(rows: Iterable[Row]) -> dict[str, int]:
    """Map the token id of images to the type "image" (1). verifiers computes `mm_token_type_ids` from it.

    The map is empty without images, and if their tokens have several ids, because some of these may also occur in text.
    """
    inside = {token for row in rows for medium in row.sequence.media for token in row.sequence.token_ids[medium.start : medium.end]}
    return {str(token): _IMAGE for token in inside} if len(inside) == 1 else {}


def _nodes(sequence: TokenSequence, exchange: TurnMessages, root: int, place: int) -> list[dict[str, Any]]:
    """Return the nodes of an exchange. The first one becomes node number `place` of the trace; `root` is the first of its sequence."""
    own = sampled(sequence, exchange.span)
    messages = [*(exchange.messages or ()), exchange.turn.served]
    nodes: list[dict[str, Any]] = [
        {"parent": at - 1 if at > root else None, "message": _message(message), "timestamp": exchange.turn.created}
        for at, message in enumerate(messages, place)
    ]
    nodes[-1] |= {
        "sampled": TurnMark.SHARED not in exchange.turn.marks,
        "token_ids": [*own.added, *own.completion],
        "mask": [False] * len(own.added) + [bool(one) for one in own.mask],
        "logprobs": [value for value, trained in zip(own.logprobs, own.mask, strict=False) if trained],
    }
    return nodes


def _message(message: Message) -> dict[str, Any]:
    written: dict[str, Any] = {"role": message.role, "content": chat_content(message)}
    if message.role == "assistant":
        calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.calls]
        written |= {"content": message.content, "reasoning_content": message.reasoning, "tool_calls": calls or None}
    elif message.role == "tool":
        written["tool_call_id"] = message.answers or ""
    return written


def _call(turn: Turn, node: int) -> dict[str, Any]:
    return {
        "node": node,
        "model": turn.model,
        "sampling": turn.sampling,
        "finish_reason": FINISHED.get(turn.finish_reason or ""),
        "usage": {"prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.completion_tokens},
        "time": {"start": turn.created, "end": turn.created + turn.seconds},
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type", "function")
    inner = tool.get(kind) or {}
    # verifiers has a default for an absent member and refuses `null`.
    return {"type": kind, "name": kind, **{name: value for name, value in inner.items() if value is not None}}


def _failure(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the failure with which a rollout ended, as an error; none if it ended well."""
    return [] if outcome.ok else [{"type": outcome.kind, "message": outcome.detail}]


def _error(incident: Incident) -> dict[str, Any]:
    return {"type": incident.kind, "message": incident.detail}

"""Writes rollouts in the Agent Trajectory Interchange Format of Harbor (format `atif`).

    {"session", "complete", "incidents", "figures",
     "trajectories": [{"schema_version", "session_id", "trajectory_id", "agent", "steps": [...], "extra": {labels}}]}

There is one trajectory for each sequence. All share `session_id`; `trajectory_id` is the id of the sequence. A step is a message of one
side: `system`, `user`, or `agent`. Tool results are the observation of the step that called the tools. An agent step that was sampled in
this sequence has `metrics` with `prompt_token_ids` (the whole prompt), `completion_token_ids` and `logprobs`. Do not train a step without
`logprobs`. A step within which ids were forced (`core.forced`) has none, because a step has no mask.

An image is named by its file, `<sha256>.png`, as `tokencache media` writes it. The format has PNG, JPEG, GIF and WebP. Messages with other
images are left out, and `wordless` names their turns.

If a sequence branched off another one, or took its context from it, that context is marked `is_copied_context`. So are all replies that
this sequence did not sample, and what a fork shares. By the format, such steps are not training data. A branch or a sub-agent is a
separate trajectory, not an entry of `subagent_trajectories`, because the call that delegated to it is not known. `extra.parent` names its
parent.

Source: Harbor's RFC 0001 (`rfcs/0001-trajectory-format.md`), v1.7, and its classes, harbor 0.25.0, `harbor/models/trajectories/`.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from tokencache.core.lineage import TokenSequence
from tokencache.core.media import file_name
from tokencache.core.messages import Message, ToolCall
from tokencache.core.turn import TurnMark
from tokencache.trajectories.formats.conversation import TurnMessages, exchanges, parts_of, sampled, tools_of, without_messages
from tokencache.trajectories.formats.rows import ExportedRow, Row, rows_of, session_object
from tokencache.trajectories.rollout import Rollout

VERSION = "ATIF-v1.7"
"""The oldest version with all members used here (`trajectory_id`, `llm_call_count`), so that older readers can read it."""

_IMAGE_TYPES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
_Types = Mapping[str, str]
"""SHA-256 of an image → its MIME type."""

UNKNOWN = "unknown"
"""The value that Harbor's own agents use for an unknown version (`harbor/agents/base.py`)."""


def atif(rollout: Rollout) -> dict[str, Any]:
    """Write a rollout as trajectories."""
    return {**session_object(rollout), "trajectories": [_trajectory(rollout, row) for row in rows_of(rollout)]}


def read_atif(row: Mapping[str, Any]) -> list[ExportedRow]:
    """Read the labels of one row back: its tokens are spread over steps."""
    return [ExportedRow(row["extra"])]


def _trajectory(rollout: Rollout, row: Row) -> dict[str, Any]:
    sequence = row.sequence
    types = {medium.sha256: medium.media_type for medium in sequence.media}
    found = [_without_other_images(exchange, types) for exchange in exchanges(sequence, rollout.contexts)]
    missing = without_messages(found)
    turns = [exchange.turn for exchange in found]
    own = [turn for turn in turns if TurnMark.SHARED not in turn.marks]
    steps = _steps(sequence, found, types)
    tools = tools_of(sequence, rollout.contexts)
    return {
        "schema_version": VERSION,
        "session_id": rollout.session,
        "trajectory_id": sequence.id,
        "agent": {
            "name": turns[0].harness or UNKNOWN,
            "version": UNKNOWN,
            "model_name": turns[0].model,
            **({"tool_definitions": tools} if tools else {}),
        },
        "steps": steps,
        **({"notes": f"not kept: the messages before the answers of turns {', '.join(missing)}"} if missing else {}),
        "final_metrics": {
            "total_prompt_tokens": sum(turn.prompt_tokens for turn in own),
            "total_completion_tokens": sum(turn.completion_tokens for turn in own),
            "total_steps": len(steps),
        },
        "extra": {**row.labels, "wordless": missing},
    }


def _without_other_images(exchange: TurnMessages, types: _Types) -> TurnMessages:
    """Leave out the messages of an exchange if an image has a type that the format does not have."""
    images = [part for message in exchange.messages or () for part in parts_of(message) if not isinstance(part, str)]
    return exchange if all(types.get(image.sha256) in _IMAGE_TYPES for image in images) else exchange._replace(messages=None)


def _steps(sequence: TokenSequence, found: list[TurnMessages], types: _Types) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    for place, exchange in enumerate(found):
        shared = TurnMark.SHARED in exchange.turn.marks
        copied = shared or (not place and sequence.parent is not None)
        for message in exchange.messages or ():
            _add_message(steps, message, _content(message, types), copied=copied)
        steps.append(_sampled_step(sequence, exchange) | ({"is_copied_context": True} if shared else {}))
    return [{"step_id": place, **step} for place, step in enumerate(steps, 1)]


def _content(message: Message, types: _Types) -> str | list[dict[str, Any]]:
    """Write the content of a message: a text, or parts if it has images."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "source": {"media_type": types[part.sha256], "path": file_name(part.sha256, types[part.sha256])}}
        for part in parts_of(message)
    ] or (message.content or "")


def _add_message(steps: list[dict[str, Any]], message: Message, content: str | list[dict[str, Any]], *, copied: bool) -> None:
    """Add a message of the request: a step, or a result to the step that called the tool."""
    if message.role == "tool":
        called = steps[-1] if steps and message.answers in {call["tool_call_id"] for call in steps[-1].get("tool_calls", ())} else None
        result = {"content": content}
        if called is not None:
            called.setdefault("observation", {"results": []})["results"].append({"source_call_id": message.answers, **result})
            return
        # The last step did not make this call, and the schema does not allow a result for a call of another step.
        step: dict[str, Any] = {"source": "system", "message": "", "observation": {"results": [result]}}
    elif message.role == "assistant":
        step, copied = _agent_step(message), True
    else:
        step = {"source": message.role, "message": content}
    steps.append({**step, "is_copied_context": True} if copied else step)


def _agent_step(message: Message) -> dict[str, Any]:
    """Write an assistant message as a step."""
    step: dict[str, Any] = {"source": "agent", "message": message.content or ""}
    if message.reasoning:
        step["reasoning_content"] = message.reasoning
    if message.calls:
        step["tool_calls"] = [_tool_call(call) for call in message.calls]
    return step


def _sampled_step(sequence: TokenSequence, exchange: TurnMessages) -> dict[str, Any]:
    turn, own = exchange.turn, sampled(sequence, exchange.span)
    metrics: dict[str, Any] = {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "prompt_token_ids": own.prompt,
        "completion_token_ids": own.completion,
        **({"logprobs": own.logprobs} if all(own.mask) and own.logprobs else {}),  # a step is trained as a whole
    }
    return {
        "timestamp": datetime.fromtimestamp(turn.created, UTC).isoformat(),
        "model_name": turn.model,
        **_agent_step(turn.served),
        "metrics": metrics,
        "llm_call_count": 1,
        "extra": {"turn": turn.id, "finish_reason": turn.finish_reason, "marks": turn.marks},
    }


def _tool_call(call: ToolCall) -> dict[str, Any]:
    written: dict[str, Any] = {"tool_call_id": call.id, "function_name": call.name}
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        return {**written, "arguments": arguments}
    return {
        **written,
        "arguments": {},
        "extra": {"arguments": call.arguments},
    }  # the format requires an object

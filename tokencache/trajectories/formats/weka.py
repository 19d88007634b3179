"""Writes a trace as Weka's agentic traces (format `weka`), which aiperf replays (`--custom-dataset-type weka_trace`).

    {"id": "0", "models": ["model-0"], "block_size": 64, "hash_id_scope": "local", "requests": [
      {"t": 0.0, "type": "s", "model": "model-0", "in": 812, "out": 96, "hash_ids": [0, 1, ...], "stop": "tool_use", "api_time": 1.84},
      {"t": 2.57, ..., "stop": "end_turn", "api_time": 0.9, "input_types": ["tool_result"], "think_time": 0.73},
      {"t": 2.6, "type": "subagent", "agent_id": "agent_001", "subagent_type": "sequence", "duration_ms": 900, "total_tokens": 1210,
       "tool_use_count": 1, "status": "completed", "models": ["model-0"], "requests": [...]}]}

A line is a rollout. Its longest sequence is the main agent, together with the calls before it, such as one for a title. Every other
sequence (a branch, a new context, a sub-agent) is a `subagent`: the format has one level of them. `think_time` is the wait before a call;
`tool_result` says that it was for tools. A call of which nothing of this is known has neither. The ids are of full blocks only: a part of
a block is no prefix that the next call extends.

aiperf's other format with block ids, `mooncake_trace`, has no branches, and appends each prompt of a session to a live conversation.

Source: aiperf 0.13.0, `aiperf/dataset/loader/weka_trace.py` and `weka_trace_models.py`. aiperf reads a file or a folder of them, each with
one trace, and gives the same id other tokens in another trace (`local`).
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from tokencache.trajectories.formats.traces import Call, Trace


def weka(trace: Trace) -> Iterator[dict[str, Any]]:
    """Write a trace: one object for each rollout."""
    for session, found in itertools.groupby(trace.calls, lambda call: call.session):
        calls = list(found)
        yield {
            "id": str(session),
            "models": _models(calls),
            "block_size": trace.block_size,
            "hash_id_scope": "local",
            "requests": _entries(calls, trace.block_size),
        }


def _entries(calls: Sequence[Call], block_size: int) -> list[dict[str, Any]]:
    """Write the calls of a rollout in order, those of a sub-agent together."""
    start, by_number = calls[0].begun, {call.number: call for call in calls}
    sequences = defaultdict[int, list[Call]](list)
    for call in calls:
        sequences[call.sequence].append(call)
    main = max(sequences.values(), key=len)[0]
    outer = {call.sequence for call in calls if call.number <= main.number}
    numbers = itertools.count(1)
    return [
        _request(call, by_number, start, block_size)
        if call.sequence in outer
        else _sub_agent(next(numbers), sequences[call.sequence], by_number, start, block_size)
        for call in calls
        if call.sequence in outer or call is sequences[call.sequence][0]
    ]


def _request(call: Call, by_number: dict[int, Call], start: float, block_size: int) -> dict[str, Any]:
    before = [by_number[one.call] for one in call.after]
    return {
        "t": _seconds(call.begun - start),
        "type": "s" if call.stream else "n",
        "model": f"model-{call.model}",
        "in": call.prompt,
        "out": call.completion,
        "hash_ids": list(call.blocks[: call.prompt // block_size]),
        "stop": "tool_use" if call.calls_tools else "end_turn" if call.stopped else "",
        "api_time": _seconds(call.seconds),
        **(
            {
                "input_types": ["tool_result" if any(one.calls_tools for one in before) else "text"],
                "think_time": _seconds(min(one.wait for one in call.after)),
            }
            if before
            else {}
        ),
    }


def _sub_agent(number: int, calls: Sequence[Call], by_number: dict[int, Call], start: float, block_size: int) -> dict[str, Any]:
    begun = calls[0].begun
    return {
        "t": _seconds(begun - start),
        "type": "subagent",
        "agent_id": f"agent_{number:03d}",
        "subagent_type": "sequence",
        "duration_ms": round(max(call.begun + call.seconds - begun for call in calls) * 1000),
        "total_tokens": sum(call.prompt + call.completion for call in calls),
        "tool_use_count": sum(call.calls_tools for call in calls),
        "status": "completed",
        "models": _models(calls),
        "requests": [_request(call, by_number, start, block_size) for call in calls],
    }


def _models(calls: Sequence[Call]) -> list[str]:
    return list(dict.fromkeys(f"model-{call.model}" for call in calls))


def _seconds(value: float) -> float:
    return round(value, 6)

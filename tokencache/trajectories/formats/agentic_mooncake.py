"""Writes a trace as Dynamo's agentic Mooncake rows (format `agentic-mooncake`), for its simulator.

    {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64, "hash_id_scope": "local", "source": {...}}
    {"request_id": "0", "play_id": "0", "session_id": "0", "model": "model-0", "input_length": 812, "output_length": 96,
     "hash_ids": [0, 1, ...], "not_before_ms": 0.0, "recorded_api_time_ms": 1840.2, "dependencies": []}
    {"request_id": "1", ..., "not_before_ms": 0.0,
     "dependencies": [{"request_id": "0", "trigger": "completion", "delay_ms": 730.1, "relation": "sequence"}]}

The first line describes the file, each other line one call. A *play* is a rollout, a *session* one of its sequences. A call without
dependencies begins `not_before_ms` after the first call of the file; any other one `delay_ms` after the replies that its request contains.
The delay of a call after one that called tools is the time that the tools took. The format has no member that tells it from another wait.

Source: the native loader of ai-dynamo-runtime 1.6.1 (`run_mocker_trace_replay`, `trace_format="agentic_mooncake"`); ai-dynamo/aisimulate,
`crates/core/src/replay/loadgen/types.rs` and `prompt.rs`. A block id is the same block in all plays of a file. Dynamo 1.6.1 does not read
the rows of older versions, which have no header, `wait_for` and `tool_wait_ms`.
"""

from collections.abc import Iterator
from typing import Any

from tokencache.trajectories.formats.traces import Trace


def agentic_mooncake(trace: Trace) -> Iterator[dict[str, Any]]:
    """Write a trace: a header, then a row for each call. A row comes after those that it depends on."""
    yield {
        "schema": "dynamo.agentic_mooncake",
        "version": 2,
        "block_size": trace.block_size,
        "hash_id_scope": "local",
        "source": {"format": "tokencache", "digest": f"requests:{len(trace.calls)}"},
    }
    start = min((call.begun for call in trace.calls), default=0.0)
    for call in trace.calls:
        yield {
            "request_id": str(call.number),
            "play_id": str(call.session),
            "session_id": str(call.sequence),
            "model": f"model-{call.model}",
            "input_length": call.prompt,
            "output_length": call.completion,
            "hash_ids": list(call.blocks),
            "not_before_ms": 0.0 if call.after else _ms(call.begun - start),
            "recorded_api_time_ms": _ms(call.seconds),
            "dependencies": [
                {"request_id": str(one.call), "trigger": "completion", "delay_ms": _ms(one.wait), "relation": one.kind}
                for one in call.after
            ],
        }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)

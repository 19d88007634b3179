"""Anthropic Messages: why a reply ended, and what it used."""

from typing import Any

from tokencache.dialects import lenient
from tokencache.dialects.completion_reader import Usage

_FINISHED = {"length": "max_tokens", "content_filter": "refusal"}


def usage_of(usage: Usage) -> dict[str, int]:
    """Count as Anthropic does: what the cache gave or took is no part of `input_tokens`."""
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached - usage.cache_created),
        "cache_creation_input_tokens": usage.cache_created,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def ending(finish: str | None, stop: int | str | None, last: str | None) -> dict[str, Any]:
    """Say why it ended, as vLLM 0.32 says it; `last` are the arguments of the last call.

    A call that a stop string cut short must not run: then the stop string is the reason. An end without a word for it
    (`abort`, `error`) has none here either.
    """
    reason, sequence = _FINISHED.get(finish or ""), None
    if finish in {"stop", "tool_calls"}:
        if isinstance(stop, str) and (last is None or not is_json(last)):
            reason, sequence = "stop_sequence", stop
        else:
            reason = "tool_use" if last is not None or finish == "tool_calls" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}


def is_json(text: str) -> bool:
    """Whether a text is one whole JSON value."""
    try:
        lenient.read(text)
    except (ValueError, RecursionError):
        return False
    return True

"""Anthropic Messages: what is read of a chat completion or its chunks, and how its end and its usage are said."""

from typing import Any

import msgspec

from tokencache.dialects.messages_json import read_json

_FINISHED = {"length": "max_tokens", "content_filter": "refusal"}


class Function(msgspec.Struct):
    """A call's function, or a piece of it."""

    name: str | None = None
    arguments: str | None = None


class Call(msgspec.Struct):
    """A tool call, or a piece of the one with this index."""

    index: int = 0
    id: str | None = None
    function: Function | None = None


class Said(msgspec.Struct):
    """A message or a delta. `reasoning_content` is the name of `reasoning` in older engines."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None

    @property
    def thought(self) -> str:
        """The reasoning, `""` if there is none."""
        return self.reasoning or self.reasoning_content or ""


class Choice(msgspec.Struct):
    """A choice: Messages know only the first."""

    index: int = 0
    message: Said | None = None
    delta: Said | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None
    created_cache_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens, as chat counts them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None

    def said(self) -> dict[str, int]:
        """Count as Anthropic does: what the cache gave or took is no part of `input_tokens`."""
        cached = self.prompt_tokens_details or _Cached()
        read, created = cached.cached_tokens or 0, cached.created_cache_tokens or 0
        return {
            "input_tokens": max(0, self.prompt_tokens - read - created),
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
            "output_tokens": self.completion_tokens or 0,
        }


class Chat(msgspec.Struct):
    """A chat completion or a chunk of one, as far as it is shown; ids and log probabilities are skipped unread."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


CHAT = msgspec.json.Decoder(Chat)


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
        read_json(text)
    except (ValueError, RecursionError):
        return False
    return True

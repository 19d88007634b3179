"""A whole chat completion, written by us: where a reply is said again, or where one ends an episode that the engine had no part in.

Members as vLLM 0.32 writes them; what is said of it in another dialect, or as a stream, is made of this like of the engine's own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tokencache.core.messages import Message

_NEVER = ("refusal", "annotations", "audio", "function_call")
"""Members of OpenAI's that vLLM writes and never fills."""
_MOST_CHOICES = 128
"""Whoever asks for more gets no more from an engine either."""


class WholeChoice(NamedTuple):
    """One choice: its place, its message, how it ended."""

    place: int
    message: Message
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None


def alike(choices: int, message: Message, finish_reason: str) -> list[WholeChoice]:
    """As many choices as were asked for, which all say the same."""
    return [WholeChoice(place, message, finish_reason) for place in range(min(max(choices, 1), _MOST_CHOICES))]


def whole_reply(
    *, call: str, created: float, model: str, choices: Sequence[WholeChoice], prompt_tokens: int, completion_tokens: int
) -> bytes:
    """Write a chat completion (JSON); `created` in seconds since the epoch, `call` makes its id."""
    counts = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + completion_tokens, "completion_tokens": completion_tokens}
    return msgspec.json.encode(
        {
            "id": f"chatcmpl-{call}",
            "object": "chat.completion",
            "created": int(created),
            "model": model,
            "choices": [_choice(one) for one in choices],
            "service_tier": None,
            "usage": {**counts, "prompt_tokens_details": None, "completion_tokens_details": None},
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def _choice(one: WholeChoice) -> dict[str, Any]:
    said = one.message
    calls = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in said.calls]
    message: dict[str, Any] = {"role": "assistant", "content": said.content, **dict.fromkeys(_NEVER)}
    if calls:
        message["tool_calls"] = calls
    return {
        "index": one.place,
        "message": {**message, "reasoning": said.reasoning},
        "logprobs": None,
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
        "token_ids": None,
        "routed_experts": None,
    }

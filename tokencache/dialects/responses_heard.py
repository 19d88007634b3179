"""Responses: what is read of a chat completion, or of a chunk of one; ids and log probabilities are skipped unread."""

from typing import Any

import msgspec


class Function(msgspec.Struct):
    """A tool call's function, or a piece of it."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    """A tool call, or a piece of the one with this `index`; a whole message's have none."""

    index: int | None = None
    id: str | None = None
    function: Function | None = None


class Message(msgspec.Struct):
    """A message, or a delta. `reasoning_content` is what older engines call `reasoning`."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(msgspec.Struct):
    """A choice, whole or a piece of it."""

    index: int = 0
    message: Message | None = None
    delta: Message | None = None
    finish_reason: str | None = None


class _Prompt(msgspec.Struct):
    cached_tokens: int | None = None


class _Completion(msgspec.Struct):
    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """Numbers of tokens, as chat has them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Prompt | None = None
    completion_tokens_details: _Completion | None = None

    def said(self) -> dict[str, Any]:
        """Write them as a response has them (`ResponseUsage`, openai 3.52); vLLM does not count what it put in its cache."""
        taken, given = self.prompt_tokens, self.completion_tokens or 0
        cached = self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details is not None else None
        thought = self.completion_tokens_details.reasoning_tokens if self.completion_tokens_details is not None else None
        return {
            "input_tokens": taken,
            "input_tokens_details": {"cached_tokens": cached or 0, "cache_write_tokens": 0},
            "output_tokens": given,
            "output_tokens_details": {"reasoning_tokens": thought or 0},
            "total_tokens": taken + given,
        }


class Heard(msgspec.Struct):
    """A chat completion or a chunk of one."""

    choices: list[Choice] = []
    usage: Usage | None = None
    created: int = 0
    model: str = ""
    error: Any = None


def hear(data: bytes) -> Heard:
    """Read a completion or a chunk; what cannot be read is an error of the engine's."""
    try:
        return _HEARD.decode(data)
    except (ValueError, RecursionError) as why:
        return Heard(error={"message": f"the engine sent what cannot be read: {why}"})


_HEARD = msgspec.json.Decoder(Heard)

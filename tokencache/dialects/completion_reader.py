"""What the codecs read of a chat completion, or of a chunk of one; ids and log probabilities are skipped unread.

    heard = hear(data)
    heard.choice.said.thought, .content, .called()      what the model thought, said and calls, or the next piece of it
    heard.choice.finish_reason, heard.usage             once it is over
    heard.fault                                         an engine's error in the place of all that

How an end, a usage or an error is said is the dialects' own business.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from tokencache.dialects.gym import GENERATION, LOG_PROBS, PROMPT

Raw = msgspec.Raw

_SERVERS_FAULT = 500


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCallPart(msgspec.Struct):
    """A tool call, or a piece of the one with this `index`; a whole message's have none."""

    index: int | None = None
    id: str | None = None
    function: _Function | None = None

    @property
    def name(self) -> str:
        """The function's name, `""` if this piece has none."""
        return (self.function.name or "") if self.function is not None else ""

    @property
    def arguments(self) -> str:
        """Its arguments, or the next piece of them: the engine's text, whatever it is."""
        return (self.function.arguments or "") if self.function is not None else ""


class Said(msgspec.Struct):
    """A message, or a delta. `reasoning_content` is what older engines call `reasoning`; ids stand on it as `gym` writes them."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPart] | None = None
    prompt_token_ids: Raw = Raw()
    generation_token_ids: Raw = Raw()
    generation_log_probs: Raw = Raw()

    @property
    def thought(self) -> str:
        """The reasoning, `""` if there is none."""
        return self.reasoning or self.reasoning_content or ""

    @property
    def tokens(self) -> dict[str, Raw]:
        """Ids and log probabilities by their names, raw; empty if there are none."""
        found = {PROMPT: self.prompt_token_ids, GENERATION: self.generation_token_ids, LOG_PROBS: self.generation_log_probs}
        return found if all(found.values()) else {}

    def called(self) -> Iterator[tuple[int, ToolCallPart]]:
        """The calls, each with the number by which its pieces are told from others'."""
        for place, call in enumerate(self.tool_calls or ()):
            yield place if call.index is None else call.index, call


class ChoicePart(msgspec.Struct):
    """A choice, whole or a piece of it."""

    index: int = 0
    message: Said | None = None
    delta: Said | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def said(self) -> Said:
        """What is said in it."""
        return self.delta or self.message or Said()


class _Prompt(msgspec.Struct):
    cached_tokens: int | None = None
    created_cache_tokens: int | None = None


class _Completion(msgspec.Struct):
    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """Numbers of tokens, as chat has them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Prompt | None = None
    completion_tokens_details: _Completion | None = None

    @property
    def completion(self) -> int:
        """Of what the model said, reasoning included."""
        return self.completion_tokens or 0

    @property
    def reasoning(self) -> int:
        """Of its reasoning; 0 where the engine does not count it."""
        return (self.completion_tokens_details.reasoning_tokens or 0) if self.completion_tokens_details is not None else 0

    @property
    def cached(self) -> int:
        """Of the prompt, those that a cache gave; 0 where the engine does not count them."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details is not None else 0

    @property
    def cache_created(self) -> int:
        """Of the prompt, those that were put into a cache; vLLM 0.32 does not count them."""
        return (self.prompt_tokens_details.created_cache_tokens or 0) if self.prompt_tokens_details is not None else 0


class CompletionChunk(msgspec.Struct):
    """A chat completion, or a chunk of one."""

    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[ChoicePart] = []
    usage: Usage | None = None
    error: Any = None

    @property
    def choice(self) -> ChoicePart | None:
        """The first choice, which is the only one in every dialect but chat."""
        return next((choice for choice in self.choices if choice.index == 0), None)

    @property
    def fault(self) -> tuple[int, str] | None:
        """The engine's error, if it is one: the HTTP status that belongs to it, and its words."""
        if self.error is None:
            return None
        members = self.error if isinstance(self.error, dict) else {"message": self.error}
        status, message = members.get("code"), members.get("message")
        return (
            status if isinstance(status, int) and not isinstance(status, bool) else _SERVERS_FAULT,
            message if isinstance(message, str) and message else "the engine failed",
        )


_HEARD = msgspec.json.Decoder(CompletionChunk)


def hear(data: bytes) -> CompletionChunk | None:
    """Read a completion or a chunk; `None` if it is none."""
    try:
        return _HEARD.decode(data)
    except (ValueError, RecursionError):
        return None

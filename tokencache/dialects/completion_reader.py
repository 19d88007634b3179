"""Parses chat completions and their chunks for the translated dialects, without token ids and log probabilities.

    completion = read_completion(data)
    completion.choice.reply.thought, .content, .calls()     reasoning, text and tool calls, or the next piece of each
    completion.choice.finish_reason, completion.usage         at the end of the reply
    completion.fault                                          an engine's error instead of a reply

Plain chunks: most events of a stream contain a piece of text, or nothing, and are passed on without parsing.

    data: {"id":…,"object":"chat.completion.chunk","created":…,"model":…,"choices":[{"index":0,"delta":{"content":" and"},
           "logprobs":{"content":[…]},"finish_reason":null,"token_ids":[323]}]}

With the plugin, ids and log probabilities may be packed (`PACKED`), with `null` in the places of both.

A client that requested neither ids nor log probabilities gets the same bytes with `null` for both (`hide_tokens`). If the delta is `{}`,
the client gets nothing: the engine's parsers hold back text (tags, the beginning of calls), and without ids vLLM sends no such chunk. One
regular expression matches the event member by member as vLLM 0.27 to 0.32 writes it, in a sixth of the time of a JSON reader and writer.
Any other event is not plain and gets parsed. `engine.reply` parses plain chunks later, many at once. Translated dialects need only the
text (`text_piece`): the expression finds it, and a JSON reader decodes that string.
"""

import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import msgspec

from tokencache.dialects.gym import GENERATION, LOG_PROBS, PROMPT

Raw = msgspec.Raw
PACKED = "tokencache"
"""The member of a reply with the packed ids of its prompt, and of a choice with packed ids and log probabilities (`packed_replies`)."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCallPart(msgspec.Struct):
    """A tool call, or a piece of the call with this `index`; in a whole message calls have no index."""

    index: int | None = None
    id: str | None = None
    function: _Function | None = None

    @property
    def name(self) -> str:
        """The function's name, `""` if this piece has none."""
        return (self.function.name or "") if self.function is not None else ""

    @property
    def arguments(self) -> str:
        """The arguments, or the next piece of them: the engine's text, which may not be JSON."""
        return (self.function.arguments or "") if self.function is not None else ""


class ReplyMessage(msgspec.Struct):
    """A message, or a delta. Older engines write `reasoning_content` instead of `reasoning`; `gym` adds the ids."""

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
        """Ids and log probabilities by member name, raw; empty without them."""
        found = {PROMPT: self.prompt_token_ids, GENERATION: self.generation_token_ids, LOG_PROBS: self.generation_log_probs}
        return found if all(found.values()) else {}

    def calls(self) -> Iterator[tuple[int, ToolCallPart]]:
        """The calls, each with the number that the pieces of one call share."""
        for position, call in enumerate(self.tool_calls or ()):
            yield position if call.index is None else call.index, call


class ChoicePart(msgspec.Struct):
    """A choice, whole or a piece of it."""

    index: int = 0
    message: ReplyMessage | None = None
    delta: ReplyMessage | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def reply(self) -> ReplyMessage:
        """The message or delta; an empty one if there is neither."""
        return self.delta or self.message or ReplyMessage()


class _Prompt(msgspec.Struct):
    cached_tokens: int | None = None
    created_cache_tokens: int | None = None


class _Completion(msgspec.Struct):
    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """Numbers of tokens of a chat completion."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Prompt | None = None
    completion_tokens_details: _Completion | None = None

    @property
    def completion(self) -> int:
        """Tokens of the reply, reasoning included."""
        return self.completion_tokens or 0

    @property
    def reasoning(self) -> int:
        """Tokens of the reasoning; 0 if the engine does not count them."""
        return (self.completion_tokens_details.reasoning_tokens or 0) if self.completion_tokens_details is not None else 0

    @property
    def cached(self) -> int:
        """Tokens of the prompt that came from a cache; 0 if the engine does not count them."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details is not None else 0

    @property
    def cache_created(self) -> int:
        """Tokens of the prompt that were put into a cache; vLLM 0.32 does not count them."""
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
        """The first choice, the only one in every dialect but chat."""
        return next((choice for choice in self.choices if choice.index == 0), None)

    @property
    def fault(self) -> tuple[int, str] | None:
        """The engine's error as HTTP status and message; `None` if it sent none."""
        if self.error is None:
            return None
        members = self.error if isinstance(self.error, dict) else {"message": self.error}
        status, message = members.get("code"), members.get("message")
        return (
            status if isinstance(status, int) and not isinstance(status, bool) else HTTPStatus.INTERNAL_SERVER_ERROR,
            message if isinstance(message, str) and message else "the engine failed",
        )


_COMPLETION = msgspec.json.Decoder(CompletionChunk)


def read_completion(data: bytes) -> CompletionChunk | None:
    """Parse a completion or a chunk; `None` if it is neither."""
    try:
        return _COMPLETION.decode(data)
    except (ValueError, RecursionError):
        return None


_TEXT = rb'"[^"\\\x00-\x1f]*+(?:\\[ -~][^"\\\x00-\x1f]*+)*+"'
"""A JSON string. It contains no line breaks, so a match is one event and not two."""
_LOGPROB = rb'\{"token":' + _TEXT + rb',"logprob":-?+[0-9.eE+-]++,"bytes":(?:\[[0-9,]*+\]|null),"top_logprobs":\[\]\}'
_CONTENT = rb'\{"(content|reasoning)":(' + _TEXT + rb")\}"
_ARGUMENTS = rb'\{"content":null,"tool_calls":\[\{"index":([0-9]++),"function":\{"arguments":(' + _TEXT + rb")\}\}\]\}"
_PLAIN = re.compile(
    rb'(data: \{"id":' + _TEXT + rb',"object":"chat\.completion\.chunk","created":[0-9]++,"model":' + _TEXT + rb","
    rb'"choices":\[\{"index":([0-9]++),"delta":(?:' + _CONTENT + rb"|" + _ARGUMENTS + rb'|\{\}),"logprobs":)'
    rb'(?:null|\{"content":\[' + _LOGPROB + rb"(?:," + _LOGPROB + rb')*+\]\}),"finish_reason":null,"token_ids":'
    rb'(?:\[[0-9,]*+\]|null,"' + PACKED.encode() + rb'":\{"ids":"[A-Za-z0-9+/=]*+","logprobs":"[A-Za-z0-9+/=]*+"\})\}\]\}\n\n'
)
_HIDDEN = b'null,"finish_reason":null,"token_ids":null}]}\n\n'
"""Replaces log probabilities and ids, with the bytes between and after them."""
CHOICE_BEGIN, CHOICE_END = b'{"index":', -len(b"]}\n\n")
"""With what the choice of a plain chunk begins, and where it ends in the event. Nothing before it has these bytes: JSON escapes quotes."""
_STRING = msgspec.json.Decoder(str)


def hide_tokens(event: bytes) -> bytes | None:
    """Remove log probabilities and ids from the event of a plain chunk.

    Returns:
        The event, `b""` if it contains nothing else; `None` for an event that is not a plain chunk.
    """
    found = _PLAIN.fullmatch(event)
    if found is None:
        return None
    return found[1] + _HIDDEN if found[4] or found[6] else b""


def text_piece(event: bytes) -> tuple[bytes, int, str] | None:
    """Return the text of a plain chunk of the first choice.

    Returns:
        The kind of text (`b"content"`, `b"reasoning"`, `b"arguments"` of a call, or `b""` for none), the call's number, and the text.
        `None` for every other event, and for text that is not JSON.
    """
    found = _PLAIN.fullmatch(event)
    if found is None or found[2] != b"0":
        return None
    kind, text, call, arguments = found.group(3, 4, 5, 6)
    try:
        if kind:
            return kind, 0, _STRING.decode(text)
        return (b"arguments", int(call), _STRING.decode(arguments)) if call else (b"", 0, "")
    except ValueError:
        return None

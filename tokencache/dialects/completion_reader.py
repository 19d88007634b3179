"""What the codecs read of a chat completion, or of a chunk of one; ids and log probabilities are skipped unread.

    heard = read_completion(data)
    heard.choice.said.thought, .content, .called()      what the model thought, said and calls, or the next piece of it
    heard.choice.finish_reason, heard.usage             once it is over
    heard.fault                                         an engine's error in the place of all that

How an end, a usage or an error is said is the dialects' own business.


Plain chunks: nearly all of a stream says a piece of text, or nothing, and need not be read to be passed on.

    data: {"id":…,"object":"chat.completion.chunk","created":…,"model":…,"choices":[{"index":0,"delta":{"content":" and"},
           "logprobs":{"content":[…]},"finish_reason":null,"token_ids":[323]}]}

Of such an event a harness that asked for neither sees the same bytes with `null` for its log probabilities and ids. Where the delta is
`{}` it sees nothing: there the engine's parsers hold text back (tags, the heads of calls), and without the ids no chunk would have
come. One regular expression finds it, member by member as vLLM (0.27 to 0.32) writes it, in a sixth of the time that a JSON reader and
writer need; whatever is written in any other way is no plain chunk, and is read. What was passed on so is read later, many at once
(`engine.reply`).

A dialect that is translated says the same piece of text in its own words (`piece_of`): the expression finds where it stands, and that
string alone is decoded, by a JSON reader.
"""

import re
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


class ReplyMessage(msgspec.Struct):
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
    message: ReplyMessage | None = None
    delta: ReplyMessage | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def said(self) -> ReplyMessage:
        """What is said in it."""
        return self.delta or self.message or ReplyMessage()


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


def read_completion(data: bytes) -> CompletionChunk | None:
    """Read a completion or a chunk; `None` if it is none."""
    try:
        return _HEARD.decode(data)
    except (ValueError, RecursionError):
        return None


_TEXT = rb'"[^"\\\x00-\x1f]*+(?:\\[ -~][^"\\\x00-\x1f]*+)*+"'
"""A string of JSON: it has no line breaks, so that what is found is one event and not two."""
_CHANCE = rb'\{"token":' + _TEXT + rb',"logprob":-?+[0-9.eE+-]++,"bytes":(?:\[[0-9,]*+\]|null),"top_logprobs":\[\]\}'
_SAID = rb'\{"(content|reasoning)":(' + _TEXT + rb")\}"
_ARGUMENTS = rb'\{"content":null,"tool_calls":\[\{"index":([0-9]++),"function":\{"arguments":(' + _TEXT + rb")\}\}\]\}"
_PLAIN = re.compile(
    rb'(data: \{"id":' + _TEXT + rb',"object":"chat\.completion\.chunk","created":[0-9]++,"model":' + _TEXT + rb","
    rb'"choices":\[\{"index":([0-9]++),"delta":(?:' + _SAID + rb"|" + _ARGUMENTS + rb'|\{\}),"logprobs":)'
    rb'(?:null|\{"content":\[' + _CHANCE + rb"(?:," + _CHANCE + rb')*+\]\}),"finish_reason":null,"token_ids":\[[0-9,]*+\]\}\]\}\n\n'
)
_HIDDEN = b'null,"finish_reason":null,"token_ids":null}]}\n\n'
"""What stands in the place of log probabilities and ids, and what is between and behind them."""
_STRING = msgspec.json.Decoder(str)


def hide_tokens(event: bytes) -> bytes | None:
    """A plain chunk's event without log probabilities and ids, `b""` if it says nothing else; `None` for every other event."""
    found = _PLAIN.fullmatch(event)
    if found is None:
        return None
    return found[1] + _HIDDEN if found[4] or found[6] else b""


def text_piece(event: bytes) -> tuple[bytes, int, str] | None:
    """What a plain chunk of the first choice says; `None` for every other event, and for a text that is no JSON.

    Returns:
        What it is a piece of: `b"content"`, `b"reasoning"`, of a call `b"arguments"`, `b""` of nothing; that call's number; the text.
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

"""Turns messages and texts into token ids, and ids into text, with the engine's `/tokenize` and `/detokenize`.

The engine's own rendering is the reference for every other renderer. `/tokenize` needs no flag on any vLLM version.
"""

import contextlib
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, ClassVar, Literal, NoReturn, Protocol

import msgspec

from tokencache.core import ids
from tokencache.dialects.base import parse_engine_error
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.dialects.chat.vocabulary import with_reasoning
from tokencache.engine.prompt_echo import cut_out, read_long_ids
from tokencache.engine.upstream import EngineClient, EngineResponse
from tokencache.errors import NOT_NOW, OK, EngineError
from tokencache.pauses import LARGE, parts_of, pause

Raw = msgspec.Raw
REFUSALS = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY})
"""HTTP status codes with which an engine rejects a conversation permanently. Other error codes may be temporary."""
_TOKENS = b'"tokens":['


class RenderError(Exception):
    """The conversation cannot be rendered: the template or the engine refuses it, or the engine does not answer."""


class TemplateRefusedError(RenderError):
    """The template or the engine refuses this conversation; a second attempt would also fail."""


class Renderer(Protocol):
    """Renders chat messages (raw JSON objects) for a model."""

    async def render(self, model: str, messages: Sequence[bytes], args: RenderArgs, *, generation: bool) -> bytes:
        """Render messages; `generation` adds the generation prompt after the last message.

        Returns:
            Packed token ids.

        Raises:
            TemplateRefusedError: the template or the engine refuses the conversation.
            RenderError: the conversation cannot be rendered now.
        """


class TextRenderer(Renderer, Protocol):
    """A renderer that can also decode ids to text."""

    async def read(self, model: str, packed: bytes) -> str:
        """Return the text of packed ids, special tokens included.

        Raises:
            RenderError: the text is not available.
        """


class EngineRenderer:
    """The engine's own tokenizer: each driver names the class for its engine (`Driver.renderer`).

    Attributes:
        max_model_len: the limit of prompt and reply together in tokens, from the last answer; 0 if unknown.
        not_now: statuses with which the engine refuses what it may render later.
    """

    route = "/tokenize"
    not_now: ClassVar[frozenset[int]] = NOT_NOW

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self.max_model_len = 0

    async def render(self, model: str, messages: Sequence[bytes], args: RenderArgs, *, generation: bool) -> bytes:
        """See `Renderer.render`."""
        written: list[bytes] = []
        parts = parts_of(messages)
        for part in parts:
            written += with_reasoning(part)
            if len(parts) > 1:
                await pause()
        body: dict[str, Any] = {
            **args.members,
            "messages": [*map(Raw, written)],
            "add_generation_prompt": generation,
        }
        if model:
            body["model"] = model
        if args.kwargs:
            body["chat_template_kwargs"] = args.kwargs
        if args.tools is not None:
            body["tools"] = args.tools
        try:
            written_body = msgspec.json.encode(body)
            if len(parts) > 1:
                await pause()
            answer = await self._engine.query(self.route, written_body)
        except Exception as why:
            raise RenderError(str(why)) from why
        if answer.status != OK:
            self.refuse(answer, self.route)
        try:
            tokens, max_model_len = await _tokens_of(answer.body)
        except (ValueError, OverflowError) as why:
            raise RenderError(f"{self.route} returned no token ids: {why}") from why
        self.max_model_len = max_model_len or self.max_model_len
        return tokens

    def refuse(self, answer: EngineResponse, who: str) -> NoReturn:
        """Raise what the answer of `who` means, which has another status than 200.

        Raises:
            TemplateRefusedError: the conversation is refused.
            RenderError: otherwise; if the engine may render it later, the cause is an error that says so (`errors.passing_cause`).
        """
        words = f"{who} answered {answer.status}: {parse_engine_error(answer.status, answer.body)[0][:300]}"
        if answer.status in self.not_now:
            raise RenderError(words) from EngineError(words, status=HTTPStatus.SERVICE_UNAVAILABLE)
        raise TemplateRefusedError(words) if answer.status in REFUSALS else RenderError(words)

    async def encode(self, model: str | Raw, text: str | Raw, headers: Mapping[str, str] | None = None) -> list[int]:
        """Return the ids of a text, without ids that the tokenizer puts before every text; none if the engine does not tokenize it.

        Raises:
            EngineError: the engine cannot be reached, or cannot answer now.
        """
        answer = await self._engine.query("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False}, headers)
        if answer.status in NOT_NOW:
            raise EngineError(f"/tokenize answered {answer.status}: {answer.body[:300].decode(errors='replace')}", status=answer.status)
        try:
            return msgspec.json.decode(answer.body, type=_Tokenized).tokens
        except ValueError:
            return []

    async def read(self, model: str, packed: bytes) -> str:
        """See `TextRenderer.read`; uses the engine's `/detokenize`."""
        try:
            body = {"model": model, "tokens": ids.unpack(packed)}
            answer = await self._engine.query("/detokenize", body)
            return msgspec.json.decode(answer.body, type=_Detokenized).prompt
        except Exception as why:
            raise RenderError(f"/detokenize: {why}") from why


class _Tokenized(msgspec.Struct):
    tokens: list[int]
    max_model_len: int | None = None


class _CutTokenized(msgspec.Struct):
    """The same with a mark in place of the ids (`prompt_echo`)."""

    tokens: Literal["=0"]
    max_model_len: int | None = None


async def _tokens_of(answer: bytes) -> tuple[bytes, int | None]:
    """Read an answer of `/tokenize`: the packed ids, and the limit of prompt and reply together; a long one with pauses.

    Raises:
        ValueError, OverflowError: it has no list of ids.
    """
    if len(answer) > LARGE:
        await pause()
    start = answer.find(_TOKENS) + len(_TOKENS) - 1
    end = answer.find(b"]", start) + 1
    if start >= len(_TOKENS) - 1 and end - start > LARGE:
        with contextlib.suppress(ValueError):  # the text that was found belongs to another member
            cut = msgspec.json.decode(cut_out(answer, [(start, end)]), type=_CutTokenized)
            packed = await read_long_ids(answer, start, end)
            if packed is not None:
                return packed, cut.max_model_len
    whole = msgspec.json.decode(answer, type=_Tokenized)
    return ids.pack(whole.tokens), whole.max_model_len


class _Detokenized(msgspec.Struct):
    prompt: str

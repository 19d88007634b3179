"""Renderers: messages → the ids that the template makes of them.

The truth is the engine's own rendering. `EngineRenderer` asks its `/tokenize`, which needs no flag on any vLLM.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from tokencache.core import ids
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.dialects.chat.vocabulary import with_reasoning
from tokencache.engine.upstream import EngineClient

Raw = msgspec.Raw
REFUSALS = frozenset({400, 422})
"""Status codes with which an engine refuses a conversation for good; all others may pass."""


class RenderError(Exception):
    """The conversation cannot be rendered: the template or the engine refuses it, or nobody answers."""


class TemplateRefusedError(RenderError):
    """The template, or the engine, will not have this conversation: to ask again would change nothing."""


class Renderer(Protocol):
    """Renders chat messages (raw JSON objects) for a model."""

    async def render(self, model: str, messages: Sequence[bytes], args: RenderArgs, *, generation: bool) -> bytes:
        """Render; `generation` asks for the generation prompt behind the last message.

        Returns:
            Packed token ids.

        Raises:
            TemplateRefusedError: the template or the engine refuses the conversation.
            RenderError: it cannot be rendered now.
        """


class TextRenderer(Renderer, Protocol):
    """A renderer that can also turn ids into text."""

    async def read(self, model: str, packed: bytes) -> str:
        """Return the text of packed ids, special tokens included.

        Raises:
            RenderError: the text is not available.
        """


class EngineRenderer:
    """Renders through the engine's `/tokenize`, whose answers also name the longest prompt (`max_model_len`, tokens; 0 if unknown)."""

    def __init__(self, upstream: EngineClient) -> None:
        self._upstream = upstream
        self.max_model_len = 0

    async def render(self, model: str, messages: Sequence[bytes], args: RenderArgs, *, generation: bool) -> bytes:
        """See `Renderer.render`."""
        body: dict[str, Any] = {
            **args.members,
            "messages": Raw(b"[" + b",".join(map(with_reasoning, messages)) + b"]"),
            "add_generation_prompt": generation,
        }
        if model:
            body["model"] = model
        if args.kwargs:
            body["chat_template_kwargs"] = args.kwargs
        if args.tools is not None:
            body["tools"] = args.tools
        try:
            answer = await self._upstream.post("/tokenize", body)
        except Exception as why:
            raise RenderError(str(why)) from why
        if answer.status != 200:  # noqa: PLR2004
            kind = TemplateRefusedError if answer.status in REFUSALS else RenderError
            raise kind(f"/tokenize answered {answer.status}: {answer.body[:300].decode(errors='replace')}")
        try:
            told = msgspec.json.decode(answer.body, type=_Tokenized)
            self.max_model_len = told.max_model_len or self.max_model_len
            return ids.pack(told.tokens)
        except (ValueError, OverflowError) as why:
            raise RenderError(f"/tokenize gave no token ids: {why}") from why

    async def read(self, model: str, packed: bytes) -> str:
        """Read packed ids as text, special tokens included: the engine's `/detokenize`.

        Raises:
            RenderError: it cannot say.
        """
        try:
            answer = await self._upstream.post("/detokenize", {"model": model, "tokens": ids.unpack(packed)})
            return msgspec.json.decode(answer.body, type=_Read).prompt
        except Exception as why:
            raise RenderError(f"/detokenize: {why}") from why


class _Tokenized(msgspec.Struct):
    tokens: list[int]
    max_model_len: int | None = None


class _Read(msgspec.Struct):
    prompt: str

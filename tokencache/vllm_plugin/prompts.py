"""The stand-in for vLLM's renderer: it answers with supplied ids where the renderer would render.

`preprocess_chat` asks its renderer for one thing, `render_chat_async`, and takes everything else from what comes back. So one
request's `preprocess_chat` is run with this in the renderer's place. For a whole prompt nothing is rendered at all; for a prefix
the renderer itself renders the messages, and a few others that show where the last reply ends (`boundary`): a small conversation
first, which costs next to nothing, and the whole history where the small one proves nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from tokencache.vllm_plugin.asked import InvalidIdsError, SuppliedIds, has_media
from tokencache.vllm_plugin.boundary import (
    ASK,
    SENTINELS,
    HiddenError,
    OtherStopError,
    Renderings,
    UnprovenError,
    last_reply,
    reworded,
    shows_turn_end,
    splice,
    stand_in,
)

Rendered = tuple[list[Any], list[Any]]
"""As `render_chat_async` gives it: conversations, and engine inputs."""


class SuppliedPrompt:
    """A renderer for one request, less what it would have rendered; everything else is the renderer's own."""

    def __init__(self, renderer: Any, asked: SuppliedIds, *, stop_ids: AbstractSet[int], tokens_input: Callable[..., Any]) -> None:
        """Make the stand-in.

        Args:
            renderer: vLLM's own.
            asked: the ids that the request supplies, in range for the model.
            stop_ids: ids at which the model stops.
            tokens_input: vLLM's own way to write a prompt of ids.
        """
        self._renderer = renderer
        self._asked = asked
        self._stop_ids = stop_ids
        self._tokens_input = tokens_input
        self.used = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    async def render_chat_async(
        self,
        conversations: Sequence[list[Any]],
        chat_params: Any,
        tok_params: Any = None,
        *,
        prompt_extras: dict[str, Any] | None = None,
        skip_mm_cache: bool = False,
    ) -> Rendered:
        """Answer as vLLM's `BaseRenderer.render_chat_async`.

        Raises:
            RefusedError: the conversation has media, or it cannot be proven where the prefix ends.
        """
        self.used = True
        (messages,) = conversations
        if has_media(messages):
            raise self._refused("the conversation has content that is not text")
        if self._asked.whole:
            return [messages], [self._tokens_input(self._asked.ids, cache_salt=(prompt_extras or {}).get("cache_salt"))]
        free = self._without_limits(tok_params)
        (conversation,), (prompt,) = await self._renderer.render_chat_async(
            [messages], chat_params, free, prompt_extras=prompt_extras, skip_mm_cache=skip_mm_cache
        )
        if prompt.get("type") != "token":
            raise self._refused(f"the prompt is not of text tokens but {prompt.get('type')!r}")
        if chat_params.chat_template_kwargs.get("continue_final_message") and messages[-1].get("role") == "assistant":
            raise self._refused("the last assistant message is to be continued: it has no end")
        try:
            ids = await _Splicer(self._renderer, chat_params, free, self._stop_ids).spliced(
                self._asked.ids, messages, prompt["prompt_token_ids"]
            )
        except UnprovenError as why:
            raise self._refused(str(why)) from why
        spliced = {**prompt, "prompt_token_ids": ids}
        spliced.pop("prompt", None)  # the text of what is no longer the prompt
        return [conversation], [spliced if tok_params is None else tok_params.apply_post_tokenization(self._renderer.tokenizer, spliced)]

    def _without_limits(self, tok_params: Any) -> Any:
        """The same way to tokenize, of any length: not what is rendered is the prompt, and that is checked in the end."""
        if tok_params is None:
            return None
        if tok_params.truncate_prompt_tokens is not None:
            raise self._refused("an exact prompt cannot be truncated (`truncate_prompt_tokens`)")
        return dataclasses.replace(tok_params, max_total_tokens=None, max_output_tokens=0)

    def _refused(self, why: str) -> InvalidIdsError:
        return InvalidIdsError(f"`{self._asked.parameter}` cannot be used: {why}.", self._asked.parameter)


class _Splicer:
    """Renders what shows the boundary."""

    def __init__(self, renderer: Any, chat_params: Any, tok_params: Any, stop_ids: AbstractSet[int]) -> None:
        self._renderer, self._chat_params, self._tok_params, self._stop_ids = renderer, chat_params, tok_params, stop_ids
        self._stops = [renderer.tokenizer.decode([token]) for token in stop_ids]

    async def spliced(self, prefix: list[int], messages: list[Any], rendered: Sequence[int]) -> list[int]:
        at = last_reply(messages)
        try:
            return await self._behind([ASK, *messages[at:]], prefix, rendered)
        except (UnprovenError, ValueError):  # vLLM says with a ValueError that a template refuses a conversation
            return await self._behind(messages, prefix, rendered)

    async def _behind(self, messages: list[Any], prefix: list[int], rendered: Sequence[int]) -> list[int]:
        try:
            return await self._shown(messages, prefix, rendered, in_text=False)
        except HiddenError:
            return await self._shown(messages, prefix, rendered, in_text=True)

    async def _shown(self, messages: list[Any], prefix: list[int], rendered: Sequence[int], *, in_text: bool) -> list[int]:
        at = last_reply(messages)
        reply, new = messages[at], messages[at + 1 :]
        first, second = [[*messages[:at], stand_in(reply, sentinel, in_text=in_text)] for sentinel in SENTINELS]
        conversations = [[*first, *new], [*second, *new], [*first, *reworded(new, self._stops)]]
        one, two, other = await self._ids(conversations, self._chat_params)
        shown = Renderings(one, two, other, before_calls=in_text and bool(reply.get("tool_calls")))
        try:
            return splice(prefix, rendered, shown, self._stop_ids)
        except OtherStopError as why:
            closed = {"add_generation_prompt": False, "continue_final_message": False}
            params = dataclasses.replace(self._chat_params, chat_template_kwargs={**self._chat_params.chat_template_kwargs, **closed})
            one, two = await self._ids([first, second], params)  # nothing follows
            if not shows_turn_end(one, two, why.rendered):
                raise
            return splice(prefix, rendered, shown, self._stop_ids, turn_end=why.rendered)

    async def _ids(self, conversations: list[list[Any]], chat_params: Any) -> list[Sequence[int]]:
        # one after the other: vLLM may change the messages that it renders, and these share some
        return [await self._one(conversation, chat_params) for conversation in conversations]

    async def _one(self, conversation: list[Any], chat_params: Any) -> Sequence[int]:
        _, (prompt,) = await self._renderer.render_chat_async([conversation], chat_params, self._tok_params)
        ids: Sequence[int] = prompt["prompt_token_ids"]
        return ids

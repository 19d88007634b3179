"""Replaces vLLM's renderer for one request, and returns supplied ids where the renderer would render.

`preprocess_chat` calls one method of its renderer, `render_chat_async`, and uses only the result. So `preprocess_chat` runs with this
object in place of the renderer. For a whole prompt nothing is rendered. For a prefix, the original renderer renders the messages, and a
few other conversations that show where the last reply ends (`boundary`): first a small conversation, which costs almost nothing, and the
whole history if the small one proves nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from tokencache_vllm.boundary import (
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
from tokencache_vllm.supplied_ids import InvalidIdsError, SuppliedIds, has_media

Rendered = tuple[list[Any], list[Any]]
"""The result of `render_chat_async`: conversations, and engine inputs."""


class SuppliedPrompt:
    """A renderer for one request with supplied ids; its other attributes are the original renderer's."""

    def __init__(self, renderer: Any, supplied: SuppliedIds, *, stop_ids: AbstractSet[int], tokens_input: Callable[..., Any]) -> None:
        """Create the replacement.

        Args:
            renderer: vLLM's own renderer.
            supplied: the ids of the request, in the model's range.
            stop_ids: ids at which the model stops.
            tokens_input: vLLM's function that makes an engine input from ids.
        """
        self._renderer = renderer
        self._supplied = supplied
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
        """Return the supplied prompt, in the form of vLLM's `BaseRenderer.render_chat_async`.

        Raises:
            InvalidIdsError: the conversation has media, or the end of the prefix cannot be proven.
        """
        self.used = True
        (messages,) = conversations
        if has_media(messages):
            raise self._refusal("the conversation has content that is not text")
        if self._supplied.whole:
            return [messages], [self._tokens_input(self._supplied.ids, cache_salt=(prompt_extras or {}).get("cache_salt"))]
        unlimited = self._without_limits(tok_params)
        (conversation,), (prompt,) = await self._renderer.render_chat_async(
            [messages], chat_params, unlimited, prompt_extras=prompt_extras, skip_mm_cache=skip_mm_cache
        )
        if prompt.get("type") != "token":
            raise self._refusal(f"the prompt is not of text tokens but {prompt.get('type')!r}")
        if chat_params.chat_template_kwargs.get("continue_final_message") and messages[-1].get("role") == "assistant":
            raise self._refusal("the last assistant message is to be continued, so it has no end")
        try:
            ids = await _Splicer(self._renderer, chat_params, unlimited, self._stop_ids).spliced(
                self._supplied.ids, messages, prompt["prompt_token_ids"]
            )
        except UnprovenError as why:
            raise self._refusal(str(why)) from why
        spliced = {**prompt, "prompt_token_ids": ids}
        spliced.pop("prompt", None)  # the text is no longer that of the prompt
        return [conversation], [spliced if tok_params is None else tok_params.apply_post_tokenization(self._renderer.tokenizer, spliced)]

    def _without_limits(self, tok_params: Any) -> Any:
        """Remove the length limits, because this rendering is not the prompt; the length of the prompt is checked at the end."""
        if tok_params is None:
            return None
        if tok_params.truncate_prompt_tokens is not None:
            raise self._refusal("an exact prompt cannot be truncated (`truncate_prompt_tokens`)")
        return dataclasses.replace(tok_params, max_total_tokens=None, max_output_tokens=0)

    def _refusal(self, why: str) -> InvalidIdsError:
        return InvalidIdsError(f"`{self._supplied.parameter}` cannot be used: {why}.", self._supplied.parameter)


class _Splicer:
    """Renders the conversations that show where the last reply ends."""

    def __init__(self, renderer: Any, chat_params: Any, tok_params: Any, stop_ids: AbstractSet[int]) -> None:
        self._renderer, self._chat_params, self._tok_params, self._stop_ids = renderer, chat_params, tok_params, stop_ids
        self._stops = [renderer.tokenizer.decode([token]) for token in stop_ids]

    async def spliced(self, prefix: list[int], messages: list[Any], rendered: Sequence[int]) -> list[int]:
        at = last_reply(messages)
        try:
            return await self._spliced_after([ASK, *messages[at:]], prefix, rendered)
        except (UnprovenError, ValueError):  # vLLM raises ValueError if a template refuses a conversation
            return await self._spliced_after(messages, prefix, rendered)

    async def _spliced_after(self, messages: list[Any], prefix: list[int], rendered: Sequence[int]) -> list[int]:
        try:
            return await self._spliced_with(messages, prefix, rendered, in_text=False)
        except HiddenError:
            return await self._spliced_with(messages, prefix, rendered, in_text=True)

    async def _spliced_with(self, messages: list[Any], prefix: list[int], rendered: Sequence[int], *, in_text: bool) -> list[int]:
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
            one, two = await self._ids([first, second], params)  # without new messages
            if not shows_turn_end(one, two, why.rendered):
                raise
            return splice(prefix, rendered, shown, self._stop_ids, turn_end=why.rendered)

    async def _ids(self, conversations: list[list[Any]], chat_params: Any) -> list[Sequence[int]]:
        # one after another, because vLLM may change the messages that it renders, and these conversations share messages
        return [await self._rendered(conversation, chat_params) for conversation in conversations]

    async def _rendered(self, conversation: list[Any], chat_params: Any) -> Sequence[int]:
        _, (prompt,) = await self._renderer.render_chat_async([conversation], chat_params, self._tok_params)
        ids: Sequence[int] = prompt["prompt_token_ids"]
        return ids

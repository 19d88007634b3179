"""Sends exact prompts with images to a vLLM without the plugin: as compact ids, to `/inference/v1/generate` (`engine.generate`).

A call takes three requests, which become one chat completion for the rest of the proxy:

1. *Rendering.* `/v1/chat/completions/render` renders the call with one message, which has its new images, instead of its messages. It
   returns the expansion of each new image, and the sampling parameters that chat would use.
2. *Tokens.* `generate` samples after the compact ids of the prompt. It reports the expanded ids and the places of all images, which the
   proxy compares with those that it knows.
3. *Message.* `derender` parses the tokens (`parsed_completion`). So the reply is not streamed.

The expansions of new images are searched in the prompt, after the recorded images. The prompt is sent only if every expansion is found,
and no id of a placeholder stands anywhere else: vLLM would put an image in its place.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from tokencache.core import ids
from tokencache.core.expansion import Place, compact, locate, stands_outside
from tokencache.core.media import media_url
from tokencache.dialects.chat.request import ChatCall
from tokencache.engine.derender import ANY_MESSAGES, Derender
from tokencache.engine.drivers.base import EngineRequest, ExactPrompt, Target
from tokencache.engine.drivers.parsed_completion import ReplacedChat, parse_generated
from tokencache.engine.generate import GENERATE, generate_body, render_request
from tokencache.errors import EngineError

Raw = msgspec.Raw


class ImagePrompts:
    """Makes requests to `generate` for calls with images."""

    def __init__(self) -> None:
        self._derender = Derender()

    async def request(self, call: ChatCall, fields: Mapping[str, Raw], prompt: ExactPrompt, target: Target) -> EngineRequest | None:
        """Make the request for a call with an exact prompt; `None` if the route cannot take it.

        Args:
            call: the call.
            fields: the members of its request to the engine, without those of streams.
            prompt: its prompt.
            target: the engine.

        Raises:
            EngineError: the engine cannot be reached, or cannot answer now.
        """
        urls = _image_urls(call)
        new = [{"type": "image_url", "image_url": {"url": url}} for url in urls[len(prompt.media) :]]
        message = {"role": "user", "content": [{"type": "text", "text": "."}, *new]}
        try:
            rendered = await render_request(target.upstream, {**fields, "messages": [message]}, target.headers)
        except EngineError as why:
            if why.passing:
                raise
            return None
        tokens = ids.unpack(prompt.ids)
        expansions = [rendered.ids[start : start + length] for start, length in rendered.images]
        places = _places(tokens, prompt, expansions) if len(expansions) == len(new) else None
        if places is None or stands_outside(tokens, places, frozenset(target.images.placeholder_ids)):
            return None
        compacted = compact(tokens, places, target.images.placeholder)
        body = generate_body(rendered, compacted, _parts(urls, target), rendered.limit(len(tokens), target.max_model_len))
        replaced = ReplacedChat(target.upstream, {**call.fields, "messages": ANY_MESSAGES}, target.headers)  # without the images
        return EngineRequest(GENERATE, body, partial(parse_generated, self._derender, replaced))


def _places(tokens: list[int], prompt: ExactPrompt, expansions: list[list[int]]) -> list[Place] | None:
    """Return the places of all images in a prompt: the recorded ones, and the new ones after them; `None` if one is not found."""
    found = locate(tokens, prompt.media[-1].end if prompt.media else 0, expansions)
    return None if found is None else [*((medium.start, medium.length) for medium in prompt.media), *found]


def _parts(urls: Sequence[str], target: Target) -> list[dict[str, Any]]:
    """Write the images of a request to `generate`: by their names, and with their pixels unless the engine has them."""
    if not target.names:
        return [{"type": "image_url", "url": url} for url in urls]
    both = zip(urls, target.names, strict=True)
    return [{"type": "image_url", "url": None if image.held else url, "uuid": image.name} for url, image in both]


def _image_urls(call: ChatCall) -> list[str]:
    """Return the URL of each image of a call, in order."""
    contents = [msgspec.json.decode(call.raw_messages[index])["content"] for index in sorted(call.media)]
    parts = [part for content in contents for part in content]
    return [media_url(part) for part in parts if isinstance(part, dict) and part.get("type") == "image_url"]

"""Names images for an engine, so that it gets the pixels of each image once.

A content part of vLLM's chat completions and of `/inference/v1/generate` may have a `uuid`. Where an API server has processed a medium
with that `uuid`, it needs no pixels: `{"type": "image_url", "image_url": null, "uuid": U}` is enough. If it does not have the image (any
more), it answers 400: "Cache miss for image at index 0 but data is not provided." (vLLM 0.32, `multimodal/processing/processor.py`). If it
keeps no images, it answers 400 with other words, and if only its engine's process has lost the image, 500. So a request that names images
is sent again with their pixels after any refusal.

A `uuid` also replaces vLLM's hash of the pixels, in its caches of processed images, of embeddings and of prefixes. It believes the `uuid`:
with other pixels under a known one, it uses the first ones.

So a name is made here, and only here: a keyed hash of the decoded bytes, and of all else that the result depends on (the model, the policy
version, options for media). Without the deployment's secret, nobody can compute the name of another tenant's image. A conversation with an
image that the harness named itself has no exact prompts (`core.media`). After an update of the weights an image has another name, so that
no embedding of older weights is used.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tokencache.core.chain import keyed_hash
from tokencache.dialects.chat.request import ChatCall
from tokencache.dialects.members import SHAPING_MEDIA
from tokencache.recent import Recent

Raw = msgspec.Raw

_MOST_HELD = 65_536
"""Images, of all engines, that are remembered as held."""
_MOST_MISSES = 3
"""An engine that does not have the images that it got, so many times in a row, keeps none (`--mm-processor-cache-gb 0`)."""


class NamedImage(NamedTuple):
    """The name of an image of a request, and whether the engine has it, so that its pixels are not sent."""

    name: str
    held: bool

    def part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return a content part of a chat message with the name, and without the pixels if the engine has them."""
        return {**part, "uuid": self.name, **({"image_url": None} if self.held else {})}


class ImageNames:
    """Names images, and remembers which of them each engine has. `secret` returns the deployment's secret."""

    def __init__(self, secret: Callable[[], bytes]) -> None:
        self._secret = secret
        self._held: Recent[tuple[str, str], bool] = Recent(_MOST_HELD)  # (engine, name)
        self._misses: dict[str, int] = {}

    def of_call(self, call: ChatCall, engine: str, salt: str) -> tuple[NamedImage, ...]:
        """Name the images of a call, in order.

        Args:
            call: a call whose media are all images with known bytes.
            engine: the base URL of the engine.
            salt: the salt of the request's prefix cache; it depends on tenant and policy version.
        """
        options = [bytes(call.fields.get(name, b"")) for name in ("model", *SHAPING_MEDIA)]
        digests = [part.sha256 for part in call.media_parts()]
        names = {one: keyed_hash(self._secret(), msgspec.msgpack.encode(("image", salt, options, one))).hex() for one in {*digests}}
        keeps = self._misses.get(engine, 0) < _MOST_MISSES
        return tuple(NamedImage(names[one], keeps and (engine, names[one]) in self._held) for one in digests)

    def answered(self, engine: str, images: Sequence[NamedImage], *, named: bool) -> None:
        """Note that an engine has answered a request with these images; `named` is whether some were sent without their pixels."""
        if named:
            self._misses.pop(engine, None)
        for image in images:
            self._held[engine, image.name] = True

    def missed(self, engine: str) -> None:
        """Note that an engine answered a request only with the pixels of its images."""
        self._misses[engine] = self._misses.get(engine, 0) + 1


def with_pixels(images: Sequence[NamedImage]) -> tuple[NamedImage, ...]:
    """Return images to be sent with their pixels."""
    return tuple(image._replace(held=False) for image in images)


def with_names(call: ChatCall, images: Sequence[NamedImage]) -> ChatCall:
    """Return a call whose image parts have these names; without names the call itself."""
    if not images:
        return call
    waiting = iter(images)
    raw = list(call.raw_messages)
    for index in sorted(call.media):
        message = msgspec.json.decode(raw[index], type=dict[str, Any])
        parts = [next(waiting).part(part) if _is_image(part) else part for part in message["content"]]
        raw[index] = msgspec.json.encode({**message, "content": parts})
    fields = {**call.fields, "messages": Raw(b"[" + b",".join(raw) + b"]")}
    return msgspec.structs.replace(call, raw_messages=raw, fields=fields)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"

"""Images in the simulated engine: a model with the image placeholders of Qwen-VL, and the plugin `tokencache_vllm`.

The template writes `<|vision_start|><|image_pad|><|vision_end|>` for an image. As in vLLM 0.32, the engine then replaces the first
`<|image_pad|>` that is left by as many as the image has patches of 28 by 28 pixels. So all ids that it reports are *expanded*. The size
comes from the header of a PNG. An image at an `http` URL has one patch. Without the plugin the engine ignores supplied ids of a request
with images, and renders. With it the engine behaves as `docs/images.md` describes. `/inference/v1/generate` takes compact ids and images,
with the plugin or without it.

Like vLLM, the engine keeps the images of its generations by their `uuid`, and believes it: a part with a known `uuid` needs no pixels, and
if it has other ones, the first are used.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import json
import math
import struct
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tokenizers import AddedToken, Tokenizer

from tokencache.testing.errors import RefusalResponse, senseless
from tokencache.testing.prompt import media_parts
from tokencache.testing.tokenizer import SimTokenizer, build_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ImageMode = Literal["", "stock", "plugin"]
"""`""`: the model accepts no images. `stock`: it does. `plugin`: and exact prompts with them."""

PLUGIN_HEADER, MEDIA_HEADER = "x-tokencache-plugin", "x-tokencache-media"
_IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
"""Special tokens of a model that accepts images."""
_MEMBER = "tokencache_prompt"
_PATCH = 28
_PNG = b"\x89PNG\r\n\x1a\n"

Ranges = list[tuple[int, int]]
"""First token and number of tokens of each image's placeholder."""


@functools.cache
def build_image_tokenizer() -> SimTokenizer:
    """Return the tokenizer of the simulated engine with the tokens for images at the end of its vocabulary."""
    backend = Tokenizer.from_str(build_tokenizer().backend.to_str())
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _IMAGE_TOKENS])
    return SimTokenizer(backend)


class ImageFault(Enum):
    """What goes wrong with exact prompts with images. The engine answers 200 all the same, except with `NOT_FOUND`."""

    REEXPANDED = "re-expanded"
    """The supplied ids are expanded again."""
    NOT_FOUND = "not found"
    """No placeholder is found, so the request is refused."""
    WRONG_RANGES = "wrong ranges"
    """The header has other places than those that were used."""
    NO_RANGES = "no ranges"
    """The header is missing."""
    IGNORED = "ignored"
    """The supplied ids are ignored."""


class GenerateFault(Enum):
    """What goes wrong with prompts with images in `/inference/v1/generate`. The engine answers 200 all the same."""

    RETOKENIZED = "retokenized"
    """The text of the prompt is tokenized again, as vLLM does for some models."""
    WRONG_RANGES = "wrong ranges"
    """The answer has other places than those that were used."""
    UNEXPANDED = "unexpanded"
    """No image is put into the prompt."""


class SimulatedImages:
    """The images of one engine. Attributes may be changed while it serves.

    Attributes:
        mode: see `ImageMode`.
        limit: number of images that a prompt may have.
        fault: what goes wrong with every exact prompt; `None` for nothing.
        generate_fault: what goes wrong with every prompt of `/inference/v1/generate`.
        kept: `uuid` → the image that it names; clear it to reset vLLM's cache.
        keeps: whether the engine keeps images (`--mm-processor-cache-gb`).
        used: for each generation with images, the pixels that it used, in order: the SHA-256 of the file, or the URL.
    """

    def __init__(self, mode: ImageMode, tokenizer: SimTokenizer) -> None:
        self.mode, self.limit = mode, 100
        self.fault: ImageFault | None = None
        self.generate_fault: GenerateFault | None = None
        self.kept: dict[str, _Image] = {}
        self.keeps = True
        self.used: list[list[str]] = []
        self._tokenizer = tokenizer
        self._pad = tokenizer.id_of("<|image_pad|>") if mode else -1
        self._vocabulary = tokenizer.vocabulary_size

    def expanded(self, ids: Sequence[int], images: Sequence[int]) -> tuple[list[int], Ranges]:
        """Expand the placeholders of images with these numbers of tokens; a placeholder without an image stays as it is."""
        expanded: list[int] = []
        places: Ranges = []
        for token in ids:
            if token == self._pad and len(places) < len(images):
                places.append((len(expanded), images[len(places)]))
                expanded.extend([self._pad] * images[len(places) - 1])
            else:
                expanded.append(token)
        if len(places) < len(images):
            raise RefusalResponse(
                f"Failed to apply prompt replacement for mm_items['image'][{len(places)}]", kind="InternalServerError", status=500
            )
        return expanded, places

    def generated(self, ids: Sequence[int], parts: Sequence[Mapping[str, Any]]) -> tuple[list[int], Ranges]:
        """Expand the prompt of `/inference/v1/generate`; parts of unknown types are ignored, as in vLLM.

        Returns:
            The expanded ids, and the places of the images that the answer reports.
        """
        sizes = self._load([{**part, "image_url": part if part.get("url") else None} for part in parts if part.get("type") == "image_url"])
        if self.generate_fault is GenerateFault.RETOKENIZED:
            ids = self._tokenizer.encode(self._tokenizer.decode(list(ids)))
        if self.generate_fault is GenerateFault.UNEXPANDED:
            sizes = []
        expanded, places = self.expanded(ids, sizes)
        shift = int(self.generate_fault is GenerateFault.WRONG_RANGES)
        return expanded, [(start + shift, length) for start, length in places]

    def takes(self, body: Mapping[str, Any]) -> bool:
        """Whether a request has an exact prompt that the engine uses."""
        given = (body.get("kv_transfer_params") or {}).get(_MEMBER)
        return given is not None and self.mode == "plugin" and self.fault is not ImageFault.IGNORED

    def supplied(self, body: Mapping[str, Any], images: Sequence[int]) -> tuple[list[int], Ranges]:
        """Return the exact prompt of a request, and its placeholders.

        Raises:
            RefusalResponse: the plugin refuses it.
        """
        given = body["kv_transfer_params"][_MEMBER]
        ids, sampled = list(given["ids"]), set(given.get("sampled") or ())
        if max(ids) >= self._vocabulary:
            raise _refused(f"token id {max(ids)} is out of vocabulary")
        if self.fault is ImageFault.REEXPANDED:
            return self.expanded(ids, images)
        places = [] if self.fault is ImageFault.NOT_FOUND else self._find(ids, images)
        if len(places) != len(images):
            raise _refused(f"the request has {len(images)} images, and {len(places)} were found in the ids")
        known = [tuple(place) for place in (given.get("ranges") or {}).get("image", [])]
        if places[: len(known)] != known:
            raise _refused(f"the images are at {places} in the ids, and `ranges` has {known}")
        inside = {at for start, length in places for at in range(start, start + length)}
        outside = [at for at, token in enumerate(ids) if token == self._pad and at not in inside | sampled]
        if outside:
            raise _refused(f"position {outside[0]} has an id that stands for an embedding, and no image")
        return ids, places

    def _find(self, ids: Sequence[int], images: Sequence[int]) -> Ranges:
        """Find the placeholder of each image, in order; stop at the first that is not there."""
        places: Ranges = []
        at = 0
        for size in images:
            run = [self._pad] * size
            found = next((i for i in range(at, len(ids) - size + 1) if list(ids[i : i + size]) == run), None)
            if found is None:
                break
            places.append((found, size))
            at = found + size
        return places

    def headers(self, places: Ranges) -> dict[str, str]:
        """Return the plugin's headers of a response; none if the prompt has no images."""
        if self.mode != "plugin" or not places:
            return {}
        if self.fault is ImageFault.NO_RANGES:
            return {PLUGIN_HEADER: "images"}
        shift = int(self.fault is ImageFault.WRONG_RANGES)
        shown = json.dumps({"image": [(start + shift, length) for start, length in places]}, separators=(",", ":"))
        return {PLUGIN_HEADER: "images", MEDIA_HEADER: shown}

    def read(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Load the images of messages, for a rendering. Returns how many tokens each has.

        Raises:
            RefusalResponse: vLLM answers 400.
        """
        images = [_image_of(part) for part in media_parts(messages)]
        if None in images:
            raise _miss(images.index(None))
        return self._sizes([image for image in images if image is not None])

    def load(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Load the images of messages, for a generation, which keeps them. Returns how many tokens each has.

        Raises:
            RefusalResponse: vLLM answers 400.
        """
        return self._load(media_parts(messages))

    def _load(self, parts: Sequence[Mapping[str, Any]]) -> list[int]:
        images: list[_Image] = []
        for index, part in enumerate(parts):
            uuid, given = part.get("uuid"), _image_of(part)
            image = (self.kept.get(uuid) if self.keeps and uuid is not None else None) or given
            if image is None:
                raise _miss(index) if self.keeps else RefusalResponse("Failed to apply the processor on data={'images': [None]}")
            images.append(image)
            if uuid is not None:
                self.kept[uuid] = image
        sizes = self._sizes(images)
        if images:
            self.used.append([image.pixels for image in images])
        return sizes

    def _sizes(self, images: Sequence[_Image]) -> list[int]:
        if len(images) > self.limit:
            raise RefusalResponse(f"At most {self.limit} image(s) may be provided in one prompt.")
        return [image.tokens for image in images]


class _Image(NamedTuple):
    """A loaded image: how many tokens it has, and its pixels: the SHA-256 of the file, or the URL."""

    tokens: int
    pixels: str


def _miss(index: int) -> RefusalResponse:
    return RefusalResponse(f"Cache miss for image at index {index} but data is not provided.")


def _image_of(part: Mapping[str, Any]) -> _Image | None:
    """Load the image of a part; `None` if it has only a `uuid`."""
    if part.get("type") != "image_url":
        raise RefusalResponse(f"Unknown part type: {part.get('type')}")
    if part.get("image_url") is None and part.get("uuid") is not None:
        return None
    url = str(part["image_url"]["url"])
    if url.startswith(("http://", "https://")):
        return _Image(1, url)
    try:
        data = base64.b64decode(url.partition("base64,")[2], validate=True)
    except binascii.Error as error:
        raise RefusalResponse(str(error)) from error
    if not data.startswith(_PNG) or len(data) < 24:
        raise RefusalResponse("Failed to load image: cannot identify image file")
    size: tuple[int, int] = struct.unpack_from(">II", data, 16)
    width, height = size
    return _Image(math.ceil(width / _PATCH) * math.ceil(height / _PATCH), hashlib.sha256(data).hexdigest())


def _refused(message: str) -> RefusalResponse:
    return senseless(f"An exact prompt with images is refused: {message}.", f"kv_transfer_params.{_MEMBER}")

"""Tests whether an engine accepts exact prompts with images, and defines how they are sent to the plugin (`tokencache.vllm_plugin`).

vLLM ignores supplied ids of a request with images, and renders. With the plugin it uses them:

* the request has `kv_transfer_params.tokencache_prompt`: the expanded ids, the places of the placeholders that are known, and the positions
  at which the model itself sampled an id of a placeholder;
* the answer has a header with the places of all placeholders, also if the request supplied no ids.

`docs/images.md` describes both. The test shows that the engine renders images with `/tokenize` as chat completions do, that it uses ids
which no rendering has, that its header is right, and that it refuses ids that do not fit the images.
"""

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from tokencache.core import ids
from tokencache.core.media import PlacedMedia, Places
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.prompt_echo import read_ids
from tokencache.engine.reply import Reply
from tokencache.engine.template.renderer import EngineRenderer, RenderError
from tokencache.engine.upstream import AskChat, EngineResponse

PLUGIN_PROMPT = "tokencache_prompt"
"""The member of `kv_transfer_params` with an exact prompt with images."""
PLACES_HEADER = "x-tokencache-media"
PLUGIN_HEADERS = frozenset({PLACES_HEADER, "x-tokencache-plugin"})
"""Headers that the plugin adds to answers. They are not for clients."""

ImageRoute = Literal["", "plugin", "generate"]
_OK, _REFUSED = 200, 400
_SIZES = ((60, 60), (140, 60))
_WORDS = {"type": "text", "text": "See."}
_ARGS = RenderArgs(b"", b"", {}, {}, {})
_PLACES = msgspec.json.Decoder(dict[str, list[tuple[int, int]]])


class ImageSupport(NamedTuple):
    """How an engine accepts exact prompts with images.

    `route` is `""` if it does not; `why` is the reason. `placeholder_ids` are the ids in whose place it puts embeddings.
    """

    route: ImageRoute = ""
    why: str = "not asked"
    placeholder_ids: tuple[int, ...] = ()


def read_places(headers: Mapping[str, str]) -> Places | None:
    """Read the places of placeholders from the headers of an answer; `None` if they are missing or unreadable."""
    try:
        return _PLACES.decode(headers.get(PLACES_HEADER, ""))
    except ValueError:
        return None


def ranges_of(media: Sequence[PlacedMedia]) -> dict[str, list[tuple[int, int]]]:
    """Return the places of media by modality, as a request to the plugin has them."""
    found: dict[str, list[tuple[int, int]]] = {}
    for medium in media:
        found.setdefault(medium.modality, []).append((medium.start, medium.length))
    return found


def png(width: int, height: int, shade: int) -> bytes:
    """Make a PNG file of one colour; `shade` is 0 to 255."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes((shade, 255 - shade, 128)) * width) * height
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


class _UnprovenError(Exception):
    """The engine does not accept exact prompts with images; the text of the error is the reason."""


async def probe_images(ask: AskChat, renderer: EngineRenderer, model: str, other: bytes) -> ImageSupport:
    """Test whether an engine accepts exact prompts with images. `other` are packed ids of a prompt without images.

    Raises:
        EngineError: the engine cannot be reached, or cannot answer now.
    """
    try:
        return await _Probe(ask, model, ids.unpack(other)).run(renderer)
    except _UnprovenError as why:
        return ImageSupport(why=str(why))


class _Answer(NamedTuple):
    """The ids that the engine used as its prompt, and the places of the images in them."""

    ids: list[int]
    places: list[tuple[int, int]]


class _Probe:
    def __init__(self, ask: AskChat, model: str, other: list[int]) -> None:
        self._ask, self._model, self._other = ask, model, other
        self._images = [_image_part(width, height, shade) for shade, (width, height) in enumerate(_SIZES, 100)]

    async def run(self, renderer: EngineRenderer) -> ImageSupport:
        """Run the whole test.

        Raises:
            _UnprovenError: a part of it failed.
        """
        rendered = await self._used(await self._answer(self._images), "its answer to a request with images")
        message = msgspec.json.encode(_message(self._images))
        try:
            tokenized = await renderer.render(self._model, [message], _ARGS, generation=True)
        except RenderError as why:
            raise _UnprovenError(f"it cannot render images: {why}") from why
        if ids.unpack(tokenized) != rendered.ids:
            raise _UnprovenError("/tokenize renders images in another way than chat completions do")
        exact = self._exact(rendered)
        await self._check(exact, {})
        await self._check(exact, {"ranges": {"image": exact.places[:1]}})
        for images in ([*self._images, self._images[0]], self._images[:1]):
            await self._check_refused(exact.ids, images)
        return ImageSupport("plugin", "", await self._placeholder_ids(exact))

    def _exact(self, rendered: _Answer) -> _Answer:
        """Make a prompt that no rendering gives: other words before, between and after the two images."""
        (first, length), (second, size) = rendered.places
        middle = first + length
        before, between = self._other[::-1], self._other
        made = [*before, *rendered.ids[:middle], *between, *rendered.ids[middle:], *before]
        return _Answer(made, [(first + len(before), length), (second + len(before) + len(between), size)])

    async def _check(self, exact: _Answer, more: Mapping[str, Any]) -> None:
        answer = await self._answer(self._images, {"ids": exact.ids, **more})
        if answer.status == _REFUSED:
            raise _UnprovenError(f"it refuses exact prompts with images: {_words(answer)}")
        if await self._used(answer, "its answer to an exact prompt with images") != exact:
            raise _UnprovenError("it does not use the ids of an exact prompt with images, or reports other places of the images")

    async def _check_refused(self, prompt: list[int], images: Sequence[Mapping[str, Any]]) -> None:
        answer = await self._answer(images, {"ids": prompt})
        if answer.status != _REFUSED:
            raise _UnprovenError(f"it accepts an exact prompt for {len(self._images)} images together with {len(images)}")

    async def _placeholder_ids(self, exact: _Answer) -> tuple[int, ...]:
        """Find the ids of placeholders that stand for embeddings: outside a placeholder, the engine accepts them only if they are named."""
        inside = dict.fromkeys(token for start, length in exact.places for token in exact.ids[start : start + length])
        found = []
        for token in inside:
            longer = [*exact.ids, token]
            answer = await self._answer(self._images, {"ids": longer})
            if answer.status != _REFUSED:
                continue
            found.append(token)
            await self._check(exact._replace(ids=longer), {"sampled": [len(exact.ids)]})
        if not found:
            raise _UnprovenError("it accepts placeholders without images")
        return tuple(found)

    async def _answer(self, images: Sequence[Mapping[str, Any]], prompt: Mapping[str, Any] | None = None) -> EngineResponse:
        transfer = {"kv_transfer_params": {PLUGIN_PROMPT: prompt}} if prompt is not None else {}
        body = {"model": self._model, "messages": [_message(images)], "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        return await self._ask(body | transfer)

    async def _used(self, answer: EngineResponse, what: str) -> _Answer:
        if answer.status != _OK:
            raise _UnprovenError(f"it accepts no images: {_words(answer)}")
        places = read_places(answer.headers)
        if places is None:
            raise _UnprovenError(f"{what} does not say where the images are: its plugin for images is not active (docs/images.md)")
        read = Reply()
        read.add(answer.body)
        used = read_ids(read.prompt.raw)
        if used is None or [*places] != ["image"] or len(places["image"]) != len(self._images):
            raise _UnprovenError(f"{what} does not report the prompt, or the places of the images")
        return _Answer(ids.unpack(used), [*places["image"]])


def _message(images: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": [_WORDS, *images]}


def _image_part(width: int, height: int, shade: int) -> dict[str, Any]:
    encoded = base64.b64encode(png(width, height, shade)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def _words(answer: EngineResponse) -> str:
    return f"{answer.status}: {answer.body[:300].decode(errors='replace')}"

"""Tests whether an engine accepts exact prompts with images, and defines how they are sent to the plugin (`tokencache_vllm`).

vLLM ignores supplied ids of a chat request with images, and renders. With the plugin it uses them:

* the request has `kv_transfer_params.tokencache_prompt`: the expanded ids, the places of the placeholders that are known, and the positions
  at which the model itself sampled an id of a placeholder;
* the answer has a header with the places of all placeholders, also if the request supplied no ids.

`docs/images.md` describes both. The test shows that the engine renders images with `/tokenize` as chat completions do, that it uses ids
which no rendering has, that its header is right, and that it refuses ids that do not fit the images.

Without the plugin, `/inference/v1/generate` (`engine.generate`) is tested with compact ids of such a prompt, which also has newlines that
no tokenizer would write one after the other: the engine must report its expanded ids to the last one. Gemma 3 does not pass: vLLM merges
newlines there.
"""

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from tokencache.core import ids
from tokencache.core.expansion import Place, compact, learn_placeholder
from tokencache.core.media import PlacedMedia, Places
from tokencache.dialects.chat.rendering import RenderArgs
from tokencache.engine.derender import Derender
from tokencache.engine.generate import GENERATE, generate_body, read_generated, refusal, render_request
from tokencache.engine.image_support import ImageSupport
from tokencache.engine.reply import Reply
from tokencache.engine.template.renderer import EngineRenderer, RenderError
from tokencache.engine.upstream import AskChat, EngineClient, EngineResponse
from tokencache.errors import EngineError

PLUGIN_PROMPT = "tokencache_prompt"
"""The member of `kv_transfer_params` with an exact prompt with images."""
PLACES_HEADER = "x-tokencache-media"

_SIZES = ((60, 60), (140, 60))
_WORDS = {"type": "text", "text": "See."}
_ARGS = RenderArgs(b"", b"", {}, {}, {})
_NEWLINES = ("\n", "\n\n", "\n")
"""Written one after the other, they are ids that no tokenizer gives for their text."""
_PLACES = msgspec.json.Decoder(dict[str, list[tuple[int, int]]])


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


async def probe_images(engine: EngineClient, ask: AskChat, renderer: EngineRenderer, model: str, other: bytes) -> ImageSupport:
    """Test whether an engine accepts exact prompts with images: with the plugin, or by `generate`.

    Args:
        engine: the engine.
        ask: sends a chat request to it.
        renderer: tokenizes conversations and texts there.
        model: the model.
        other: packed ids of a prompt without images.

    Raises:
        EngineError: the engine cannot be reached, or cannot answer now.
    """
    probe = _Probe(ask, model, ids.unpack(other))
    try:
        rendered = await probe.rendered(renderer)
    except _UnprovenError as why:
        return ImageSupport(why=str(why))
    try:
        return await probe.try_plugin(rendered)
    except _UnprovenError as why:
        without_plugin = str(why)
    try:
        return (await probe.try_generate(engine, renderer, rendered))._replace(why=without_plugin)
    except _UnprovenError as why:
        return ImageSupport(why=f"{without_plugin}; and {GENERATE} does not take them: {why}")


class _Answer(NamedTuple):
    """The ids that the engine used as its prompt, and the places of the images in them."""

    ids: list[int]
    places: list[Place]


class _Rendered(NamedTuple):
    """The rendering of a request with the images: its ids, its text, and the places, if the plugin reports them."""

    ids: list[int]
    text: str
    places: Places | None


class _Probe:
    def __init__(self, ask: AskChat, model: str, other: list[int]) -> None:
        self._ask, self._model, self._other = ask, model, other
        self._images = [_image_part(width, height, shade) for shade, (width, height) in enumerate(_SIZES, 100)]

    async def rendered(self, renderer: EngineRenderer) -> _Rendered:
        """Let the engine render the images, with chat completions and with `/tokenize`.

        Raises:
            _UnprovenError: it cannot, or the renderings differ.
        """
        answer = await self._answer(self._images)
        found = _Rendered(self._prompt(answer), _text(answer), read_places(answer.headers))
        message = msgspec.json.encode(_message(self._images))
        try:
            tokenized = await renderer.render(self._model, [message], _ARGS, generation=True)
        except RenderError as why:
            raise _UnprovenError(f"it cannot render images: {why}") from why
        if ids.unpack(tokenized) != found.ids:
            raise _UnprovenError("/tokenize renders images in another way than chat completions do")
        return found

    async def try_plugin(self, rendered: _Rendered) -> ImageSupport:
        """Test the plugin.

        Raises:
            _UnprovenError: a part of the test failed.
        """
        what = "its answer to a request with images"
        exact = self._exact(_Answer(rendered.ids, self._image_places(rendered.places, what)))
        await self._check(exact, {})
        await self._check(exact, {"ranges": {"image": exact.places[:1]}})
        for images in ([*self._images, self._images[0]], self._images[:1]):
            await self._check_refused(exact.ids, images)
        return ImageSupport("plugin", "", await self._placeholder_ids(exact))

    async def try_generate(self, engine: EngineClient, renderer: EngineRenderer, rendered: _Rendered) -> ImageSupport:
        """Test `generate`.

        Raises:
            _UnprovenError: a part of the test failed.
        """
        try:
            return await self._generate(engine, renderer, rendered)
        except EngineError as why:
            if why.passing:
                raise
            raise _UnprovenError(str(why)) from why

    async def _generate(self, engine: EngineClient, renderer: EngineRenderer, rendered: _Rendered) -> ImageSupport:
        request = await render_request(engine, self._body(self._images))
        if request.ids != rendered.ids or len(request.images) != len(self._images):
            raise _UnprovenError("render gives other ids than chat completions, or no places of the images")
        compacted = await self._tokens(renderer, rendered.text)
        placeholder = learn_placeholder(request.ids, request.images, compacted)
        if placeholder is None:
            raise _UnprovenError("vLLM does more than to replace a placeholder by the ids of an image")
        drifted = [token for words in _NEWLINES for token in await self._tokens(renderer, words)]
        exact = self._exact(_Answer(rendered.ids, [*request.images]), drifted)
        parts = [{"type": "image_url", "url": image["image_url"]["url"]} for image in self._images]
        body = generate_body(request, compact(exact.ids, exact.places, placeholder), parts, 1)
        answer = await engine.post(GENERATE, body)
        if answer.status != HTTPStatus.OK:
            raise refusal(GENERATE, answer)
        if _read_answer(answer.body) != exact:
            raise _UnprovenError("it changes the ids of an exact prompt with images, or reports other places of the images")
        if not await Derender().streams(engine, self._model, rendered.ids):
            raise _UnprovenError("derender does not make messages of its replies")
        inside = {token for start, length in exact.places for token in exact.ids[start : start + length]}
        return ImageSupport("generate", "", tuple(sorted(inside)), tuple(placeholder))

    async def _tokens(self, renderer: EngineRenderer, words: str) -> list[int]:
        if not (found := await renderer.encode(self._model, words)):
            raise _UnprovenError("/tokenize does not tokenize text")
        return found

    def _exact(self, rendered: _Answer, more: Sequence[int] = ()) -> _Answer:
        """Make a prompt that no rendering gives: other words before, between and after the two images, and `more` next to each."""
        (first, length), (second, size) = rendered.places
        middle = first + length
        before, between = self._other[::-1], [*more, *self._other, *more]
        made = [
            *before,
            *rendered.ids[:middle],
            *between,
            *rendered.ids[middle : second + size],
            *more,
            *rendered.ids[second + size :],
            *before,
        ]
        return _Answer(made, [(first + len(before), length), (second + len(before) + len(between), size)])

    async def _check(self, exact: _Answer, more: Mapping[str, Any]) -> None:
        answer = await self._answer(self._images, {"ids": exact.ids, **more})
        if answer.status == HTTPStatus.BAD_REQUEST:
            raise _UnprovenError(f"it refuses exact prompts with images: {_words(answer)}")
        if self._used(answer, "its answer to an exact prompt with images") != exact:
            raise _UnprovenError("it does not use the ids of an exact prompt with images, or reports other places of the images")

    async def _check_refused(self, prompt: list[int], images: Sequence[Mapping[str, Any]]) -> None:
        answer = await self._answer(images, {"ids": prompt})
        if answer.status != HTTPStatus.BAD_REQUEST:
            raise _UnprovenError(f"it accepts an exact prompt for {len(self._images)} images together with {len(images)}")

    async def _placeholder_ids(self, exact: _Answer) -> tuple[int, ...]:
        """Find the ids of placeholders that stand for embeddings: outside a placeholder, the engine accepts them only if they are named."""
        inside = dict.fromkeys(token for start, length in exact.places for token in exact.ids[start : start + length])
        found = []
        for token in inside:
            longer = [*exact.ids, token]
            answer = await self._answer(self._images, {"ids": longer})
            if answer.status != HTTPStatus.BAD_REQUEST:
                continue
            found.append(token)
            await self._check(exact._replace(ids=longer), {"sampled": [len(exact.ids)]})
        if not found:
            raise _UnprovenError("it accepts placeholders without images")
        return tuple(found)

    async def _answer(self, images: Sequence[Mapping[str, Any]], prompt: Mapping[str, Any] | None = None) -> EngineResponse:
        transfer = {"kv_transfer_params": {PLUGIN_PROMPT: prompt}} if prompt is not None else {}
        return await self._ask(self._body(images) | {"return_prompt_text": True} | transfer)

    def _body(self, images: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"model": self._model, "messages": [_message(images)], "max_tokens": 1, "temperature": 0, "return_token_ids": True}

    def _prompt(self, answer: EngineResponse) -> list[int]:
        """Return the prompt that an answer reports.

        Raises:
            _UnprovenError: it is a refusal, or reports no prompt.
        """
        if answer.status != HTTPStatus.OK:
            raise _UnprovenError(f"it accepts no images: {_words(answer)}")
        read = Reply()
        read.add(answer.body)
        used = read.prompt.packed
        if used is None:
            raise _UnprovenError("it does not report the prompt of a request with images")
        return ids.unpack(used)

    def _image_places(self, places: Places | None, what: str) -> list[Place]:
        """Return the places of the images in an answer.

        Raises:
            _UnprovenError: it does not report them.
        """
        if places is None:
            raise _UnprovenError(f"{what} does not say where the images are: its plugin for images is not active (docs/images.md)")
        if [*places] != ["image"] or len(places["image"]) != len(self._images):
            raise _UnprovenError(f"{what} does not report the places of the images")
        return [*places["image"]]

    def _used(self, answer: EngineResponse, what: str) -> _Answer:
        return _Answer(self._prompt(answer), self._image_places(read_places(answer.headers), what))


def _text(answer: EngineResponse) -> str:
    """Return the text of the prompt in an answer; `""` if it has none."""
    found = answer.json()
    text = found.get("prompt_text") if isinstance(found, dict) else None
    return text if isinstance(text, str) else ""


def _read_answer(body: bytes) -> _Answer | None:
    """Read the ids and places that `generate` used; `None` if it reports none."""
    try:
        used, places = read_generated(body)
    except (ValueError, RecursionError):
        return None
    return _Answer(used, [*places["image"]]) if places is not None and [*places] == ["image"] else None


def _message(images: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": [_WORDS, *images]}


def _image_part(width: int, height: int, shade: int) -> dict[str, Any]:
    encoded = base64.b64encode(png(width, height, shade)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def _words(answer: EngineResponse) -> str:
    return f"{answer.status}: {answer.body[:300].decode(errors='replace')}"

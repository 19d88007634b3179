"""A simulated engine whose model may accept images, and that may have the plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.support.plugin_engine.images import ImageMode, Ranges, SimulatedImages, build_image_tokenizer
from tests.support.plugin_engine.prefixes import NamedIds, SimulatedPrefixes, pack_prompt, pack_tokens
from tokencache.testing import SimulatedEngine
from tokencache.testing.chat_request import read_chat_request
from tokencache.testing.completion import ChatCompletion
from tokencache.testing.derender import rendered
from tokencache.testing.generate_route import GeneratedCompletion, read_generate_request
from tokencache.testing.prompt import media_parts, prompt_ids
from tokencache.testing.replies import ReplyGenerator

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokencache.testing.chat_request import ChatRequest
    from tokencache.testing.generation import GenerationStep
    from tokencache.testing.ground_truth import GroundTruthEntry
    from tokencache.testing.parser import StreamParser


class PluginEngine(SimulatedEngine):
    """A simulated engine with images and prompts by hash.

    Args:
        images: whether its model accepts images, and whether it has the plugin for exact prompts with them; see `images`.
        prefixes: whether it has the plugin for prompts by hash; see `prefixes`.
        options: those of every simulated engine.

    Attributes:
        images: the images.
        prefixes: the prompts that it keeps.
    """

    def __init__(self, *, images: ImageMode = "", prefixes: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.prefixes = SimulatedPrefixes(offered=prefixes)
        if images:
            known, self.tokenizer = self.replies, build_image_tokenizer()
            self.replies = ReplyGenerator(self.tokenizer, known.episodes, known.seed, known.drift, eos=known.eos)
        self.images = SimulatedImages(images, self.tokenizer)

    def _rendered(self, request: ChatRequest) -> dict[str, Any]:
        if not self.images.mode:
            return super()._rendered(request)
        ids, places = self._expanded(request.body, request.template_arguments, self.images.read(request.body["messages"]))
        ranges = {"image": [{"offset": start, "length": length} for start, length in places]}
        features = {"mm_hashes": {}, "mm_placeholders": ranges, "kwargs_data": None} if places else None
        return rendered(request, ids, self.max_model_len) | {"features": features}

    def _render(self, body: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[int]:
        if not self.images.mode:
            return super()._render(body, arguments)
        return self._expanded(body, arguments, self.images.read(body["messages"]))[0]

    def _expanded(self, body: Mapping[str, Any], arguments: Mapping[str, Any], sizes: list[int]) -> tuple[list[int], Ranges]:
        """Return the ids of a conversation, and the placeholders of its images."""
        return self.images.expanded(self._template_ids(body, arguments), sizes)

    def _template_ids(self, body: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[int]:
        """Return the ids that the template gives, before images are expanded."""
        strict = self.strict_arguments
        return prompt_ids(self.tokenizer, body, arguments, model=self.model, strict_arguments=strict, takes_images=bool(self.images.mode))

    def _begin_generate(self, body: dict[str, Any], headers: Mapping[str, str]) -> GeneratedCompletion:
        request = read_generate_request(body, headers, self.tokenizer, served=self._served(body))
        ids, shown = self.images.generated(body["token_ids"], body.get("content_parts") or ())
        completion = self._begun(_PlacedCompletion, request, [ids])
        completion.places = shown
        return completion

    def _begin_chat(self, body: dict[str, Any], headers: Mapping[str, str]) -> ChatCompletion:
        request = read_chat_request(body, headers, served=self._served(body), vocabulary=self.tokenizer.vocabulary_size)
        named = self.prefixes.read(request.body)
        supplied = (named.ids, []) if named is not None and named.ids is not None else self._supplied_prompt(request.body)
        ids, places = self._render_for_reply(request) if supplied is None else supplied
        completion = self._begun(_NamedCompletion, request, [ids], supplied=supplied is not None, rendered=supplied is None)
        completion.headers |= self.images.headers(places)
        if named is not None:
            completion.named, completion.prefixes = named, self.prefixes
            completion.headers |= self.prefixes.headers(named, ids)
        if request.body.get("return_prompt_text"):
            completion.prompt_text = self.tokenizer.decode(self._template_ids(request.body, request.template_arguments))
        return completion

    def _render_for_reply(self, request: ChatRequest) -> tuple[list[int], Ranges]:
        """Return the ids of a conversation that is to be answered, and the placeholders of its images."""
        if not self.images.mode:
            return self._template_ids(request.body, request.template_arguments), []
        return self._expanded(request.body, request.template_arguments, self.images.load(request.body["messages"]))

    def _supplied_prompt(self, body: Mapping[str, Any]) -> tuple[list[int], Ranges] | None:
        """Return the prompt supplied with a request, and the placeholders of its images; `None` if there is none that the engine uses."""
        if self.images.mode and media_parts(body["messages"]):
            return self.images.supplied(body, self.images.load(body["messages"])) if self.images.takes(body) else None
        ids = self._supplied_ids(body)
        return None if ids is None else (ids, [])


@dataclass(slots=True)
class _PlacedCompletion(GeneratedCompletion):
    """A reply of `/inference/v1/generate`. `places` are the places of the images that it reports."""

    places: Ranges = ()

    async def whole(self) -> dict[str, Any]:
        shown = {"image": [{"offset": start, "length": length} for start, length in self.places]} if self.places else None
        return await GeneratedCompletion.whole(self) | {"mm_placeholders": shown}


@dataclass(slots=True)
class _NamedCompletion(ChatCompletion):
    """A chat completion. `named` says how its request names its prompt, and `prefixes` keeps that with the reply."""

    named: NamedIds | None = None
    prefixes: SimulatedPrefixes | None = None

    def _finish(self, entry: GroundTruthEntry, reason: str | None) -> None:
        ChatCompletion._finish(self, entry, reason)
        if self.prefixes is not None and reason not in {None, "abort"}:
            self.prefixes.keep([*entry.prompt_ids, *entry.completion_ids])

    def _prompt_echo(self, named: NamedIds) -> dict[str, Any]:
        """The members of the answer with the ids of the prompt."""
        shown = self.request.return_token_ids and named.echo
        packed = pack_prompt(self.prompts[0]) if shown and named.packed else {}
        return {"prompt_token_ids": self.prompts[0] if shown and not packed else None} | packed

    async def whole(self) -> dict[str, Any]:
        reply = await ChatCompletion.whole(self)
        if self.named is None:
            return reply
        for choice in reply["choices"]:
            if self.named.packed:
                pack_tokens(choice)
            if not self.named.experts:
                choice["routed_experts"] = None
        return reply | self._prompt_echo(self.named)

    def _first_chunk(self, index: int) -> dict[str, Any]:
        first = ChatCompletion._first_chunk(self, index)
        return first if self.named is None else first | self._prompt_echo(self.named)

    def _chunk(self, index: int, step: GenerationStep, parser: StreamParser) -> dict[str, Any] | None:
        chunk = ChatCompletion._chunk(self, index, step, parser)
        if chunk is not None and self.named is not None and self.named.packed:
            pack_tokens(chunk["choices"][0])
        return chunk

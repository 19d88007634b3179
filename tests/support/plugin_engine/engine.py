"""A simulated engine whose model may accept images, that may have the plugin, and whose replies may report more."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tests.support.plugin_engine.images import ImageMode, Ranges, SimulatedImages, build_image_tokenizer
from tests.support.plugin_engine.metadata import ReplyMetadata, VersionStyle
from tests.support.plugin_engine.prefixes import NamedIds, SimulatedPrefixes, pack_prompt, pack_tokens
from tokencache.testing import SimulatedEngine
from tokencache.testing.chat_request import read_chat_request
from tokencache.testing.completion import ChatCompletion, Completion, TextCompletion
from tokencache.testing.derender import rendered
from tokencache.testing.generate_route import GeneratedCompletion, read_generate_request
from tokencache.testing.prompt import media_parts, prompt_ids
from tokencache.testing.replies import ReplyGenerator

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tokencache.testing.chat_request import ChatRequest
    from tokencache.testing.generation import GenerationStep
    from tokencache.testing.ground_truth import GroundTruthEntry


class PluginEngine(SimulatedEngine):
    """A simulated engine with images, prompts by hash, weight versions and routed experts.

    Args:
        images: whether its model accepts images, and whether it has the plugin for exact prompts with them; see `images`.
        prefixes: whether it has the plugin for prompts by hash; see `prefixes`.
        weight_versions: how it reports weight versions; see `metadata`.
        routed_experts: number of layers, and of experts chosen in each. If set, it reports routed experts.
        options: those of every simulated engine.

    Attributes:
        images: the images.
        prefixes: the prompts that it keeps.
        metadata: what its replies report.
    """

    def __init__(
        self,
        *,
        images: ImageMode = "",
        prefixes: bool = False,
        weight_versions: VersionStyle = "",
        routed_experts: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.metadata = ReplyMetadata(self.weights, weight_versions, routed_experts)
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

    def _begun(self, kind: type[Completion], request: ChatRequest, prompts: list[list[int]], **how: bool) -> Any:
        completion = super()._begun(_KINDS[kind], request, prompts, **how)
        completion.metadata = self.metadata
        completion.headers |= self.metadata.headers
        return completion

    def _new_entries(self, request: ChatRequest, prompts: Sequence[Sequence[int]], *, supplied: bool) -> list[GroundTruthEntry]:
        for prompt in prompts:
            self.metadata.check(request, prompt)
        return super()._new_entries(request, prompts, supplied=supplied)

    def _begin_generate(self, body: dict[str, Any], headers: Mapping[str, str]) -> GeneratedCompletion:
        request = read_generate_request(body, headers, self.tokenizer, served=self._served(body))
        ids, shown = self.images.generated(body["token_ids"], body.get("content_parts") or ())
        completion = self._begun(GeneratedCompletion, request, [ids])
        completion.places = shown
        return completion

    def _begin_chat(self, body: dict[str, Any], headers: Mapping[str, str]) -> ChatCompletion:
        request = read_chat_request(body, headers, served=self._served(body), vocabulary=self.tokenizer.vocabulary_size)
        named = self.prefixes.read(request.body)
        supplied = (named.ids, []) if named is not None and named.ids is not None else self._supplied_prompt(request.body)
        ids, places = self._render_for_reply(request) if supplied is None else supplied
        completion = self._begun(ChatCompletion, request, [ids], supplied=supplied is not None, rendered=supplied is None)
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


class _Reporting:
    """A completion whose reply reports weight versions and routed experts. `versions` has those of each token, by choice."""

    metadata: ReplyMetadata

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.versions: defaultdict[int, list[str]] = defaultdict(list)

    def _steps(self, index: int) -> Iterator[GenerationStep]:
        for step in super()._steps(index):
            self.versions[index].extend([self.metadata.version] * len(step.ids))
            yield step

    async def whole(self) -> dict[str, Any]:
        reply = await super().whole()
        for index, choice in enumerate(reply["choices"]):
            choice["routed_experts"] = self.metadata.routed(self.request, self._prompt(index), self.entries[index].completion_ids)
            choice.update(self.metadata.of_choice(self.request, self.versions[index]))
        return reply | self.metadata.of_reply()

    def _chunk(self, index: int, step: GenerationStep, *rest: Any, **more: Any) -> dict[str, Any] | None:
        chunk = super()._chunk(index, step, *rest, **more)
        if chunk is not None and step.finish_reason is not None:
            chunk["choices"][0] |= self.metadata.of_choice(self.request, self.versions[index])
        return chunk


class _Text(_Reporting, TextCompletion):
    """A text completion."""


class _Generated(GeneratedCompletion):
    """A reply of `/inference/v1/generate`. `places` are the places of the images that it reports."""

    metadata: ReplyMetadata
    places: Ranges = ()

    async def whole(self) -> dict[str, Any]:
        shown = {"image": [{"offset": start, "length": length} for start, length in self.places]} if self.places else None
        reply = await super().whole()
        for index, choice in enumerate(reply["choices"]):
            choice["routed_experts"] = self.metadata.routed(self.request, self._prompt(index), self.entries[index].completion_ids)
        return reply | {"mm_placeholders": shown}


class _Chat(_Reporting, ChatCompletion):
    """A chat completion. `named` says how its request names its prompt, and `prefixes` keeps that with the reply."""

    named: NamedIds | None = None
    prefixes: SimulatedPrefixes | None = None

    def _finish(self, entry: GroundTruthEntry, reason: str | None) -> None:
        super()._finish(entry, reason)
        if self.prefixes is not None and reason not in {None, "abort"}:
            self.prefixes.keep([*entry.prompt_ids, *entry.completion_ids])

    def _prompt_echo(self, named: NamedIds) -> dict[str, Any]:
        """The members of the answer with the ids of the prompt."""
        shown = self.request.return_token_ids and named.echo
        packed = pack_prompt(self.prompts[0]) if shown and named.packed else {}
        return {"prompt_token_ids": self.prompts[0] if shown and not packed else None} | packed

    async def whole(self) -> dict[str, Any]:
        reply = await super().whole()
        if self.named is None:
            return reply
        for choice in reply["choices"]:
            if self.named.packed:
                pack_tokens(choice)
            if not self.named.experts:
                choice["routed_experts"] = None
        return reply | self._prompt_echo(self.named)

    def _first_chunk(self, index: int) -> dict[str, Any]:
        first = super()._first_chunk(index)
        return first if self.named is None else first | self._prompt_echo(self.named)

    def _chunk(self, index: int, step: GenerationStep, *rest: Any, **more: Any) -> dict[str, Any] | None:
        chunk = super()._chunk(index, step, *rest, **more)
        if chunk is not None and self.named is not None and self.named.packed:
            pack_tokens(chunk["choices"][0])
        return chunk


_KINDS = {TextCompletion: _Text, GeneratedCompletion: _Generated, ChatCompletion: _Chat}

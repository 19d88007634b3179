"""Images in the simulated engine: expansion, and exact prompts as the plugin accepts them."""

import json

import aiohttp
import pytest

from tests.images import data_uri, image
from tests.support.plugin_engine import PluginEngine
from tests.support.plugin_engine.images import ImageFault
from tokencache.testing import SimulatedEngine

ONE, TWO = image(1), image(2, width=60)


@pytest.fixture
async def ask():
    async with PluginEngine(images="plugin").serve() as url, aiohttp.ClientSession() as http:

        async def post(*parts, **more):
            body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "See"}, *parts]}], "max_tokens": 1}
            async with http.post(f"{url}/v1/chat/completions", json={"return_token_ids": True, **body, **more}) as answer:
                said = await answer.json()
                return answer.status, said, json.loads(answer.headers.get("x-tokencache-media", "null"))

        yield post


async def test_a_placeholder_has_as_many_tokens_as_the_image_has_patches(ask):
    status, said, places = await ask(ONE, TWO)
    assert status == 200
    ids, ((first, one), (second, two)) = said["prompt_token_ids"], places["image"]
    assert (one, two) == (1, 3)
    assert ids[second : second + two] == ids[first : first + 1] * 3


async def test_supplied_ids_are_the_prompt(ask):
    _, said, places = await ask(ONE, TWO)
    ids = said["prompt_token_ids"]
    exact = [ids[0], ids[0], *ids]
    moved = {"image": [[start + 2, length] for start, length in places["image"]]}
    _, said, found = await ask(ONE, TWO, kv_transfer_params={"tokencache_prompt": {"ids": exact, "ranges": moved}})
    assert (said["prompt_token_ids"], found) == (exact, moved)


async def test_ids_that_do_not_fit_the_images_are_refused(ask):
    _, said, places = await ask(ONE, TWO)
    ids, pad = said["prompt_token_ids"], said["prompt_token_ids"][places["image"][0][0]]
    for parts, prompt in (
        ([ONE], {"ids": ids}),
        ([ONE, TWO, ONE], {"ids": ids}),
        ([TWO, ONE], {"ids": ids}),
        ([ONE, TWO], {"ids": ids, "ranges": {"image": [[0, 1]]}}),
        ([ONE, TWO], {"ids": [*ids, pad]}),
    ):
        status, refusal, _ = await ask(*parts, kv_transfer_params={"tokencache_prompt": prompt})
        assert status == 400
        assert "kv_transfer_params.tokencache_prompt" in refusal["error"]["message"]
    status, said, _ = await ask(ONE, TWO, kv_transfer_params={"tokencache_prompt": {"ids": [*ids, pad], "sampled": [len(ids)]}})
    assert (status, said["prompt_token_ids"]) == (200, [*ids, pad])


async def test_a_model_for_text_refuses_images():
    async with SimulatedEngine().serve() as url, aiohttp.ClientSession() as http:
        body = {"messages": [{"role": "user", "content": [ONE]}]}
        async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["message"] == "sim is not a multimodal model"


@pytest.mark.parametrize("content", [b"GIF89a", b"\x89PNG\r\n\x1a\n"])
async def test_a_broken_image_is_refused(ask, content):
    status, refusal, _ = await ask({"type": "image_url", "image_url": {"url": data_uri(content)}})
    assert status == 400
    assert "Failed to load image" in refusal["error"]["message"]


@pytest.mark.parametrize("fault", ImageFault)
async def test_every_fault_can_be_seen(fault):
    engine = PluginEngine(images="plugin")
    engine.images.fault = fault
    async with engine.serve() as url, aiohttp.ClientSession() as http:
        body = {"messages": [{"role": "user", "content": [TWO]}], "max_tokens": 1, "return_token_ids": True}
        async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
            ids = (await answer.json())["prompt_token_ids"]
        exact = [ids[0], *ids]
        start = exact.index(max(exact))
        async with http.post(
            f"{url}/v1/chat/completions", json=body | {"kv_transfer_params": {"tokencache_prompt": {"ids": exact}}}
        ) as answer:
            said, header = await answer.json(), answer.headers.get("x-tokencache-media")
    right = (
        answer.status == 200 and said["prompt_token_ids"] == exact and header == json.dumps({"image": [[start, 3]]}, separators=(",", ":"))
    )
    assert not right

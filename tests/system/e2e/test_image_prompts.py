"""Exact prompts with images on a real vLLM with the plugin: the prompt is what was sent, and the response tells where the images are."""

import base64
import json

import aiohttp
import pytest
from rig.server import MODEL
from rig.vision import png

from tokencache_vllm.images import MEMBER
from tokencache_vllm.response_headers import MEDIA_HEADER

SIZES = [(64, 64), (128, 96), (64, 160), (64, 64)]


def image(width, height, seed=0, **members):
    url = "data:image/png;base64," + base64.b64encode(png(width, height, seed)).decode()
    return {"type": "image_url", "image_url": {"url": url}, **members}


def text(words):
    return {"type": "text", "text": words}


class Engine:
    """Requests to the server, and what its answers say."""

    def __init__(self, http, url):
        self.http, self.url = http, url

    async def post(self, path, body):
        async with self.http.post(self.url + path, json={"model": MODEL, **body}) as answer:
            return answer.status, json.loads(answer.headers.get(MEDIA_HEADER, "{}")), await answer.json()

    async def ask(self, messages, *, stream=False, **prompt):
        """Prompt ids, images' places, completion ids and log probabilities of a chat completion."""
        body = {"messages": messages, "return_token_ids": True, "logprobs": True, "max_tokens": 200, "stream": stream}
        if prompt:
            body["kv_transfer_params"] = {MEMBER: prompt}
        if not stream:
            status, places, answer = await self.post("/v1/chat/completions", body)
            assert status == 200, answer
            chunks = [answer]
        else:
            async with self.http.post(f"{self.url}/v1/chat/completions", json={"model": MODEL, **body}) as answer:
                assert answer.status == 200
                places = json.loads(answer.headers.get(MEDIA_HEADER, "{}"))
                lines = [line async for line in answer.content if line.startswith(b"data: {")]
                chunks = [json.loads(line[6:]) for line in lines]
        (prompt_ids,) = [chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        completion = [token for choice in choices for token in choice.get("token_ids") or ()]
        entries = [entry for choice in choices if choice.get("logprobs") for entry in choice["logprobs"]["content"]]
        return prompt_ids, places.get("image", []), completion, [entry["logprob"] for entry in entries]

    async def rendered(self, messages):
        """The ids that vLLM would use, and the images' places."""
        status, places, answer = await self.post("/tokenize", {"messages": messages, "add_generation_prompt": True})
        assert status == 200, answer
        return answer["tokens"], places["image"]

    async def refusal(self, messages, **prompt):
        status, places, answer = await self.post("/v1/chat/completions", {"messages": messages, "kv_transfer_params": {MEMBER: prompt}})
        assert (status, places) == (400, {})
        return answer["error"]["message"]


@pytest.fixture
async def engine(vision_server):
    async with aiohttp.ClientSession() as http:
        yield Engine(http, vision_server.url)


def opening(episode="see"):
    return [{"role": "user", "content": [text(f"EPISODE:{episode} What do you see?"), image(*SIZES[0])]}]


async def tail(engine, messages):
    """The ids behind the last reply of a conversation, rendered."""
    ids, _ = await engine.rendered(messages)
    before, _ = await engine.rendered([*messages[:-1], {"role": "user", "content": "sentinel"}])
    same = next(at for at, (one, other) in enumerate(zip(ids, before, strict=False)) if one != other)
    opener = ids[-3:]  # <|im_start|>assistant\n
    start = max(at for at in range(same) if ids[at] == opener[0])
    return ids[start - 1 :]  # from the newline behind the reply


@pytest.mark.parametrize("stream", [False, True])
async def test_four_turns_extend_one_another(engine, stream):
    messages = opening()
    prompt, places, reply, logprobs = await engine.ask(messages, stream=stream)
    assert (prompt, places) == await engine.rendered(messages)
    for seed, size in enumerate(SIZES[1:], 1):
        messages += [{"role": "assistant", "content": "…"}, {"role": "user", "content": [image(*size, seed), text(f"And number {seed}?")]}]
        sent = prompt + reply + await tail(engine, messages)
        known = places
        prompt, places, reply, logprobs = await engine.ask(messages, stream=stream, ids=sent, ranges={"image": known})
        assert prompt == sent
        assert places[:-1] == known
        assert len(places) == seed + 1
        assert len(reply) == len(logprobs) > 0


async def test_an_exact_prompt_that_is_vllms_own_gives_vllms_reply(engine):
    messages = opening()
    prompt, places, reply, logprobs = await engine.ask(messages)
    again = await engine.ask(messages, ids=prompt)
    assert (*again[:2], again[2][0], again[3][0]) == (prompt, places, reply[0], logprobs[0])
    other = [{"role": "user", "content": [*messages[0]["content"][:1], image(*SIZES[0], seed=9)]}]
    assert (await engine.ask(other, ids=prompt))[3][0] != logprobs[0], "the image itself counts"


async def test_an_image_that_is_only_named_gives_the_same_log_probabilities(engine):
    messages = opening()
    prompt, places, _, logprobs = await engine.ask(messages)
    words, shown = messages[0]["content"]
    for picture in (shown | {"uuid": "one"}, {"type": "image_url", "image_url": None, "uuid": "one"}):
        named = [{"role": "user", "content": [words, picture]}]
        again = await engine.ask(named, ids=prompt, ranges={"image": places})
        assert (*again[:2], again[3][0]) == (prompt, places, logprobs[0])


async def test_an_image_that_was_dropped_and_a_placeholder_that_was_sampled(engine):
    messages = opening("placeholder")
    prompt, [(start, length)], reply, _ = await engine.ask(messages)
    pad = prompt[start]
    assert pad in reply
    messages += [{"role": "assistant", "content": "…"}, {"role": "user", "content": "Go on."}]
    sent = prompt + reply + await tail(engine, messages)
    sampled = [len(prompt) + at for at, token in enumerate(reply) if token == pad]
    assert "sampled" in await engine.refusal(messages, ids=sent)
    assert (await engine.ask(messages, ids=sent, sampled=sampled))[:2] == (sent, [[start, length]])
    dropped = [{"role": "user", "content": "EPISODE:placeholder Nothing."}, *messages[1:]]
    without = prompt[: start - 1] + prompt[start + length + 1 :] + reply + sent[len(prompt + reply) :]
    places = [at - length - 2 for at in sampled]
    assert (await engine.ask(dropped, ids=without, sampled=places))[:2] == (without, [])
    assert "placeholder" in await engine.refusal(dropped, ids=sent, sampled=sampled)


async def test_images_and_ids_that_do_not_belong_together_are_refused(engine):
    messages = opening()
    prompt, [(start, length)], _, _ = await engine.ask(messages)
    two = [{"role": "user", "content": [*messages[0]["content"], image(*SIZES[1])]}]
    compact = [*prompt[: start + 1], *prompt[start + length :]]
    assert "2 of kind image" in await engine.refusal(two, ids=prompt)
    assert len((await engine.ask(two))[1]) == len(two[0]["content"]) - 1, "an image of a refused request is still usable"
    assert "1 of kind image" in await engine.refusal(messages, ids=compact)
    assert "`ranges`" in await engine.refusal(messages, ids=prompt, ranges={"image": [[start + 1, length]]})
    assert "`ids`" in await engine.refusal(messages, ids=[])
    broken = [{"role": "user", "content": [text("See"), {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]
    assert "image" in await engine.refusal(broken, ids=prompt)


async def test_an_image_that_vllm_has_is_known_by_its_uuid(engine):
    sized = image(*SIZES[2], seed=5, uuid="u-5")
    messages = [{"role": "user", "content": [text("EPISODE:see See"), sized]}]
    prompt, places, _, logprobs = await engine.ask(messages)
    named = [{"role": "user", "content": [text("EPISODE:see See"), {"type": "image_url", "image_url": None, "uuid": "u-5"}]}]
    found = await engine.ask(named, ids=prompt)
    assert (found[0], found[1], found[3][0]) == (prompt, places, logprobs[0])


async def test_other_dialects_tell_the_places(engine):
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(*SIZES[1])).decode()}
    content = [{"type": "text", "text": "EPISODE:see See"}, {"type": "image", "source": source}]
    status, places, answer = await engine.post("/v1/messages", {"max_tokens": 200, "messages": [{"role": "user", "content": content}]})
    assert (status, len(places["image"])) == (200, 1), answer
    parts = [
        {"type": "input_text", "text": "EPISODE:see See"},
        {"type": "input_image", "image_url": image(*SIZES[1])["image_url"]["url"]},
    ]
    asked = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 200, "store": False}
    status, places, _ = await engine.post("/v1/responses", asked)
    assert (status, len(places["image"])) == (200, 1)
    status, places, _ = await engine.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "EPISODE:see"}]})
    assert (status, places) == (200, {})

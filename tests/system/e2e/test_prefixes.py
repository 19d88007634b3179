"""Prompts whose beginning is named by a hash, on a real vLLM with the plugin: what the engine uses is prefix and tail."""

import base64
import hashlib
import json

import aiohttp
import pytest
from rig.server import MODEL, one_request_each

from tokencache.core import ids as core_ids
from tokencache.vllm_plugin.prefixes import MEMBER, MISS_HEADER, PROMPT_HEADER


def sha256(tokens):
    return hashlib.sha256(core_ids.pack(tokens)).hexdigest()


def named(prefix, tail, **members):
    prefixed = {"hash": sha256(prefix), "length": len(prefix)} if prefix else {}
    return {**prefixed, "tail": base64.b64encode(core_ids.pack(tail)).decode(), **members}


class Engine:
    def __init__(self, http, url):
        self.http, self.url = http, url

    async def ask(self, messages, member=None, *, stream=False, **fields):
        """Status, headers, the ids of the prompt if they are returned, and the ids and log probabilities of the reply."""
        body = {
            "model": MODEL,
            "messages": messages,
            "return_token_ids": True,
            "logprobs": True,
            "max_tokens": 200,
            "temperature": 0,
            **fields,
        }
        if member is not None:
            body["kv_transfer_params"] = {MEMBER: member}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body | {"stream": stream}) as answer:
            raw = await answer.read()
        if not stream or answer.status != 200:
            chunks = [json.loads(raw)]
        else:
            chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
        prompts = [chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids")]
        choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
        reply = [token for choice in choices for token in choice.get("token_ids") or ()]
        entries = [entry for choice in choices if choice.get("logprobs") for entry in choice["logprobs"]["content"]]
        return answer.status, answer.headers, prompts[0] if prompts else None, (reply, [entry["logprob"] for entry in entries])

    async def tail(self, messages):
        """The ids that follow the last reply, rendered."""
        ends = []
        for words in ("one", "two"):
            conversation = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": words}, messages[-1]]
            async with self.http.post(f"{self.url}/tokenize", json={"model": MODEL, "messages": conversation}) as answer:
                ends.append((await answer.json())["tokens"])
        same = next(at for at, (one, other) in enumerate(zip(*(end[::-1] for end in ends), strict=False)) if one != other)
        return ends[0][len(ends[0]) - same :][1:]  # without the reply's own end of turn


@pytest.fixture
async def engine(vision_server):
    async with aiohttp.ClientSession(connector=one_request_each()) as http:
        yield Engine(http, vision_server.url)


def opening(words):
    return [{"role": "user", "content": words}]


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_that_name_the_one_before_use_its_exact_ids(engine, stream):
    messages = opening(f"EPISODE:see What do you see? {stream}")
    status, headers, prompt, (reply, logprobs) = await engine.ask(messages, {}, stream=stream)
    assert (status, headers[PROMPT_HEADER]) == (200, sha256(prompt))
    for turn in range(3):
        messages += [{"role": "assistant", "content": "…"}, {"role": "user", "content": f"And number {turn}?"}]
        prefix, tail = prompt + reply, await engine.tail(messages)
        prompt = prefix + tail
        status, headers, echo, (reply, logprobs) = await engine.ask(messages, named(prefix, tail), stream=stream)
        assert (status, headers.get(PROMPT_HEADER), echo) == (200, sha256(prompt), None)
        assert len(reply) == len(logprobs) > 0
        whole = await engine.ask(messages, named([], prompt, echo=True), stream=stream)
        assert whole[2] == prompt, "prefix and tail are the same prompt as the whole"


async def test_a_prefix_that_the_server_does_not_have_is_a_miss(engine):
    status, headers, _, _ = await engine.ask(opening("EPISODE:see Hi."), named([1, 2, 3], [4]))
    assert (status, headers[MISS_HEADER]) == (400, "miss")
    assert PROMPT_HEADER not in headers


async def test_ids_out_of_vocabulary_and_media_are_refused(engine):
    status, headers, _, _ = await engine.ask(opening("EPISODE:see Hi."), named([], [2**30]))
    assert status == 400
    assert MISS_HEADER not in headers
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    status, *_ = await engine.ask([{"role": "user", "content": [image]}], named([], [1, 2]))
    assert status == 400


async def test_without_the_member_answers_are_vllms_own(engine):
    status, headers, prompt, _ = await engine.ask(opening("EPISODE:see Hello."))
    assert (status, PROMPT_HEADER in headers) == (200, False)
    assert prompt

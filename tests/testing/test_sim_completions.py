"""The simulated engine's text completions: their form as in vLLM 0.32, and their ground truth."""

import json
from itertools import chain

import aiohttp
import pytest

from tokencache.testing import SimulatedEngine

EPISODES = {"talk": ["One — naïve ☕."]}
FIRST = ["index", "text", "logprobs", "finish_reason", "stop_reason"]
CHOICE = [*FIRST, "token_ids", "prompt_logprobs", "prompt_token_ids", "routed_experts"]
STREAMED = [*FIRST, "prompt_token_ids", "token_ids"]


@pytest.fixture
async def ask():
    engine = SimulatedEngine(episodes=EPISODES, seed=3)
    async with engine.serve() as url, aiohttp.ClientSession() as http:

        async def post(**body):
            async with http.post(f"{url}/v1/completions", json={"max_tokens": 100, **body}) as answer:
                text = await answer.text()
            if answer.content_type != "text/event-stream":
                return answer.status, json.loads(text)
            lines = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
            assert lines.pop() == "[DONE]"
            return answer.status, [json.loads(line) for line in lines]

        post.engine = engine
        yield post


async def test_a_whole_reply(ask):
    status, plain = await ask(prompt="EPISODE:talk")
    (choice,) = plain["choices"]
    assert status == 200
    assert list(choice) == CHOICE
    assert choice["text"] == EPISODES["talk"][0]
    assert [choice[name] for name in ("logprobs", "token_ids", "prompt_token_ids")] == [None] * 3
    (entry,) = ask.engine.ground_truth
    assert plain["usage"]["completion_tokens"] == len(entry.completion_ids)
    assert entry.prompt_ids == ask.engine.tokenizer.encode("EPISODE:talk")


async def test_batches_of_text_and_of_ids(ask):
    ids = ask.engine.tokenizer.encode("EPISODE:talk")
    for prompt in (["EPISODE:talk", "EPISODE:talk!"], [ids, [*ids, 5]]):
        ask.engine.ground_truth.clear()
        _, said = await ask(prompt=prompt, n=2, logprobs=1, return_token_ids=True)
        assert [choice["index"] for choice in said["choices"]] == [0, 1, 2, 3]
        for choice, entry in zip(said["choices"], ask.engine.ground_truth, strict=True):
            assert choice["prompt_token_ids"] == entry.prompt_ids
            assert choice["token_ids"] == entry.completion_ids
            assert choice["logprobs"]["token_logprobs"] == entry.logprobs
            assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])
        assert ask.engine.ground_truth[0].prompt_ids == ids != ask.engine.ground_truth[2].prompt_ids


async def test_streams(ask):
    _, plain = await ask(prompt=["EPISODE:talk", "EPISODE:talk!"], stream=True)
    _, full = await ask(
        prompt=["EPISODE:talk", "EPISODE:talk!"], stream=True, logprobs=0, return_token_ids=True, stream_options={"include_usage": True}
    )
    usage = full.pop()
    ground_truth = ask.engine.ground_truth[2:]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == sum(len(entry.completion_ids) for entry in ground_truth)
    assert all(list(chunk["choices"][0]) == STREAMED for chunk in plain + full)
    assert all(chunk["choices"][0]["token_ids"] is None for chunk in plain)
    for index, entry in enumerate(ground_truth):
        mine = [chunk["choices"][0] for chunk in full if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == EPISODES["talk"][0]
        assert list(chain.from_iterable(choice["token_ids"] for choice in mine)) == entry.completion_ids
        assert list(chain.from_iterable(choice["logprobs"]["token_logprobs"] for choice in mine)) == entry.logprobs
        assert [choice["prompt_token_ids"] for choice in mine] == [entry.prompt_ids] + [None] * (len(mine) - 1)
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]


async def test_limits(ask):
    _, said = await ask(prompt="EPISODE:talk", max_tokens=2)
    assert said["choices"][0]["finish_reason"] == "length"
    assert said["usage"]["completion_tokens"] == 2
    for body in ({}, {"prompt": ""}, {"prompt": "x", "echo": True}, {"prompt": "x", "n": 0}):
        status, _ = await ask(**body)
        assert status == 400
    assert (await ask(prompt="x", model="nope"))[0] == 404

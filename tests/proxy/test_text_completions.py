"""Text completions within a session: what a direct client gets, to the byte, and every choice of every prompt in the record."""

import json
import re

import pytest

from tests.proxy.kit import HEADER, proxied
from tokencache.testing import Fault, SimulatedEngine

TEXT = "/v1/completions"
PROMPTS = {"text": "Once upon", "ids": [5, 6, 7], "texts": ["Once", "Twice upon"], "lists of ids": [[5, 6, 7], [8, 9]]}
ASKS = [
    {},
    {"n": 2},
    {"logprobs": 1},
    {"return_token_ids": True},
    {"stream": True},
    {"stream": True, "n": 2, "stream_options": {"include_usage": True}},
    {"stream": True, "return_token_ids": True, "logprobs": 0},
]


async def answer(rig, url, body, session=None):
    """Status and body, with what is random or a time masked; the engine says the same both times."""
    rig.engine.replies.seed = 5
    async with rig.http.post(
        url + TEXT, json=body, headers={HEADER: session, "X-Request-Id": "r"} if session else {"X-Request-Id": "r"}
    ) as said:
        return said.status, re.sub(r'"created":\d+', '"created":0', await said.text())


def parts(text, *, stream):
    chunks = [json.loads(event[6:]) for event in text.split("\n\n") if event.startswith("data: {")] if stream else [json.loads(text)]
    return [choice for chunk in chunks for choice in chunk["choices"]]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("asked", ASKS, ids=json.dumps)
async def test_every_choice_is_recorded_and_nothing_else_is_shown(rig, prompt, asked):
    prompts = PROMPTS[prompt]
    body = {"model": "sim", "prompt": prompts, "max_tokens": 6, "temperature": 0.5, **asked}
    status, text = await answer(rig, rig.url, body, "s")
    assert status == 200, text
    choices = parts(text, stream=bool(asked.get("stream")))
    expected = asked.get("n", 1) * (2 if prompt in {"texts", "lists of ids"} else 1)
    assert {choice["index"] for choice in choices} == set(range(expected))
    if not asked.get("return_token_ids"):
        assert not any(choice.get("token_ids") or choice.get("prompt_token_ids") for choice in choices)
    if "logprobs" not in asked:
        assert not any(choice.get("logprobs") for choice in choices)
    turns = await rig.turns()
    assert [(turn["choice"], turn["match"], turn["reason"], turn["dialect"]) for turn in turns] == [
        (n, "plain", "text-completion", "completions") for n in range(expected)
    ]
    assert all(turn["sampling"]["temperature"] == 0.5 for turn in turns)
    exported = await rig.check()
    assert exported["complete"]
    assert len(exported["sequences"]) == expected


async def test_a_direct_client_would_have_seen_the_same(rig):
    body = {"model": "sim", "prompt": "Once upon", "max_tokens": 6}
    for asked in ASKS:
        within, direct = [(await answer(rig, url, body | asked, session))[1] for url, session in ((rig.url, "s"), (rig.up, None))]
        stream = bool(asked.get("stream"))
        assert [sorted(choice) for choice in parts(within, stream=stream)][:1] == [
            sorted(choice) for choice in parts(direct, stream=stream)
        ][:1]


@pytest.mark.parametrize("engine_kind", ["vllm", "completions"])
async def test_a_whole_reply_to_a_stream_is_passed_on(engine_kind):
    """The client requested a stream from the engine itself, also if its driver never requests one for a chat call."""
    choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop", "token_ids": [5], "prompt_token_ids": [6]}
    whole = {"id": "c", "object": "text_completion", "created": 1, "model": "sim", "choices": [choice]}
    async with proxied(SimulatedEngine(derenders=True), engine_kind=engine_kind) as rig:
        rig.engine.faults.append(Fault.answer(200, json.dumps(whole), path=TEXT))
        body = {"model": "sim", "prompt": "Once", "stream": True}
        async with rig.http.post(rig.url + TEXT, json=body, headers={HEADER: "s"}) as said:
            assert json.loads(await said.read())["choices"][0]["text"] == "a"


async def test_a_turn_names_its_harness(rig):
    headers = {HEADER: "s", "X-Tokencache-Harness": "codex"}
    async with rig.http.post(rig.url + TEXT, json={"model": "sim", "prompt": "Once", "max_tokens": 3}, headers=headers) as said:
        assert said.status == 200, await said.text()
    assert [turn["harness"] for turn in await rig.turns()] == ["codex"]


@pytest.mark.parametrize("why", [{"echo": True}, {"use_beam_search": True}])
async def test_what_cannot_be_recorded_truthfully_is_a_hole(rig, why):
    rig.engine.faults.append(Fault.answer(200, '{"choices": []}', path=TEXT))
    async with rig.http.post(
        rig.url + TEXT, json={"model": "sim", "prompt": "Once", "max_tokens": 3, **why}, headers={HEADER: "s"}
    ) as said:
        await said.read()
    info = await rig.info()
    assert [(incident["kind"], incident["hole"]) for incident in info["incidents"]] == [("unrecorded-route", True)]
    assert not info["complete"]

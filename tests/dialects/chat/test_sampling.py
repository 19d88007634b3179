"""Which members of a request are recorded because they bend or replace the policy's choice."""

import json

import pytest

from tests.proxy.kit import CHAT, HEADER, TOOLS, proxied, user
from tests.support.reading import read_chat
from tokencache.dialects.chat.incremental import IncrementalParser
from tokencache.dialects.chat.sampling import recorded

SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
BENDS = {
    "thinking_token_budget": 6, "response_format": SCHEMA, "structured_outputs": {"choice": ["a", "b"]}, "bad_words": ["no"],
    "logit_bias": {"7": 5}, "allowed_token_ids": [7, 8], "watermarking": False, "vllm_xargs": {"own": 1},
    "repetition_detection": {"max_pattern_size": 4, "min_count": 3}, "guided_regex": "a+", "min_tokens": 3,
}  # fmt: skip


def sampling_of(**more):
    call = read_chat(json.dumps({"model": "m", "messages": [user("hi")], **more}).encode(), IncrementalParser())
    return recorded(call.fields)


@pytest.mark.parametrize("name", BENDS)
def test_a_member_that_bends_the_choice_is_recorded_as_sent(name):
    assert sampling_of(**{name: BENDS[name]}, user="x", priority=0, logprobs=True) == {name: BENDS[name]}


def test_strict_tools_are_named():
    strict = [{**tool, "function": {**tool["function"], "name": f"t{n}", "strict": n == 1}} for n, tool in enumerate(TOOLS * 3)]
    assert sampling_of(tools=strict) == {"strict_tools": ["t1"]}
    assert sampling_of(tools=TOOLS) == {}
    assert sampling_of(tools=[{"type": "function", "function": {"name": "a", "description": '"strict"'}}]) == {}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/messages", {"max_tokens": 60, "thinking": {"type": "enabled", "budget_tokens": 30}}, {"thinking_token_budget": 30}),
        (
            "/v1/messages",
            {"max_tokens": 60, "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {"response_format"},
        ),
        (CHAT, {"thinking_token_budget": 30}, {"thinking_token_budget": 30}),
    ],
)
async def test_a_turn_names_what_its_dialect_makes_of_the_request(path, body, named):
    async with proxied() as rig:
        status, said = await rig.post("s", path, model="sim", messages=[user("hello")], **body)
        assert status == 200, said
        (turn,) = await rig.turns()
        assert set(named) <= set(turn["sampling"])
        assert not isinstance(named, dict) or named.items() <= turn["sampling"].items()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_search_is_no_sample(stream):
    """Beam search selects a reply: it is relayed as the client wrote it, nothing of it is recorded, and the session has a hole."""
    async with proxied() as rig:
        body = {"model": "sim", "messages": [user("hello")], "use_beam_search": True, "n": 2, "stream": stream}
        async with rig.http.post(rig.url + CHAT, json=body, headers={HEADER: "s"}) as answer:
            assert answer.status == 200
            await answer.read()
        assert rig.engine.requests[-1] == body
        assert await rig.turns() == []
        info = await rig.info()
        assert [(incident["kind"], incident["hole"]) for incident in info["incidents"]] == [("unrecorded-route", True)]
        assert "beam-search" in info["incidents"][0]["detail"]


async def test_without_a_search_the_member_changes_nothing():
    async with proxied() as rig:
        await rig.say("s", [user("hello")], use_beam_search=False)
        assert [turn["match"] for turn in await rig.turns()] == ["root"]

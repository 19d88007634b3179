"""Request options besides messages: stops, thinking, tools omitted, grammars. The turns stay contiguous."""

import json

import pytest
from rig.exported import assert_exported, trajectory, turns
from rig.harness import TOOLS

STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def assert_line(proxied, harness):
    """One line of turns without reasons, each extending the previous one, exported with the ids that the engine returned."""
    done, of = harness.contiguous
    assert done == of >= 2
    found = [(turn["match"], turn["reason"]) for turn in await turns(proxied, harness.session)]
    assert found == [("root", ""), *[("continue", "")] * of]
    assert_exported(await trajectory(proxied, harness.session), harness.answered)


@STREAMS
@pytest.mark.parametrize("shown", [False, True], ids=["hidden", "shown"])
async def test_stop_string(proxied, stream, shown):
    """The text ends before the stop string, the ids after it: the sampled tokens stay, and the template closes the turn."""
    harness = proxied.harness("stop", stream=stream, stop=["HALT"], include_stop_str_in_output=shown).say("EPISODE:stops please")
    for n in range(3):
        reply = await harness.turn()
        assert reply.finish_reason == "stop"
        assert reply.stop_reason == ("HALT" if n < 2 else None)
        assert ("HALT" in reply.text) == (shown and n < 2)
        assert ("HALT" in await proxied.detokenize(reply.ids)) == (n < 2)
    await assert_line(proxied, harness)


@STREAMS
async def test_stop_token(proxied, stream):
    """A request's own stop id is not an end of turn: the template's follows it."""
    (comma,) = (await proxied.post("/tokenize", {"prompt": ",", "add_special_tokens": False}))["tokens"]
    harness = proxied.harness("stop-id", stream=stream, stop_token_ids=[comma]).say("EPISODE:stops please")
    for n in range(3):
        reply = await harness.turn()
        assert reply.stop_reason == (comma if n < 2 else None)
    assert harness.replies[0].ids[-1] == comma
    assert (await proxied.detokenize(harness.replies[1].prompt[len(harness.replies[0].prefix) :])).startswith("<|im_end|>")
    await assert_line(proxied, harness)


@STREAMS
async def test_end_of_turn_as_a_stop_token(proxied, stream):
    """The end of turn is named as a stop id: it is the last id as usual, and occurs once."""
    (end,) = (await proxied.post("/tokenize", {"prompt": "<|im_end|>", "add_special_tokens": False}))["tokens"]
    harness = proxied.harness("stop-end", stream=stream, stop_token_ids=[end]).say("EPISODE:talk please")
    for _ in range(3):
        assert (await harness.turn()).ids[-1] == end
    for earlier, later in zip(harness.replies, harness.replies[1:], strict=False):
        assert later.prompt[len(earlier.prefix)] != end
    await assert_line(proxied, harness)


@STREAMS
@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
    ],
    ids=["no-thinking", "effort-none", "effort-high", "kwargs-win"],
)
async def test_template_arguments(proxied, stream, fields):
    off = fields.get("chat_template_kwargs", {}).get("enable_thinking", fields.get("reasoning_effort") != "none") is False
    harness = proxied.harness("thinking", stream=stream, tools=TOOLS, **fields).say(
        "EPISODE:plain please" if off else "EPISODE:agent please"
    )
    for _ in range(3):
        await harness.turn()
    opener = "<|im_start|>assistant\n<think>\n\n</think>\n\n" if off else "<|im_start|>assistant\n"
    for reply in harness.replies:
        assert (await proxied.detokenize(reply.prompt)).endswith(opener)
    await assert_line(proxied, harness)


async def test_thinking_switched_within_a_session(proxied):
    """Other template arguments make another conversation: recorded separately, nothing is joined wrongly."""
    harness = proxied.harness("switch", tools=TOOLS).say("EPISODE:agent please")
    await harness.turn()
    await harness.turn(chat_template_kwargs={"enable_thinking": False})
    third = await harness.turn()
    found = [turn["match"] for turn in await turns(proxied, "switch")]
    assert found[1] in ("plain", "resplice")
    assert "</think>" in await proxied.detokenize(third.prompt)
    exported = await trajectory(proxied, "switch")
    assert_exported(exported, harness.answered, sequences=len(exported["sequences"]))


@STREAMS
async def test_tool_choice_none(proxied, stream):
    """Tools stay in the prompt, and a call is left as text: the harness sends that text back."""
    harness = proxied.harness("none", stream=stream, tools=TOOLS, tool_choice="none").say("EPISODE:agent please")
    for n in range(3):
        reply = await harness.turn()
        assert not reply.calls
        assert "<tool_call>" in reply.text or n == 1  # the second consists only of a thought
    await assert_line(proxied, harness)


@STREAMS
async def test_tool_choice_none_in_between(proxied, stream):
    harness = proxied.harness("mixed", stream=stream, tools=TOOLS).say("EPISODE:agent please")
    await harness.turn()
    await harness.turn(tool_choice="none")
    await harness.turn()
    await assert_line(proxied, harness)


@STREAMS
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}},
        {"tools": TOOLS[:1], "tool_choice": {"type": "function", "function": {"name": "bash"}}},
        {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False},
    ],
    ids=["json-object", "json-schema", "named-tool", "required"],
)
async def test_grammar(proxied, stream, fields):
    """The engine's grammars work with supplied ids as with rendered ones; the limit may cut their JSON."""
    fields = fields | {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 48}
    harness = proxied.harness("grammar", stream=stream, seed=11, **fields).say("Yes or no?")
    for _ in range(3):
        reply = await harness.turn()
        assert len(reply.ids) <= 48
        if "json_schema" in str(fields):
            assert json.loads(reply.text) in ("yes", "no")
    await assert_line(proxied, harness)


@STREAMS
async def test_hidden_reasoning(proxied, stream):
    """`include_reasoning: false` would suppress the engine's ids: the proxy requests reasoning anyway, and hides it."""
    harness = proxied.harness("hidden", stream=stream, tools=TOOLS, ids=False, include_reasoning=False).say("EPISODE:agent please")
    for _ in range(4):
        reply = await harness.turn()
        assert not reply.message.get("reasoning")
    exported = await trajectory(proxied, "hidden")
    assert exported["complete"]
    (sequence,) = exported["sequences"]
    assert [turn["match"] for turn in sequence["turns"]] == ["root"] + ["continue"] * 3
    assert "I look first" in await proxied.detokenize(sequence["token_ids"])


async def test_sampling_is_recorded_as_sent(proxied):
    harness = proxied.harness("sampled", temperature=0.7, top_p=0.9, max_tokens=16, seed=3).say("Anything.")
    await harness.turn()
    (turn,) = await turns(proxied, "sampled")
    assert turn["sampling"] == {"temperature": 0.7, "top_p": 0.9, "max_tokens": 16, "seed": 3}
    assert turn["finish_reason"] == "length"


async def test_tokenize_previews_the_next_prompt(proxied):
    """`/tokenize` within a session answers with the ids that the next call then uses."""
    harness = proxied.harness("told", tools=TOOLS).say("EPISODE:agent please")
    for _ in range(3):
        body = {"model": harness.fields["model"], "messages": harness.messages, "tools": TOOLS}
        async with proxied.http.post(f"{proxied.url}/s/told/tokenize", json=body) as answer:
            preview = await answer.json()
        assert answer.status == 200, preview
        assert preview["max_model_len"] == 32768
        assert preview["tokens"] == (await harness.turn()).prompt
        assert preview["count"] == len(preview["tokens"])

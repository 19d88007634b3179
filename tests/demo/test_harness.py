"""The scripted harness: what it does to its history, and that it is told what the engine said."""

import json
from itertools import pairwise

import pytest

from tokencache.testing import Fault, SimulatedEngine
from tokencache.testing.harness import CallFailedError, ScriptedHarness, rewrite, tool_output

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}}}]
CALL = '<tool_call>\n{"name": "bash",  "arguments": {"timeout": 10.0, "cmd": "ls caf\\u00e9"}}\n</tool_call>'
EPISODE = [
    f"<think>\nhm\n</think>\n\n  Let me look ☕.\n{CALL}",
    f"<think>\nhm\n</think>\n\n{CALL}\n{CALL}",
    f"<think>\nhm\n</think>\n\n{CALL}",
    "<think>\nhm\n</think>\n\n Done. \n",
]


@pytest.fixture
async def engine():
    engine = SimulatedEngine(episodes={"e": EPISODE})
    async with engine.serve() as url:
        engine.base = url + "/v1"
        yield engine


@pytest.mark.parametrize("streaming", [False, True])
async def test_its_history_is_not_what_it_was_served(engine, streaming):
    episode = await ScriptedHarness(engine.base, tools=TOOLS, streaming=streaming).run("EPISODE:e", 5)
    said = [message for message in episode.messages if message["role"] == "assistant"]
    assert [message.get("content", "absent") for message in said] == ["Let me look ☕.", None, "absent", "Done.", "Done."]
    assert "reasoning" not in str(episode.messages)
    assert all(reply["reasoning"] for reply in episode.replies)
    assert said[0]["tool_calls"][0]["function"]["arguments"] == '{"cmd":"ls café","timeout":10}'
    assert [message["role"] for message in episode.messages] == [
        *("system", "user", "assistant", "tool", "assistant", "tool", "tool", "assistant", "tool"),
        *("assistant", "user", "assistant", "user"),
    ]
    issued = [call["id"] for reply in episode.replies for call in reply["tool_calls"]]
    assert [message["tool_call_id"] for message in episode.messages if message["role"] == "tool"] == issued
    assert [reply["finish_reason"] for reply in episode.replies] == ["tool_calls"] * 3 + ["stop"] * 2
    assert [usage["completion_tokens"] for usage in episode.usage] == [len(entry.completion_ids) for entry in engine.ground_truth]


async def test_streamed_and_whole_replies_lead_to_one_history(engine):
    whole, streamed = [await ScriptedHarness(engine.base, tools=TOOLS, streaming=way).run("EPISODE:e", 5) for way in (False, True)]

    def without_ids(episode):
        return json.loads(
            json.dumps(episode.messages), object_hook=lambda o: {k: v for k, v in o.items() if k not in ("id", "tool_call_id")}
        )

    assert without_ids(whole) == without_ids(streamed)


async def test_directly_no_turn_extends_the_one_before(engine):
    await ScriptedHarness(engine.base, headers={"X-Session-ID": "d"}, tools=TOOLS).run("EPISODE:e", 5)
    assert [entry.session for entry in engine.ground_truth] == ["d"] * 5
    for before, after in pairwise(engine.ground_truth):
        prefix = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(prefix)] != prefix


@pytest.mark.parametrize(
    ("fault", "streaming"),
    [(Fault.answer(503, "busy"), False), (Fault.answer(503, "busy"), True), (Fault.cut(3), True), (Fault.error_event(2), True)],
)
async def test_it_gives_up_where_the_server_does(engine, fault, streaming):
    engine.faults.append(fault)
    with pytest.raises(CallFailedError):
        await ScriptedHarness(engine.base, tools=TOOLS, streaming=streaming).run("EPISODE:e", 2)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ('{"b": 1.0, "a": [true, null, "caf\\u00e9"]}', '{"a":[true,null,"café"],"b":1}'),
        ("12345678901234567890", "12345678901234567000"),
        ("-0.0", "0"),
        ("0.000001", "0.000001"),
        ("1e-7", "1e-7"),
        ("123.456", "123.456"),
        ("1e21", "1e+21"),
        ("1.5e300", "1.5e+300"),
        ("1e400", "null"),
        ("5e-324", "5e-324"),
        ('{"cut": ', '{"cut": '),
        ("", ""),
    ],
)
def test_arguments_are_written_as_javascript_would(text, written):
    assert rewrite(text) == written


def test_a_tool_answers_the_same_call_the_same_way():
    assert tool_output("bash", '{"a": 1.0, "b": 2}') == tool_output("bash", '{"b":2,"a":1}')
    assert any("<|im_end|>" in tool_output("bash", f'{{"n": {n}}}') for n in range(40))
    assert any(tool_output("bash", f'{{"n": {n}}}') == "" for n in range(40))

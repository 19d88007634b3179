"""Content parts that are neither text nor media: references to tools, which Claude Code's tool search returns, and unknown ones."""

import pytest

from tests.proxy.kit import HEADER, THOUGHT, proxied, user
from tokencache.testing import SimulatedEngine

CALL = '<tool_call>\n{"name": "ToolSearch", "arguments": {"q": "select:CronList"}}\n</tool_call>'
SAID = [f"{THOUGHT}Searching.\n{CALL}", f"{THOUGHT}Now.\n{CALL.replace('ToolSearch', 'CronList')}", f"{THOUGHT}Done."]
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
SEARCH = {"name": "ToolSearch", "description": "Search", "input_schema": SCHEMA}
CRON = {"name": "CronList", "description": "List", "input_schema": SCHEMA, "defer_loading": True}
UNKNOWN = [
    {"type": "wibble", "wibble": "x"},
    {"type": "file", "file": {"filename": "a.pdf"}},
    {"type": "text", "text": "x", "uuid": "1"},
    {"text": "x"},
]


def engine() -> SimulatedEngine:
    return SimulatedEngine(episodes={"search": SAID}, seed=7)


async def ask(rig, messages, tools):
    body = {"model": "sim", "max_tokens": 500, "messages": messages, "tools": tools}
    async with rig.http.post(rig.url + "/v1/messages", json=body, headers={HEADER: "s"}) as answer:
        assert answer.status == 200, await answer.text()
        said = (await answer.json())["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "tool_reference", "tool_name": "CronList"}]}
        for block in said
        if block["type"] == "tool_use"
    ]
    return [{"role": "assistant", "content": said}, {"role": "user", "content": results or "on"}]


async def test_a_session_goes_on_after_references_to_tools():
    async with proxied(engine()) as rig:
        history = [{"role": "user", "content": "EPISODE:search"}]
        for tools in ([SEARCH], [CRON, SEARCH], [CRON, SEARCH], [CRON, SEARCH]):
            history += await ask(rig, history, tools)
        turns = await rig.turns()
        assert [turn["match"] for turn in turns] == ["root", "resplice", "continue", "continue"]
        assert not any("media" in turn["marks"] for turn in turns)
        assert len(turns[1]["anchors"]) == 1, "the first reply keeps its ids though the list of tools changed"
        assert "CronList" in rig.engine.tokenizer.decode(rig.ground_truth()[-1].prompt_ids)
        await rig.check()


async def test_a_tool_that_a_system_message_adds_is_answered_as_vllm_answers():
    async with proxied(engine()) as rig:
        change = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "CronList"}}
        messages = [
            {"role": "user", "content": "EPISODE:search"},
            {"role": "system", "content": [{"type": "text", "text": "New tool."}, change]},
            {"role": "user", "content": "Go"},
        ]
        messages += await ask(rig, messages, [SEARCH, CRON])
        await ask(rig, messages, [SEARCH, CRON])
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
        functions = [tool["function"] for tool in rig.engine.requests[-1]["tools"]]
        assert [(function["name"], "defer_loading" in function) for function in functions] == [("ToolSearch", False), ("CronList", False)]
        await rig.check()


@pytest.mark.parametrize("part", UNKNOWN, ids=str)
async def test_a_part_that_the_engine_does_not_know_is_its_own_reason(part):
    class Lenient(SimulatedEngine):
        """An engine that takes the part nevertheless."""

        def _begin_chat(self, body, headers):
            known = [{**message, "content": "x"} if isinstance(message["content"], list) else message for message in body["messages"]]
            return super()._begin_chat({**body, "messages": known}, headers)

    async with proxied(Lenient(episodes={"search": SAID}, seed=7)) as rig:
        await rig.say("s", [user("EPISODE:search"), {"role": "user", "content": [part]}])
        turn = (await rig.turns())[-1]
        assert (turn["match"], turn["reason"]) == ("plain", "unsupported-part")
        await rig.check()


async def test_the_engine_itself_refuses_an_unknown_part():
    async with proxied(engine()) as rig:
        status, said = await rig.post(messages=[user("EPISODE:search"), {"role": "user", "content": [UNKNOWN[0]]}])
        assert (status, said["error"]["param"]) == (400, "type")
        direct, refused = await rig.post(None, url=rig.up, messages=[user("x"), {"role": "user", "content": [UNKNOWN[0]]}])
        assert (direct, refused["error"]) == (status, said["error"])

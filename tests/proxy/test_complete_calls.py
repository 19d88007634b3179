"""A stream is cut after a complete call, and the harness executes what arrived (Codex): the reply ends after that call, in its own ids."""

import json

import pytest

from tests.proxy.kit import CHAT, HEADER, TOOLS, proxied, user
from tests.proxy.test_client_gone import settled
from tokencache.testing import SimulatedEngine
from tokencache.testing.faults import Fault


def call(command):
    return f'<tool_call>\n{{"name": "bash",  "arguments": {{"cmd": "{command}"}}}}\n</tool_call>'


THOUGHT = "<think>\nAfter </tool_call> I go on.\n</think>\n\n"
EPISODES = {
    "two": [
        f"{THOUGHT}Look.\n{call('ls  -la')}\n{call('cat a very long name of a file that takes many tokens')}",
        "<think>\nx\n</think>\n\nDone.",
    ]
}
ITEM_TOOLS = [{"type": "function", **TOOLS[0]["function"]}]


def said(chunks):
    """The calls that a client has put together from a stream, in order."""
    calls = []
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        for part in delta.get("tool_calls") or ():
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}})
            for name, value in part["function"].items():
                calls[part["index"]]["function"][name] += value or ""
    return calls


def content(chunks):
    """The text that a client has put together from a stream."""
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", ()))


async def read_until(rig, path, body, enough):
    """Read a stream until its events are enough, then leave; or until it ends. Returns the events."""
    got = b""
    async with rig.http.post(rig.url + path, json={"model": "sim", "stream": True, **body}, headers={HEADER: "s"}) as answer:
        while more := await answer.content.readany():
            got += more
            lines = [event.partition(b"data: ")[2] for event in got.split(b"\n\n")[:-1]]
            events = [json.loads(line) for line in lines if line.startswith(b"{")]
            if enough(events):
                break
        answer.close()
    return events


async def cut_in_chat(rig, *, number=2, characters=1):
    """Leave when the arguments of this call have so many characters; returns the text and the calls."""

    def enough(events):
        calls = said(events)
        return len(calls) == number and len(calls[-1]["function"]["arguments"]) >= characters

    events = await read_until(rig, CHAT, {"messages": [user("EPISODE:two")], "tools": TOOLS}, enough)
    await settled(rig)
    rig.engine.token_delay = 0
    return content(events), said(events)


def history(calls):
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "a.txt"} for one in calls]
    return [user("EPISODE:two"), {"role": "assistant", "content": "Look.", "tool_calls": calls}, *results]


def kept_text(rig):
    """What the second prompt has of the first reply, decoded, and whether these are its own tokens."""
    first, second = rig.ground_truth("s")[:2]
    size = len(first.prompt_ids)
    own = second.prompt_ids[size:]
    same = next(n for n in range(len(own)) if own[n] != (first.completion_ids[n : n + 1] or [None])[0])
    return rig.engine.tokenizer.decode(own[:same]), rig.engine.tokenizer.decode(own[same:])


@pytest.mark.parametrize("seed", range(3))
async def test_the_reply_ends_after_the_complete_call(seed):
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.002, seed=seed)) as rig:
        _, (first, _) = await cut_in_chat(rig)
        await rig.say("s", history([first]), tools=TOOLS)
        one, two = await rig.turns()
        assert "aborted" in one["marks"]
        assert (two["match"], two["reason"], two["forgiven"].count("interrupted")) == ("resplice", "interrupted", 1)
        text, tail = kept_text(rig)
        assert text == f"{THOUGHT}Look.\n{call('ls  -la')}"
        assert tail.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\na.txt")
        await rig.check(aborted=1)


@pytest.mark.parametrize("characters", [0, 8])
async def test_the_text_before_a_first_call_that_had_not_arrived_completely(characters):
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.002)) as rig:
        text, _ = await cut_in_chat(rig, number=1, characters=characters)
        await rig.say("s", [user("EPISODE:two"), {"role": "assistant", "content": text}, user("Go on.")], tools=TOOLS)
        one, two = await rig.turns()
        assert "aborted" in one["marks"]
        assert (two["match"], two["reason"], two["forgiven"]) == ("resplice", "interrupted", ["interrupted", "reasoning-dropped"])
        kept, tail = kept_text(rig)
        assert kept == f"{THOUGHT}Look.\n"
        assert tail.startswith("<|im_end|>\n<|im_start|>user\nGo on.")
        await rig.check(aborted=1)


async def test_other_text_before_a_first_call_is_refused():
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.002)) as rig:
        text, _ = await cut_in_chat(rig, number=1)
        await rig.say("s", [user("EPISODE:two"), {"role": "assistant", "content": f"{text}!"}, user("Go on.")], tools=TOOLS)
        assert (await rig.turns())[1]["match"] == "plain"
        await rig.check(aborted=1)


async def test_a_call_that_had_not_arrived_completely_is_refused():
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.002)) as rig:
        _, (first, second) = await cut_in_chat(rig, characters=12)
        second["function"]["arguments"] = '{"cmd": "cat"}'
        await rig.say("s", history([first, second]), tools=TOOLS)
        assert (await rig.turns())[1]["match"] == "plain"
        await rig.check(aborted=1)


@pytest.mark.parametrize("change", [{"id": "call_0123456789abcdef"}, {"function": {"name": "bash", "arguments": '{"cmd": "ls -la"}'}}])
async def test_another_call_is_refused(change):
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.002)) as rig:
        _, (first, _) = await cut_in_chat(rig)
        await rig.say("s", history([first | change]), tools=TOOLS)
        assert (await rig.turns())[1]["match"] == "plain"
        await rig.check(aborted=1)


async def test_codex_executes_the_items_that_arrived_before_the_engine_broke_off():
    """The client gets an error, and sends the complete items back with the result of the call."""
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        body = {"input": [{"role": "user", "content": "EPISODE:two"}], "tools": ITEM_TOOLS, "store": False}
        await rig.post("whole", "/v1/responses", model="sim", **body)
        rig.engine.faults.append(Fault.cut(len(rig.ground_truth("whole")[0].completion_ids) - 8))
        events = await read_until(rig, "/v1/responses", body, lambda _: False)
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
        result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "a.txt"}
        await rig.post("s", "/v1/responses", model="sim", **body | {"input": [*body["input"], *items, result]})
        turns = await rig.turns()
        assert [turn["marks"] for turn in turns] == [["upstream-broke"], []]
        assert (turns[1]["match"], turns[1]["reason"]) == ("resplice", "interrupted")
        kept = rig.engine.tokenizer.decode(rig.ground_truth("s")[1].prompt_ids)
        assert f"{call('ls  -la')}<|im_end|>\n<|im_start|>user\n<tool_response>\na.txt" in kept


@pytest.mark.parametrize(("left_out", "found"), [(8, ("resplice", "interrupted")), (30, ("continue", ""))])
async def test_the_text_that_arrived_before_the_engine_broke_off(left_out, found):
    """The client gets an error within the first call, or within the text before it, and keeps the text."""
    async with proxied(SimulatedEngine(episodes={"one": [f"{THOUGHT}Look at all of this first.\n{call('ls')}", "Done."]})) as rig:
        body = {"messages": [user("EPISODE:one")], "tools": TOOLS}
        await rig.post("whole", **body)
        rig.engine.faults.append(Fault.cut(len(rig.ground_truth("whole")[0].completion_ids) - left_out))
        text = content(await read_until(rig, CHAT, body, lambda _: False))
        await rig.say("s", [user("EPISODE:one"), {"role": "assistant", "content": text}, user("Go on.")], tools=TOOLS)
        one, two = await rig.turns()
        assert (one["marks"], two["match"], two["reason"]) == (["upstream-broke"], *found)
        assert text.strip()
        assert kept_text(rig)[0] == THOUGHT.rstrip("\n") + text


async def test_the_blocks_of_a_message_that_were_complete():
    """The client left while the second call arrived."""
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.002)) as rig:
        tools = [{"name": "bash", "input_schema": TOOLS[0]["function"]["parameters"]}]
        body = {"messages": [user("EPISODE:two")], "tools": tools, "max_tokens": 500}

        def enough(events):
            return sum(event["type"] == "content_block_start" for event in events) == 4

        events = await read_until(rig, "/v1/messages", body, enough)
        await settled(rig)
        blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        for event in events:
            if event["type"] == "content_block_delta":
                written = event["delta"].items() - {("type", event["delta"]["type"])}
                blocks[event["index"]] |= {name: (blocks[event["index"]].get(name) or "") + text for name, text in written}
        complete = blocks[:3]
        complete[2]["input"] = json.loads(complete[2].pop("partial_json"))
        result = {"type": "tool_result", "tool_use_id": complete[2]["id"], "content": "a.txt"}
        body["messages"] += [{"role": "assistant", "content": complete}, {"role": "user", "content": [result]}]
        await rig.post("s", "/v1/messages", model="sim", **body)
        (_, two) = await rig.turns()
        assert (two["match"], two["reason"]) == ("resplice", "interrupted")
        assert kept_text(rig)[0] == f"{THOUGHT}Look.\n{call('ls  -la')}"

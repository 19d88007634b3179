"""From a relay's record to a file that replays: a small session with concurrent, interrupted and rewritten calls."""

import asyncio
import json

import pytest

from tests.proxy.kit import proxied
from tests.proxy.test_client_gone import settled
from tests.system.corpus.format import read
from tests.system.corpus.make import MakeError, make
from tests.system.corpus.replay import differences, replay
from tokencache.testing import SimulatedEngine

AGENTS = 2
PROMPT = "You are a very careful assistant, and this is what your makers want you to know.\n"
LOOK = '<think>\nI look.\n</think>\n\nLooking there.<tool_call>\n{"name": "Bash", "arguments": {"command": "cd /w && ls"}}\n</tool_call>'
EPISODES = {
    "claude-code": [LOOK, "<think>\nok\n</think>\n\n" + "One sheep, two sheep, three sheep ☕. " * 9, "<think>\nok\n</think>\n\nDone."],
    "agent": ["<think>\nhm\n</think>\n\nI am an agent.", "<think>\nhm\n</think>\n\nStill one."],
}
BASH = {"name": "Bash", "description": "Runs a command, whichever it may be, in a shell of the user's.", "input_schema": {"type": "object"}}


class Harness:
    """Calls Messages as Claude Code does, and writes a record as the relay does."""

    def __init__(self, rig, record):
        self.rig, self.record = rig, record

    async def call(self, system, messages, *, leave_at=None):
        """Makes one call; with `leave_at` it keeps this many words, and disconnects when more arrived. Returns the blocks of the reply."""
        body = {"model": "sim", "max_tokens": 9999, "system": PROMPT + system, "messages": messages, "tools": [BASH], "stream": True}
        path, got = "/s/s/h/claude-code/v1/messages?beta=true", b""
        headers = {"content-type": "application/json", "anthropic-version": "2023-06-01", "authorization": "Bearer secret"}
        self.rig.engine.token_delay = 0.02 if leave_at else 0
        async with self.rig.http.post(self.rig.url + path, json=body, headers=headers) as answer:
            async for piece in answer.content.iter_any():
                got += piece
                if leave_at and got.count(b"text_delta") > leave_at:
                    answer.close()
                    break
        events = got.decode().split("\n\n")[:-1]
        words = [place for place, event in enumerate(events) if "text_delta" in event]
        told = "".join(f"{event}\n\n" for event in (events[: words[leave_at]] if leave_at else events))
        call = {"method": "POST", "path": path, "request_headers": list(headers.items()), "request_body": json.dumps(body)}
        reply = {"status": 200, "response_headers": [["Content-Type", "text/event-stream"]], "response_body": told, "left": bool(leave_at)}
        self.record.append({**call, **reply})
        return told


def blocks(told):
    """The reply's blocks, joined as a client does."""
    made = []
    for event in (json.loads(line[6:]) for line in told.split("\n") if line.startswith("data: ")):
        if event["type"] == "content_block_start":
            made.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            for name, value in event["delta"].items():
                member = "json" if name == "partial_json" else name
                made[-1][member] = value if name == "type" else made[-1].get(member, "") + value
    kinds = {"thinking_delta": "thinking", "signature_delta": "thinking", "text_delta": "text", "input_json_delta": "tool_use"}
    for block in made:
        block["type"] = kinds.get(block["type"], block["type"])
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    return made


@pytest.fixture
async def recorded(tmp_path):
    """The folder of a run: a main line that is interrupted, and two concurrent agents."""
    folder, record = tmp_path / "claude-code", []
    folder.mkdir()
    async with proxied(SimulatedEngine(episodes=EPISODES)) as rig:
        harness = Harness(rig, record)
        main = [{"role": "user", "content": "EPISODE:claude-code Create hello.txt in the current directory."}]
        first = blocks(await harness.call("Lead.", main))
        call = next(block for block in first if block["type"] == "tool_use")
        call["input"]["command"] = call["input"]["command"].removeprefix("cd /w && ")
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "Nothing at all was to be found in there."}
        main += [{"role": "assistant", "content": first}, {"role": "user", "content": [result]}]

        async def agent(number):
            asked = [{"role": "user", "content": f"EPISODE:agent number {number}"}]
            agent_blocks = blocks(await harness.call("Help.", asked))
            await harness.call("Help.", [*asked, {"role": "assistant", "content": agent_blocks}, {"role": "user", "content": "And?"}])

        await asyncio.gather(*map(agent, range(AGENTS)))
        delivered = blocks(await harness.call("Lead.", main, leave_at=20))
        await settled(rig)
        main += [{"role": "assistant", "content": delivered}, {"role": "user", "content": "[Request interrupted by user]\nGo on."}]
        await harness.call("Lead.", main)
        exported = await rig.exported()
    (folder / "calls.jsonl").write_text("".join(json.dumps(call) + "\n" for call in record))
    (folder / "export.json").write_text(json.dumps({"trajectories": exported}))
    return folder


async def test_it_replays_as_recorded(recorded, tmp_path):
    recording = read(make("claude-code", recorded, tmp_path))
    calls = recording.calls
    assert [call.after for call in calls if call.expected["match"] == "root"] == [[], [1], [1]]
    assert [call.ended for call in calls] == ["whole"] * 5 + ["left", "whole"]
    assert calls[-1].expected == {"match": "resplice", "reason": "interrupted", "forgiven": ["interrupted"]}
    assert not differences(recording, await replay(recording))


def test_no_text_of_the_makers_is_left(recorded, tmp_path):
    text = make("claude-code", recorded, tmp_path).read_text()
    for of_makers in ("careful", "whichever", "Nothing at all", "secret"):
        assert of_makers not in text
    for of_the_task in ("Create hello.txt", "Looking there.", "One sheep", '"Bash"'):
        assert of_the_task in text


def test_a_turn_that_the_relay_did_not_record_is_noticed(recorded, tmp_path):
    calls = (recorded / "calls.jsonl").read_text().splitlines(keepends=True)
    (recorded / "calls.jsonl").write_text("".join(calls[1:]))
    with pytest.raises(MakeError, match="1 turns of the export"):
        make("claude-code", recorded, tmp_path)

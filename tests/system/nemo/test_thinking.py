"""Thinking that the engine leaves in the text: behind Gym's model server, and on an engine without a reasoning parser."""

import json

import pytest

from tests.proxy.kit import CHAT, EPISODES, HEADER, TOOLS, proxied, user
from tests.system.nemo.agents import AGENTS
from tests.system.nemo.kit import before_gym
from tokencache.testing import SimulatedEngine

TRANSLATED = ["messages", "responses", "gemini"]
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")
THOUGHT = "\nI look first — naïve café ☕.\n"


class Front:
    """The proxy in front of an engine that leaves thinking in the text; `calls` are the requests that the engine received."""

    def __init__(self, kind):
        self.kind = kind

    async def __aenter__(self):
        if self.kind == "gym":
            self._open = before_gym()
            self.rig, gym = await self._open.__aenter__()
            self.calls = gym.calls
        else:
            self._open = proxied(SimulatedEngine(episodes=EPISODES, seed=7, reasoning_parser=False))
            self.rig = await self._open.__aenter__()
            await self.rig.proxy.engine.model("sim")
            self.calls = self.rig.engine.requests
            self.calls.clear()
        return self

    async def __aexit__(self, *how):
        await self._open.__aexit__(*how)


async def ask(rig, path, body):
    async with rig.http.post(rig.url + path, json=body, headers={HEADER: "one"}) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


@pytest.mark.parametrize("kind", ["gym", "no parser"])
async def test_each_dialect_has_it_where_thinking_belongs(kind):
    async with Front(kind) as front:
        answer_json = await ask(front.rig, "/v1/messages", {"model": "sim", "max_tokens": 400, "messages": [user("EPISODE:talk")]})
        thinking, text = answer_json["content"]
        assert (thinking["type"], thinking["thinking"]) == ("thinking", THOUGHT)
        assert text["text"].strip().startswith("One, two")
        answer_json = await ask(front.rig, "/v1/responses", {"model": "sim", "input": "EPISODE:talk"})
        assert [item["type"] for item in answer_json["output"]] == ["reasoning", "message"]
        assert answer_json["output"][0]["content"][0]["text"] == THOUGHT
        contents = {"contents": [{"parts": [{"text": "EPISODE:talk"}]}]}
        path = "/v1beta/models/sim:generateContent"
        shown = await ask(front.rig, path, contents | {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}})
        assert shown["candidates"][0]["content"]["parts"][0] == {"text": THOUGHT, "thought": True}
        hidden = await ask(front.rig, path, contents)
        assert not any("naïve café" in part["text"] for part in hidden["candidates"][0]["content"]["parts"])
        answer_json = await ask(front.rig, CHAT, {"model": "sim", "messages": [user("EPISODE:talk")]})
        assert answer_json["choices"][0]["message"]["content"].startswith(f"<think>{THOUGHT}</think>")  # as the engine returns it


@pytest.mark.parametrize("kind", ["gym", "no parser"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", AGENTS)
async def test_a_rollout_stays_one_line_and_the_engine_gets_its_own_text_back(kind, dialect, stream):
    async with Front(kind) as front:
        await AGENTS[dialect](front.rig, "s", 4, stream=stream)
        turns = await front.rig.turns()
        assert [turn["match"] for turn in turns] == ["root"] + ["continue"] * 3
        assert [len(sequence["turns"]) for sequence in (await front.rig.check())["sequences"]] == [4]
        assert (await front.rig.info())["incidents"] == []
        served = [turn.served for turn in await front.rig.store.turns("s")]
        assert all(message.content.startswith("<think>") and not message.reasoning for message in served)
        sent = [message for message in front.calls[-1]["messages"] if message["role"] == "assistant"]
        assert not any("reasoning" in message for message in sent)
        (row,) = (await front.rig.get("/tokencache/v1/sessions/s/trajectories?format=nemo-gym"))["responses"]
        replies = [item for item in row["response"]["output"] if item.get("role") == "assistant"]
        texts = [part["text"] for item in replies for part in item["content"]]
        assert not any("think>" in text for text in texts)  # NeMo RL treats a tag there as malformed thinking
        thoughts = [item["summary"][0]["text"] for item in row["response"]["output"] if item["type"] == "reasoning"]
        assert thoughts[0] == THOUGHT
        if dialect in {"messages", "responses"}:  # these clients send back everything that they received
            assert [message["content"] for message in sent] == [message.content for message in served[:-1]]
            assert not any("inline-think" in turn["forgiven"] for turn in turns)


@pytest.mark.parametrize("kind", ["gym", "no parser"])
@pytest.mark.parametrize("lost", ["thinking", "signature"])
async def test_a_client_that_loses_some_of_it(kind, lost):
    async with Front(kind) as front:
        tool = {"name": TOOLS[0]["function"]["name"], "input_schema": TOOLS[0]["function"]["parameters"]}
        body = {"model": "sim", "max_tokens": 400, "tools": [tool], "messages": [user("EPISODE:demo")]}
        for _ in range(3):
            answer_json = await ask(front.rig, "/v1/messages", body)
            kept = [block for block in answer_json["content"] if lost != "thinking" or block["type"] != "thinking"]
            for block in kept:
                block.pop("signature", None)
            used = [{"type": "tool_result", "tool_use_id": b["id"], "content": "ok"} for b in kept if b["type"] == "tool_use"]
            body["messages"] += [{"role": "assistant", "content": kept}, {"role": "user", "content": used or "go on"}]
        turns = await front.rig.turns("one")
        assert [turn["match"] for turn in turns] == ["root", "continue", "continue"]
        rule = "reasoning-dropped" if lost == "thinking" else "inline-think"
        assert all(rule in turn["forgiven"] for turn in turns[1:])
        if kind == "gym":  # Gym's server accepts thinking only in the text
            assert all(lost == "thinking" or "<think>" in json.dumps(call["messages"][1]) for call in front.calls[1:])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", TRANSLATED)
async def test_an_engine_with_a_parser_is_served_as_before(dialect, stream):
    async with proxied() as rig:
        await AGENTS[dialect](rig, "s", 4, stream=stream)
        turns = await rig.turns()
        assert [turn["match"] for turn in turns] == ["root"] + ["continue"] * 3
        assert not any("<think>" in (turn.served.content or "") for turn in await rig.store.turns("s"))
        assert not any("<think>" in json.dumps(request["messages"]) for request in rig.engine.requests)

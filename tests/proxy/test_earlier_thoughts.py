"""An engine that reads the state of the next reply off an earlier thought, which only an exact prompt has: no client sees a difference."""

import json
import random

import pytest

from tests.proxy.kit import CHAT, HEADER, TOOLS, assembled, proxied, user
from tests.support.waiting import PATIENCE
from tokencache.testing import Fault, SimulatedEngine, completion
from tokencache.testing.generation import generate
from tokencache.testing.parser import StreamParser

REPLIES = [f"<think>\nThought {n}.\n</think>\n\nAnswer {n}." for n in ("one", "two", "three")]
CALL = '<think>\nI call.\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}\n</tool_call>'
CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}}
DERENDERS = pytest.mark.parametrize("derenders", [False, True], ids=["stock", "scale-out"])


def made(*, reads=True, replies=REPLIES, derenders=False):
    return SimulatedEngine(episodes={"think": replies}, seed=7, reads_earlier_thoughts=reads, derenders=derenders)


async def found(rig):
    return (await rig.readiness())["engine"]["models"][0]["earlier_thoughts"]


async def asked(rig, session, history, **more):
    return await rig.say(session, history, stream=True, **more)


def without_thought(message):
    """As the usual harness sends it back."""
    return {name: value for name, value in message.items() if value and name != "reasoning"}


async def test_the_probe_says_what_it_found():
    async with proxied(made()) as rig:
        shown = await found(rig)
        marks = [rig.engine.tokenizer.id_of(mark) for mark in ("<think>", "</think>")]
        assert ([*shown["begin"], *shown["end"]], shown["closed"], shown["begun"]) == (marks, ["stream", "grammar"], [])
    async with proxied(made(reads=False)) as rig:
        assert (await found(rig))["closed"] == []


class KeepsOpener(StreamParser):
    """As `deepseek_r1`: if a thought's mark arrives with other tokens, it leaves the mark in the thought."""

    def feed(self, text, *, finished=False):
        delta = super().feed(text, finished=finished)
        return {"reasoning": text} if text.startswith("<think><think>") else delta


async def test_the_probe_sees_no_difference_in_tokens_that_arrive_at_once(monkeypatch):
    """A server that lags behind sends what the engine has made since, whatever the prompt."""
    lag = random.Random(8)
    monkeypatch.setattr(completion, "StreamParser", KeepsOpener)
    monkeypatch.setattr(completion, "generate", lambda *reply, **more: generate(*reply, **{**more, "first": lag.randint(1, 3)}))
    async with proxied(made(reads=False)) as rig:
        shown = await found(rig)
        assert "stream" not in [*shown["closed"], *shown["open"], *shown["begun"]]


@DERENDERS
@pytest.mark.parametrize("more", [{}, {"chat_template_kwargs": {"enable_thinking": True}}], ids=["", "arguments"])
async def test_a_stream_has_the_thought_where_a_direct_stream_has_it(derenders, more):
    async with proxied(made(derenders=derenders)) as rig:
        history, directly = [user("EPISODE:think")], [user("EPISODE:think")]
        for _ in REPLIES:
            through, direct = await asked(rig, "s", history, **more), await asked(rig, None, directly, **more)
            assert through == direct
            assert through["reasoning"]
            history += [without_thought(through), user("next")]
            directly += [without_thought(direct), user("next")]
        exported = await rig.check()
        assert [(turn["match"], turn["stream"]) for turn in await rig.turns()] == [("root", True), ("continue", True), ("continue", True)]
        assert len(exported["sequences"]) == 1


@pytest.mark.parametrize(
    ("reads", "fault"), [(False, Fault.abort(1)), (True, Fault.answer(500)), (True, Fault.answer(502))], ids=["aborted", "500", "502"]
)
async def test_a_bad_moment_of_the_engine_is_not_remembered(reads, fault):
    """A reply that the engine breaks off is unlike the one that it is compared with, and an error is like another one."""
    engine, tested, more = made(reads=reads), *(("stream", {}) if reads else ("thinking_token_budget", {"thinking_token_budget": 60}))
    async with proxied(engine, hold=PATIENCE) as rig:
        left = [fault]
        engine.choose_fault = lambda _route, sent: left.pop() if left and sent.get(tested) and sent.get("max_tokens") == 3 else None
        history = [user("EPISODE:think")]
        for _ in range(3):
            message = await asked(rig, "s", history, chat_template_kwargs={"enable_thinking": True}, **more)
            assert message["reasoning"]
            history += [without_thought(message), user("next")]
        assert left == []
        assert (await rig.turns())[-1]["match"] == "continue"


async def test_a_call_after_a_call():
    async with proxied(made(replies=[CALL, CALL, REPLIES[1]])) as rig:
        history = [user("EPISODE:think")]
        for _ in range(3):
            message = await asked(rig, "s", history, tools=TOOLS)
            assert "<think>" not in message["content"]
            assert message["reasoning"]
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in message["tool_calls"]]
            history += [without_thought(message), *results]
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue"]


async def test_a_stream_in_another_dialect():
    async with proxied(made()) as rig:
        body = {"model": "sim", "max_tokens": 60, "stream": True, "messages": [user("EPISODE:think")]}
        for thought in ("one", "two"):
            async with rig.http.post(f"{rig.url}/v1/messages", json=body, headers={HEADER: "s"}) as answer:
                deltas = [json.loads(line[5:]).get("delta") or {} for line in (await answer.text()).splitlines() if line[:5] == "data:"]
            assert "".join(delta.get("thinking", "") for delta in deltas) == f"\nThought {thought}.\n"
            assert "".join(delta.get("text", "") for delta in deltas) == f"\n\nAnswer {thought}."
            body["messages"] = [*body["messages"], {"role": "assistant", "content": f"\n\nAnswer {thought}."}, user("next")]
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_grammar_starts_after_the_thought(stream):
    async with proxied(made()) as rig:
        history = [user("EPISODE:think")]
        first = await rig.say("s", history, stream=stream)
        history += [without_thought(first), user("next")]
        bound = await rig.say("s", history, stream=stream, **CHOICE)
        assert bound["reasoning"] == "\nThought two.\n"
        free = await rig.say("s", history, stream=stream)
        assert free["reasoning"] == "\nThought two.\n"
        turns = await rig.turns()
        assert [(turn["match"], turn["reason"]) for turn in turns] == [("root", ""), ("plain", "earlier-thought"), ("continue", "")]
        assert (await rig.info())["complete"]


async def test_a_generation_prompt_with_a_mark_decides():
    """Without thinking the template closes a thought itself: so it does for a direct client."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    async with proxied(made(replies=["One.", "Two."])) as rig:
        history = [user("EPISODE:think")]
        first = await rig.say("s", history, **off)
        await rig.say("s", [*history, without_thought(first), user("next")], **off, **CHOICE)
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]


async def test_a_thought_that_the_client_sends_back_and_the_template_shows():
    """A direct call's prompt has it, too: its stream has the next thought in the text, and its grammar starts at once."""
    async with proxied(made(replies=[CALL, CALL, CALL])) as rig:
        said = {"s": [], None: []}
        for session, heard in said.items():
            history = [user("EPISODE:think")]
            for more in ({}, {}, CHOICE):
                message = await asked(rig, session, history, tools=TOOLS, **more)
                heard.append((message["reasoning"], message["content"]))
                history += [message, *[{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in message["tool_calls"]]]
        assert said["s"] == said[None]
        assert said["s"][1] == ("", "<think>\nI call.\n</think>\n\n")
        assert [(turn["match"], turn["reason"]) for turn in await rig.turns()] == [("root", ""), *[("continue", "")] * 2]


async def test_other_engines_stream_as_ever():
    async with proxied(made(reads=False)) as rig:
        history = [user("EPISODE:think")]
        history += [without_thought(await asked(rig, "s", history)), user("next")]
        await asked(rig, "s", history, **CHOICE)
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
        assert rig.engine.requests[-1]["stream"] is True


async def test_what_only_a_stream_is_refused_is_refused():
    async with proxied(made()) as rig:
        history = [user("EPISODE:think")]
        history += [without_thought(await asked(rig, "s", history)), user("next")]
        for options in ({"prompt_logprobs": 1}, {"stream_options": {"continuous_usage_stats": "perhaps"}}):
            body = {"model": "sim", "messages": history, "stream": True, **options}
            async with rig.http.post(rig.url + CHAT, json=body, headers={HEADER: "s"}) as answer:
                assert answer.status == 400
        assert assembled((await rig.post("s", messages=history, stream=True))[1])["reasoning"]

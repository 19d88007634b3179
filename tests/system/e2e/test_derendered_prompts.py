"""Exact prompts on routes of a real vLLM that do not parse, with its derender.

`completions` calls it as an engine without ids in chat. `generate` calls it behind a proxy that disaggregates prefill, with this vLLM in
both roles, so the engine's log has each request of the proxy twice.
"""

import contextlib
import itertools

import pytest
from conftest import GroundTruth, proxying
from rig.exported import assert_exported, generations, trajectory, turns
from rig.harness import TOOLS
from rig.server import MODEL

from tests.engine.prefill_relay import PrefillRelay
from tests.system.nemo.agents import AGENTS
from tokencache.store.memory import MemoryStore

TURNS = 5
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")


@pytest.fixture(params=["completions", "generate"])
async def before(scaled_out, request):
    async with contextlib.AsyncExitStack() as opened:
        relay = PrefillRelay(scaled_out.url, scaled_out.url)
        url = await opened.enter_async_context(relay.serve()) if request.param == "generate" else scaled_out.url
        found = await opened.enter_async_context(proxying(url, MemoryStore(), engine=request.param))
        await found.proxy.engine.model(MODEL)
        yield found


class Log(GroundTruth):
    """The engine's log, without the requests for one token with which it prefilled; each had the prompt of the next request."""

    async def read_new_episodes(self):
        found = await super().read_new_episodes()
        if self.proxied.proxy.engine.driver.name == "completions":
            return found
        prefilled, decoded = found[::2], found[1::2]
        assert [(prompt, len(sampled)) for prompt, sampled in prefilled] == [(prompt, 1) for prompt, _ in decoded]
        return decoded


@pytest.fixture
async def scaled_out_log(before, scaled_out):
    """The engine's log from here on."""
    ground_truth = Log(before, scaled_out)
    await ground_truth.read_new()
    return ground_truth


def words(reply):
    """The content of a reply, except the ids of its calls."""
    return (
        reply.text,
        reply.message.get("reasoning") or "",
        [call["function"] for call in reply.calls],
        reply.finish_reason,
        reply.stop_reason,
    )


async def test_what_the_probe_finds(before, request):
    found = (await before.proxy.engine.model(MODEL)).capability
    assert (found.level, found.tokenizes) == ("exact", True)
    assert found.driver in request.node.name
    assert found.stop_ids


async def test_chat_behind_the_proxy_is_recorded_and_the_probe_says_why(scaled_out):
    async with PrefillRelay(scaled_out.url, scaled_out.url).serve() as url, proxying(url, MemoryStore(), engine="vllm") as found:
        capability = (await found.proxy.engine.model(MODEL)).capability
        assert capability.level == "record"
        assert "although the engine itself takes them: if a server in front of vLLM replaces kv_transfer_params" in capability.why
        harness = found.harness("s").say("EPISODE:talk please")
        for _ in range(2):
            await harness.turn()
        assert_exported(await trajectory(found, "s"), harness.answered, sequences=2)
        assert [turn["reason"] for turn in await turns(found, "s")] == ["", "record-only"]


@STREAMS
@pytest.mark.parametrize("episode", ["agent", "talk", "odd"])
async def test_every_turn_extends_the_previous_one(before, scaled_out_log, episode, stream):
    harness = before.harness("s", stream=stream, tools=TOOLS).say(f"EPISODE:{episode} please")
    for n in range(TURNS):
        await harness.turn(then=f"Go on: {n} ☕", answer=f"total {n}\n")
    assert harness.contiguous == (TURNS - 1, TURNS - 1)
    assert_exported(await trajectory(before, "s"), harness.answered)
    assert [turn["match"] for turn in await turns(before, "s")] == ["root"] + ["continue"] * (TURNS - 1)
    ground_truth = await scaled_out_log.read_new_episodes()
    assert [(reply.prompt, reply.ids) for reply in harness.answered] == [(list(prompt), list(sampled)) for prompt, sampled in ground_truth]
    for (prompt, sampled), (later, _) in itertools.pairwise(ground_truth):
        assert list(later)[: len(prompt) + len(sampled)] == [*prompt, *sampled]


@STREAMS
@pytest.mark.parametrize("dialect", ["messages", "responses", "gemini"])
async def test_in_every_dialect(before, scaled_out_log, dialect, stream):
    await AGENTS[dialect](before, "s", 3, stream=stream, start="EPISODE:agent please", model=MODEL)
    assert [turn["match"] for turn in await turns(before, "s")] == ["root", "continue", "continue"]
    exported = await trajectory(before, "s")
    assert [(prompt, sampled) for prompt, sampled, _ in generations(exported)] == [
        (tuple(prompt), tuple(sampled)) for prompt, sampled in await scaled_out_log.read_new_episodes()
    ]


@pytest.mark.parametrize(
    ("episode", "fields"),
    [
        ("agent", {"top_logprobs": 2}),
        ("odd", {}),
        ("agent", {"tool_choice": "none"}),
        ("agent", {"parallel_tool_calls": False}),
        ("plain", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("stops", {"stop": ["HALT"]}),
        ("stops", {"stop": ["HALT"], "include_stop_str_in_output": True}),
        ("agent", {"stop": ["grep"]}),
    ],
    ids=["tools", "odd", "none", "one-call", "no-thinking", "stop", "stop-shown", "stop-within-a-call"],
)
async def test_messages_equal_those_of_chat_completions(before, scaled_out, episode, fields):
    """The same script runs on chat completions: other tokens, the same text."""
    async with proxying(scaled_out.url, MemoryStore(), engine="vllm") as natively:
        sampled = []
        for proxy in (before, natively):
            harness = proxy.harness("s", tools=TOOLS, **fields).say(f"EPISODE:{episode} please")
            for n in range(3):
                await harness.turn(then=f"Go on: {n} ☕", answer=f"total {n}\n")
            assert harness.contiguous == (2, 2)
            assert all(len(reply.logprobs) == len(reply.ids) for reply in harness.replies)
            sampled.append([words(reply) for reply in harness.replies])
        assert sampled[0] == sampled[1]


@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        ({"tool_choice": "required"}, "<tool_call>"),
        ({"tool_choice": {"type": "function", "function": {"name": "note"}}}, "<tool_call>"),
        ({"tool_choice": "none", "response_format": {"type": "json_object"}}, "{"),
    ],
    ids=["required", "named", "format"],
)
async def test_constraints_of_chat_completions_hold(before, fields, begins):
    """Without a constraint the model would not produce this: its weights are random, and it does not think first."""
    harness = before.harness("s", tools=TOOLS, max_tokens=24, chat_template_kwargs={"enable_thinking": False}).say("No script.")
    free = await harness.turn()
    reply = await harness.turn(**fields)
    assert harness.contiguous == (1, 1)
    sampled = [(await before.detokenize(one.ids)).lstrip().startswith(begins) for one in (free, reply)]
    assert sampled == [False, True]

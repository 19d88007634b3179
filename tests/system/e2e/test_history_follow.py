"""Sessions that follow the template (`--history follow`) on a real vLLM: prompts as it renders them, replies in the ids that it sampled."""

from collections import Counter

import pytest
from conftest import proxying
from rig.exported import assert_exported, trajectory, turns
from rig.harness import TOOLS, Harness
from rig.server import MODEL
from test_histories import assert_faithful

from tokencache.batching.forest import build_forest
from tokencache.batching.selection import TrainingRow
from tokencache.client import AsyncClient
from tokencache.store.memory import MemoryStore
from tokencache.trajectories.verify import verify

STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
TOKENIZERS = pytest.mark.parametrize("tokenizer", ["own", "qwen3"], indirect=True)


class TidyHarness(Harness):
    """Sends thinking back, and trims texts as templates do. So a reply that the model wrote as the template does is rendered as it was."""

    def echo(self, reply):
        message = {"role": "assistant", "content": reply.text.strip(), "reasoning": (reply.message.get("reasoning") or "").strip()}
        return message | ({"tool_calls": reply.calls} if reply.calls else {})


async def rendered(proxied, messages):
    """What vLLM would use for these messages, as text."""
    body = {"model": MODEL, "messages": messages, "tools": TOOLS}
    return await proxied.detokenize((await proxied.post("/tokenize", body))["tokens"])


def assert_sampled(listed, answered):
    """Each part of a reply that a prompt shows is in the ids that were sampled. Returns how many lack their beginning."""
    sampled, cut = {turn["turn"]: reply for turn, reply in zip(listed, answered, strict=True)}, 0
    for turn, reply in zip(listed, answered, strict=True):
        for anchor in turn["anchors"]:
            start, end, offset = anchor["start"], anchor["end"], anchor.get("offset", 0)
            assert reply.prompt[start:end] == sampled[anchor["turn"]].ids[offset : offset + end - start]
            assert end > start
            cut += offset > 0
    return cut


@TOKENIZERS
@STREAMS
async def test_prompts_are_what_vllm_renders(vllm, stream):
    """The model writes as the template does, and the harness sends thinking back. So the texts are equal to the last character."""
    async with proxying(vllm, MemoryStore(), history="follow") as proxied:
        harness = TidyHarness(proxied.http, proxied.url, session="follow", stream=stream, tools=TOOLS).say("EPISODE:tidy please")
        for _ in range(7):
            expected = await rendered(proxied, harness.messages)
            reply = await harness.turn()
            assert await proxied.detokenize(reply.prompt) == expected
        listed = await turns(proxied, "follow")
        assert assert_sampled(listed, harness.answered) > 3
        dropped = [turn for turn in listed if (turn["match"], turn["reason"]) == ("resplice", "thinking-dropped")]
        exported = await trajectory(proxied, "follow")
        assert_exported(exported, harness.answered, sequences=1 + len(dropped))
        assert len(dropped) == 4, [(turn["match"], turn["reason"]) for turn in listed]


@STREAMS
async def test_a_harness_that_rewrites_what_it_keeps(vllm, stream):
    """Outside what the model wrote, prompts are vLLM's rendering; no prompt has thinking of before the last question."""
    async with proxying(vllm, MemoryStore(), history="follow") as proxied:
        harness = proxied.harness("rewritten", stream=stream, tools=TOOLS).say("EPISODE:agent please")
        shown = Counter()
        for _ in range(7):
            messages = list(harness.messages)
            reply = await harness.turn()
            (*_, turn) = await turns(proxied, "rewritten")
            shown[turn["match"]] += 1
            if turn["match"] == "resplice":
                text = await proxied.detokenize(reply.prompt)
                assert not any(thought in text for thought in ("I look first", "Two at once", "Now the fix", "That was all"))
                await assert_faithful(proxied, reply.prompt, turn["anchors"], messages)
        assert shown == {"root": 1, "continue": 4, "resplice": 2}
        assert assert_sampled(await turns(proxied, "rewritten"), harness.answered)
        assert_exported(await trajectory(proxied, "rewritten"), harness.answered, sequences=3)


async def test_a_session_chooses_and_the_forest_shares_its_prompts(vllm):
    """The default stays `supply`. Sequences that follow the template share their beginnings, and each sampled token is trained once."""
    async with proxying(vllm, MemoryStore()) as proxied, AsyncClient(proxied.url) as client:
        found = {}
        for history in ("supply", "follow"):
            session = await client.create(history, history=history)
            harness = proxied.harness(history, tools=TOOLS).say("EPISODE:tidy please")
            for _ in range(5):
                await harness.turn()
            found[history] = await session.fetch()
            assert verify(found[history]) == []
        assert [len(trajectory.sequences) for trajectory in found.values()] == [1, 3]
        sequences = found["follow"].sequences
        forest = build_forest(TrainingRow(found["follow"], sequence) for sequence in sequences)
        assert sum(forest.loss_mask) == sum(sum(sequence.loss_mask) for sequence in sequences)
        assert len(forest.token_ids) < sum(len(sequence.token_ids) for sequence in sequences)

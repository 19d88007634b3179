"""Chaos between harnesses and proxies: what is exported equals what a calm run exports, and nothing is lost or there twice.

The engine samples the same tokens for the same prompt, so both runs can be compared token by token. Where a harness received the beginning
of a reply and asked again, or its call overtook itself, the engine has sampled more. Such a turn is a row of its own, and has a mark.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import aiohttp
import pytest

from tests.support.waiting import block_until
from tests.system.faults.dialects import DIALECTS
from tests.system.faults.harness import Agent
from tests.system.faults.relay import FAULTS, ChaosRelay
from tests.system.faults.sdks import SdkAgent
from tests.system.faults.stack import Stack

OPTIONS = ("--store-timeout", "60", "--hold", "60")
ENGINE = ("--repeatable", "--token-delay", "0.002", "--chunk-tokens", "2")
TURNS = 3
MARKS = {"aborted", "second-sample"}
"""Marks of a turn that its harness asked for again."""


def rows(export):
    """The sequences as a trainer gets them."""
    return [(sequence["token_ids"], sequence["loss_mask"], sequence["logprobs"]) for sequence in export["sequences"]]


def asked_again(export):
    """The tokens, with their prompts, of turns with such a mark. A turn with equal tokens may be continued in its place."""
    turns = [(sequence["token_ids"], turn) for sequence in export["sequences"] for turn in sequence["turns"]]
    return [ids[: turn["completion"][1]] for ids, turn in turns if MARKS & set(turn["marks"])]


def differences(calm, chaotic):
    """What is lost, is there twice, or has another token in the exports of a chaotic run. `calm` and `chaotic`: session → export."""
    found = []
    for session, export in calm.items():
        if not chaotic[session]["complete"]:
            found.append(f"{session}: is incomplete: {chaotic[session]['incidents']}")
        left = rows(chaotic[session])
        for row in rows(export):
            if row in left:
                left.remove(row)
            else:
                found.append(f"{session}: a row of {len(row[0])} tokens is lost or differs")
        for ids, mask, logprobs in left:
            trained = [place for place, value in enumerate(mask) if value]
            begins = [row for row in rows(export) if row[0][: len(ids)] == ids and all(row[2][at] == logprobs[at] for at in trained)]
            if ids not in asked_again(chaotic[session]):
                found.append(f"{session}: a row of {len(ids)} tokens is there twice, without a mark")
            elif not begins:
                found.append(f"{session}: a row of {len(ids)} tokens is not the beginning of one of the calm run")
    return found


def make(http, url):
    """Agents of each dialect: scripted and by SDK, streaming and not."""
    kinds = [(Agent, "script"), (SdkAgent, "sdk")]
    return [
        kind(f"{name}-{dialect.name}-{'stream' if streams else 'whole'}", dialect, http, [url], streams=streams, tries=12, timeout_s=10.0)
        for kind, name in kinds
        for dialect in DIALECTS
        for streams in (True, False)
    ]


async def run(folder, options, **chaos):
    """One run of all agents at once. Returns their sessions' exports, the checker's findings and the faults that happened."""
    with ExitStack() as opened:
        stack = opened.enter_context(Stack(folder, options=(*OPTIONS, *options), engine=ENGINE))
        ports = [int(url.rpartition(":")[2]) for url in stack.urls]
        relay = opened.enter_context(
            ChaosRelay(ports, begun=lambda: any(proxy.gauge("calls_in_flight") for proxy in stack.proxies), **chaos)
        )
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
            agents = make(http, relay.url)

            async def work(agent):
                for _ in range(TURNS):
                    assert await agent.turn(), agent.asked[-1].ends

            await asyncio.gather(*map(work, agents))
        await asyncio.to_thread(block_until, lambda: relay.idle, "the end of what the relay holds")
        found = await asyncio.to_thread(stack.check, agents)
        exports = {agent.session: await asyncio.to_thread(stack.export, agent.session) for agent in agents}
        return exports, found, relay.happened


async def compared(folder, *options):
    """The differences that chaos makes, the checker's findings, and the chaotic exports."""
    for name in ("calm", "chaos"):
        (folder / name).mkdir()
    calm, found, _ = await run(folder / "calm", options)
    assert found.clean, found.words
    chaotic, found, happened = await run(folder / "chaos", options, seed=7, each=3)
    assert happened == dict.fromkeys(FAULTS, 3)
    return differences(calm, chaotic), found, chaotic


async def test_exports_equal_those_of_a_calm_run(tmp_path):
    different, found, chaotic = await compared(tmp_path)
    assert different == []
    # Not `misjudged`: an attempt whose end the proxy notices after the harness got its last reply counts as a harness that left.
    assert [found.lost, found.false, found.unmarked, found.unnamed] == [[], [], [], []], found.words
    assert "retry-replayed" in {incident["kind"] for export in chaotic.values() for incident in export["incidents"]}
    turns = [turn for export in chaotic.values() for sequence in export["sequences"] for turn in sequence["turns"]]
    assert {"aborted", "second-sample"} <= {mark for turn in turns for mark in turn["marks"]}


@pytest.mark.whole
async def test_without_deduplication_they_differ(tmp_path):
    different, _, _ = await compared(tmp_path, "--repeats", "off")
    assert any("there twice" in one for one in different)


SAMPLED = {"turn": "a", "completion": [2, 4], "marks": []}
ROW = {"token_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "logprobs": [0.0, 0.0, -0.5, -0.25], "turns": [SAMPLED]}
CUT = {
    "token_ids": [1, 2, 3],
    "loss_mask": [0, 0, 1],
    "logprobs": [0.0, 0.0, -0.5],
    "turns": [SAMPLED | {"completion": [2, 3], "marks": ["aborted"]}],
}


def exported(*sequences, complete=True):
    return {"s": {"sequences": list(sequences), "complete": complete, "incidents": []}}


@pytest.mark.parametrize(
    ("chaotic", "words"),
    [
        (exported(ROW), ""),
        (exported(ROW, CUT), ""),
        (exported(ROW, complete=False), "is incomplete"),
        (exported(), "is lost or differs"),
        (exported(ROW | {"token_ids": [1, 2, 3, 5]}), "is lost or differs"),
        (exported(ROW | {"loss_mask": [0, 1, 1, 1]}), "is lost or differs"),
        (exported(ROW | {"logprobs": [0.0, 0.0, -0.25, -0.5]}), "is lost or differs"),
        (exported(ROW, ROW), "there twice, without a mark"),
        (exported(ROW, CUT | {"turns": [SAMPLED | {"completion": [2, 3]}]}), "there twice, without a mark"),
        (exported(ROW, CUT | {"token_ids": [1, 2, 9]}), "not the beginning"),
        (exported(ROW, CUT | {"logprobs": [0.0, 0.0, -0.25]}), "not the beginning"),
    ],
)
def test_the_comparison_finds(chaotic, words):
    found = differences(exported(ROW), chaotic)
    assert any(words in one for one in found) if words else found == []

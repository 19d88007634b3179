"""The structure of real sessions: sub-agents side by side, side calls, compaction, rollback, retries, several model names.

Each test runs one kind of traffic in one session and compares the export with the engine's ground-truth log (`Rig.check`).
"""

import asyncio
import json

import aiohttp
import msgspec
from aiohttp import web

from tests.proxy.kit import CHAT, HEADER, TOOLS, echo, proxied, results, user
from tests.support.waiting import PATIENCE
from tokencache.batching.selection import main_line, select
from tokencache.config import Settings
from tokencache.server.serve import serving
from tokencache.store.memory import MemoryStore
from tokencache.trajectories.values import Trajectory

AGENTS = 4


def system(text):
    return {"role": "system", "content": text}


async def agent(rig, opening, turns, *, model="sim", tools=TOOLS, stream=False):
    """Run an agent's loop for some turns; returns its whole history."""
    history = list(opening)
    for _ in range(turns):
        said = await rig.say("s", history, model=model, tools=tools, stream=stream)
        history += [echo(said), *results(said)]
    return history


async def starts(rig, **expected):
    """The exported sequences' beginnings, counted; all of them whole, each token trained once."""
    exported = await rig.check()
    assert exported["complete"]
    found = {}
    for sequence in exported["sequences"]:
        found[sequence["start"]] = found.get(sequence["start"], 0) + 1
    assert found == expected
    return exported["sequences"]


async def test_sub_agents_side_by_side_are_lineages_of_their_own(rig):
    """Interleaved under one session, with the same first words: each agent is one sequence, and so is the title call."""
    agents = [agent(rig, [system(f"You are sub-agent {n}."), user("EPISODE:demo")], 4, stream=n % 2 == 0) for n in range(AGENTS)]
    title = rig.say("s", [system("Write a title."), user("EPISODE:demo")])
    await asyncio.gather(agent(rig, [system("You lead."), user("EPISODE:demo")], 4), *agents, title)
    sequences = await starts(rig, root=AGENTS + 2)
    assert sorted(len(sequence["turns"]) for sequence in sequences) == [1] + [4] * (AGENTS + 1)


async def test_no_call_of_a_session_waits_for_another():
    """The engine answers none of four calls before it has all four: a lock around generation would never end."""
    together = asyncio.Barrier(AGENTS)

    async def answer(request):
        asked = await request.json()
        if "stream" not in asked:
            return web.Response(status=404)
        async with together:
            choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop", "token_ids": [3]}
            return web.json_response({"choices": [choice], "prompt_token_ids": [1, 2], "model": "m"})

    app = web.Application()
    app.router.add_post(CHAT, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    upstream = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with serving(Settings(upstream=upstream, port=0), MemoryStore()) as (url, _), aiohttp.ClientSession(url) as http:

        async def call(n):
            async with http.post(CHAT, json={"messages": [user(f"hi {n}")], "stream": False}, headers={HEADER: "s"}) as said:
                return said.status, json.loads(await said.text())["choices"][0]["message"]["content"]

        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*(call(n) for n in range(AGENTS))) == [(200, "Hi")] * AGENTS
    await runner.cleanup()


async def test_compaction_keeps_what_is_still_the_models_own(rig):
    """The summary is asked for on the main line, then the history is replaced by it and the last turns stay as they are."""
    opening = [system("You lead."), user("EPISODE:demo")]
    history = await agent(rig, opening, 3)
    summary = await rig.say("s", [*history, user("Summarise all this.")], tools=TOOLS)
    called = max(i for i, message in enumerate(history) if message.get("tool_calls"))
    kept = history[called:]  # a call is known by its id, and what follows by what stands before it
    compacted = [system("You lead."), user(f"EPISODE:demo\nSummary: {summary['content']}"), *kept]
    said = await rig.say("s", compacted, tools=TOOLS)
    await rig.say("s", [*compacted, echo(said), *results(said)], tools=TOOLS)
    sequences = await starts(rig, root=1, resplice=1)
    line, after = sorted(sequences, key=lambda sequence: sequence["start"] != "root")
    assert len(line["turns"]) == 4
    assert [turn["match"] for turn in after["turns"]] == ["resplice", "continue"]
    assert after["reason"] == "context-edited"


async def test_results_removed_one_after_another_leave_one_line(rig):
    """As with screenshots: each removal starts a sequence, which took its context from the one before it. None is beside the rollout."""
    history = await agent(rig, [user("EPISODE:demo")], 2)
    places = [i for i, message in enumerate(history) if message["role"] == "tool"]
    for place in places[:2]:
        history[place] = {**history[place], "content": "[removed]"}
        said = await rig.say("s", history, tools=TOOLS)
        history += [echo(said), *results(said)]
    sequences = await starts(rig, root=1, resplice=2)
    first, second, third = sorted(sequences, key=lambda sequence: sequence["turns"][0]["created"])
    assert [second["parent"], third["parent"]] == [first["id"], second["id"]]
    assert not select([msgspec.convert(await rig.exported(), Trajectory)], main_line).dropped


async def test_a_summary_on_another_system_prompt_is_a_line_of_its_own(rig):
    """OpenCode's way: the whole history flattened into one message, then a history that begins with the summary: words, no reply."""
    history = await agent(rig, [system("You lead."), user("EPISODE:demo")], 2)
    flat = "\n".join(f"{entry['role']}: {entry.get('content')}" for entry in history)
    summary = await rig.say("s", [system("You summarise."), user(flat)])
    assert summary["content"]
    await agent(rig, [system("You lead."), user("What did we do so far? EPISODE:demo"), echo(summary), user("Continue.")], 2)
    sequences = await starts(rig, root=2, plain=1)
    assert sum(len(sequence["turns"]) for sequence in sequences) == 5


async def test_a_rollback_is_a_branch(rig):
    history = await agent(rig, [user("EPISODE:demo")], 3)
    back = history[: 1 + len([*history[1:2], *history[2:3]])]
    said = await rig.say("s", [*back[:-1], {**back[-1], "content": "something else happened"}], tools=TOOLS)
    assert said["content"] is not None or said["tool_calls"]
    sequences = await starts(rig, root=1, branch=1)
    assert {sequence["start"]: len(sequence["turns"]) for sequence in sequences} == {"root": 3, "branch": 1}


async def test_a_retry_that_went_on_is_the_line_and_the_answer_thrown_away_is_kept(rig):
    opening = [user("EPISODE:demo")]
    await rig.say("s", opening, tools=TOOLS)
    history = await agent(rig, opening, 3)
    assert len(history) > 3
    sequences = await starts(rig, root=2)
    assert sorted(len(sequence["turns"]) for sequence in sequences) == [1, 3]


async def test_roles_under_several_model_names_share_the_one_model():
    """Main line, sub-agent and title call ask for three names; each is still its own line of the one served model."""
    async with proxied(model_aliases='{"big-*": "sim", "small-*": "sim"}') as rig:
        await agent(rig, [system("You lead."), user("EPISODE:demo")], 3, model="big-1")
        await agent(rig, [system("You help."), user("EPISODE:demo")], 2, model="big-2")
        await rig.say("s", [system("Write a title."), user("EPISODE:demo")], model="small-1")
        sequences = await starts(rig, root=3)
        assert {turn["model"] for sequence in sequences for turn in sequence["turns"]} == {"sim"}

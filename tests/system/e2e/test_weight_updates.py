"""A real vLLM that is paused during calls, as for new weights, and restarted between two turns.

`/pause` and `/resume` are routes of vLLM's development mode, which trainers use.
"""

import asyncio
import contextlib

import pytest
from conftest import proxying
from rig.server import LIMIT_S

from tests.support import invariants
from tokencache.store.memory import MemoryStore

MODES = ("abort", "wait", "keep")


@pytest.fixture
def server(weights_server):
    """A server in development mode that samples slowly."""
    return weights_server


@contextlib.asynccontextmanager
async def rollout(server, **settings):
    """A proxy in front of the server, and a session with one turn whose next request is the long one."""
    async with proxying(server.url, MemoryStore(), hold=LIMIT_S, aborted="again", **settings) as proxied:
        proxied.store = proxied.proxy.store
        harness = proxied.harness("s").say("EPISODE:count")
        await harness.turn()
        yield proxied, harness


async def sampled(proxied):
    """How many tokens the engine has sampled since it was started."""
    async with proxied.http.get(f"{proxied.vllm}/metrics") as answer:
        (line,) = [line for line in (await answer.text()).splitlines() if line.startswith("vllm:generation_tokens_total{")]
    return float(line.rpartition(" ")[2])


async def get_json(proxied, path):
    async with proxied.http.post(proxied.vllm + path) as answer:
        assert answer.status == 200, await answer.text()


async def paused(proxied, mode, asked):
    """Makes a call, pauses the engine in the middle of it, and resumes it; returns the call's result."""
    before = await sampled(proxied)
    call = asyncio.create_task(asked)
    while await sampled(proxied) < before + 20:
        assert not call.done()
        await asyncio.sleep(0.01)
    await get_json(proxied, f"/pause?mode={mode}")
    await get_json(proxied, "/resume")
    return await call


async def recorded(proxied):
    async with proxied.http.get(f"{proxied.url}/tokencache/v1/sessions/s/trajectories") as answer:
        exported = await answer.json()
    turns = await proxied.store.turns("s")
    tokens = await proxied.store.tokens("s", [turn.id for turn in turns])
    assert not invariants.audit(turns, tokens, session="s")
    return exported, turns


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("stream", "whole"),
    [
        pytest.param(False, False, id="whole"),
        pytest.param(False, True, id="whole, whole replies", marks=pytest.mark.whole),  # a setting for streams
        pytest.param(True, False, id="stream"),
        pytest.param(True, True, id="stream, whole replies"),
    ],
)
async def test_a_call_in_progress_when_the_weights_change(server, figures, mode, stream, whole):
    async with rollout(server, whole_replies=whole) as (proxied, harness):
        async with asyncio.timeout(LIMIT_S):
            reply = await paused(proxied, mode, harness.turn(stream=stream))
        exported, turns = await recorded(proxied)
        cut = [turn for turn in turns if "engine-aborted" in turn.marks]
        shown = mode == "abort" and stream and not whole
        assert reply.finish_reason == ("abort" if shown else "stop")
        assert len(cut) == (1 if mode == "abort" else 0)
        assert all(turn.finish_reason == "abort" and turn.completion_tokens for turn in cut)
        assert [turn.parent for turn in turns] == [None] + [turns[0].id] * (len(turns) - 1)
        assert exported["complete"]
        last = await harness.turn()
        assert last.extends(reply)
        figures.append(f"/pause?mode={mode}, stream={stream}, whole_replies={whole}: {[t.completion_tokens for t in turns]} tokens")


async def test_a_call_that_arrives_while_the_engine_is_paused(server, figures):
    async with rollout(server) as (proxied, harness):
        await get_json(proxied, "/pause?mode=abort")
        call = asyncio.create_task(harness.turn())
        done, _ = await asyncio.wait({call}, timeout=2)  # either the engine queues it, or the proxy does
        assert not done
        await get_json(proxied, "/resume")
        assert (await call).finish_reason == "stop"
        exported, turns = await recorded(proxied)
        assert [turn.match for turn in turns] == ["root", "continue"]
        figures.append(f"asked while paused: {[incident['kind'] for incident in exported['incidents']] or 'the engine let it wait'}")


@pytest.mark.parametrize("stream", [pytest.param(False, id="whole", marks=pytest.mark.whole), pytest.param(True, id="stream")])
async def test_an_engine_that_is_restarted_between_two_turns(server, stream):
    async with rollout(server) as (proxied, harness):
        (before,) = harness.replies
        await asyncio.to_thread(server.stop)
        call = asyncio.create_task(harness.turn(stream=stream))
        await asyncio.to_thread(server.__enter__)
        reply = await call
        exported, turns = await recorded(proxied)
        assert [turn.match for turn in turns] == ["root", "continue"]
        assert exported["complete"]
        assert reply.extends(before)
        assert "held" in [incident["kind"] for incident in exported["incidents"]]

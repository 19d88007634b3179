"""What the proxy detects about a real server at start, and what happens when a harness disconnects in mid-answer."""

import asyncio
import re
import subprocess
import time

import pytest
from conftest import MAX_MODEL_LEN, proxying
from rig.exported import generations, get_json, trajectory, turns
from rig.harness import SESSION_HEADER
from rig.server import MODEL, default_venv

from tests.support.waiting import until
from tokencache.engine.connections import IDLE_SECONDS
from tokencache.store.memory import MemoryStore


async def test_probe_detects_the_engines_capabilities(proxied):
    ready = await get_json(proxied.http, f"{proxied.url}/readyz")
    assert ready["ready"]
    (found,) = ready["engine"]["models"]
    (end,) = (await proxied.post("/tokenize", {"prompt": "<|im_end|>", "add_special_tokens": False}))["tokens"]
    version = (await get_json(proxied.http, f"{proxied.vllm}/version"))["version"]
    assert version.startswith("0.32")
    assert found["model"] == MODEL
    assert found["level"] == "exact"
    assert found["why"] == ""
    assert found["version"] == version
    assert found["honours_ids"] is True
    assert found["tokenizes"] is True
    assert found["max_model_len"] == MAX_MODEL_LEN
    assert found["stop_ids"] == [end]


def test_idle_connections_are_closed_before_vllm_closes_them():
    """vLLM might close one while a call is sent on it. (The servers of this suite keep theirs.)"""
    ask = "import vllm.envs; print(vllm.envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE)"
    asked = subprocess.run([default_venv() / "bin/python", "-c", ask], check=True, capture_output=True, text=True)
    assert int(asked.stdout.splitlines()[-1]) > IDLE_SECONDS


LONG = 24_000
"""Tokens that take a fast machine many seconds to sample: after forty events the answer is still running."""


async def running(proxied):
    async with proxied.http.get(f"{proxied.vllm}/metrics") as answer:
        return float(re.search(r"^vllm:num_requests_running\{.*\} (\S+)", await answer.text(), re.MULTILINE)[1])


async def recorded_as_aborted(proxied, session):
    async def aborted():
        async with proxied.http.get(f"{proxied.url}/tokencache/v1/sessions/{session}/turns") as answer:
            found = (await answer.json()).get("turns", []) if answer.status == 200 else []
        return bool(found) and "aborted" in found[-1]["marks"]

    await until(aborted)
    return (await turns(proxied, session))[-1]


@pytest.mark.parametrize("at", ["first-turn", "later-turn"])
async def test_disconnecting_in_mid_stream(proxied, figures, at):
    """vLLM stops generating at once, the turn is recorded as aborted with what was sampled until then, and the session continues."""
    harness = proxied.harness("left", stream=True, seed=9, max_tokens=40).say("EPISODE:long please")
    if at == "later-turn":
        await harness.turn()
    whole = len(harness.answered)
    body = harness.body(max_tokens=LONG)
    answer = await proxied.http.post(f"{proxied.url}/v1/chat/completions", json=body, headers={SESSION_HEADER: "left"})
    received = b""
    while received.count(b"\n\n") < 40:
        received += await answer.content.readany()
    assert await running(proxied) == 1
    answer.close()
    left = time.monotonic()

    async def idle():
        return await running(proxied) == 0

    await until(idle)
    figures.append(f"harness disconnected in mid-stream ({at}): vLLM idle after {time.monotonic() - left:.2f} s")
    turn = await recorded_as_aborted(proxied, "left")
    assert turn["finish_reason"] == "abort"
    assert 20 < turn["completion_tokens"] < LONG
    exported = await trajectory(proxied, "left")
    assert [incident["kind"] for incident in exported["incidents"]] == ["client-gone"]
    assert exported["complete"]
    aborted = generations(exported)[-1]
    assert len(generations(exported)) == whole + 1
    # With the seed the model samples the same again: the record is what it had sampled at the disconnect.
    (again,) = await harness.ask(max_tokens=turn["completion_tokens"])
    assert aborted[:2] == (tuple(again.prompt), tuple(again.ids))
    assert aborted[2] == pytest.approx(again.logprobs, abs=1e-3)
    # ... and the session continues. (The same text again would be ambiguous: the delivered prefix, or the retry's?)
    other = proxied.harness("left", stream=True, seed=9).say("EPISODE:talk please")
    for _ in range(3):
        await other.turn()
    done, of = other.contiguous
    assert done == of > 0


async def test_disconnecting_before_a_whole_answer(vllm, figures):
    """Not streamed, so nothing was received: vLLM is stopped anyway, and the session reports that something is missing."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "EPISODE:long please"}]}
    async with proxying(vllm, MemoryStore(), linger=0.5) as proxied:
        task = asyncio.create_task(proxied.http.post(f"{proxied.url}/s/gone/v1/chat/completions", json=body))

        async def busy():
            return await running(proxied) == 1

        async def idle():
            return await running(proxied) == 0

        await until(busy)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        left = time.monotonic()
        await until(idle)
        figures.append(f"harness disconnected before a whole answer: vLLM idle after {time.monotonic() - left:.2f} s")

        async def reported():
            found = await get_json(proxied.http, f"{proxied.url}/tokencache/v1/sessions/gone")
            return [incident["kind"] for incident in found["incidents"]] == ["client-gone", "nothing-received"] and not found["complete"]

        await until(reported)

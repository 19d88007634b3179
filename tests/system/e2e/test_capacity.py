"""Capacity and admission on a real vLLM: the size that it reports, what sessions hold of it, and who waits for room."""

import asyncio
import re

import pytest
from conftest import proxying

from tests.support.waiting import until
from tokencache.client import AsyncClient, NoRoomError
from tokencache.store.memory import MemoryStore

INFO = re.compile(r"^vllm:cache_config_info\{.*?\}", re.MULTILINE)


@pytest.fixture(autouse=True)
def long_pauses(monkeypatch):
    """Pauses as long as a busy machine needs, which count as load all the same."""
    monkeypatch.setattr("tokencache.engine.placement.IDLE_SECONDS", 1000.0)


async def reported(proxied):
    """The size of the KV cache in vLLM's own metrics, in tokens, less its null block."""
    async with proxied.http.get(f"{proxied.vllm}/metrics") as answer:
        (info,) = INFO.findall(await answer.text())
    tokens, block = (int(re.search(rf'{name}="(\d+)"', info)[1]) for name in ("kv_cache_size_tokens", "block_size"))
    return tokens - block


async def measured(client):
    async def known():
        found = await client.capacity()
        return found if found.tokens else None

    return await until(known)


async def test_sessions_are_created_while_they_fit(vllm):
    async with proxying(vllm, MemoryStore()) as proxied:
        tokens = await reported(proxied)
    async with proxying(vllm, MemoryStore(), admission=int(0.6 * tokens)) as proxied, AsyncClient(proxied.url) as client:
        found = await measured(client)
        (engine,) = found.engines
        assert (found.tokens, engine.ranks, engine.error, found.live_tokens) == (tokens, {"0": tokens}, "", 0)
        await client.create("first")
        with pytest.raises(NoRoomError, match="Its place is 1"):
            await client.create("second")
        async with proxied.http.post(f"{proxied.url}/tokencache/v1/sessions", json={"session": "second"}) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "5")
        harness = proxied.harness("first").say("EPISODE:talk please")
        unknown = proxied.harness("of-nobody").say("EPISODE:talk please")
        for one in (harness, unknown, harness):  # a call never waits, whoever created its session
            await one.turn()
        (last,), (other,) = harness.replies[-1:], unknown.replies
        assert (await client.capacity()).live_tokens == len(last.prefix) + len(other.prefix)
        waits = asyncio.create_task(client.create("second", wait=60))

        async def is_shown():
            return [(one.session, one.place) for one in (await client.capacity()).waiting] == [("second", 1)]

        await until(is_shown)
        await client.session("first").finish()
        await waits
        found = await client.capacity()
        assert (found.ended, found.footprint, found.waiting) == (1, len(last.prefix), [])
        assert found.sessions_fit == int(0.9 * tokens / len(last.prefix)) > 1
        assert found.live_tokens == len(other.prefix)
        await proxied.harness("second").say("EPISODE:talk please").turn()

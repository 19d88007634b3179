"""Limits that there are not, and the one that there is: file descriptors."""

import asyncio
import contextlib
import errno
import json
import logging
import resource
import socket

import aiohttp
import pytest
from aiohttp import web

from tests.proxy.kit import CHAT, EPISODES, HEADER, proxied, user
from tests.proxy.serve import served
from tests.support.waiting import PATIENCE, until
from tokencache.config import Settings
from tokencache.engine import connections
from tokencache.server import listener
from tokencache.server.listener import raise_file_limit
from tokencache.server.serve import serving
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine

ASK = {"model": "sim", "messages": [user("EPISODE:talk")]}
MANY = 1100  # more than 1024, which is a limit in many places


@pytest.fixture
def many():
    """A number of streams for which this process has the files: client, proxy (two) and engine are all in it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_file_limit()
    yield min(MANY, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 500) // 4)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.whole
async def test_no_number_of_streams_is_too_many(many):
    """The engine says nothing until all of them are there: were there a cap anywhere, it would wait for ever."""
    there, all_there = set(), asyncio.Event()

    async def answer(request):
        body = await request.json()
        if not body.get("stream"):  # the proxy's probe
            return web.Response(status=404)
        there.add(request.headers["X-Session-ID"])
        if len(there) == many:
            all_there.set()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await all_there.wait()
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        choice = {"index": 0, "delta": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop", "token_ids": [4]}
        chunk = {**head, "choices": [choice], "prompt_token_ids": [1, 2]}
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post(CHAT, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    url, store = f"http://127.0.0.1:{runner.addresses[0][1]}", MemoryStore()

    async def ask(http, number):
        async with http.post(CHAT, json={**ASK, "stream": True}, headers={HEADER: f"s{number}"}) as said:
            return said.status, (await said.read()).endswith(b"data: [DONE]\n\n")

    no_limit = aiohttp.TCPConnector(limit=0)
    async with serving(Settings(upstream=url, port=0), store) as (base, _), aiohttp.ClientSession(base, connector=no_limit) as http:
        async with asyncio.timeout(PATIENCE):
            ends = await asyncio.gather(*[ask(http, number) for number in range(many)])
        assert ends == [(200, True)] * many
    assert [len(await store.turns(f"s{number}")) for number in range(many)] == [1] * many
    await runner.cleanup()


async def test_too_few_open_files_are_logged_and_harnesses_wait():
    """Of 150 streams at a time 86 fit: the others are let in when those end, and it is said once."""
    engine = SimulatedEngine(episodes=EPISODES, seed=7, token_delay=0.002)

    async def ask(http, number):
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):  # on a busy machine its request may come too late; SDKs repeat it
                async with http.post(CHAT, json={**ASK, "stream": True}, headers={HEADER: f"s{number}"}) as said:
                    return (await said.read()).endswith(b"data: [DONE]\n\n")

    async with engine.serve() as up, served("--port", "0", "--upstream", up, files=300) as proxy:
        (url,) = await proxy.said(r"listens on (\S+) for")
        each_its_own = aiohttp.TCPConnector(limit=0, force_close=True)
        async with asyncio.timeout(PATIENCE), aiohttp.ClientSession(url, connector=each_its_own) as http:
            assert all(await asyncio.gather(*[ask(http, number) for number in range(150)]))
    assert "ONLY 86 STREAMS FIT" in proxy.log
    assert proxy.log.count("FULL: 86 connections are open") == 1
    assert "OUT OF FILE DESCRIPTORS" not in proxy.log
    assert " ERROR " not in proxy.log.replace("ERROR tokencache.server.listener", "")


class Short(socket.socket):
    """A listening socket of a process that has no descriptors left."""

    short = True
    tried = 0

    def accept(self):
        if self.short:
            self.tried += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_no_descriptor_for_a_harness(monkeypatch, caplog):
    """It waits before the door; who should open it does not spin, and says it once."""
    monkeypatch.setattr(listener, "PAUSE_SECONDS", 3600.0)

    async def hello(_):
        return web.Response(text="hello")

    listening = Short()
    listening.bind(("127.0.0.1", 0))
    listening.setblocking(False)
    url = "http://{}:{}".format(*listening.getsockname())
    accepting = listener.Listener(web.Server(hello), [listening])
    accepting.open()

    async def tried():
        return listening.tried

    async def tried_again():
        return listening.tried == 2

    async with asyncio.timeout(PATIENCE), aiohttp.ClientSession() as http:
        asked = asyncio.create_task(http.get(url))
        await until(tried)
        for _ in range(200):
            await asyncio.sleep(0)
        assert listening.tried == 1
        accepting._resume()  # as if the pause were over
        await until(tried_again)
        listening.short = False
        accepting._resume()
        async with await asked as answer:
            assert await answer.text() == "hello"
    accepting.close()
    assert caplog.text.count("no connection can be accepted: Too many open files") == 1


async def test_no_descriptor_for_the_engine(monkeypatch, caplog):
    """The call is held, and the log says that it is not the engine's fault: it is the same process, with the same weights."""
    async with proxied(hold=PATIENCE) as rig:
        async with rig.http.put(f"{rig.url}/tokencache/v1/weights", json={"version": "7"}) as answer:
            assert answer.status == 200
        await rig.proxy.upstream.close()
        await rig.proxy.upstream.open()  # no connection is at hand
        left = iter([True] * 3)

        def short(_):
            if next(left, False):
                raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(connections, "keep_alive", short)
        with caplog.at_level(logging.ERROR):
            assert await rig.say("s", [user("EPISODE:demo")])
        await rig.check()
        assert [span["version"] for turn in await rig.turns() for span in turn["weight_versions"]] == ["7"]
    assert caplog.text.count("OUT OF FILE DESCRIPTORS") == 1

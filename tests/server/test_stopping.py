"""Stopping the server: requests in progress finish or are cancelled in time, and unsaved incidents are written or logged."""

import asyncio
import json
import signal

import aiohttp
import pytest

from tests.proxy.kit import CHAT, EPISODES, HEADER, user
from tests.proxy.serve import served
from tests.support.waiting import PATIENCE, until
from tokencache.config import Settings
from tokencache.server.drain import StopSignal
from tokencache.server.serve import serving
from tokencache.store.base import StoreError
from tokencache.store.memory import MemoryStore
from tokencache.testing import Fault, SimulatedEngine

ASK = {"model": "sim", "messages": [user("EPISODE:talk")]}


class Rack:
    """An engine and a proxy that a test can stop: `end` leaves the server's context without waiting."""

    def __init__(self, store=None, **settings):
        self.engine = SimulatedEngine(episodes=EPISODES, seed=7)
        self.store, self.settings = store or MemoryStore(), settings
        self.stop = StopSignal()
        self._over, self._up = asyncio.Event(), asyncio.Event()

    async def __aenter__(self):
        self._serving = asyncio.create_task(self._serve())
        up = asyncio.create_task(self._up.wait())
        await asyncio.wait({self._serving, up}, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        assert self._up.is_set(), self._serving
        self.http = aiohttp.ClientSession(self.url, headers={HEADER: "s"})
        return self

    async def __aexit__(self, *why):
        await self.http.close()
        self.stop.at_once.set()
        await self.ended()

    async def _serve(self):
        drain = self.settings.pop("drain", PATIENCE)
        quiet = self.settings.pop("quiet", 0.0)
        async with self.engine.serve() as up:
            settings = Settings(upstream=up, port=0, linger=0, **self.settings)
            async with serving(settings, self.store, drain_seconds=drain, last_request_seconds=quiet, stop=self.stop) as (
                self.url,
                self.proxy,
            ):
                await self.proxy.engine.model()
                self._up.set()
                await self._over.wait()

    def end(self):
        self._over.set()

    async def ended(self):
        self.end()
        async with asyncio.timeout(PATIENCE):
            await self._serving

    async def asked(self):
        """Start a call that never ends."""
        self.engine.faults.append(Fault.hang())
        call = asyncio.create_task(self.http.post(CHAT, json=ASK))
        await until(self.under_way)
        return call

    async def under_way(self):
        return not self.engine.faults  # it was taken

    async def closed(self):
        """Return whether the port is closed."""
        try:
            async with aiohttp.ClientSession(self.url) as other, other.get("/healthz"):
                return False
        except aiohttp.ClientConnectorError:
            return True


async def test_open_connections_get_a_last_response():
    async with Rack(quiet=PATIENCE) as rack:
        async with rack.http.get("/healthz") as answer:
            assert "close" not in answer.headers.get("Connection", "")
        rack.end()
        await until(rack.closed)
        async with rack.http.post(CHAT, json=ASK) as answer:  # on the connection that there is
            assert answer.status == 200
            assert answer.headers["Connection"] == "close"
        with pytest.raises(aiohttp.ClientConnectorError):
            await rack.http.get("/healthz")


@pytest.mark.parametrize("how", ["time", "again"])
async def test_calls_that_do_not_end_are_cancelled_and_recorded(how):
    async with Rack(drain=0.05 if how == "time" else PATIENCE) as rack:
        call = await rack.asked()
        rack.end()
        if how == "again":
            await until(rack.closed)
            assert not call.done()
            rack.stop.at_once.set()
        with pytest.raises(aiohttp.ClientError):
            await call
        await rack.ended()
        info = await rack.store.session("s")
        assert info.open_calls == ()
        assert "client-gone" in {incident.kind for incident in info.incidents}


class Away(MemoryStore):
    """A store that can fail."""

    gone = False
    tried = 0

    async def commit(self, *args, **more):
        self._fail()
        return await super().commit(*args, **more)

    async def settle(self, *args, **more):
        self._fail()
        return await super().settle(*args, **more)

    async def add_incidents(self, *args, **more):
        self._fail()
        return await super().add_incidents(*args, **more)

    def _fail(self):
        if self.gone:
            self.tried += 1
            raise StoreError("no connection")


async def test_a_consumer_that_waits_gets_its_answer_at_the_end():
    async with Rack() as rack:
        waiting = asyncio.create_task(rack.http.post("/tokencache/v1/queue/take", json={"consumer": "c", "wait": 60}))

        async def looked():
            return rack.looks

        rack.looks, queue = 0, rack.store.queue

        async def counted():
            rack.looks += 1
            return await queue()

        rack.store.queue = counted
        await until(looked)
        await rack.ended()
        async with await waiting as answer:
            assert (answer.status, await answer.json()) == (200, {"deliveries": []})


async def test_unsaved_incidents_are_written_if_the_store_is_back_in_time():
    store = Away()
    async with Rack(store) as rack:
        store.gone = True
        async with rack.http.post(CHAT, json=ASK) as answer:
            assert answer.status == 200
        rack.end()
        await until(rack.closed)
        before = store.tried

        async def tried_again():
            return store.tried > before

        await until(tried_again)
        store.gone = False
        await rack.ended()
    info = await store.session("s")
    assert [incident.kind for incident in info.incidents] == ["store-error"]


async def test_incidents_that_cannot_be_written_are_logged(caplog):
    store = Away()
    async with Rack(store, drain=0.05) as rack:
        store.gone = True
        for session in ("lost-a", "lost-b", "lost-a"):
            async with rack.http.post(CHAT, json=ASK, headers={HEADER: session}) as answer:
                assert answer.status == 200
        await rack.ended()
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert any("INCIDENTS OF 2 SESSIONS ARE LOST" in line for line in said)
    named = [line for line in said if "incidents not saved" in line]
    assert [line.split()[1].rstrip(":") for line in named] == ["lost-a", "lost-b"]
    assert "store-error (2 times)" in named[0]
    assert "so its `complete` flag may be WRONG" in named[0]


async def test_a_start_that_fails_closes_the_store(monkeypatch):
    store, closed = MemoryStore(), asyncio.Event()

    async def fail(_known):
        raise StoreError("it is down")

    async def close():
        closed.set()

    monkeypatch.setattr(store, "secret", fail)
    monkeypatch.setattr(store, "close", close)
    with pytest.raises(StoreError, match="it is down"):
        async with serving(Settings(upstream="http://127.0.0.1:9", port=0), store):
            pass
    assert closed.is_set()


async def test_a_second_signal_stops_one_process_at_once():
    engine = SimulatedEngine(episodes=EPISODES, seed=7)
    async with engine.serve() as up, served("--port", "0", "--upstream", up) as proxy:
        (url,) = await proxy.said(r"listens on (\S+) for")
        async with aiohttp.ClientSession(url, headers={HEADER: "s"}) as http:
            async with http.post(CHAT, json=ASK) as answer:
                assert answer.status == 200
            engine.faults.extend([Fault.stall()] * 8)  # the proxy may be asking what log probabilities are, and takes some
            async with http.post(CHAT, json={**ASK, "stream": True}) as answer:
                first = await answer.content.readuntil(b"\n\n")
                assert json.loads(first.removeprefix(b"data: "))["object"] == "chat.completion.chunk"
                proxy.signal(signal.SIGTERM)
                await proxy.said("calls in progress may finish")
                proxy.signal(signal.SIGTERM)
                with pytest.raises(aiohttp.ClientError):
                    await answer.read()
        assert await proxy.ended() == 0
    assert "1 requests are cancelled" in proxy.log
    assert "Traceback" not in proxy.log

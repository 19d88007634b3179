"""Several workers on one port: real processes, a real Redis, and signals."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import tempfile
from pathlib import Path

import aiohttp
import pytest

from tests.proxy.kit import CHAT, HEADER, user
from tests.proxy.serve import served
from tests.support.material import require
from tests.support.redis_server import RealRedis, find_binary
from tests.support.waiting import until
from tokencache.config import Settings
from tokencache.server import listener, workers
from tokencache.server.drain import StopSignal
from tokencache.testing import SimulatedEngine

pytestmark = pytest.mark.redis
REPLIES = {"talk": ["One, two, three, four, five, six, seven, eight, nine, ten."]}
TWO = ("--workers", "2", "--port", "0")


@pytest.fixture(scope="module")
def redis():
    require("redis-server", find_binary())
    with RealRedis() as server:
        yield server.url


@contextlib.asynccontextmanager
async def two_workers(redis, *options, token_delay=0.0):
    """Two workers in front of an engine. Yields the server, the engine, the URL and the workers' process ids."""
    engine = SimulatedEngine(episodes=REPLIES, seed=3, token_delay=token_delay)
    async with engine.serve() as up, served(*TWO, "--upstream", up, "--store", redis, *options) as proxy:
        (port,) = await proxy.said(r"2 workers share 127\.0\.0\.1 port (\d+)")
        await proxy.said(r"worker \d serves", 2)
        yield proxy, engine, f"http://127.0.0.1:{port}", pids(proxy)


def pids(proxy):
    """Process ids by worker number, the last ones."""
    return dict(re.findall(r"worker (\d) serves, process (\d+)", proxy.log))


def folder_of(process):
    """The folder of a worker's metrics."""
    variables = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
    return next(said.partition("=")[2] for said in variables if said.startswith("PROMETHEUS_MULTIPROC_DIR="))


@contextlib.asynccontextmanager
async def asking(url):
    """A client with a new connection for every call."""
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0, force_close=True)) as http:
        yield http


async def ask(http, session, **more):
    body = {"model": "sim", "messages": [user("EPISODE:talk")], **more}
    async with http.post(CHAT, json=body, headers={HEADER: session}) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.text()


async def figures(http):
    """Metrics: name and labels → value."""
    async with http.get("/metrics") as answer:
        assert answer.status == 200
        lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


ANSWERED = 'tokencache_calls_total{dialect="chat",outcome="answered"}'


async def begun(http, session):
    """A stream that has begun."""
    body = {"model": "sim", "messages": [user("EPISODE:talk")], "stream": True}
    answer = await http.post(CHAT, json=body, headers={HEADER: session})
    return answer, await answer.content.readuntil(b"\n\n")


async def rest(answer, beginning):
    """The finish reason of a stream; `None` if it ended early."""
    try:
        text = beginning + await answer.read()
    except (aiohttp.ClientError, ConnectionError):
        return None
    finally:
        answer.close()
    data = [event.removeprefix("data: ") for event in text.decode().split("\n\n") if event]
    if data[-1] != "[DONE]":
        return None
    return [choice["finish_reason"] for event in data[:-1] for choice in json.loads(event)["choices"]][-1]


async def test_any_worker_serves_any_call_and_reports_all_metrics(redis):
    async with two_workers(redis, "--log-level", "debug") as (proxy, _, url, processes), asking(url) as http:
        await asyncio.gather(*[ask(http, f"sum-{n}") for n in range(60)])
        await proxy.said(r"\[\d+\] tokencache\S*: session sum-\d+ call", 60)
        took = set(re.findall(r"\[(\d+)\] tokencache\S*: session sum-\d+ call", proxy.log))
        assert took == set(processes.values())

        async def counted():  # a call ends only after its client has the answer
            return (await figures(http))["tokencache_calls_in_flight"] == 0

        await until(counted)
        for _ in range(20):  # whichever answers
            told = await figures(http)
            assert told[ANSWERED] == 60
            assert told['tokencache_turns_total{match="root",reason=""}'] == 60
            assert told["tokencache_calls_in_flight"] == 0
            assert told["tokencache_worker_restarts_total"] == 0
            assert told['tokencache_added_seconds_count{phase="after"}'] == 60
            assert {value for name, value in told.items() if name.startswith(("tokencache_engine_up", "tokencache_engine_exact"))} == {1}
        said = await ask(http, "sum-0")
        async with http.get("/tokencache/v1/sessions/sum-0/turns") as answer:
            assert [turn["match"] for turn in (await answer.json())["turns"]] == ["root", "root"], said


@pytest.mark.whole
async def test_workers_share_a_file(tmp_path):
    async with two_workers(f"file:{tmp_path}/sessions.db", "--log-level", "debug") as (proxy, _, url, processes), asking(url) as http:
        await asyncio.gather(*[ask(http, f"sum-{n}") for n in range(40)])
        await proxy.said(r"\[\d+\] tokencache\S*: session sum-\d+ call", 40)
        assert set(re.findall(r"\[(\d+)\] tokencache\S*: session sum-\d+ call", proxy.log)) == set(processes.values())
        async with http.get("/tokencache/v1/sessions") as answer:
            sessions = (await answer.json())["sessions"]
        assert sorted(one["session"] for one in sessions) == sorted(f"sum-{n}" for n in range(40))
        assert {(one["turns"], one["complete"]) for one in sessions} == {(1, True)}


@pytest.mark.whole
async def test_an_added_engine_serves_all_workers(redis):
    engine = SimulatedEngine(episodes=REPLIES, seed=3)
    async with engine.serve() as up, served(*TWO, "--store", redis, "--hold", "0.1") as proxy:
        (port,) = await proxy.said(r"2 workers share 127\.0\.0\.1 port (\d+)")
        await proxy.said(r"worker \d serves", 2)
        async with asking(f"http://127.0.0.1:{port}") as http:
            async with http.post(CHAT, json={"messages": [user("hi")]}, headers={HEADER: "none"}) as answer:
                assert (answer.status, "POST /tokencache/v1/engines" in await answer.text()) == (503, True)
            async with http.post("/tokencache/v1/engines", json={"url": up}) as answer:
                assert answer.status == 201
            await proxy.said(r"engine \S+: added", 2)
            await proxy.said(r"level=exact", 2)
            await asyncio.gather(*[ask(http, f"added-{n}") for n in range(20)])
            async with http.delete("/tokencache/v1/engines", params={"url": up, "force": "true"}) as answer:
                assert answer.status == 200
            await proxy.said(r"engine \S+: removed", 2)


@pytest.mark.whole
async def test_a_killed_worker_is_restarted_while_others_go_on(redis):
    async with two_workers(redis, token_delay=0.3) as (proxy, engine, url, processes), asking(url) as http:
        streams = await asyncio.gather(*[begun(http, f"kill-{n}") for n in range(24)])
        assert (await figures(http))["tokencache_calls_in_flight"] == 24
        os.kill(int(processes["0"]), signal.SIGKILL)
        ends = await asyncio.gather(*[rest(*stream) for stream in streams])
        assert set(ends) == {None, "stop"}
        await proxy.said(r"WORKER 0 DIED \(signal 9\)")
        engine.token_delay = 0.0
        await asyncio.gather(*[ask(http, f"meanwhile-{n}") for n in range(8)])
        await proxy.said(r"worker 0 serves", 2)
        assert pids(proxy)["0"] != processes["0"]
        assert pids(proxy)["1"] == processes["1"]
        told = await figures(http)
        assert told[ANSWERED] == ends.count("stop") + 8
        assert told["tokencache_calls_in_flight"] == 0  # those of who died are none any more
        assert told["tokencache_worker_restarts_total"] == 1
        await asyncio.gather(*[ask(http, f"after-{n}") for n in range(40)])
        assert (await figures(http))[ANSWERED] == told[ANSWERED] + 40


@contextlib.asynccontextmanager
async def one_worker(folder):
    """A worker whose supervisor is this process."""
    stop = StopSignal()
    worker = workers._Worker(0, Settings(workers=2, port=0, store=f"file:{folder}/sessions.db"), str(folder), stop)
    running = asyncio.create_task(worker.keep_running())
    try:
        yield
    finally:
        stop.requested.set()
        worker.send("now")
        await running


@pytest.mark.whole
async def test_a_worker_that_hangs_is_replaced(tmp_path, monkeypatch, caplog):
    """The kernel still gives it connections, whose clients would wait for ever."""
    caplog.set_level("INFO")
    often = "from tokencache.server import workers\nworkers.ALIVE_SECONDS = 0.05\n"
    monkeypatch.setattr(workers, "_START", workers._START.replace("serve_as_worker({", f"{often}serve_as_worker({{"))
    monkeypatch.setattr(workers, "ALIVE_SECONDS", 0.25)
    monkeypatch.setattr(workers, "MOST_MISSED", 20)

    def serving():
        return re.findall(r"worker 0 serves, process (\d+)", caplog.text)

    async with one_worker(tmp_path):
        await until(lambda: len(serving()) == 1)
        os.kill(int(serving()[0]), signal.SIGSTOP)
        await until(lambda: len(serving()) == 2)
    assert caplog.text.count("WORKER 0 HAS HUNG for 5 s: it is killed") == caplog.text.count("WORKER 0 DIED (signal 9)") == 1


@pytest.mark.whole
async def test_a_slow_worker_is_left_alone(tmp_path, monkeypatch, caplog):
    """Also while it starts: it may load a tokenizer."""
    shown = "for _ in range(40): time.sleep(0.05); print('alive', flush=True)"
    monkeypatch.setattr(workers, "_START", f"import time; time.sleep(2); print('ready', flush=True)\n{shown}")
    monkeypatch.setattr(workers, "ALIVE_SECONDS", 0.01)
    monkeypatch.setattr(workers, "MOST_MISSED", 100)
    async with one_worker(tmp_path):
        await until(lambda: "DIED" in caplog.text)
    assert "DIED (exit code 0)" in caplog.text
    assert "HAS HUNG" not in caplog.text


async def test_a_signal_lets_all_workers_finish(redis):
    async with two_workers(redis, token_delay=0.05) as (proxy, _, url, _workers), asking(url) as http:
        streams = await asyncio.gather(*[begun(http, f"stop-{n}") for n in range(12)])
        proxy.signal(signal.SIGTERM)
        assert [await rest(*stream) for stream in streams] == ["stop"] * 12
        assert await proxy.ended() == 0
        with pytest.raises(aiohttp.ClientConnectorError):
            await ask(http, "too-late")
        assert "are cancelled" not in proxy.log


@pytest.mark.whole
async def test_a_second_signal_stops_all_workers_at_once(redis):
    async with two_workers(redis, token_delay=60) as (proxy, engine, url, _workers), asking(url) as http:
        engine.token_delay = 60  # what has begun will not end
        calls = [asyncio.create_task(ask(http, f"again-{n}", stream=True)) for n in range(6)]

        async def all_there():
            return (await figures(http))["tokencache_calls_in_flight"] == 6

        await until(all_there)
        proxy.signal(signal.SIGINT)
        await proxy.said("stopping: calls in progress may finish", 2)
        assert not any(call.done() for call in calls)
        proxy.signal(signal.SIGINT)
        assert await proxy.ended() == 0
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, aiohttp.ClientError) for end in ends)
        assert "are cancelled" in proxy.log


async def test_workers_do_not_outlive_their_supervisor(redis):
    """They delete the folder of their metrics, which takes memory and which a killed supervisor leaves."""
    async with two_workers(redis) as (proxy, _, url, processes), asking(url) as http:
        has_metrics = Path(folder_of(processes["0"])).exists
        assert has_metrics()
        proxy.signal(signal.SIGKILL)
        await proxy.said("THE SUPERVISOR IS GONE", 2)
        await proxy.ended()  # the log ends when the last of them has
        assert not has_metrics()
        with pytest.raises(aiohttp.ClientConnectorError):
            await ask(http, "too-late")


@pytest.mark.whole
async def test_a_missing_store_is_an_error():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with served(*TWO, "--store", f"redis://127.0.0.1:{nobody.getsockname()[1]}/0", "--store-timeout", "1") as proxy:
            assert await proxy.ended() == 1
    assert re.search(r"^tokencache: .*(refused|reach)", proxy.log, re.MULTILINE), proxy.log
    assert "Traceback" not in proxy.log


@pytest.mark.whole
async def test_a_port_in_use_is_an_error(redis):
    """Also if another proxy that shares its port uses it."""
    async with two_workers(redis) as (_, _, url, _workers):
        port = url.rpartition(":")[2]
        async with served("--workers", "2", "--port", port, "--store", redis) as second:
            assert await second.ended() == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in second.log
    assert "Traceback" not in second.log


def test_sessions_in_memory_are_not_shared():
    with pytest.raises(ValueError, match="2 workers cannot keep sessions in memory"):
        Settings(workers=2)
    assert Settings(workers=1).workers == 1


def test_metrics_need_a_writable_folder(monkeypatch, tmp_path):
    """Memory is preferred, so a read-only root works."""
    monkeypatch.setattr(workers, "_SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "shm").mkdir()
    with workers._metrics_folder() as folder:
        assert Path(folder).parent == tmp_path / "shm"
    (tmp_path / "shm").rmdir()
    with workers._metrics_folder() as folder:
        assert Path(folder).parent == tmp_path
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(OSError, match="workers need a folder for their metrics, in /dev/shm or where TMPDIR says"):
        workers._metrics_folder()


def test_all_addresses_of_a_host_have_the_same_port():
    sockets = listener.bind("localhost", 0, shared=True)
    again = listener.bind("localhost", sockets[0].getsockname()[1], shared=True)
    assert len({sock.getsockname()[1] for sock in [*sockets, *again]}) == 1
    for sock in [*sockets, *again]:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        sock.close()

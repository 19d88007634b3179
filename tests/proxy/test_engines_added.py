"""Engines that are added, drained and removed while the proxy runs: known to all replicas, and no call is ever cut by it."""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time

import aiohttp
import pytest

from tests.proxy.kit import CHAT, EPISODES, HEADER, TOOLS, Rig, calls_held, echo, results, user
from tests.support.waiting import PATIENCE, until
from tokencache import metrics
from tokencache.config import Settings
from tokencache.engine import membership, model
from tokencache.server.serve import serving
from tokencache.store.base import StoreError
from tokencache.store.memory import MemoryStore
from tokencache.testing import Fault, SimulatedEngine

ASK = [user("EPISODE:demo")]
ENGINES = "/tokencache/v1/engines"


@pytest.fixture(autouse=True)
def _briskly(monkeypatch):
    monkeypatch.setattr(membership, "POLL_SECONDS", 0.01)
    monkeypatch.setattr("tokencache.engine.health.CHECK_EVERY", 0.02)


@contextlib.asynccontextmanager
async def replica(store=None, *, upstream="", **settings):
    """A proxy that was started without an engine, unless one is named."""
    store = store or MemoryStore()
    async with (
        aiohttp.ClientSession() as http,
        serving(Settings(upstream=upstream, port=0, **{"hold": 0, **settings}), store) as (url, proxy),
    ):
        yield Rig(url, "", None, proxy, store, http)


@contextlib.asynccontextmanager
async def engines(count=1, **settings):
    """Engines of one kind, that go when the test does; yields them by URL."""
    async with contextlib.AsyncExitStack() as stack:
        made = [SimulatedEngine(episodes=EPISODES, seed=7, **settings) for _ in range(count)]
        yield {await stack.enter_async_context(one.serve()): one for one in made}


async def request(rig, method, path=ENGINES, *, status=200, key=None, **body):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    params = {name: body.pop(name) for name in ("url", "force") if method == "DELETE" and name in body}
    async with rig.http.request(method, rig.url + path, json=body or None, params=params, headers=headers) as answer:
        said = await answer.json()
        assert answer.status == status, said
        return said


async def listed(rig):
    return {engine["url"]: engine for engine in (await request(rig, "GET"))["engines"]}


async def serves(rig, *urls):
    """Wait until just these engines serve."""

    async def so():
        return {url for url, engine in (await listed(rig)).items() if engine["serves"]} == set(urls)

    await until(so)


async def play(rig, session, turns=2):
    messages = list(ASK)
    for _ in range(turns):
        message = await rig.say(session, messages, tools=TOOLS)
        messages += [echo(message), *results(message)]
    return messages


# ---- none yet

WAYS = {
    "/v1/chat/completions": {"model": "m", "messages": ASK},
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": ASK},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1beta/models/m:generateContent": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    "/tokenize": {"model": "m", "messages": ASK},
}


@pytest.mark.parametrize("session", ["s", None])
@pytest.mark.parametrize("path", WAYS)
async def test_without_an_engine_every_error_explains_how_to_add_one(path, session):
    async with replica() as rig:
        headers = {HEADER: session} if session else {}
        async with rig.http.post(rig.url + path, json=WAYS[path], headers=headers) as answer:
            said = await answer.json()
        assert answer.status == 503
        assert set(said) >= ({"type", "error"} if path == "/v1/messages" else {"error"})
        assert "POST /tokencache/v1/engines" in said["error"]["message"]
        outcomes = [one["outcome"] for one in (await rig.get("/tokencache/v1/sessions"))["sessions"]]
        assert outcomes == (["engine"] if session and path != "/tokenize" else [])
        found = await rig.readiness()
        assert found.pop("capacity")["engines"] == []
        assert found == {"ready": False, "engine": None, "engines": [], "weights": [], "store": "ok"}
        assert (await request(rig, "GET"))["engines"] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_waits_for_the_first_engine(stream):
    async with engines() as made, replica(hold=PATIENCE) as rig:
        before = calls_held("down")
        call = asyncio.create_task(rig.say("s", [*ASK, {"role": "system", "content": "be brief"}], stream=stream))
        await until(lambda: calls_held("down") > before)
        await request(rig, "POST", url=next(iter(made)), status=201)
        await call
        info = await rig.info()
        assert (info["valid"], [one["kind"] for one in info["incidents"]]) == (True, ["held"])


async def test_a_call_that_waited_has_the_sampling_parameters_that_its_engine_requires(monkeypatch):
    monkeypatch.setattr("tokencache.engine.drivers.vllm.Vllm.pinned", {"temperature": 1.0, "top_p": 1.0})
    async with engines() as made, replica(hold=PATIENCE) as rig:
        await request(rig, "POST", "/tokencache/v1/sessions", session="s", sampling={"top_p": 0.9}, status=201)
        before = calls_held("down")
        call = asyncio.create_task(rig.say("s", ASK, temperature=0.2))
        await until(lambda: calls_held("down") > before)
        ((url, engine),) = made.items()
        await request(rig, "POST", url=url, status=201)
        await call
        assert (engine.requests[-1]["temperature"], engine.requests[-1]["top_p"]) == (1.0, 0.9)
        (turn,) = await rig.turns()
        assert turn["replaced"] == {"temperature": 0.2, "top_p": None}


async def test_an_engine_is_added_and_serves():
    async with engines() as made, replica() as rig:
        (url,) = made
        said = await request(rig, "POST", url=url + "/v1", status=201)  # as NeMo RL's workers say their URL
        assert (said["url"], said["state"], said["calls"], said["drained"]) == (url, "serving", 0, False)
        assert (said["serves"], said["models"][0]["model"]) == (True, "sim"), "it was probed before the answer"
        await play(rig, "s", 3)
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue", "continue"]
        assert (await request(rig, "POST", url=url))["url"] == url  # again: nothing new
        assert len(await listed(rig)) == 1
        rig.engine = made[url]
        await rig.check()


async def test_one_that_differs_is_not_used_beside_the_first():
    async with engines() as made, engines(honours_ids=False) as others, replica() as rig:
        (url,), (lesser,) = made, others
        await request(rig, "POST", url=url, status=201)
        await serves(rig, url)
        said = await request(rig, "POST", url=lesser, status=201)
        assert (said["serves"], "it waits, because it differs" in said["error"]) == (False, True)
        for n in range(4):
            await play(rig, f"s{n}")
        assert not [entry for entry in others[lesser].ground_truth if entry.session]


# ---- draining and removing


async def test_a_drained_engine_finishes_its_calls_and_gets_no_new_ones():
    async with engines(2, token_delay=0.005) as made, replica() as rig:
        for url in made:
            await request(rig, "POST", url=url, status=201)
        await serves(rig, *made)
        running = asyncio.create_task(rig.say("s", ASK, tools=TOOLS))
        home = (await until(lambda: _busy(rig)))["url"]
        (other,) = made.keys() - {home}
        said = await request(rig, "POST", ENGINES + "/drain", url=home)
        assert (said["state"], said["calls"], said["drained"], said["serves"]) == ("draining", 1, False, False)
        assert "drained" in said["error"]
        refused = await request(rig, "DELETE", url=home, status=409)
        assert (refused["error"]["type"], "1 calls are under way" in refused["error"]["message"]) == ("engine_in_use", True)
        message = await running
        await rig.say("s", [*ASK, echo(message), *results(message)], tools=TOOLS)
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
        assert [len([entry for entry in made[url].ground_truth if entry.session == "s"]) for url in (home, other)] == [1, 1]
        assert (await rig.info())["complete"]
        await until(lambda: _drained(rig, home))
        assert await _gauges(rig, home) == {"up", "exact", "kv_tokens", "live_tokens"}
        assert (await request(rig, "DELETE", url=home))["removed"]
        assert set(await listed(rig)) == {other}
        assert not await _gauges(rig, home), "an alert says that it is down"


async def test_an_engine_is_drained_soon_though_the_system_clock_is_set_back(monkeypatch):
    async with engines(2) as made, replica() as rig:
        for url in made:
            await request(rig, "POST", url=url, status=201)
        await request(rig, "POST", ENGINES + "/drain", url=url)
        real = time.time
        monkeypatch.setattr("time.time", lambda: real() - 86400.0)
        await until(lambda: _drained(rig, url))


async def test_an_engine_that_is_down_has_no_level():
    """Another one may serve another model there: an alert would say for good that it is not exact for the first."""
    async with engines() as made, replica() as rig:
        (url,) = made
        await request(rig, "POST", url=url, status=201)
        assert f'tokencache_engine_exact{{engine="{url}",model="sim"}} 1.0' in metrics.exposition().decode()
        rig.proxy.pool.find(url).mark_down("gone")
        assert f'tokencache_engine_exact{{engine="{url}"' not in metrics.exposition().decode()


async def test_adapters_that_were_unloaded_are_forgotten(monkeypatch):
    """A trainer that loads each version of its weights under a new name would get a series in the metrics for each, for good."""
    monkeypatch.setattr(model, "_MOST_MODELS", 3)
    async with engines() as made, replica() as rig:
        ((url, engine),) = made.items()
        await request(rig, "POST", url=url, status=201)
        for version in range(9):
            engine.weights.adapters = {f"policy-{version}": f"/{version}"}
            assert (await rig.post(f"s{version}", model=f"policy-{version}", messages=ASK))[0] == 200
        monitor = rig.proxy.pool.find(url)
        assert len(monitor.engine.models) <= 4
        levels = re.findall(f'tokencache_engine_exact{{engine="{url}",model="(.*)"}}', metrics.exposition().decode())
        assert {"sim", "policy-8"} <= set(levels)
        assert len(levels) <= 4
        await play(rig, "s")


def test_one_of_several_workers_forgets_an_engine(tmp_path):
    program = """
import sys
from tokencache import metrics
for url in ("http://a", "http://b", "http://c"):
    metrics.ENGINE_LEVEL.labels(url, "m").set(0)
    metrics.ENGINE_UP.labels(url).set(0)
for url in ("http://c", sys.argv[1]):
    metrics.forget({"engine": url}, metrics.ENGINE_LEVEL, metrics.ENGINE_UP)
print(metrics.exposition().decode())
"""
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for own in ("http://a", "http://b"):  # the other worker still has it
        command = [sys.executable, "-c", program, own]
        text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    levels = re.findall(r'tokencache_engine_exact{engine="(.*)",model="m"} (.*)', text)
    assert sorted(levels) == [("http://a", "0.0"), ("http://b", "0.0"), ("http://c", "+Inf")]
    assert ("http://c", "NaN") in re.findall(r'tokencache_engine_up{engine="(.*)"} (.*)', text)


async def _gauges(rig, url):
    """Which gauges the metrics have of an engine."""
    async with rig.http.get(rig.url + "/metrics") as answer:
        return set(re.findall(rf'tokencache_engine_(\w+){{engine="{url}"', await answer.text())) - {"calls_total"}


async def test_a_drained_engine_may_be_added_again():
    async with engines() as made, replica() as rig:
        (url,) = made
        await request(rig, "POST", url=url, status=201)
        await serves(rig, url)
        await request(rig, "POST", ENGINES + "/drain", url=url)
        status, said = await rig.post("s", messages=ASK)
        assert (status, "every engine is being drained" in said["error"]["message"]) == (503, True)
        assert not (await rig.readiness())["ready"]
        assert (await request(rig, "POST", url=url))["state"] == "serving"
        await play(rig, "s")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_waits_while_all_engines_are_drained(stream):
    async with engines(2) as made, replica(hold=PATIENCE) as rig:
        old, new = made
        await request(rig, "POST", url=old, status=201)
        await serves(rig, old)
        message = await rig.say("s", ASK, tools=TOOLS)
        await request(rig, "POST", ENGINES + "/drain", url=old)
        before = calls_held("down")
        history = [*ASK, echo(message), *results(message)]
        calls = [
            asyncio.create_task(rig.say(name, messages, tools=TOOLS, stream=stream)) for name, messages in (("s", history), ("t", ASK))
        ]
        await until(lambda: calls_held("down") >= before + 2)
        await request(rig, "POST", url=new, status=201)
        await asyncio.gather(*calls)
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
        for name in ("s", "t"):
            info = await rig.info(name)
            assert (info["valid"], [one["kind"] for one in info["incidents"]]) == (True, ["held"])


async def test_an_engine_that_refuses_is_drained_while_a_call_waits():
    """Nothing was sampled, so nothing is missing."""
    async with engines() as made, replica(hold=1) as rig:
        ((url, engine),) = made.items()
        await request(rig, "POST", url=url, status=201)
        await serves(rig, url)
        before = calls_held("busy")
        engine.faults.extend([Fault.answer(503, "busy" * 100_000)] * 100)
        call = asyncio.create_task(rig.post(messages=ASK))
        await until(lambda: calls_held("busy") > before)
        await request(rig, "POST", ENGINES + "/drain", url=url)
        status, said = await call
        assert (status, "every engine is being drained" in str(said)) == (503, True)
        info = await rig.info()
        assert [(one["kind"], one["hole"]) for one in info["incidents"]] == [("upstream-down", False)]


async def test_a_call_on_an_engine_that_is_removed_runs_to_its_end():
    async with engines(2, token_delay=0.005) as made, replica() as rig:
        for url in made:
            await request(rig, "POST", url=url, status=201)
        await serves(rig, *made)
        running = asyncio.create_task(rig.say("s", ASK, tools=TOOLS, stream=True))
        home = (await until(lambda: _busy(rig)))["url"]
        gone = rig.proxy.pool.find(home).engine.upstream
        await request(rig, "DELETE", url=home, status=409)
        await request(rig, "DELETE", url=home, force="true")
        assert home not in await listed(rig)
        assert gone.under_way == 1
        await running
        assert (await rig.info())["complete"]

        async def closed():
            return gone._closed

        await until(closed)


async def _busy(rig):
    return next((engine for engine in (await listed(rig)).values() if engine["calls"]), None)


async def _drained(rig, url):
    return (await listed(rig))[url]["drained"]


async def test_an_engine_of_the_command_line_is_drained_but_not_removed():
    async with engines() as made:
        (url,) = made
        async with replica(upstream=url) as rig:
            await serves(rig, url)
            said = await request(rig, "DELETE", url=url, force="true", status=409)
            assert (said["error"]["type"], "--upstream" in said["error"]["message"]) == ("engine_configured", True)
            assert (await request(rig, "POST", ENGINES + "/drain", url=url))["state"] == "draining"


# ---- several replicas


async def test_replicas_learn_of_it_through_the_store():
    store = MemoryStore()
    async with engines(2, token_delay=0.005) as made, replica(store) as one, replica(store) as other:
        first, second = made
        await request(one, "POST", url=first, status=201)
        await serves(other, first)
        await request(other, "POST", url=second, status=201)
        await serves(one, first, second)
        homes = {}
        for n, rig in enumerate([one, other] * 4):
            messages = await play(rig, f"s{n}", 1)
            await (other if rig is one else one).say(f"s{n}", messages, tools=TOOLS)
            homes[n] = {url for url in made for entry in made[url].ground_truth if entry.session == f"s{n}"}
        assert all(len(home) == 1 for home in homes.values())  # both replicas agree where a session is

        # The ports decide which engine a session goes to: of 16 sessions of each replica, at least one goes to the first engine.
        running = [asyncio.create_task(rig.say(f"r{n}", ASK, tools=TOOLS)) for n, rig in enumerate([one, other] * 16)]
        await until(lambda: _calls_elsewhere(one, other, first))
        await request(other, "POST", ENGINES + "/drain", url=first)
        await serves(one, second)
        counted = (await listed(other))[first]
        assert (counted["state"], counted["drained"]) == ("draining", False)
        await asyncio.gather(*running)
        await until(lambda: _drained(one, first))
        await request(one, "DELETE", url=first)
        await until(lambda: _gone(other, first))


async def test_calls_of_another_replica_count():
    store = MemoryStore()
    async with engines(token_delay=0.005) as made, replica(store) as one, replica(store) as other:
        (url,) = made
        await request(one, "POST", url=url, status=201)
        await serves(other, url)
        running = asyncio.create_task(other.say("s", ASK, tools=TOOLS))
        await until(lambda: _busy(other))
        await request(one, "POST", ENGINES + "/drain", url=url)
        assert (await until(lambda: _busy(one)))["calls"] == 1
        await request(one, "DELETE", url=url, status=409)
        await running
        await until(lambda: _drained(one, url))
        await request(one, "DELETE", url=url)


async def test_what_the_store_lost_the_replicas_write_again():
    store = MemoryStore()
    async with engines() as made, replica(store) as one:
        (url,) = made
        await request(one, "POST", url=url, status=201)
        await serves(one, url)
        store._engines.clear()
        await until(lambda: _kept(store, url))
        assert set(await listed(one)) == {url}
        async with replica(store) as late:
            await serves(late, url)


async def _calls_elsewhere(one, other, url):
    return all([(await listed(rig))[url]["calls"] for rig in (one, other)])


async def _gone(rig, url):
    return url not in await listed(rig)


async def _kept(store, url):
    return url in {entry.url for entry in await store.engines()}


# ---- who may, and what is refused


async def test_the_admin_key_is_wanted():
    async with replica(admin_key="a" * 32) as rig:
        for method, path in (("GET", ENGINES), ("POST", ENGINES), ("POST", ENGINES + "/drain"), ("DELETE", ENGINES)):
            await request(rig, method, path, url="http://127.0.0.1:1", status=401)
            await request(rig, method, path, url="http://127.0.0.1:1", status=401, key="b" * 32)
        await request(rig, "POST", url="http://127.0.0.1:1", status=201, key="a" * 32)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"url": 5}', b'{"url": ""}', b'{"url": "worker:8000"}', b'{"url": "ftp://w:1"}', b'{"url": "http://w:99999"}'],
)
async def test_what_is_no_engine_is_refused(body):
    async with replica() as rig, rig.http.post(rig.url + ENGINES, data=body) as answer:
        assert (answer.status, "url" in (await answer.json())["error"]["message"]) == (400, True)
        assert (await request(rig, "GET"))["engines"] == []


@pytest.mark.parametrize("path", ["", "/v1"])
async def test_the_proxy_itself_is_refused(path):
    async with replica() as rig:
        said = await request(rig, "POST", status=400, url=rig.url + path)
        assert "the address of this proxy" in said["error"]["message"]
        assert not await listed(rig)


@pytest.mark.parametrize(("host", "url"), [("localhost:8000", "http://localhost:8000"), ("gateway", "http://gateway/vllm")])
async def test_an_engine_may_have_the_host_under_which_a_gateway_or_a_forwarded_port_leads_here(host, url):
    async with replica() as rig, rig.http.post(rig.url + ENGINES, json={"url": url}, headers={"Host": host}) as answer:
        assert answer.status == 201, await answer.json()


async def test_a_password_in_the_url_is_refused_and_not_repeated():
    async with replica() as rig:
        said = await request(rig, "POST", url="http://u:hunter2@w:8000", status=400)
        assert "--upstream-key" in said["error"]["message"]
        assert "hunter2" not in json.dumps(said)


@pytest.mark.parametrize(("method", "path"), [("POST", ENGINES + "/drain"), ("DELETE", ENGINES)])
async def test_an_engine_that_does_not_answer(method, path):
    async with replica() as rig:
        said = await request(rig, method, path, url="http://127.0.0.1:1", status=404)
        assert "GET /tokencache/v1/engines lists them" in said["error"]["message"]


async def test_a_store_that_does_not_answer_changes_nothing():
    class Down(MemoryStore):
        async def put_engine(self, entry):
            raise StoreError("down")

    async with replica(Down()) as rig:
        said = await request(rig, "POST", url="http://127.0.0.1:1", status=503)
        assert said["error"]["type"] == "store_error"
        assert (await request(rig, "GET"))["engines"] == []


async def test_requests_are_counted_until_their_last_byte():
    async with engines(token_delay=0.005) as made, replica(upstream=next(iter(made))) as rig:
        (url,) = made
        await serves(rig, url)
        async with rig.http.post(rig.url + CHAT, json={"model": "sim", "messages": ASK, "stream": True}) as answer:
            await answer.content.readline()
            assert (await listed(rig))[url]["calls"] == 1
            await answer.read()

        async def none():
            return (await listed(rig))[url]["calls"] == 0

        await until(none)


async def test_an_engine_that_is_paused_since_before_its_first_probe_does_not_delay_others(monkeypatch):
    """Requests wait in it, so its probe does; a trainer adds its engines before it has loaded weights into them."""
    monkeypatch.setattr(membership, "_FIRST_CHECK_SECONDS", 0.1)
    monkeypatch.setattr("tokencache.engine.health.TIMEOUT_SECONDS", 0.2)
    async with engines(2, dev_mode=True) as made, replica() as rig:
        paused, other = made
        async with rig.http.post(f"{paused}/pause?mode=keep") as answer:
            assert answer.status == 200
        await request(rig, "POST", url=paused, status=201)
        async with asyncio.timeout(PATIENCE / 2):
            await request(rig, "POST", url=other, status=201)
            await serves(rig, other)
        async with rig.http.post(f"{paused}/resume") as answer:
            assert answer.status == 200
        await serves(rig, paused, other)

"""The store fails: with `relay` the harness gets its reply and the trainer is told; with `fail` it gets a 503.

And the turn stands in the store before the reply's last byte leaves.
"""

import asyncio
import json

import pytest

from tests.proxy.kit import CHAT, HEADER, TOOLS, echo, events, proxied, results, user
from tests.support.material import require
from tests.support.redis_server import RealRedis, find_binary
from tests.support.waiting import PATIENCE, until
from tokencache import metrics
from tokencache.proxy import known_epochs
from tokencache.proxy.ledger import ONE_BY_ONE
from tokencache.store.base import StoreError
from tokencache.store.memory import MemoryStore
from tokencache.store.redis import RedisStore
from tokencache.testing import Fault

ASK = {"messages": [user("EPISODE:demo")], "tools": TOOLS}


BREAKABLE = {"begin", "find", "prefix", "commit", "settle", "add_incidents", "session", "turns", "tokens", "binding_of_key", "ping"}


class Flaky(MemoryStore):
    """A memory store of which chosen operations fail, or wait until `go` is set."""

    def __init__(self):
        super().__init__()
        self.broken, self.slow = set(), set()
        self.failed = []
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name not in {
            "begin",
            "find",
            "prefix",
            "commit",
            "settle",
            "add_incidents",
            "session",
            "turns",
            "tokens",
            "binding_of_key",
            "ping",
        }:
            return found

        async def operation(*args, **kwargs):
            if name in self.slow:
                self.reached.set()
                await self.go.wait()
            if name in self.broken:
                self.failed.append(name)
                raise StoreError(f"{name} is broken")
            return await found(*args, **kwargs)

        return operation


@pytest.fixture
def store():
    return Flaky()


async def raw(rig, session="s", **body):
    async with rig.http.post(rig.url + CHAT, json={"model": "sim", **body}, headers={HEADER: session}) as answer:
        return answer.status, await answer.text()


async def paid(rig):
    async def nothing_owed():
        return not rig.proxy.ledger.unsaved("s")

    await until(nothing_owed)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr("tokencache.proxy.ledger.RETRY_SECONDS", 0.005)


@pytest.mark.parametrize(
    "broken", [{"begin", "add_incidents"}, {"commit", "add_incidents"}, {"begin", "commit", "settle", "add_incidents", "find", "prefix"}]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_relay_the_client_gets_its_reply(store, broken, stream):
    async with proxied(store=store) as rig:
        first = await rig.say("s", **ASK)
        store.broken |= broken
        messages = [*ASK["messages"], echo(first), *results(first)]
        status, _ = await raw(rig, messages=messages, tools=TOOLS, stream=stream)
        assert status == 200
        for told in (await rig.info(), await rig.exported()):  # owed, and seen all the same
            assert not told["complete"]
            assert "store-error" in {i["kind"] for i in told["incidents"]}
        store.broken.clear()
        await paid(rig)
        exported = await rig.exported()
        assert not exported["complete"]
        lost = [i for i in exported["incidents"] if i["kind"] == "store-error"]
        assert len(lost) == 1
        assert lost[0]["hole"]
        assert lost[0]["call"]
        await rig.say("s", messages, tools=TOOLS)  # and goes on
        assert (await rig.turns())[-1]["match"] in {"continue", "branch"}


async def test_relay_a_session_that_could_not_begin(store):
    async with proxied(store=store) as rig:
        store.broken |= {"begin", "commit", "add_incidents"}
        await rig.say("s", **ASK)
        told = await rig.exported()
        assert (told["complete"], told["sequences"]) == (False, [])
        store.broken.clear()
        await paid(rig)
        assert not (await rig.info())["complete"]


@pytest.mark.parametrize("broken", ["find", "prefix", "tokens"])
async def test_relay_a_past_that_cannot_be_read(store, broken):
    """The turn is rendered plainly, recorded, and nothing is missing."""
    async with proxied(store=store, prefix_memory=0) as rig:
        first = await rig.say("s", **ASK)
        other = await rig.say("s", [user("EPISODE:talk")])
        rig.proxy.ledger.prefixes._prefixes.clear()
        store.broken.add(broken)
        edited = [{"role": "system", "content": "edited"}, *ASK["messages"], echo(first), *results(first)]
        for messages in ([*ASK["messages"], echo(first), *results(first)], edited, [user("?"), echo(other), user("!")]):
            await rig.say("s", messages, tools=TOOLS)
        turns = (await rig.turns())[2:]
        assert {t["match"] for t in turns if t["reason"] == "store-error"} <= {"plain"}
        store.broken.clear()
        exported = await rig.check()
        assert exported["complete"]


async def test_before_a_session_has_turns_the_store_is_read_once(store):
    """Replies from elsewhere are looked for further only where there is something to be found."""
    history = [entry for n in range(8) for entry in (user(f"question {n}"), {"role": "assistant", "content": f"Not ours: {n}."})]
    async with proxied(store=store) as rig:
        store.broken.add("find")
        await rig.say("s", [*history, user("three")])
        assert store.failed == []
        await rig.say("s", [*history, user("four")])
        assert store.failed == ["find"]
        seen = [(turn["match"], turn["reason"]) for turn in await rig.turns()]
        assert seen == [("plain", "unrecognised-reply"), ("plain", "store-error")]


@pytest.mark.parametrize("operation", ["begin", "commit"])
async def test_fail_the_client_gets_a_503(store, operation):
    async with proxied(store=store, on_store_error="fail") as rig:
        await rig.say("s", **ASK)
        store.broken.add(operation)
        status, said = await rig.post("s", **ASK)
        assert status == 503
        assert said["error"] == {"message": f"the store failed: {operation} is broken", "type": "store_error", "param": None, "code": 503}
        store.broken.clear()
        await rig.say("s", **ASK)


async def test_each_time_that_the_store_fails_is_noted_however_many_calls_were_refused_before(store):
    """The harness gave up after the last refusal, so the rollout failed, though it went on after the others."""
    async with proxied(store=store, on_store_error="fail") as rig:
        for calls in (ONE_BY_ONE, 1):
            await rig.say("s", **ASK)
            store.broken |= {"begin", "add_incidents"}
            for _ in range(calls):
                assert (await rig.post("s", **ASK))[0] == 503
            store.broken.clear()
            await paid(rig)
        assert (await rig.info())["outcome"] == "store"


@pytest.mark.parametrize("saving", ["broken", "slow"])
async def test_a_store_that_fails_again_before_the_first_incidents_are_saved_has_another(store, saving):
    """The harness went on after the first refusals, and gave up after the last one."""
    async with proxied(store=store, on_store_error="fail") as rig:
        getattr(store, saving).add("add_incidents")
        for calls in (ONE_BY_ONE + 1, 1):
            await rig.say("s", **ASK)
            store.broken.add("begin")
            for _ in range(calls):
                assert (await rig.post("s", **ASK))[0] == 503
            if saving == "slow":
                await store.reached.wait()
            store.broken.remove("begin")
        store.broken.clear()
        store.go.set()
        await paid(rig)
        info = await rig.info()
        assert info["outcome"] == "store"
        assert len(info["incidents"]) <= ONE_BY_ONE + 2


async def test_another_incident_that_waits_for_the_store_does_not_hide_that_it_fails(store):
    """The engine refused a call while the store failed already: that one was the harness's fault, and the next one was not."""
    async with proxied(store=store, on_store_error="fail") as rig:
        store.broken |= {"begin", "add_incidents"}
        for _ in range(ONE_BY_ONE):
            assert (await rig.post("s", **ASK))[0] == 503
        store.broken.clear()
        await paid(rig)
        await rig.say("s", **ASK)
        store.broken |= {"settle", "add_incidents"}
        assert (await rig.post("s", **ASK, temperature=-5))[0] == 503
        store.broken.add("begin")
        assert (await rig.post("s", **ASK))[0] == 503
        store.broken.clear()
        await paid(rig)
        assert (await rig.info())["outcome"] == "store"


async def test_fail_in_a_stream_that_has_begun(store):
    """The head is out: an error event tells, as the engine itself would; the end of the reply never comes."""
    async with proxied(store=store, on_store_error="fail") as rig:
        store.broken.add("commit")
        status, text = await raw(rig, stream=True, **ASK)
        assert status == 200
        *chunks, error, done = events(text)
        assert done == "[DONE]"
        assert json.loads(error)["error"]["type"] == "store_error"
        assert not any(choice["finish_reason"] for chunk in chunks for choice in json.loads(chunk)["choices"])
        store.broken.clear()
        await paid(rig)
        assert not (await rig.info())["complete"]


async def test_a_registered_key_that_cannot_be_looked_up_is_a_503(store):
    async with proxied(store=store) as rig:
        store.broken.add("binding_of_key")
        async with rig.http.post(rig.url + CHAT, json=ASK, headers={"Authorization": "Bearer tck-x"}) as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (503, "store_error")
        async with rig.http.get(rig.url + "/readyz") as answer:
            assert answer.status == 200
        store.broken.add("ping")
        async with rig.http.get(rig.url + "/readyz") as answer:
            assert (answer.status, (await answer.json())["store"]) == (503, "ping is broken")


async def test_a_registered_key_that_was_used_outlives_a_silent_store():
    """A client never fails because the store does: what its key selects is remembered. Of an unknown key nothing is known."""
    require("redis-server", find_binary())
    with RealRedis() as server:
        store = RedisStore(server.url, timeout_seconds=PATIENCE)
        async with proxied(store=store) as rig:
            keys = []
            for name in ("used", "unused"):
                async with rig.http.post(rig.url + "/tokencache/v1/keys", json={"session": name}) as answer:
                    keys.append((await answer.json())["key"])

            async def call(key):
                headers = {"Authorization": f"Bearer {key}"}
                async with rig.http.post(rig.url + CHAT, json={"model": "sim", **ASK}, headers=headers) as answer:
                    return answer.status

            assert await call(keys[0]) == 200
            store._client.timeout = 0.1
            server.pause()
            assert [await call(key) for key in (*keys, "tck-unknown")] == [200, 503, 503]
            server.resume()
            store._client.timeout = PATIENCE
            await until(lambda: store._client._probe is None or store._client._probe.done())
            assert [await call(key) for key in (*keys, "tck-unknown")] == [200, 200, 401]

            async def saved():
                return not rig.proxy.ledger.unsaved("used")

            await until(saved)
            info = await rig.info("used")
            assert not info["complete"]
            assert {incident["kind"] for incident in info["incidents"]} == {"store-error"}


async def test_a_key_that_was_revoked_is_not_remembered(store):
    async with proxied(store=store) as rig:
        async with rig.http.post(rig.url + "/tokencache/v1/keys", json={"session": "s"}) as answer:
            made = await answer.json()

        async def call():
            async with rig.http.post(rig.url + CHAT, json=ASK, headers={"Authorization": f"Bearer {made['key']}"}) as answer:
                return answer.status

        assert await call() == 200
        async with rig.http.delete(f"{rig.url}/tokencache/v1/keys/{made['id']}") as answer:
            assert answer.status == 200
        assert await call() == 401
        store.broken.add("binding_of_key")
        assert await call() == 503


class OddSecret(MemoryStore):
    """A store that answers something else than its secret if `odd` is set, and cannot write heartbeats if `broken` is."""

    odd = None
    broken = False

    async def secret(self, known=b""):
        return await super().secret(known) if self.odd is None else self.odd

    async def heartbeat(self, replica, seconds):
        if self.broken:
            raise TypeError("odd")
        await super().heartbeat(replica, seconds)


@pytest.mark.parametrize("odd", [b"", b"PONG", 31 * b"x", [], [b"x"], 7, "x" * 32, {}])
async def test_what_is_no_secret_is_never_adopted(odd, monkeypatch):
    monkeypatch.setattr("tokencache.server.app.HEARTBEAT_SECONDS", 0.001)
    store = OddSecret()
    async with proxied(store=store) as rig:
        first = await rig.say("s", **ASK)
        secret = rig.proxy._bodies.secret
        store.odd = odd
        ready = await rig.readiness()
        assert not ready["ready"]
        assert "the secret of the deployment that the store has is damaged" in ready["store"]
        assert "failing_tasks" not in ready  # it is the store that failed
        await rig.say("s", [*ASK["messages"], echo(first), *results(first)], tools=TOOLS)
        assert rig.proxy._bodies.secret == secret
        store.odd = None
        assert (await rig.readiness())["ready"]
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]


async def test_a_deployment_does_not_start_with_what_is_no_secret():
    store = OddSecret()
    store.odd = b"PONG"
    with pytest.raises(StoreError, match="the secret of the deployment"):
        async with proxied(store=store):
            pass


async def test_readyz_and_a_metric_name_a_background_task_that_fails(monkeypatch):
    monkeypatch.setattr("tokencache.proxy.dedup.in_flight.HEARTBEAT_SECONDS", 0.001)
    monkeypatch.setattr("tokencache.background.LONGEST_DELAY", 0.01)
    store = OddSecret()
    async with proxied(store=store) as rig:
        store.broken = True

        async def failing():
            return (await rig.readiness()).get("failing_tasks")

        await until(failing)
        assert await failing() == {"heartbeat": "TypeError"}
        async with rig.http.get(rig.url + "/metrics") as answer:
            assert 'tokencache_background_failures_total{task="heartbeat"}' in await answer.text()
        await rig.say("s", **ASK)
        store.broken = False

        async def healed():
            return not await failing()

        await until(healed)


async def test_tokenize_does_not_fail_with_the_store(store):
    async with proxied(store=store, prefix_memory=0) as rig:
        first = await rig.say("s", **ASK)
        messages = [*ASK["messages"], echo(first), *results(first)]
        rig.proxy.ledger.prefixes._prefixes.clear()
        for broken in ("find", "prefix"):
            store.broken = {broken}
            status, said = await rig.post("s", "/tokenize", messages=messages, tools=TOOLS)
            assert status == 200
            assert said["tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_turn_is_stored_before_the_last_byte_is_sent(store, stream):
    async with proxied(store=store) as rig:
        direct = await rig.post(None, stream=stream, **ASK)
        store.slow.add("commit")
        got, done = bytearray(), asyncio.Event()

        async def read():
            async with rig.http.post(rig.url + CHAT, json={"model": "sim", "stream": stream, **ASK}, headers={HEADER: "s"}) as answer:
                async for data in answer.content.iter_any():
                    got.extend(data)
            done.set()

        call = asyncio.create_task(read())
        await store.reached.wait()
        if stream:  # everything is there but the end

            async def all_but_the_end():
                return bytes(got).count(b"\n\n") >= len(direct[1]) - 1

            await until(all_but_the_end)
            assert b"list" in got or b"look" in got
        assert b'finish_reason":"' not in got
        assert b"[DONE]" not in got
        assert not done.is_set()
        assert (await rig.info())["turns"] == 0
        store.go.set()
        await asyncio.wait_for(call, PATIENCE)
        assert b'finish_reason":"' in got
        assert (await rig.info())["turns"] == 1
        await rig.check()


async def test_a_session_deleted_while_a_call_is_open(store):
    """The late turn does not bring it back, and the next session of this name begins anew."""
    async with proxied(store=store) as rig:
        first = await rig.say("s", **ASK)
        store.slow.add("commit")
        call = asyncio.create_task(rig.say("s", [*ASK["messages"], echo(first), *results(first)], tools=TOOLS))
        await store.reached.wait()
        async with rig.http.delete(rig.url + "/tokencache/v1/sessions/s") as answer:
            assert answer.status == 200
        store.go.set()
        await call
        async with rig.http.get(rig.url + "/tokencache/v1/sessions/s") as answer:
            assert answer.status == 404
        async with rig.http.delete(rig.url + "/tokencache/v1/sessions/s?reuse=true") as answer:
            assert answer.status == 200
        rig.engine.ground_truth.clear()
        await rig.say("s", **ASK)
        await rig.say("s", **ASK)
        exported = await rig.check()
        assert exported["complete"], exported["incidents"]
        assert [len(s["turns"]) for s in exported["sequences"]] == [1, 1]


@pytest.mark.product
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("reuse", [False, True])
async def test_a_session_created_again_while_a_call_of_the_deleted_one_is_open(store, reuse, elsewhere):
    """A trainer plays a rollout again under the same name: the call that is left of the first one says nothing about the second."""
    path = "/tokencache/v1/sessions"
    async with proxied(store=store) as rig, proxied(store=store) as replica:
        trainer = replica if elsewhere else rig
        store.slow.add("commit")
        call = asyncio.create_task(rig.say("s", **ASK))
        await store.reached.wait()
        async with trainer.http.delete(f"{trainer.url}{path}/s{'?reuse=true' if reuse else ''}") as answer:
            assert answer.status == 200
        async with trainer.http.post(trainer.url + path, json={"session": "s"}) as answer:
            assert answer.status == 201
        store.go.set()
        await call
        found = await rig.info()
        assert (found["turns"], found["complete"], found["incidents"]) == (0, True, [])
        rig.engine.ground_truth.clear()
        await rig.say("s", **ASK)
        assert (await rig.check())["valid"]


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_session_created_again_while_incidents_of_the_deleted_one_wait_for_the_store(store, elsewhere):
    async with proxied(store=store) as rig, proxied(store=store) as replica:
        trainer = replica if elsewhere else rig
        await rig.say("s", **ASK)
        store.broken |= {"settle", "commit", "add_incidents"}
        await rig.say("s", **ASK)
        assert (await rig.info())["incidents"]
        async with trainer.http.delete(f"{trainer.url}/tokencache/v1/sessions/s?reuse=true") as answer:
            assert answer.status == 200
        async with trainer.http.post(f"{trainer.url}/tokencache/v1/sessions", json={"session": "s"}) as answer:
            assert answer.status == 201
        store.broken.clear()
        await rig.proxy.ledger.settled()
        found = await rig.info()
        assert (found["turns"], found["complete"], found["incidents"]) == (0, True, [])


@pytest.mark.parametrize("anew", [False, True])
async def test_a_store_that_loses_a_session_in_the_middle_of_a_call(store, anew):
    """A Redis without a log comes back empty: nobody deleted the session, so it must not look whole, nor vanish without a word."""
    async with proxied(store=store) as rig:
        await rig.say("s", **ASK)
        store.slow.add("commit")
        call = asyncio.create_task(rig.say("s", [user("another")]))
        await store.reached.wait()
        store._sessions.pop("s")
        if anew:
            await store.add_incidents("s", [])
        store.go.set()
        await call
        exported = await rig.get("/tokencache/v1/sessions/s/trajectories")
        assert not exported["complete"]
        assert [(i["kind"], i["hole"]) for i in exported["incidents"]] == [("session-lost", True)]


EXAMPLES = [user("Say hi."), {"role": "assistant", "content": "hi"}]
BETWEEN = {
    "lost": True,
    "lost, and a side call comes first": True,
    "lost and begun anew": False,
    "lost and begun anew with examples": False,
    "lost, then deleted": False,
    "deleted elsewhere": False,
}


@pytest.mark.parametrize("what", BETWEEN)
async def test_a_store_that_loses_a_session_between_two_calls(store, what):
    """What was recorded before is missing, so the session must not look whole. A rollout that begins anew under the name misses nothing."""
    asked = ASK | ({"messages": [*EXAMPLES, *ASK["messages"]]} if "examples" in what else {})
    async with proxied(store=store) as rig, proxied(store=store) as replica:
        message = await rig.say("s", **asked)
        if what == "deleted elsewhere":
            assert await replica.proxy.ledger.delete("s", reuse=True)
        else:
            store._sessions.pop("s")
        if what == "lost, then deleted":
            await rig.proxy.ledger.delete("s", reuse=True)
        if "side call" in what:
            rig.engine.faults.append(Fault.answer(400, "{}"))
            assert (await rig.post("s", messages=[user("a title")]))[0] == 400
        history = [*ASK["messages"], echo(message), *results(message)]
        await rig.say("s", **asked | ({} if "anew" in what else {"messages": history}))
        found = await rig.info()
        lost = [one["hole"] and bool(one["call"]) for one in found["incidents"] if one["kind"] == "session-lost"]
        assert (lost, found["complete"]) == ([True] * BETWEEN[what], not BETWEEN[what])
        await rig.say("s", [user("another")])
        assert len([one for one in (await rig.info())["incidents"] if one["kind"] == "session-lost"]) == BETWEEN[what]


async def test_few_sessions_are_remembered(monkeypatch, store):
    """Those that are forgotten are served as before."""
    monkeypatch.setattr(known_epochs, "_MOST", 1)
    async with proxied(store=store) as rig, proxied(store=store) as replica:
        await replica.say("other", **ASK)
        message = await rig.say("s", **ASK)
        await rig.say("other", [user("another")])
        store._sessions.pop("s")
        await rig.say("s", [*ASK["messages"], echo(message), *results(message)])
        assert len(rig.proxy.ledger._epochs.last) == 1


async def test_turns_that_the_store_did_not_accept_are_counted(store):
    def counted():
        return metrics.REGISTRY.get_sample_value("tokencache_incidents_total", {"kind": "store-error"}) or 0.0

    before = counted()
    async with proxied(store=store) as rig:
        store.broken = {"commit"}
        await rig.say("s", [user("hello")])
        assert counted() == before + 1

"""Settings belong to a session: they hold however a call names it, on every replica, and definitions do not overwrite each other."""

import asyncio
import contextlib
import itertools

import pytest

from tests.proxy.kit import CHAT, HEADER, proxied, user
from tokencache.core import ids
from tokencache.proxy.sessions import hash_key
from tokencache.store.base import Binding
from tokencache.store.memory import MemoryStore
from tokencache.testing.engine import SimulatedEngine

API = "/tokencache/v1"
MESSAGES = "/v1/messages"
COLD = {"temperature": 0.25}
WAYS = ("header", "path", "tcs-key", "registered key")


@pytest.fixture
async def replicas():
    """Two replicas with one store and one engine; each counts how often it begins a call."""
    async with proxied() as first, proxied(store=first.store, upstream=first.up) as second:
        yield first, second


async def send(rig, method, path, body=None, headers=None):
    async with rig.http.request(method, rig.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def create(rig, session="s", **members):
    status, found = await send(rig, "POST", f"{API}/keys", {"session": session, **members})
    assert status == 201, found
    return found["key"]


async def say(rig, way="header", key="", *, session="s", path=CHAT, **members):
    """Make a call that names the session in one of the ways."""
    headers = {
        "header": {HEADER: session},
        "path": {},
        "tcs-key": {"Authorization": f"Bearer tcs-{session}"},
        "registered key": {"Authorization": f"Bearer {key}"},
    }[way]
    body = {"model": "sim", "messages": [user("EPISODE:talk")], "max_tokens": 50, "temperature": 1.0, **members}
    return await send(rig, "POST", f"/s/{session}{path}" if way == "path" else path, body, headers)


def temperatures(rig):
    """The temperatures that the engine was asked for, of conversations."""
    return [request.get("temperature") for request in rig.engine.requests if "EPISODE:talk" in str(request["messages"])]


def of_first(replicas):
    """The engine that both replicas use."""
    return temperatures(replicas[0])


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("way", WAYS)
async def test_they_hold_however_the_session_is_named(replicas, way, path):
    """They held only for calls with the registered key."""
    key = await create(replicas[0], sampling=COLD, models={"gpt-*": "sim"})
    for replica in (*replicas, *replicas):
        status, found = await say(replica, way, key, path=path, model="gpt-9")
        assert status == 200, found
    assert of_first(replicas) == [0.25] * 4
    (turn, *_) = await replicas[0].store.turns("s")
    assert (turn.replaced, turn.model) == ({"temperature": 1.0}, "sim")


@pytest.mark.parametrize("way", WAYS)
async def test_the_budget_and_the_tenant_hold_too(replicas, way):
    key = await create(replicas[0], tenant="acme", budget={"calls": 1})
    for replica in replicas:
        assert (await say(replica, way, key))[0] == 200
    assert len(of_first(replicas)) == 1  # the second call got a final reply from the proxy
    assert [incident.kind for incident in (await replicas[0].store.session("s")).incidents] == ["budget-spent"]
    status, found = await send(replicas[1], "POST", "/s/s/pause")
    assert (status, found["error"]["type"]) == (403, "permission_error")


THINKS = "<think>\nA greeting.\n</think>\n\nHello."


@pytest.mark.parametrize(("default", "chosen", "thinks"), [("supply", "", True), ("supply", "follow", False), ("follow", "supply", True)])
async def test_a_session_may_follow_the_template(default, chosen, thinks):
    """The template shows thinking only after the last question."""
    async with proxied(SimulatedEngine(episodes={"think": [THINKS, THINKS]}), history=default) as rig:
        await create(rig, **({"history": chosen} if chosen else {}))
        messages = [user("EPISODE:think")]
        _, found = await say(rig, messages=messages)
        messages += [found["choices"][0]["message"], user("And?")]
        await say(rig, messages=messages)
        first, second = await rig.store.turns("s")
        prompt = (await rig.store.prefix("s", second.id)).prompt
        assert ("A greeting." in rig.engine.tokenizer.decode(ids.unpack(prompt))) is thinks
        assert second.match == ("continue" if thinks else "resplice")
        assert [anchor.turn for anchor in second.anchors] == ([] if thinks else [first.id])
        assert (await send(rig, "GET", f"{API}/sessions/s/trajectories"))[1]["sequences"][-1]["start"] == ("root" if thinks else "resplice")


async def test_an_unknown_way_of_writing_the_history_is_refused(rig):
    status, found = await send(rig, "POST", f"{API}/keys", {"session": "s", "history": "forget"})
    assert status == 400
    assert "history" in found["error"]["message"]


async def test_the_harness_of_a_session_has_priority_over_the_one_that_a_call_names(rig):
    await create(rig, harness="hermes")
    await say(rig)
    assert [turn.harness for turn in await rig.store.turns("s")] == ["hermes"]


async def test_a_token_count_uses_them(replicas):
    """It begins no call, so the store does not compare the digests."""
    await create(replicas[0], models={"gpt-*": "sim"})
    for replica in replicas:
        status, found = await send(replica, "POST", "/s/s/v1/messages/count_tokens", {"model": "gpt-9", "messages": [user("hello")]})
        assert status == 200, found


@pytest.mark.parametrize("after", [{"temperature": 0.75}, {}], ids=["others", "none"])
async def test_a_session_that_is_created_again_has_its_new_settings(replicas, after):
    await create(replicas[0], sampling=COLD)
    for replica in replicas:
        await say(replica)
    await send(replicas[0], "DELETE", f"{API}/sessions/s")
    key = await create(replicas[1], sampling=after)
    for replica, way in itertools.product(replicas, WAYS):
        assert (await say(replica, way, key))[0] == 200
    assert of_first(replicas)[2:] == [after.get("temperature", 1.0)] * 8


async def test_a_key_that_an_older_version_stored_brings_its_settings(replicas):
    """They become those of the session, so they hold for its other names, too."""
    await replicas[0].store.bind_key(hash_key("tck-old"), Binding("s", sampling=COLD))
    for way in ("registered key", "header"):
        for replica in replicas:
            assert (await say(replica, way, "tck-old"))[0] == 200
    assert of_first(replicas) == [0.25] * 4


async def test_of_concurrent_definitions_one_wins(replicas):
    def define(n):
        return send(replicas[n % 2], "POST", f"{API}/sessions", {"session": "s", "sampling": {"temperature": n / 10}})

    answers = await asyncio.gather(*map(define, range(8)))
    assert sorted(status for status, _ in answers) == [201] + [409] * 7
    assert {found["error"]["type"] for status, found in answers if status == 409} == {"session_exists"}
    (won,) = [n for n, (status, _) in enumerate(answers) if status == 201]
    await say(replicas[0])
    assert of_first(replicas) == [won / 10]


@pytest.mark.parametrize("route", ["sessions", "keys"])
async def test_two_rollouts_do_not_become_one(rig, route):
    """The name of a session with turns was accepted, and the turns of both rollouts were in one session."""
    await say(rig)
    status, found = await send(rig, "POST", f"{API}/{route}", {"session": "s"})
    assert (status, found["error"]["type"]) == (409, "session_exists")
    assert "exist_ok" in found["error"]["message"]
    assert (await send(rig, "POST", f"{API}/{route}", {"session": "s", "exist_ok": True}))[0] in {200, 201}
    assert (await rig.store.session("s")).turns == 1


async def test_joining_with_other_settings_names_what_differs(rig):
    await create(rig, sampling=COLD, tenant="acme")
    same = {"session": "s", "sampling": COLD, "tenant": "acme", "exist_ok": True}
    assert (await send(rig, "POST", f"{API}/sessions", same))[0] == 200
    status, found = await send(rig, "POST", f"{API}/sessions", {**same, "tenant": "other", "models": {"a": "b"}})
    assert (status, found["error"]["type"]) == (409, "settings_conflict")
    assert "models, tenant" in found["error"]["message"]
    await say(rig)
    assert temperatures(rig) == [0.25]


class Counting(MemoryStore):
    """Counts how often a call begins, and how often settings are read."""

    def __init__(self):
        super().__init__()
        self.begun = self.read = 0

    async def begin(self, *args, **more):
        self.begun += 1
        return await super().begin(*args, **more)

    async def settings(self, session):
        self.read += 1
        return await super().settings(session)


async def test_what_they_cost():
    """A session without settings costs nothing further; one with settings costs one round trip in each process."""
    async with contextlib.AsyncExitStack() as stack:
        store = Counting()
        first = await stack.enter_async_context(proxied(store=store))
        second = await stack.enter_async_context(proxied(store=store, upstream=first.up))
        for replica in (first, second, first, second):
            await say(replica, session="plain")
        assert (store.begun, store.read) == (4, 0)
        await create(first, sampling=COLD)
        for replica in (first, second, first, second):
            await say(replica)
        assert (store.begun, store.read) == (4 + 4 + 2, 0)


async def test_a_stream_that_began_before_the_settings_were_known_fails_until_it_is_repeated():
    """Its head was sent while the store was slow, so it cannot be served again; the next call finds the settings."""
    async with proxied(keep_alive=0.01) as rig:
        await create(rig, sampling=COLD)
        begin, go = rig.store.begin, asyncio.Event()

        async def slow(*args, **more):
            await go.wait()
            return await begin(*args, **more)

        rig.store.begin = slow
        body = {"model": "sim", "messages": [user("EPISODE:talk")], "stream": True}
        for learned in (False, True):
            async with rig.http.post(rig.url + CHAT, json=body, headers={HEADER: "s"}) as answer:
                go.set()
                assert ("repeat it" in await answer.text()) == (not learned)
            info = await rig.info()
            assert (info["outcome"], [one["kind"] for one in info["incidents"]]) == ("ok" if learned else "engine", ["internal-error"])
            go.clear()

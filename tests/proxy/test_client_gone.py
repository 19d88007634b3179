"""The harness leaves: the engine is told at once, what was received is recorded, and the next call works.

How a call goes on for a while of which nothing was shown yet is in `test_retries`; here it does not.
"""

import asyncio
import json

import pytest

from tests.proxy.kit import CHAT, EPISODES, HEADER, TOOLS, echo, proxied, results, user
from tests.support.waiting import until
from tokencache.proxy import ledger
from tokencache.proxy.delivery import StreamDelivery
from tokencache.testing import SimulatedEngine

ASK = {"model": "sim", "messages": [user("EPISODE:talk")]}


async def settled(rig, session="s"):
    """Wait until no call of the session is open; returns the session."""

    async def closed():
        async with rig.http.get(f"{rig.url}/tokencache/v1/sessions/{session}") as answer:
            info = await answer.json()
            return info if answer.status == 200 and not info["open_calls"] else None

    return await until(closed)


async def leave_after(rig, events, session="s", body=None):
    """Read so many events of a stream, then leave; returns what was read."""
    got = b""
    async with rig.http.post(rig.url + CHAT, json={**ASK, "stream": True, **(body or {})}, headers={HEADER: session}) as answer:
        while got.count(b"\n\n") < events:
            more = await answer.content.readany()
            assert more, "the stream ended before that"
            got += more
        answer.close()
    return got


async def goes_on(rig, session="s"):
    asked = [user("EPISODE:demo")]
    message = await rig.say(session, asked, tools=TOOLS)
    await rig.say(session, [*asked, echo(message), *results(message)], tools=TOOLS)
    assert [turn["match"] for turn in await rig.turns(session)][-2:] == ["root", "continue"]


@pytest.mark.parametrize("events", [1, 2, 3, 8, 15])
async def test_in_the_middle_of_a_stream(events):
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.002)) as rig:
        await leave_after(rig, events)
        await rig.engine.until(lambda: rig.ground_truth("s") and rig.ground_truth("s")[0].aborted)
        info = await settled(rig)
        entry = rig.ground_truth("s")[0]
        assert entry.finish_reason == "abort"
        (turn,) = await rig.turns()
        assert (turn["marks"], turn["finish_reason"], turn["match"]) == (["aborted"], "abort", "root")
        (incident,) = info["incidents"]
        assert (incident["kind"], incident["hole"]) == ("client-gone", False)
        assert incident["at"] == turn["created"], "a call that begins before its leaving is noticed makes up for it"
        exported = await rig.check(aborted=1)
        (sequence,) = exported["sequences"]
        start, end = sequence["turns"][0]["completion"]
        assert sequence["token_ids"][start:end] == entry.completion_ids[: end - start]
        assert exported["complete"]
        rig.engine.token_delay = 0
        await goes_on(rig)
        await rig.check(aborted=1)


@pytest.mark.parametrize("stream", [False, True])
async def test_before_anything_came(stream):
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.05), linger=0) as rig:
        call = asyncio.create_task(rig.http.post(rig.url + CHAT, json={**ASK, "stream": stream}, headers={HEADER: "s"}))
        await rig.engine.until(lambda: bool(rig.ground_truth("s")))
        if not stream:
            call.cancel()
        else:
            (await call).close()
        await asyncio.gather(call, return_exceptions=True)
        await rig.engine.until(lambda: rig.ground_truth("s")[0].aborted)
        info = await settled(rig)
        assert "client-gone" in {i["kind"] for i in info["incidents"]}
        rig.engine.token_delay = 0
        await goes_on(rig)


async def test_while_the_call_is_planned():
    """The harness leaves before the engine was asked for anything: nothing is open, nothing is missing."""
    async with proxied() as rig:
        message = await rig.say("s", ASK["messages"])
        await rig.say("warm", [user("hi"), echo(message), user("go on")])
        asked, go = asyncio.Event(), asyncio.Event()
        model = await rig.proxy.engine.model("sim")
        render = model.renderer.render

        async def slow(*args, **kwargs):
            asked.set()
            await go.wait()
            return await render(*args, **kwargs)

        model.renderer.render = slow
        body = {**ASK, "messages": [*ASK["messages"], echo(message), user("go on")]}
        call = asyncio.create_task(rig.http.post(rig.url + CHAT, json=body, headers={HEADER: "s"}))
        await asked.wait()
        assert len((await rig.info())["open_calls"]) == 1
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        info = await settled(rig)
        assert (info["complete"], info["turns"]) == (True, 1)
        go.set()
        await goes_on(rig)
        assert len(rig.ground_truth("s")) == 3


async def test_while_the_call_is_opened():
    """The store has opened the call and not said so yet when the harness leaves: it is closed, and no engine is asked."""
    async with proxied() as rig:
        opened, go = asyncio.Event(), asyncio.Event()
        begin = rig.store.begin

        async def slow(*args, **kwargs):
            begun = await begin(*args, **kwargs)
            opened.set()
            await go.wait()
            return begun

        async def noticed():
            return bool(rig.proxy.ledger._tasks)

        rig.store.begin = slow
        call = asyncio.create_task(rig.http.post(rig.url + CHAT, json=ASK, headers={HEADER: "s"}))
        await opened.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(noticed)
        assert len((await rig.info())["open_calls"]) == 1
        go.set()
        info = await settled(rig)
        assert (info["complete"], info["turns"]) == (True, 0)
        assert not rig.ground_truth("s")
        await goes_on(rig)


async def test_a_client_whose_connection_was_found_broken_left_once(monkeypatch):
    """A write fails before the server notices that the connection is lost, which it does while the turn is stored."""
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.005)) as rig:
        read, events = StreamDelivery._read_events, 0

        def fails(*args):
            nonlocal events
            events += 1
            if events == 2:
                raise ConnectionResetError
            return read(*args)

        monkeypatch.setattr(StreamDelivery, "_read_events", fails)
        stored, go, commit = asyncio.Event(), asyncio.Event(), rig.store.commit

        async def slow(*args, **kwargs):
            stored.set()
            await go.wait()
            await commit(*args, **kwargs)

        async def noticed():
            return bool(rig.proxy.ledger._tasks)

        rig.store.commit = slow
        call = asyncio.create_task(leave_after(rig, 100))
        await stored.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(noticed)
        go.set()
        await rig.proxy.ledger.settled()
        info = await rig.info()
        assert ([one["kind"] for one in info["incidents"]], info["outcome"]) == (["client-gone"], "harness")


@pytest.mark.parametrize("long", [False, True], ids=["", "in the pause after a long prompt was stored"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("returns", [False, True])
async def test_while_the_turn_is_stored(stream, returns, long, monkeypatch):
    """The engine was done, the harness left before the end: one turn, once. If it never comes back, the rollout failed."""
    async with proxied() as rig:
        stored, go = asyncio.Event(), asyncio.Event()
        commit = rig.store.commit

        async def slow(*args, **kwargs):
            stored.set()
            await go.wait()
            await commit(*args, **kwargs)

        async def pause():
            stored.set()
            await go.wait()

        if long:
            monkeypatch.setattr(ledger, "LARGE", 0)
            monkeypatch.setattr(ledger, "pause", pause)
        else:
            rig.store.commit = slow

        async def read():
            async with rig.http.post(rig.url + CHAT, json={**ASK, "stream": stream}, headers={HEADER: "s"}) as answer:
                await answer.read()

        async def noticed():
            return bool(rig.proxy.ledger._tasks)

        call = asyncio.create_task(read())
        await stored.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(noticed)
        go.set()

        async def noted():
            info = await rig.info()
            return info if info["incidents"] else None

        info = await until(noted)
        (incident,) = info["incidents"]
        assert (info["turns"], info["open_calls"], info["outcome"]) == (1, [], "harness")
        assert (incident["kind"], incident["at"]) == ("client-gone", (await rig.turns())[0]["created"])
        exported = await rig.check()
        assert exported["complete"]
        if returns:
            async with rig.http.post(rig.url + CHAT, json={**ASK, "stream": stream}, headers={HEADER: "s"}) as answer:
                assert answer.status == 200
            assert len(rig.ground_truth("s")) == 1, "nobody had received that reply"
        else:
            await goes_on(rig)
        assert (await rig.info())["outcome"] == "ok"
        await rig.check()


@pytest.mark.parametrize("linger", [pytest.param(0, marks=pytest.mark.whole), 10])
async def test_many_leave_at_random_points(linger):
    """At any moment of a call: each session ends up closed, and each whole reply of the engine is a turn or a marked hole."""
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.001), linger=linger) as rig:

        async def one(n):
            call = asyncio.create_task(rig.post(f"s{n}", messages=[user("EPISODE:demo")], tools=TOOLS, stream=n % 2 == 0))
            for _ in range(n * 3):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

        await asyncio.gather(*map(one, range(60)))
        rig.engine.token_delay = 0
        for n in range(60):
            await rig.say(f"s{n}", [user("EPISODE:talk")])
            info = await settled(rig, f"s{n}")
            entries = rig.ground_truth(f"s{n}")
            whole = [entry for entry in entries if not entry.aborted]
            holes = [i for i in info["incidents"] if i["kind"] == "nothing-received"]  # the engine had sent it, nobody read it
            assert len(whole) <= info["turns"] + len(holes)
            assert info["turns"] <= len(entries)


async def test_a_relayed_call_is_aborted_too():
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.01)) as rig:
        before = len(rig.engine.ground_truth)
        async with rig.http.post(rig.url + CHAT, json={**ASK, "stream": True}) as answer:
            await answer.content.readany()
            answer.close()
        await rig.engine.until(lambda: rig.engine.ground_truth[before].aborted)


async def test_the_prefix_delivered_before_an_interrupt_is_not_a_known_reply(rig):
    """A harness sends back the half that it has: nothing is guessed, the session goes on plainly."""
    rig.engine.token_delay = 0.002
    got = await leave_after(rig, 12)
    await settled(rig)
    rig.engine.token_delay = 0
    chunks = [json.loads(e[6:]) for e in got.decode().split("\n\n") if e.startswith("data: {")]
    half = "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"])
    await rig.say("s", [*ASK["messages"], {"role": "assistant", "content": half or "One"}, user("go on")])
    assert (await rig.turns())[-1]["match"] == "plain"
    await rig.check(aborted=1)

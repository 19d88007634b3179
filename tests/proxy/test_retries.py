"""A call that is made twice is one call: joined while it is in flight, said again when it is recorded; the engine samples once."""

import asyncio
import contextlib
import json
import secrets
from collections import Counter

import pytest

from tests.proxy.kit import CHAT, EPISODES, HEADER, TOOLS, assembled, echo, events, proxied, results, user
from tests.support.material import require
from tests.support.redis_server import RealRedis, find_binary
from tests.support.waiting import PATIENCE, until
from tokencache.config import Settings
from tokencache.errors import EngineError
from tokencache.proxy.dedup import in_flight
from tokencache.proxy.dedup.fingerprint import fingerprint_of
from tokencache.proxy.dispatch import Dispatch
from tokencache.proxy.ledger import ONE_BY_ONE
from tokencache.server.serve import serving
from tokencache.store.base import StoreError
from tokencache.store.file import FileStore
from tokencache.store.memory import MemoryStore
from tokencache.store.redis import RedisStore
from tokencache.testing import Fault, SimulatedEngine

ASK = {"model": "sim", "messages": [user("EPISODE:talk")]}
RETRY, FIRST = {"x-stainless-retry-count": "1"}, {"x-stainless-retry-count": "0"}


@pytest.fixture(scope="module")
def redis_server():
    require("redis-server", find_binary())
    with RealRedis() as server:
        yield server


REDIS = pytest.param("redis", marks=pytest.mark.redis)


@pytest.fixture(params=["memory", REDIS])
async def store(request, tmp_path):
    if request.param == "memory":
        return MemoryStore()
    if request.param == "file":
        return FileStore(f"file:{tmp_path}/sessions.db")
    return RedisStore(request.getfixturevalue("redis_server").url, prefix=secrets.token_hex(8))


@contextlib.asynccontextmanager
async def another(rig):
    """A second proxy on the same store."""
    async with serving(Settings(upstream=rig.up, port=0, hold=0), rig.store) as (url, proxy):
        await proxy.engine.model()
        yield url


@contextlib.asynccontextmanager
async def another_impatient(rig):
    """A proxy on the same store that is silent for a moment only."""
    async with serving(Settings(upstream=rig.up, port=0, hold=0, keep_alive=0.02), rig.store) as (url, proxy):
        await proxy.engine.model()
        yield url


async def send(rig, body=ASK, *, url=None, session="s", path=CHAT, **headers):
    """Status and body of a call: JSON, or the chunks of a stream."""
    raw = json.dumps(body).encode()
    headers = {HEADER: session, "Content-Type": "application/json", **headers}
    async with rig.http.post((url or rig.url) + path, data=raw, headers=headers) as answer:
        text = await answer.text()
    if answer.content_type == "text/event-stream":
        return answer.status, [json.loads(line) for line in events(text) if line.startswith("{")]
    return answer.status, json.loads(text)


def said(answer):
    status, body = answer
    assert status == 200, body
    if isinstance(body, list):
        return assembled(body)
    message = body["choices"][0]["message"]
    return {
        "role": "assistant",
        **{name: message.get(name) or "" for name in ("content", "reasoning")},
        "tool_calls": message.get("tool_calls", []),
    }


async def retry_often(rig):
    """Make a call, and so many retries of it that not each later one has an incident."""
    said(await send(rig))
    for _ in range(ONE_BY_ONE):
        said(await send(rig, **RETRY))


def gate(rig, name="commit"):
    """Hold back the ends of calls: what is in flight stays so until the event is set."""
    go, real = asyncio.Event(), getattr(rig.store, name)

    async def held(*args, **kwargs):
        await go.wait()
        return await real(*args, **kwargs)

    setattr(rig.store, name, held)
    return go


def begins(rig):
    """The calls that the store has opened, or for which it has found one in flight."""
    found, real = [], rig.store.begin

    async def begin(session, call, *args, **more):
        result = await real(session, call, *args, **more)
        found.append(call)
        return result

    rig.store.begin = begin
    return found


async def open_calls(rig, session="s"):
    info = await rig.store.session(session)
    return info.open_calls if info is not None else ()


async def wanted(rig, session="s"):
    """Wait until another call waits for one that is open."""

    async def one():
        return any(call.wanted for call in await open_calls(rig, session))

    await until(one)


async def settled(rig, session="s"):
    async def closed():
        return await rig.store.session(session) is not None and not await open_calls(rig, session)

    await until(closed)


async def incidents(rig, session="s"):
    return Counter(one["kind"] for one in (await rig.info(session))["incidents"])


async def leave(rig, body=ASK, session="s", **headers):
    """Ask, and leave as soon as the engine generates."""
    before = len(rig.ground_truth(session))
    call = asyncio.create_task(send(rig, body, session=session, **headers))
    await rig.engine.until(lambda: len(rig.ground_truth(session)) > before and bool(rig.ground_truth(session)[before].completion_ids))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)

    async def left():
        return any(call.orphaned for call in await open_calls(rig, session)) or not await open_calls(rig, session)

    await until(left)


MORE = {"": {}, "tools": {"messages": [user("EPISODE:demo")], "tools": TOOLS}, "choices": {"n": 3}}


@pytest.mark.parametrize("streams", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("more", MORE)
async def test_a_call_like_one_in_flight_gets_its_reply(store, streams, more):
    async with proxied(store=store) as rig:
        go = gate(rig)
        first, second = ({**ASK, **MORE[more], "stream": stream} for stream in streams)
        raw = asyncio.create_task(send(rig, first, **{"Idempotency-Key": "k"}))
        await until(lambda: open_calls(rig))
        # The body is part of what is asked, so only calls of one form are alike.
        again = asyncio.create_task(send(rig, second, **{"Idempotency-Key": "k"}))
        if streams[0] is streams[1]:
            await wanted(rig)
        go.set()
        answers = await raw, await again
        if streams[0] is streams[1]:
            assert said(answers[0]) == said(answers[1])
            assert await incidents(rig) == {"retry-joined": 1}
            assert len(rig.ground_truth()) == (3 if more == "choices" else 1)
            if more == "choices" and not streams[0]:
                assert [c["message"]["content"] for c in answers[0][1]["choices"]] == [
                    c["message"]["content"] for c in answers[1][1]["choices"]
                ]
                assert answers[0][1]["id"] == answers[1][1]["id"]
        else:
            assert len({entry.request_id for entry in rig.ground_truth()}) == 2
        exported = await rig.check()
        assert exported["complete"]


async def test_a_retry_that_gets_the_reply_makes_up_for_one_that_was_refused_for_memory(rig):
    go, memory = gate(rig), rig.proxy.request_memory
    await leave(rig)
    most, memory.most = memory.most, 0
    assert (await send(rig))[0] == 503
    memory.most = most
    again = asyncio.create_task(send(rig))
    await wanted(rig)
    go.set()
    said(await again)
    await settled(rig)
    assert (await rig.info())["outcome"] == "ok"
    assert await incidents(rig) == {"request-not-read": 1, "retry-joined": 1}


async def test_continuing_a_reply_that_was_served_twice_continues_one_turn(rig):
    body = {**ASK, "messages": [user("EPISODE:demo")], "tools": TOOLS}
    go = gate(rig)
    both = [asyncio.create_task(send(rig, body)) for _ in range(2)]
    await wanted(rig)
    go.set()
    replies = [said(await one) for one in both]
    for reply in replies:
        await rig.say("s", [*body["messages"], echo(reply), *results(reply)], tools=TOOLS)
    assert Counter(turn["match"] for turn in await rig.turns()) == {"root": 1, "continue": 1, "branch": 1}
    await rig.check()


async def test_concurrent_duplicates_are_one_call_unless_their_sdk_marks_each_as_first(rig):
    go, begun = gate(rig), begins(rig)
    calls = [asyncio.create_task(send(rig)) for _ in range(8)]
    await until(lambda: len(begun) == 8)
    go.set()
    assert len({said(await call)["content"] for call in calls}) == 1
    assert len(rig.ground_truth()) == 1
    await asyncio.gather(*(send(rig, session="sdk", **FIRST) for _ in range(8)))
    assert len(rig.ground_truth("sdk")) == 8
    assert "retry-joined" not in await incidents(rig, "sdk")
    await rig.check()
    await rig.check("sdk")


@pytest.mark.parametrize("headers", [{}, FIRST, RETRY], ids=["bare", "first", "marked"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_harness_that_disconnected_retries(store, headers, stream):
    """It left before anything was shown: the engine goes on, and who asks again gets what it says."""
    derenders = SimulatedEngine(episodes=EPISODES, token_delay=0.005)
    async with proxied(derenders, store=store, whole_replies=True) as rig:
        body = {**ASK, "stream": stream}
        go = gate(rig)
        await leave(rig, body)
        assert [call.orphaned for call in await open_calls(rig)] == [True]
        again = asyncio.create_task(send(rig, body, **headers))
        await wanted(rig)
        go.set()
        text = said(await again)["content"]
        await settled(rig)
        (entry,) = rig.ground_truth()
        assert not entry.aborted
        (turn,) = await rig.turns()
        assert turn["marks"] == ["unanswered"]
        assert await incidents(rig) == {"retry-joined": 1}
        assert (await rig.check())["complete"]
        rig.engine.token_delay = 0
        assert said(await send(rig, body))["content"] is not None  # it was heard: this is another sample
        assert len(rig.ground_truth()) == 2
        assert text


async def test_an_undelivered_reply_is_sampled_once(store):
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.002), store=store) as rig:
        await leave(rig)
        await settled(rig)
        (turn,) = await rig.turns()
        assert (turn["marks"], turn["finish_reason"]) == (["unanswered"], "stop")
        first, second = await send(rig), await send(rig)
        assert said(first)["content"] == turn["served"]["content"]
        assert len(rig.ground_truth()) == 2
        assert said(second)["content"]
        assert [turn["marks"] for turn in await rig.turns()] == [["unanswered"], ["second-sample"]]
        assert await incidents(rig) == {"retry-replayed": 1}
        await rig.check()


@pytest.mark.parametrize("store", ["memory", "file", REDIS], indirect=True)
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("joins", [False, True], ids=["replayed", "joined"])
async def test_a_client_that_came_back_is_no_failure_however_often_it_did(store, choices, joins):
    """Its retry has an incident, though there are so many that not each has one."""
    async with proxied(SimulatedEngine(episodes=EPISODES), store=store) as rig:
        await retry_often(rig)
        rig.engine.token_delay = 0.005
        body, go = {**ASK, "n": choices}, asyncio.Event()
        if joins:
            go = gate(rig)
        await leave(rig, body)
        if not joins:
            await settled(rig)
            assert (await rig.info())["outcome"] == "harness"
        again = asyncio.create_task(send(rig, body))
        if joins:
            await wanted(rig)
        go.set()
        said(await again)
        await settled(rig)
        assert [turn["marks"] for turn in await rig.turns()] == [[], *[["unanswered"]] * choices]
        assert (await rig.info())["outcome"] == "ok"
        for _ in range(3):
            said(await send(rig, body, **RETRY))
        assert (await incidents(rig)).total() == ONE_BY_ONE + 1, "one that has the reply already is counted as before"


@pytest.mark.parametrize("store", ["memory", "file", REDIS], indirect=True)
@pytest.mark.parametrize("answered", [0, 1])
async def test_a_harness_that_left_its_call_and_its_retry_never_came_back(store, answered):
    """A request that cannot be replayed is sampled again. If an equal call had been answered, the retry may be one that came late."""
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.002), store=store) as rig:
        body = {**ASK, "logprobs": True}
        for _ in range(answered):
            assert (await send(rig, body))[0] == 200
        for _ in range(3):
            await leave(rig, body)
            await settled(rig)
        marks = (
            [["second-sample", "unanswered"]] * 3
            if answered
            else [["unanswered"], *[["second-sample", "unanswered", "never-answered"]] * 2]
        )
        assert [turn["marks"] for turn in await rig.turns()] == [[]] * answered + marks
        for found in (await rig.info(), await rig.exported()):
            assert found["complete"]
            assert found["outcome"] == ("ok" if answered else "harness")


@pytest.mark.parametrize("store", ["memory", "file", REDIS], indirect=True)
@pytest.mark.parametrize("during", ["delete_document", "note", "send_again"])
@pytest.mark.parametrize("joins", [False, True], ids=["replayed", "joined"])
async def test_a_retry_that_left_before_it_got_the_reply_leaves_it_to_the_next(store, joins, during):
    """It did not come back, so the rollout failed, unless another retry gets the reply."""
    async with proxied(SimulatedEngine(episodes=EPISODES), store=store) as rig:
        await retry_often(rig)
        rig.engine.token_delay = 0.005
        body, go = {**ASK, "n": 2}, gate(rig) if joins else asyncio.Event()
        await leave(rig, body)
        if not joins:
            await settled(rig)
        name = during if during != "note" else "add_incidents" if joins else "settle"
        owner = in_flight if during == "send_again" else rig.store
        held, reached, operation = asyncio.Event(), asyncio.Event(), getattr(owner, name)

        async def slow(*args, **more):
            answer = await operation(*args, **more)
            reached.set()
            await held.wait()
            return answer

        setattr(owner, name, slow)
        retry = asyncio.create_task(send(rig, body))
        if joins:
            await wanted(rig)
            go.set()
        await reached.wait()
        setattr(owner, name, operation)
        retry.cancel()
        await asyncio.gather(retry, return_exceptions=True)

        async def noticed():
            return any(task.cancelling() for task in asyncio.all_tasks()) or (not joins and rig.proxy.ledger._tasks)

        async def given_back():
            return (await incidents(rig))["client-gone"]

        if owner is rig.store:
            await until(noticed)
            held.set()
        await until(given_back)
        assert (await rig.info())["outcome"] == "harness"
        said(await send(rig, body, **RETRY))
        assert (await rig.info())["outcome"] == "ok"
        assert [turn["marks"] for turn in await rig.turns()] == [[], *[["unanswered"]] * 2]


async def test_a_harness_that_left_its_retry_and_came_back_once_more(rig):
    rig.engine.token_delay = 0.005
    await leave(rig)
    await settled(rig)
    held, opened, begin = asyncio.Event(), asyncio.Event(), rig.store.begin

    async def slow(*args, **more):
        begun = await begin(*args, **more)
        opened.set()
        await held.wait()
        return begun

    rig.store.begin = slow
    retry = asyncio.create_task(send(rig))
    await opened.wait()
    retry.cancel()
    await asyncio.gather(retry, return_exceptions=True)
    await until(lambda: bool(rig.proxy.ledger._tasks))
    rig.store.begin = begin
    held.set()
    await settled(rig)
    assert await incidents(rig) == {"client-gone": 1}
    said(await send(rig))
    info = await rig.info()
    assert (info["outcome"], info["turns"]) == ("ok", 1)


@pytest.mark.parametrize("name", ["begin", "delete_document", "documents"])
@pytest.mark.parametrize("headers", [{}, FIRST, RETRY], ids=["bare", "first", "marked"])
async def test_an_answered_call_that_arrives_once_more_is_no_failure(rig, headers, name):
    """Its client has left long ago: the network delivered it after its retry."""
    said(await send(rig))
    if name == "documents":
        rig.proxy._calls._policy = "marked"
    held, reached, operation = asyncio.Event(), asyncio.Event(), getattr(rig.store, name)

    async def slow(*args, **more):
        found = await operation(*args, **more)
        reached.set()
        await held.wait()
        return found

    setattr(rig.store, name, slow)
    second = asyncio.create_task(send(rig, **headers))
    await reached.wait()
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await until(lambda: bool(rig.proxy.ledger._tasks))
    held.set()
    await settled(rig)
    await rig.proxy.ledger.settled()
    assert (await incidents(rig), (await rig.info())["outcome"]) == ({}, "ok")
    assert len(rig.ground_truth()) == 1


@pytest.mark.parametrize("left", [True, False])
async def test_an_engine_that_refuses_an_answered_call_once_more_is_a_failure_if_a_client_waits(rig, left):
    said(await send(rig))
    rig.engine.faults.append(Fault.answer(500, "down"))
    send_to_engine, reached, go = rig.proxy.upstream.send, asyncio.Event(), asyncio.Event()

    async def slow(*args, **more):
        reached.set()
        await go.wait()
        return await send_to_engine(*args, **more)

    rig.proxy.upstream.send = slow
    second = asyncio.create_task(send(rig))
    await reached.wait()
    if left:
        second.cancel()
        await until(lambda: rig.proxy._calls._orphans)
    go.set()
    await asyncio.gather(second, return_exceptions=True)
    await settled(rig)
    assert (await incidents(rig), (await rig.info())["outcome"]) == (({}, "ok") if left else ({"engine-refused": 1}, "engine"))


@pytest.mark.parametrize(("answered", "refused", "outcome"), [(True, False, "ok"), (True, True, "harness"), (False, False, "harness")])
async def test_a_client_that_left_before_an_engine_took_its_second_sample(monkeypatch, answered, refused, outcome):
    """That is no failure unless an engine had refused the call, or the first one was not answered either."""
    async with proxied(hold=PATIENCE, repeats="marked") as rig:
        await (send(rig) if answered else leave(rig))
        await settled(rig)
        reached = asyncio.Event()

        async def plan(*_):
            first = not reached.is_set()
            reached.set()
            if first and refused:
                raise EngineError("it loads its weights", status=503)
            await asyncio.Event().wait()

        monkeypatch.setattr(Dispatch, "_plan", plan)
        second = asyncio.create_task(send(rig))
        await reached.wait()
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await settled(rig)
        assert (await rig.info())["outcome"] == outcome


@pytest.mark.parametrize("headers", [{}, RETRY], ids=["bare", "marked"])
async def test_a_store_that_fails_while_a_reply_is_claimed_makes_no_failure(rig, headers):
    """A marked retry gets the reply, and its incident; any other is sampled again."""
    await retry_often(rig)
    body = {**ASK, "n": 2}
    rig.engine.token_delay = 0.005
    await leave(rig, body)
    await settled(rig)

    async def fails(*_args):
        raise StoreError("slow")

    rig.store.delete_document = fails
    said(await send(rig, body, **headers))
    assert len(rig.ground_truth()) == (3 if headers else 5)
    assert (await rig.info())["outcome"] == "ok"


async def test_no_retry_arrives_in_time():
    async with proxied(linger=0.05) as rig:
        rig.engine.token_delay = 0.5
        await leave(rig)
        await rig.engine.until(lambda: rig.ground_truth()[0].aborted)
        await settled(rig)
        assert await incidents(rig) >= Counter({"client-gone": 1})
        rig.engine.token_delay = 0
        assert said(await send(rig, **RETRY))["content"]
        assert len(rig.ground_truth()) == 2


async def test_a_waiting_client_keeps_the_call_running():
    """The time is up, and the call goes on because another one waits."""
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.02), linger=0.4) as rig:
        first = asyncio.create_task(send(rig))
        await until(lambda: open_calls(rig))
        second = asyncio.create_task(send(rig))
        await wanted(rig)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert said(await second)["content"]
        (entry,) = rig.ground_truth()
        assert not entry.aborted


async def test_a_stream_of_which_something_was_shown_ends_at_once():
    async with proxied(SimulatedEngine(episodes=EPISODES, token_delay=0.05)) as rig:
        async with rig.http.post(rig.url + CHAT, json={**ASK, "stream": True}, headers={HEADER: "s"}) as answer:
            got = b""
            while got.count(b"\n\n") < 3:
                got += await answer.content.readany()
            answer.close()
        await rig.engine.until(lambda: rig.ground_truth()[0].aborted)
        await settled(rig)
        assert [turn["marks"] for turn in await rig.turns()] == [["aborted"]]
        rig.engine.token_delay = 0
        said(await send(rig, {**ASK, "stream": True}, **RETRY))  # nothing whole is there to be said again
        assert len(rig.ground_truth()) == 2


async def test_the_twin_is_elsewhere(store):
    async with proxied(store=store) as rig, another(rig) as url:
        go = gate(rig)
        first = asyncio.create_task(send(rig))
        await until(lambda: open_calls(rig))
        second = asyncio.create_task(send(rig, url=url))
        third = asyncio.create_task(send(rig, {**ASK, "stream": True}, url=url))
        await wanted(rig)
        go.set()
        assert said(await first) == said(await second)
        said(await third)
        assert len(rig.ground_truth()) == 2
        assert await incidents(rig) == {"retry-joined": 1}
        assert said(await send(rig, url=url, **RETRY)) == said(await first)
        assert len(rig.ground_truth()) == 2
        await rig.check()


async def test_the_twins_replica_is_gone(store, monkeypatch):
    """A proxy that was killed ends nothing: its call is closed with a hole, once, and those who waited are served."""
    monkeypatch.setattr(in_flight, "HEARTBEAT_SECONDS", 0.3)
    async with proxied(store=store) as rig:
        fingerprint = fingerprint_of("join", CHAT, {}, json.dumps(ASK).encode(), "").digest
        await rig.store.begin("s", "lost", [], fingerprint=fingerprint, replica="killed")
        async with asyncio.timeout(PATIENCE):
            answers = await asyncio.gather(*(send(rig) for _ in range(3)))
        assert len({said(answer)["content"] for answer in answers}) == 1
        assert len(rig.ground_truth()) == 1
        found = await incidents(rig)
        assert (found["replica-lost"], found["retry-joined"]) == (1, 2)
        info = await rig.info()
        assert (info["complete"], info["open_calls"]) == (False, [])
        assert next(i for i in info["incidents"] if i["kind"] == "replica-lost")["call"] == "lost"


@pytest.mark.parametrize("status", [400, 503])
async def test_the_twin_was_refused(rig, status):
    """It came to nothing: the call is made by itself."""
    rig.engine.faults.append(Fault.answer(status, b'{"error": {"message": "no", "code": %d}}' % status))
    go = gate(rig, "settle")
    first = asyncio.create_task(send(rig))
    await until(lambda: open_calls(rig))
    second = asyncio.create_task(send(rig))
    await wanted(rig)
    go.set()
    assert (await first)[0] == status
    assert said(await second)["content"]
    assert len(rig.ground_truth()) == 1


async def test_sealed_meanwhile(rig):
    go = gate(rig)
    first = asyncio.create_task(send(rig))
    await until(lambda: open_calls(rig))
    second = asyncio.create_task(send(rig))
    await wanted(rig)
    await rig.store.seal("s", force=True)
    go.set()
    assert said(await first) == said(await second)
    assert (await send(rig, **RETRY))[0] == 409
    await rig.check()


async def test_deleted_meanwhile(rig):
    go = gate(rig)
    first = asyncio.create_task(send(rig))
    await until(lambda: open_calls(rig))
    second = asyncio.create_task(send(rig))
    await wanted(rig)
    await rig.store.delete("s", reuse=True)
    go.set()
    assert said(await first)["content"]
    assert said(await second)["content"]
    assert len(await rig.turns()) == 1


async def test_a_second_sample_is_a_sibling(store):
    async with proxied(store=store) as rig:
        asked = [user("EPISODE:demo")]
        reply = await rig.say("s", asked, tools=TOOLS)
        body = {**ASK, "messages": [*asked, echo(reply), *results(reply)], "tools": TOOLS}
        for _ in range(2):
            said(await send(rig, body))
        turns = await rig.turns()
        assert [turn["match"] for turn in turns] == ["root", "continue", "branch"]
        assert [turn["marks"] for turn in turns] == [[], [], ["second-sample"]]
        assert turns[1]["parent"] == turns[2]["parent"] == turns[0]["turn"]
        assert len(rig.ground_truth()) == 3
        assert (await rig.check())["complete"]


async def test_idempotency_keys_tell_calls_apart(rig):
    for key in ("a", "b", "a"):
        said(await send(rig, **{"Idempotency-Key": key}))
    assert len(rig.ground_truth()) == 2
    assert await incidents(rig) == {"retry-replayed": 1}


async def test_a_storm_of_repetitions_does_not_grow_the_session(rig):
    first = said(await send(rig))
    for _ in range(3 * ONE_BY_ONE):
        assert said(await send(rig, **RETRY)) == first
    assert len(rig.ground_truth()) == 1
    assert (await incidents(rig))["retry-replayed"] == ONE_BY_ONE + 1  # the 32nd is the next that is told
    await rig.check()


@pytest.mark.parametrize("more", [{"logprobs": True}, {"return_token_ids": True}])
async def test_what_is_not_kept_is_sampled_again(rig, more):
    for headers in ({}, RETRY):
        status, body = await send(rig, {**ASK, **more}, **headers)
        assert status == 200
        assert body["choices"][0]["logprobs" if "logprobs" in more else "token_ids"]
    assert len(rig.ground_truth()) == 2
    assert [turn["marks"] for turn in await rig.turns()] == [[], ["second-sample"]]


@pytest.mark.parametrize(("repeats", "joined"), [("marked", 1), ("off", 0)])
async def test_fewer_calls_are_taken_for_repetitions(repeats, joined):
    async with proxied(repeats=repeats) as rig:
        go = gate(rig)
        calls = [asyncio.create_task(send(rig)) for _ in range(3)]
        await rig.engine.until(lambda: len(rig.ground_truth()) == 3)
        calls.append(asyncio.create_task(send(rig, **RETRY)))
        if joined:
            await wanted(rig)
        else:
            await rig.engine.until(lambda: len(rig.ground_truth()) == 4)
        go.set()
        for call in calls:
            said(await call)
        assert len(rig.ground_truth()) == 4 - joined
        await rig.check()


async def test_a_second_sample_that_was_refused_is_what_is_repeated(store):
    """Its repetition must not get the first sample's reply."""
    async with proxied(store=store) as rig:
        first = (await send(rig, **FIRST))[1]["id"]
        rig.engine.faults.append(Fault.answer(500, "{}"))
        assert (await send(rig, **FIRST))[0] == 500
        second = (await send(rig, **RETRY))[1]["id"]
        assert len(rig.ground_truth()) == 2
        assert (await send(rig, **RETRY))[1]["id"] == second != first
        assert len(rig.ground_truth()) == 2
        assert [turn["marks"] for turn in await rig.turns()] == [[], ["second-sample"]]
        await rig.check()


async def test_a_waiting_stream_hears_signs_of_life(rig):
    body = {**ASK, "stream": True}
    async with another_impatient(rig) as url:
        go = gate(rig)
        first = asyncio.create_task(send(rig, body))
        await until(lambda: open_calls(rig))
        async with rig.http.post(url + CHAT, data=json.dumps(body), headers={HEADER: "s", "Content-Type": "application/json"}) as answer:
            assert await answer.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            go.set()
            rest = await answer.text()
        assert said((200, [json.loads(line) for line in events(rest) if line.startswith("{")])) == said(await first)
        assert len(rig.ground_truth()) == 1


async def test_a_store_that_failed_at_the_end_delays_no_client():
    """The turn is lost and the call stands open, until the store is back: whoever waits elsewhere is served then."""
    async with proxied() as rig, another(rig) as url:
        go, commit = asyncio.Event(), rig.store.commit

        async def fails(*_args, **_kwargs):
            await go.wait()
            raise StoreError("full")

        rig.store.commit = fails
        first = asyncio.create_task(send(rig))
        await until(lambda: open_calls(rig))
        second = asyncio.create_task(send(rig, url=url))
        await wanted(rig)
        go.set()
        assert said(await first)["content"]
        rig.store.commit = commit
        async with asyncio.timeout(PATIENCE):
            assert said(await second)["content"]
        info = await rig.info()
        assert (info["turns"], info["complete"], info["open_calls"]) == (1, False, [])


@pytest.mark.parametrize(("policy", "status"), [("fail", 503), ("relay", 200)])
async def test_a_duplicate_of_a_call_that_was_opened_without_an_answer_is_served(policy, status):
    """The store opens the first call, but its answer is lost; a retry has found that call meanwhile."""
    async with proxied(on_store_error=policy) as rig:
        begun = begins(rig)
        go, begin = asyncio.Event(), rig.store.begin

        async def loses_its_answer(*args, **more):
            rig.store.begin = begin
            await begin(*args, **more)
            await go.wait()
            raise StoreError("slow")

        rig.store.begin = loses_its_answer
        first = asyncio.create_task(send(rig))
        await until(lambda: open_calls(rig))
        second = asyncio.create_task(send(rig, **RETRY))
        await until(lambda: len(begun) == 2)
        go.set()
        assert (await first)[0] == status
        async with asyncio.timeout(PATIENCE):
            assert said(await second)["content"]
        info = await rig.info()
        assert (info["turns"], info["open_calls"]) == (1, [])

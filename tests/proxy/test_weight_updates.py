"""Weights are replaced while agents run: engines refuse, abort, and are restarted, and no agent's episode ends by it."""

import asyncio
import json

import pytest

from tests.ports import free_port
from tests.proxy.kit import CHAT, EPISODES, HEADER, TOOLS, calls_held, echo, events, proxied, results, user
from tests.support.waiting import PATIENCE, until
from tokencache.proxy import dispatch
from tokencache.proxy.dedup import in_flight
from tokencache.testing import Fault, SimulatedEngine

ASK = {"messages": [user("EPISODE:demo")], "tools": TOOLS}
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
DIALECTS = {
    "chat": (CHAT, ASK | {"model": "sim"}, b": keep-alive"),
    "messages": ("/v1/messages", {"model": "sim", "max_tokens": 99, "messages": ASK["messages"]}, b"event: ping"),
    "responses": ("/v1/responses", {"model": "sim", "input": "EPISODE:demo"}, b": "),
    "gemini": ("/v1beta/models/sim:streamGenerateContent?alt=sse", {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}, b": "),
}


@pytest.fixture(autouse=True)
def _briskly(monkeypatch):
    monkeypatch.setattr(dispatch, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(dispatch, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr("tokencache.engine.health.CHECK_EVERY", 0.05)


@pytest.fixture
async def held():
    async with proxied(hold=PATIENCE) as rig:
        yield rig


@pytest.fixture
def port():
    return free_port()


async def begun(rig):
    """Two turns of a session, with which all that is to be proven of the template is proven; what is asked next."""
    messages = list(ASK["messages"])
    for _ in range(2):
        message = await rig.say("s", messages, tools=TOOLS)
        messages += [echo(message), *results(message)]
    return {"messages": messages, "tools": TOOLS}


async def matches(rig):
    return [turn["match"] for turn in await rig.turns()]


async def kinds(rig, session="s"):
    return [incident["kind"] for incident in (await rig.info(session))["incidents"]]


@STREAMS
@pytest.mark.parametrize("status", [503, 429])
async def test_a_refusal_that_may_pass_is_waited_out(held, status, stream):
    """It is asked again, the session goes on as if nothing had been, and the trainer is told."""
    more = await begun(held)
    held.engine.faults.extend([Fault.answer(status, "{}")] * 3)
    await held.say("s", **more, stream=stream)
    assert await matches(held) == ["root", "continue", "continue"]
    exported = await held.check()
    assert (exported["complete"], await kinds(held)) == (True, ["held"])
    assert str(status) in exported["incidents"][0]["detail"]


@STREAMS
async def test_an_update_that_takes_longer_than_a_call_may_wait_is_no_hole(stream):
    """Nothing was sampled for a call that no engine got. If its harness repeats it, the rollout is as good as any."""
    async with proxied(hold=0.05) as rig:
        more = await begun(rig)
        async with rig.http.post(f"{rig.url}/tokencache/v1/weights/update", json={"owner": "trainer", "mode": "none"}) as answer:
            assert answer.status < 300, await answer.text()
        status, _ = await rig.post("s", **more, stream=stream)
        assert status == 503
        assert await kinds(rig) == ["upstream-down"]
        assert ((await rig.info())["complete"], (await rig.info())["outcome"]) == (True, "engine")


@STREAMS
async def test_a_paused_engine_is_waited_for(held, stream):
    more = await begun(held)
    asked = len(held.engine.requests)
    held.engine.pause()
    call = asyncio.create_task(held.say("s", **more, stream=stream))
    await held.engine.until(lambda: len(held.engine.requests) > asked + 2)
    held.engine.resume()
    await call
    assert await matches(held) == ["root", "continue", "continue"]
    assert (await held.check())["complete"]


@STREAMS
async def test_an_engine_that_is_restarted_between_two_turns(port, stream):
    """Nothing of the session is in the engine: the new process continues what the old one began, on the exact ids."""
    old, new = SimulatedEngine(episodes=EPISODES, seed=7), SimulatedEngine(episodes=EPISODES, seed=8)
    async with proxied(upstream=f"http://127.0.0.1:{port}", hold=PATIENCE) as rig:
        async with old.serve(port=port):
            more = await begun(rig)
        before = calls_held("down")
        call = asyncio.create_task(rig.say("s", **more, stream=stream))
        await until(lambda: calls_held("down") > before)
        async with new.serve(port=port):
            await call
            assert await matches(rig) == ["root", "continue", "continue"]
            assert (await rig.info())["complete"]
            last = [entry for entry in old.ground_truth if entry.session == "s"][-1]
            first = next(entry for entry in new.ground_truth if entry.session == "s")
            seen = last.prompt_ids + last.completion_ids
            assert first.prompt_ids[: len(seen)] == seen


@STREAMS
async def test_the_limit(port, stream):
    """Then the harness hears what it would have heard at once; nothing was sampled, and nothing is missing."""
    async with proxied(upstream=f"http://127.0.0.1:{port}", hold=0.1) as rig:
        status, said = await rig.post("s", **ASK, stream=stream)
        assert (status, said["error"]["type"]) == (502, "upstream_error")
        assert (await kinds(rig), (await rig.info())["complete"]) == (["upstream-down"], True)


async def test_the_limit_of_a_refusal():
    refusal = '{"error":{"message":"paused","type":"ServiceUnavailableError","param":null,"code":503}}'
    async with proxied(hold=0.1) as rig:
        rig.engine.choose_fault = lambda route, body: Fault.answer(503, refusal) if route == CHAT else None
        status, said = await rig.post("s", **ASK)
        assert (status, said) == (503, json.loads(refusal))
        assert (await kinds(rig), (await rig.info())["complete"]) == (["engine-refused"], True)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("end", ["answered", "refused"])
async def test_a_stream_is_kept_alive_meanwhile(dialect, end):
    """Its head leaves before any engine took the call; what comes then, comes within the stream."""
    path, body, sign = DIALECTS[dialect]
    stream = {} if dialect == "gemini" else {"stream": True}
    async with proxied(hold=PATIENCE, keep_alive=0.01) as rig:
        rig.engine.pause()
        async with asyncio.timeout(PATIENCE), rig.http.post(rig.url + path, json=body | stream, headers={HEADER: "s"}) as answer:
            assert answer.status == 200
            before = b""
            while sign not in before:
                before += await answer.content.readany()
            if end == "refused":
                rig.engine.faults.append(Fault.answer(400, '{"error":{"message":"not so","type":"BadRequestError","code":400}}'))
            rig.engine.resume()
            rest = await answer.read()
        if end == "refused":
            assert b"not so" in rest
            assert await kinds(rig) == ["engine-refused"]
            return
        whole = before + rest
        assert b"not so" not in whole
        (turn,) = await rig.turns()
        assert (turn["dialect"], turn["match"], turn["finish_reason"] != "abort") == (dialect, "root", True)
        if dialect == "chat":
            said = [event for event in events(whole.decode()) if not event.startswith(":")]
            assert said[-1] == "[DONE]"
            assert [json.loads(event)["choices"][0]["delta"].get("role") for event in said[:2]] == ["assistant", None]


async def test_a_harness_that_leaves_while_its_call_waits(held):
    """Nothing was sent: nothing is missing, and nothing is open."""
    held.engine.pause()
    asked = len(held.engine.requests)
    call = asyncio.create_task(held.post("s", **ASK))
    await held.engine.until(lambda: len(held.engine.requests) > asked)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)

    async def closed():
        return not (await held.info())["open_calls"]

    await until(closed)
    held.engine.resume()
    await held.say("s", **ASK)
    exported = await held.check()
    assert (exported["complete"], [turn["match"] for turn in await held.turns()]) == (True, ["root"])


@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("times", [1, 3])
async def test_an_aborted_reply_is_sampled_afresh(held, after, times):
    """On the same exact prompt. What was cut is a turn that nobody continued; the harness sees one reply."""
    more = await begun(held)
    held.engine.faults.extend([Fault.abort(after)] * times)
    message = await held.say("s", **more)
    held.engine.faults.clear()
    await held.say("s", [*more["messages"], echo(message), *results(message)], tools=TOOLS)
    exported = await held.check()
    turns = await held.turns()
    cut = [turn for turn in turns if "engine-aborted" in turn["marks"]]
    assert len(cut) == (times if after else 0)  # of nothing there is no turn
    assert all((turn["finish_reason"], turn["completion_tokens"]) == ("abort", after) for turn in cut)
    assert {turn["parent"] for turn in cut} <= {turns[1]["turn"]}
    (line,) = [s for s in exported["sequences"] if not any("engine-aborted" in t["marks"] for t in s["turns"])]
    assert len(line["turns"]) == 4
    assert all(len(s["turns"]) == 1 and not s["continued"] for s in exported["sequences"] if s is not line)
    prompts = {tuple(entry.prompt_ids) for entry in held.ground_truth()[2 : 3 + times]}
    assert len(prompts) == 1
    assert (await kinds(held), exported["complete"]) == (["engine-aborted"] * times, True)


async def test_a_stream_that_was_aborted_before_its_first_token(held):
    """Of the first attempt not even the role was shown: the harness hears one reply, from one beginning."""
    more = await begun(held)
    held.engine.faults.append(Fault.abort(0))
    status, said = await held.post("s", **more, stream=True)
    assert status == 200
    assert [chunk["choices"][0]["delta"].get("role") for chunk in said].count("assistant") == 1
    assert len({chunk["id"] for chunk in said}) == 1
    assert said[-1]["choices"][0]["finish_reason"] == "stop"
    assert (await kinds(held), await matches(held)) == (["engine-aborted"], ["root", "continue", "continue"])
    await held.check()


@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name != "gemini"])
async def test_a_stream_that_was_shown_ends_as_the_engine_ended_it(held, dialect):
    """What was said cannot be taken back; the turn says so."""
    path, body, _ = DIALECTS[dialect]
    held.engine.faults.append(Fault.abort(9))
    async with held.http.post(held.url + path, json=body | {"stream": True}, headers={HEADER: "s"}) as answer:
        assert answer.status == 200
        await answer.read()
    (turn,) = await held.turns()
    assert (turn["finish_reason"], turn["marks"], turn["completion_tokens"]) == ("abort", ["engine-aborted"], 9)
    assert (await kinds(held), (await held.check())["complete"]) == (["engine-aborted"], True)


async def test_what_a_harness_was_shown_of_an_abort_is_continued(held):
    """It sends back what it heard, and that is the model's own: the end of turn that it lacks comes from the template."""
    held.engine.faults.append(Fault.abort(20))
    message = await held.say("s", [user("EPISODE:talk")], stream=True)
    await held.say("s", [user("EPISODE:talk"), echo(message), user("go on")])
    assert await matches(held) == ["root", "continue"]
    await held.check()


async def test_aborts_without_end_are_passed_on(held):
    """Weights that change faster than a reply is sampled: after some attempts it is as the engine says."""
    held.engine.faults.extend([Fault.abort(3)] * (dispatch.MAX_RESAMPLES + 1))
    status, said = await held.post("s", **ASK)
    assert (status, said["choices"][0]["finish_reason"]) == (200, "abort")
    turns = await held.turns()
    assert [turn["marks"] for turn in turns] == [["engine-aborted"]] * (dispatch.MAX_RESAMPLES + 1)
    await held.check()


async def test_without_holding_an_abort_is_passed_on(rig):
    rig.engine.faults.append(Fault.abort(3))
    _, said = await rig.post("s", **ASK)
    assert said["choices"][0]["finish_reason"] == "abort"
    assert [turn["marks"] for turn in await rig.turns()] == [["engine-aborted"]]


async def test_one_aborted_choice_does_not_discard_the_other(held):
    """Both are recorded, and both are the harness's to see."""
    made = held.engine._begin_chat

    def begin(body, headers):
        completion = made(body, headers)
        held.engine._halting = lambda fault: lambda tokens: completion.entries[0].finish_reason is not None and tokens >= 4
        return completion

    held.engine._begin_chat = begin
    _, said = await held.post("s", **ASK, n=2)
    assert [choice["finish_reason"] for choice in said["choices"]] == ["tool_calls", "abort"]
    assert [turn["marks"] for turn in await held.turns()] == [[], ["engine-aborted"]]
    await held.check()


async def test_a_session_sealed_while_its_call_waits_takes_no_second_attempt(held, monkeypatch):
    """The attempt that was under way may still be recorded; another one is a late call."""
    held.engine.faults.append(Fault.abort(5))
    sealed = asyncio.Event()
    waited = in_flight.pause_before_resample

    async def seal():
        await held.store.seal("s", force=True)
        sealed.set()
        await waited()

    monkeypatch.setattr(in_flight, "pause_before_resample", seal)
    status, _ = await held.post("s", **ASK)
    assert (status, sealed.is_set()) == (409, True)
    assert [turn["marks"] for turn in await held.turns()] == [["engine-aborted"]]


async def test_an_engine_that_is_paused_when_it_is_probed_is_not_taken_for_less(port):
    """A refusal says nothing about what an engine can do: the call waits, and so does the verdict."""
    engine = SimulatedEngine(episodes=EPISODES, seed=7)
    engine.pause()
    async with proxied(upstream=f"http://127.0.0.1:{port}", hold=PATIENCE) as rig, engine.serve(port=port):
        call = asyncio.create_task(rig.say("s", **ASK))
        await engine.until(lambda: len(engine.requests) > 2)
        engine.resume()
        message = await call
        await rig.say("s", [*ASK["messages"], echo(message), *results(message)], tools=TOOLS)
        assert await matches(rig) == ["root", "continue"]
        assert (await rig.get("/readyz"))["engine"]["models"][0]["level"] == "exact"


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_replies_taken_whole_are_never_shown_half(dialect):
    """With `whole_replies` a harness that streams sees no abort at all, however far the reply had come."""
    path, body, _ = DIALECTS[dialect]
    stream = {} if dialect == "gemini" else {"stream": True}
    async with proxied(hold=PATIENCE, whole_replies=True) as rig:
        rig.engine.faults.append(Fault.abort(9))
        async with rig.http.post(rig.url + path, json=body | stream, headers={HEADER: "s"}) as answer:
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            said = await answer.text()
        cut, whole = await rig.turns()
        assert (cut["finish_reason"], cut["marks"], whole["finish_reason"] != "abort") == ("abort", ["engine-aborted"], True)
        assert '"finish_reason":"abort"' not in said
        assert not any(body.get("stream") for body in rig.engine.requests)
        await rig.check()

"""The engine fails: the harness sees what a direct client sees, the session says what happened, and goes on."""

import asyncio
import json
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from tests.engine.intermediary import Intermediary
from tests.proxy.kit import CHAT, EPISODES, HEADER, TOOLS, echo, events, proxied, results, user
from tests.support.waiting import until
from tokencache.testing import Fault, SimulatedEngine

ASK = {"messages": [user("EPISODE:demo")], "tools": TOOLS}
BROKEN = (aiohttp.ClientError, ConnectionError)


async def seen(rig, url, session=None, **body):
    """What a client gets: status, type, bytes up to where they end, and whether they end as they should."""
    headers = {HEADER: session} if session else {}
    rig.engine._calls = iter(range(1000, 2000))
    try:
        async with rig.http.post(url + CHAT, json={"model": "sim", **ASK, **body}, headers=headers) as answer:
            got = b""
            try:
                async for data in answer.content.iter_any():
                    got += data
            except BROKEN:
                return answer.status, answer.content_type, got, "broken"
            return answer.status, answer.content_type, got, "whole"
    except BROKEN:
        return None, None, b"", "broken"


def masked(what):
    status, kind, got, end = what
    return status, kind, [sorted(json.loads(e)) if e.startswith("{") else e for e in events(got.decode())], end


async def goes_on(rig, session="s"):
    """The session still works: two more turns, the second a continuation of the first."""
    message = await rig.say(session, **ASK)
    await rig.say(session, [*ASK["messages"], echo(message), *results(message)], tools=TOOLS)
    assert [turn["match"] for turn in await rig.turns(session)][-2:] == ["root", "continue"]
    assert not (await rig.info(session))["open_calls"]


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_passed_on_as_it_is(rig, status, stream):
    fault = Fault.answer(status, f'{{"error":  {{"message":"no ü","type":"X","param":null,"code":{status}}}}}')
    rig.engine.faults.extend([fault, fault])
    assert await seen(rig, rig.url, "s", stream=stream) == await seen(rig, rig.up, stream=stream)
    info = await rig.info()
    assert [(i["kind"], i["hole"]) for i in info["incidents"]] == [("engine-refused", False)]
    assert str(status) in info["incidents"][0]["detail"]
    assert info["complete"]
    await goes_on(rig)
    await rig.check()


class _BreakingGateway(Intermediary):
    """Refuses the calls of a session with `status` once that is set, and breaks off the body."""

    status = 0

    async def _pass(self, request):
        if not self.status or "X-Session-ID" not in request.headers:
            return await super()._pass(request)
        response = web.StreamResponse(status=self.status, headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"error": ')
        request.transport.close()
        return response


@pytest.mark.parametrize(("status", "spliced"), [(400, False), (400, True), (500, False)])
async def test_a_refusal_whose_body_breaks_off_is_one(status, spliced):
    """Nothing was sampled, so nothing is missing."""
    engine = SimulatedEngine(episodes=EPISODES)
    async with engine.serve() as up:
        gateway = _BreakingGateway(up)
        async with gateway.serve() as front, proxied(engine, upstream=front) as rig:
            message = await rig.say("s", **ASK)
            gateway.status = status
            messages = [*ASK["messages"], echo(message), *results(message)] if spliced else [user("Something else.")]
            assert (await seen(rig, rig.url, "s", messages=messages))[0] == status
            info = await rig.info()
            assert [(one["kind"], one["hole"], one["status"]) for one in info["incidents"]] == [("engine-refused", False, status)]


@pytest.mark.parametrize("body", [b"<html>oops", b"", b"[]", b'{"choices": 5}', b'{"error": {"message": "x"}}', b"\xff\xfe"])
@pytest.mark.parametrize("kind", ["application/json", "text/html"])
async def test_an_answer_that_is_no_chat_completion(rig, body, kind):
    rig.engine.faults.extend([Fault.answer(200, body, content_type=kind)] * 2)
    through, direct = await seen(rig, rig.url, "s"), await seen(rig, rig.up)
    if body.startswith(b"{"):
        assert through == direct
    else:
        assert through[:2] == (502, "application/json")
        assert json.loads(through[2])["error"]["message"] == "the engine's reply cannot be read"
    info = await rig.info()
    assert not info["complete"]  # the engine may have said something
    assert info["turns"] == 0
    await goes_on(rig)


async def test_truncated_json(rig):
    rig.engine.faults.append(Fault.truncated_json())
    status, _, text, _ = await seen(rig, rig.url, "s")
    assert (status, json.loads(text)["error"]["type"]) == (502, "upstream_error")
    info = await rig.info()
    assert (info["complete"], info["turns"]) == (False, 0)
    assert "unreadable-reply" in {i["kind"] for i in info["incidents"]}
    await goes_on(rig)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
async def test_a_page_of_html_becomes_an_error_of_the_dialect(rig, path):
    rig.engine.faults.append(Fault.answer(502, "<html><h1>Bad gateway</h1>http://10.0.0.3:8000</html>", content_type="text/html"))
    body = {"model": "sim", "max_tokens": 64, **({"input": "hello"} if path == "/v1/responses" else {"messages": [user("hello")]})}
    async with rig.http.post(rig.url + path, json=body, headers={HEADER: "s"}) as answer:
        assert (answer.status, answer.content_type) == (502, "application/json")
        assert (await answer.json())["error"]["message"] == "the engine, or a server before it, answered 502 without a message"


@pytest.mark.parametrize("fault", [Fault.cut, Fault.close])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/completions"])
async def test_a_stream_that_is_cut_ends_with_an_error(rig, path, fault):
    at = path if path == "/v1/completions" else CHAT
    rig.engine.faults.append(replace(fault(5), path=at))
    asked = {
        "/v1/responses": {"input": "EPISODE:demo"},
        "/v1/completions": {"prompt": "Once upon", "max_tokens": 64},
    }.get(path, {"max_tokens": 64, "messages": [user("EPISODE:demo")]})
    async with rig.http.post(rig.url + path, json={"model": "sim", "stream": True, **asked}, headers={HEADER: "s"}) as answer:
        last = [event for event in events((await answer.text()).strip()) if event != "[DONE]"][-1]
    assert "the engine's stream ended before the reply did" in last
    assert not (await rig.info())["complete"]


async def test_half_a_body_in_another_dialect(rig):
    """It cannot be said in that dialect's words, and must not be passed on in the engine's: an error is, in its own."""
    rig.engine.faults.append(Fault.truncated_json())
    body = {"model": "sim", "max_tokens": 64, "messages": [user("hello")]}
    async with rig.http.post(rig.url + "/v1/messages", json=body, headers={HEADER: "s"}) as answer:
        said = await answer.json()
    assert (answer.status, said["type"], said["error"]["type"]) == (502, "error", "api_error")
    assert "token" not in json.dumps(said)
    info = await rig.info()
    assert (info["complete"], [i["kind"] for i in info["incidents"]]) == (False, ["unreadable-reply", "no-token-ids"])


@pytest.mark.parametrize("after", [0, 1, 2, 5, 20])
@pytest.mark.parametrize("fault", [Fault.cut, Fault.close, Fault.error_event])
async def test_a_stream_that_ends_early(rig, fault, after):
    rig.engine.faults.extend([fault(after), fault(after)])
    direct, through = await seen(rig, rig.up, stream=True), await seen(rig, rig.url, "s", stream=True)
    if fault == Fault.close and not after:
        assert direct[3] == "broken"
        assert through[0] == 502  # nothing was answered yet: a proxy can still say so
        await goes_on(rig)
        return
    # With ids asked for there are chunks that a direct client does not get; what is left is a beginning of the same.
    assert through[:2] == direct[:2]
    assert through[3] == "whole"
    shown, wanted = masked(through)[2], masked(direct)[2]
    if fault != Fault.error_event:
        assert [*shown[-2:]] == [["error"], "[DONE]"]
        shown = shown[:-2]
    assert shown == wanted[: len(shown)] or fault == Fault.error_event
    info = await rig.info()
    assert not info["complete"]
    kinds = {i["kind"] for i in info["incidents"]}
    assert kinds & {"upstream-broke", "engine-error"}
    entry = rig.ground_truth("s")[0]
    turns = await rig.turns()
    assert len(turns) == (1 if after else 0)
    for turn in turns:
        assert turn["marks"]
        assert turn["completion_tokens"] <= len(entry.completion_ids)
    if fault == Fault.error_event:
        assert b'"Internal server error"' in through[2]
        assert through[2].endswith(b"data: [DONE]\n\n")
    await goes_on(rig)


async def test_the_connection_breaks_after_the_finish(rig):
    """What came before the break reaches the harness, the finish reason too."""
    whole = await seen(rig, rig.up, stream=True)
    chunks = len(events(whole[2].decode())) - 1

    class Late:
        def __call__(self, route, body):
            return Fault.close(self.after) if route == CHAT and body.get("stream") and body.get("return_token_ids") else None

    late = Late()
    rig.engine.choose_fault = late
    async with rig.http.post(
        rig.up + CHAT, json={"model": "sim", **ASK, "stream": True, "stream_options": {"include_usage": True}}
    ) as answer:
        await answer.read()
    assert chunks
    sent = len(rig.engine.ground_truth[-1].completion_ids) + 1  # role chunk and one per token: the finish chunk is the last of them
    late.after = sent
    rig.engine._calls = iter(range(1000, 2000))
    got, end = b"", "whole"
    body = {"model": "sim", **ASK, "stream": True, "stream_options": {"include_usage": True}}
    async with rig.http.post(rig.url + CHAT, json=body, headers={HEADER: "s"}) as answer:
        try:
            async for data in answer.content.iter_any():
                got += data
        except BROKEN:
            end = "broken"
    said = [json.loads(event) for event in events(got.decode()) if event != "[DONE]"]
    finished = rig.ground_truth("s")[0].finish_reason not in (None, "abort")
    assert end == ("broken" if finished else "whole")
    assert said[-1]["choices"][0]["finish_reason"] is not None if finished else "error" in said[-1]
    assert not (await rig.info())["complete"]


@pytest.mark.parametrize("linger", [0, 0.05])
async def test_an_engine_that_hangs_until_the_client_gives_up(linger):
    async with proxied(linger=linger) as rig:
        rig.engine.faults.append(Fault.hang())
        probed = len(rig.engine.requests)
        call = asyncio.create_task(rig.post("s", **ASK))
        await rig.engine.until(lambda: len(rig.engine.requests) > probed)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until_closed(rig)
        assert {i["kind"] for i in (await rig.info())["incidents"]} >= {"client-gone"}
        await goes_on(rig)


async def until_closed(rig, session="s"):
    async def closed():
        return not (await rig.info(session))["open_calls"]

    await until(closed)


COMPLETIONS, DERENDER = "/v1/completions", CHAT + "/derender"
SPOKEN = [("user", "EPISODE:talk"), ("assistant", "One, two, three, four, five, six, seven — naïve."), ("user", "go on")]
WRITTEN = [{"role": role, "content": text} for role, text in SPOKEN]
CONTENTS = [{"role": role.replace("assistant", "model"), "parts": [{"text": text}]} for role, text in SPOKEN]
TALKS = {  # path, the member with the messages, all messages, other members, and some of the error that a client of this dialect gets
    "chat": (CHAT, "messages", WRITTEN, {}, {"type": "upstream_error", "code": 502}),
    "chat stream": (CHAT, "messages", WRITTEN, {"stream": True}, {"type": "upstream_error", "code": 502}),
    "messages": ("/v1/messages", "messages", WRITTEN, {"model": "sim", "max_tokens": 99}, {"type": "api_error"}),
    "responses": ("/v1/responses", "input", WRITTEN, {"model": "sim"}, {"type": "upstream_error"}),
    "gemini": ("/v1beta/models/sim:generateContent", "contents", CONTENTS, {}, {"code": 502, "status": "UNAVAILABLE"}),
}


@pytest.mark.parametrize("dialect", TALKS)
async def test_an_aborted_reply_without_its_text_is_an_error(dialect):
    """Where the call cannot be made again: the client gets no reply without text, and the engine is probed again."""
    path, member, messages, more, error = TALKS[dialect]
    engine = SimulatedEngine(episodes=EPISODES, seed=7, honours_ids=False, derenders=True)
    async with proxied(engine, engine_kind="completions", aborted="pass") as rig:
        await rig.post("s", path, **{member: messages[:1]}, **more)
        rig.engine.faults += [replace(Fault.abort(4), path=COMPLETIONS), Fault.answer(500, "no parser today", path=DERENDER)]
        status, said = await rig.post("s", path, **{member: messages}, **more)
        assert status == 502
        assert "no parser today" in said["error"]["message"]
        assert error.items() <= said["error"].items()
        turn = (await rig.turns())[1]
        assert (turn["match"], turn["completion_tokens"], turn["finish_reason"]) == ("continue", 4, "abort")
        assert {"engine-aborted", "engine-error"} <= {*turn["marks"]}
        assert not (await rig.readiness())["engine"]["models"]

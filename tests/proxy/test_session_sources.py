"""Sessions that clients name in their own headers and members, once the operator lists these (`--session-from`)."""

import gzip
import json
import logging

import pytest
from aiohttp import web
from pydantic import ValidationError

from tests.engine.listening import listening
from tests.proxy.kit import CHAT, HEADER, TOOLS, echo, proxied, results, user
from tokencache.config import Settings
from tokencache.proxy.sessions import SessionInBody, SessionSources

GYM = "header:X-Session-ID,body:conversation_params.conversation_id"
ASK = {"model": "sim", "messages": [user("EPISODE:demo")], "tools": TOOLS}
GZIP = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
IN_BODY = {"conversation_params": {"conversation_id": "r1"}}


async def call(rig, path=CHAT, headers=None, **more):
    async with rig.http.post(rig.url + path, json=ASK | more, headers=headers or {}) as answer:
        return answer.status, await answer.json()


async def sessions(rig):
    return {info["session"]: info["turns"] for info in (await rig.get("/tokencache/v1/sessions"))["sessions"]}


@pytest.mark.parametrize(("headers", "more"), [({"x-session-id": "r1"}, {}), ({}, IN_BODY)], ids=["header", "body"])
async def test_unlisted_names_are_ignored(rig, headers, more):
    assert (await call(rig, headers=headers, **more))[0] == 200
    assert await sessions(rig) == {}
    sent = {name.lower(): value for name, value in rig.engine.headers[-1].items()}
    assert sent.get("x-session-id") == headers.get("x-session-id")
    assert rig.engine.requests[-1].get("conversation_params") == more.get("conversation_params")


@pytest.mark.parametrize(
    ("headers", "path", "more"),
    [
        ({"x-session-id": "r1"}, CHAT, {}),
        ({}, CHAT, IN_BODY),
        ({"x-session-id": "r1"}, CHAT, {"conversation_params": {"conversation_id": "other"}}),
        ({HEADER: "r1", "X-Session-ID": "other"}, CHAT, {"conversation_params": {"conversation_id": "other"}}),
        ({"X-Session-ID": "other"}, f"/s/r1{CHAT}", {}),
        ({"Authorization": "Bearer tcs-r1", "X-Session-ID": "other"}, CHAT, {}),
        ({}, f"/h/codex{CHAT}", IN_BODY),
        ({}, CHAT, {"conversation_params": {"conversation_id": "r1", "other": 5}}),
    ],
)
async def test_a_listed_name_counts_where_nothing_else_names_the_session(headers, path, more):
    async with proxied(session_from=GYM) as rig:
        assert (await call(rig, path, headers, **more))[0] == 200
        assert await sessions(rig) == {"r1": 1}
        assert {name.lower(): value for name, value in rig.engine.headers[-1].items()}["x-session-id"] == "r1"
        left = {name: value for name, value in more.get("conversation_params", {}).items() if name != "conversation_id"}
        assert rig.engine.requests[-1].get("conversation_params") == (left or None)


async def test_a_rollout_named_in_the_body_is_one_lineage():
    async with proxied(session_from=GYM) as rig:
        messages = list(ASK["messages"])
        for _ in range(3):
            _, answer = await call(rig, messages=messages, **IN_BODY)
            message = answer["choices"][0]["message"]
            messages += [echo(message), *results(message)]
        assert [turn["match"] for turn in await rig.turns("r1")] == ["root", "continue", "continue"]
        await rig.check("r1")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"model": "sim", "input": "EPISODE:demo"}),
        ("/v1/messages", {"model": "sim", "max_tokens": 400, "messages": [user("EPISODE:demo")]}),
    ],
)
async def test_every_dialect_can_name_the_session(path, body):
    async with proxied(session_from=GYM) as rig, rig.http.post(rig.url + path, json=body | IN_BODY) as answer:
        assert answer.status == 200, await answer.text()
        assert await sessions(rig) == {"r1": 1}


async def test_a_request_without_a_name_is_relayed_unchanged():
    async with proxied(session_from=GYM) as rig:
        body = json.dumps({**ASK, "conversation_params": {"conversation_id": ""}}, indent=3).encode()
        async with rig.http.post(rig.url + CHAT, data=body, headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 200
        assert await sessions(rig) == {}
        assert rig.engine.requests[-1]["conversation_params"] == {"conversation_id": ""}


async def test_a_compressed_body_can_name_the_session():
    async with proxied(session_from=GYM) as rig:
        async with rig.http.post(rig.url + CHAT, data=gzip.compress(json.dumps(ASK | IN_BODY).encode()), headers=GZIP) as answer:
            assert answer.status == 200, await answer.text()
        assert await sessions(rig) == {"r1": 1}
        assert not any("Content-Encoding" in sent for sent in rig.engine.headers), "the engine receives what was read"
        assert rig.engine.requests[-1]["messages"] == ASK["messages"]


@pytest.mark.parametrize("coding", ["gzip", "br"])
async def test_a_compressed_body_without_a_name_is_relayed_unchanged(coding):
    body, received = gzip.compress(json.dumps(ASK).encode()), []

    async def receive(request):
        received.append((request.headers.get("Content-Encoding"), await request.read()))
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/{path:.*}", receive)
    async with listening(app) as engine, proxied(upstream=engine, session_from=GYM) as rig:
        async with rig.http.post(rig.url + CHAT, data=body, headers=GZIP | {"Content-Encoding": coding}) as answer:
            assert answer.status == 200, await answer.text()
        assert (coding, body) in received


@pytest.mark.parametrize("wrong", [5, ["r1"], "a b"])
async def test_an_invalid_name_is_refused(wrong):
    async with proxied(session_from=GYM) as rig:
        status, said = await call(rig, conversation_params={"conversation_id": wrong})
        assert (status, said["error"]["type"]) == (400, "invalid_request_error")
        assert await sessions(rig) == {}


async def test_two_listed_headers_that_differ_are_refused():
    async with proxied(session_from=GYM) as rig:
        async with rig.http.post(rig.url + CHAT, json=ASK, headers=[("X-Session-ID", "r1"), ("X-Session-ID", "r2")]) as answer:
            assert answer.status == 400
        assert await sessions(rig) == {}


@pytest.mark.parametrize("wrong", ["X-Session-ID", "header:", "body:", "body:a..b", "query:session"])
def test_an_invalid_list_is_refused(wrong):
    with pytest.raises(ValidationError, match="is not a source of session names"):
        Settings(session_from=wrong)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"a": {"b": "x"}, "c" : 1}', SessionInBody("x", b'{"c":1}')),
        (b'{"a": {"b": null}, "c" : 1}', SessionInBody(None, b'{"c":1}')),
        (b'{"a": "b", "c" : 1}', SessionInBody(None, b'{"a": "b", "c" : 1}')),
        (b'{"d": {"b": "x"}}', SessionInBody(None, b'{"d": {"b": "x"}}')),
        (b'{"a": {"b": "x"}', SessionInBody(None, b'{"a": {"b": "x"}')),
    ],
)
def test_listed_members_are_removed_from_the_body(body, found):
    assert SessionSources.read(["body:a.b"]).in_body(body) == found


def logged(caplog):
    return [record for record in caplog.records if record.name == "tokencache.server.routing"]


async def test_a_call_without_a_session_is_logged_once_where_ids_are_wanted(caplog):
    caplog.set_level(logging.WARNING, "tokencache.server.routing")
    async with proxied() as rig:
        await call(rig)
        assert not logged(caplog)
    async with proxied(return_token_id_information=True) as rig:
        async with rig.http.get(rig.url + "/v1/models"):
            pass
        await call(rig, headers={HEADER: "r1"})
        assert not logged(caplog)
        await call(rig)
        await call(rig)
    (record,) = logged(caplog)
    assert "POST /v1/chat/completions: the request names no session" in record.getMessage()
    assert "/s/SESSION" in record.getMessage()

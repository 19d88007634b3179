"""Sessions that take no calls: those that were deleted, and new ones where the store is at its bound."""

import json

import pytest

from tests.proxy.kit import proxied, user
from tokencache.store.memory import MemoryStore

API = "/tokencache/v1"
SAY = "EPISODE:talk"


async def delete(rig, session, query=""):
    async with rig.http.delete(f"{rig.url}{API}/sessions/{session}{query}") as answer:
        return answer.status, await answer.json()


async def sessions(rig):
    async with rig.http.get(f"{rig.url}{API}/sessions") as answer:
        return [one["session"] for one in (await answer.json())["sessions"]]


async def test_a_late_call_does_not_bring_a_deleted_session_back():
    async with proxied() as rig:
        await rig.say("s", [user(SAY)])
        calls = len(rig.engine.requests)
        assert await delete(rig, "s") == (200, {"session": "s", "deleted": True})
        for stream in (False, True):
            async with rig.http.post(
                f"{rig.url}/s/s/v1/chat/completions", json={"model": "m", "messages": [user(SAY)], "stream": stream}
            ) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, answer.headers["x-should-retry"], error["type"]) == (409, "false", "session_deleted")
                assert "?reuse=true" in error["message"]
        assert len(rig.engine.requests) == calls
        assert await sessions(rig) == []
        assert (await delete(rig, "s"))[0] == 404
        assert await delete(rig, "s", "?reuse=true") == (200, {"session": "s", "deleted": False})
        await rig.say("s", [user(SAY)])
        assert await sessions(rig) == ["s"]


async def test_a_name_that_is_wanted_again():
    async with proxied() as rig:
        await rig.say("s", [user(SAY)])
        assert await delete(rig, "s", "?reuse=true") == (200, {"session": "s", "deleted": True})
        await rig.say("s", [user(SAY)])
        await delete(rig, "s")
        async with rig.http.post(f"{rig.url}{API}/keys", json={"session": "s"}) as answer:
            assert answer.status == 201
        await rig.say("s", [user(SAY)])
        status, said = await delete(rig, "s", "?reuse=perhaps")
        assert (status, said["error"]["param"]) == (400, "reuse")
        assert await sessions(rig) == ["s"]


ROUTES = [
    ("v1/chat/completions", {"model": "m", "messages": [user(SAY)]}, lambda body: body["error"]["type"] == "store_full"),
    ("v1/messages", {"model": "m", "max_tokens": 9, "messages": [user(SAY)]}, lambda body: body["type"] == "error"),
    ("v1/responses", {"model": "m", "input": SAY}, lambda body: body["error"]["type"] == "store_full"),
    (
        "v1beta/models/m:generateContent",
        {"contents": [{"role": "user", "parts": [{"text": SAY}]}]},
        lambda body: body["error"]["status"] == "UNAVAILABLE",
    ),
]


@pytest.mark.parametrize(("route", "body", "in_its_dialect"), ROUTES, ids=[route for route, _, _ in ROUTES])
async def test_at_the_bound_new_sessions_are_refused_and_old_ones_go_on(route, body, in_its_dialect):
    async with proxied(store=MemoryStore(max_sessions=1)) as rig:
        await rig.say("old", [user(SAY)])
        calls = len(rig.engine.requests)
        async with rig.http.post(f"{rig.url}/s/new/{route}", json=body) as answer:
            said = await answer.json()
            assert (answer.status, answer.headers["Retry-After"]) == (503, "30")
            assert in_its_dialect(said), said
            assert "--max-sessions is 1" in json.dumps(said)
            assert "delete sessions" in json.dumps(said)
        assert len(rig.engine.requests) == calls
        await rig.say("old", [user(SAY)])
        assert await sessions(rig) == ["old"]
        await delete(rig, "old")
        await rig.say("new", [user(SAY)])

"""The session of a call: named by header, path or key; what is sent on to the engine; and the trainer's routes."""

import json

import pytest

from tests.proxy.kit import CHAT, HEADER, TOOLS, echo, proxied, results, user

ASK = {"model": "sim", "messages": [user("EPISODE:demo")], "tools": TOOLS}
API = "/tokencache/v1"


async def call(rig, path=CHAT, headers=None, method="POST", body=ASK):
    async with rig.http.request(method, rig.url + path, json=body, headers=headers or {}) as answer:
        text = await answer.text()
        return answer.status, json.loads(text) if text.startswith("{") else text


async def key_for(rig, session, **headers):
    status, said = await call(rig, f"{API}/keys", headers, body={"session": session})
    assert (status, said["session"]) == (201, session)
    return said["key"]


async def sessions(rig):
    return {info["session"]: info["turns"] for info in (await rig.get(f"{API}/sessions"))["sessions"]}


WAYS = {
    "header": ({HEADER: "r1"}, CHAT),
    "header in other case": ({HEADER.lower(): "r1"}, CHAT),
    "path": ({}, f"/s/r1{CHAT}"),
    "path, escaped": ({}, f"/s/r%31{CHAT}"),
    "key": ({"Authorization": "Bearer tcs-r1"}, CHAT),
    "key, other scheme's case": ({"Authorization": "bearer tcs-r1"}, CHAT),
    "x-api-key": ({"x-api-key": "tcs-r1"}, CHAT),
    "path before header": ({HEADER: "r2", "Authorization": "Bearer tcs-r3"}, f"/s/r1{CHAT}"),
    "path with the harness": ({}, f"/s/r1/h/codex{CHAT}"),
    "key, harness in the path": ({"Authorization": "Bearer tcs-r1"}, f"/h/codex{CHAT}"),
    "google's header": ({"x-goog-api-key": "tcs-r1"}, CHAT),
    "header before key": ({HEADER: "r1", "Authorization": "Bearer tcs-r3"}, CHAT),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_session_is_named(rig, way):
    headers, path = WAYS[way]
    assert (await call(rig, path + "?a=%2F", {**headers, "X-Other": "1"}))[0] == 200
    assert await sessions(rig) == {"r1": 1}
    sent = {name.lower(): value for name, value in rig.engine.headers[-1].items()}
    assert sent["x-session-id"] == "r1"
    assert sent["x-other"] == "1"
    assert not {HEADER.lower(), "authorization", "x-api-key", "x-goog-api-key"} & set(sent)


@pytest.mark.parametrize("way", [{"Authorization": "Bearer {}"}, {"x-api-key": "{}"}])
async def test_a_registered_key_overrides_everything(rig, way):
    key = await key_for(rig, "mine")
    headers = {name: value.format(key) for name, value in way.items()}
    assert (await call(rig, f"/s/other{CHAT}", {**headers, HEADER: "another"}))[0] == 200
    assert await sessions(rig) == {"mine": 1}
    assert key not in str(rig.engine.headers[-1])
    assert key not in str(vars(rig.store))
    status, said = await call(rig, CHAT, {name: value.format("tck-wrong") for name, value in way.items()} | {HEADER: "r1"})
    assert (status, said["error"]["type"], said["error"]["code"]) == (401, "authentication_error", 401)
    assert await sessions(rig) == {"mine": 1}


async def test_two_keys_of_which_either_would_name_the_session_are_refused(rig):
    """Nobody could tell in whose trajectory the call would be."""
    keys = ("tcs-r1", "tcs-r2"), [await key_for(rig, name) for name in "ab"]
    for one, other in keys:
        for headers in ({"x-api-key": one, "Authorization": f"Bearer {other}"}, {"x-api-key": one, "x-goog-api-key": other}):
            status, said = await call(rig, headers=headers)
            assert (status, "two different keys" in said["error"]["message"]) == (400, True)
            assert (await call(rig, headers={name: value.replace(other, one) for name, value in headers.items()}))[0] == 200
    for headers, path in ({HEADER: "r3"}, CHAT), ({}, f"/s/r3{CHAT}"):
        assert (await call(rig, path, headers | {"x-api-key": "tcs-r1", "Authorization": "Bearer tcs-r2"}))[0] == 200
    assert await sessions(rig) == {"r1": 2, "a": 2, "b": 0, "r3": 2}


async def test_a_clients_own_key_is_sent_to_the_engine(rig):
    await call(rig, headers={HEADER: "r1", "Authorization": "Bearer sk-own", "X-Session-ID": "its own"})
    assert rig.engine.headers[-1]["Authorization"] == "Bearer sk-own"
    assert rig.engine.headers[-1]["X-Session-ID"] == "its own"


async def test_the_configured_engine_key_replaces_it():
    async with proxied(upstream_key="sk-engine") as rig:
        for headers in ({HEADER: "r1", "Authorization": "Bearer sk-own"}, {"authorization": "Bearer tcs-r1"}, {}):
            await call(rig, headers=headers)
            assert rig.engine.headers[-1]["Authorization"] == "Bearer sk-engine"


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../x", "-x", "x" * 201, "é", "a\tb", "a,b", ".", "<script>"])
async def test_an_invalid_name_is_a_400(rig, name):
    encoded = name.encode().decode("latin-1")
    status, said = await call(rig, headers={HEADER: encoded})
    assert (status, said["error"]["type"], said["error"]["param"]) == (400, "invalid_request_error", "session")
    assert await sessions(rig) == {}


@pytest.mark.parametrize("name", ["a", "A.b_c:d@e+f=g-h", "x" * 200, "0"])
async def test_a_name_with_all_allowed_characters(rig, name):
    assert (await call(rig, headers={HEADER: name}))[0] == 200
    assert (await rig.info(name))["turns"] == 1


async def test_registered_only():
    async with proxied(registered_only=True) as rig:
        for headers, path in WAYS.values():
            assert (await call(rig, path, headers))[0] == 401
        assert (await call(rig, headers={"Authorization": f"Bearer {await key_for(rig, 'r1')}"}))[0] == 200


async def test_another_header():
    async with proxied(session_header="X-Rollout") as rig:
        await call(rig, headers={"X-Rollout": "r1", HEADER: "ignored"})
        assert await sessions(rig) == {"r1": 1}
        assert "X-Rollout" not in rig.engine.headers[-1]


async def test_every_other_route_of_a_session_is_relayed(rig):
    for path in ("/v1/models", "/version", "/v1/nope", "/"):
        async with rig.http.get(rig.up + path) as direct, rig.http.get(rig.url + "/s/r1" + path) as through:
            assert (through.status, await through.read()) == (direct.status, await direct.read())
    assert await sessions(rig) == {}
    assert (await call(rig, "/s/r1/inference/v1/generate", body={"token_ids": [1]}))[0] == 404
    assert await sessions(rig) == {}


async def test_sealed_and_deleted(rig):
    await call(rig, headers={HEADER: "r1"})
    assert (await call(rig, f"{API}/sessions/r1/finish", body=None))[0] == 200
    status, said = await call(rig, f"{API}/sessions/r1/seal")
    assert (status, said["session"], said["sealed"]) == (200, "r1", True)
    for stream in (False, True):
        status, said = await call(rig, headers={HEADER: "r1"}, body={**ASK, "stream": stream})
        assert (status, said["error"]["type"], said["error"]["code"]) == (409, "session_sealed", 409)
    exported = await rig.check("r1")
    assert (exported["sealed"], exported["complete"], len(exported["sequences"])) == (True, True, 1)
    assert await call(rig, f"{API}/sessions/r1", method="DELETE") == (200, {"session": "r1", "deleted": True})
    assert (await call(rig, f"{API}/sessions/r1", method="DELETE"))[0] == 404
    assert await sessions(rig) == {}
    assert (await call(rig, headers={HEADER: "r1"}))[1]["error"]["type"] == "session_deleted"  # a late call does not bring it back
    assert await call(rig, f"{API}/sessions/r1?reuse=true", method="DELETE") == (200, {"session": "r1", "deleted": False})
    assert (await call(rig, headers={HEADER: "r1"}))[0] == 200  # a new one of the same name
    assert (await rig.info("r1"))["turns"] == 1
    assert (await rig.exported("r1"))["complete"]


# the trainer's side


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/sessions/none", 404), ("GET", "/sessions/none/turns", 404), ("GET", "/sessions/none/trajectories", 404),
        ("POST", "/sessions/none/seal", 404), ("DELETE", "/sessions/none", 404), ("GET", "/nope", 404), ("PUT", "/sessions", 405),
        ("GET", "/sessions/r1/trajectories?format=parquet", 400), ("GET", "/sessions/a%20b", 400), ("GET", "/sessions/r1/nope", 404),
        ("GET", "/keys", 405), ("GET", "", 404),
    ],
)  # fmt: skip
async def test_wrong_requests(rig, method, path, status):
    await call(rig, headers={HEADER: "r1"})
    got, said = await call(rig, API + path, method=method)
    assert (got, said["error"]["code"], set(said["error"])) == (status, status, {"message", "type", "param", "code"})


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"session": 5}', b'{"session": "a b"}', b"\xff"])
async def test_wrong_bodies_for_a_key(rig, body):
    async with rig.http.post(rig.url + API + "/keys", data=body) as answer:
        assert (answer.status, (await answer.json())["error"]["type"]) == (400, "invalid_request_error")


async def test_the_admin_key():
    async with proxied(admin_key="s3cret") as rig:
        await call(rig, headers={HEADER: "r1"})
        paths = [("GET", "/sessions"), ("GET", "/sessions/r1"), ("GET", "/sessions/r1/turns"), ("GET", "/sessions/r1/trajectories")]
        for method, path in [*paths, ("POST", "/keys"), ("POST", "/sessions/r1/seal"), ("DELETE", "/sessions/r1"), ("GET", "/nope")]:
            for given in ({}, {"Authorization": "Bearer no"}, {"Authorization": "s3cre"}, {"Authorization": "Bearer tcs-r1"}):
                assert (await call(rig, API + path, given, method=method))[0] == 401
        for method, path in paths:
            assert (await call(rig, API + path, {"Authorization": "Bearer s3cret"}, method=method))[0] == 200
        await key_for(rig, "r2", Authorization="Bearer s3cret")


async def test_turns_show_what_happened(rig):
    messages, stream = list(ASK["messages"]), False
    for _ in range(2):
        message = await rig.say("s", messages, tools=TOOLS, stream=stream, temperature=0.5, max_tokens=500)
        messages, stream = [*messages, echo(message), *results(message)], True
    first, second = await rig.turns()
    assert (first["match"], first["stream"], first["messages"], first["tools"], first["parent"]) == ("root", False, 1, 1, None)
    assert (second["match"], second["stream"], second["messages"], second["parent"]) == ("continue", True, 3, first["turn"])
    assert second["forgiven"] == ["args-json", "reasoning-dropped", "whitespace"]
    assert second["sampling"] == {"temperature": 0.5, "max_tokens": 500}
    assert (second["model"], second["dialect"], second["finish_reason"]) == ("sim", "chat", "tool_calls")
    assert [c["name"] for c in second["served"]["tool_calls"]] == ["bash", "bash"]
    assert (first["prompt_tokens"], second["completion_tokens"]) == (
        len(rig.ground_truth()[0].prompt_ids),
        len(rig.ground_truth()[1].completion_ids),
    )


async def test_health_readiness_metrics(rig):
    assert await rig.get("/healthz") == {"status": "ok"}
    ready = await rig.get("/readyz")
    (model,) = ready["engine"]["models"]
    assert (ready["ready"], ready["store"], model["model"], model["level"], model["version"]) == (True, "ok", "sim", "exact", "0.32.0")
    assert (model["stop_ids"], model["max_model_len"]) == ([rig.engine.tokenizer.stop_id], 131072)
    await rig.say("s", ASK["messages"])
    async with rig.http.get(rig.url + "/metrics") as answer:
        text = await answer.text()
        assert answer.headers["Content-Type"].startswith("text/plain")
    assert 'tokencache_turns_total{match="root",reason=""}' in text
    assert 'tokencache_calls_total{dialect="chat",outcome="answered"}' in text
    assert f'tokencache_engine_exact{{engine="{rig.up}",model="sim"}} 1.0' in text
    assert "tokencache_calls_in_flight 0.0" in text
    assert 'tokencache_tokens_total{part="completion"}' in text


# /tokenize


@pytest.mark.parametrize("more", [{}, {"chat_template_kwargs": {"enable_thinking": False}}])
async def test_tokenize_returns_what_the_next_call_sends(rig, more):
    messages = [{"role": "system", "content": "You."}, user("EPISODE:demo")]
    for _ in range(4):
        status, said = await rig.post("s", "/tokenize", model="sim", messages=messages, tools=TOOLS, **more)
        assert (status, set(said)) == (200, {"count", "max_model_len", "tokens", "token_strs"})
        message = await rig.say("s", messages, tools=TOOLS, **more)
        assert said["tokens"] == rig.ground_truth()[-1].prompt_ids
        assert (said["count"], said["max_model_len"]) == (len(said["tokens"]), 131072)
        messages = [*messages, echo(message), *results(message)]
    assert [t["match"] for t in await rig.turns()] == ["root"] + ["continue"] * 3
    assert not (await rig.info())["open_calls"]
    edited = [{"role": "system", "content": "Other."}, *messages[1:]]
    said = (await rig.post("s", "/tokenize", model="sim", messages=edited, tools=TOOLS, **more))[1]
    await rig.say("s", edited, tools=TOOLS, **more)
    assert said["tokens"] == rig.ground_truth()[-1].prompt_ids
    assert (await rig.turns())[-1]["match"] == "resplice"


@pytest.mark.parametrize(
    "body", [{"prompt": "<|im_end|> x"}, {"messages": [user("x")], "add_generation_prompt": False}, {"model": "x"}, {"messages": 5}, {}]
)
async def test_other_tokenize_requests_are_relayed(rig, body):
    through, direct = await rig.post("s", "/tokenize", **body), await rig.post(None, "/tokenize", url=rig.up, **body)
    assert through == direct or (through[0] == direct[0] == 400)

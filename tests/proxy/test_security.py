"""Who may see what: the admin key, registered keys, tenants, and sessions that know nothing of each other."""

import asyncio
import base64

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.proxy.kit import CHAT, EPISODES, HEADER, TOOLS, assembled, echo, proxied, results, user
from tokencache.cli import app
from tokencache.config import Settings
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine

API = "/tokencache/v1"
ADMIN = "the-admin-key-of-these-tests"
BEARER = {"Authorization": f"Bearer {ADMIN}"}
SAY = "EPISODE:demo"
ASK = {"model": "sim", "messages": [user(SAY)], "tools": TOOLS}


def basic(key, name="prometheus"):
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{key}".encode()).decode()}


async def call(rig, path=CHAT, headers=None, *, method="POST", body=None):
    async with rig.http.request(method, rig.url + path, json=body, headers=headers or {}) as answer:
        text = await answer.text()
        return answer.status, (await answer.json() if answer.content_type == "application/json" else text), answer.headers


async def key_for(rig, session, **more):
    status, said, _ = await call(rig, API + "/keys", BEARER, body={"session": session, **more})
    assert status == 201, said
    return said["key"], said["id"]


TRAINERS = ["/metrics", *(API + path for path in ("/sessions", "/summaries", "/sessions/s/outline", "/sessions/s/drift", "/nope"))]


class TestAdminKey:
    async def test_the_trainers_routes_require_its_key(self):
        async with proxied(admin_key=ADMIN) as rig:
            await call(rig, headers={HEADER: "s"}, body=ASK)
            for path in TRAINERS:
                for wrong in (
                    {},
                    {"Authorization": ADMIN},
                    {"Authorization": f"Bearer {ADMIN[:-1]}"},
                    basic("no"),
                    basic(""),
                    basic(ADMIN[:-1]),
                ):
                    status, said, headers = await call(rig, path, wrong, method="GET")
                    assert (status, said["error"]["type"]) == (401, "authentication_error"), path
                    assert headers["WWW-Authenticate"].startswith("Bearer ")
                for right in (BEARER, {"authorization": f"bearer {ADMIN}"}, basic(ADMIN), basic(ADMIN, name="")):
                    assert (await call(rig, path, right, method="GET"))[0] in {200, 404}, path

    @pytest.mark.parametrize("given", ["Basic", "Basic !", "Basic é", "Basic " + "A" * 5000, "Bearer", "Digest x", "Bearer \udce9"])
    async def test_an_invalid_key_is_refused(self, given):
        async with proxied(admin_key=ADMIN) as rig:
            status, _, _ = await call(
                rig, "/metrics", {"Authorization": given.encode("utf-8", "surrogateescape").decode("latin-1")}, method="GET"
            )
            assert status == 401

    async def test_a_key_with_other_letters(self):
        key = "schlüssel-ключ-鍵"
        async with proxied(admin_key=key) as rig:
            assert (await call(rig, "/metrics", basic(key), method="GET"))[0] == 200
            assert (await call(rig, "/metrics", basic("schlüssel-ключ"), method="GET"))[0] == 401

    async def test_a_browser_is_asked_where_it_opens_a_page_and_not_where_the_viewer_fetches(self):
        async with proxied(admin_key=ADMIN) as rig:
            _, _, opened = await call(rig, "/metrics", {"Accept": "text/html,application/xhtml+xml"}, method="GET")
            _, _, fetched = await call(rig, API + "/sessions", {"Accept": "*/*"}, method="GET")
            assert opened["WWW-Authenticate"].startswith("Basic ")
            assert "Basic" not in fetched["WWW-Authenticate"]
            status, page, _ = await call(rig, "/tokencache/ui/", method="GET")
            assert (status, "ask-key" in page) == (200, True)

    async def test_what_a_browser_adds_by_itself_changes_nothing(self):
        async with proxied(admin_key=ADMIN) as rig:
            await call(rig, headers={HEADER: "s"}, body=ASK)
            for method, path in (("POST", "/keys"), ("POST", "/sessions/s/seal"), ("DELETE", "/sessions/s"), ("DELETE", "/keys/x")):
                assert (await call(rig, API + path, basic(ADMIN), method=method, body={"session": "s"}))[0] == 401
            assert (await call(rig, API + "/sessions/s", BEARER, method="GET"))[1]["sealed"] is False

    async def test_readiness_is_public_and_its_details_are_for_the_trainer(self):
        async with proxied(admin_key=ADMIN) as rig:
            assert (await call(rig, "/readyz", method="GET"))[:2] == (200, {"ready": True})
            told = (await call(rig, "/readyz", BEARER, method="GET"))[1]
            assert (told["ready"], told["engine"]["url"]) == (True, rig.up)

    async def test_nothing_about_an_unreachable_engine_is_revealed(self):
        async with proxied(upstream="http://127.0.0.1:9", admin_key=ADMIN) as rig:
            assert (await call(rig, "/readyz", method="GET"))[:2] == (503, {"ready": False})
            assert "127.0.0.1:9" in (await call(rig, "/readyz", basic(ADMIN), method="GET"))[1]["engine"]["error"]


EVERYWHERE = "0.0.0.0"  # noqa: S104 - what is refused


class TestListening:
    @pytest.mark.parametrize("host", [EVERYWHERE, "::", "", "10.0.0.7", "proxy.example", "localhost.example"])
    def test_beyond_loopback_a_key_is_needed(self, host):
        with pytest.raises(ValueError, match="--admin-key"):
            Settings(host=host)
        with pytest.raises(ValueError, match="--admin-key"):
            Settings(host=host, admin_key="")
        assert Settings(host=host, admin_key=ADMIN).host == Settings(host=host, allow_open=True).host == host

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST", "localhost."])
    def test_on_loopback_none_is(self, host):
        assert Settings(host=host).admin_key is None

    def test_the_command_prints_what_to_do(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "400")
        told = CliRunner().invoke(app, ["serve", "--host", EVERYWHERE])
        assert told.exit_code == 2
        assert "0.0.0.0 can be reached from elsewhere" in told.output
        assert "Value error" not in told.output
        assert all(option in told.output for option in ("TOKENCACHE_ADMIN_KEY", "--allow-open"))

    @pytest.mark.parametrize(("key", "warned"), [("", "is empty"), ("hunter2", "less than 16 characters"), (ADMIN, "")])
    def test_a_key_that_may_be_guessed_is_warned_about(self, key, warned, caplog):
        told = CliRunner().invoke(app, ["serve", "--admin-key", key, "--store", "nowhere:"])
        assert told.exit_code == 1
        assert [warned in message for message in caplog.messages if "ADMIN KEY" in message] == [True] * bool(warned)
        assert not key or key not in caplog.text

    async def test_a_password_in_the_engines_url_is_sent_and_never_shown(self):
        engine = SimulatedEngine(episodes=EPISODES, seed=7)
        async with engine.serve() as up, proxied(engine, upstream=up.replace("//", "//user:pa%20ss@")) as rig:
            await call(rig, headers={HEADER: "s", "Authorization": "Bearer harness"}, body=ASK)
            assert engine.headers[-1]["Authorization"] == "Basic " + base64.b64encode(b"user:pa ss").decode()
            shown = str([await rig.get("/readyz"), (await call(rig, "/metrics", method="GET"))[1]])
            assert up in shown
            assert "pa%20ss" not in shown
            assert "pa ss" not in shown


class TestRegisteredKeys:
    async def test_a_key_is_revoked_by_its_id_and_at_once(self):
        async with proxied(admin_key=ADMIN) as rig:
            (one, its_id), (other, other_id) = await key_for(rig, "s"), await key_for(rig, "s", exist_ok=True)
            assert one != other
            assert its_id != other_id
            assert its_id not in one
            assert (await call(rig, headers={"Authorization": f"Bearer {one}"}, body=ASK))[0] == 200
            assert (await call(rig, f"{API}/keys/{its_id}", BEARER, method="DELETE"))[:2] == (200, {"id": its_id, "revoked": True})
            assert (await call(rig, headers={"Authorization": f"Bearer {one}"}, body=ASK))[0] == 401
            assert (await call(rig, headers={"Authorization": f"Bearer {other}"}, body=ASK))[0] == 200
            assert (await call(rig, f"{API}/keys/{its_id}", BEARER, method="DELETE"))[0] == 404
            assert (await rig.store.session("s")).turns == 2

    async def test_an_id_is_not_a_key(self):
        async with proxied(admin_key=ADMIN) as rig:
            _, its_id = await key_for(rig, "s")
            assert (await call(rig, headers={"Authorization": f"Bearer tck-{its_id}"}, body=ASK))[0] == 401

    async def test_a_new_key_lets_the_name_of_a_deleted_session_be_used_again(self):
        async with proxied(admin_key=ADMIN) as rig:
            await call(rig, headers={HEADER: "s"}, body=ASK)
            assert (await call(rig, API + "/sessions/s", BEARER, method="DELETE"))[0] == 200
            key, _ = await key_for(rig, "s")
            assert (await call(rig, headers={"Authorization": f"Bearer {key}"}, body=ASK))[0] == 200
            assert (await rig.store.session("s")).turns == 1

    async def test_a_key_of_one_session_opens_nothing_of_another(self):
        async with proxied(admin_key=ADMIN) as rig:
            key, _ = await key_for(rig, "a")
            mine = {"Authorization": f"Bearer {key}"}
            await call(rig, headers={HEADER: "b"}, body=ASK)
            await call(rig, f"/s/b{CHAT}", mine | {HEADER: "b"}, body=ASK)
            assert [(await rig.store.session(name)).turns for name in "ab"] == [1, 1]
            for path in ("/sessions", "/sessions/b/turns", "/sessions/b/trajectories", "/sessions/a/trajectories"):
                assert (await call(rig, API + path, mine, method="GET"))[0] == 401

    async def test_without_a_key_sessions_and_engine_can_be_refused(self):
        async with proxied(admin_key=ADMIN, registered_only=True) as rig:
            key, _ = await key_for(rig, "a")
            for headers in ({}, {HEADER: "b"}, {"Authorization": "Bearer tcs-b"}, {"Authorization": "Bearer sk-engine"}):
                assert (await call(rig, headers=headers, body=ASK))[0] == 401
                assert (await call(rig, "/v1/models", headers, method="GET"))[0] == 401
            assert (await call(rig, "/v1/models", {"Authorization": f"Bearer {key}"}, method="GET"))[0] == 200


CALLS = {
    "chat": (CHAT, ASK),
    "messages": ("/v1/messages", {"model": "sim", "max_tokens": 100, "messages": [user(SAY)]}),
    "responses": ("/v1/responses", {"model": "sim", "input": SAY}),
    "gemini": ("/v1beta/models/sim:generateContent", {"contents": [{"role": "user", "parts": [{"text": SAY}]}]}),
    "completions": ("/v1/completions", {"model": "sim", "prompt": "hello"}),
    "completions, relayed": ("/v1/completions", {"model": "sim", "prompt": "hello", "use_beam_search": True}),
}


PASSED = {200, 400}
"""The simulated engine does not take what is only relayed."""


def told(rig, name):
    return (rig.engine.completions if name.startswith("completions") else rig.engine.requests)[-1]


class TestTenants:
    @pytest.mark.parametrize("name", CALLS)
    async def test_each_has_a_part_of_the_engines_cache_to_itself(self, name):
        (path, body), salts = CALLS[name], []
        async with proxied(admin_key=ADMIN) as rig:
            for session, tenant in (("a", "acme"), ("b", "acme"), ("c", "other")):
                key, _ = await key_for(rig, session, tenant=tenant)
                headers = {"Authorization": f"Bearer {key}"}
                assert (await call(rig, path, headers, body=body))[0] in PASSED
                salts.append(told(rig, name)["cache_salt"])
                assert (await call(rig, path, headers, body={**body, "cache_salt": "victim"}))[0] in PASSED
                assert told(rig, name)["cache_salt"] == salts[-1]
        assert salts[0] == salts[1] != salts[2]
        assert all(len(salt) == 32 and tenant not in salt for salt, tenant in zip(salts, ("acme", "acme", "other"), strict=True))

    @pytest.mark.parametrize("name", [name for name in CALLS if name != "gemini"])  # it has no such member
    async def test_without_one_a_harnesss_own_salt_is_forwarded(self, name):
        path, body = CALLS[name]
        async with proxied() as rig:
            assert (await call(rig, path, {HEADER: "s"}, body={**body, "cache_salt": "mine"}))[0] in PASSED
            assert told(rig, name)["cache_salt"] == "mine"
            assert (await call(rig, path, {HEADER: "s"}, body=body))[0] in PASSED
            assert "cache_salt" not in told(rig, name)

    async def test_every_turn_has_it_and_other_deployments_have_another(self):
        salts = []
        for _ in range(2):
            async with proxied(admin_key=ADMIN) as rig:
                key, _ = await key_for(rig, "a", tenant="acme")
                messages = list(ASK["messages"])
                for _ in range(3):
                    status, said, _ = await call(rig, headers={"Authorization": f"Bearer {key}"}, body={**ASK, "messages": messages})
                    assert status == 200
                    message = said["choices"][0]["message"]
                    messages += [echo(message), *results(message)]
                assert [turn.match for turn in await rig.store.turns("a")] == ["root", "continue", "continue"]
                asked = [request for request in rig.engine.requests if SAY in str(request["messages"])]
                assert len(asked) == 3
                salts.append({request["cache_salt"] for request in asked})
        assert [len(some) for some in salts] == [1, 1]
        assert salts[0] != salts[1]

    async def test_its_sessions_reach_nothing_of_the_engine_but_what_is_recorded(self):
        async with proxied(admin_key=ADMIN) as rig:
            key, _ = await key_for(rig, "a", tenant="acme")
            headers = {"Authorization": f"Bearer {key}"}
            for method, path in (("POST", "/pause"), ("POST", "/inference/v1/generate"), ("POST", "/invocations"), ("GET", "/metrics2")):
                status, said, _ = await call(rig, path, headers, method=method, body={"model": "sim"})
                assert (status, said["error"]["type"]) == (403, "permission_error")
            assert (await call(rig, "/v1/models", headers, method="GET"))[0] == 200
            assert (await rig.store.session("a")).turns == 0


IDS = {
    "as vLLM takes them": {"kv_transfer_params": {"prompt_token_ids": [1, 2, 3]}},
    "as NeMo RL's worker does": {"required_prefix_token_ids": [1, 2, 3]},
}


@pytest.mark.parametrize("name", ["chat", "messages", "responses", "gemini"])
@pytest.mark.parametrize("way", IDS)
async def test_token_ids_of_a_harness_never_reach_the_engine(rig, name, way):
    path, body = CALLS[name]
    status, _, _ = await call(rig, path, {HEADER: "s"}, body={**body, **IDS[way]})
    assert status in {200, 400}
    assert all("[1, 2, 3]" not in str(request) for request in rig.engine.requests)
    if status == 200:
        await rig.check()


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.booleans()), min_size=4, max_size=14))
def test_sessions_with_the_same_talk_never_share_a_token(plan):
    """Three sessions say the same words in any order; each goes on from its own tokens, whatever the others have said."""
    asyncio.run(_same_talk(plan))


async def _same_talk(plan):
    async with proxied(SimulatedEngine(episodes=EPISODES, seed=len(plan), drift=1.0)) as rig:
        talks = {name: [user("EPISODE:talk")] for name in "abc"}
        for name, stream in plan:
            status, said = await rig.post(name, messages=talks[name], stream=stream)
            assert status == 200
            message = assembled(said) if stream else said["choices"][0]["message"]
            talks[name] += [echo(message), *results(message)]
        for name in {name for name, _ in plan}:
            await rig.check(name)
            turns = await rig.store.turns(name)
            assert [turn.match for turn in turns] == ["root"] + ["continue"] * (len(turns) - 1)
            for before, after in zip(rig.ground_truth(name), rig.ground_truth(name)[1:], strict=False):
                own = [*before.prompt_ids, *before.completion_ids]
                assert after.prompt_ids[: len(own)] == own


async def test_a_handle_and_a_response_of_another_session_are_unknown(rig):
    responses, gemini = "/v1/responses", "/v1beta/models/sim:generateContent"
    _, first, _ = await call(rig, responses, {HEADER: "a"}, body={"model": "sim", "input": SAY})
    for session, continued, fetched in (("b", 400, 404), ("a", 200, 200)):
        asked = {"model": "sim", "input": "go on", "previous_response_id": first["id"]}
        assert (await call(rig, responses, {HEADER: session}, body=asked))[0] == continued
        assert (await call(rig, f"{responses}/{first['id']}", {HEADER: session}, method="GET"))[0] == fetched
    hello = {"role": "user", "parts": [{"text": SAY}]}
    _, said, _ = await call(rig, gemini, {HEADER: "c"}, body={"contents": [hello]})
    again = {"contents": [hello, said["candidates"][0]["content"], {"role": "user", "parts": [{"text": "go on"}]}]}
    for session, match in (("d", "plain"), ("c", "continue")):
        assert (await call(rig, gemini, {HEADER: session}, body=again))[0] == 200
        assert (await rig.store.turns(session))[-1].match == match


async def test_replicas_of_one_store_find_the_same_and_another_secret_finds_nothing():
    store = MemoryStore()
    async with proxied(store=store) as one, proxied(store=store) as other:
        message = await one.say("s", ASK["messages"], tools=TOOLS)
        history = [*ASK["messages"], echo(message), *results(message)]
        await other.say("s", history, tools=TOOLS)
        store._secret = bytes(32)
        async with proxied(store=store) as stranger:
            await stranger.say("s", history, tools=TOOLS)
    assert [turn.match for turn in await store.turns("s")] == ["root", "continue", "plain"]

"""Requests that the API refuses: unknown members of a body, misspelled query parameters, and methods that a route does not have."""

import json

import msgspec
import pytest
from msgspec import inspect

from tests.proxy.kit import proxied, user
from tests.support.pairwise import some
from tokencache.api.http import _unknown_members
from tokencache.api.openapi import BASE, OPERATIONS
from tokencache.client import AsyncClient, RefusedError
from tokencache.client.errors import error_of
from tokencache.config import Settings
from tokencache.server.app import Proxy

SESSION = "s-1"
NAMES = {"update": "u", "session": SESSION, "turn": "t", "sequence": "q", "key": "k", "sha256": "0" * 64}
ADMIN = "an-admin-key"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND")


@pytest.fixture
async def rig():
    async with proxied() as made:
        yield made


async def call(rig, method, path, **more):
    """Status, error and headers of a request."""
    async with rig.http.request(method, rig.url + path, **more) as answer:
        text = await answer.text()
        body = json.loads(text) if text and answer.content_type == "application/json" else {}
        return answer.status, body.get("error", {}), answer.headers


async def error(rig, method, path, **more):
    """The message and the parameter of a 422."""
    status, found, _ = await call(rig, method, path, **more)
    assert (status, found["type"]) == (422, "invalid_request_error"), found
    return found["message"], found["param"]


NEW_SESSION = "session, harness, models, sampling, budget, tenant, history, deadline, silent_for, group, metadata, tags, exist_ok"


class TestUnknownMembers:
    @pytest.mark.parametrize(
        ("body", "param", "named"),
        [
            ({"session": "s", "samplng": {"temperature": 0}}, "samplng", "'samplng' (did you mean 'sampling'?)"),
            ({"session": "s", "SAMPLING": {}}, "SAMPLING", "'SAMPLING' (did you mean 'sampling'?)"),
            ({"sesion": "s"}, "sesion", "'sesion' (did you mean 'session'?)"),
            ({"session": "s", "budget": {"cals": 5}}, "budget.cals", "'budget.cals' (did you mean 'budget.calls'?)"),
            ({"session": "s", "x.calls": 5}, "x.calls", "'x.calls' (the members are: session, harness, models, "),
            (
                {"session": "s", "temperature": 0},
                "temperature",
                f"(the members are: {NEW_SESSION})",
            ),
            ({"session": "s", "": 0}, "", "'' (the members are: "),
            ({"session": "s", "nope": 1, "modls": {}}, "nope", "exist_ok), 'modls' (did you mean 'models'?)"),
        ],
        ids=json.dumps,
    )
    async def test_a_key_with_an_unknown_member_is_refused(self, rig, body, param, named):
        message, blamed = await error(rig, "POST", BASE + "/keys", json=body)
        assert named in message
        assert blamed == param

    async def test_nothing_is_registered(self, rig):
        await error(rig, "POST", BASE + "/keys", json={"session": "s", "samplng": {}})
        async with rig.http.get(f"{rig.url}{BASE}/sessions/s") as answer:
            assert answer.status == 404

    async def test_names_and_numbers_of_members_are_bounded(self, rig):
        message, param = await error(rig, "POST", BASE + "/keys", json={"session": "s", **{f"{n}{'x' * 500}": n for n in range(1000)}})
        assert len(message) < 2000
        assert len(param) <= 80
        assert message.endswith(", and 992 more")

    async def test_an_engine_with_an_unknown_member_is_refused(self, rig):
        for path in ("/engines", "/engines/drain"):
            message, param = await error(rig, "POST", BASE + path, json={"url": rig.up, "ulr": 1})
            assert (param, "'ulr' (did you mean 'url'?)" in message) == ("ulr", True)

    @pytest.mark.parametrize("operation", [one for one in OPERATIONS if one.body is not None], ids=lambda operation: operation.id)
    async def test_every_route_with_a_body_refuses_unknown_members(self, rig, operation):
        await rig.say(SESSION, [user("hi")])
        message, param = await error(rig, operation.method, operation.path.format(**NAMES), json={"no-such-member": 1})
        assert (param, "'no-such-member'" in message) == ("no-such-member", True)
        assert (await rig.get(f"{BASE}/sessions/{SESSION}"))["sealed"] is False  # nothing was done either

    @pytest.mark.parametrize("body", [b"", b"{}", b'{"model": "m"}', b"null", b"[1]", b"not JSON", b"[" * 100_000])
    async def test_a_route_without_a_body_ignores_one(self, rig, body):
        await rig.say(SESSION, [user("hi")])
        assert (await call(rig, "POST", f"{BASE}/sessions/{SESSION}/seal?force=true", data=body))[0] == 200

    @pytest.mark.parametrize("body", [b"[]", b'"x"', b"5", b"null", b"{"])
    async def test_other_wrong_bodies_are_a_400(self, rig, body):
        status, found, _ = await call(rig, "POST", BASE + "/keys", data=body)
        assert (status, found["type"]) == (400, "invalid_request_error")
        assert found["message"].startswith('the body must be {"session"?: "…"|null, "harness"?: "…", ')

    async def test_an_invalid_member_is_named_without_the_others(self, rig):
        for path, body, words in (
            ("/keys", {"session": 5}, '`session` must be "…"|null: Expected `str | null`, got `int`'),
            ("/keys", {"history": "maybe"}, '`history` must be "follow"|"supply"|"": Invalid enum value'),
            ("/keys", {"budget": {"calls": -1}}, "`budget` must be {"),
            ("/keys", {"budget": {"calls": -1}}, "Expected `int` >= 0 (`budget.calls`)"),
            ("/queue/take", {"consumer": "c", "group_size": 4, "min_group": 6, "group_timeout": 5}, "`min_group` 6 is larger than"),
        ):
            status, found, _ = await call(rig, "POST", BASE + path, json=body)
            message = found["message"]
            assert (status, found["param"]) in {(400, next(iter(body))), (422, None)}
            assert (words in message, '"tenant"' in message, '"consumer"' in message) == (True, False, False), message
        assert "the body must be {" in (await error(rig, "POST", BASE + "/queue/take", json={}))[0]

    def test_members_are_found_at_any_depth(self):
        class Inner(msgspec.Struct):
            a: int = 0

        class Outer(msgspec.Struct):
            one: Inner | None = None
            some: list[Inner] = []
            named: dict[str, Inner] = {}
            free: dict[str, object] = {}

        given = {"one": {"b": 1}, "some": [{}, {"c": 1}], "named": {"x": {"d": 1}}, "free": {"e": {"f": 1}}}
        found = [unknown.path + unknown.name for unknown in _unknown_members(given, inspect.type_info(Outer))]
        assert found == ["one.b", "some.1.c", "named.x.d"]

    async def test_the_client_raises_refused_error(self, rig):
        async with AsyncClient(rig.url) as client:
            access = await client.create("s", sampling={"seed": 5})  # what the client writes is known
            assert access.key
        status, body = 422, b'{"error": {"message": "unknown members", "type": "invalid_request_error"}}'
        refused = error_of(status, body, "POST keys")
        assert (type(refused), refused.status) == (RefusedError, 422)


class TestQueryParameters:
    @pytest.mark.parametrize(
        ("method", "path", "param", "nearest"),
        [
            ("GET", "/sessions/s-1/trajectories?fromat=verl", "fromat", "format"),
            ("GET", "/sessions/s-1/trajectories?Format=verl", "Format", "format"),
            ("DELETE", "/sessions/s-1?re-use=true", "re-use", "reuse"),
            ("DELETE", "/engines?url=http://x&forced=true", "forced", "force"),
            ("GET", "/summaries?contain=s", "contain", "contains"),
        ],
    )
    async def test_a_misspelled_parameter_is_refused(self, rig, method, path, param, nearest):
        await rig.say(SESSION, [user("hi")])
        message, blamed = await error(rig, method, BASE + path)
        assert (message, blamed) == (f"unknown query parameter {param!r}: did you mean {nearest!r}?", param)
        assert await rig.get(f"{BASE}/sessions/{SESSION}")

    @pytest.mark.parametrize("path", ["/sessions?run=r", "/sessions?incident=late-call", "/queue?group=g"])
    async def test_a_parameter_of_another_route_is_refused(self, rig, path):
        """Otherwise a filter that does nothing selects everything."""
        name = path.partition("?")[2].partition("=")[0]
        message, blamed = await error(rig, "GET", BASE + path)
        assert (f"unknown query parameter {name!r}: this route does not have it; it has " in message, blamed) == (True, name)

    @pytest.mark.parametrize("query", ["_=1700000000", "ts=5", "v=2", "utm_source=x", "=", "nocache"])
    async def test_parameters_of_other_tools_are_ignored(self, rig, query):
        await rig.say(SESSION, [user("hi")])
        for operation in (
            one for one in OPERATIONS if one.method == "GET" and one.path.count("{") <= 1 and one.id not in {"getTexts", "compareGroup"}
        ):
            assert (await call(rig, "GET", f"{operation.path.format(**NAMES)}?{query}"))[0] == 200


def own_routes():
    """The paths of our own routes, each with its methods. Routes that relay take every method."""
    found = {}
    for route in Proxy(Settings()).application().router.routes():
        if route.method != "*":
            found.setdefault(route.resource.canonical, set()).add(route.method)
    return found


class TestWrongMethods:
    def test_no_route_is_left_out(self):
        assert {"/healthz", "/readyz", "/metrics", "/tokencache/ui/", *(operation.path for operation in OPERATIONS)} <= set(own_routes())

    @pytest.mark.parametrize(("path", "allowed"), some(own_routes().items(), 16))
    async def test_they_are_a_405_that_names_the_methods(self, rig, path, allowed):
        """The message is ours: the engine's 405 has no `error`, so nothing is relayed."""
        for method in sorted(set(METHODS) - allowed):
            url = path.format(**NAMES)
            status, found, headers = await call(rig, method, url, data=b'{"a": 1}')
            assert (status, headers["Allow"]) == (405, ", ".join(sorted(allowed))), method
            assert headers["Content-Type"] == "application/json"
            if method != "HEAD":
                words = f"{method} {url}: this route has only {headers['Allow']}"
                assert (found["message"], found["type"]) == (words, "invalid_request_error")

    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [("PUT", "/sessions/s", "DELETE, GET, HEAD, PATCH"), ("GET", "/keys", "POST"), ("PATCH", "/engines", "DELETE, GET, HEAD, POST")],
    )
    async def test_all_methods_of_a_path_are_named(self, rig, method, path, allowed):
        assert (await call(rig, method, BASE + path))[2]["Allow"] == allowed

    async def test_an_unknown_path_is_a_404(self, rig):
        for method in ("GET", "PUT"):
            status, found, headers = await call(rig, method, BASE + "/nope")
            assert (status, found["type"], "Allow" in headers) == (404, "not_found_error", False)

    async def test_the_key_is_checked_first(self):
        async with proxied(admin_key=ADMIN) as rig:
            for path in ("/metrics", BASE + "/sessions", BASE + "/keys", BASE + "/sessions/s"):
                assert (await call(rig, "PUT", path))[0] == 401
                assert (await call(rig, "PUT", path, headers={"Authorization": f"Bearer {ADMIN}"}))[0] == 405
            for path in ("/healthz", "/readyz"):
                assert (await call(rig, "PUT", path))[0] == 405
            assert (await call(rig, "POST", BASE + "/keys", json={"samplng": 1}))[0] == 401

"""The OpenAPI document: it is valid, lists exactly the routes that are registered, and describes the answers that they give."""

import re

import jsonschema
import openapi_spec_validator

from tests.media import RED, put
from tests.proxy.kit import proxied, user
from tokencache.api.openapi import BASE, OPERATIONS, document
from tokencache.config import Settings
from tokencache.server.app import Proxy

DOCUMENT = document()
LAST = ("finishSession", "sealSession", "takeDeliveries", "deleteSession")
"""Operations that change the session, in this order."""
SESSION = "s-1"


def documented():
    return {(method.upper(), path) for path, operations in DOCUMENT["paths"].items() for method in operations}


def test_the_document_is_valid_openapi():
    assert DOCUMENT["openapi"].startswith("3.1.")
    openapi_spec_validator.validate(DOCUMENT)


def test_it_lists_the_registered_routes_and_no_others():
    app = Proxy(Settings()).application()
    registered = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource.canonical.startswith(BASE)}
    assert {(method, path) for method, path in registered if method not in {"HEAD", "*"}} == documented()


async def test_head_is_answered_wherever_get_is():
    async with proxied() as rig:
        await rig.say(SESSION, [user("hi")])
        paths = [operation.path for operation in OPERATIONS if operation.method == "GET" and operation.path.count("{") <= 1]
        for path in paths:
            async with rig.http.get(rig.url + path.format(session=SESSION)) as full, rig.http.head(full.url) as answer:
                assert (answer.status, answer.content_type) == (full.status, full.content_type)


def test_operations_have_unique_ids_and_summaries():
    assert len({operation.id for operation in OPERATIONS}) == len(OPERATIONS)
    assert all(re.fullmatch(r"[A-Z][^\n]*\.", operation.summary) for operation in OPERATIONS)


def schema_of(operation, status):
    content = DOCUMENT["paths"][operation.path][operation.method.lower()]["responses"][str(status)]["content"]
    return {**content["application/json"]["schema"], "components": DOCUMENT["components"]}


async def test_answers_match_their_schemas():
    """A real session answers every operation; each answer is validated against the document."""
    async with proxied() as rig:
        await rig.say(SESSION, [user("hi")])
        (sha256,) = await put(rig.store, SESSION, RED)
        turns = (await rig.get(f"{BASE}/sessions/{SESSION}/turns"))["turns"]
        key = {"session": "s-2", "harness": "hermes"}
        bodies = {
            "registerKey": key,
            "addEngine": {"url": rig.up},
            "drainEngine": {"url": rig.up},
            "createSession": {"session": "s-3", "group": "g"},
            "forkSession": {"turn": turns[0]["turn"], "session": "s-4"},
            "labelSession": {"tags": ["a"]},
            "scoreTurns": {"edits": [{"at": 0, "insert": [{"role": "user", "content": "Hint."}]}], "top": 1},
            "setReward": {"reward": 0.5, "turns": {turns[0]["turn"]: 1.0}},
            "finishSession": {"reward": 1.0},
            "awaitSessions": {"sessions": [SESSION, "none"]},
            "takeDeliveries": {"consumer": "c"},
            "setWeights": {"version": 7},
            "beginWeightUpdate": {"mode": "none", "owner": "trainer"},
            "finishWeightUpdate": {"version": 8},
            **{f"{name}Deliveries": {"deliveries": []} for name in ("acknowledge", "release", "extend")},
        }
        names = {
            "session": SESSION,
            "turn": turns[0]["turn"],
            "sequence": turns[0]["turn"],
            "key": "unknown",
            "update": "unknown",
            "sha256": sha256,
        }
        queries = {"compareGroup": {"group": "g"}, "removeEngine": {"url": rig.up}, "getTexts": {"turn": turns[0]["turn"], "ids": "1,2"}}
        statuses = {}
        for operation in sorted(OPERATIONS, key=lambda one: LAST.index(one.id) if one.id in LAST else -1):
            request = rig.http.request(
                operation.method,
                rig.url + operation.path.format(**names),
                json=bodies.get(operation.id),
                params=queries.get(operation.id),
            )
            async with request as answer:
                statuses[operation.id] = answer.status
                if operation.content_type == "application/json":
                    jsonschema.validate(await answer.json(), schema_of(operation, answer.status))
    refused = {name: status for name, status in statuses.items() if status not in {200, 201}}
    assert refused == {"revokeKey": 404, "removeEngine": 409, "finishWeightUpdate": 409, "cancelWeightUpdate": 409}

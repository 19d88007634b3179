"""Routes of the engine within a session: a sample is recorded, noted or refused, and no client is sent past the proxy."""

import asyncio
import contextlib
import json

import pytest
from aiohttp import web
from yarl import URL

from tests.engine.intermediary import Intermediary
from tests.proxy.kit import CHAT, EPISODES, HEADER, proxied, user
from tests.support.pairwise import each, some
from tests.support.waiting import until
from tokencache.engine.routes import LISTED
from tokencache.errors import UnexpectedAnswerError
from tokencache.store.base import StoreError
from tokencache.testing import Fault, SimulatedEngine

ASK = {"model": "sim", "messages": [user("EPISODE:talk")]}
SAMPLED = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "sampled"}, "token_ids": [7, 8, 9]}]}
SAMPLES = (
    *("/v1/chat/completions/batch", "/invocations", "/generative_scoring", "/v1/systemone", "/inference/v1/generate"),
    *("/cohere/v2/chat", "/v1/audio/transcriptions", "/generate", "/v2/chat", "/v1/chat%252Fcompletions", "/v1/score/../chat"),
)
"""Routes of vLLM 0.32 and of others that sample, or may."""
SPELLINGS = (
    *("/v1/chat/completions/", "/v1/chat%2Fcompletions", "/v1/chat%2fcompletions", "//v1/chat//completions", "/%761/chat/completions"),
    *("/v1/chat/completions//", "/v1/chat/completions%2F"),
)


class Answers(Intermediary):
    """Answers some requests itself: `answers` has (status, headers, body) by path, as it was sent."""

    def __init__(self, upstream, answers):
        super().__init__(upstream)
        self.answers, self.reached = answers, []

    async def _pass(self, request):
        path = request.raw_path.partition("?")[0]
        if (answer := self.answers.get(path)) is None:
            return await super()._pass(request)
        self.reached.append(path)
        status, headers, body = answer
        return web.Response(status=status, headers=headers, body=body)


class Silent(Intermediary):
    """Receives a call of `/invocations`, and closes its connection when `go` is set."""

    def __init__(self, upstream):
        super().__init__(upstream)
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def _pass(self, request):
        if request.path != "/invocations":
            return await super()._pass(request)
        self.reached.set()
        await self.go.wait()
        request.transport.abort()
        return web.Response()


@contextlib.asynccontextmanager
async def before_engine(answers, **settings):
    """A proxy, before it a box that gives these answers, and behind it the engine. Yields the rig and the box."""
    engine = SimulatedEngine(episodes=EPISODES, seed=7)
    async with engine.serve() as up:
        box = Answers(up, answers)
        async with box.serve() as upstream, proxied(SimulatedEngine(), upstream=upstream, **settings) as rig:
            yield rig, box, upstream


async def call(rig, path, body=ASK, *, session="s", method="POST"):
    """A call whose path is sent as it is written."""
    headers = {HEADER: session, "Content-Type": "application/json"}
    url = URL(rig.url + path, encoded=True)
    async with rig.http.request(method, url, headers=headers, data=json.dumps(body), allow_redirects=False) as answer:
        return answer.status, dict(answer.headers), await answer.text()


async def kinds(rig, session="s"):
    return [incident["kind"] for incident in (await rig.info(session))["incidents"]]


@pytest.mark.parametrize("path", SAMPLES)
async def test_what_samples_without_a_record_is_a_hole(path):
    async with before_engine({path: (200, {}, json.dumps(SAMPLED))}) as (rig, box, _):
        await rig.say("s", ASK["messages"])
        status, _, text = await call(rig, path)
        assert (status, json.loads(text)) == (200, SAMPLED)
        assert box.reached == [path]
        assert await kinds(rig) == ["unrecorded-route"]
        assert not (await rig.exported())["complete"]


@pytest.mark.parametrize("path", some(SAMPLES, 3))
async def test_it_is_refused_in_a_session_that_is_finished_or_has_a_budget(path):
    async with before_engine({path: (200, {}, json.dumps(SAMPLED))}) as (rig, box, _):
        await rig.say("s", ASK["messages"])
        await rig.post(None, "/tokencache/v1/sessions/s/finish")
        assert (await call(rig, path))[0] == 409
        await call(rig, "/tokencache/v1/sessions", {"session": "spent", "budget": {"calls": 1}})
        await rig.say("spent", ASK["messages"])
        assert (await call(rig, path, session="spent"))[0] == 400
        assert box.reached == []
        assert (await rig.exported())["complete"]
        assert (await rig.exported("spent"))["complete"]


@pytest.mark.parametrize("status", [400, 404, 405, 422])
async def test_what_the_engine_refuses_is_no_hole(status):
    async with before_engine({"/invocations": (status, {}, "{}")}) as (rig, _, _):
        await rig.say("s", ASK["messages"])
        assert (await call(rig, "/invocations"))[0] == status
        assert (await rig.info())["incidents"] == []


@pytest.mark.parametrize("leaves", [False, True])
async def test_an_engine_that_gives_no_answer_may_have_sampled(leaves):
    """It closes the connection, or the client leaves before it has answered."""
    engine = SimulatedEngine(episodes=EPISODES, seed=7)
    async with engine.serve() as up:
        box = Silent(up)
        async with box.serve() as upstream, proxied(SimulatedEngine(), upstream=upstream) as rig:
            await rig.say("s", ASK["messages"])
            waiting = asyncio.create_task(call(rig, "/invocations"))
            await box.reached.wait()
            if leaves:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            else:
                box.go.set()
                assert (await waiting)[0] == 502

            async def noted():
                return await kinds(rig)

            with contextlib.ExitStack() as ends:
                ends.callback(box.go.set)  # the box waits for its requests
                assert await until(noted) == ["unrecorded-route"]
                assert not (await rig.exported())["complete"]


async def test_an_engine_that_is_not_reached_is_a_failure_if_the_harness_gives_up():
    async with SimulatedEngine(episodes=EPISODES, seed=7).serve() as up, contextlib.AsyncExitStack() as box:
        upstream = await box.enter_async_context(Answers(up, {}).serve())
        async with proxied(SimulatedEngine(), upstream=upstream) as rig:
            await rig.say("s", ASK["messages"])
            await box.aclose()
            assert (await call(rig, "/invocations"))[0] == 502
            assert await kinds(rig) == ["upstream-down"]
            assert ((await rig.info())["complete"], (await rig.info())["outcome"]) == (True, "engine")


async def test_the_incident_is_stored_before_the_client_has_the_answer():
    """A store that fails, with the strict policy, leaves the client without the sampled tokens."""
    async with before_engine({"/invocations": (200, {}, json.dumps(SAMPLED))}, on_store_error="fail") as (rig, _, _):
        await rig.say("s", ASK["messages"])

        async def fail(*_, **__):
            raise StoreError("no")

        rig.store.add_incidents = fail
        status, _, text = await call(rig, "/invocations")
        assert status == 503
        assert "sampled" not in text


@pytest.mark.parametrize("path", some(SPELLINGS, 3))
async def test_another_spelling_of_a_route_is_the_route(path):
    async with before_engine({}) as (rig, _, _):
        status, _, text = await call(rig, path)
        assert status == 200, text
        assert [turn["match"] for turn in await rig.turns()] == ["root"]
        assert (await rig.exported())["complete"]


@pytest.mark.parametrize(
    "path", ["/v1/messages/", "/v1%2Fmessages", "/v1/responses/", "/v1beta/models/sim:generateContent/", "/v1/completions/"]
)
async def test_in_every_dialect(path):
    bodies = {
        "messages": {**ASK, "max_tokens": 50},
        "responses": {"model": "sim", "input": "EPISODE:talk"},
        "generateContent": {"contents": [{"role": "user", "parts": [{"text": "EPISODE:talk"}]}]},
        "completions": {"model": "sim", "prompt": "EPISODE:talk"},
    }
    body = next(body for name, body in bodies.items() if name in path)
    async with before_engine({}) as (rig, _, _):
        status, _, text = await call(rig, path, body)
        assert status == 200, text
        assert len(await rig.turns()) == 1


@pytest.mark.parametrize("path", ["/v1/models/", "/health/", "/version", "/v1%2Fmodels"])
async def test_what_samples_nothing_is_relayed(path):
    async with before_engine({}) as (rig, _, _):
        await rig.say("s", ASK["messages"])
        assert (await call(rig, path, method="GET"))[0] == 200
        assert (await rig.info())["incidents"] == []


async def test_a_browser_may_ask_what_it_may_send():
    async with before_engine({"/other": (200, {}, "")}) as (rig, box, _):
        await rig.say("s", ASK["messages"])
        for path in (CHAT, "/other"):
            await call(rig, path, method="OPTIONS")
        assert box.reached == ["/other"]
        assert (await rig.info())["incidents"] == []


def test_no_route_that_samples_is_listed_as_one_that_does_not():
    assert not {("POST", path) for path in (*SAMPLES, CHAT, "/v1/completions", "/v1/messages", "/v1/responses")} & LISTED


REDIRECTS = [101, 301, 302, 303, 304, 307, 308]
UNKNOWN = [600, 999]
OTHER_SUCCESSES = [201, 204, 206]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *each([CHAT, "/v1/messages"], [*REDIRECTS, *OTHER_SUCCESSES, *UNKNOWN]),
        *some([("/v1/models", status) for status in REDIRECTS], 1),
    ],
)
async def test_an_answer_that_is_no_reply_and_no_error(path, status):
    answers = {}
    async with before_engine(answers) as (rig, _, upstream):
        await rig.say("s", ASK["messages"])
        relayed = path == "/v1/models"
        answers[path if relayed else CHAT] = (status, {"Location": f"{upstream}{CHAT}"}, b"" if status == 204 else b"see there")
        answered, headers, text = await call(rig, path, {**ASK, "max_tokens": 9}, method="GET" if relayed else "POST")
        assert answered == 502
        assert "Location" not in headers
        assert upstream.removeprefix("http://") not in text
        assert json.loads(text)["error"]["message"] == UnexpectedAnswerError(status).client_message
        assert ("which is a success" in text) == (status in OTHER_SUCCESSES)
        assert (await rig.exported())["complete"] == (status not in {201, 206})  # their body may hold sampled tokens


@pytest.mark.parametrize(("path", "route"), [(CHAT, CHAT), ("/v1/messages", CHAT), ("/invocations", "/invocations")])
@pytest.mark.parametrize("status", [400, 429, 500, 502])
@pytest.mark.parametrize("kind", ["application/json", "text/html", "text/plain"])
async def test_an_error_does_not_name_the_engines_address(path, route, status, kind):
    answers = {}
    async with before_engine(answers) as (rig, _, upstream):
        host = upstream.removeprefix("http://")
        said = f"<p>{upstream} and {host} are down</p>" if kind == "text/html" else f"{upstream} and {host} are down"
        said = json.dumps({"error": {"message": said, "code": status}}) if kind == "application/json" else said
        answers[route] = (status, {"Content-Type": kind, "Location": f"{upstream}/x?a=b", "X-Served-By": host}, said)
        answered, headers, text = await call(rig, path, {**ASK, "max_tokens": 9})
        assert answered == status
        assert not [value for value in (text, *headers.values()) if host in value]
        assert headers.get("Location", "/x?a=b") == "/x?a=b"
        assert ("engine and engine are down" in text) or kind == "text/html"


@pytest.mark.parametrize("after", [0, 3])
async def test_an_error_in_a_stream_does_not_either(after):
    engine = SimulatedEngine(episodes=EPISODES, seed=7)
    async with proxied(engine) as rig:
        host = rig.up.removeprefix("http://")
        engine.faults.append(Fault.error_event(after, f"{rig.up}/v1 and {host} are down"))
        _, chunks = await rig.post("s", messages=ASK["messages"], stream=True)
        assert chunks[-1]["error"]["message"] == "/v1 and engine are down"


@pytest.mark.parametrize("status", [301, 307])
async def test_without_a_session_a_redirect_leads_to_the_proxy(status):
    answers = {}
    async with before_engine(answers) as (rig, _, upstream):
        for location, seen in ((f"{upstream}/v1/x?a=b", "/v1/x?a=b"), ("/v1/x", "/v1/x"), ("http://other:1/x", "http://other:1/x")):
            answers["/v1/x/"] = (status, {"Location": location}, b"")
            async with rig.http.get(rig.url + "/v1/x/", allow_redirects=False) as answer:
                assert (answer.status, answer.headers["Location"]) == (status, seen)

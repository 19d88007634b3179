"""A sealed session: every dialect says so in its own words, and the trainer hears who came late."""

import asyncio
import json

import anthropic
import openai
import pytest
from google import genai
from google.genai import errors as gemini_errors

from tests.proxy.kit import CHAT, HEADER, events, proxied, user
from tokencache.proxy.ledger import ONE_BY_ONE

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

API = "/tokencache/v1"
SAY = "EPISODE:talk"
GEMINI = {"contents": [{"role": "user", "parts": [{"text": SAY}]}]}
CALLS = {
    "chat": (CHAT, {"messages": [user(SAY)]}),
    "messages": ("/v1/messages", {"model": "sim", "messages": [user(SAY)], "max_tokens": 50}),
    "responses": ("/v1/responses", {"model": "sim", "input": SAY}),
    "gemini": ("/v1beta/models/sim:generateContent", GEMINI),
    "completions": ("/v1/completions", {"model": "sim", "prompt": SAY}),
}
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def sealed(rig, session="s"):
    """A session with one turn, sealed."""
    await rig.say(session, [user(SAY)])
    for step in ("finish", "seal"):
        async with rig.http.post(f"{rig.url}{API}/sessions/{session}/{step}") as answer:
            assert answer.status == 200


async def late(rig, session="s"):
    return [incident for incident in (await rig.info(session))["incidents"] if incident["kind"] == "late-call"]


def error_of(dialect, said):
    """Status and words of an error's body, read as the dialect has it."""
    match dialect:
        case "messages":
            assert said["type"] == "error"
            return said["error"]["type"], said["error"]["message"]
        case "gemini":
            return said["error"]["code"], said["error"]["message"]
        case _:
            return said["error"]["type"], said["error"]["message"]


@STREAMS
@pytest.mark.parametrize("dialect", CALLS)
async def test_it_is_refused_in_the_dialects_words_and_noted(rig, dialect, stream):
    await sealed(rig)
    path, body = CALLS[dialect]
    if dialect == "gemini":
        path = path.replace(":generateContent", ":streamGenerateContent?alt=sse") if stream else path
    else:
        body = {**body, "stream": stream}
    asked = len(rig.engine.requests), len(rig.engine.completions)
    status, said = await rig.post("s", path, **body)
    assert status == 409
    _, words = error_of(dialect, said)
    assert words == "session s is sealed and accepts no more calls"
    assert (len(rig.engine.requests), len(rig.engine.completions)) == asked  # nothing was sampled
    (incident,) = await late(rig)
    assert (incident["hole"], incident["at"] > 0) == (False, True)
    assert incident["detail"].startswith(f"{dialect}, /v1")
    exported = await rig.check()
    assert (exported["complete"], exported["sealed"], len(exported["sequences"])) == (True, True, 1)


@STREAMS
async def test_openais_sdk(rig, stream):
    await sealed(rig)
    async with openai.AsyncOpenAI(base_url=f"{rig.url}/s/s/v1", api_key="none") as client:
        with pytest.raises(openai.ConflictError, match="is sealed"):
            await client.chat.completions.create(model="sim", messages=[user(SAY)], stream=stream)
        with pytest.raises(openai.ConflictError, match="is sealed"):
            await client.responses.create(model="sim", input=SAY, stream=stream)
    assert len(await late(rig)) == 2  # it does not try again


@STREAMS
async def test_anthropics_sdk(rig, stream):
    await sealed(rig)
    async with anthropic.AsyncAnthropic(base_url=f"{rig.url}/s/s", api_key="none") as client:
        with pytest.raises(anthropic.ConflictError, match="is sealed"):
            await client.messages.create(model="sim", max_tokens=50, messages=[user(SAY)], stream=stream)
    assert len(await late(rig)) == 1


async def heard_by_gemini(models, *, stream):
    if not stream:
        return [await models.generate_content(model="sim", contents=SAY)]
    return [chunk async for chunk in await models.generate_content_stream(model="sim", contents=SAY)]


@STREAMS
async def test_geminis_sdk(rig, stream):
    await sealed(rig)
    client = genai.Client(api_key="none", http_options={"base_url": f"{rig.url}/s/s"})
    try:
        with pytest.raises(gemini_errors.ClientError, match="is sealed") as caught:
            await heard_by_gemini(client.aio.models, stream=stream)
        assert caught.value.code == 409
    finally:
        await client.aio.aclose()
    assert len(await late(rig)) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "sim", "prompt": SAY, "echo": True}),
        ("/inference/v1/generate", {"model": "sim", "token_ids": [1, 2], "sampling_params": {}}),
    ],
)
async def test_what_is_only_relayed_is_refused_too(rig, path, body):
    await sealed(rig)
    status, said = await rig.post("s", path, **body)
    assert (status, said["error"]["type"]) == (409, "session_sealed")
    assert not rig.engine.completions
    assert [path in incident["detail"] for incident in await late(rig)] == [True]
    assert (await rig.exported())["complete"]


async def test_a_harness_that_tries_for_ever_does_not_fill_the_record(rig):
    await sealed(rig)
    for _ in range(100):
        assert (await rig.post("s", messages=[user(SAY)]))[0] == 409
    found = await late(rig)
    assert len(found) == ONE_BY_ONE + 2
    assert [incident["detail"].rpartition(" ")[2] for incident in found[-3:]] == ["16", "32", "64"]


async def test_a_call_that_was_open_still_ends(rig):
    rig.engine.token_delay = 0.001
    probed = len(rig.engine.requests)
    call = asyncio.create_task(rig.post("s", messages=[user(SAY)], stream=True))
    await rig.engine.until(lambda: len(rig.engine.requests) > probed)
    async with rig.http.post(f"{rig.url}{API}/sessions/s/finish") as answer:
        assert answer.status == 200
    assert not (await rig.exported())["complete"]  # it is under way
    status, _ = await call
    assert status == 200
    exported = await rig.check()
    assert (exported["complete"], exported["state"], len(exported["sequences"])) == (True, "finished", 1)
    assert await late(rig) == []


async def test_a_stream_that_has_begun_ends_with_an_error():
    """A slow store says only after the first keep-alive event that the session is sealed: the error is then an event."""
    async with proxied(keep_alive=0.01) as rig:
        await sealed(rig)
        begin, go = rig.store.begin, asyncio.Event()

        async def slow(*args, **more):
            await go.wait()
            return await begin(*args, **more)

        rig.store.begin = slow
        body = {"model": "sim", "messages": [user(SAY)], "stream": True}
        async with rig.http.post(rig.url + CHAT, json=body, headers={HEADER: "s"}) as answer:
            assert await answer.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            go.set()
            *_, error, end = [event for event in events(await answer.text()) if event.startswith(("{", "["))]
        assert (json.loads(error)["error"]["code"], json.loads(error)["error"]["type"], end) == (503, "store_error", "[DONE]")
        assert len(await late(rig)) == 1


async def test_a_session_of_the_same_name_begins_again():
    async with proxied() as rig:
        await sealed(rig)
        await rig.post("s", messages=[user(SAY)])
        async with rig.http.delete(f"{rig.url}{API}/sessions/s?reuse=true") as answer:
            assert answer.status == 200
        await rig.say("s", [user(SAY)])
        assert await late(rig) == []
        assert json.dumps(await rig.exported()).count("late-call") == 0

"""A call that is refused before it begins leaves an incident.

If the refusal is no fault of its request and the harness gives up, the rollout has failed; a retry that is answered makes up for it.
"""

import asyncio
import contextlib
import re
import time

import aiohttp
import msgspec
import pytest

from tests.proxy.kit import CHAT, HEADER, proxied, user
from tests.support.waiting import PATIENCE, until
from tokencache.core.outcome import MAX_DETAIL
from tokencache.proxy import request_body
from tokencache.request_memory import Owner
from tokencache.store.base import StoreError

ASK = {"model": "sim", "input": "EPISODE:talk"}


async def ask(rig, **more):
    async with rig.http.post(f"{rig.url}/v1/responses", json={**ASK, **more}, headers={HEADER: "s"}) as answer:
        return answer.status, await answer.json()


async def outcome(rig):
    info = await rig.info()
    return info["outcome"], info["complete"], [incident["kind"] for incident in info["incidents"]]


@contextlib.contextmanager
def full_memory(rig):
    most, rig.proxy.request_memory.most = rig.proxy.request_memory.most, 0
    yield
    rig.proxy.request_memory.most = most


@contextlib.contextmanager
def full_share(rig):
    """Of the session's requests."""
    memory, owner = rig.proxy.request_memory, Owner("s")
    memory.add(owner, "body", memory.share(owner))
    yield
    memory.remove(owner, "body", memory.share(owner))


@contextlib.contextmanager
def drained(rig):
    rig.proxy.pool.drain(rig.up)
    yield
    rig.proxy.pool.monitors[0].draining = False


@contextlib.contextmanager
def unreadable_documents(rig):
    async def documents(*_):
        raise StoreError("it is broken")

    read, rig.store.documents = rig.store.documents, documents
    yield
    rig.store.documents = read


REFUSALS = {
    full_memory: ("engine", "request-not-read"),
    full_share: ("engine", "request-not-read"),
    drained: ("engine", "upstream-down"),
    unreadable_documents: ("store", "store-error"),
}


@pytest.mark.parametrize("more", [{}, {"session_from": ["body:session"]}])
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.__name__)
async def test_a_harness_that_gave_up_after_a_refusal_has_failed(refusal, more):
    async with proxied(**more) as rig:
        _, first = await ask(rig)
        kind, incident = REFUSALS[refusal]
        again = {"previous_response_id": first["id"], "input": "go on"}
        assert await outcome(rig) == ("ok", True, [])
        with refusal(rig):
            assert (await ask(rig, **again))[0] == 503
        assert await outcome(rig) == (kind, True, [incident])
        assert (await ask(rig, **again))[0] == 200
        assert await outcome(rig) == ("ok", True, [incident])


@contextlib.asynccontextmanager
async def stopping(rig, monkeypatch):
    """Begin to send a call. In the end its time is over, and it is refused."""
    begun, stops = asyncio.Event(), asyncio.Event()

    async def body():
        yield b"{"
        begun.set()
        await stops.wait()

    loop, running = asyncio.get_running_loop(), time.monotonic
    monkeypatch.setattr(request_body, "LATE_SECONDS", PATIENCE)
    async with aiohttp.ClientSession() as http:
        sent = asyncio.create_task(http.post(f"{rig.url}/v1/responses", data=body(), headers={HEADER: "s"}))
        await begun.wait()
        await until(lambda: rig.proxy.request_memory.total)
        yield
        monkeypatch.setattr(loop, "time", lambda: running() + request_body.PIECE_SECONDS)
        assert (await sent).status == 408
        stops.set()


@pytest.mark.parametrize("more", [{}, {"session_from": ["body:session"]}])
async def test_a_harness_whose_body_stopped_has_failed_until_it_asks_again(monkeypatch, more):
    async with proxied(**more) as rig:
        await ask(rig)
        async with stopping(rig, monkeypatch):
            pass
        assert await outcome(rig) == ("harness", True, ["client-gone"])
        await ask(rig)
        assert await outcome(rig) == ("ok", True, ["client-gone"])


async def test_a_body_that_stopped_before_the_last_call_began_is_no_failure(monkeypatch):
    """The call may have been made again meanwhile, on another connection."""
    async with proxied() as rig:
        async with stopping(rig, monkeypatch):
            await ask(rig)
        assert await outcome(rig) == ("ok", True, ["client-gone"])


@pytest.mark.parametrize(
    "path", ["/v1/responses/input_tokens", "/v1/messages/count_tokens", "/v1beta/models/sim:countTokens", "/v1/responses/r/cancel"]
)
async def test_what_is_refused_and_samples_nothing_is_no_failure(path):
    async with proxied() as rig:
        await ask(rig)
        with full_memory(rig):
            async with rig.http.post(f"{rig.url}{path}", json=ASK, headers={HEADER: "s"}) as answer:
                assert answer.status == 503
        assert await outcome(rig) == ("ok", True, [])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": "other", "messages": [user("hi")]}, r"the engine answered 404: The model `other` does not exist\.[^{}]*"),
        ({"model": "sim", "messages": []}, r"/tokenize answered 400: Cannot apply chat template to an empty conversation\.[^{}]*"),
    ],
)
async def test_a_refused_token_count_has_the_engines_words(asked, words):
    async with proxied() as rig, rig.http.post(f"{rig.url}/v1/messages/count_tokens", json=asked, headers={HEADER: "s"}) as answer:
        said = (await answer.json())["error"]["message"]
    assert re.fullmatch(words, said), said


async def test_a_refused_call_that_is_repeated_is_noted_once_since_the_last_turn():
    """A client may repeat it endlessly, and the list of incidents must not grow with every call."""
    async with proxied() as rig:
        for turns in (1, 2):
            await ask(rig)
            with full_memory(rig):
                assert {(await ask(rig))[0] for _ in range(20)} == {503}
            assert await outcome(rig) == ("engine", True, ["request-not-read"] * turns)


async def test_a_refusal_after_the_end_changes_nothing():
    async with proxied() as rig:
        await rig.say("s", [user("EPISODE:talk")])
        async with rig.http.post(f"{rig.url}/tokencache/v1/sessions/s/finish", json={}) as answer:
            assert answer.status == 200
        with full_memory(rig):
            assert (await ask(rig))[0] == 503
        assert await outcome(rig) == ("ok", True, [])


@pytest.mark.parametrize("strict", [False, True])
async def test_a_refusal_is_noted_when_the_store_answers_again(monkeypatch, strict):
    monkeypatch.setattr("tokencache.proxy.ledger.RETRY_SECONDS", 0.005)
    async with proxied(on_store_error="fail" if strict else "relay") as rig:
        await ask(rig)
        session = rig.store.session

        async def broken(_):
            raise StoreError("it is broken")

        rig.store.session = broken
        with full_memory(rig):
            assert (await ask(rig))[0] == 503
        rig.store.session = session
        await rig.proxy.ledger.settled()
        assert await outcome(rig) == ("engine", True, ["request-not-read"])


async def leave_while_read(rig, monkeypatch, **more):
    """Make a call whose client leaves while the earlier response is read."""
    reached, ended = asyncio.Event(), asyncio.Event()

    async def documents(*_):
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with monkeypatch.context() as patched:
        patched.setattr(rig.store, "documents", documents)
        call = asyncio.create_task(ask(rig, **more))
        await reached.wait()
        call.cancel()
        await ended.wait()


async def test_a_client_that_leaves_before_its_call_begins_has_given_up(monkeypatch):
    async with proxied() as rig:
        more = {"previous_response_id": (await ask(rig))[1]["id"]}
        await leave_while_read(rig, monkeypatch, **more)
        assert await outcome(rig) == ("harness", True, ["client-gone"])
        assert (await ask(rig, **more))[0] == 200
        assert await outcome(rig) == ("ok", True, ["client-gone"])
        await leave_while_read(rig, monkeypatch, **more)  # the network may deliver a call after its retry
        assert await outcome(rig) == ("ok", True, ["client-gone"])


PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
OF_THE_REQUEST = {
    "not JSON": (CHAT, b"{", 400),
    "no message": (CHAT, b'{"model": "sim", "messages": [1]}', 400),
    "a long word": ("/v1/responses", msgspec.json.encode({"model": "sim", "input": [{"type": "x" * 50_000}]}), 400),
    "a file": ("/v1/responses", b'{"model": "sim", "input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}', 400),
    "a document": (
        "/v1/messages",
        msgspec.json.encode(
            {"model": "sim", "max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "document", "source": PDF}]}]}
        ),
        400,
    ),
    "a file's address": (
        "/v1beta/models/sim:generateContent",
        b'{"contents": [{"role": "user", "parts": [{"fileData": {"fileUri": "https://h/f"}}]}]}',
        400,
    ),
    "too long": (CHAT, b'{"model": "%s", "messages": []}' % bytes(100_000).replace(b"\0", b"m"), 413),
    "too many values": (CHAT, b'{"messages": [%s1]}' % (b"1," * 100), 413),
    "no such coding": (CHAT, b"{}", 415),
}


@pytest.mark.parametrize("more", [{}, {"session_from": ["body:session"]}])
@pytest.mark.parametrize("case", OF_THE_REQUEST)
async def test_a_call_that_is_refused_for_what_it_says_is_noted_and_no_failure(monkeypatch, case, more):
    """As one that the engine refuses: whoever reads the session sees that its harness did not get what it wanted."""
    monkeypatch.setattr(request_body, "MOST_VALUES", 50)
    monkeypatch.setattr(request_body, "_SMALL", 50)
    path, body, status = OF_THE_REQUEST[case]
    headers = {HEADER: "s", "Content-Type": "application/json"} | ({"Content-Encoding": "br"} if status == 415 else {})
    async with proxied(max_body=65_536, **more) as rig:
        await ask(rig)
        for _ in range(3):
            async with rig.http.post(f"{rig.url}{path}", data=body, headers=headers) as answer:
                assert answer.status == status, await answer.text()
        assert await outcome(rig) == ("ok", True, ["call-refused"])
        [incident] = (await rig.info())["incidents"]
        assert (incident["status"], incident["hole"]) == (status, False)
        assert 0 < len(incident["detail"]) <= MAX_DETAIL
        await rig.say("s", [user("EPISODE:talk")])
        assert await outcome(rig) == ("ok", True, ["call-refused"])


async def test_a_call_that_is_refused_when_its_prompt_is_known_is_noted():
    async with proxied() as rig:
        status, said = await rig.post(messages=[user("EPISODE:talk")], required_prefix_token_ids=[1])
        assert status == 400, said
        [incident] = (await rig.info())["incidents"]
        assert (incident["kind"], incident["status"], bool(incident["call"])) == ("call-refused", 400, True)


async def test_a_call_that_is_refused_again_and_again_when_its_prompt_is_known_is_noted_once_since_the_last_turn():
    """Whether a call had begun makes no difference: the list of incidents must not grow with every call."""
    async with proxied() as rig:
        for turns in (1, 2):
            await ask(rig)
            for _ in range(5):
                assert (await rig.post(messages=[user("EPISODE:talk")], required_prefix_token_ids=[1]))[0] == 400
                assert (await ask(rig, input=[{"type": "x"}]))[0] == 400
            assert await outcome(rig) == ("ok", True, ["call-refused"] * turns)

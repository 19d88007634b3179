"""A dialect from outside the package: one class for its routes, credentials, errors and requests, one for its replies, one registration.

POST /toy/ask    {"ask": "…", "model": "…", "stream": true|false}    →    {"say": "…"}    or lines of it, and a dot
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from tests.proxy.kit import proxied
from tokencache.dialects import json_io, registry
from tokencache.dialects.base import DialectRequest, DirectReply, ModelCall, ParsedRequest, ReplyEncoder, TokenCount, TranslatedDialect
from tokencache.dialects.completion_reader import read_completion

KEY = "X-Toy-Key"


class ToyReplyEncoder(ReplyEncoder):
    """Writes a reply as JSON, or a streamed one as lines of JSON and a dot."""

    def whole(self, data: bytes) -> bytes:
        completion = read_completion(data)
        assert completion is not None
        assert completion.choice is not None
        return msgspec.json.encode({"say": completion.choice.reply.content})

    def chunk(self, event: bytes, data: bytes, prompt_tokens: int) -> bytes:
        completion = read_completion(data)
        text = completion.choice.reply.content if completion is not None and completion.choice is not None else ""
        return msgspec.json.encode({"say": text}) + b"\n" if text else b""

    def end(self) -> bytes:
        return b".\n"

    def keep_alive(self) -> bytes:
        return b"\n"

    def error(self, status: int, message: str) -> bytes:
        return ToyDialect().error(status, message, "") + b"\n"


class ToyDialect(TranslatedDialect):
    name = "toy"
    credential_headers = (KEY,)
    credential_parameters = ("toy-key",)

    def matches(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        return method == "POST" and path.startswith("/toy/")

    async def parse(self, request: DialectRequest) -> ParsedRequest:
        fields = json_io.fields_of(request.body)
        question, model = (json_io.member(fields, name, (str,), "") for name in ("ask", "model"))
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "model": model}
        match request.path:
            case "/toy/ask":
                chat["stream"] = json_io.member(fields, "stream", (bool,), False)
                chat["use_beam_search"] = json_io.member(fields, "search", (bool,), False)
                return ModelCall(body=json_io.write(chat), encoder=ToyReplyEncoder(), media_type="text/plain")
            case "/toy/count":
                return TokenCount(body=json_io.write(chat), write=b"%d".__mod__)
            case _:
                return DirectReply(body=b'"toys are here"')

    def error(self, status: int, message: str, kind: str, param: str | None = None) -> bytes:
        return msgspec.json.encode({"oops": message, "status": status, "about": param})


@pytest.fixture
def toy() -> Iterator[ToyDialect]:
    dialect = ToyDialect()
    registry.register(dialect)
    yield dialect
    registry.unregister(dialect)


@pytest.fixture
async def rig(toy):
    async with proxied() as rig:
        yield rig


async def turns(rig, session="r1"):
    async with rig.http.get(f"{rig.url}/tokencache/v1/sessions/{session}/turns") as answer:
        return (await answer.json())["turns"]


async def asked(rig, path, body, **headers):
    async with rig.http.post(f"{rig.url}{path}", json=body, headers=headers) as answer:
        return answer.status, answer.headers["Content-Type"], await answer.read()


ASK = {"ask": "How are you?", "model": "sim"}


async def test_a_whole_reply_and_its_record(rig):
    status, kind, body = await asked(rig, "/s/r1/toy/ask", ASK)
    assert (status, kind.partition(";")[0]) == (200, "application/json")
    (turn,) = await turns(rig)
    assert turn["dialect"] == "toy"
    assert json.loads(body) == {"say": turn["served"]["content"]}
    assert json.loads(body)["say"]


async def test_a_streamed_reply(rig):
    status, kind, body = await asked(rig, "/s/r1/toy/ask", ASK | {"stream": True})
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    *lines, dot = body.decode().splitlines()
    (turn,) = await turns(rig)
    assert dot == "."
    assert "".join(json.loads(line)["say"] for line in lines) == turn["served"]["content"]


async def test_errors_have_its_shape(rig):
    assert await asked(rig, "/s/r1/toy/ask", {"ask": 5}) == (
        400,
        "application/json",
        b'{"oops":"\'ask\' must be of type str, not int","status":400,"about":"ask"}',
    )
    status, _, body = await asked(rig, "/s/r1/toy/ask", ASK | {"model": "none"})  # the engine's own error
    assert status == json.loads(body)["status"] == 404


async def test_a_search_is_refused(rig):
    """Its reply is no sample, and a relayed reply would be in chat's form."""
    status, _, body = await asked(rig, "/s/r1/toy/ask", ASK | {"search": True})
    assert (status, json.loads(body)["about"]) == (400, "use_beam_search")
    assert not any("use_beam_search" in request for request in rig.engine.requests)


async def test_what_needs_no_call(rig):
    status, _, body = await asked(rig, "/s/r1/toy/count", ASK)
    assert (status, int(body) > 0) == (200, True)
    assert (await asked(rig, "/s/r1/toy/shelf", {}))[2] == b'"toys are here"'


async def test_its_credentials_name_the_session(rig):
    assert (await asked(rig, "/toy/ask", ASK, **{KEY: "tcs-by-header"}))[0] == 200
    assert (await asked(rig, "/toy/ask?toy-key=tcs-by-query", ASK))[0] == 200
    for session in ("by-header", "by-query"):
        assert len(await turns(rig, session)) == 1
    assert not [headers for headers in rig.engine.headers if "tcs-" in str(headers)]


async def test_an_engine_s_own_key_reaches_it_as_a_bearer_token(rig):
    assert (await asked(rig, "/s/r1/toy/ask", ASK, **{KEY: "theirs"}))[0] == 200
    assert rig.engine.headers[-1]["Authorization"] == "Bearer theirs"
    assert KEY not in rig.engine.headers[-1]


async def test_two_of_its_credentials_are_refused(rig):
    async with rig.http.post(f"{rig.url}/toy/ask", json=ASK, headers=[(KEY, "tcs-a"), (KEY, "tcs-b")]) as answer:
        assert (answer.status, KEY in (await answer.json())["oops"]) == (400, True)


def test_it_has_a_name_for_adapters(toy):
    assert registry.dialect_names() == ["chat", "toy", "messages", "gemini", "responses", "completions"]


def test_without_it_the_route_is_the_engine_s(toy):
    assert registry.dialect_of("POST", "/toy/ask", {}) is toy
    registry.unregister(toy)
    assert registry.dialect_of("POST", "/toy/ask", {}) is None
    assert KEY not in registry.credential_headers()
    registry.register(toy)

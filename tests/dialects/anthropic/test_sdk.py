"""The official SDK reads what the Anthropic dialect writes: whole, and streams cut anywhere."""

import contextlib
import json

import anthropic
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.dialects.anthropic.kit import HANDLE, call, chunk, completion, streamed, usage
from tests.dialects.anthropic.test_reply import ROLE, STREAMS, WHOLES, finish, message_of
from tokencache.dialects.anthropic.reply import AnthropicReplyEncoder


@contextlib.asynccontextmanager
async def said(body: bytes, content_type: str, piece: int = 1 << 20):
    """A client of a server that gives this one answer, some bytes at a time."""

    async def answer(request):
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(request)
        for at in range(0, len(body), piece):
            await response.write(body[at : at + piece])
        return response

    app = web.Application()
    app.router.add_post("/v1/messages", answer)
    async with (
        TestServer(app) as server,
        anthropic.AsyncAnthropic(base_url=str(server.make_url("")), api_key="none", max_retries=0) as sdk,
    ):
        yield sdk


ASKED = {"model": "claude-x", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("beta", [False, True], ids=["stable", "beta"])
@pytest.mark.parametrize("piece", [1, 61, 1 << 20])
@pytest.mark.parametrize(
    "name",
    [
        *("thinking, text, call", "parallel calls", "text behind a call", "nothing", "cached", "a stop string"),
        "arguments that are no object",
    ],
)
async def test_streams_are_accumulated(name, piece, beta):
    async with said(streamed(STREAMS[name][0]), "text/event-stream", piece) as sdk:
        messages = sdk.beta.messages if beta else sdk.messages
        async with messages.stream(**ASKED) as stream:
            kinds = [event.type async for event in stream]
            final = (await stream.get_final_message()).model_dump(mode="json", exclude_unset=True)
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    if name in WHOLES:
        last = next(choice for data in reversed(STREAMS[name][0]) for choice in json.loads(data)["choices"])
        details = {"cached_tokens": 8} if name == "cached" else {}
        data = completion(message_of(WHOLES[name]), last["finish_reason"], last["stop_reason"], **details)
        async with said(AnthropicReplyEncoder("claude-x", HANDLE).whole(data), "application/json") as sdk:
            messages = sdk.beta.messages if beta else sdk.messages
            whole = (await messages.create(**ASKED)).model_dump(mode="json", exclude_unset=True)
        for absent in ("parsed_output", "stop_details", "container", "context_management"):
            final.pop(absent, None)
        for block in final["content"]:
            block.pop("parsed_output", None)
        assert final == whole


@pytest.mark.parametrize("name", sorted(STREAMS))
async def test_every_stream_is_read(name):
    async with said(streamed(STREAMS[name][0]), "text/event-stream") as sdk, sdk.messages.stream(**ASKED) as stream:
        final = await stream.get_final_message()
    assert [block.signature for block in final.content if block.type == "thinking"] == [HANDLE] * sum(
        b.type == "thinking" for b in final.content
    )
    if name == "parallel calls interleaved":
        assert [block.input for block in final.content] == [{"cmd": "ls  -la"}, {}]


@pytest.mark.parametrize("pieces", [["null"], ["n", "ull "], [" "], []])
async def test_null_and_blank_arguments_are_read_as_none(pieces):
    chunks = [ROLE, chunk(call(0, id="c1", name="bash")), *(chunk(call(0, piece)) for piece in pieces), finish("tool_calls"), usage()]
    async with said(streamed(chunks), "text/event-stream") as sdk, sdk.messages.stream(**ASKED) as stream:
        final = await stream.get_final_message()
    assert [(block.id, block.input) for block in final.content] == [("c1", {})]
    assert final.stop_reason == "tool_use"


async def test_an_error_within_a_stream_is_the_sdks_own():
    error = b'{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}'
    async with said(streamed([*STREAMS["text"][0][:2], error]), "text/event-stream") as sdk:
        with pytest.raises(anthropic.APIStatusError, match="Internal server error"):
            async with sdk.messages.stream(**ASKED) as stream:
                await stream.get_final_message()

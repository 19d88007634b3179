"""Faults: each happens to the intended request, and only to that one."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tokencache.testing import Fault, SimulatedEngine
from tokencache.testing.responses import refuse

ASK = {"model": "sim", "messages": [{"role": "user", "content": "EPISODE:demo"}]}


@pytest.fixture
async def engine():
    return SimulatedEngine(episodes={"demo": ["<think>\nwhy\n</think>\n\nHello there, this is it."]})


@pytest.fixture
async def chat(engine):
    async with engine.serve() as url, aiohttp.ClientSession() as session:
        yield lambda **body: session.post(f"{url}/v1/chat/completions", json={**ASK, **body})


async def test_a_status_and_body_before_anything(engine, chat):
    engine.faults.append(Fault.answer(503, '{"error": "overloaded"}'))
    async with chat() as response:
        assert (response.status, await response.json()) == (503, {"error": "overloaded"})
    assert not engine.ground_truth
    async with chat() as response:
        assert response.status == 200
    assert not engine.faults


async def test_none_lets_a_request_pass(engine, chat):
    engine.faults.extend([None, Fault.answer(500)])
    statuses = []
    for _ in range(3):
        async with chat() as response:
            statuses.append(response.status)
    assert statuses == [200, 500, 200]


async def test_a_hanging_request_ends_with_its_client(engine, chat):
    engine.faults.append(Fault.hang())
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(_read(chat()), 0.1)
    async with chat() as response:
        assert response.status == 200


async def test_stopping_the_engine_ends_a_hanging_request(engine):
    engine.faults.append(Fault.hang())
    async with aiohttp.ClientSession() as session:
        async with engine.serve() as url:
            hanging = asyncio.create_task(_read(session.post(f"{url}/v1/chat/completions", json=ASK)))
            await engine.until(lambda: engine.requests)
        with pytest.raises(aiohttp.ClientError):
            await hanging


async def test_truncated_json(engine, chat):
    engine.faults.append(Fault.truncated_json())
    async with chat() as response:
        assert response.status == 200
        with pytest.raises(json.JSONDecodeError):
            json.loads(await response.text())
    assert engine.ground_truth[0].finish_reason == "stop"


async def test_a_stream_cut_after_some_chunks(engine, chat):
    engine.faults.append(Fault.cut(after=3))
    async with chat(stream=True, return_token_ids=True) as response:
        text = await response.text()
    assert text.count("data: ") == 3
    assert "[DONE]" not in text
    assert engine.ground_truth[0].aborted
    assert engine.ground_truth[0].finish_reason == "abort"


async def test_an_error_event_within_a_stream(engine, chat):
    engine.faults.append(Fault.error_event(after=2, message="the worker died"))
    async with chat(stream=True, return_token_ids=True) as response:
        lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
    assert len(lines) == 4
    assert json.loads(lines[2]) == {"error": {"message": "the worker died", "type": "InternalServerError", "param": None, "code": 500}}
    assert lines[3] == "[DONE]"


@pytest.mark.parametrize("after", [0, 2])
async def test_a_closed_connection(engine, chat, after):
    engine.faults.append(Fault.close(after=after))
    with pytest.raises(aiohttp.ClientError):
        await _read(chat(stream=True, return_token_ids=True))
    assert len(engine.ground_truth) == (1 if after else 0)
    assert all(entry.aborted for entry in engine.ground_truth)


async def test_a_fault_chosen_by_the_request(engine, chat):
    engine.choose_fault = lambda route, body: Fault.answer(429) if body.get("max_tokens") == 7 else None
    async with chat(max_tokens=7) as response:
        assert response.status == 429
    async with chat() as response:
        assert response.status == 200


async def test_a_fault_waits_for_its_own_route(engine):
    engine.faults.append(Fault.answer(500, path="/tokenize"))
    async with engine.serve() as url, aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/chat/completions", json=ASK) as response:
            assert response.status == 200
        async with session.post(f"{url}/tokenize", json={"prompt": "hi"}) as response:
            assert response.status == 500
        async with session.post(f"{url}/tokenize", json={"prompt": "hi"}) as response:
            assert response.status == 200
    assert engine.tokenizations == [{"prompt": "hi"}, {"prompt": "hi"}]


async def _read(request):
    async with request as response:
        return await response.read()


async def test_a_client_that_left_is_no_error_in_the_log(caplog):
    """As at Ctrl-C in the demo: a reply is written to a connection that is closing."""

    async def late(request):
        response = web.StreamResponse()
        await response.prepare(request)
        request.transport.close()
        await response.write(b"data: {}")

    app = web.Application(middlewares=[refuse])
    app.router.add_get("/", late)
    async with TestServer(app) as server, aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientError):
            await (await client.get(server.make_url("/"))).read()
    assert not caplog.records

"""What requests hold in memory is limited, whatever ends them: of all together, and of each session or tenant."""

import asyncio
import contextlib
import gzip
import json
import random
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from tests.images import image
from tests.proxy.kit import CHAT, EPISODES, HEADER, proxied, user
from tests.proxy.raw import read_message
from tests.proxy.test_images import shown
from tests.support.waiting import PATIENCE, until
from tokencache import metrics
from tokencache.request_memory import Holding, Owner
from tokencache.testing import Fault, SimulatedEngine

ROUTES = ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/tokenize", "/v1beta/models/sim:generateContent"]
BODY, MOST = 20_000, 100_000
LIMITS = {"max_body": BODY, "request_memory": MOST}


class Stalled:
    """A client that announces a body, sends a part of it, and stops."""

    def __init__(self, rig):
        self.rig = rig
        self.reader = self.writer = None

    async def send(self, size, *, path=CHAT, session="s", key="", chunked=False):
        parts = urlsplit(self.rig.url)
        self.reader, self.writer = await asyncio.open_connection(parts.hostname, parts.port)
        named = f"Authorization: Bearer {key}" if key else f"{HEADER}: {session}"
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {BODY}"
        body = b" " * size
        self.writer.write(f"POST {path} HTTP/1.1\r\nHost: h\r\n{named}\r\n{length}\r\n\r\n".encode())
        self.writer.write(b"%x\r\n%s\r\n" % (size, body) if chunked else body)
        await self.writer.drain()
        return self

    async def answer(self):
        async with asyncio.timeout(PATIENCE):
            return await read_message(self.reader, answers="POST")

    async def leave(self):
        self.writer.close()
        await asyncio.gather(self.writer.wait_closed(), return_exceptions=True)


def shown_as_held():
    return metrics.REGISTRY.get_sample_value("tokencache_request_memory_bytes", {"what": "body"})


@contextlib.asynccontextmanager
async def limited(*args, **settings):
    """A proxy with small limits; in the end nothing is held."""
    async with proxied(*args, **{**LIMITS, **settings}) as rig:
        yield rig
        await until(lambda: not rig.proxy.request_memory.total, "nothing is held")
        assert not rig.proxy.request_memory._by_owner


@pytest.mark.parametrize("path", ROUTES)
async def test_a_body_counts_as_long_as_it_is_after_decompression(path):
    async with limited(max_body=2 * MOST, request_memory=2 * MOST) as rig:
        stalled = await Stalled(rig).send(BODY - 1, session="other")
        await until(lambda: rig.proxy.request_memory.total)
        headers = {HEADER: "s", "Content-Encoding": "gzip"}
        async with rig.http.post(rig.url + path, data=gzip.compress(b" " * (2 * MOST - 100)), headers=headers) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
        await stalled.leave()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_that_stop_hold_no_more_than_the_limit(path, chunked):
    before = shown_as_held()
    async with limited() as rig:
        held = [await Stalled(rig).send(BODY - 1, path=path, session=f"s{n}", chunked=chunked) for n in range(5)]
        await until(lambda: rig.proxy.request_memory.total == 5 * (BODY - 1))
        late = await Stalled(rig).send(BODY - 1, path=path, session="late", chunked=chunked)
        answer = await late.answer()
        assert (" 503 " in answer.line, answer.of("Retry-After")) == (True, ["5"])
        error = json.loads(answer.body)["error"]
        assert "--request-memory" in error["message"]
        assert ("status" in error) == ("v1beta" in path), "the error has the form of its dialect"
        assert shown_as_held() - before == 5 * (BODY - 1)
        for one in [*held, late]:
            await one.leave()
        await until(lambda: not rig.proxy.request_memory.total)
        await rig.say("late", [user("EPISODE:talk")])


async def test_one_session_leaves_half_to_the_others():
    async with limited() as rig:
        held = [await Stalled(rig).send(BODY - 1) for _ in range(3)]
        answers = [asyncio.create_task(one.answer()) for one in held]
        done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert [" 503 " in task.result().line for task in done] == [True]
        assert rig.proxy.request_memory.of(Owner("s")) <= MOST / 2
        await rig.say("other", [user("EPISODE:talk")])
        for one in held:
            await one.leave()
        await asyncio.gather(*answers, return_exceptions=True)


async def test_the_sessions_of_a_tenant_have_one_share(monkeypatch):
    """Also on a process that does not know their settings yet."""
    monkeypatch.setattr("tokencache.proxy.request_body._LARGE", 1000)
    async with limited() as rig:
        keys = []
        for n in range(3):
            asked = {"session": f"t{n}", "tenant": "acme"}
            async with rig.http.post(f"{rig.url}/tokencache/v1/keys", json=asked) as answer:
                keys.append((await answer.json())["key"])
        held = [await Stalled(rig).send(BODY - 1, key=key) for key in keys]
        answers = [asyncio.create_task(one.answer()) for one in held]
        done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert [" 503 " in task.result().line for task in done] == [True]
        assert rig.proxy.request_memory.of(Owner("acme", True)) == 2 * (BODY - 1)
        for one in held:
            await one.leave()
        await asyncio.gather(*answers, return_exceptions=True)


async def test_the_trainers_bodies_count_too():
    async with limited() as rig:
        held = await Stalled(rig).send(BODY - 1, path="/tokencache/v1/sessions")
        await until(lambda: rig.proxy.request_memory.total == BODY - 1)
        await held.leave()


@contextlib.asynccontextmanager
async def talkative(size):
    """An engine whose whole replies have `size` bytes."""

    async def answer(request):
        body = await request.json()
        if "Hello" not in json.dumps(body):
            return web.Response(status=404)  # the probe
        choice = {"index": 0, "message": {"role": "assistant", "content": "x" * size}, "finish_reason": "stop", "token_ids": [5, 6]}
        said = {"id": "c", "object": "chat.completion", "created": 1, "model": "sim", "choices": [choice], "prompt_token_ids": [1, 2]}
        return web.json_response({**said, "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}})

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_does_not_fit_is_missing_in_the_session_and_says_so(stream):
    async with talkative(MOST) as url, limited(upstream=url, whole_replies=stream) as rig:
        body = {"model": "sim", "messages": [user("Hello")], "stream": stream}
        async with rig.http.post(rig.url + CHAT, json=body, headers={HEADER: "s"}) as answer:
            said = await answer.json()
            assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
        assert "--request-memory" in said["error"]["message"]
        info = await rig.info()
        assert (info["complete"], [incident["kind"] for incident in info["incidents"]]) == (False, ["reply-not-read"])
        assert not info["open_calls"]


async def test_a_reply_that_fits_is_recorded():
    async with talkative(MOST // 4) as url, limited(upstream=url) as rig:
        status, _ = await rig.post("s", messages=[user("Hello")])
        assert (status, len(await rig.turns())) == (200, 1)


async def test_a_gathered_reply_that_does_not_fit_is_recorded_as_far_as_it_was_read():
    engine = SimulatedEngine(episodes={"long": ["word " * 400]}, seed=7, derenders=True)
    async with limited(engine) as rig:
        status, said = await rig.post("s", messages=[user("EPISODE:long")])
        assert (status, "--request-memory" in said["error"]["message"]) == (503, True)
        info = await rig.info()
        assert not info["complete"]
        assert "reply-not-read" in [incident["kind"] for incident in info["incidents"]]
        (turn,) = await rig.turns()
        assert turn["completion_tokens"] > 0


@pytest.mark.parametrize("linger", [60.0, 0.0])
async def test_a_call_without_its_client_still_holds_its_body(monkeypatch, linger):
    """Until it has ended: clients that leave at once must not fill the memory with orphans."""
    asked, goes_on = asyncio.Event(), asyncio.Event()
    async with limited(linger=linger) as rig:
        await rig.say("s", [user("EPISODE:demo")])
        await until(lambda: not rig.proxy.request_memory.total)
        send = rig.proxy.upstream.send

        async def slow_send(*more, **options):
            asked.set()
            await goes_on.wait()
            return await send(*more, **options)

        monkeypatch.setattr(rig.proxy.upstream, "send", slow_send)
        call = asyncio.create_task(rig.post("s", messages=[user("EPISODE:talk")]))
        await asked.wait()
        held = rig.proxy.request_memory.total
        assert held
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        if linger:
            await until(lambda: rig.proxy._calls._orphans)
            assert rig.proxy.request_memory.total == held
            goes_on.set()


async def one_request(rig, chance, number):
    """A request that ends in some way, and often by its client's."""
    session, body = f"s{number % 3}", {"model": "sim", "messages": [user("EPISODE:talk")], "stream": chance.random() < 0.5}
    match chance.choice(["stalls", "leaves", "reads", "reads", "refused", "relayed"]):
        case "stalls":
            one = await Stalled(rig).send(chance.randrange(BODY), session=session, chunked=chance.random() < 0.5)
            await asyncio.wait([asyncio.create_task(one.answer())], timeout=chance.choice([0, 0.01]))
            await one.leave()
        case "leaves":
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with (
                    asyncio.timeout(chance.choice([0.005, 0.02])),
                    rig.http.post(rig.url + CHAT, json=body, headers={HEADER: session}),
                ):
                    pass
        case "reads":
            async with rig.http.post(rig.url + CHAT, json=body, headers={HEADER: session}) as answer:
                with contextlib.suppress(aiohttp.ClientError):
                    await answer.read()
        case "refused":
            body = chance.choice(
                [b"{", b"[" * 10_000, b" " * (BODY + 1), json.dumps({**body, "messages": [shown("x", image(1))]}).encode()]
            )
            async with rig.http.post(rig.url + CHAT, data=body, headers={HEADER: session}) as answer:
                await answer.read()
        case "relayed":
            async with rig.http.post(
                f"{rig.url}/v1/embeddings", json=body, headers={HEADER: session} if chance.random() < 0.5 else {}
            ) as answer:
                await answer.read()


async def left_over(seed):
    """Serve many requests that end in many ways. Returns whether any bytes stay counted."""
    chance = random.Random(seed)

    def fault(_route, body):
        if "EPISODE:talk" not in json.dumps(body.get("messages", "")) or chance.random() < 0.7:
            return None
        return chance.choice([Fault.answer(500), Fault.close(), Fault.cut(3), Fault.abort(2), Fault.truncated_json()])

    engine = SimulatedEngine(episodes=EPISODES, seed=seed, token_delay=0.001, choose_fault=fault)
    async with proxied(engine, linger=0.05, **LIMITS) as rig:
        await asyncio.gather(*(one_request(rig, chance, number) for number in range(60)))
        held = rig.proxy.request_memory
    return held.total, dict(held._by_owner)


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_stays_counted_however_requests_end(seed):
    assert await left_over(seed) == (0, {})


async def test_the_check_finds_what_stays_counted(monkeypatch):
    end = Holding._end
    monkeypatch.setattr(Holding, "_end", lambda holding, task: None if task.cancelled() else end(holding, task))
    assert (await left_over(0))[0] > 0

"""Images by URL: fetched once, bounded, and never from a private network."""

import asyncio
import base64
import contextlib
import json

import pytest
from aiohttp import web

from tests.images import image
from tests.proxy.kit import HEADER, echo, proxied, results
from tests.proxy.test_images import seeing, sha256, shown
from tokencache.errors import HarnessError, MemoryFullError
from tokencache.proxy import fetched_media
from tokencache.proxy.fetched_media import FetchedMedia, is_public
from tokencache.request_memory import Holding, Owner, RequestMemory

PICTURE = base64.b64decode(image(1)["image_url"]["url"].partition(",")[2])


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "::ffff:93.184.215.14"])
def test_public_addresses(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255"),
        "0.0.0.0",  # noqa: S104 - it is refused
        *("::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:10.0.0.1", "::ffff:169.254.169.254"),
        *("64:ff9b::a00:1", "64:ff9b:1::a00:1", "2002:a00:1::1", "2001:0:a00:1::1", "fec0::1", "4000::1", "2001:db8::1"),
    ],
)
def test_addresses_that_are_not(address):
    assert not is_public(address)


class Site:
    """A web server with images; counts what it is asked for."""

    def __init__(self):
        self.asked = []
        self.content = PICTURE
        self.url = ""
        self.hung = asyncio.Event()

    async def answer(self, request):
        self.asked.append(request.path)
        match request.path:
            case "/page":
                return web.Response(text="<p>no image</p>", content_type="text/html")
            case "/moved":
                raise web.HTTPFound("/a.png")
            case "/round":
                raise web.HTTPFound("/round")
            case "/file":
                raise web.HTTPFound("file:///etc/passwd")
            case "/away":
                raise web.HTTPFound(request.query["to"])
            case "/gone":
                raise web.HTTPNotFound
            case "/packed":
                return web.Response(body=self.content, content_type="image/png", headers={"Content-Encoding": "gzip"})
            case "/hangs":
                await self.hung.wait()
        return web.Response(body=self.content, content_type="image/png")


@pytest.fixture
async def site():
    made = Site()
    app = web.Application()
    app.router.add_get("/{path:.*}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    made.hung.set()
    await runner.cleanup()


@contextlib.asynccontextmanager
async def fetching(**options):
    media = FetchedMedia(**options)
    try:
        yield media
    finally:
        await media.close()


def request(*urls):
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}, shown("See", *parts)], "top_p": 0.50}).encode()


def anywhere(_address):
    return True


async def written(media, session, body, *, most=2**26, held=None):
    """Write the images into a request, as the task that serves it does."""
    return await media.written_in(session, body, Holding(held or RequestMemory(2**30)), most=most)


async def test_the_bytes_are_written_into_the_request_and_fetched_once(site):
    async with fetching(allows=anywhere) as media:
        body = request(f"{site.url}/a.png", f"{site.url}/a.png", f"{site.url}/moved", image(2)["image_url"]["url"])
        given_to_engine = json.loads(await written(media, "s", body))
        given = json.loads(body)
        fetched = {"url": image(1)["image_url"]["url"], "detail": "low"}
        for part in given["messages"][1]["content"][1:4]:
            part["image_url"] = fetched
        assert given_to_engine == given
        assert sorted(site.asked) == ["/a.png", "/a.png", "/moved"]
        site.content = b"other bytes"
        assert await written(media, "s", body) == await written(media, "s", body)
        assert len(site.asked) == 3
        assert b"b3RoZXIgYnl0ZXM=" in await written(media, "t", body), "another session has other images"


@pytest.mark.parametrize(
    "body",
    [
        b'{"image_url": "http"}',
        b'{"messages": [{"content": "image_url http://x"}]}',
        b'{"messages": [{"content": [{"type": "text", "text": "see http://x"}, "http://y"]}]}',
        b'{"messages": [{"content": [{"type": "tool_reference", "name": "WebFetch"}]}]}',
        b'{"messages": [{"content": [{"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}}]}]}',
        b'{"messages": [{"content": [{"type": "video_url", "video_url": {"url": "DATA:video/mp4;base64,QUJD"}}]}]}',
    ],
)
async def test_other_requests_are_left_alone(body):
    async with fetching() as media:
        assert await written(media, "s", body) == body


AWAY = "http://169.254.169.254/CANARY"
NOT_FETCHED = {
    "no type": {"image_url": {"url": AWAY}},
    "another type": {"type": "input_image", "image_url": AWAY},
    "a text, too": {"type": "text", "text": "x", "image_url": {"url": AWAY}, "uuid": "u"},
    "video": {"type": "video_url", "video_url": {"url": AWAY}},
    "audio": {"type": "audio_url", "audio_url": {"url": AWAY}},
    "a file": {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    "blanks": {"type": "image_url", "image_url": {"url": f" {AWAY}"}},
    "control characters": {"type": "image_url", "image_url": {"url": AWAY.replace("tt", "t\nt")}},
    "no scheme": {"type": "image_url", "image_url": {"url": AWAY.partition(":")[2]}},
    "a path": {"type": "image_url", "image_url": "/etc/CANARY"},
    "another scheme": {"type": "image_url", "image_url": {"url": AWAY.replace("http", "ftp")}},
    "in a list": {"type": "image_url", "image_url": [{"url": AWAY}]},
    "beside data": {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD", "fallback": AWAY}},
    "a second address": {"type": "image_url", "image_url": {"url": "https://example.org/a"}, "video_url": {"url": AWAY}},
}


@pytest.mark.parametrize("part", NOT_FETCHED)
async def test_no_other_address_reaches_the_engine(part):
    async with proxied(seeing(), fetch_media=True) as rig:
        status, said = await rig.post("s", messages=[shown("See", NOT_FETCHED[part])])
        assert (status, said["error"]["param"]) == (400, "messages")
        assert "CANARY" not in json.dumps(rig.engine.requests)


@pytest.mark.parametrize("url", ["HTTP://127.0.0.1:1/CANARY", "hTTpS://127.0.0.1:1/CANARY"])
@pytest.mark.parametrize("escaped", [False, True])
async def test_the_spelling_of_an_address_does_not_matter(url, escaped):
    async with proxied(seeing(), fetch_media=True) as rig:
        body = json.dumps({"model": "sim", "messages": [shown("See", {"type": "image_url", "image_url": {"url": url}})], "x": "NaN"})
        body = body.replace("image_url", "image\\u005furl") if escaped else body.replace('"NaN"', "NaN")
        headers = {HEADER: "s", "Content-Type": "application/json"}
        async with rig.http.post(f"{rig.url}/v1/chat/completions", data=body, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "image_url")
        assert "CANARY" not in json.dumps(rig.engine.requests)


@pytest.mark.parametrize("route", ["/v1/chat/completions/render", "/v1/embeddings", "/invocations", "/v1/chat/completions/batch"])
async def test_routes_that_are_relayed_have_no_address_either(route):
    async with proxied(seeing(), fetch_media=True) as rig:
        messages = [shown("See", {"type": "image_url", "image_url": {"url": AWAY}})]
        status, _ = await rig.post("s", route, model="sim", messages=[messages] if route.endswith("batch") else messages)
        assert status == 400


ELSEWHERE = {
    "/score": {"queries": {"content": [{"type": "image_url", "image_url": {"url": AWAY}}]}, "documents": ["x"]},
    "/v1/rerank": {"query": "x", "documents": [{"content": [{"type": "image_url", "image_url": {"url": AWAY}}]}]},
    "/v2/embed": {"images": [AWAY]},
    "/v1/responses/render": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": AWAY}]}]},
    "/v1/messages/render": {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": AWAY}}]}]},
    "/generate": {"image_data": f"\t{AWAY.replace(':', ' :')}"},
    "/pooling": [{"data": {"url": AWAY}}],
}


@pytest.mark.parametrize("route", ELSEWHERE)
async def test_routes_that_are_relayed_have_no_address_elsewhere(route):
    async with (
        proxied(seeing(), fetch_media=True) as rig,
        rig.http.post(rig.url + route, json=ELSEWHERE[route], headers={HEADER: "s"}) as answer,
    ):
        assert answer.status == 400


async def test_an_address_in_a_text_that_is_relayed_is_a_text():
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}
    tools = [{"type": "function", "function": {"name": "f", "description": AWAY, "parameters": schema}}]
    async with proxied(seeing(), fetch_media=True) as rig:
        for body in (
            {"input": AWAY},
            {"input": [AWAY]},
            {"query": AWAY, "documents": [AWAY, {"content": [{"text": AWAY}]}]},
            {"tools": tools},
        ):
            status, _ = await rig.post("s", "/v1/embeddings", model="sim", **body)
            assert status == 404  # of the engine, which has no such route


REFUSED = {
    "/page": "sent text/html, not an image",
    "/gone": "answered 404",
    "/round": "more than 3 redirects",
    "/file": "NonHttpUrlRedirect",
    "/packed": "compressed",
    "/large": "more than 9 bytes",
    "/hangs": "longer than 0.2 s",
}


@pytest.mark.parametrize("path", REFUSED)
async def test_what_is_no_image_is_refused_with_the_reason(site, monkeypatch, path):
    monkeypatch.setattr(fetched_media, "SECONDS", 0.2 if path == "/hangs" else 60)
    monkeypatch.setattr(fetched_media, "MOST_BYTES", 9 if path == "/large" else 10**6)
    async with fetching(allows=anywhere) as media:
        with pytest.raises(HarnessError, match=REFUSED[path]) as refused:
            await written(media, "s", request(f"{site.url}{path}?key=secret"))
        assert refused.value.status == 400
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433"])
async def test_a_private_network_is_never_asked(site, host):
    port = site.url.rpartition(":")[2]
    async with fetching() as media:
        with pytest.raises(HarnessError, match="cannot be fetched"):
            await written(media, "s", request(f"http://{host}:{port}/a.png"))
    assert site.asked == []


async def test_a_redirect_into_a_private_network_is_not_followed(site):
    allowed = []

    def only_first(address):
        allowed.append(address)
        return len(allowed) == 1

    async with fetching(allows=only_first) as media:
        with pytest.raises(HarnessError, match="address is not public"):
            await written(media, "s", request(f"{site.url}/away?to={site.url}/a.png"))
    assert site.asked == ["/away"]


async def test_too_many_images_are_refused():
    async with fetching() as media:
        with pytest.raises(HarnessError, match="at most 64"):
            await written(media, "s", request(*(f"https://example.org/{n}" for n in range(65))))


@pytest.mark.parametrize("parts", [1, 64])
async def test_the_images_of_a_request_have_a_limit_together(site, parts):
    """Also one image in many parts: a small request would become a huge one."""
    site.content = bytes(1000)
    body = request(*(f"{site.url}/{n % parts}.png" for n in range(64)))
    size = len(body) + 64 * len("data:image/png;base64," + base64.b64encode(site.content).decode())
    async with fetching(allows=anywhere) as media:
        with pytest.raises(HarnessError, match="--max-body") as refused:
            await written(media, "s", body, most=size - 1)
        assert refused.value.status == 413
        assert await written(media, "s", body, most=size)


async def test_images_are_fetched_within_the_memory_of_all_requests(site):
    site.content = bytes(1000)
    held = RequestMemory(40_000)
    async with fetching(allows=anywhere) as media:
        with pytest.raises(MemoryFullError, match="--request-memory"):
            await written(media, "s", request(*(f"{site.url}/{n}.png" for n in range(64))), held=held)
        assert held.of(Owner()) <= held.share(Owner())


async def test_a_conversation_with_images_by_url_is_exact(site, monkeypatch):
    """In another dialect, too. Without the option the call is relayed (`test_images`)."""
    monkeypatch.setattr(FetchedMedia.__init__, "__defaults__", (anywhere,))
    async with proxied(seeing(), fetch_media=True) as rig:
        by_url = {"type": "image_url", "image_url": {"url": f"{site.url}/a.png"}}
        messages = [shown("EPISODE:see go", by_url)]
        messages.append(echo(await rig.say("s", messages)))
        await rig.say("s", [*messages, *results(messages[-1])])
        status, said = await rig.post("s", messages=[*messages, shown("And this?", {**by_url, "image_url": {"url": f"{site.url}/gone"}})])
        assert (status, said["error"]["param"]) == (400, "image_url")
        source = {"type": "image", "source": {"type": "url", "url": f"{site.url}/gone"}}
        asked = {"model": "sim", "max_tokens": 9, "messages": [{"role": "user", "content": [source]}]}
        async with rig.http.post(f"{rig.url}/v1/messages", json=asked, headers={HEADER: "s"}) as answer:
            assert answer.status == 400
            assert (await answer.json())["type"] == "error"
        assert [turn["match"] for turn in await rig.turns()] == ["root", "continue"]
        exported = await rig.check()
        assert [medium["sha256"] for medium in exported["sequences"][0]["media"]] == [sha256(image(1))]
        assert all("http" not in json.dumps(sent["messages"]) for sent in rig.engine.requests)

"""`--public-url`: harnesses behind a gateway that removes a path prefix get URLs that work there, from each place that hands out URLs."""

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import anthropic
import openai
import pytest
from aiohttp import web
from yarl import URL

from tests.engine.intermediary import Intermediary
from tests.proxy.kit import proxied, user
from tests.proxy.serve import served
from tests.support.patient import patient  # noqa: F401 - a fixture
from tokencache.client import AsyncClient
from tokencache.config import Settings, SettingsError
from tokencache.testing import SimulatedEngine

PREFIX = "/rl/proxy-1"


class Gateway(Intermediary):
    """Serves the proxy under a path prefix, and nothing else."""

    async def _pass(self, request):
        if not request.raw_path.startswith(PREFIX + "/"):
            raise web.HTTPNotFound
        headers = {name: value for name, value in request.headers.items() if name.lower() not in {"host", "content-length"}}
        url, body = self.upstream + request.raw_path.removeprefix(PREFIX), await request.read()
        async with self._http.request(request.method, url, data=body, headers=headers, allow_redirects=False) as answer:
            passed = {name: answer.headers[name] for name in ("Content-Type", "Location") if name in answer.headers}
            return web.Response(status=answer.status, body=await answer.read(), headers=passed)


@asynccontextmanager
async def behind_a_gateway():
    """A proxy, and the public URL that it knows."""
    gateway = Gateway("")
    async with gateway.serve() as url, proxied(public_url=f"{url}{PREFIX}/") as rig:
        gateway.upstream = rig.url
        yield rig, url + PREFIX


async def test_sessions_have_urls_at_which_harnesses_reach_them():
    async with behind_a_gateway() as (rig, public), AsyncClient(rig.url) as client:
        created = await client.create("r1", harness="claude-code")
        assert created.base_url == f"{public}/s/r1/v1"
        assert created.env["ANTHROPIC_BASE_URL"] == f"{public}/s/r1/h/claude-code"
        async with openai.AsyncOpenAI(base_url=created.base_url, api_key=created.key, max_retries=0) as model:
            await model.chat.completions.create(model="sim", messages=[user("EPISODE:talk")])
        async with anthropic.AsyncAnthropic(base_url=created.env["ANTHROPIC_BASE_URL"], api_key=created.key, max_retries=0) as model:
            await model.messages.create(model="sim", max_tokens=500, messages=[user("EPISODE:talk")])
        first, _ = await rig.turns("r1")
        assert (await client.fork("r1", first["turn"], "r2")).base_url == f"{public}/s/r2/v1"


async def test_the_http_api_names_them():
    async with behind_a_gateway() as (rig, public):
        for route, name in (("keys", "r1"), ("sessions", "r2")):
            async with rig.http.post(f"{rig.url}/tokencache/v1/{route}", json={"session": name}) as answer:
                made = await answer.json()
            assert (made["public_url"], made["base_url"]) == (public, f"{public}/s/{name}/v1")
    async with proxied() as rig, rig.http.post(f"{rig.url}/tokencache/v1/keys", json={"session": "r1"}) as answer:
        assert not {"public_url", "base_url"} & set(await answer.json())


async def test_the_viewer_works_there():
    async with behind_a_gateway() as (rig, public), rig.http.get(f"{public}/tokencache/ui") as page:
        assert str(page.url) == f"{public}/tokencache/ui/"
        async with rig.http.get(page.url.join(URL("../v1/runs"))) as answer:  # as the page's script does
            assert answer.status == 200


def tokencache(*command):
    program = str(Path(sys.executable).with_name("tokencache"))
    return subprocess.run([program, *command], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout


async def test_commands_print_it():
    async with behind_a_gateway() as (rig, public):
        printed = json.loads(await asyncio.to_thread(tokencache, "create", "r1", "--json", "--proxy", rig.url))
        assert printed["base_url"] == f"{public}/s/r1/v1"
        printed = json.loads(await asyncio.to_thread(tokencache, "env", "claude-code", "--session", "r1", "--json", "--proxy", rig.url))
        assert printed["env"]["ANTHROPIC_BASE_URL"] == f"{public}/s/r1/h/claude-code"


async def test_the_log_says_it_at_the_start():
    async with SimulatedEngine().serve() as up, served("--port", "0", "--upstream", up, "--public-url", "https://rl.example/a") as proxy:
        assert await proxy.said(r"listens on http://127\.0\.0\.1:\d+ \(harnesses: (\S+)\) for") == ["https://rl.example/a"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://rl.example", "its scheme is 'ftp', not http or https"),
        ("rl.example", r"it has no scheme\. Use 'http://rl\.example'"),
        ("https://rl.example/?a=1", r"it has a query or a fragment\. Use 'https://rl\.example'"),
        ("https://rl.example/#x", "it has a query or a fragment"),
        ("https://me:hush@rl.example", "it contains a user, and every harness would receive the password"),
        ("https://rl.example/v1", r"'/v1' belongs to a route of the proxy\. Use 'https://rl\.example'"),
        ("https://rl.example/a/s/r1", r"'/s/r1' belongs to a route of the proxy\. Use 'https://rl\.example/a'"),
        ("https://", "it names no host"),
        ("https://rl.example:port", "Port could not be cast"),
    ],
)
def test_what_cannot_be_a_public_url_is_refused(url, words):
    with pytest.raises(SettingsError, match=f"^--public-url: .*{words}") as refused:
        Settings.load({"public_url": url})
    assert "hush" not in str(refused.value)


def test_it_changes_no_record():
    elsewhere = Settings(public_url="https://rl.example/")
    assert elsewhere.digest == Settings().digest
    assert elsewhere.shown == {"public_url": "https://rl.example"}

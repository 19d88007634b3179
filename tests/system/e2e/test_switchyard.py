"""NVIDIA's Switchyard 0.3.0 (the released wheel) in front of the proxy: which calls name their session, on a simulated engine."""

import contextlib
import subprocess
from pathlib import Path

import aiohttp
import pytest
from conftest import proxying
from rig.exported import trajectory
from rig.gym import default_venv

from tests.support.waiting import PATIENCE
from tokencache.store.memory import MemoryStore
from tokencache.testing import SimulatedEngine

pytestmark = pytest.mark.skipif(
    not list(default_venv().glob("lib/python*/site-packages/switchyard_rust")),
    reason=f"Switchyard is not in {default_venv()}: tests/system/e2e/rig/install_nemo_gym.sh",
)
EPISODES = {"talk": ["<think>\nAha.\n</think>\n\nOne, two.  ", "<think>\nSo.\n</think>\n\nThree."]}
SESSION = {"X-Switchyard-Session-ID": "r1", "Authorization": "Bearer none"}
ROUTE = """
schema_version = 1
[llm_clients.proxy]
format = "{format}"
base_url = "{url}"
{more}
[targets.policy]
id = "sim"
llm_client = "proxy"
[routes.policy]
id = "policy"
type = "stage_router"
capable_target = "policy"
efficient_target = "policy"
picker = "efficient_first"
confidence_threshold = 0.5
"""
SERVE = """
import sys
from switchyard_rust.server import Server
with Server(sys.argv[1]) as server:
    print(server.base_url, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def switchyard(folder: Path, **route):
    config = folder / "routes.toml"
    config.write_text(ROUTE.format(**route))
    command = [str(default_venv() / "bin/python"), "-c", SERVE, str(config)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        yield server.stdout.readline().strip().rstrip("/")
        server.stdin.close()


@contextlib.asynccontextmanager
async def in_front(folder, more):
    """A proxy that takes the session from Switchyard's header, and Switchyard in front of it with these settings."""
    engine = SimulatedEngine(episodes=EPISODES, seed=3, drift=0.9)
    async with (
        engine.serve() as url,
        proxying(url, MemoryStore(), session_from="header:X-Switchyard-Session-ID") as proxied,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE)) as http,
    ):
        with switchyard(folder, format="openai_chat", url=proxied.url + "/v1", more=more) as front:
            yield engine, proxied, http, front


async def talk(http, front):
    """Two chat calls, the second with the stripped reply of the first."""
    messages = [{"role": "user", "content": "EPISODE:talk"}]
    for _ in range(2):
        body = {"model": "policy", "messages": messages, "top_k": 20}
        async with http.post(f"{front}/v1/chat/completions", json=body, headers=SESSION) as answer:
            assert answer.status == 200, await answer.text()
            reply = (await answer.json())["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": reply.strip()}, {"role": "user", "content": "go on"}]


async def test_with_forward_auth_the_session_arrives(tmp_path):
    async with in_front(tmp_path, "forward_auth = true") as (_, proxied, http, front):
        await talk(http, front)
        exported = await trajectory(proxied, "r1")
        (sequence,) = exported["sequences"]
        assert [turn["match"] for turn in sequence["turns"]] == ["root", "continue"]
        assert {turn["sampling"]["top_k"] for turn in sequence["turns"]} == {20}
        async with http.post(f"{front}/v1/messages", json={"model": "policy", "max_tokens": 9, "messages": []}, headers=SESSION) as answer:
            assert answer.status == 400
            assert "call it through /v1/chat/completions" in await answer.text()


async def test_without_it_no_call_names_its_session_and_translating_drops_members(tmp_path):
    async with in_front(tmp_path, "") as (engine, proxied, http, front):
        await talk(http, front)
        thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "top_k": 20, "temperature": 0.5}
        body = {"model": "policy", "max_tokens": 2000, "messages": [{"role": "user", "content": "EPISODE:talk"}]} | thinking
        async with http.post(f"{front}/v1/messages", json=body, headers=SESSION) as answer:
            assert answer.status == 200, await answer.text()
        async with proxied.http.get(f"{proxied.url}/tokencache/v1/sessions") as answer:
            assert (await answer.json())["sessions"] == []
        (received,) = [call for call in engine.requests if call.get("temperature") == 0.5]
        assert not {"top_k", "thinking"} & set(received)

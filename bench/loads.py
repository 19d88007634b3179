"""Puts load on targets, from one rollout at a time to thousands, target after target in each round (README.md)."""

import gc
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import uvloop

from bench.client import check_continued
from bench.load import Generator, Spec
from bench.processes import Process
from bench.talk import SHAPES, TURNS, Shape
from bench.targets import NOT_STREAMED, SLOW, Target

FEW = 64
"""Maximum for LiteLLM and the rendering capture, which also run without streams: their queue would be minutes long."""
FAST_SECONDS = 4.0
"""Maximum seconds for targets without sessions: thousands wait for the proxy, but not for these."""
BUSY = 0.85
"""Share of its cores above which a target counts as the limit."""
_CORES = sorted(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Row:
    """A shape with a number of concurrent rollouts."""

    shape: str
    connections: int
    seconds: float
    rounds: int = 1

    def spec(self, *, slow: bool = False, fast: bool = False) -> Spec:
        """What to run; `slow` targets get three times as long, for enough answers, `fast` ones only as long as they need."""
        shape = SHAPES[self.shape]
        streamed = shape.chunks * shape.pace_ms / 1000
        queue = self.connections / 1500  # the first of thousands are answered at once, the last after all others
        if streamed:  # from the middle of one stream to the middle of another: as many are counted as were paid for
            warm, seconds = 1.5 * streamed, 2 * streamed
        else:
            warm = min(20.0, 0.3 + queue)
            wanted = min(FAST_SECONDS, self.seconds) if fast else self.seconds * (3 if slow else 1)
            seconds = min(40.0, wanted + 2 * queue)
        return Spec(connections=self.connections, seconds=seconds, warm_s=warm, turns=4 if streamed else TURNS, shape=shape)


def chosen(targets: Mapping[str, Target], row: Row) -> dict[str, Target]:
    """The targets that can carry this many at once, and whose figures no other row gives."""
    whole, few = not SHAPES[row.shape].chunks, row.connections <= FEW

    def adds_figures(name: str, target: Target) -> bool:
        if name in SLOW:
            return whole and few and row.shape != "1 MB"  # too few answers there for a figure
        if name in NOT_STREAMED:
            return whole and few
        if target.workers > 1:  # one call at a time needs no second process; two processes with streams are measured with 16,384
            return whole and row.connections > 1 and (few or row.shape == "1 KB")
        return True

    able = {name: target for name, target in targets.items() if name == "direct" or row.connections <= target.streams_possible()}
    return {name: target for name, target in able.items() if adds_figures(name, target)}


def run_load(engine: Process, targets: Mapping[str, Target], row: Row) -> dict[str, Any]:
    """One row: each target, in rounds, slow ones once; without those that the limit of open files excludes."""
    able = chosen(targets, row)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in able}
    for n in range(row.rounds):
        for name, target in able.items():
            if n == 0 or name not in SLOW:
                spec = row.spec(slow=name in SLOW, fast=not target.records)
                runs[name].append(drive(engine, target, spec, alone=target.workers == 1))
    return {"shape": row.shape, "connections": row.connections, "targets": runs}


def run_streams(engine: Process, target: Target, wanted: int, *, chunks: int, pace_ms: int, ramp_s: float) -> dict[str, Any]:
    """This many streams at once through one target, or as many as its open-file limit allows; each continues its own session."""
    possible = wanted if target.name == "direct" else min(wanted, target.streams_possible())
    shape = Shape().streamed(chunks, pace_ms)
    spec = Spec(connections=possible, once=True, warm_turn=True, turns=1, ramp_s=ramp_s, seconds=240.0, shape=shape)
    found = drive(engine, target, spec, alone=target.workers == 1)
    walls, lags = found["latency_us"], found.get("lag_us")
    return {
        **found,
        "wanted": wanted,
        "streams": possible,
        "unfinished": possible - found["calls"] - found["errors"],
        "chunks": chunks,
        "pace_ms": pace_ms,
        "slowest_over_median": round(walls[100] / walls[50], 3) if walls else None,
        "lag_p50_ms": round(lags[50] / 1000, 1) if lags else None,
        "lag_max_ms": round(lags[100] / 1000, 1) if lags else None,
        "bytes_per_stream": round((found["peak_bytes"] - found["idle_bytes"]) / possible),
    }


def drive(engine: Process, target: Target, spec: Spec, *, alone: bool = True) -> dict[str, Any]:
    """Puts load on a target. `alone`: pin it to one core and the rest, this process included, to the others; otherwise all share all."""
    engine = target.engine or engine
    pinned = alone and len(_CORES) > 1 and target.processes != (engine,)
    rest = set(_CORES[1:]) if pinned else set(_CORES)
    spec = msgspec.structs.replace(spec, ports=target.ports, sessions=target.sessions, name=f"{spec.name}-{time.monotonic_ns() % 10**12}")
    for process in (engine, *target.stores):
        process.pin(rest)
    for process in target.processes:
        process.pin({_CORES[0]} if pinned else set(_CORES))
        process.forget_peak()
    idle_bytes = sum(process.peak() for process in target.processes)
    seen: list[list[float]] = []

    def look() -> None:
        cpus = [sum(process.cpu() for process in some) for some in (target.processes, (engine,), target.stores)]
        seen.append([*cpus, sum(process.waited() for process in target.processes)])

    os.sched_setaffinity(0, rest)
    gc.freeze()  # what was here before costs no call anything
    try:
        found = uvloop.run(Generator(spec).run(look))
    finally:
        gc.unfreeze()
        os.sched_setaffinity(0, _CORES)
    used = (now - then for then, now in zip(*seen, strict=True))
    found |= dict(zip(("cpu_s", "engine_cpu_s", "store_cpu_s", "waited_s"), used, strict=True))
    found |= {"idle_bytes": idle_bytes, "peak_bytes": sum(process.peak() for process in target.processes)}
    return _checked(target, found, spec, 1 if pinned else len(_CORES))


def limit(shares: dict[str, float], waited: float) -> str:
    """What limited a closed loop; `waited` is the share of time in which the target was ready to run without a core."""
    if shares["target"] >= BUSY:
        return "target"
    if shares["target"] + waited >= BUSY:
        return "machine"
    return max(("engine", "generator"), key=lambda name: shares[name])


def _torn(target: Target, played: Sequence[tuple[str, int]]) -> list[str]:
    """What is wrong with sessions of so many turns."""
    found = []
    for session, turns in played if target.records else ():
        try:
            check_continued(target.ports, session, turns)
        except RuntimeError as why:
            found.append(str(why))
    return found


def _checked(target: Target, found: dict[str, Any], spec: Spec, cores: int) -> dict[str, Any]:
    """Adds what follows from the accounts. A run with `torn` sessions yields no figure: a proxy that only relays is fast, too."""
    found["torn"], window = _torn(target, found.pop("sessions")), found["window_s"]
    calls = max(1, found["calls_per_s"] * window)
    for name in ("cpu", "engine_cpu", "store_cpu", "generator_cpu"):
        found[f"{name}_us"] = round(found[f"{name}_s"] / calls * 1e6, 1)
    own = min(cores, target.workers) if target.name != "direct" else 1
    shares = {name: found[f"{name}_cpu_s"] / window for name in ("engine", "generator")} | {"target": found["cpu_s"] / window / own}
    found["busy"] = {name: round(share, 3) for name, share in shares.items()}
    found["limited_by"] = limit(shares, found["waited_s"] / window / own)
    return found | {"target": target.name, "connections": spec.connections, "rate": spec.rate}

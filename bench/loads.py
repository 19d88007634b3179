"""Load: calls per second, latency and cost per call, from one rollout at a time to thousands.

Every row is measured in rounds, target after target within each round, so that a change of the machine's speed appears as spread and not as
a difference between targets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.cost import SLOW
from bench.drive import drive
from bench.load import Spec
from bench.processes import Process
from bench.targets import FLOOR_LOCAL, FLOOR_NAMED, FLOOR_PROVEN, PLUGIN, Target

_NONE = Spec(ports=[], sessions=False)

SHAPES: dict[str, dict[str, Any]] = {
    "1 KB": {"size": 1_000, "messages": 4, "tokens": 16, "tail": 64},
    "141 KB": {"size": 141_000, "messages": 200, "tokens": 200, "tail": 800},
    "1 MB": {"size": 1_000_000, "messages": 400, "tokens": 200, "tail": 800},
    "1 KB, 100 chunks of 50 ms": {"size": 1_000, "messages": 4, "tokens": 100, "tail": 64, "chunks": 100, "pace_ms": 50, "turns": 4},
    "141 KB, 500 chunks of 10 ms": {"size": 141_000, "messages": 200, "tokens": 500, "tail": 800, "chunks": 500, "pace_ms": 10, "turns": 4},
}

FEW = 64
"""Maximum for LiteLLM and the rendering capture, which also run without streams: their queue would be minutes long."""

FAST_SECONDS = 4.0
"""Maximum seconds for targets without sessions: thousands wait for the proxy, but not for these."""

MANY_STREAMS = 16_384
MILES = {"connections": 32, "turns": 50, "once": True, "size": 1_200, "messages": 2, "tokens": 200, "tail": 800, "seconds": 30.0}
"""The shape of miles' published throughput of its session server: 32 sessions x 50 turns on a mock backend (radixark/miles #1660).

A run is cut off after half a minute; its turns per second are then those of the shorter histories.
"""


@dataclass(frozen=True)
class Row:
    """A shape with a number of concurrent rollouts."""

    shape: str
    connections: int
    seconds: float
    rounds: int

    def spec(self, *, slow: bool = False, fast: bool = False) -> Spec:
        """What to run; `slow` targets get three times as long, for enough answers, `fast` ones only as long as they need."""
        streamed = SHAPES[self.shape].get("chunks", 0) * SHAPES[self.shape].get("pace_ms", 0) / 1000
        queue = self.connections / 1500  # the first of thousands are answered at once, the last after all others
        if streamed:  # from the middle of one stream to the middle of another: as many are counted as were paid for
            warm, seconds = 1.5 * streamed, 2 * streamed
        else:
            warm = min(20.0, 0.3 + queue)
            wanted = min(FAST_SECONDS, self.seconds) if fast else self.seconds * (3 if slow else 1)
            seconds = min(40.0, wanted + 2 * queue)
        return msgspec.structs.replace(_NONE, connections=self.connections, seconds=seconds, warm_s=warm, **SHAPES[self.shape])


def chosen(targets: Mapping[str, Target], row: Row) -> dict[str, Target]:
    """The targets that can carry this many at once, and whose figures no other row gives."""
    whole, few = "chunks" not in SHAPES[row.shape], row.connections <= FEW

    def adds_figures(name: str, target: Target) -> bool:
        if name in SLOW:
            return whole and few and row.shape != "1 MB"  # too few answers there for a figure
        if name in {FLOOR_LOCAL, FLOOR_PROVEN, FLOOR_NAMED, PLUGIN}:
            return whole and few  # the first only omits a small call, the others do not stream
        if target.workers > 1:  # one call at a time needs no second process; two processes with streams are measured with 16,384
            return whole and row.connections > 1 and (few or row.shape == "1 KB")
        return True

    able = {name: target for name, target in targets.items() if name == "direct" or row.connections <= target.streams_possible()}
    return {name: target for name, target in able.items() if adds_figures(name, target)}


def run_load(engine: Process, targets: Mapping[str, Target], row: Row) -> dict[str, Any]:
    """One row: each target, in rounds, slow ones once. A target that the limit of open files excludes is named in `impossible`."""
    able = chosen(targets, row)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in able}
    for n in range(row.rounds):
        for name, target in able.items():
            if n == 0 or name not in SLOW:
                spec = row.spec(slow=name in SLOW, fast=not target.records)
                runs[name].append(drive(engine, target, spec, alone=target.workers == 1))
    impossible = {name: t.streams_possible() for name, t in targets.items() if name != "direct" and t.streams_possible() < row.connections}
    return {"shape": row.shape, "connections": row.connections, "impossible": impossible, "targets": runs}


def run_open(engine: Process, targets: Sequence[Target], capacity: float, shares: Sequence[float], seconds: float) -> list[dict[str, Any]]:
    """Poisson arrivals of 141 KB calls at shares of a capacity, to each target at the same rates."""
    found = []
    for share in shares:
        spec = msgspec.structs.replace(_NONE, rate=round(capacity * share, 1), seconds=seconds, warm_s=0.5, **SHAPES["141 KB"])
        found += [{"share": share, **drive(engine, target, spec)} for target in targets]
    return found


def run_rollouts(engine: Process, targets: Sequence[Target], rounds: int, turns: int) -> list[dict[str, Any]]:
    """32 new sessions of `turns` turns at once, on all cores."""
    found = []
    for _ in range(rounds):
        for target in targets:
            spec = msgspec.structs.replace(_NONE, **(MILES | {"turns": turns}))
            found.append(drive(engine, target, spec, alone=False))
    return found


def run_streams(engine: Process, target: Target, wanted: int, *, chunks: int, pace_ms: int, ramp_s: float) -> dict[str, Any]:
    """This many streams at once through one target, or as many as its open-file limit allows; each continues its own session."""
    possible = wanted if target.name == "direct" else min(wanted, target.streams_possible())
    spec = msgspec.structs.replace(
        _NONE,
        connections=possible,
        once=True,
        warm_turn=True,
        turns=1,
        ramp_s=ramp_s,
        seconds=240.0,
        tokens=chunks,
        chunks=chunks,
        pace_ms=pace_ms,
    )
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

"""The parts of a bench run, and how much of each is done in a full run and in a quick one."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from bench import entries, loads, targets
from bench.cost import Case, Rig, run_case
from bench.exports import run_exports
from bench.growth import MARKS, run_growth
from bench.loads import Row
from bench.processes import ROOT, Process
from bench.targets import (
    FLOOR,
    FLOOR_LOCAL,
    FLOOR_NAMED,
    FLOOR_PROVEN,
    PLUGIN,
    PROXY,
    PROXY_REDIS,
    TWO,
    TWO_REDIS,
    Target,
)

CASES = [
    Case("1 KB", 1_000, 4, 200, tokens=16, tail=64, per_session=2),
    Case("141 KB", 141_000, 200, 240),
    Case("141 KB, own system prompt", 141_000, 200, 80, own_system=True),
    Case("141 KB, client's own answers", 141_000, 200, 80, answered=True),
    Case("1 MB", 1_000_000, 400, 64),
    Case("141 KB, 500 chunks", 141_000, 200, 24, tokens=500, chunks=500, per_session=4),
    Case("1 MB, 500 chunks", 1_000_000, 400, 12, tokens=500, chunks=500, per_session=4),
]
LOADS = [
    Row("1 KB", 1, 1.5, 2),
    Row("1 KB", 64, 2.0, 3),
    Row("1 KB", 1_024, 2.0, 1),
    Row("1 KB", 4_096, 2.0, 1),
    Row("1 KB", 16_384, 2.0, 1),
    Row("141 KB", 1, 2.0, 2),
    Row("141 KB", 16, 2.5, 3),
    Row("141 KB", 64, 2.5, 2),
    Row("141 KB", 1_024, 20.0, 1),  # a window several calls long: at 400 at once each takes two seconds and a half
    Row("1 MB", 16, 3.0, 1),
    Row("1 KB, 100 chunks of 50 ms", 1_024, 2.0, 1),
    Row("141 KB, 500 chunks of 10 ms", 64, 2.0, 1),
]


@dataclass(frozen=True)
class Extent:
    """How much is done."""

    cases: list[Case]
    growth_sessions: int
    growth_marks: tuple[int, ...]
    loads: list[Row]
    open_shares: tuple[float, ...]
    open_seconds: float
    rollout_rounds: int
    rollout_turns: int
    streams: int
    stream_chunks: int
    stream_pace_ms: int
    stream_ramp_s: float
    export_rounds: int
    counted_turns: int
    starts: int
    leave_out: frozenset[str] = frozenset()


NOT_STREAMED = {FLOOR_LOCAL, FLOOR_PROVEN, FLOOR_NAMED, PLUGIN}
"""The call that `floor local` omits is negligible next to hundreds of chunks; the others do not stream."""
PARTS = ("entries", "cost", "growth", "load", "open", "rollouts", "streams", "exports", "stored", "start")
FULL = Extent(
    cases=CASES,
    growth_sessions=3,
    growth_marks=MARKS,
    loads=LOADS,
    open_shares=(0.3, 0.5, 0.7, 0.85),
    open_seconds=5.0,
    rollout_rounds=2,
    rollout_turns=50,
    streams=loads.MANY_STREAMS,
    stream_chunks=12,
    stream_pace_ms=2000,
    stream_ramp_s=10.0,
    export_rounds=4,
    counted_turns=200,
    starts=5,
)
QUICK = Extent(
    cases=[
        Case("1 KB", 1_000, 4, 33, tokens=16, tail=64, per_session=2),
        Case("141 KB", 141_000, 200, 40),
        Case("141 KB, own system prompt", 141_000, 200, 40, own_system=True),
        Case("141 KB, client's own answers", 141_000, 200, 40, answered=True),
        Case("141 KB, 100 chunks", 141_000, 200, 8, tokens=100, chunks=100),
    ],
    growth_sessions=1,
    growth_marks=(10, 100),
    loads=[Row("1 KB", 64, 1.0, 1), Row("141 KB", 16, 1.0, 1)],
    open_shares=(0.5,),
    open_seconds=2.0,
    rollout_rounds=1,
    rollout_turns=10,
    streams=1_024,
    stream_chunks=6,
    stream_pace_ms=500,
    stream_ramp_s=1.0,
    export_rounds=1,
    counted_turns=50,
    starts=2,
    leave_out=frozenset({FLOOR_LOCAL, FLOOR_PROVEN, FLOOR_NAMED, TWO_REDIS}),
)


class Suite:
    """A run: one mock engine, the targets in front of it, and the results."""

    def __init__(self, extent: Extent, parts: set[str], leave_out: set[str], console: Console) -> None:
        self.extent, self.parts, self.leave_out, self.console = extent, parts, leave_out, console
        self.begun = time.monotonic()
        self.found: dict[str, Any] = {"skipped": {}}

    def say(self, words: str) -> None:
        self.console.print(f"[dim]{time.monotonic() - self.begun:5.0f} s[/] {words}")

    def run(self) -> dict[str, Any]:
        with targets.mock() as engine, self._targets(engine) as able:
            one_process = {name: target for name, target in able.items() if target.workers == 1}
            rig = Rig(engine, one_process)
            for part in PARTS:
                if part in self.parts:
                    getattr(self, f"_{part}")(engine, able, rig)
            rig.close()
        return self.found

    @contextlib.contextmanager
    def _targets(self, engine: Process) -> Iterator[dict[str, Target]]:
        wanted: dict[str, Callable[[Process], contextlib.AbstractContextManager[Target]]] = {
            "direct": targets.direct,
            "relay": targets.relay,
            FLOOR: targets.floor,
            FLOOR_LOCAL: lambda to: targets.floor(to, local=True),
            FLOOR_PROVEN: targets.proven,
            FLOOR_NAMED: targets.named,
            **targets.others(),
            PROXY: targets.proxy,
            PROXY_REDIS: lambda to: targets.proxy(to, "redis"),
            PLUGIN: targets.proxy_with_plugin,
            TWO: lambda to: targets.proxy(to, workers=2),
            TWO_REDIS: lambda to: targets.proxy(to, "redis", workers=2),
        }
        with contextlib.ExitStack() as stack:
            able = {}
            for name, make in wanted.items():
                if name in self.leave_out:
                    continue
                try:
                    able[name] = stack.enter_context(make(engine))
                except (FileNotFoundError, RuntimeError) as reason:
                    if name in {"direct", "relay", FLOOR, PROXY}:
                        raise
                    self.found["skipped"][name] = str(reason).splitlines()[0]
                    self.say(f"[yellow]without {name}[/]: {reason}")
            yield able

    def _entries(self, engine: Process, able: dict[str, Target], rig: Rig) -> None:  # noqa: ARG002 - all parts are called alike
        self.say("entries")
        self.found["entries"] = {}
        for title, talk in entries.CASES.items():
            counted = entries.measured(talk)
            self.found["entries"][title] = {"all": counted.python.total(), "ours": entries.ours(counted), "c": counted.c}

    def _cost(self, engine: Process, able: dict[str, Target], rig: Rig) -> None:  # noqa: ARG002
        self.found["cost"] = []
        for case in self.extent.cases:
            self.say(f"cost: {case.name}")
            some = Rig(engine, {name: t for name, t in rig.targets.items() if not (case.chunks and name in NOT_STREAMED)})
            self.found["cost"].append(run_case(some, case))
            some.close()

    def _growth(self, engine: Process, able: dict[str, Target], rig: Rig) -> None:  # noqa: ARG002
        self.say(f"growth: {self.extent.growth_sessions} sessions of {self.extent.growth_marks[-1]} turns")
        self.found["growth"] = run_growth(rig, self.extent.growth_sessions, self.extent.growth_marks)

    def _load(self, engine: Process, able: dict[str, Target], rig: Rig) -> None:  # noqa: ARG002
        self.found["load"] = []
        for row in self.extent.loads:
            self.say(f"load: {row.shape}, {row.connections} at once")
            self.found["load"].append(loads.run_load(engine, able, row))

    def _open(self, engine: Process, able: dict[str, Target], rig: Rig) -> None:  # noqa: ARG002
        self.say("open loop: 141 KB")
        first = loads.run_load(engine, {PROXY: able[PROXY]}, Row("141 KB", 16, 2.0, 1))["targets"][PROXY][0]
        some = [able[name] for name in ("relay", PROXY, PROXY_REDIS) if name in able]
        shares, seconds = self.extent.open_shares, self.extent.open_seconds
        runs = loads.run_open(engine, some, first["calls_per_s"], shares, seconds)
        self.found["open"] = {"capacity": first["calls_per_s"], "cpu_us": first["cpu_us"], "runs": runs}

    def _rollouts(self, engine: Process, able: dict[str, Target], rig: Rig) -> None:  # noqa: ARG002
        self.say(f"rollouts: 32 sessions x {self.extent.rollout_turns} turns")
        some = [target for name, target in able.items() if name not in {"litellm", *NOT_STREAMED}]
        self.found["rollouts"] = loads.run_rollouts(engine, some, self.extent.rollout_rounds, self.extent.rollout_turns)

    def _streams(self, engine: Process, able: dict[str, Target], rig: Rig) -> None:  # noqa: ARG002
        self.found["streams"] = []
        extent = self.extent
        # New processes: memory for earlier sessions must not count as a stream's.
        makers = {"direct": targets.direct, "relay": targets.relay, PROXY: targets.proxy}
        if extent.streams > able[PROXY].streams_possible():  # one process may not open this many files: then measure two, too
            makers[TWO] = lambda to: targets.proxy(to, workers=2)
        for name, make in makers.items():
            self.say(f"streams: {extent.streams} at once, {name}")
            with make(engine) as target:
                found = loads.run_streams(
                    engine, target, extent.streams, chunks=extent.stream_chunks, pace_ms=extent.stream_pace_ms, ramp_s=extent.stream_ramp_s
                )
            self.found["streams"].append(found)

    def _exports(self, engine: Process, able: dict[str, Target], rig: Rig) -> None:  # noqa: ARG002
        self.say("calls during an export")
        names = [name for name in (PROXY, PROXY_REDIS) if name in able]
        self.found["exports"] = [run_exports(rig, name, 60, self.extent.export_rounds) for name in names]

    def _stored(self, engine: Process, able: dict[str, Target], rig: Rig) -> None:  # noqa: ARG002
        self.say("bytes stored")
        command = [sys.executable, "-m", "bench.counted", f"http://127.0.0.1:{engine.port}", str(self.extent.counted_turns)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
        self.found["stored"] = json.loads(done.stdout.splitlines()[-1])

    def _start(self, engine: Process, able: dict[str, Target], rig: Rig) -> None:  # noqa: ARG002
        self.say("start to ready")
        walls = []
        for _ in range(self.extent.starts):
            begun = time.monotonic()
            with targets.proxy(engine):
                walls.append(round(time.monotonic() - begun, 3))
        self.found["start_s"] = walls

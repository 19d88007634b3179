"""The parts of a bench run, and how much of each is done in a full run and in a quick one."""

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from bench import counted, entries, loads, targets
from bench.cost import Case, Rig, run_case, run_growth
from bench.exports import run_exports
from bench.load import Spec
from bench.loads import Row
from bench.processes import Process
from bench.run import Run
from bench.talk import LONG, LONGEST, NEW, SMALL
from bench.targets import FLOOR, FLOOR_LOCAL, FLOOR_NAMED, FLOOR_PROVEN, NOT_STREAMED, PROXY, PROXY_REDIS, TWO, TWO_REDIS, Target

CASES = [
    Case("1 KB", SMALL, 200, per_session=2),
    Case("141 KB", LONG, 240),
    Case("141 KB, own system prompt", LONG, 80, own_system=True),
    Case("141 KB, client's own answers", LONG, 80, answered=True),
    Case("1 MB", LONGEST, 64),
    Case("141 KB, 500 chunks", LONG.streamed(500), 24, per_session=4),
    Case("1 MB, 500 chunks", LONGEST.streamed(500), 12, per_session=4),
]
QUICK_CASES = [replace(case, calls=calls) for case, calls in zip(CASES, (33, 40, 40, 40), strict=False)]
LOADS = [
    Row("1 KB", 1, 1.5, 2),
    Row("1 KB", 64, 2.0, 3),
    Row("1 KB", 1_024, 2.0),
    Row("1 KB", 4_096, 2.0),
    Row("1 KB", 16_384, 2.0),
    Row("141 KB", 1, 2.0, 2),
    Row("141 KB", 16, 2.5, 3),
    Row("141 KB", 64, 2.5, 2),
    Row("141 KB", 1_024, 20.0),  # a window several calls long: at 400 at once each takes two seconds and a half
    Row("1 MB", 16, 3.0),
    Row("141 KB, 500 chunks of 10 ms", 64, 2.0),
]
PARTS = ("entries", "cost", "growth", "load", "open", "rollouts", "streams", "exports", "stored", "start")
Extent = dict[str, dict[str, Any]]
"""Part → how much of it is done: the arguments of its method."""
FULL: Extent = {
    "cost": {"cases": CASES},
    "growth": {"sessions": 3, "marks": (10, 25, 50, 100, 150, 200)},
    "load": {"rows": LOADS},
    "open": {"shares": (0.3, 0.5, 0.7, 0.85), "seconds": 5.0},
    "rollouts": {"rounds": 2, "turns": 50},
    "streams": {"wanted": 16_384, "chunks": 12, "pace_ms": 2000, "ramp_s": 10.0},
    "exports": {"rounds": 4},
    "stored": {"turns": 200},
    "start": {"times": 5},
}
QUICK: Extent = {
    "cost": {"cases": [*QUICK_CASES, Case("141 KB, 100 chunks", LONG.streamed(100), 8)]},
    "growth": {"sessions": 1, "marks": (10, 100)},
    "load": {"rows": [Row("1 KB", 64, 1.0), Row("141 KB", 16, 1.0)]},
    "open": {"shares": (0.5,), "seconds": 2.0},
    "rollouts": {"rounds": 1, "turns": 10},
    "streams": {"wanted": 1_024, "chunks": 6, "pace_ms": 500, "ramp_s": 1.0},
    "exports": {"rounds": 1},
    "stored": {"turns": 50},
    "start": {"times": 2},
}
NOT_QUICK = {FLOOR_LOCAL, FLOOR_PROVEN, FLOOR_NAMED, TWO_REDIS}


class Suite:
    """A run: one mock engine, the targets in front of it, and a method for each part, which returns its results."""

    engine: Process
    able: dict[str, Target]

    def __init__(self, run: Run, leave_out: set[str]) -> None:
        self.say, self.leave_out = run.say, leave_out

    def run(self, parts: Collection[str], extent: Extent) -> dict[str, Any]:
        skipped: dict[str, str] = {}
        found: dict[str, Any] = {"skipped": skipped}
        with targets.mock() as self.engine, self._targets(skipped) as self.able:
            for part in (part for part in PARTS if part in parts):
                found["start_s" if part == "start" else part] = getattr(self, f"_{part}")(**extent.get(part, {}))
        return found

    def _rig(self, leave_out: Collection[str] = ()) -> contextlib.AbstractContextManager[Rig]:
        """The targets of one process, with new connections."""
        some = {name: target for name, target in self.able.items() if target.workers == 1 and name not in leave_out}
        return contextlib.closing(Rig(self.engine, some))

    @contextlib.contextmanager
    def _targets(self, skipped: dict[str, str]) -> Iterator[dict[str, Target]]:
        with contextlib.ExitStack() as stack:
            able = {}
            for name in (name for name in targets.MAKERS if name not in self.leave_out):
                try:
                    able[name] = stack.enter_context(targets.MAKERS[name](self.engine))
                except (FileNotFoundError, RuntimeError) as reason:
                    if name in {"direct", "relay", FLOOR, PROXY}:
                        raise
                    skipped[name] = str(reason).splitlines()[0]
                    self.say(f"[yellow]without {name}[/]: {reason}")
            yield able

    def _entries(self) -> dict[str, dict[str, int]]:
        self.say("entries")
        seen = {title: entries.measured(talk) for title, talk in entries.CASES.items()}
        return {title: {"all": one.python.total(), "ours": one.ours(), "c": one.c} for title, one in seen.items()}

    def _cost(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        found = []
        for case in cases:
            self.say(f"cost: {case.name}")
            with self._rig(NOT_STREAMED if case.shape.chunks else ()) as rig:
                found.append(run_case(rig, case))
        return found

    def _growth(self, sessions: int, marks: Sequence[int]) -> dict[str, Any]:
        self.say(f"growth: {sessions} sessions of {marks[-1]} turns")
        with self._rig() as rig:
            return run_growth(rig, sessions, marks)

    def _load(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        found = []
        for row in rows:
            self.say(f"load: {row.shape}, {row.connections} at once")
            found.append(loads.run_load(self.engine, self.able, row))
        return found

    def _open(self, shares: Sequence[float], seconds: float) -> dict[str, Any]:
        self.say("open loop: 141 KB")
        first = loads.run_load(self.engine, {PROXY: self.able[PROXY]}, Row("141 KB", 16, 2.0))["targets"][PROXY][0]
        some = [self.able[name] for name in ("relay", PROXY, PROXY_REDIS) if name in self.able]
        specs = [Spec(rate=round(first["calls_per_s"] * share, 1), seconds=seconds, warm_s=0.5, shape=LONG) for share in shares]
        runs = [loads.drive(self.engine, target, spec) for spec in specs for target in some]
        return {"capacity": first["calls_per_s"], "cpu_us": first["cpu_us"], "runs": runs}

    def _rollouts(self, rounds: int, turns: int) -> list[dict[str, Any]]:
        self.say(f"rollouts: 32 sessions x {turns} turns")
        some = [target for name, target in self.able.items() if name not in {"litellm", *NOT_STREAMED}]
        # So miles measured its session server (radixark/miles #1660). A run that is cut off has the turns per second of shorter histories.
        spec = Spec(connections=32, once=True, shape=NEW, seconds=30.0, turns=turns)
        return [loads.drive(self.engine, target, spec, alone=False) for _ in range(rounds) for target in some]

    def _streams(self, wanted: int, **extent: Any) -> list[dict[str, Any]]:
        found = []
        names = ["direct", "relay", PROXY]
        if wanted > self.able[PROXY].streams_possible():  # one process may not open this many files: then measure two, too
            names.append(TWO)
        for name in names:
            self.say(f"streams: {wanted} at once, {name}")
            with targets.MAKERS[name](self.engine) as target:  # new processes: memory for earlier sessions must not count as a stream's
                found.append(loads.run_streams(self.engine, target, wanted, **extent))
        return found

    def _exports(self, rounds: int) -> list[dict[str, Any]]:
        self.say("calls during an export")
        return [run_exports(self.able[name], 60, rounds) for name in (PROXY, PROXY_REDIS) if name in self.able]

    def _stored(self, turns: int) -> dict[str, Any]:
        self.say("bytes stored")
        return asyncio.run(counted.stored(self.engine.url, turns))

    def _start(self, times: int) -> list[float]:
        self.say("start to ready")
        walls = []
        for _ in range(times):
            begun = time.monotonic()
            with targets.proxy(self.engine):
                walls.append(round(time.monotonic() - begun, 3))
        return walls

"""The parts of a bench run, and how much of each is done in a full run and in a quick one."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from bench import entries, loads, targets
from bench.cost import Case, Rig, run_case, run_growth
from bench.exports import run_exports
from bench.loads import Row
from bench.processes import ROOT, Process
from bench.progress import Progress
from bench.talk import LONG, LONGEST, SMALL, Shape
from bench.targets import FLOOR, FLOOR_LOCAL, FLOOR_NAMED, FLOOR_PROVEN, NOT_STREAMED, PROXY, PROXY_REDIS, TWO, TWO_REDIS, Target


def _streamed(shape: Shape, chunks: int) -> Shape:
    return msgspec.structs.replace(shape, tokens=chunks, chunks=chunks)


CASES = [
    Case("1 KB", SMALL, 200, per_session=2),
    Case("141 KB", LONG, 240),
    Case("141 KB, own system prompt", LONG, 80, own_system=True),
    Case("141 KB, client's own answers", LONG, 80, answered=True),
    Case("1 MB", LONGEST, 64),
    Case("141 KB, 500 chunks", _streamed(LONG, 500), 24, per_session=4),
    Case("1 MB, 500 chunks", _streamed(LONGEST, 500), 12, per_session=4),
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
    """How much is done; of a part, the arguments of its function."""

    cases: list[Case]
    growth: dict[str, Any]
    loads: list[Row]
    open: dict[str, Any]
    rollouts: dict[str, int]
    streams: dict[str, Any]
    export_rounds: int
    counted_turns: int
    starts: int
    leave_out: frozenset[str] = frozenset()


PARTS = ("entries", "cost", "growth", "load", "open", "rollouts", "streams", "exports", "stored", "start")
FULL = Extent(
    cases=CASES,
    growth={"sessions": 3, "marks": (10, 25, 50, 100, 150, 200)},
    loads=LOADS,
    open={"shares": (0.3, 0.5, 0.7, 0.85), "seconds": 5.0},
    rollouts={"rounds": 2, "turns": 50},
    streams={"wanted": 16_384, "chunks": 12, "pace_ms": 2000, "ramp_s": 10.0},
    export_rounds=4,
    counted_turns=200,
    starts=5,
)
QUICK = Extent(
    cases=[
        *(replace(case, calls=calls) for case, calls in zip(CASES, (33, 40, 40, 40), strict=False)),
        Case("141 KB, 100 chunks", _streamed(LONG, 100), 8),
    ],
    growth={"sessions": 1, "marks": (10, 100)},
    loads=[Row("1 KB", 64, 1.0, 1), Row("141 KB", 16, 1.0, 1)],
    open={"shares": (0.5,), "seconds": 2.0},
    rollouts={"rounds": 1, "turns": 10},
    streams={"wanted": 1_024, "chunks": 6, "pace_ms": 500, "ramp_s": 1.0},
    export_rounds=1,
    counted_turns=50,
    starts=2,
    leave_out=frozenset({FLOOR_LOCAL, FLOOR_PROVEN, FLOOR_NAMED, TWO_REDIS}),
)


class Suite:
    """A run: one mock engine, the targets in front of it, and a method for each part, which returns its results."""

    engine: Process
    able: dict[str, Target]

    def __init__(self, extent: Extent, parts: set[str], leave_out: set[str], progress: Progress) -> None:
        self.extent, self.parts, self.leave_out, self.say = extent, parts, leave_out, progress.say

    def run(self) -> dict[str, Any]:
        skipped: dict[str, str] = {}
        found: dict[str, Any] = {"skipped": skipped}
        with targets.mock() as self.engine, self._targets(skipped) as self.able:
            for part in PARTS:
                if part in self.parts:
                    found["start_s" if part == "start" else part] = getattr(self, f"_{part}")()
        return found

    def _rig(self, leave_out: Collection[str] = ()) -> contextlib.AbstractContextManager[Rig]:
        """The targets of one process, with new connections."""
        some = {name: target for name, target in self.able.items() if target.workers == 1 and name not in leave_out}
        return contextlib.closing(Rig(self.engine, some))

    @contextlib.contextmanager
    def _targets(self, skipped: dict[str, str]) -> Iterator[dict[str, Target]]:
        with contextlib.ExitStack() as stack:
            able = {}
            for name, make in targets.MAKERS.items():
                if name in self.leave_out:
                    continue
                try:
                    able[name] = stack.enter_context(make(self.engine))
                except (FileNotFoundError, RuntimeError) as reason:
                    if name in {"direct", "relay", FLOOR, PROXY}:
                        raise
                    skipped[name] = str(reason).splitlines()[0]
                    self.say(f"[yellow]without {name}[/]: {reason}")
            yield able

    def _entries(self) -> dict[str, dict[str, int]]:
        self.say("entries")
        counted = {title: entries.measured(talk) for title, talk in entries.CASES.items()}
        return {title: {"all": one.python.total(), "ours": entries.ours(one), "c": one.c} for title, one in counted.items()}

    def _cost(self) -> list[dict[str, Any]]:
        found = []
        for case in self.extent.cases:
            self.say(f"cost: {case.name}")
            with self._rig(NOT_STREAMED if case.shape.chunks else ()) as rig:
                found.append(run_case(rig, case))
        return found

    def _growth(self) -> dict[str, Any]:
        self.say(f"growth: {self.extent.growth['sessions']} sessions of {self.extent.growth['marks'][-1]} turns")
        with self._rig() as rig:
            return run_growth(rig, **self.extent.growth)

    def _load(self) -> list[dict[str, Any]]:
        found = []
        for row in self.extent.loads:
            self.say(f"load: {row.shape}, {row.connections} at once")
            found.append(loads.run_load(self.engine, self.able, row))
        return found

    def _open(self) -> dict[str, Any]:
        self.say("open loop: 141 KB")
        first = loads.run_load(self.engine, {PROXY: self.able[PROXY]}, Row("141 KB", 16, 2.0, 1))["targets"][PROXY][0]
        some = [self.able[name] for name in ("relay", PROXY, PROXY_REDIS) if name in self.able]
        runs = loads.run_open(self.engine, some, first["calls_per_s"], **self.extent.open)
        return {"capacity": first["calls_per_s"], "cpu_us": first["cpu_us"], "runs": runs}

    def _rollouts(self) -> list[dict[str, Any]]:
        self.say(f"rollouts: 32 sessions x {self.extent.rollouts['turns']} turns")
        some = [target for name, target in self.able.items() if name not in {"litellm", *NOT_STREAMED}]
        return loads.run_rollouts(self.engine, some, **self.extent.rollouts)

    def _streams(self) -> list[dict[str, Any]]:
        wanted, found = self.extent.streams["wanted"], []
        names = ["direct", "relay", PROXY]
        if wanted > self.able[PROXY].streams_possible():  # one process may not open this many files: then measure two, too
            names.append(TWO)
        for name in names:
            self.say(f"streams: {wanted} at once, {name}")
            with targets.MAKERS[name](self.engine) as target:  # new processes: memory for earlier sessions must not count as a stream's
                found.append(loads.run_streams(self.engine, target, **self.extent.streams))
        return found

    def _exports(self) -> list[dict[str, Any]]:
        self.say("calls during an export")
        found = []
        for name in (PROXY, PROXY_REDIS):
            if name in self.able:
                with self._rig() as rig:
                    found.append(run_exports(rig, name, 60, self.extent.export_rounds))
        return found

    def _stored(self) -> dict[str, Any]:
        self.say("bytes stored")
        command = [sys.executable, "-m", "bench.counted", self.engine.url, str(self.extent.counted_turns)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def _start(self) -> list[float]:
        self.say("start to ready")
        walls = []
        for _ in range(self.extent.starts):
            begun = time.monotonic()
            with targets.proxy(self.engine):
                walls.append(round(time.monotonic() - begun, 3))
        return walls

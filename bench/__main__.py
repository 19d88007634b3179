"""Runs the bench, prints the results and writes bench/out/<time>.json: `python -m bench [--quick]`."""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import entries, held, loads, page, targets
from bench.cost import Case, Rig, run_case, run_exports, run_growth
from bench.figures import Figures, aims
from bench.load import Spec
from bench.loads import Row
from bench.processes import Process
from bench.run import Run, machine
from bench.talk import LONG, LONGEST, NEW, SMALL
from bench.targets import FLOOR, FLOOR_LOCAL, FLOOR_NAMED, FLOOR_PROVEN, NOT_STREAMED, PROXY, PROXY_REDIS, TWO, TWO_REDIS, Target

BASELINE = Path(__file__).parent / "baseline.json"
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
QUICK_CASES.append(Case("141 KB, 100 chunks", LONG.streamed(100), 8))
LOADS = {
    "1 KB": {1: (1.5, 2), 64: (2.0, 3), 1_024: (2.0, 1), 4_096: (2.0, 1), 16_384: (2.0, 1)},
    # 1,024: a window several calls long, as at 400 at once each takes two seconds and a half
    "141 KB": {1: (2.0, 2), 16: (2.5, 3), 64: (2.5, 2), 1_024: (20.0, 1)},
    "1 MB": {16: (3.0, 1)},
    "141 KB, 500 chunks of 10 ms": {64: (2.0, 1)},
}
"""Shape → rollouts at once → seconds and rounds."""
QUICK_LOADS = {"1 KB": {64: (1.0, 1)}, "141 KB": {16: (1.0, 1)}}
EXTENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "entries": ({}, {}),
    "cost": ({"cases": CASES}, {"cases": QUICK_CASES}),
    "growth": ({"sessions": 3, "marks": (10, 25, 50, 100, 150, 200)}, {"sessions": 1, "marks": (10, 100)}),
    "load": ({"rows": LOADS}, {"rows": QUICK_LOADS}),
    "open": ({"shares": (0.3, 0.5, 0.7, 0.85), "seconds": 5.0}, {"shares": (0.5,), "seconds": 2.0}),
    "rollouts": ({"rounds": 2, "turns": 50}, {"rounds": 1, "turns": 10}),
    "streams": (
        {"wanted": 16_384, "chunks": 12, "pace_ms": 2000, "ramp_s": 10.0},
        {"wanted": 1_024, "chunks": 6, "pace_ms": 500, "ramp_s": 1.0},
    ),
    "exports": ({"rounds": 4}, {"rounds": 1}),
    "stored": ({"turns": 200}, {"turns": 50}),
    "start": ({"times": 5}, {"times": 2}),
}
"""Part → the arguments of its method, in a full run and in a quick one."""
NOT_QUICK = {FLOOR_LOCAL, FLOOR_PROVEN, FLOOR_NAMED, TWO_REDIS}


class Suite:
    """A run: one mock engine, the targets in front of it, and a method for each part, which returns its results."""

    engine: Process
    able: dict[str, Target]

    def __init__(self, run: Run, leave_out: set[str]) -> None:
        self.say, self.leave_out = run.say, leave_out

    def run(self, parts: Collection[str], *, quick: bool) -> dict[str, Any]:
        skipped: dict[str, str] = {}
        found: dict[str, Any] = {"skipped": skipped}
        with targets.mock() as self.engine, self._targets(skipped) as self.able:
            for part in (part for part in EXTENTS if part in parts):
                found["start_s" if part == "start" else part] = getattr(self, f"_{part}")(**EXTENTS[part][quick])
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

    def _load(self, rows: dict[str, dict[int, tuple[float, int]]]) -> list[dict[str, Any]]:
        found = []
        for row in (Row(shape, connections, *extent) for shape, some in rows.items() for connections, extent in some.items()):
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
        found, short = [], wanted > self.able[PROXY].streams_possible()
        for name in ("direct", "relay", PROXY, *((TWO,) if short else ())):  # one process may not open this many files: then two, too
            self.say(f"streams: {wanted} at once, {name}")
            with targets.MAKERS[name](self.engine) as target:  # new processes: memory for earlier sessions must not count as a stream's
                found.append(loads.run_streams(self.engine, target, wanted, **extent))
        return found

    def _exports(self, rounds: int) -> list[dict[str, Any]]:
        self.say("calls during an export")
        return [run_exports(self.able[name], 60, rounds) for name in (PROXY, PROXY_REDIS) if name in self.able]

    def _stored(self, turns: int) -> dict[str, Any]:
        self.say("bytes stored")
        return asyncio.run(held.stored(self.engine.url, turns))

    def _start(self, times: int) -> list[float]:
        self.say("start to ready")
        walls = []
        for _ in range(times):
            begun = time.monotonic()
            with targets.proxy(self.engine):
                walls.append(round(time.monotonic() - begun, 3))
        return walls


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench", description="Measure what the proxy costs per call, next to other targets.")
    asked.add_argument("--quick", action="store_true", help="fewer calls, shapes and rounds: under two minutes, noisier")
    asked.add_argument("--parts", help=f"parts, separated by commas: {','.join(EXTENTS)} (default: all)")
    asked.add_argument("--without", default="", help="targets to omit, separated by commas, such as litellm,rerender")
    asked.add_argument("--save-baseline", action="store_true", help="write bench/baseline.json, too")
    options = asked.parse_args()
    parts = set(options.parts.split(",") if options.parts else EXTENTS)
    if unknown := parts - EXTENTS.keys():
        asked.error(f"unknown part: {', '.join(sorted(unknown))}")
    run = Run()
    found = {"machine": machine(), "quick": options.quick}
    leave_out = {*options.without.split(","), *(NOT_QUICK if options.quick else ())}
    found |= Suite(run, leave_out).run(parts, quick=options.quick)
    found |= {"seconds": run.seconds, "figures": Figures(found), "aims": aims(found)}
    page.show(found, json.loads(BASELINE.read_text()) if BASELINE.exists() else None, run.console)
    if options.save_baseline:
        kept = {name: found[name] for name in ("machine", "quick", "seconds", "figures", "aims")}
        BASELINE.write_text(json.dumps(kept, indent=1) + "\n")
    run.keep(found)


if __name__ == "__main__":
    main()

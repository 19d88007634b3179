"""`python -m bench [--quick]`: run everything, print the table, write bench/out/<time>.json."""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench import processes, report
from bench.exports import run_exports
from bench.measure import Case, Rig, engine_alone, run_case, run_growth

HERE = Path(__file__).parent
BASELINE = HERE / "baseline.json"

CASES = [
    Case("1 KB", 1_000, 4, 200, tokens=16, tail=64, per_session=2),
    Case("141 KB", 141_000, 200, 240),
    Case("1 MB", 1_000_000, 400, 64),
    Case("1 KB, 100 chunks", 1_000, 4, 24, tokens=100, tail=64, chunks=100, per_session=2),
    Case("141 KB, 100 chunks", 141_000, 200, 32, tokens=100, chunks=100),
    Case("141 KB, 500 chunks", 141_000, 200, 16, tokens=500, chunks=500, per_session=4),
    Case("1 MB, 100 chunks", 1_000_000, 400, 16, tokens=100, chunks=100, per_session=4),
]
NOT_QUICK = {"141 KB, 500 chunks", "1 MB, 100 chunks"}
WITH_REDIS = {"1 KB", "141 KB", "1 MB", "141 KB, 100 chunks"}
MARKS = (10, 100, 200)


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    asked.add_argument("--quick", action="store_true", help="fewer calls and cases: under 40 s, noisier")
    asked.add_argument("--only", default="", help="only cases whose name contains this; no growth")
    asked.add_argument("--store", choices=["memory", "redis", "both"], default="both")
    asked.add_argument("--save-baseline", action="store_true", help="write bench/baseline.json, too")
    options = asked.parse_args()
    begun = time.monotonic()
    found = run(quick=options.quick, only=options.only, store=options.store)
    found["seconds"] = round(time.monotonic() - begun, 1)
    found["aims"] = report.aims(found)
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else None
    report.show(found, baseline)
    out = HERE / "out"
    out.mkdir(exist_ok=True)
    written = out / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    written.write_text(json.dumps(found, indent=1))
    if options.save_baseline:
        BASELINE.write_text(json.dumps(found, indent=1) + "\n")
    Console().print(f"{found['seconds']} s; raw figures in bench/out/{written.name}")


def run(*, quick: bool, only: str, store: str) -> dict[str, Any]:
    found: dict[str, Any] = {"machine": machine(), "quick": quick, "cases": [], "growth": [], "exports": []}
    with processes.mock() as engine, processes.relay(engine) as relay, Progress(transient=True) as progress:
        found["engine_alone"] = engine_alone(engine, relay, 0.5 if quick else 2.0)
        for kind in ("memory", "redis"):
            if store not in {kind, "both"}:
                continue
            with rig_for(kind, engine, relay) as rig:
                for case in CASES:
                    if only not in case.name or (quick and case.name in NOT_QUICK) or (kind == "redis" and case.name not in WITH_REDIS):
                        continue
                    calls = max(8, case.calls // 5) if quick else case.calls
                    found["cases"].append(_case(rig, case, calls, progress))
                if not only:
                    found["growth"].append(_growth(rig, 1 if quick else 3, progress))
                    found["exports"].append(_exports(rig, 2 if quick else 5, progress))
                found.setdefault("proxy_rss_mb", {})[kind] = round(rig.proxy.rss() / 2**20)
        if not only:
            found["memory_store"] = counted(engine, 50 if quick else 200)
    return found


def _case(rig: Rig, case: Case, calls: int, progress: Progress) -> dict[str, Any]:
    chosen = Case(**{**vars(case), "calls": calls})
    task = progress.add_task(f"{case.name}, {'redis' if rig.redis else 'memory'}", total=calls + case.per_session)
    row = run_case(rig, chosen, lambda: progress.advance(task))
    progress.remove_task(task)
    return row


def _growth(rig: Rig, sessions: int, progress: Progress) -> dict[str, Any]:
    around = 4
    task = progress.add_task("growth", total=sessions * (MARKS[-1] + around))
    grown = run_growth(rig, sessions, MARKS, around, lambda: progress.advance(task))
    progress.remove_task(task)
    return grown


def _exports(rig: Rig, rounds: int, progress: Progress) -> dict[str, Any]:
    task = progress.add_task("calls beside an export", total=3 * rounds)
    found = run_exports(rig, 60, rounds, lambda: progress.advance(task))
    progress.remove_task(task)
    return found


@contextlib.contextmanager
def rig_for(kind: str, engine: processes.Process, relay: processes.Process) -> Iterator[Rig]:
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(processes.redis()) if kind == "redis" else None
        url = f"redis://127.0.0.1:{redis.port}/0" if redis else "memory:"
        yield Rig(engine, relay, stack.enter_context(processes.proxy(engine, url)), redis)


def counted(engine: processes.Process, turns: int) -> dict[str, Any]:
    """Weigh the memory store, in a process of its own."""
    command = [sys.executable, "-m", "bench.counted", f"http://127.0.0.1:{engine.port}", str(turns)]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=True, timeout=120)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def machine() -> dict[str, Any]:
    """What the figures came from; no names, no paths."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return {**_basics(), "cpu": line.partition(":")[2].strip()}
    return _basics()


def _basics() -> dict[str, Any]:
    import aiohttp  # noqa: PLC0415
    import uvloop  # noqa: PLC0415

    versions = {"python": platform.python_version(), "aiohttp": aiohttp.__version__, "uvloop": uvloop.__version__}
    return {"cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}", **versions}


if __name__ == "__main__":
    main()

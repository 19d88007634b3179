"""Runs the bench, prints the results and writes bench/out/<time>.json: `python -m bench [--quick]`."""

import argparse
import json
import time
from pathlib import Path

from rich.console import Console

from bench import report, suite
from bench.aims import aims
from bench.figures import figures
from bench.machine import machine, raise_file_limit

HERE = Path(__file__).parent
BASELINE = HERE / "baseline.json"


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench", description="Measure what the proxy costs per call, next to other targets.")
    asked.add_argument("--quick", action="store_true", help="fewer calls, shapes and rounds: under two minutes, noisier")
    asked.add_argument("--parts", help=f"parts, separated by commas: {','.join(suite.PARTS)} (default: all)")
    asked.add_argument("--without", default="", help="targets to omit, separated by commas, such as litellm,rerender")
    asked.add_argument("--save-baseline", action="store_true", help="write bench/baseline.json, too")
    options = asked.parse_args()
    extent = suite.QUICK if options.quick else suite.FULL
    parts = set(options.parts.split(",") if options.parts else suite.PARTS)
    if parts - set(suite.PARTS):
        asked.error(f"unknown part: {', '.join(sorted(parts - set(suite.PARTS)))}")
    raise_file_limit()
    console = Console(width=170)
    begun = time.monotonic()
    found = {"machine": machine(), "quick": options.quick}
    found |= suite.Suite(extent, parts, extent.leave_out | set(filter(None, options.without.split(","))), console).run()
    found |= {"seconds": round(time.monotonic() - begun), "figures": figures(found), "aims": aims(found)}
    report.show(found, json.loads(BASELINE.read_text()) if BASELINE.exists() else None, console)
    out = HERE / "out"
    out.mkdir(exist_ok=True)
    written = out / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    written.write_text(json.dumps(found) + "\n")
    if options.save_baseline:
        kept = {name: found[name] for name in ("machine", "quick", "seconds", "figures", "aims")}
        BASELINE.write_text(json.dumps(kept, indent=1) + "\n")
    console.print(f"{found['seconds']} s; raw figures in bench/out/{written.name}")


if __name__ == "__main__":
    main()

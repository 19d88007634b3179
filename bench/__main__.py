"""Runs the bench, prints the results and writes bench/out/<time>.json: `python -m bench [--quick]`."""

import argparse
import json
from pathlib import Path

from bench import page, suite
from bench.figures import Figures, aims
from bench.run import Run, machine

BASELINE = Path(__file__).parent / "baseline.json"


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench", description="Measure what the proxy costs per call, next to other targets.")
    asked.add_argument("--quick", action="store_true", help="fewer calls, shapes and rounds: under two minutes, noisier")
    asked.add_argument("--parts", help=f"parts, separated by commas: {','.join(suite.PARTS)} (default: all)")
    asked.add_argument("--without", default="", help="targets to omit, separated by commas, such as litellm,rerender")
    asked.add_argument("--save-baseline", action="store_true", help="write bench/baseline.json, too")
    options = asked.parse_args()
    parts = set(options.parts.split(",") if options.parts else suite.PARTS)
    if parts - set(suite.PARTS):
        asked.error(f"unknown part: {', '.join(sorted(parts - set(suite.PARTS)))}")
    run = Run()
    found = {"machine": machine(), "quick": options.quick}
    leave_out = {*options.without.split(","), *(suite.NOT_QUICK if options.quick else ())}
    found |= suite.Suite(run, leave_out).run(parts, suite.QUICK if options.quick else suite.FULL)
    found |= {"seconds": run.seconds, "figures": Figures(found), "aims": aims(found)}
    page.show(found, json.loads(BASELINE.read_text()) if BASELINE.exists() else None, run.console)
    if options.save_baseline:
        kept = {name: found[name] for name in ("machine", "quick", "seconds", "figures", "aims")}
        BASELINE.write_text(json.dumps(kept, indent=1) + "\n")
    run.keep(found)


if __name__ == "__main__":
    main()

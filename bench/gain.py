"""Measures what the engine gains, on a real vLLM: `python -m bench.gain [--quick]`. Writes bench/out/gain-<time>.json.

Sessions run call by call, directly and through the proxy (to a stock engine, and to one with the plugin), until their histories are 2k to
32k tokens long. At each of these marks the bench measures the time to the first token, and the share of the prompt that the prefix cache
had. Sessions of one case run side by side with the same text, so that disturbances of the machine affect all of them.
"""

import argparse
import contextlib
import json
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.gain_engine import CONFIG, Engine, engines
from bench.gain_report import show
from bench.gain_rollout import DIRECT, DRIFT, PLUGIN, PROXY, SHORT, CallTarget, Rollout, agent, chat, opened, run_bodies
from bench.run import Run

LOCAL = "proxy --tokenizer"
PLAYS = {"agent": agent, "chat": chat}


class Case(NamedTuple):
    """One kind of session, run through these targets with the same text on each."""

    play: str
    drift: float
    targets: tuple[str, ...]


class Extent(NamedTuple):
    """How much is done. `repeats`: measured calls of each kind at a mark; `rounds`: sessions of each kind; `bodies`: calls of each body."""

    marks: list[int]
    cases: list[Case]
    repeats: int
    bodies: int
    rounds: int = 1


USUAL = (DIRECT, PROXY, PLUGIN)
CASES = [
    Case("agent", DRIFT, (DIRECT, PROXY, LOCAL, PLUGIN)),
    *(Case(play, drift, USUAL) for play, drift in (("agent", 0.0), ("chat", DRIFT), ("chat", 0.0))),
]
FULL = Extent([2_000, 4_000, 8_000, 16_000, 32_000], CASES, repeats=3, bodies=15)
QUICK = Extent([2_000, 8_000], [Case("agent", DRIFT, USUAL), Case("agent", 0.0, (DIRECT,))], repeats=2, bodies=9)


def rollout_of(target: CallTarget, case: Case, which: str) -> Rollout:
    name = f"{re.sub('[^a-z]+', '-', target.name)}-{case.play}-{case.drift}-{which}-{time.time_ns()}"
    return Rollout(target, name, f"{case}{which}", case.play == "agent", case.drift)


def run_calls(extent: Extent, stock: Engine, plugin: Engine, run: Run) -> list[dict[str, Any]]:
    """The calls of all cases, through the targets in front of a stock engine and of one with the plugin."""
    with contextlib.ExitStack() as stack:
        targets = {}
        for name in sorted({name for case in extent.cases for name in case.targets}):
            engine = plugin if name == PLUGIN else stock
            targets[name] = stack.enter_context(opened(name, engine, tokenizer=name in {LOCAL, PLUGIN}))
            run.say(f"warming {name}")  # tail shapes are verified once per proxy process, and code runs slower the first time
            for play, played in PLAYS.items():
                list(played(rollout_of(targets[name], Case(play, DRIFT, ()), "warm"), [400], 2, SHORT))
        return [record for case in extent.cases for n in range(extent.rounds) for record in run_case(extent, case, targets, n, run)]


def run_case(extent: Extent, case: Case, targets: dict[str, CallTarget], n: int, run: Run) -> list[dict[str, Any]]:
    played = {name: rollout_of(targets[name], case, str(n)) for name in case.targets}
    steps = {name: PLAYS[case.play](rollout, extent.marks, extent.repeats) for name, rollout in played.items()}
    for mark in extent.marks:
        for name, step in steps.items():
            run.say(f"{case.play}, {'replies drift' if case.drift else 'no drift'}, {mark:,} tokens: {name}")
            next(step)
    for rollout in played.values():
        rollout.target.check_continued(rollout.name, len(rollout.records))
    of = {"play": case.play, "drift": case.drift, "round": n}
    return [{**record, **of, "target": name} for name, rollout in played.items() for record in rollout.records]


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.gain", description="Measure on a real vLLM what the engine gains.")
    asked.add_argument("--quick", action="store_true", help="two lengths, fewer cases: under three minutes")
    asked.add_argument("--rounds", type=int, default=1, help="sessions of each kind (default: %(default)s)")
    asked.add_argument("--marks", default="", help="lengths of history in tokens, separated by commas")
    asked.add_argument("--config", type=Path, help="config.json of another model, to be served with random weights, for example on a GPU")
    asked.add_argument("--model-dir", type=Path, help="serve this model folder as it is, weights included; it must speak Qwen3's template")
    asked.add_argument("--engine-args", default="", help="more words for vLLM's command line, in one string; they win over the bench's own")
    options = asked.parse_args()
    extent = (QUICK if options.quick else FULL)._replace(rounds=options.rounds)
    extent = extent._replace(marks=[int(mark) for mark in options.marks.split(",") if mark] or extent.marks)
    run, found = Run(), {"quick": options.quick, "extent": extent._asdict(), "engine_args": options.engine_args}
    run.say("starting vLLM, stock and with the plugin: about two minutes")
    config = json.loads(options.config.read_text()) if options.config else CONFIG
    with engines(found, config, options.engine_args, options.model_dir) as (stock, plugin):
        found["calls"] = run_calls(extent, stock, plugin, run)
        run.say("what a body costs the API server")
        found["bodies"] = run_bodies(stock, plugin, extent.marks, extent.bodies)
    found["seconds"] = run.seconds
    show(found, run.console)
    run.keep(found, "gain-", "; python -m bench.gain_report writes the page")


if __name__ == "__main__":
    main()

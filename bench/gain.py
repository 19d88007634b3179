"""Measures what the engine gains, on a real vLLM: `python -m bench.gain [--quick]`. Writes bench/out/gain-<time>.json.

Sessions run call by call, directly and through the proxy (to a stock engine, and to one with the plugin), until their histories are 2k to
32k tokens long. At each of these marks the bench measures the time to the first token, and reads from the engine's metrics how much of the
prompt was in its prefix cache. Sessions of one case run side by side, mark by mark, with the same text, so that disturbances of the machine
affect all of them.
"""

import argparse
import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.gain_bodies import run_bodies
from bench.gain_engine import CONFIG, Engine, engines
from bench.gain_report import show
from bench.gain_rollout import DIRECT, DRIFT, PLUGIN, PROXY, SHORT, CallTarget, Rollout, agent, chat, opened
from bench.run import Run

LOCAL = "proxy --tokenizer"


@dataclass(frozen=True)
class Case:
    """One kind of session, run through these targets with the same text on each."""

    play: str
    drift: float
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Extent:
    """How much is done. `repeats`: measured calls of each kind at a mark; `rounds`: sessions of each kind."""

    marks: list[int]
    cases: list[Case]
    repeats: int
    rounds: int
    bodies: int


PLAYS: dict[str, Callable[..., Iterator[None]]] = {"agent": agent, "chat": chat}
FULL = Extent(
    [2_000, 4_000, 8_000, 16_000, 32_000],
    [
        Case("agent", DRIFT, (DIRECT, PROXY, LOCAL, PLUGIN)),
        Case("agent", 0.0, (DIRECT, PROXY, PLUGIN)),
        Case("chat", DRIFT, (DIRECT, PROXY, PLUGIN)),
        Case("chat", 0.0, (DIRECT, PROXY, PLUGIN)),
    ],
    repeats=3,
    rounds=1,
    bodies=15,
)
QUICK = Extent(
    [2_000, 8_000], [Case("agent", DRIFT, (DIRECT, PROXY, PLUGIN)), Case("agent", 0.0, (DIRECT,))], repeats=2, rounds=1, bodies=9
)


class Gain:
    """A run: a stock engine and one with the plugin, the targets in front of them, and the results."""

    def __init__(self, extent: Extent, engine: Engine, plugin: Engine, run: Run) -> None:
        self.extent, self.engine, self.plugin, self.say = extent, engine, plugin, run.say

    def run(self) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            wanted = {name for case in self.extent.cases for name in case.targets}
            targets = {}
            for name in sorted(wanted):
                engine = self.plugin if name == PLUGIN else self.engine
                targets[name] = stack.enter_context(opened(name, engine, tokenizer=name in {LOCAL, PLUGIN}))
            for target in targets.values():
                self._warm(target)
            found = [record for case in self.extent.cases for n in range(self.extent.rounds) for record in self._case(case, targets, n)]
            self.say("what a body costs the API server")
            return {"calls": found, "bodies": run_bodies(self.engine, self.plugin, self.extent.marks, self.extent.bodies)}

    def _warm(self, target: CallTarget) -> None:
        """A short session of each kind: tail shapes are verified once per proxy process, and code runs slower the first time."""
        self.say(f"warming {target.name}")
        for name, play in PLAYS.items():
            for _ in play(self._rollout(target, Case(name, DRIFT, ()), "warm"), [400], 2, SHORT):
                pass

    def _rollout(self, target: CallTarget, case: Case, which: str) -> Rollout:
        seed = f"{case.play}-{case.drift}-{which}-{time.time_ns()}"
        return Rollout(target, f"{re.sub('[^a-z]+', '-', target.name)}-{seed}", f"{case}{which}", case.play == "agent", case.drift)

    def _case(self, case: Case, targets: dict[str, CallTarget], n: int) -> list[dict[str, Any]]:
        played = {name: self._rollout(targets[name], case, str(n)) for name in case.targets}
        steps = {name: PLAYS[case.play](rollout, self.extent.marks, self.extent.repeats) for name, rollout in played.items()}
        for mark in self.extent.marks:
            for name, step in steps.items():
                self.say(f"{case.play}, {'replies drift' if case.drift else 'no drift'}, {mark:,} tokens: {name}")
                next(step)
        for rollout in played.values():
            if rollout.target.front and rollout.target.continued(rollout.name) != len(rollout.records):
                raise RuntimeError(f"{rollout.target.name}: turns of {rollout.name} are missing")
        return [
            {**record, "play": case.play, "drift": case.drift, "target": name, "round": n}
            for name, rollout in played.items()
            for record in rollout.records
        ]


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.gain", description="Measure on a real vLLM what the engine gains.")
    asked.add_argument("--quick", action="store_true", help="two lengths, fewer cases: under three minutes")
    asked.add_argument("--rounds", type=int, default=1, help="sessions of each kind (default: %(default)s)")
    asked.add_argument("--marks", default="", help="lengths of history in tokens, separated by commas")
    asked.add_argument("--config", type=Path, help="config.json of another model, to be served with random weights, for example on a GPU")
    asked.add_argument("--model-dir", type=Path, help="serve this model folder as it is, weights included; it must speak Qwen3's template")
    asked.add_argument("--engine-args", default="", help="more words for vLLM's command line, in one string; they win over the bench's own")
    options = asked.parse_args()
    extent = QUICK if options.quick else FULL
    marks = [int(mark) for mark in options.marks.split(",") if mark] or extent.marks
    extent = replace(extent, marks=marks, rounds=options.rounds)
    run, found = Run(), {"quick": options.quick, "extent": asdict(extent), "engine_args": options.engine_args}
    run.say("starting vLLM, stock and with the plugin: about two minutes")
    config = json.loads(options.config.read_text()) if options.config else CONFIG
    with engines(found, config, options.engine_args, options.model_dir) as (engine, plugin):
        found |= Gain(extent, engine, plugin, run).run()
    found["seconds"] = run.seconds
    show(found, run.console)
    run.keep(found, "gain-", "; python -m bench.gain_report writes the page")


if __name__ == "__main__":
    main()

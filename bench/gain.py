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
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.client import Client
from bench.gain_bodies import run_bodies
from bench.gain_engine import CONFIG, Engine, accelerator, make_model, venv, vllm
from bench.gain_report import show
from bench.gain_rollout import DRIFT, SHORT, CallTarget, Rollout, agent, chat
from bench.machine import machine
from bench.processes import running
from bench.targets import TOKENCACHE

HERE = Path(__file__).parent
DIRECT, PROXY, LOCAL, PLUGIN = "direct", "proxy", "proxy --tokenizer", "proxy, plugin"


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

    def __init__(self, extent: Extent, engine: Engine, plugin: Engine, console: Console) -> None:
        self.extent, self.engine, self.plugin, self.console = extent, engine, plugin, console
        self.begun = time.monotonic()

    def say(self, words: str) -> None:
        self.console.print(f"[dim]{time.monotonic() - self.begun:5.0f} s[/] {words}")

    def run(self) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            wanted = {name for case in self.extent.cases for name in case.targets}
            targets = {name: stack.enter_context(self._target(name)) for name in sorted(wanted)}
            for target in targets.values():
                self._warm(target)
            found = [record for case in self.extent.cases for n in range(self.extent.rounds) for record in self._case(case, targets, n)]
            self.say("what a body costs the API server")
            return {"calls": found, "bodies": run_bodies(self.engine, self.plugin, self.extent.marks, self.extent.bodies)}

    @contextlib.contextmanager
    def _target(self, name: str) -> Iterator[CallTarget]:
        if name == DIRECT:
            yield CallTarget(name, self.engine)
            return
        engine = self.plugin if name == PLUGIN else self.engine
        words = ["--upstream", f"http://127.0.0.1:{engine.process.port}", "--store", "memory:"]
        words += ["--tokenizer", str(engine.model_dir)] if name in {LOCAL, PLUGIN} else []
        with running("proxy", lambda port: [TOKENCACHE, "serve", *words, "--port", str(port)], "/readyz", seconds=120) as process:
            yield CallTarget(name, engine, process)

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
            continued(rollout)
        return [
            {**record, "play": case.play, "drift": case.drift, "target": name, "round": n}
            for name, rollout in played.items()
            for record in rollout.records
        ]


def continued(rollout: Rollout) -> None:
    """Checks that the proxy matched every call of a session as the continuation of the previous one.

    Raises:
        RuntimeError: It did not, so the figures do not measure what they should.
    """
    if rollout.target.proxy is None:
        return
    client = Client(rollout.target.port)
    answer = client.get(f"/tokencache/v1/sessions/{rollout.name}/turns")
    client.close()
    kinds = [turn["match"] for turn in json.loads(answer.body)["turns"]] if answer.status == 200 else []
    if kinds != ["root"] + ["continue"] * (len(rollout.records) - 1):
        raise RuntimeError(f"{rollout.target.name}: a session was torn: {answer.status}, {' '.join(kinds)}")


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
    extent = Extent(**{**vars(extent), "marks": marks, "rounds": options.rounds})
    console = Console(width=170)
    begun = time.monotonic()
    found: dict[str, Any] = {"machine": machine(), "gpu": accelerator(), "quick": options.quick, "extent": asdict(extent)}
    with tempfile.TemporaryDirectory(prefix="bench-gain-") as scratch:
        folder = options.model_dir.resolve() if options.model_dir else Path(scratch)
        if options.model_dir is None:
            config = json.loads(options.config.read_text()) if options.config else CONFIG
            found["tokenizer"] = make_model(venv() / "bin/python", config, folder)
        console.print("starting vLLM, stock and with the plugin: about two minutes")
        dummy, arguments = options.model_dir is None, options.engine_args
        with (
            vllm(folder, dummy=dummy, arguments=arguments) as engine,
            vllm(folder, dummy=dummy, arguments=arguments, plugin=True) as plugin,
        ):
            client = Client(engine.process.port)
            found |= {"vllm": json.loads(client.get("/version").body)["version"], "model": engine.model, "engine_args": options.engine_args}
            client.close()
            found |= Gain(extent, engine, plugin, console).run()
    found["seconds"] = round(time.monotonic() - begun)
    out = HERE / "out"
    out.mkdir(exist_ok=True)
    written = out / f"gain-{time.strftime('%Y%m%d-%H%M%S')}.json"
    written.write_text(json.dumps(found) + "\n")
    show(found, console)
    console.print(f"{found['seconds']} s; raw figures in bench/out/{written.name}; python -m bench.gain_report writes the page")


if __name__ == "__main__":
    main()

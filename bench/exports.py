"""Measures how long live calls wait while a large rollout is exported again and again.

Small calls run alone, next to a fetcher, and next to a process that only keeps a core busy, in turns within one run. The fetcher and the
export worker need a core too: what they cost beyond the busy process is the time that the proxy itself stalls.
`python -m bench.exports PORT PATH` is the fetcher: it runs until it is stopped.
"""

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from bench.client import Client, take_turn
from bench.cost import Rig
from bench.processes import ROOT
from bench.stats import percentile, us
from bench.talk import SMALL, Shape

LARGE = Shape(size=480_000, messages=200, tokens=2000)
"""The large session: about four bytes per token."""

_ALONE, _BESIDE, _BUSY = "alone", "beside_export", "beside_busy"
_SPIN = [sys.executable, "-c", "print('busy', flush=True)\nwhile True: pass"]


def run_exports(rig: Rig, name: str, calls: int, rounds: int) -> dict[str, Any]:
    """Measures `calls` small calls in each environment, for this many rounds."""
    session = "bench-large"
    talk = LARGE.talk(session)
    for _ in range(3):
        take_turn(rig.clients[name], talk, session, LARGE.tail)
    turns = rig.turns(name, session)
    path = f"/tokencache/v1/sessions/{session}/trajectories?drift=off"
    size = len(rig.clients[name].get(path).body)  # the worker has started
    surroundings = {_ALONE: None, _BUSY: _SPIN, _BESIDE: [sys.executable, "-m", "bench.exports", str(rig.targets[name].ports[0]), path]}
    walls: dict[str, list[float]] = {where: [] for where in surroundings}
    for n in range(rounds):
        for where, command in surroundings.items():
            with _running(command) if command else contextlib.nullcontext():
                walls[where] += _small_calls(rig, name, f"bench-small-{n}-{where}", calls)
    figures = {
        where: {"p50_us": us(statistics.median(all_)), "p99_us": us(percentile(sorted(all_), 99)), "max_us": us(max(all_))}
        for where, all_ in walls.items()
    }
    return {
        "target": name,
        "tokens": turns[-1]["prompt_tokens"] + turns[-1]["completion_tokens"],
        "answer_bytes": size,
        "n": len(walls[_ALONE]),
        **figures,
        "p50_ratio": round(figures[_BESIDE]["p50_us"] / figures[_BUSY]["p50_us"], 2),
        "p99_ratio": round(figures[_BESIDE]["p99_us"] / figures[_BUSY]["p99_us"], 2),
    }


def _small_calls(rig: Rig, name: str, session: str, calls: int) -> list[float]:
    talk = SMALL.talk(session, 9)
    return [take_turn(rig.clients[name], talk, session, SMALL.tail).wall for _ in range(calls)]


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[None]:
    """Runs a process alongside, from when it has printed a line."""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as beside:
        try:
            assert beside.stdout is not None  # noqa: S101 - it was opened with a pipe
            beside.stdout.readline()
            yield
        finally:
            beside.kill()


def fetch(port: int, path: str) -> None:
    client = Client(port)
    client.get(path)
    print("fetching", flush=True)
    while True:
        client.get(path)


if __name__ == "__main__":
    fetch(int(sys.argv[1]), sys.argv[2])

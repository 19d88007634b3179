"""Measures how long live calls wait while a large rollout is exported again and again.

Small calls run alone, next to a fetcher, and next to a process that only keeps a core busy, in turns within one run. The fetcher and the
export worker need a core too: what they cost beyond the busy process is the time that the proxy itself stalls.
"""

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from bench.client import take_turn
from bench.cost import Rig
from bench.processes import ROOT
from bench.stats import percentile, us
from bench.talk import SMALL, Shape

LARGE = Shape(size=480_000, messages=200, tokens=2000)
"""The large session: about four bytes per token."""
_SPIN = "print('busy', flush=True)\nwhile True: pass"
_FETCH = """
from bench.client import Client
client = Client({port})
while True:
    client.get("{path}")
    print("fetched", flush=True)
"""


def run_exports(rig: Rig, name: str, calls: int, rounds: int) -> dict[str, Any]:
    """Measures `calls` small calls in each environment, for this many rounds."""
    session, client = "bench-large", rig.clients[name]
    talk = LARGE.talk(session)
    for _ in range(3):
        take_turn(client, talk, session, LARGE.tail)
    last = rig.turns(name, session)[-1]
    path = f"/tokencache/v1/sessions/{session}/trajectories?drift=off"
    size = len(client.get(path).body)  # the worker has started
    surroundings = {"alone": "", "beside_busy": _SPIN, "beside_export": _FETCH.format(port=client.port, path=path)}
    walls: dict[str, list[float]] = {where: [] for where in surroundings}
    for n in range(rounds):
        for where, program in surroundings.items():
            with _running(program) if program else contextlib.nullcontext():
                small, session = SMALL.talk(where, 9), f"bench-small-{n}-{where}"
                walls[where] += [take_turn(client, small, session, SMALL.tail).wall for _ in range(calls)]
    figures = {where: {"p50_us": us(statistics.median(all_)), "p99_us": us(percentile(sorted(all_), 99))} for where, all_ in walls.items()}
    return {
        "target": name,
        "tokens": last["prompt_tokens"] + last["completion_tokens"],
        "answer_bytes": size,
        "n": len(walls["alone"]),
        **figures,
        "p50_ratio": round(figures["beside_export"]["p50_us"] / figures["beside_busy"]["p50_us"], 2),
    }


@contextlib.contextmanager
def _running(program: str) -> Iterator[None]:
    """Runs a program of Python alongside, from when it has printed a line."""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) as beside:
        try:
            assert beside.stdout is not None  # noqa: S101 - it was opened with a pipe
            beside.stdout.readline()
            yield
        finally:
            beside.kill()

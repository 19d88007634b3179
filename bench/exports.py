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

from bench.client import Client, take_turn, turns
from bench.processes import ROOT
from bench.stats import percentile, us
from bench.talk import SMALL, Shape
from bench.targets import Target

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


def run_exports(target: Target, calls: int, rounds: int) -> dict[str, Any]:
    """Measures `calls` small calls in each environment, for this many rounds."""
    session, port = "bench-large", target.ports[0]
    talk = LARGE.talk(session)
    path = f"/tokencache/v1/sessions/{session}/trajectories?drift=off"
    surroundings = {"alone": "", "beside_busy": _SPIN, "beside_export": _FETCH.format(port=port, path=path)}
    walls: dict[str, list[float]] = {where: [] for where in surroundings}
    with contextlib.closing(Client(port)) as client:
        for _ in range(3):
            take_turn(client, talk, session, LARGE.tail)
        last = turns(port, session)[-1]
        size = len(client.get(path).body)  # the worker has started
        for n in range(rounds):
            for where, program in surroundings.items():
                with _running(program) if program else contextlib.nullcontext():
                    small = SMALL.talk(where, 9)
                    walls[where] += [take_turn(client, small, f"bench-small-{n}-{where}", SMALL.tail).wall for _ in range(calls)]
    figures = {where: {"p50_us": us(statistics.median(all_)), "p99_us": us(percentile(sorted(all_), 99))} for where, all_ in walls.items()}
    return {
        "target": target.name,
        "tokens": last["prompt_tokens"] + last["completion_tokens"],
        "answer_bytes": size,
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

"""Measures what several proxy processes that share one Redis do: `python -m bench.spread [--processes 1,2,4] [--load]`.

One process after the other serves some calls, one at a time, and only the CPU of the proxies and of Redis counts, so the number of cores
has no effect. With `--load` all of them serve at once, each with an engine of its own, as many rollouts as keep them busy, for some time.
"""

import argparse
import contextlib
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from bench.client import Client, take_turn
from bench.held import SHAPES
from bench.loads import Row, drive
from bench.processes import Process
from bench.talk import Shape
from bench.targets import Target, mock, redis, redis_url, serve

_SESSIONS, _TURNS, _ROUNDS = 4, 4, 8


class _Proxy:
    """One process, and the sessions that it serves."""

    def __init__(self, process: Process, store: Process, name: str, shape: Shape) -> None:
        self._process, self._store, self.client, self._tail = process, store, Client(process.port), shape.tail
        self._talks = {f"{name}-{number}": shape.talk(f"{name}-{number}") for number in range(_SESSIONS)}

    def cost(self) -> tuple[float, float]:
        """Make some calls in each session; return the CPU seconds of the proxy and of the store, for one call."""
        proxy, store = self._process.cpu(), self._store.cpu()
        for _ in range(_TURNS):
            for name, talk in self._talks.items():
                take_turn(self.client, talk, name, self._tail)
        calls = _SESSIONS * _TURNS
        return (self._process.cpu() - proxy) / calls, (self._store.cpu() - store) / calls


def spread(numbers: Sequence[int], shape: Shape) -> dict[int, tuple[float, float]]:
    """Return for each number of processes the medians of the CPU seconds of a call: of the proxies, and of Redis."""
    with contextlib.ExitStack() as opened:
        engine = opened.enter_context(mock())
        made: dict[int, list[_Proxy]] = {}
        for number in numbers:
            store = opened.enter_context(redis())
            processes = [opened.enter_context(serve(engine, redis_url(store))) for _ in range(number)]
            made[number] = [_Proxy(process, store, f"spread-{number}-{shape.size}-{n}", shape) for n, process in enumerate(processes)]
            for proxy in made[number]:
                opened.callback(proxy.client.close)
                proxy.cost()  # the first calls of its sessions
        found: dict[int, list[tuple[float, float]]] = {number: [] for number in numbers}
        for turn in range(_ROUNDS):
            for number in numbers if turn % 2 else reversed(numbers):
                found[number] += [proxy.cost() for proxy in made[number]]
    return {number: (statistics.median(p for p, _ in costs), statistics.median(s for _, s in costs)) for number, costs in found.items()}


def throughput(numbers: Sequence[int], shapes: Sequence[tuple[str, int]], seconds: float) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield a shape, a number of processes, and what `bench.loads` found in some seconds, with so many rollouts of it for each process."""
    with contextlib.ExitStack() as opened:
        store = opened.enter_context(redis())
        engines = [opened.enter_context(mock()) for _ in range(max(numbers))]
        processes = [opened.enter_context(serve(engine, redis_url(store))) for engine in engines]
        for shape, each in shapes:
            for number in numbers:
                target = Target("proxies", (*processes[:number],), (store,), sessions=True, records=True, workers=number, engine=engines[0])
                yield shape, number, drive(engines[0], target, Row(shape, each * number, seconds).spec(), alone=False)


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.spread", description=__doc__.partition("\n")[0])
    asked.add_argument("--processes", default="1,2,4", metavar="N,…", help="numbers of proxy processes")
    asked.add_argument("--load", action="store_true", help="calls per second of all at once: three cores for two processes, and three more")
    options = asked.parse_args()
    numbers = [*map(int, options.processes.split(","))]
    if options.load:
        if (cores := len(os.sched_getaffinity(0))) < (needed := 3 * max(numbers) // 2 + 3):
            asked.error(f"--load with {max(numbers)} processes needs {needed} cores, this machine has {cores}")
        for shape, number, found in throughput(numbers, [("1 KB", 32), ("141 KB", 16)], 8.0):
            costs = f"{found['cpu_us']:,.0f} µs of the proxies, {found['store_cpu_us']:,.0f} µs of Redis, limited by {found['limited_by']}"
            print(f"{shape}, {number} processes: {found['calls_per_s']:,.0f} calls/s, {costs}", *found["torn"], flush=True)
        return
    for title, shape in SHAPES.items():
        for number, (proxies, store) in spread(numbers, shape).items():
            print(f"{title}, {number} processes: {proxies * 1e6:,.0f} µs of the proxies, {store * 1e6:,.0f} µs of Redis", flush=True)


if __name__ == "__main__":
    main()

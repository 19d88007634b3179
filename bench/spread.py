"""Measures whether a call costs more CPU if several proxy processes share one Redis: `python -m bench.spread [--processes 1,2,4]`.

One process after the other serves some calls, one at a time, and only the CPU of the proxies counts (and, beside it, that of Redis). So
neither the number of cores, nor the engine and the generator, which share them in `bench.load`, have an effect on the figures. All numbers
of processes take turns, so disturbances of the machine affect them alike.
"""

import argparse
import contextlib
import statistics
from collections.abc import Sequence

from bench.client import Client, reply_text
from bench.held import SIZES
from bench.processes import Process
from bench.talk import Talk
from bench.targets import mock, proxies_of, redis

_SESSIONS, _TURNS, _ROUNDS, _TAIL = 4, 4, 8, 200


class _Proxy:
    """One process, and the sessions that it serves."""

    def __init__(self, process: Process, store: Process, name: str, size: int) -> None:
        self._process, self._store, self._client = process, store, Client(process.port)
        names = [f"{name} {number}" for number in range(_SESSIONS)]
        self._talks = {name.replace(" ", "-"): Talk(name, size=size, messages=max(2, size // 700), mock_tokens=20) for name in names}

    def cost(self) -> tuple[float, float]:
        """Make some calls in each session; return the CPU seconds of the proxy and of the store, for one call."""
        proxy, store = self._process.cpu(), self._store.cpu()
        for _ in range(_TURNS):
            for name, talk in self._talks.items():
                answer = self._client.post(talk.body(), name)
                if answer.status != 200:
                    raise RuntimeError(f"{name}: {answer.body[:300]!r}")
                talk.add_turn(reply_text(answer), _TAIL)
        calls = _SESSIONS * _TURNS
        return (self._process.cpu() - proxy) / calls, (self._store.cpu() - store) / calls

    def close(self) -> None:
        self._client.close()


def spread(numbers: Sequence[int], size: int) -> dict[int, tuple[float, float]]:
    """Return for each number of processes the medians of the CPU seconds of a call: of the proxies, and of Redis."""
    with contextlib.ExitStack() as opened:
        engine = opened.enter_context(mock())
        made: dict[int, list[_Proxy]] = {}
        for number in numbers:
            store = opened.enter_context(redis())
            processes = opened.enter_context(proxies_of(engine, store, number))
            made[number] = [_Proxy(process, store, f"spread {number} {size} {one}", size) for one, process in enumerate(processes)]
        for proxy in [proxy for proxies in made.values() for proxy in proxies]:
            opened.callback(proxy.close)
            proxy.cost()  # the first calls of its sessions
        found: dict[int, list[tuple[float, float]]] = {number: [] for number in numbers}
        for turn in range(_ROUNDS):
            for number in numbers if turn % 2 else reversed(numbers):
                found[number] += [proxy.cost() for proxy in made[number]]
    return {number: (statistics.median(p for p, _ in costs), statistics.median(s for _, s in costs)) for number, costs in found.items()}


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.spread", description=__doc__.partition("\n")[0])
    asked.add_argument("--processes", default="1,2,4", metavar="N,…", help="numbers of proxy processes")
    numbers = [*map(int, asked.parse_args().processes.split(","))]
    for title, size in SIZES.items():
        for number, (proxies, store) in spread(numbers, size).items():
            print(f"{title}, {number} processes: {proxies * 1e6:,.0f} µs of the proxies, {store * 1e6:,.0f} µs of Redis", flush=True)


if __name__ == "__main__":
    main()

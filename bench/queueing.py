"""Simulates a queue in front of a proxy process: what waiting does to latency when calls arrive at random.

Poisson arrivals; one server, because a process has one event loop whose calls share a core; service times drawn from measured ones. First
come, first served. It does not model the engine's time, nor calls of one session that wait for each other.
"""

import random
from collections.abc import Callable, Sequence

from bench.stats import quantiles

Draw = Callable[[random.Random], float]


def empirical(percentiles: Sequence[float]) -> Draw:
    """Values distributed as these percentiles (0, 1, … 100), evenly between two of them."""

    def draw(rng: random.Random) -> float:
        at = rng.random() * (len(percentiles) - 1)
        low = int(at)
        return percentiles[low] + (at - low) * (percentiles[low + 1] - percentiles[low])

    return draw


def simulate(rate: float, service: Draw, calls: int = 50_000, seed: int = 1) -> list[float]:
    """The percentiles 0 to 100 of the time from arrival to end, in the unit of `service`; `rate` per that unit.

    The first tenth of the calls is not counted: the queue has to fill first.

    Raises:
        ValueError: More arrives than can be served, so the queue would grow without limit.
    """
    rng = random.Random(seed)
    mean = sum(service(rng) for _ in range(2_000)) / 2_000
    if rate * mean >= 1:
        raise ValueError(f"overloaded: {rate * mean:.2f} of what can be served")
    free = now = 0.0
    found = []
    for n in range(calls):
        now += rng.expovariate(rate)
        free = max(now, free) + service(rng)
        if n >= calls // 10:
            found.append(free - now)
    return quantiles(found)

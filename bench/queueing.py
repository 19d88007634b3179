"""Simulates a queue in front of workers: what waiting does to latency when calls arrive at random.

Poisson arrivals; `servers` that each serve one call at a time (a proxy process has one event loop whose calls share a core, so it is one
server of the queue); service times drawn from measured ones. First come, first served. It does not model the engine's time, nor calls
of one session that wait for each other.
"""

import heapq
import random
from collections.abc import Callable, Sequence

from bench.stats import quantiles

Draw = Callable[[random.Random], float]


def exponential(mean: float) -> Draw:
    return lambda rng: rng.expovariate(1 / mean)


def constant(value: float) -> Draw:
    return lambda _: value


def empirical(percentiles: Sequence[float]) -> Draw:
    """Values distributed as these percentiles (0, 1, … 100), evenly between two of them."""

    def draw(rng: random.Random) -> float:
        at = rng.random() * (len(percentiles) - 1)
        low = int(at)
        return percentiles[low] + (at - low) * (percentiles[low + 1] - percentiles[low])

    return draw


def scaled(draw: Draw, factor: float) -> Draw:
    return lambda rng: draw(rng) * factor


def simulate(rate: float, service: Draw, servers: int = 1, calls: int = 50_000, seed: int = 1) -> list[float]:
    """The percentiles 0 to 100 of the time from arrival to end, in the unit of `service`; `rate` per that unit.

    The first tenth of the calls is not counted: the queue has to fill first.

    Raises:
        ValueError: More arrives than can be served, so the queue would grow without limit.
    """
    rng = random.Random(seed)
    mean = sum(service(rng) for _ in range(2_000)) / 2_000
    if rate * mean >= servers:
        raise ValueError(f"overloaded: {rate * mean / servers:.2f} of what can be served")
    free = [0.0] * servers
    now, found = 0.0, []
    for n in range(calls):
        now += rng.expovariate(rate)
        begun = max(now, heapq.heappop(free))
        ended = begun + service(rng)
        heapq.heappush(free, ended)
        if n >= calls // 10:
            found.append(ended - now)
    return quantiles(found)

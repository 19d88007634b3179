"""Computes how long to wait before each further attempt."""

import random
from collections.abc import Iterator


def delays(first: float, longest: float, *, factor: float = 2.0, jitter: float = 0.0) -> Iterator[float]:
    """Yield the seconds to wait before each further attempt, without end.

    Args:
        first: the first delay, in seconds.
        longest: the longest delay, in seconds.
        factor: each delay is the one before times this.
        jitter: each delay is shortened by up to this fraction at random, so that many clients do not retry at the same moment.
    """
    delay = first
    while True:
        yield delay * random.uniform(1.0 - jitter, 1.0)
        delay = min(factor * delay, longest)

"""Keeps the ages of sessions right if a clock is set, or the machine is suspended, while the proxy runs.

A clock that is set forwards by more than the time to live would make sessions expire that are in use. So the memory store and the file
store measure by a `SteadyClock`. Redis measures by the clock of its machine: there a `ClockWatch` can only report that it was set.

What is recorded has the time of `RECORD_CLOCK`: turns and incidents keep their order, and calls last as long as they do. All replicas of a
store agree on it. Only what comes from outside, such as a deadline, is compared with the system clock.
"""

import logging
import time

from tokencache import metrics

log = logging.getLogger(__name__)

TOLERANCE = 10.0
"""Least difference, in seconds, between two clocks or between the steps of two clocks that counts."""

NOTICED = 1.0
"""Difference from a store's clock, in seconds, from which on a clock follows it. A reading must be more exact than that."""

MOST_BACK = 0.1
"""Seconds by which a clock that runs goes back at each reading: less than what it orders lies apart."""

NOT_USED = "The store does not use it: sessions expire as if it had not been set"
"""What follows if the system clock is set."""


class SteadyClock:
    """Unix time as it was at the start, and counted by the monotonic clock since then.

    Attributes:
        offset: Unix time less monotonic time, in seconds.
    """

    def __init__(self) -> None:
        self.offset = system_time() - monotonic()
        self._follows = False

    def now(self) -> float:
        """Return the time, as Unix time in seconds."""
        return time.monotonic() + self.offset

    def follow(self, reading: float, at: float) -> None:
        """Go on from another clock, which had this reading at a time of the monotonic clock, unless they agree.

        From the second reading on it goes back in small steps: else what comes next would be older than what is recorded. A server that
        takes over may have a clock that is minutes behind.
        """
        step = reading - at - self.offset
        if abs(step) > NOTICED:
            self.offset += max(step, -MOST_BACK) if self._follows else step
        self._follows = True


class ClockWatch:
    """Notices that a clock was set: it compares its steps with those of the monotonic clock.

    Args:
        clock: whose clock it is: `system` or `redis`.
        effect: what follows, for the log.
    """

    def __init__(self, clock: str, effect: str) -> None:
        self._clock, self._effect = clock, effect
        self._ahead: float | None = None

    def check(self, reading: float, at: float | None = None) -> None:
        """Compare a reading of the clock with the one before.

        Args:
            reading: Unix time in seconds.
            at: when it was read, by the monotonic clock; now by default.
        """
        ahead = reading - (monotonic() if at is None else at)
        step = 0.0 if self._ahead is None else ahead - self._ahead
        self._ahead = ahead
        if abs(step) < TOLERANCE:
            return
        metrics.CLOCK_STEPS.labels(self._clock).inc()
        way = "forwards" if step > 0 else "backwards"
        log.warning("THE CLOCK WAS SET: the %s clock went %s by %.0f s. %s", self._clock, way, abs(step), self._effect)


def system_time() -> float:
    """Return the time of the system clock, as Unix time in seconds."""
    return time.time()


def monotonic() -> float:
    """Return the time of the monotonic clock, in seconds. Nobody sets it, and it stands still while the machine is suspended (Linux)."""
    return time.monotonic()


RECORD_CLOCK = SteadyClock()
"""The clock of what is recorded; it follows that of the store. The path of a call adds its offset in place, which enters no function."""

"""Waits for states, with one limit for the whole suite: a busy machine makes a test slower, and never fails it."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = float(os.environ.get("TOKENCACHE_TEST_PATIENCE", "120"))
"""Seconds that a test waits for what must happen. Only a test that fails waits that long."""
PAUSE, LONGEST_PAUSE = 0.005, 0.05
"""Seconds between two questions. Each pause is longer than the one before: what takes its time is not kept from its work by questions."""


async def until(condition: Callable[[], Any], what: str = "") -> Any:
    """Ask `condition`, which may be a coroutine function, until its answer is true; returns the answer.

    Raises:
        TimeoutError: it is still false after `PATIENCE` seconds.
    """
    found, pauses = None, _pauses()
    try:
        async with asyncio.timeout(PATIENCE) as limit:
            while not (found := (await answer) if inspect.isawaitable(answer := condition()) else answer):  # noqa: ASYNC110
                await asyncio.sleep(next(pauses))
    except TimeoutError as why:
        if limit.expired():
            raise _in_vain(condition, what, found) from why
        raise
    return found


def block_until(condition: Callable[[], Any], what: str = "") -> Any:
    """As `until`, for a test that has no event loop."""
    end, pauses = time.monotonic() + PATIENCE, _pauses()
    while not (found := condition()):
        if time.monotonic() > end:
            raise _in_vain(condition, what, found)
        time.sleep(next(pauses))
    return found


def _pauses() -> Iterator[float]:
    return (min(PAUSE * 1.2**count, LONGEST_PAUSE) for count in itertools.count())


def _in_vain(condition: Callable[[], Any], what: str, found: Any) -> TimeoutError:
    return TimeoutError(f"waited {PATIENCE:g} s for {what or repr(condition)}; the last answer was {repr(found)[:2000]}")

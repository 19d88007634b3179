"""Waits for states, with one limit for the whole suite: a busy machine makes a test slower, and never fails it."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = float(os.environ.get("TOKENCACHE_TEST_PATIENCE", "120"))
"""Seconds that a test waits for what must happen. Only a test that fails waits that long."""
PAUSE = 0.005


async def until(condition: Callable[[], Any], what: str = "") -> Any:
    """Ask `condition`, which may be a coroutine function, until its answer is true; returns the answer.

    Raises:
        TimeoutError: it is still false after `PATIENCE` seconds.
    """
    found = None
    try:
        async with asyncio.timeout(PATIENCE) as limit:
            while not (found := (await answer) if inspect.isawaitable(answer := condition()) else answer):  # noqa: ASYNC110
                await asyncio.sleep(PAUSE)
    except TimeoutError as why:
        if limit.expired():
            raise _in_vain(condition, what, found) from why
        raise
    return found


def block_until(condition: Callable[[], Any], what: str = "") -> Any:
    """As `until`, for a test that has no event loop."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        if time.monotonic() > end:
            raise _in_vain(condition, what, found)
        time.sleep(PAUSE)
    return found


def _in_vain(condition: Callable[[], Any], what: str, found: Any) -> TimeoutError:
    return TimeoutError(f"waited {PATIENCE:g} s for {what or repr(condition)}; the last answer was {repr(found)[:2000]}")

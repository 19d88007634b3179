"""Repeats a step in the background. A step that fails is repeated, so that no task of the background ends unnoticed.

`tokencache_background_failures_total` counts the failures; `/readyz` names the tasks whose last step failed.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

from tokencache import metrics
from tokencache.backoff import delays

log = logging.getLogger(__name__)

LONGEST_DELAY = 30.0
"""Longest delay after a failed step, in seconds, unless the usual pause is longer."""

_failing: dict[asyncio.Task[Any], tuple[str, str]] = {}


def failing() -> dict[str, str]:
    """Return the tasks of this process whose last step failed: name → class of the exception."""
    return dict(_failing.values())


async def repeat(
    task: str,
    step: Callable[[], Awaitable[Any]],
    seconds: float,
    *,
    about: str = "",
    at_once: bool = False,
    jitter: float = 0.0,
    wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Wait and run a step, again and again, until this task is cancelled.

    An exception of a step is logged with its traceback and counted, and the next step comes after a delay that grows with each failure in
    a row. That includes a `CancelledError` that leaks from a library although this task was not cancelled.

    Args:
        task: name of the task, for the metric and `/readyz`; one of few.
        step: the step.
        seconds: the pause before each step.
        about: what the task works for, if there are several of this name; for the log and `/readyz`.
        at_once: run the first step without a pause.
        jitter: each pause is changed by up to this fraction at random.
        wanted: return when this is false after a step; by default never.
    """
    own = asyncio.current_task()
    assert own is not None  # noqa: S101 - a coroutine runs in a task
    name = f"{task} {about}".rstrip()
    pause, after_failures = 0.0 if at_once else seconds, delays(max(seconds, 0.01), max(seconds, LONGEST_DELAY))
    try:
        while wanted():
            await asyncio.sleep(pause * random.uniform(1.0 - jitter, 1.0 + jitter))
            try:
                await step()
            except (Exception, asyncio.CancelledError) as why:
                if own.cancelling():
                    raise
                pause = next(after_failures)
                metrics.BACKGROUND_FAILURES.labels(task).inc()
                log.exception("background task %s: internal error; its next step comes in %g s", name, pause)
                _failing[own] = name, type(why).__name__
            else:
                if _failing.pop(own, None):
                    log.info("background task %s: works again", name)
                    after_failures = delays(max(seconds, 0.01), max(seconds, LONGEST_DELAY))
                pause = seconds
    finally:
        _failing.pop(own, None)

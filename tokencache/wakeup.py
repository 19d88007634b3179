"""Wakes tasks that wait for a change in this process, and ends tasks, or defers their end."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
CANCEL_AGAIN_SECONDS = 1.0


class Wakeup:
    """A change that tasks wait for. To miss none, take `next` before you look at what may change, and wait on it afterwards.

    Attributes:
        closed: whether the process stops, so that nobody should go on waiting.
    """

    def __init__(self) -> None:
        self._next: asyncio.Event | None = None
        self.closed = False

    @property
    def next(self) -> asyncio.Event:
        """The event that the next change sets."""
        if self._next is None:
            self._next = asyncio.Event()
        return self._next

    def notify(self) -> None:
        """Wake all that wait."""
        event, self._next = self._next, None
        if event is not None:
            event.set()

    def close(self) -> None:
        """Wake all that wait, for the last time."""
        self.closed = True
        self.notify()


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait until an event is set, at most for so many seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def to_the_end(work: Coroutine[Any, Any, T]) -> tuple[T, bool]:
    """Finish some work even if this task is cancelled meanwhile.

    Returns:
        The result of the work, and whether this task was cancelled: then the caller must end with `CancelledError`.
    """
    task, cancelled = asyncio.create_task(work), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    return task.result(), cancelled


async def end(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks, and wait until they have ended.

    A cancellation can get lost: `asyncio.wait_for` of Python 3.11, which redis-py uses, drops it if what it waits for is done by then. A
    task that repeats something forever would then never end, so a task that does not end is cancelled again.
    """
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=CANCEL_AGAIN_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)  # retrieves their exceptions

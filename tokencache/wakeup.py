"""Wakes tasks that wait for a change in this process."""

import asyncio
import contextlib


class Wakeup:
    """A change that tasks wait for. To miss none, call `next` before you look at what may change, and wait on it afterwards.

    Attributes:
        closed: whether the process stops, so that nobody should go on waiting.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.closed = False

    @property
    def next(self) -> asyncio.Event:
        """The event that the next change sets."""
        return self._event

    def notify(self) -> None:
        """Wake all that wait."""
        event, self._event = self._event, asyncio.Event()
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

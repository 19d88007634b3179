"""Undisturbed: what a call writes to the store is written to its end, though its harness hangs up meanwhile.

A harness that leaves ends its call, by a cancellation that may come wherever the call waits. While it waits for the store nobody could
say then what stands there: a call that was opened must be known to be closed again, and a turn is written whole. So a cancellation that
comes meanwhile is put off until the store has answered. (To shield a task of its own each time does the same; where one call follows the
other that takes some 50 µs more a call.)
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

_T = TypeVar("_T")


class Undisturbed:
    """Puts off the cancellation of one task while that does what must be done to its end."""

    def __init__(self) -> None:
        self._at_work = self._wanted = False

    def cancel(self, task: "asyncio.Task[Any]") -> None:
        """Cancel the task: now, or behind the work that it is doing."""
        if self._at_work:
            self._wanted = True
        else:
            task.cancel()

    async def work(self, work: Awaitable[_T]) -> _T:
        """Do some work to its end.

        Raises:
            CancelledError: it is done, and the task was to be cancelled meanwhile.
        """
        self._at_work = True
        try:
            done = await work
        finally:
            self._at_work = False
        if self._wanted:
            self._wanted = False
            raise asyncio.CancelledError
        return done

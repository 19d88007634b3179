"""Keeps a value that is costly to read, for those who ask regularly.

It is kept for a second, or for 20 times as long as it took to read, so that looking costs at most a twentieth of the time.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_SECONDS, _FACTOR = 1.0, 20


class Kept(Generic[T]):
    """A value and what reads it. Several askers share one reading."""

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._lock = asyncio.Lock()
        self._value: T | None = None
        self._expires = 0.0

    async def recent(self) -> T:
        """Return the value, as it was at most a second ago, or 20 times as long as reading takes. Raises what reading raises."""
        async with self._lock:
            if self._value is None or time.monotonic() >= self._expires:
                return await self._renew()
            return self._value

    async def now(self) -> T:
        """Return the value as it is now. Raises what reading raises."""
        async with self._lock:
            return await self._renew()

    async def _renew(self) -> T:
        began = time.monotonic()
        self._value = await self._read()
        ended = time.monotonic()
        self._expires = ended + max(_SECONDS, _FACTOR * (ended - began))
        return self._value

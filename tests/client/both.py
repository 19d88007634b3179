"""Wraps either client so that the same test runs on both."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, Self

from tokencache.client import AsyncClient, Client


class Wrapped:
    """Makes every method of a client or a session awaitable. A blocking method runs in a thread."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not inspect.ismethod(found):
            return found

        async def call(*args: Any, **named: Any) -> Any:
            if inspect.iscoroutinefunction(found):
                result = await found(*args, **named)
            else:
                result = await asyncio.to_thread(found, *args, **named)
            return Wrapped(result) if hasattr(result, "fetch") else result

        return call

    def iterate(self, *args: Any, **named: Any) -> Iteration:
        return Iteration(self.inner.iterate(*args, **named))

    def as_completed(self, *args: Any, **named: Any) -> Iteration:
        return Iteration(self.inner.as_completed(*args, **named))

    def follow(self, *args: Any, **named: Any) -> Iteration:
        return Iteration(self.inner.follow(*args, **named))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Iteration:
    """An async iterator over the trajectories of either client."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __aiter__(self) -> Iteration:
        return self

    async def __anext__(self) -> Any:
        if hasattr(self.inner, "__anext__"):
            return await anext(self.inner)
        over = object()
        found = await asyncio.to_thread(next, self.inner, over)
        if found is over:
            raise StopAsyncIteration
        return found

    async def aclose(self) -> None:
        """Stop in the middle, as a failing consumer does."""
        if hasattr(self.inner, "aclose"):
            await self.inner.aclose()
        else:
            self.inner.close()


KINDS = {"sync": Client, "async": AsyncClient}

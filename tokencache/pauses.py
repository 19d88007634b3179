"""Divides long work, so that the event loop serves other calls in between.

One thread serves all calls, and what one of them computes without an `await` makes all others wait. So work that grows with a history
has pauses: after at most 32 messages, and between steps that read a whole body. C code that releases the GIL for long runs in another
thread instead. JSON does not release it, so to read a body of 1 MB takes 1 ms in one piece.

What was read before a pause may have changed after it, as at every `await`: caches, the latest turn of a session, the engine.
"""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

LARGE = 2**17
"""Bytes that are worked on between two pauses. Smaller data have none."""
PER_MESSAGE = LARGE // 32
"""Bytes that a message counts in addition to its own: short messages take as long as long ones."""


async def pause() -> None:
    """Let other calls run."""
    await asyncio.sleep(0)


async def off_loop(size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call C code that releases the GIL, in another thread if its data have a `size` of `LARGE` bytes or more."""
    return await asyncio.to_thread(work, *args, **kwargs) if size >= LARGE else work(*args, **kwargs)

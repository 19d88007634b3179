"""Divides long work, so that the event loop serves other calls in between.

One thread serves all calls, and what one of them computes without an `await` makes all others wait. So work that grows with a history
has pauses: after at most 32 messages, and between steps that read a whole body. C code that releases the GIL for long runs in another
thread instead. JSON does not release it, so to read a body of 1 MB takes 1 ms in one piece.

What was read before a pause may have changed after it, as at every `await`: caches, the latest turn of a session, the engine.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Sequence

LARGE = 2**18
"""Bytes that are worked on between two pauses. Smaller data have none."""
MESSAGES = 32
"""Messages that are worked on between two pauses, if they are short."""

_waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, deque[asyncio.Future[None]]] = WeakKeyDictionary()
"""The pauses of each loop that have not ended, in the order in which they began."""


async def pause() -> None:
    """Let other calls run. In each turn of the loop one pause ends, so that a turn takes no longer if many have long bodies."""
    await _end_of_pause()


def _end_of_pause() -> Awaitable[None]:
    from asyncio import get_running_loop  # noqa: PLC0415 - a trainer reads messages without a loop, and loads none

    loop = get_running_loop()
    waiting, ended = _waiting.setdefault(loop, deque()), loop.create_future()
    waiting.append(ended)
    if len(waiting) == 1:
        loop.call_soon(_end_one, loop)
    return ended


def _end_one(loop: asyncio.AbstractEventLoop) -> None:
    waiting = _waiting[loop]
    ended = waiting.popleft()
    if not ended.done():  # otherwise its call was cancelled
        ended.set_result(None)
    if waiting:
        loop.call_soon(_end_one, loop)


def parts_of(messages: Sequence[bytes]) -> list[Sequence[bytes]]:
    """Divide messages into parts with a pause between them: of at most 32 messages, and `LARGE` bytes unless one is longer."""
    if len(messages) > MESSAGES:
        return [part for start in range(0, len(messages), MESSAGES) for part in parts_of(messages[start : start + MESSAGES])]
    if len(messages) < 2 or sum(map(len, messages)) <= LARGE:  # noqa: PLR2004 - one message has no parts
        return [messages]
    middle = len(messages) // 2
    return [*parts_of(messages[:middle]), *parts_of(messages[middle:])]

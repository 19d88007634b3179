"""Divides long work, so that the event loop serves other calls in between.

One thread serves all calls, and what one of them computes without an `await` makes all others wait. So work that grows with a history
has pauses: after at most 32 messages, and between steps that read a whole body. C code that releases the GIL for long runs in another
thread instead. JSON does not release it, so to read a body of 1 MB takes 1 ms in one piece.

What was read before a pause may have changed after it, as at every `await`: caches, the latest turn of a session, the engine.
"""

import asyncio
from collections.abc import Sequence

LARGE = 2**17
"""Bytes that are worked on between two pauses. Smaller data have none."""
PER_MESSAGE = LARGE // 32
"""Bytes that a shorter message counts, too: most of its time does not depend on its length."""


async def pause() -> None:
    """Let other calls run."""
    await asyncio.sleep(0)


def parts_of(messages: Sequence[bytes]) -> list[Sequence[bytes]]:
    """Divide messages into parts with a pause between them: of at most 32 messages, and about `LARGE` bytes unless one is longer."""
    parts, start, size = list[Sequence[bytes]](), 0, 0
    for place, message in enumerate(messages):
        if size + PER_MESSAGE > LARGE:
            parts.append(messages[start:place])
            start, size = place, 0
        size += max(PER_MESSAGE, len(message))
    return [*parts, messages[start:]]

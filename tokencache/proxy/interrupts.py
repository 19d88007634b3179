"""Interrupts: how many tokens of an aborted turn spell what its harness had heard.

The core says which characters came back (`core.interrupt`). That a token ends where they end is proven with the engine's
own `/detokenize`: the tokens up to there, read as text, are the tokens before the text, and then the text, and nothing
else. Where a character, or a piece of text that a parser held back, ends within a token, there is no such place.
"""

from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet

from tokencache.core import ids
from tokencache.core.interrupt import Heard

Read = Callable[[bytes], Awaitable[str]]

HELD_BACK = 4
"""So many tokens a parser may have held back when the last text was delivered."""
FIRST_TOGETHER = 8
"""So many tokens may have come in the event in which the text began: with more, where it begins is not looked for."""


async def kept(heard: Heard, completion: bytes, stop_ids: AbstractSet[int], read: Read) -> int | None:
    """Find how many tokens of a packed completion the harness has heard; `None` if that cannot be proven.

    `read` reads packed ids as text. A stop id right behind a text that was heard to its end belongs to it.

    Raises:
        RenderError: the engine cannot say.
    """
    known: dict[int, str] = {}

    async def text(n: int) -> str:
        if n not in known:
            known[n] = await read(ids.head(completion, n)) if n else ""
        return known[n]

    if heard.begun - heard.first > FIRST_TOGETHER:
        return None
    found = set()
    for first in range(heard.first, heard.begun):
        for n in range(heard.after, max(first, heard.after - HELD_BACK - 1), -1):
            if await text(n) == await text(first) + heard.text:
                found.add(n)
                break
    if len(found) != 1:
        return None
    (n,) = found
    rest = ids.unpack(ids.tail(completion, n))
    return n + 1 if len(rest) == 1 and rest[0] in stop_ids else n

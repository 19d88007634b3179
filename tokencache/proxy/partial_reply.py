"""Interrupts: how many tokens of an aborted turn spell what its harness had heard.

The core says which characters came back (`core.interrupt`). That a token ends where they end is proven with the engine's
own `/detokenize`: the tokens up to there, read as text, are the tokens before the text, and then the text, and nothing
else. Where a character, or a piece of text that a parser held back, ends within a token, there is no such place.
"""

from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet

from tokencache.core import ids
from tokencache.core.verdict import DeliveredPrefix

Read = Callable[[bytes], Awaitable[str]]

HELD_BACK = 4
"""So many tokens a parser may have held back when the last text was delivered."""
_AROUND = 3
"""So many tokens around the place that lengths point to are looked at: a piece of a character may read as more than the whole."""


async def kept(heard: DeliveredPrefix, completion: bytes, stop_ids: AbstractSet[int], read: Read) -> int | None:
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

    async def begins(said: str) -> bool:
        """Whether a token begins where the text does, if this is all that was said up to its end.

        So many tokens may have come in the event in which it began that not each of them can be tried: where the text
        before it has the right length is found by halving.
        """
        before = len(said) - len(heard.text)
        low, high = heard.first, heard.begun
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if len(await text(middle)) < before else (low, middle)
        near = range(max(heard.first, low - _AROUND), min(heard.begun, low + _AROUND + 1))
        return any([await text(first) == said[:before] for first in near])

    found: dict[str, int] = {}
    for n in range(heard.after, max(heard.first, heard.after - HELD_BACK - 1), -1):
        said = await text(n)
        if said not in found and said.endswith(heard.text) and await begins(said):
            found[said] = n
    if len(found) != 1:
        return None
    (n,) = found.values()
    rest = ids.unpack(ids.tail(completion, n))
    return n + 1 if len(rest) == 1 and rest[0] in stop_ids else n

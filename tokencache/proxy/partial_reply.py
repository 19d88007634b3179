"""Finds how many tokens of an interrupted reply its client had received.

A client that leaves within a reply later sends back the text that it has. The core finds which characters these are
(`core.verdict.DeliveredPrefix`). That a token ends where they end is proven with the engine's own `/detokenize`: the tokens up to there
read as the tokens before the text, followed by the text. There is no such token if a character, or a piece of text that a parser held
back, ends within one.
"""

from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet

from tokencache.core import ids
from tokencache.core.verdict import DeliveredPrefix

HELD_BACK = 4
"""Tokens that a parser may have held back when the last text was delivered."""
_AROUND = 3
"""Tokens tried on each side of the place that the lengths point to: part of a character may read as more characters than the whole."""


async def delivered_tokens(
    delivered: DeliveredPrefix, completion: bytes, stop_ids: AbstractSet[int], read: Callable[[bytes], Awaitable[str]]
) -> int | None:
    """Return how many tokens of a completion were delivered; `None` if that cannot be proven.

    Args:
        delivered: the text that came back, and where it can be.
        completion: packed ids.
        stop_ids: the model's stop ids. One that directly follows a text which was delivered to its end belongs to it.
        read: reads packed ids as text.

    Raises:
        RenderError: the engine cannot read its ids.
    """
    known: dict[int, str] = {}

    async def text(n: int) -> str:
        if n not in known:
            known[n] = await read(ids.head(completion, n)) if n else ""
        return known[n]

    async def starts_at_token(whole: str) -> bool:
        """Whether a token starts where the text starts, if `whole` is the text of all tokens up to its end.

        The event with its start may hold too many tokens to try each, so the place where the text before it has the right length is found
        by bisection.
        """
        before = len(whole) - len(delivered.text)
        low, high = delivered.first, delivered.begun
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if len(await text(middle)) < before else (low, middle)
        near = range(max(delivered.first, low - _AROUND), min(delivered.begun, low + _AROUND + 1))
        return any([await text(first) == whole[:before] for first in near])

    found: dict[str, int] = {}
    for n in range(delivered.after, max(delivered.first, delivered.after - HELD_BACK - 1), -1):
        whole = await text(n)
        if whole not in found and whole.endswith(delivered.text) and await starts_at_token(whole):
            found[whole] = n
    if len(found) != 1:
        return None
    (n,) = found.values()
    rest = ids.unpack(ids.tail(completion, n))
    return n + 1 if len(rest) == 1 and rest[0] in stop_ids else n

"""Finds how many tokens of an interrupted reply its client had received.

A client that leaves during a reply may later send back the text that it received. The core finds which characters these are
(`core.verdict.DeliveredPrefix`). The engine's own `/detokenize` then proves that a token ends where the text ends: the decoded tokens up to
there equal the decoded tokens before the text, followed by the text. There is no such token if a character, or a piece of text that a
parser held back, ends within a token.

An echo may also end after a complete call. Its tokens end with the text that ends every call (`engine.template.calls`), which must occur as
often as there are calls, each time after its call has begun.
"""

from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet

from tokencache.core import ids
from tokencache.core.verdict import DeliveredPrefix

HELD_BACK = 4
"""Maximum number of tokens that a parser may have held back when the last text was delivered."""
_AROUND = 3
"""Number of tokens tried on each side of the place that the lengths suggest: a part of a character may decode to several characters."""


async def delivered_tokens(
    delivered: DeliveredPrefix, completion: bytes, stop_ids: AbstractSet[int], read: Callable[[bytes], Awaitable[str]]
) -> int | None:
    """Return how many tokens of a completion were delivered; `None` if that cannot be proven.

    Args:
        delivered: the text that the client sent back, and the bounds of its tokens.
        completion: packed ids.
        stop_ids: the model's stop ids. If the text was delivered to its end, a stop id directly after it is counted too.
        read: decodes packed ids to text.

    Raises:
        RenderError: the engine cannot decode its ids.
    """
    known: dict[int, str] = {}

    async def text(n: int) -> str:
        if n not in known:
            known[n] = await read(ids.head(completion, n)) if n else ""
        return known[n]

    async def starts_at_token(whole: str) -> bool:
        """Whether a token starts where the text starts; `whole` is the text of all tokens up to the end of the text.

        The event in which the text starts may contain too many tokens to try each. So bisection finds the place where the text before it
        has the right length.
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
    return _with_stop_id(n, completion, stop_ids)


async def tokens_of_calls(
    delivered: DeliveredPrefix, completion: bytes, end: str, stop_ids: AbstractSet[int], read: Callable[[bytes], Awaitable[str]]
) -> int | None:
    """Return how many tokens of a completion there are up to the end of its last delivered call; `None` if that cannot be proven.

    Args:
        delivered: the calls that the client sent back.
        completion: packed ids.
        end: the text that ends every call.
        stop_ids: the model's stop ids. If nothing but a stop id follows the call, it is counted too.
        read: decodes packed ids to text.

    Raises:
        RenderError: the engine cannot decode its ids.
    """
    text = await read(ids.head(completion, delivered.after))
    at = len(await read(ids.head(completion, delivered.first))) if delivered.first else 0
    for number, call in enumerate(delivered.turn.served.calls[: delivered.calls]):
        found = text.find(end, at)
        if found < 0 or (number and call.name not in text[at:found]):  # the first call begins after its name
            return None
        at = found + len(end)
    low, high = delivered.begun + 1, delivered.after
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if len(await read(ids.head(completion, middle))) < at else (low, middle)
    if await read(ids.head(completion, low)) != text[:at]:
        return None
    return _with_stop_id(low, completion, stop_ids)


def _with_stop_id(n: int, completion: bytes, stop_ids: AbstractSet[int]) -> int:
    """Return `n`, or one more if only a stop id follows the first `n` tokens of a completion."""
    rest = ids.unpack(ids.tail(completion, n))
    return n + 1 if len(rest) == 1 and rest[0] in stop_ids else n

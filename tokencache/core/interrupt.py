"""Interrupts: a harness that left in mid-stream, and sends back what it had heard.

What it had heard ends with an event of the stream. So of an aborted turn it is recorded after which events a text could
have ended (`Cut`), and an echo is recognised if it is the text up to one of them, to the letter; where white space
around it was lost, only if there is just one such place.

That says which characters were heard, not which tokens: a parser holds text back, a character may be half of a token.
Where the tokens end is to be proven by decoding them (`DeliveredPrefix` says between which bounds); the core cannot do that.
A turn that had begun a call is never taken: nobody can say how much of it the harness kept.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tokencache.core import ids
from tokencache.core.messages import Message
from tokencache.core.rules import Leniency
from tokencache.core.turn import Turn
from tokencache.core.verdict import judge

RULE = "interrupted"


class Cut(NamedTuple):
    """An event after which a harness may have left.

    `before` and `after` count the sampled tokens before and after it, `content` and `reasoning` the characters so far.
    """

    before: int
    after: int
    content: int
    reasoning: int


class DeliveredPrefix(NamedTuple):
    """What a harness had heard of an aborted turn.

    `text` is spelled by the tokens from some place between `first` (inclusive) and `begun` (exclusive) on, and they end
    at `after` or a little before.
    """

    turn: Turn
    text: str
    first: int
    begun: int
    after: int
    rules: tuple[str, ...]


def pack_cuts(cuts: Sequence[Cut]) -> bytes:
    """Pack cuts: 16 bytes each."""
    return ids.pack(number for cut in cuts for number in cut)


def unpack_cuts(packed: bytes) -> list[Cut]:
    """Unpack cuts."""
    numbers = ids.unpack(packed)
    return [Cut(*numbers[i : i + len(Cut._fields)]) for i in range(0, len(numbers), len(Cut._fields))]


def heard(turn: Turn, echoed: Message, leniency: Leniency) -> DeliveredPrefix | None:
    """Find up to where of an aborted turn a harness had heard; `None` if this is not what it said, or it is not certain.

    A text is the turn's `content` up to a cut, its reasoning whole or gone; without any text it is its reasoning.
    """
    if not leniency.allows(RULE):
        return None
    said = _beginnings(turn, echoed)
    member = "content" if echoed.text else "reasoning"
    found = [both for both in said if getattr(both[1], member) == getattr(echoed, member)] or said
    if len(found) != 1:
        return None
    ((cut, message),) = found
    verdict = judge(message, echoed, leniency)
    if not verdict.supplied:
        return None
    begin = next(cut for cut in unpack_cuts(turn.cuts) if getattr(cut, member))
    rules = tuple(sorted({*verdict.rules, RULE}))
    return DeliveredPrefix(turn, getattr(message, member) or "", begin.before, begin.after, cut.after, rules)


def may_be(turn: Turn, echoed: Message) -> bool:
    """Whether an echo may be what was heard of an aborted turn, certain or not."""
    return bool(_beginnings(turn, echoed))


def _beginnings(turn: Turn, echoed: Message) -> list[tuple[Cut, Message]]:
    """The beginnings of an aborted turn that an echo may be, white space aside."""
    if turn.served.calls or echoed.calls or not (echoed.text or echoed.thought):
        return []
    cuts = [cut for cut in unpack_cuts(turn.cuts) if (cut.content if echoed.text else not cut.content and cut.reasoning)]
    said = [(cut, _up_to(turn.served, cut)) for cut in cuts]
    return [both for both in said if both[1].text == echoed.text and (echoed.text or both[1].thought == echoed.thought)]


def _up_to(served: Message, cut: Cut) -> Message:
    return Message("assistant", (served.content or "")[: cut.content] or None, (served.reasoning or "")[: cut.reasoning] or None)

"""Splice: prefix + tail = the prompt that is sent.

The stop id that ends a reply and the template's end of turn are *one* boundary. Where generation stopped at the very
id with which the tail begins (`<|im_end|>`; for GLM the next message's opener), the tail goes on behind it. Where it
was cut (`length`, a stop string, an abort) no stop id was sampled, and the tail supplies it. Where the model stopped
at *another* stop id than the template wants there (GLM: it expected the user and gets a tool's result; gpt-oss:
`<|return|>` sampled, `<|end|>` in a history), the ids of the history cannot stand as they are: a continuation is
refused, and a resplice puts the template's id in place of the model's.
"""

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from tokencache.core import ids


class Boundary(NamedTuple):
    """How a reply and the tail behind it meet.

    `drop`: tokens to take off the reply's end; `skip`: tokens of the tail that the reply already holds.
    """

    kind: str
    drop: int = 0
    skip: int = 0


SHARED = Boundary("shared-stop", skip=1)
OPEN = Boundary("no-stop")
REPLACED = Boundary("other-stop", drop=1)


def boundary(reply: bytes, tail: bytes, stop_ids: AbstractSet[int]) -> Boundary:
    """Find how packed reply ids and packed tail ids meet; `stop_ids` are those the engine stops at."""
    if not reply or not tail:
        return OPEN
    last = reply[-ids.ID_BYTES :]
    if ids.unpack(last)[0] not in stop_ids:
        return OPEN
    return SHARED if last == tail[: ids.ID_BYTES] else REPLACED


def join(prefix: bytes, tail: bytes, where: Boundary) -> bytes:
    """Join a prefix (packed) with the tail behind it (packed)."""
    kept = prefix[: len(prefix) - where.drop * ids.ID_BYTES]
    return kept + ids.tail(tail, where.skip)

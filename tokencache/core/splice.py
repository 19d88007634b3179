"""Splice: prefix + tail = the prompt that is sent.

The stop id that ends a reply and the template's end of turn are *one* boundary. Where generation stopped at the very
id with which the tail begins (`<|im_end|>`; for GLM the next message's opener), the tail goes on behind it. Where it
was cut (`length`, a stop string, an abort) no stop id was sampled, and the tail supplies it. Where the model stopped
at *another* stop id than the template wants there (GLM: it expected the user and gets a tool's result; gpt-oss:
`<|return|>` sampled, `<|end|>` in a history), the ids of the history cannot stand as they are: a continuation is
refused, and a resplice puts the template's id in place of the model's.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from tokencache.core import ids


class Junction(NamedTuple):
    """How a reply and the tail behind it meet.

    `drop`: tokens to take off the reply's end; `skip`: tokens of the tail that the reply already holds.
    """

    kind: str
    drop: int = 0
    skip: int = 0


SHARED = Junction("shared-stop", skip=1)
OPEN = Junction("no-stop")
REPLACED = Junction("other-stop", drop=1)


def junction(reply: bytes, tail: bytes, stop_ids: AbstractSet[int]) -> Junction:
    """Find how packed reply ids and packed tail ids meet; `stop_ids` are those the engine stops at."""
    if not reply or not tail:
        return OPEN
    last = reply[-ids.ID_BYTES :]
    if ids.unpack(last)[0] not in stop_ids:
        return OPEN
    return SHARED if last == tail[: ids.ID_BYTES] else REPLACED


def join(prefix: bytes, tail: bytes, where: Junction) -> bytes:
    """Join a prefix (packed) with the tail behind it (packed)."""
    kept = prefix[: len(prefix) - where.drop * ids.ID_BYTES]
    return kept + ids.tail(tail, where.skip)


def fill(
    pieces: Sequence[bytes], openers: Sequence[bytes], replies: Sequence[bytes], stop_ids: AbstractSet[int]
) -> tuple[bytes, list[tuple[int, int]]]:
    """Put replies, each behind its opener, between the pieces that were rendered around them; all are packed ids.

    A stop id that ends a reply and is not the template's is replaced: such a reply ends before it.

    Returns:
        The prompt, and for each reply the half-open range of tokens in which it stands.
    """
    prompt, spans = pieces[0] + openers[0], []
    for reply, piece, opener in zip(replies, pieces[1:], (*openers[1:], b""), strict=True):
        start, prompt = ids.count(prompt), prompt + reply
        where = junction(reply, piece + opener, stop_ids)
        spans.append((start, ids.count(prompt) - where.drop))
        prompt = join(prompt, piece + opener, where)
    return prompt, spans

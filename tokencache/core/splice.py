"""Joins prefix and tail to the prompt that is sent.

The stop id at the end of a reply and the template's end of turn are the same boundary and must appear only once:

`shared-stop`  The model stopped at the id with which the tail begins (`<|im_end|>`; for GLM the next message's opener). The tail continues
               after that id.
`no-stop`      The reply was cut (`length`, a stop string, an abort), so no stop id was sampled. The tail supplies it.
`other-stop`   The model stopped at another stop id than the template writes there. (GLM: the model expected a user message, but a tool
               result follows. gpt-oss: the model samples `<|return|>`, but a history has `<|end|>`.) The history cannot keep its exact
               ids: a resplice replaces the model's stop id by the template's.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from tokencache.core import ids


class Junction(NamedTuple):
    """How a reply and its tail are joined: remove `drop` tokens from the end of the reply, and skip the first `skip` tokens of the tail."""

    kind: str
    drop: int = 0
    skip: int = 0


SHARED = Junction("shared-stop", skip=1)
OPEN = Junction("no-stop")
REPLACED = Junction("other-stop", drop=1)


def junction(reply: bytes, tail: bytes, stop_ids: AbstractSet[int]) -> Junction:
    """Find how to join a reply and its tail (packed ids); `stop_ids` are the ids at which the engine stops."""
    if not reply or not tail:
        return OPEN
    last = reply[-ids.ID_BYTES :]
    if ids.unpack(last)[0] not in stop_ids:
        return OPEN
    return SHARED if last == tail[: ids.ID_BYTES] else REPLACED


def without_stop_id(reply: bytes, stop_ids: AbstractSet[int]) -> bytes:
    """Return a reply (packed ids) without the stop id at its end."""
    last = reply[-ids.ID_BYTES :]
    return reply[: -ids.ID_BYTES] if last and ids.unpack(last)[0] in stop_ids else reply


def join(prefix: bytes, tail: bytes, where: Junction) -> bytes:
    """Join a prefix and its tail (packed ids)."""
    kept = prefix[: len(prefix) - where.drop * ids.ID_BYTES]
    return kept + ids.tail(tail, where.skip)


def fill(
    gaps: Sequence[bytes], generation_prompts: Sequence[bytes], replies: Sequence[bytes], stop_ids: AbstractSet[int]
) -> tuple[bytes, list[tuple[int, int]]]:
    """Insert replies, each after its generation prompt, between the gaps that were rendered around them. All are packed ids.

    If a reply ends with another stop id than the template's, that id is replaced, and the reply's range ends before it.

    Returns:
        The packed prompt, and the half-open range of tokens of each reply.
    """
    prompt, spans = gaps[0] + generation_prompts[0], []
    for reply, gap, generation_prompt in zip(replies, gaps[1:], (*generation_prompts[1:], b""), strict=True):
        start, prompt = ids.count(prompt), prompt + reply
        where = junction(reply, gap + generation_prompt, stop_ids)
        spans.append((start, ids.count(prompt) - where.drop))
        prompt = join(prompt, gap + generation_prompt, where)
    return prompt, spans

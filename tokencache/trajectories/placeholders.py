"""Finds the turns whose tokens contain a placeholder of an image that the model itself sampled.

An engine puts the embeddings of an image in the place of its placeholder tokens. If the model samples such a token as text, its id is in
the sequence, and there is no image for it. The model code of trainers counts these ids, and refuses a row with more of them than its images
have (transformers: "image features and image tokens do not match"). So such a row cannot be trained, and neither can one that repeats the
reply as context.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from tokencache.core.turn import TurnMark


class TurnOrigin(NamedTuple):
    """A turn, and the turns whose replies are in its prompt with their exact ids: its parent, and those that its anchors name."""

    turn: str
    parent: str | None
    anchors: Collection[str]
    marks: Collection[str]


def with_sampled_placeholders(turns: Iterable[TurnOrigin]) -> set[str]:
    """Return the ids of the turns with a sampled placeholder in their reply or in their prompt. A turn comes after those in its prompt."""
    found: set[str] = set()
    for turn in turns:
        if TurnMark.SAMPLED_PLACEHOLDER in turn.marks or turn.parent in found or not found.isdisjoint(turn.anchors):
            found.add(turn.turn)
    return found

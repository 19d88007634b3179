"""Finds placeholders of images that a trainer cannot use: those that the model itself sampled, and those whose image is not known.

An engine puts the embeddings of an image in the place of its placeholder tokens. If the model samples such a token as text, its id is in
the sequence, and there is no image for it. The model code of trainers counts these ids, and refuses a row with more of them than its images
have (transformers: "image features and image tokens do not match"). So such a row cannot be trained, and neither can one that repeats the
reply as context.
"""

from collections.abc import Collection, Iterable, Sized
from typing import NamedTuple

from tokencache.core.turn import TurnMark


class TurnOrigin(NamedTuple):
    """A turn, and the turns whose replies are in its prompt with their exact ids: its parent, and those that its anchors name."""

    turn: str
    parent: str | None
    anchors: Collection[str]
    marks: Collection[str]


def are_unplaced(media: Sized, marks: Iterable[Collection[str]]) -> bool:
    """Whether a sequence has images or other media, and it is not known which of its tokens stand for which of them.

    So it is if the engine has neither the plugin nor the route that reports the places (`docs/images.md`).

    Args:
        media: those of the sequence whose places are known.
        marks: those of each of its turns.
    """
    return not media and any(TurnMark.MEDIA in one for one in marks)


def with_sampled_placeholders(turns: Iterable[TurnOrigin]) -> set[str]:
    """Return the ids of the turns with a sampled placeholder in their reply or in their prompt. A turn comes after those in its prompt."""
    found: set[str] = set()
    for turn in turns:
        if TurnMark.SAMPLED_PLACEHOLDER in turn.marks or turn.parent in found or not found.isdisjoint(turn.anchors):
            found.add(turn.turn)
    return found

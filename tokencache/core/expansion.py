"""Compact and expanded ids of a prompt with images.

A chat template writes one *placeholder* for each image. The engine replaces it by as many ids as the image needs, its *expansion*. Ids with
placeholders are *compact*, ids with expansions are *expanded*. The proxy stores and compares expanded ids (`core.media`). Compact ids are
only a way to send them to an engine that expands by itself.
"""

from collections.abc import Collection, Sequence

Place = tuple[int, int]
"""First token and number of tokens of an expansion."""


def compact(expanded: Sequence[int], places: Sequence[Place], placeholder: Sequence[int]) -> list[int]:
    """Replace each expansion, in order, by the placeholder."""
    found: list[int] = []
    at = 0
    for start, length in places:
        found += expanded[at:start]
        found += placeholder
        at = start + length
    return [*found, *expanded[at:]]


def learn_placeholder(expanded: Sequence[int], places: Sequence[Place], compacted: Sequence[int]) -> list[int] | None:
    """Find the placeholder from the expanded and the compact ids of one prompt; `None` if the images are not plain replacements of one."""
    rest = len(expanded) - sum(length for _, length in places)
    length, left = divmod(len(compacted) - rest, len(places))
    if left or length < 1:
        return None
    first = places[0][0]
    placeholder = list(compacted[first : first + length])
    return placeholder if compact(expanded, places, placeholder) == list(compacted) else None


def locate(prompt: Sequence[int], start: int, expansions: Sequence[Sequence[int]]) -> list[Place] | None:
    """Find expansions in a prompt, in order, from index `start` on; `None` if one is missing."""
    found: list[Place] = []
    at = start
    for wanted in expansions:
        size, last = len(wanted), len(prompt) - len(wanted)
        while at <= last and list(prompt[at : at + size]) != list(wanted):
            at += 1
        if not size or at > last:
            return None
        found.append((at, size))
        at += size
    return found


def stands_outside(prompt: Sequence[int], places: Sequence[Place], placeholder_ids: Collection[int]) -> bool:
    """Whether an id of a placeholder stands outside the expansions. It is text, and an engine might put an image in its place."""
    at = 0
    for start, length in [*places, (len(prompt), 0)]:
        if any(token in placeholder_ids for token in prompt[at:start]):
            return True
        at = start + length
    return False

"""Checks a prefix forest against the rows from which it was built.

=============  =======================================================================================================
`structure`    the lists describe tries in depth-first order, and the segments divide them
`rows`         every row comes out exactly: tokens, mask, log probabilities, images
`owners`       each sampled token has one owner, and no other token has one
`repeated`     a shared prefix occurs once: two tokens after the same prefix are equal only if different rows sampled them, or if they
               belong to different images
=============  =======================================================================================================

No wrong forest raises an exception.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise

from tokencache.batching.forest import FlatRow, PrefixForest, Segment, build_forest
from tokencache.batching.selection import TrainingRow
from tokencache.trajectories.values import Trajectory
from tokencache.trajectories.verify import CheckFailure


def verify_forest(trajectory: Trajectory) -> list[CheckFailure]:
    """Build the forest of a trajectory and check it, as `tokencache verify` does. An empty list means that every check passed."""
    try:
        forest = build_forest(TrainingRow(trajectory, sequence) for sequence in trajectory.sequences)
    except (ValueError, OverflowError) as error:
        return [CheckFailure(session=trajectory.session, check="forest", words=str(error))]
    rows = [FlatRow(trajectory.session, one.id, one.token_ids, one.loss_mask, one.logprobs, one.media) for one in trajectory.sequences]
    return [CheckFailure(session=trajectory.session, check="forest", words=words) for words in check_forest(forest, rows)]


def check_forest(forest: PrefixForest, rows: Sequence[FlatRow]) -> list[str]:
    """Check a forest against its rows. An empty list means that every check passed."""
    found = [*_tokens(forest)] or [*_segments(forest)]
    return found or [*_rows(forest, rows), *_owners(forest, rows), *_repeated(forest)]


def _tokens(forest: PrefixForest) -> Iterator[str]:
    n = len(forest.token_ids)
    sizes = {len(values) for values in (forest.parents, forest.positions, forest.ends, forest.owners, forest.logprobs)}
    if sizes != {n}:
        yield f"the lists have {sorted(sizes | {n})} entries"
        return
    ends, counts = [i + 1 for i in range(n)], [1] * n
    for i in range(n - 1, -1, -1):
        parent = forest.parents[i]
        if not -1 <= parent < i:
            yield f"token {i}: its parent {parent} does not come before it"
            return
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[i])
            counts[parent] += counts[i]
    for i, parent in enumerate(forest.parents):
        depth = forest.positions[parent] + 1 if parent >= 0 else 0
        if forest.positions[i] != depth:
            yield f"token {i}: has position {forest.positions[i]}, not {depth}"
        if forest.ends[i] != ends[i]:
            yield f"token {i}: its descendants end at {ends[i]}, not at {forest.ends[i]}"
        if ends[i] - i != counts[i]:
            yield f"token {i}: its descendants do not follow it without a gap"
        if not -1 <= forest.owners[i] < len(forest.leaves):
            yield f"token {i}: its owner {forest.owners[i]} is no row"


def _segments(forest: PrefixForest) -> Iterator[str]:
    n = len(forest.token_ids)
    if any(a.end != b.start for a, b in pairwise([Segment(0, 0, -1), *forest.segments, Segment(n, n, -1)])):
        yield "the segments do not cover the tokens without gaps"
        return
    for at, segment in enumerate(forest.segments):
        if not (segment.start < segment.end and -1 <= segment.parent < at):
            yield f"segment {at}: is empty, or its parent {segment.parent} does not come before it"
            return
        before = forest.segments[segment.parent].end - 1 if segment.parent >= 0 else -1
        if forest.parents[segment.start : segment.end] != [before, *range(segment.start, segment.end - 1)]:
            yield f"segment {at}: its tokens have other parents"
    for leaf in forest.leaves:
        if not -1 <= leaf.segment < len(forest.segments):
            yield f"row {leaf.session}/{leaf.sequence}: its segment {leaf.segment} does not exist"


def _rows(forest: PrefixForest, rows: Sequence[FlatRow]) -> Iterator[str]:
    if len(forest.leaves) != len(rows):
        yield f"the forest has {len(forest.leaves)} rows, {len(rows)} were given"
    for given, own in zip(rows, forest.rows(), strict=False):
        for name in FlatRow.__struct_fields__:
            if getattr(given, name) != getattr(own, name):
                yield f"row {given.session}/{given.sequence}: {name} differ"


def _owners(forest: PrefixForest, rows: Sequence[FlatRow]) -> Iterator[str]:
    """Together with `_rows`, which finds the owned tokens of each row, equal numbers show that no token has a second place."""
    sampled, owned = sum(sum(row.loss_mask) for row in rows), sum(forest.loss_mask)
    if sampled != owned:
        yield f"{owned} tokens have an owner, {sampled} were sampled"
    if any(value for value, owner in zip(forest.logprobs, forest.owners, strict=True) if owner < 0):
        yield "a token without an owner has a log probability"


def _repeated(forest: PrefixForest) -> Iterator[str]:
    alone = {forest.ranges(n)[0][0] for n, leaf in enumerate(forest.leaves) if leaf.alone and leaf.segment >= 0}
    images = _images(forest)
    seen: set[tuple[int, int, Hashable]] = set()
    shareable: set[tuple[int, int, Hashable]] = set()
    for i, (parent, token, owner) in enumerate(zip(forest.parents, forest.token_ids, forest.owners, strict=True)):
        if i in alone:
            continue
        place = parent, token, images.get(i)
        if place in shareable or (place in seen and owner < 0):
            yield f"token {i}: occurs twice after the same prefix"
        seen.add(place)
        if owner < 0:
            shareable.add(place)


def _images(forest: PrefixForest) -> dict[int, Hashable]:
    """Return for each token of an image what tells it from those of other images."""
    found: dict[int, Hashable] = {}
    for medium in forest.media:
        image = (medium.modality, medium.sha256, medium.media_type, medium.length) if medium.sha256 else medium
        found |= {i: (image, i - medium.start) for i in range(medium.start, medium.end)}
    return found

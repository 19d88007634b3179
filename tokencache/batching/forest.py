"""Joins rows to a prefix forest: token tries in which a shared prefix occurs once, and each sampled token has one owner.

Branches, sub-agents and compactions repeat thousands of tokens of context for a few trained ones, and so do the sessions of a group. In the
forest, these tokens occur once. A model computes the same logits for a token whether it is in a row or in the forest, if it attends to the
ancestors of the token only and the token has the position that it has in its row. So the loss and its gradients are the same.

    forest = build_forest(selection.kept)
    forest.token_ids, forest.parents, forest.positions, forest.loss_mask, forest.logprobs

The tokens are in depth-first order, and a *segment* is a run of tokens without a fork. The descendants of a token follow it without a gap:
they end before `ends[token]`. So token q attends to token k exactly if `k <= q < ends[k]`.

A sampled token (loss mask 1) belongs to the row in which it was sampled, its owner. In other rows the same token is context. If two rows
each sampled the same token after the same prefix, these are two samples with a log probability each: the forest forks before them, so
that both are trained.

Equal ids may stand for different images. So the tokens of an image are shared only with the same image (by its digest), and all after it
only if all images before are the same. A row whose images are not recorded shares no tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from tokencache.batching.selection import TrainingRow
from tokencache.core import ids
from tokencache.core.media import PlacedMedia
from tokencache.trajectories.values import Sequence as TokenSequenceValue


class Segment(msgspec.Struct, frozen=True):
    """A run of tokens without a fork: the half-open range of its tokens, and the segment before it (-1 if there is none)."""

    start: int
    end: int
    parent: int


class ForestRow(msgspec.Struct, frozen=True):
    """A row of a forest: its session and sequence, and its last segment (-1 if it has no tokens).

    `alone` is whether it shares no tokens, because it contains images or other media that are not recorded.
    """

    session: str
    sequence: str
    segment: int
    alone: bool = False


class FlatRow(msgspec.Struct, frozen=True):
    """A row as it was before it was joined to a forest: one entry for each token in each list, and its images and other media."""

    session: str
    sequence: str
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    media: list[PlacedMedia] = []


class PrefixForest(msgspec.Struct, frozen=True):
    """Rows as token tries. All lists but the last three have one entry for each token, in depth-first order.

    Attributes:
        token_ids: the tokens.
        parents: the place of the token before it in its rows; -1 for the first token of a tree.
        positions: the place of the token in its rows, from 0.
        ends: the end of the range of its descendants.
        owners: the row that sampled it, as an index of `leaves`; -1 if it is context in all rows.
        logprobs: the log probability (natural logarithm) with which its owner sampled it; 0.0 without an owner.
        segments: all segments, in order. They cover the tokens without gaps.
        leaves: the rows, in the order in which they were given.
        media: the images and other media, in order; `start` is a place in `token_ids`. One that several rows share occurs once.
    """

    token_ids: list[int]
    parents: list[int]
    positions: list[int]
    ends: list[int]
    owners: list[int]
    logprobs: list[float]
    segments: list[Segment]
    leaves: list[ForestRow]
    media: list[PlacedMedia] = []

    @property
    def loss_mask(self) -> list[int]:
        """Whether each token is trained, as 0 or 1."""
        return [int(owner >= 0) for owner in self.owners]

    def ranges(self, row: int) -> list[tuple[int, int]]:
        """Return the ranges of tokens that a row consists of, from its root. They are also the ancestors of its last segment, and that."""
        found = []
        at = self.leaves[row].segment
        while at >= 0:
            found.append((self.segments[at].start, self.segments[at].end))
            at = self.segments[at].parent
        return found[::-1]

    def rows(self) -> list[FlatRow]:
        """Return the rows exactly as they were given."""
        return [self._row(n) for n in range(len(self.leaves))]

    def _row(self, n: int) -> FlatRow:
        path = [i for start, end in self.ranges(n) for i in range(start, end)]
        own = [self.owners[i] == n for i in path]
        return FlatRow(
            session=self.leaves[n].session,
            sequence=self.leaves[n].sequence,
            token_ids=[self.token_ids[i] for i in path],
            loss_mask=[int(one) for one in own],
            logprobs=[self.logprobs[i] if one else 0.0 for i, one in zip(path, own, strict=True)],
            media=[msgspec.structs.replace(one, start=at) for at, one in self._media_of(path)],
        )

    def _media_of(self, path: Sequence[int]) -> Iterator[tuple[int, PlacedMedia]]:
        """Yield the media among some tokens, each after the index of its first token."""
        starts = {medium.start: medium for medium in self.media}
        for at, token in enumerate(path):
            if token in starts:
                yield at, starts[token]


class _Node:
    """A segment while the forest grows. `owned` has a byte for each token: 1 if it has an owner."""

    __slots__ = ("children", "logprobs", "owned", "owners", "packed", "parent")

    def __init__(self, packed: bytes, owners: list[int], logprobs: list[float], parent: "_Node | None") -> None:
        self.packed = packed
        self.owners = owners
        self.logprobs = logprobs
        self.owned = bytearray(owner >= 0 for owner in owners)
        self.parent = parent
        self.children: list[_Node] = []

    def __len__(self) -> int:
        return len(self.owners)


class _Codes:
    """Numbers for tokens, so that a token in an image is equal only to the same token of the same image.

    Those in images are -1, -2 and so on. All other tokens stand for themselves.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int, PlacedMedia], int] = {}
        self._tokens: list[tuple[int, int, PlacedMedia]] = []

    def encode(self, token_ids: Sequence[int], media: Sequence[PlacedMedia]) -> bytes:
        """Return the packed numbers of a row's tokens."""
        numbers = list(token_ids)
        for medium in media:
            # a medium without a digest equals no other: a negative start that no other has tells it from them
            start = 0 if medium.sha256 else -1 - len(self._tokens)
            image = msgspec.structs.replace(medium, start=start)
            for offset in range(medium.length):
                numbers[medium.start + offset] = self._number((token_ids[medium.start + offset], offset, image))
        return ids.pack(numbers)

    def _number(self, token: tuple[int, int, PlacedMedia]) -> int:
        known = self._numbers.get(token)
        if known is None:
            self._tokens.append(token)
            known = self._numbers[token] = -len(self._tokens)
        return known

    def decode(self, packed: bytes, start: int) -> tuple[list[int], list[PlacedMedia]]:
        """Return the tokens of packed numbers, and the media that begin there; `start` is the place of the first number."""
        tokens, media = ids.unpack(packed), []
        for at, number in enumerate(tokens):
            if number < 0:
                tokens[at], offset, image = self._tokens[-number - 1]
                if offset == 0:
                    media.append(msgspec.structs.replace(image, start=start + at))
        return tokens, media


class _Row(NamedTuple):
    """A row while it is joined to a forest: its index among the rows, and the packed numbers of its tokens (`_Codes`)."""

    owner: int
    packed: bytes
    mask: bytes
    logprobs: list[float]


class _Builder:
    """A forest that grows row by row."""

    def __init__(self) -> None:
        self.roots: list[_Node] = []
        self._shared_roots: list[_Node] = []

    def add(self, row: _Row, *, alone: bool) -> _Node | None:
        """Add a row. Returns its last segment; `None` if it has no tokens."""
        if not row.mask:
            return None
        node, at = (None, 0) if alone else self._longest_match(row)
        self._claim(node, at, row)
        if at == len(row.mask):
            return node
        owners = [row.owner if mask else -1 for mask in row.mask[at:]]
        new = _Node(ids.tail(row.packed, at), owners, row.logprobs[at:], node)
        if node is not None:
            node.children.append(new)
        else:
            self.roots.append(new)
            if not alone:
                self._shared_roots.append(new)
        return new

    def _longest_match(self, row: _Row) -> tuple[_Node | None, int]:
        """Find the segment that ends with the longest prefix that a row may share, and its length. May split a segment."""
        best: tuple[int, _Node | None, int] = (0, None, 0)
        waiting = [(node, 0) for node in reversed(self._shared_roots)]
        while waiting:
            node, at = waiting.pop()
            n = _shareable(node, row, at)
            if at + n > best[0]:
                best = (at + n, node, n)
            if n == len(node):
                waiting += [(child, at + n) for child in reversed(node.children)]
        length, found, n = best
        if found is not None and n < len(found):
            found = self._split(found, n)
        return found, length

    def _split(self, node: _Node, n: int) -> _Node:
        """Split a segment after n tokens; returns the first part. The node itself becomes the second part, so rows still end with it."""
        first = _Node(ids.head(node.packed, n), node.owners[:n], node.logprobs[:n], node.parent)
        first.children.append(node)
        for siblings in (self.roots, self._shared_roots) if node.parent is None else (node.parent.children,):
            siblings[siblings.index(node)] = first
        node.packed, node.owners, node.logprobs = ids.tail(node.packed, n), node.owners[n:], node.logprobs[n:]
        node.owned, node.parent = node.owned[n:], first
        return first

    def _claim(self, node: _Node | None, end: int, row: _Row) -> None:
        """Make a row the owner of the tokens that it sampled among the first `end` ones, which it shares."""
        while node is not None:
            start = end - len(node)
            at = row.mask.find(1, start, end)
            while at >= 0:
                node.owners[at - start], node.logprobs[at - start], node.owned[at - start] = row.owner, row.logprobs[at], 1
                at = row.mask.find(1, at + 1, end)
            node, end = node.parent, start


def _shareable(node: _Node, row: _Row, at: int) -> int:
    """Count the first tokens of a segment that a row may share from its token `at` on: equal ones, up to one that both sampled."""
    n = ids.common_head(node.packed, ids.tail(row.packed, at)[: len(node.packed)])
    sampled = row.mask.find(1, at, at + n)
    while sampled >= 0:
        if node.owned[sampled - at]:
            return sampled - at
        sampled = row.mask.find(1, sampled + 1, at + n)
    return n


def build_forest(rows: Iterable[TrainingRow]) -> PrefixForest:
    """Join rows to a forest: those of a session, of a group, or any others.

    Raises:
        ValueError: a row occurs twice, or its lists do not fit together. `tokencache verify` describes such files.
    """
    builder, codes = _Builder(), _Codes()
    last: list[_Node | None] = []
    leaves: list[tuple[str, str, bool]] = []
    seen: set[tuple[str, str]] = set()
    for row in rows:
        sequence = row.sequence
        name = (row.trajectory.session, sequence.id)
        if name in seen:
            raise ValueError(f"{row} occurs twice, so its tokens would be trained twice")
        seen.add(name)
        if wrong := _misfit(sequence):
            raise ValueError(f"{row}: {wrong}")
        alone = sequence.has_unplaced_media
        packed = _Row(len(leaves), codes.encode(sequence.token_ids, sequence.media), bytes(sequence.loss_mask), sequence.logprobs)
        last.append(builder.add(packed, alone=alone))
        leaves.append((*name, alone))
    return _flattened(builder.roots, last, leaves, codes)


def uneven(sequence: TokenSequenceValue) -> str:
    """Return the lengths of the lists of a sequence if they differ, otherwise `""`."""
    lengths = len(sequence.token_ids), len(sequence.loss_mask), len(sequence.logprobs)
    return "" if len({*lengths}) == 1 else "{} tokens, {} mask entries, {} log probabilities".format(*lengths)


def _misfit(sequence: TokenSequenceValue) -> str:
    token_ids, loss_mask, logprobs = sequence.token_ids, sequence.loss_mask, sequence.logprobs
    if wrong := uneven(sequence):
        return wrong
    if min(token_ids, default=0) < 0:
        return "a token id is negative"
    if not {0, 1}.issuperset(loss_mask):
        return "the mask has entries other than 0 and 1"
    if any(value for value, mask in zip(logprobs, loss_mask, strict=True) if not mask):
        return "a token with mask 0 has a log probability"
    return _media_misfit(sequence.media, loss_mask)


def _media_misfit(media: Sequence[PlacedMedia], loss_mask: list[int]) -> str:
    ends = [0, *(medium.end for medium in media)]
    if any(medium.length < 1 or medium.start < end for medium, end in zip(media, ends, strict=False)) or ends[-1] > len(loss_mask):
        return "its images overlap, or end beyond its tokens"
    if any(any(loss_mask[medium.start : medium.end]) for medium in media):
        return "a token of an image was sampled"
    return ""


def _flattened(roots: list[_Node], last: Sequence[_Node | None], leaves: Sequence[tuple[str, str, bool]], codes: _Codes) -> PrefixForest:
    """Write a grown forest in depth-first order."""
    token_ids: list[int] = []
    parents: list[int] = []
    positions: list[int] = []
    owners: list[int] = []
    logprobs: list[float] = []
    media: list[PlacedMedia] = []
    segments: list[Segment] = []
    index: dict[_Node | None, int] = {None: -1}
    waiting = [*reversed(roots)]
    while waiting:
        node = waiting.pop()
        start, parent = len(token_ids), index[node.parent]
        before = segments[parent].end - 1 if parent >= 0 else -1
        first = positions[before] + 1 if parent >= 0 else 0
        index[node] = len(segments)
        segments.append(Segment(start, start + len(node), parent))
        tokens, placed = codes.decode(node.packed, start)
        token_ids += tokens
        media += placed
        parents += [before, *range(start, start + len(node) - 1)]
        positions += range(first, first + len(node))
        owners += node.owners
        logprobs += node.logprobs
        waiting += reversed(node.children)
    return PrefixForest(
        token_ids=token_ids,
        parents=parents,
        positions=positions,
        ends=_ends(segments),
        owners=owners,
        logprobs=logprobs,
        segments=segments,
        leaves=[ForestRow(session, sequence, index[node], alone) for node, (session, sequence, alone) in zip(last, leaves, strict=True)],
        media=media,
    )


def _ends(segments: Sequence[Segment]) -> list[int]:
    """Return for each token the end of its descendants, which follow its segment without a gap."""
    end_of = [segment.end for segment in segments]
    for n in range(len(segments) - 1, -1, -1):  # children come after their parents
        parent = segments[n].parent
        if parent >= 0:
            end_of[parent] = max(end_of[parent], end_of[n])
    return [end for segment, end in zip(segments, end_of, strict=True) for _ in range(segment.start, segment.end)]

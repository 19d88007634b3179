"""Drift: where a plain rendering of the same messages differs from the prompt that was sent.

Without the proxy an engine renders the harness's messages anew with every call. What that would have given is compared
with what was sent, token by token. A *site* is one place where they differ, and it has a cause (`drift_causes`): the words
were changed on the way, the template leaves something out, or nothing is different but the tokenization of the same text.

The two are aligned with the fewest changes of single tokens (insert, delete, replace: Levenshtein's distance). Sites are
what is not aligned; where several alignments are equally short, each site stands as far to the right as it can. So the
sites of one pair are always the same, and with the prompt they say the rendering: nothing else need be kept of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from rapidfuzz.distance import Levenshtein

from tokencache.core import ids


class Site(msgspec.Struct, frozen=True):
    """One place where a plain rendering differs.

    Attributes:
        start, end: the half-open range of the prompt's tokens that the rendering has not.
        rendered: the ids that it has in their place.
        cause: `retokenized` (the same text in other tokens), a rule by which the reply there was forgiven, or `template`
            (the template writes it otherwise, or leaves it out).
        turn: the turn that sampled the tokens; `""` outside all replies.
    """

    start: int
    end: int
    rendered: tuple[int, ...]
    cause: str
    turn: str = ""


class Drift(msgspec.Struct, frozen=True):
    """How a turn's prompt differs from a plain rendering of its messages.

    Attributes:
        rendered: how many tokens the plain rendering has.
        tokens: how many of the prompt's tokens it has not, in their order.
        sites: where; empty if it is the very same prompt.
    """

    rendered: int
    tokens: int
    sites: tuple[Site, ...] = ()

    @property
    def at(self) -> int | None:
        """The first token of the prompt that differs; `None` if none does."""
        return self.sites[0].start if self.sites else None


def none(prompt_tokens: int) -> Drift:
    """The drift of a prompt that is its own plain rendering."""
    return Drift(prompt_tokens, 0)


def differences(prompt: bytes, rendering: bytes) -> list[Site]:
    """Find where a rendering differs from a prompt, both packed; the sites have no cause yet.

    They are in order and apart from each other, and no others need fewer insertions, deletions and replacements.
    Costs about 0.2 s for 100,000 tokens that differ in dozens of places, and no memory to speak of (rapidfuzz 3, which
    parts long sequences as Hirschberg did).
    """
    head = ids.common_head(prompt, rendering)
    ours, theirs = ids.tail(prompt, head), ids.tail(rendering, head)
    end = ids.common_end(ours, theirs)
    a, b = ids.unpack(ids.head(ours, ids.count(ours) - end)), ids.unpack(ids.head(theirs, ids.count(theirs) - end))
    distance = abs(len(a) - len(b))  # nearly all changes leave something out: a narrow band is tried first
    codes = Levenshtein.opcodes(a, b, score_hint=distance + distance // 4 + 64)
    gaps = [_Gap(code.src_start, code.src_end, code.dest_start, code.dest_end) for code in codes if code.tag != "equal"]
    whole, other = ids.unpack(ids.tail(prompt, head)), ids.unpack(ids.tail(rendering, head))
    return [Site(head + g.start, head + g.end, tuple(other[g.first : g.last]), "") for g in _to_the_right(gaps, whole, other)]


class _Gap(NamedTuple):
    """A range of the prompt, `start` to `end`, and what the rendering has for it, `first` to `last`."""

    start: int
    end: int
    first: int
    last: int


def _to_the_right(gaps: Sequence[_Gap], ours: Sequence[int], theirs: Sequence[int]) -> list[_Gap]:
    """Write an alignment in the one way: gaps that touch are one, and each stands as far right as it can, the last one first."""
    placed: list[_Gap] = []
    for gap in reversed(gaps):
        now = _shrunk(gap, ours, theirs)
        while True:
            limit = placed[-1].start if placed else len(ours)
            if placed and now.end == limit:
                after = placed.pop()
                now = _shrunk(_Gap(now.start, after.end, now.first, after.last), ours, theirs)
            elif now.end < limit and _may_move(now, ours, theirs):
                now = _Gap(*(place + 1 for place in now))
            else:
                break
        placed.append(now)
    return placed[::-1]


def _may_move(gap: _Gap, ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether a gap that stands before an aligned token says the same one token further on."""
    if gap.first == gap.last:
        return gap.start < gap.end and ours[gap.start] == ours[gap.end]
    return gap.start == gap.end and theirs[gap.first] == theirs[gap.last]


def _shrunk(gap: _Gap, ours: Sequence[int], theirs: Sequence[int]) -> _Gap:
    """Take off what a gap begins with on both sides."""
    start, first = gap.start, gap.first
    while start < gap.end and first < gap.last and ours[start] == theirs[first]:
        start, first = start + 1, first + 1
    return _Gap(start, gap.end, first, gap.last)


def rendering_of(prompt: Sequence[int], sites: Sequence[Site]) -> list[int]:
    """Put the plain rendering together again: the prompt with what its sites say in their places."""
    found: list[int] = []
    at = 0
    for site in sites:
        found += prompt[at : site.start]
        found += site.rendered
        at = site.end
    found += prompt[at:]
    return found


class MeasuredTurn(NamedTuple):
    """A turn of a sequence: where its prompt and its completion end, and the drift of its prompt (`None`: not measured)."""

    prompt: int
    completion: int
    drift: Drift | None


def breaks(token_ids: Sequence[int], steps: Sequence[MeasuredTurn]) -> list[int] | None:
    """Find the turns of a sequence at which it would break if every prompt were rendered plainly.

    That is what happens to who has only the text: a turn goes on from the one before it if its plain rendering starts
    with that turn's plain rendering and the tokens that were sampled behind it. A difference that was there already
    breaks nothing a second time.

    Returns:
        Places in `steps`, without 0; `None` if the drift of some turn was not measured.
    """
    found = []
    before: list[int] = []
    for place, step in enumerate(steps):
        if step.drift is None:
            return None
        rendering = rendering_of(token_ids[: step.prompt], step.drift.sites)
        if place and rendering[: len(before)] != before:
            found.append(place)
        before = rendering + list(token_ids[step.prompt : step.completion])
    return found

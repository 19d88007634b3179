"""Finds the ids of a reply that a thinking budget forced. Their place proves it, not their probability.

With `thinking_token_budget` (in Messages: `thinking.budget_tokens`) an engine ends the thinking: after as many tokens of a thought as the
budget allows, it puts its end-of-thinking ids in the place of the policy's choice. All that vLLM looks at is the ids so far and the budget
(0.32, `v1/sample/thinking_budget_state.py` and `v1/worker/gpu/sample/thinking_budget.py`), so the same can be computed from a record. The
end of a thought that the policy chose itself is before that place, and stays its own.

The two files differ where a thought begins again before it has ended, where the forced ids are not those that end a thought by themselves,
and where the policy has begun with them. A reply is therefore read in every way in which an engine may have counted. A way that expects
forced ids where there are others is refuted. Only if all ways that remain agree, the places are proven.
"""

from itertools import product
from typing import NamedTuple

from tokencache.core import ids

Span = tuple[int, int]
"""A half-open range of the tokens of a completion."""


class ThinkingMarks(NamedTuple):
    """Packed ids around a thought: those that begin and end one, and those that the engine forces at the end of a budget."""

    start: bytes
    end: bytes
    forced: bytes


class _Way(NamedTuple):
    """How an engine counts: the ids that end a thought; whether a second start begins it anew; whether begun forced ids are completed."""

    end: bytes
    restarts: bool
    completes: bool


def forced_spans(prompt: bytes, completion: bytes, budget: int, marks: ThinkingMarks) -> tuple[Span, ...] | None:
    """Return the ranges of a completion that a budget of thinking tokens forced; `None` if that is not certain.

    Args:
        prompt: packed ids.
        completion: packed ids.
        budget: the number of tokens that a thought may have.
        marks: the ids around a thought.
    """
    completes = (False, True) if ids.count(marks.forced) > 1 else (False,)
    ways = (_Way(*way) for way in product({marks.end, marks.forced}, (False, True), completes))
    possible = {spans for way in ways if (spans := _read(prompt, completion, budget, marks, way)) is not None}
    return possible.pop() if len(possible) == 1 else None


def _read(prompt: bytes, completion: bytes, budget: int, marks: ThinkingMarks, way: _Way) -> tuple[Span, ...] | None:
    """Read a completion in one way; `None` if other ids are where this way expects forced ones."""
    n, at, whole, first = ids.count(completion), 0, prompt + completion, ids.count(prompt)
    last = ids.find_last(prompt, marks.start)
    begin = last + ids.count(marks.start) - first if last > ids.find_last(prompt, way.end) else None
    events = sorted([*((end, False) for end in _ends(completion, way.end)), *((end, True) for end in _ends(completion, marks.start))])
    spans: list[Span] = []
    for end, starts in [*events, (n + 1, False)]:
        due = None if begin is None else max(begin + budget, at)
        if due is not None and due < min(end, n):
            length = _forced_length(whole, first + due, marks.forced, way)
            if length is None:
                return None
            at, begin = due + length, None
            spans.append((due, at))
        if end <= at:  # part of what was forced
            continue
        if not starts:
            begin = None
        elif begin is None or way.restarts:
            begin = end
    return tuple(spans)


def _forced_length(whole: bytes, place: int, forced: bytes, way: _Way) -> int | None:
    """Return how many ids were forced at a place of prompt and completion; `None` if there are others."""
    cut = place * ids.ID_BYTES
    before = whole[max(0, cut - len(forced)) : cut]
    begun = next((j for j in range(ids.count(forced) - 1, 0, -1) if before.endswith(ids.head(forced, j))), 0) if way.completes else 0
    rest = ids.tail(forced, begun)
    there = whole[cut : cut + len(rest)]
    return ids.count(there) if rest.startswith(there) else None


def _ends(completion: bytes, mark: bytes) -> list[int]:
    """Return the positions after each occurrence of a mark."""
    found, place, size = [], -1, ids.count(mark)
    while (place := ids.find(completion, mark, place + 1)) >= 0:
        found.append(place + size)
    return found

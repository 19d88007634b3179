"""Products of parameters, and seeds: every pair of values in each run, every combination in the whole run.

A fault mostly needs one value, or two that meet. The cases that no pair of values needs are marked `whole`. `each` is for axes that have
nothing to do with each other: one value is enough then.
"""

import itertools

import pytest


def cases(*axes):
    """The product of some axes as parameters, in its usual order; what repeats pairs of values is marked `whole`."""
    return _marked(axes, _needed([range(len(axis)) for axis in axes]))


def each(*axes):
    """The product of some axes as parameters; what only repeats values is marked `whole`. The axes go round side by side."""
    return _marked(axes, {tuple(n % len(axis) for axis in axes) for n in range(max(map(len, axes)))})


def seeds(usual, whole):
    """The seeds 0 to `whole` of random campaigns of one kind; those from `usual` on are marked `whole`."""
    return [pytest.param(seed, marks=() if seed < usual else pytest.mark.whole) for seed in range(whole)]


def some(values, usual):
    """Parameters of one kind; all but `usual` of them, which lie evenly among them, are marked `whole`."""
    values = list(values)
    chosen = {place * len(values) // usual for place in range(usual)}
    return [
        pytest.param(*(value if type(value) is tuple else (value,)), marks=() if place in chosen else pytest.mark.whole)
        for place, value in enumerate(values)
    ]


def _marked(axes, needed):
    return [
        pytest.param(*(axis[at] for axis, at in zip(axes, place, strict=True)), marks=() if place in needed else pytest.mark.whole)
        for place in itertools.product(*(range(len(axis)) for axis in axes))
    ]


def _needed(axes):
    """Places in the product that together have each pair: the next is always the first of those with the most pairs that are missing."""
    left, chosen = {place: _pairs(place) for place in itertools.product(*axes)}, set()
    missing = set().union(*left.values())
    while missing:
        best = max(left, key=lambda place: len(left[place] & missing))
        chosen.add(best)
        missing -= left.pop(best)
    return chosen


def _pairs(place):
    """What must be seen of a place: each pair of its values, or its only value."""
    return set(itertools.combinations(enumerate(place), min(2, len(place))))

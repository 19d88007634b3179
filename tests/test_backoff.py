"""Delays grow up to a limit, and jitter only shortens them."""

from itertools import islice

import pytest

from tokencache.backoff import delays


@pytest.mark.parametrize(
    ("first", "longest", "factor", "expected"),
    [
        (0.25, 2.0, 2.0, [0.25, 0.5, 1.0, 2.0, 2.0]),
        (0.05, 1.0, 5.0, [0.05, 0.25, 1.0, 1.0, 1.0]),
        (1.0, 1.0, 2.0, [1.0] * 5),
    ],
)
def test_delays_grow_up_to_the_longest(first, longest, factor, expected):
    assert list(islice(delays(first, longest, factor=factor), 5)) == pytest.approx(expected)


def test_jitter_shortens_by_at_most_its_fraction():
    found = list(islice(delays(1.0, 8.0, jitter=0.5), 200))
    assert all(limit / 2 <= delay <= limit for delay, limit in zip(found, [1.0, 2.0, 4.0] + [8.0] * 197, strict=True))
    assert len(set(found)) > 100

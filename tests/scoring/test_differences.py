"""The noise floor: what an engine's own differences allow, and what they do not."""

import random

import pytest

from tokencache.scoring.differences import BOUNDS, NoiseFloor, difference, histogram


def test_a_difference():
    found = difference([-1.0, -2.0, -3.0, -4.0], [-1.0, -2.5, -3.0, -3.5])
    assert (found.tokens, found.max, found.mean, found.bias, found.first) == (4, 0.5, 0.25, 0.0, 1)
    assert difference([-1.0], [-1.0]).first == -1


def test_without_noise_any_difference_is_above_the_floor():
    assert NoiseFloor([[0.0] * 64] * 3).limit(10) == 0.0


def noise(rng, n, scale=0.002):
    """Differences like those of bfloat16: small, with some tokens that are far off."""
    return [rng.expovariate(1 / scale) * (20 if rng.random() < 0.02 else 1) for _ in range(n)]


def test_noise_is_below_the_limit_and_a_stale_prefix_above():
    rng = random.Random(1)
    false, missed, n = 0, 0, 400
    for _ in range(n):
        floor = NoiseFloor([noise(rng, 64) for _ in range(3)])
        tokens = rng.randrange(20, 300)
        false += sum(noise(rng, tokens)) / tokens > floor.limit(tokens)
        missed += sum(noise(rng, tokens, 0.016)) / tokens <= floor.limit(tokens)
    assert (false, missed) <= (n // 50, n // 50)


def test_short_spans_are_allowed_what_neighbouring_tokens_had():
    floor = NoiseFloor([[0.0] * 30 + [0.4] + [0.0] * 30])
    assert floor.limit(1) == pytest.approx(0.6)
    assert floor.limit(2) == pytest.approx(0.3)
    assert floor.limit(1000) == pytest.approx(3 * 0.4 / 61)


def test_a_histogram_counts_every_token_once():
    values = [0.0, 0.0, 1e-9, 1e-6, 2e-6, 0.5, 1.0, 7.0]
    counts = histogram(values)
    assert len(counts) == len(BOUNDS) + 1
    assert sum(counts) == len(values)
    assert (counts[0], counts[1], counts[2], counts[-2], counts[-1]) == (2, 2, 1, 2, 1)

"""Compares the queueing simulation with closed formulas."""

import itertools
import math

import pytest

from bench.scale import empirical, simulate


def mean(percentiles):
    """The mean of the distribution that percentiles 0 to 100 describe, without the open end."""
    return sum((a + b) / 2 for a, b in itertools.pairwise(percentiles)) / 100


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_one_server_with_exponential_service_is_m_m_1(load):
    """Time in the system of M/M/1 is exponential with rate (service rate - arrival rate)."""
    found = simulate(load, lambda rng: rng.expovariate(1.0), calls=200_000)
    for q in (50, 90, 99):
        assert found[q] == pytest.approx(-math.log(1 - q / 100) / (1 - load), rel=0.08)


def test_constant_service_waits_half_as_long_as_exponential():
    """M/D/1: the mean wait is load / (2 (1 - load)) service times (Pollaczek and Khinchine)."""
    found = simulate(0.8, lambda _: 1.0, calls=200_000)
    assert mean(found) == pytest.approx(1 + 0.8 / (2 * 0.2), rel=0.08)
    assert found[0] == pytest.approx(1.0)


def test_overload_is_an_error():
    with pytest.raises(ValueError, match=r"overloaded: 1\.[45]"):
        simulate(1.5, lambda _: 1.0)


def test_drawn_values_are_distributed_as_the_percentiles():
    found = simulate(1e-9, empirical([float(q) for q in range(101)]), calls=50_000)
    assert [round(found[q]) for q in (10, 50, 90)] == pytest.approx([10, 50, 90], abs=1.5)

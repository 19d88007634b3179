"""The bench's statistics: definitions of a percentile, a figure, a change."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.stats import blocks, compare, figure, percentile, quantiles, trimmed

numbers = st.lists(st.floats(0, 1e9), min_size=1, max_size=200)


def test_percentile_is_a_value_that_was_measured():
    hundred = [float(n) for n in range(1, 101)]
    assert [percentile(hundred, q) for q in (0, 1, 50, 99, 99.1, 100)] == [1, 1, 50, 99, 100, 100]
    assert percentile([7.0], 99) == 7.0


@given(numbers, st.floats(0, 100))
def test_at_least_q_percent_do_not_exceed_the_percentile(values, q):
    ordered = sorted(values)
    found = percentile(ordered, q)
    assert found in values
    assert sum(value <= found for value in values) / len(values) * 100 >= q - 1e-9


@given(numbers)
def test_quantiles_begin_at_the_minimum_and_end_at_the_maximum(values):
    found = quantiles(values)
    assert len(found) == 101
    assert (found[0], found[100]) == (min(values), max(values))
    assert found == sorted(found)


def test_no_values_have_no_quantiles():
    assert quantiles([]) == []
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_trimmed_mean_ignores_the_outer_tenths():
    assert trimmed([1000.0, *[2.0] * 8, -1000.0]) == 2.0
    assert trimmed([3.0]) == 3.0


def test_blocks_are_consecutive_values():
    assert blocks([1, 1, 1, 5, 5, 5, 9, 9, 9], 3) == [[1, 1, 1], [5, 5, 5], [9, 9, 9]]
    assert blocks([4.0, 6.0], 5) == [[4.0], [6.0]]


def test_figure_is_median_and_half_the_range():
    assert figure([10.0, 12.0, 11.0], "us") == {"median": 11.0, "spread": 1.0, "n": 3, "unit": "us", "better": "lower"}
    with pytest.raises(ValueError, match="no median"):
        figure([], "us")


@pytest.mark.parametrize(
    ("now", "then", "better", "verdict"),
    [
        ([100, 100], [100, 100], "lower", "same"),
        ([104, 104], [100, 100], "lower", "same"),  # under five percent
        ([120, 120], [100, 100], "lower", "worse"),
        ([120, 120], [100, 100], "higher", "better"),
        ([80, 80], [100, 100], "lower", "better"),
        ([80, 80], [100, 100], "higher", "worse"),
        ([120, 100, 140], [100, 100], "lower", "same"),  # now varies by 20
        ([120, 120], [100, 80, 120], "lower", "same"),  # then varied by 20
        ([125, 121, 123], [100, 97, 104], "lower", "worse"),
    ],
)
def test_a_change_is_what_exceeds_the_noise_of_both_and_five_percent(now, then, better, verdict):
    assert compare(figure(now, "us", better), figure(then, "us", better)) == verdict


def test_a_figure_without_a_baseline_is_new():
    assert compare(figure([1.0], "us"), None) == "new"

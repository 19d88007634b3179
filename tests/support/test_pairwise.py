"""Pairwise cases: fewer than the product, and each pair of values is among them."""

import itertools

import pytest

from tests.support.pairwise import cases, each


def kept(*axes):
    return [case.values for case in cases(*axes) if not case.marks]


@pytest.mark.parametrize("axes", [("abc", "xy"), ("abcd", "wxyz", "12"), ("abc", "xyz", "123", (True, False)), ("abc",)])
def test_each_pair_of_values_is_in_every_run(axes):
    chosen = kept(*axes)
    for one, other in itertools.combinations(range(len(axes)), 2):
        assert {(case[one], case[other]) for case in chosen} == set(itertools.product(axes[one], axes[other]))
    assert {value for (value, *_) in chosen} == set(axes[0])


@pytest.mark.parametrize("axes", [("abc", "xy"), ("ab", "xy"), ("abcd", "wxyz", "12")])
def test_each_value_is_in_every_run(axes):
    chosen = [case.values for case in each(*axes) if not case.marks]
    assert [{*values} for values in zip(*chosen, strict=True)] == [{*axis} for axis in axes]
    assert len(chosen) == max(map(len, axes))
    assert [case.values for case in each(*axes)] == list(itertools.product(*axes))


def test_the_whole_run_has_the_product_in_its_order():
    assert [case.values for case in cases("ab", "xy", "12")] == list(itertools.product("ab", "xy", "12"))


def test_three_axes_need_hardly_more_cases_than_the_two_longest():
    assert len(kept("abcdefgh", "abcdef", "abcd")) <= 1.25 * 8 * 6
    assert kept("abcd", "wxyz", "12") == kept("abcd", "wxyz", "12")

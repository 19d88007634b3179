"""Budgets as values: which limit counts, and when it is used up."""

import pytest

from tokencache.core.session import Budget


@pytest.mark.parametrize(
    ("budget", "used", "words"),
    [
        (Budget(), (10**9, 10**9, 1e9), ""),
        (Budget(calls=0, tokens=0, seconds=0), (10**9, 10**9, 1e9), ""),
        (Budget(calls=3), (3, 10**9, 1e9), ""),
        (Budget(calls=3), (4, 0, 0), "3 calls"),
        (Budget(tokens=10), (1, 9, 0), ""),
        (Budget(tokens=10), (1, 10, 0), "10 tokens (10 were sampled)"),
        (Budget(seconds=1.5), (1, 0, 1.4), ""),
        (Budget(seconds=1.5), (1, 0, 1.5), "1.5 seconds (1.5 have passed)"),
        (Budget(calls=1, tokens=1, seconds=1), (2, 2, 2), "1 calls"),
    ],
)
def test_spent(budget, used, words):
    calls, tokens, seconds = used
    assert budget.spent(calls=calls, tokens=tokens, seconds=seconds) == words


def test_limit_by_limit():
    server = Budget(calls=5, tokens=100, seconds=0)
    assert Budget(calls=2).over(server) == Budget(calls=2, tokens=100, seconds=0)
    assert Budget(calls=0).over(server) == Budget(calls=0, tokens=100, seconds=0)
    assert (bool(Budget().over(server)), bool(Budget(calls=0, tokens=0).over(server)), bool(Budget())) == (True, False, False)

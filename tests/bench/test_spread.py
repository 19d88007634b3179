"""The CPU of a call is measured for each number of processes."""

import pytest

from bench import spread
from tests.support.material import needs
from tests.support.redis_server import find_binary


@pytest.mark.redis
@needs("redis-server", find_binary())
def test_each_number_of_processes_has_a_figure(monkeypatch):
    monkeypatch.setattr(spread, "_ROUNDS", 1)
    found = spread.spread([1, 2], 1_000)
    assert [*found] == [1, 2]
    assert all(proxies > store > 0 for proxies, store in found.values())

"""The CPU of a call, and calls per second, are measured for each number of processes."""

import pytest

from bench import spread
from tests.support.material import needs
from tests.support.redis_server import find_binary


@pytest.mark.redis
@needs("redis-server", find_binary())
def test_each_number_of_processes_has_a_figure(monkeypatch):
    monkeypatch.setattr(spread, "_ROUNDS", 1)
    found = spread.spread([1, 2], spread.SHAPES["1 KB"])
    assert [*found] == [1, 2]
    assert all(proxies > store > 0 for proxies, store in found.values())


@pytest.mark.redis
@needs("redis-server", find_binary())
def test_processes_with_an_engine_each_serve_at_once():
    found = [*spread.throughput([1, 2], [("1 KB", 2)], 0.5)]
    assert [(shape, number) for shape, number, _ in found] == [("1 KB", 1), ("1 KB", 2)]
    assert [figures["torn"] for _, _, figures in found] == [[], []]

"""The replay of placements: it repeats itself, an engine reuses what it has, and load decides better than a hash."""

import statistics

import pytest

from bench.placement import Load, Replay, Rollout, Turn, row

SMALL = Load(kv=80_000, groups=8, siblings=4)


def alone(turns, monkeypatch, **load):
    monkeypatch.setattr("bench.placement.rollouts", lambda *_: [Rollout("g0s0", 0, 0, 0, turns)])
    return Replay(Load(groups=1, siblings=1, **load), 0, sticky=True).run()[0]


def test_a_turn_prefills_only_what_it_adds(monkeypatch):
    first = alone([Turn(6400, 2, 1.0)], monkeypatch, engines=1)
    both = alone([Turn(6400, 2, 1.0), Turn(640, 2, 1.0)], monkeypatch, engines=1)

    assert first == pytest.approx(6400 * 2e-5 + 2 * 0.006, rel=0.1)
    assert both - first - 1.0 == pytest.approx(700 * 2e-5 + 2 * 0.006, rel=0.3)


def test_a_replay_repeats_itself():
    assert Replay(SMALL, 3, sticky=True).run() == Replay(SMALL, 3, sticky=True).run()


def test_load_places_better_than_a_hash():
    assert statistics.mean(row(SMALL, 2).ratios) < 1
    assert row(SMALL._replace(engines=1), 1).ratios == [1]

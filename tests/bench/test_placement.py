"""The replay of placements: it repeats itself, an engine reuses what it has, load decides better than a hash, and it takes traces."""

import json
import statistics
import sys

import msgspec
import pytest

from bench import placement
from bench.placement import Call, Load, Replay, Rollout, ratios, recorded, replayed, rollouts
from tests.core.forest import Forest
from tests.trajectories.rollouts import of_forest
from tokencache.commands import files
from tokencache.trajectories.formats.registry import FORMATS, TRACES

SMALL = Load(kv=80_000, groups=8, siblings=4)


def alone(calls, **load):
    return Replay(Load(**load), [Rollout("s", 0, calls, lambda _, place: (0, 0, place))], sticky=True).run()[0]


def test_a_turn_prefills_only_what_it_adds():
    first = alone([Call(6400, 2, {})], engines=1)
    both = alone([Call(6400, 2, {}), Call(7042, 2, {0: 1.0})], engines=1)

    assert first == pytest.approx(6400 * 2e-5 + 2 * 0.006, rel=0.1)
    assert both - first - 1.0 == pytest.approx(700 * 2e-5 + 2 * 0.006, rel=0.3)


def test_a_replay_repeats_itself():
    made = rollouts(SMALL, 3)
    assert Replay(SMALL, made, sticky=True).run() == Replay(SMALL, made, sticky=True).run()


def test_load_places_better_than_a_hash():
    assert statistics.mean(ratios([replayed(SMALL, rollouts(SMALL, seed)) for seed in range(2)], "sticky")) < 1
    assert ratios([replayed(SMALL._replace(engines=1), rollouts(SMALL, 0))], "sticky") == [1]


def saved(path, *forests, size=placement.BLOCK):
    sink = files.create(str(path), TRACES["agentic-mooncake"], overwrite=False, block_size=size)
    for n, forest in enumerate(forests):
        sink.write(msgspec.json.encode(FORMATS["native"].write(of_forest(forest, f"s{n}"))))
    sink.finish()
    return path


def agent(begins, own):
    """A session of two turns and a branch. All sessions share 640 tokens; the second turn waits for two seconds."""
    forest = Forest()
    first = forest.add([*range(640), own], [7] * 200, created=begins, seconds=1.0)
    forest.add([8] * 60, [9] * 5, first, created=begins + 3, seconds=1.0)
    forest.add([10] * 60, [11] * 5, first, match="branch", created=begins + 4, seconds=1.0)
    return forest


def test_a_trace_has_the_calls_and_blocks_of_its_rollouts(tmp_path):
    one, other = recorded(saved(tmp_path / "t.jsonl", agent(107.5, 1), agent(100.0, 2)))
    assert (one.start, other.start) == (0.0, 7.5)
    assert one.calls == [Call(641, 200, {}), Call(901, 5, {0: 2.0}), Call(901, 5, {0: 3.0})]
    names = [[rollout.block(call, place) for place in range(14)] for rollout in (one, other) for call in range(3)]
    assert names[0][:13] == names[1][:13] == names[2][:13]  # of the reply, too: the next prompt has it
    assert [*map(len, map(set, zip(*names, strict=True)))] == [1] * 10 + [2] * 3 + [6]


def test_a_trace_is_replayed_with_its_waits(tmp_path, monkeypatch, capsys):
    path = saved(tmp_path / "t.jsonl", agent(100.0, 1), agent(101.0, 2))
    (made,) = {Replay(Load(), recorded(path), sticky=sticky).run() for sticky in (True, False)}
    spent = 205 * placement.STEP
    assert made[0] == pytest.approx(1.0 + 3.0 + spent, rel=0.05)  # the branch of the second one
    monkeypatch.setattr(sys, "argv", ["placement", "--trace", str(path), "--loads", "KV suffices"])
    placement.main()
    assert capsys.readouterr().out.splitlines()[-1].startswith("| KV suffices: 400k |")


def test_a_trace_with_other_blocks_is_refused(tmp_path):
    path = saved(tmp_path / "t.jsonl", agent(100.0, 1), size=32)
    assert json.loads(path.open().readline())["block_size"] == 32
    with pytest.raises(SystemExit, match="--block-size 64"):
        recorded(path)

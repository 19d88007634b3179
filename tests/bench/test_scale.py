"""Computing needs from costs, and writing pages from raw figures."""

import pytest

from bench import scale
from bench.scale import Costs, Load, checked, first_bottleneck, need
from bench.tables import Table, filled

COST = Costs(call_s=0.002, chunk_s=0.00002, redis_s=0.0003, stream_bytes=50_000, token_bytes=10.0)


def test_needs_follow_from_the_costs(monkeypatch):
    monkeypatch.setattr(scale, "BUSY", 0.5)
    one = need(20_000, Load(turns_per_minute=3.0, chunks=100, turns=10, new_tokens=1000), COST)
    assert one["calls a second"] == 1000
    assert one["calls in flight"] == 10_000
    assert one["proxy processes, a core each"] == 8  # 1000 calls of 2 ms and 100 chunks of 20 µs each = 4 cores, used to a half
    assert one["Redis shards, by CPU"] == 1  # 0.3 of a core, used to a half
    assert one["Redis memory, GiB"] == pytest.approx(20_000 * 2 * 10_000 * 10 / 2**30)


def test_ten_times_the_rollouts_need_ten_times_as_much():
    small, large = (need(n, Load(), COST) for n in (160_000, 1_600_000))
    for name in small.keys() - {"Redis shards, by CPU"}:  # a few, and whole numbers
        assert large[name] == pytest.approx(10 * small[name], rel=0.03)


def test_a_longer_history_costs_network_not_redis():
    short, long_ = (need(16_000, Load(history_tokens=n), COST) for n in (10_000, 100_000))
    network, redis = "network of all proxies, Gbit/s", "Redis memory, GiB"
    assert long_[network] > 5 * short[network]
    assert long_[redis] == short[redis]


@pytest.mark.parametrize(
    ("machine", "words"),
    [({"NIC_GBIT": 0.001}, "network"), ({"REDIS_GIB": 0.001}, "Redis memory"), ({"NODE_CORES": 1, "NIC_GBIT": 1e9}, "proxy CPU")],
)
def test_the_first_bottleneck_is_named(monkeypatch, machine, words):
    for name, value in machine.items():
        monkeypatch.setattr(scale, name, value)
    assert first_bottleneck(need(16_000, Load(), COST)).startswith(words)


def test_prediction_is_next_to_the_measurement():
    flat = [1000] * 101
    runs = [{"target": "proxy memory", "rate": rate, "latency_us": flat} for rate in (100.0, 500.0)]
    shown = checked({"cpu_us": 1000.0, "runs": runs})
    low, high = shown.rows
    assert low[1] == "10%"
    assert float(low[2]) == pytest.approx(1.0, abs=0.1)
    assert float(high[4]) > float(low[4])  # the p99 of a busier core


def test_a_table_is_written_between_the_marks_of_the_page():
    part = {"cost": Table("t", ["what", "figure"], [["a", "1"]], "said of it").markdown()}
    text = filled("x\n<!-- cost -->\nold\n<!-- /cost -->\ny", part)
    assert text == "x\n<!-- cost -->\n| what | figure |\n|---|--:|\n| a | 1 |\n\nsaid of it.\n<!-- /cost -->\ny"
    assert filled(text, part) == text
    with pytest.raises(ValueError, match="each once"):
        filled("nothing", {"cost": ""})

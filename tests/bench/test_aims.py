"""Turning a run's raw figures into figures, aims and verdicts."""

import pytest

from bench.figures import Figures, aims, growth_beyond, verdict, verdicts
from bench.loads import limit
from bench.page import aim_table, growth

MACHINE = {"cpu": "c", "cores": 2, "python": "3"}


def seen(cpu, p50=500.0):
    return {
        "n": 5, "p50_us": p50, "p99_us": 2 * p50, "cpu_us": cpu, "cpu_blocks": [cpu - 2, cpu, cpu + 2], "p50_blocks": [p50] * 3,
    }  # fmt: skip


def cost(proxy, case="141 KB"):
    return {"case": case, "targets": {"direct": seen(0.0, 100.0), "relay": seen(200.0), "proxy memory": seen(proxy, 900.0)}}


def test_a_cost_is_kept_as_ratio_to_the_relay_with_its_noise():
    found = Figures({"cost": [cost(300.0)]})
    ratio = found["cost/141 KB/proxy memory/CPU over relay"]
    assert (ratio["median"], ratio["spread"], ratio["unit"]) == (1.5, 0.01, "x")
    assert found["cost/141 KB/proxy memory/added p50"]["median"] == 800.0
    assert found["cost/141 KB/proxy memory/CPU"]["absolute"]
    assert not any(name.startswith("cost/141 KB/direct") for name in found)


def loaded(shape, at_once, **figures):
    """A row of the load: targets with the CPU of a call in µs, and the calls a second, one for each repetition."""
    runs = {
        name.replace("_", " ").replace("plugin", "memory, plugin"): [
            {"calls_per_s": rate, "calls": 50, "torn": [], "cpu_us": cpu} for rate in (rates if isinstance(rates, list) else [rates])
        ]
        for name, (cpu, rates) in figures.items()
    }
    return {"shape": shape, "connections": at_once, "targets": runs}


def test_cpu_of_a_call_is_judged_as_a_multiple_of_the_relays_beside_the_floors():
    some = {"relay": (200.0, 1.0), "floor_proven": (1000.0, 1.0), "floor_named": (950.0, 1.0)}
    row = loaded("141 KB", 16, **some, proxy_memory=(1300.0, 1.0), proxy_plugin=(880.0, 1.0), proxy_redis=(9000.0, 1.0))
    judged = {aim["aim"]: (aim["figure"], verdict(aim), aim["floors"]) for aim in aims({"load": [row]})}
    assert judged == {
        "141 KB, 16 at once, proxy memory: CPU over the bare relay's": (6.5, "not met", {"floor proven": 5.0}),
        "141 KB, 16 at once, proxy memory, plugin: CPU over the bare relay's": (4.4, "met", {"floor named": 4.75}),
    }
    assert aims({"load": [row | {"connections": 64}]}) == []


@pytest.mark.parametrize(("cpu", "met"), [(240.0, True), (260.0, False)])
def test_cpu_of_a_chunk_is_judged_on_a_busy_core(cpu, met):
    (aim,) = aims({"load": [loaded("141 KB, 500 chunks of 10 ms", 64, relay=(200.0, 1.0), proxy_memory=(cpu, 1.0))]})
    assert (aim["figure"], aim["met"]) == (cpu / 200.0, met)


def test_throughput_is_compared_with_litellm_on_one_core_only():
    row = loaded("1 KB", 64, litellm=(1.0, 10.0), proxy_memory=(1.0, [150.0, 110.0, 160.0]), proxy_memory_x2=(1.0, 500.0))
    assert [(aim["figure"], aim["met"]) for aim in aims({"load": [row]})] == [(15.0, True)]


@pytest.mark.parametrize("spoilt", [{"calls": 3}, {"torn": ["not found"]}])
def test_too_few_calls_or_torn_sessions_judge_nothing(spoilt):
    good = {"calls_per_s": 10.0, "calls": 50, "torn": [], "cpu_us": 1.0}
    for one in ({"litellm": [good | spoilt], "proxy memory": [good]}, {"litellm": [good], "proxy memory": [good | spoilt]}):
        assert aims({"load": [{"shape": "1 KB", "connections": 64, "targets": one}]}) == []
    assert aims({"rollouts": [{"target": "proxy memory"} | good | spoilt]}) == []


def test_the_median_of_rollouts_counts_not_the_maximum():
    good = {"calls": 50, "torn": [], "cpu_us": 1.0}
    runs = [good | {"target": "proxy memory", "calls_per_s": rate} for rate in (1600.0, 900.0, 950.0)]
    (aim,) = aims({"rollouts": [*runs, {"target": "relay", "calls_per_s": 9000.0}]})
    assert (aim["figure"], aim["met"]) == (950.0, False)


def test_memory_of_fewer_streams_is_extrapolated_to_those_wanted():
    run = {
        "target": "proxy memory", "streams": 8192, "wanted": 16384, "errors": 0, "unfinished": 1, "slowest_over_median": 1.5,
        "torn": [], "idle_bytes": 2**30, "bytes_per_stream": 2**17,
    }  # fmt: skip
    errors, slowest, memory = aims({"streams": [run]})
    assert not errors["met"]
    assert slowest["met"]
    assert (memory["figure"], memory["met"]) == (3.0, True)
    assert "what 16,384 would take" in memory["aim"]


def test_growth_excludes_what_reading_the_body_costs():
    marks = [
        {"targets": {"p": {"cpu_us": cpu}, "relay": {"cpu_us": relay}}, "parse_us": {"objects": parse, "split": 0.0}}
        for cpu, relay, parse in ((1000.0, 400.0, 100.0), (1900.0, 600.0, 400.0))
    ]
    assert [growth_beyond(marks, "p", what) for what in (None, "objects", "relay")] == [1.9, 1.667, 2.167]


def test_absolute_figures_are_compared_on_the_same_machine_only():
    was = {"machine": MACHINE, "figures": Figures({"cost": [cost(300.0)]})}
    now = Figures({"cost": [cost(400.0)]})
    here = verdicts(now, MACHINE, was)
    assert here["cost/141 KB/proxy memory/CPU"] == here["cost/141 KB/proxy memory/CPU over relay"] == "worse"
    assert here["cost/141 KB/relay/CPU"] == "same"
    elsewhere = verdicts(now, MACHINE | {"cpu": "other"}, was)
    assert elsewhere["cost/141 KB/proxy memory/CPU over relay"] == "worse"
    assert "cost/141 KB/proxy memory/CPU" not in elsewhere


@pytest.mark.parametrize(
    ("shares", "waited", "what"),
    [
        ({"target": 0.95, "engine": 0.9, "generator": 0.1}, 0.0, "target"),
        ({"target": 0.5, "engine": 0.3, "generator": 0.6}, 0.4, "machine"),
        ({"target": 0.5, "engine": 0.9, "generator": 0.6}, 0.1, "engine"),
        ({"target": 0.5, "engine": 0.3, "generator": 0.99}, 0.1, "generator"),
    ],
)
def test_what_limited_a_target_is_named(shares, waited, what):
    assert limit(shares, waited) == what


def test_the_page_shows_the_floors_beside_an_aim():
    row = loaded("1 KB", 64, relay=(200.0, 1.0), floor=(500.0, 1.0), floor_proven=(600.0, 1.0), proxy_memory=(700.0, 1.0))
    assert [line[-4:] for line in aim_table(aims({"load": [row]})).rows] == [["2.5 x", "3 x", "", ""]]


@pytest.mark.parametrize(
    ("figure", "floors", "words"),
    [
        (1.5, (1.1, 1.2), "met"),
        (1.5, (1.7, 1.8), "met"),
        (1.9, (1.1, 1.7), "out of reach"),
        (1.9, (1.7, 1.8), "out of reach"),
        (1.9, (1.1, 1.2), "not met"),
    ],
)
def test_an_aim_that_a_floor_misses_is_out_of_reach(figure, floors, words):
    met = figure <= 1.6
    at_most = {"figure": figure, "limit": 1.6, "met": met, "floors": dict(enumerate(floors))}
    assert verdict(at_most) == words
    at_least = {"figure": 1 / figure, "limit": 1 / 1.6, "least": True, "met": met, "floors": {i: 1 / each for i, each in enumerate(floors)}}
    assert verdict(at_least) == words


ENTERED = {"memory, 1 KB": {"all": 600}, "Redis, 1 KB": {"all": 700}, "plugin, 141 KB": {"all": 620}}


@pytest.mark.parametrize(
    ("relay", "left", "words"),
    [
        (180.0, 521, "not met"),  # the aim is 684 of 760 µs, and the interpreter's 577.6 µs are 600 functions: 79 less
        (160.0, 442, "out of reach"),
    ],
)
def test_an_aim_that_leaves_a_call_too_few_functions_is_out_of_reach(relay, left, words):
    row = loaded("1 KB", 64, relay=(relay, 1.0), proxy_memory=(760.0, 1.0))
    aim = aims({"load": [row], "entries": ENTERED})[0]
    assert (aim["entries"], aim["least_entries"], verdict(aim)) == (left, 487, words)
    assert aim_table([aim]).rows[0][-1] == f"{left}, needs 487"


def test_the_functions_of_a_sessions_first_call_have_their_share_of_the_cpu():
    row = loaded("141 KB", 16, relay=(1.0, 1.0), proxy_memory=(11.0, 1.0))
    first = {"first call, 200 messages": {"all": 2200}}
    assert aims({"load": [row], "entries": ENTERED | first})[0]["entries"] == 139  # half of 700 functions over 0.76, of a later call's 600


def test_an_aim_in_calls_a_second_leaves_as_many_functions_as_its_cpu_pays_for():
    good = [{"target": "proxy memory", "calls_per_s": 1125.0, "calls": 50, "torn": []}]
    (aim,) = aims({"rollouts": good, "entries": ENTERED})
    assert aim["entries"] == 403  # a quarter of 600 over 0.76 is gone


def test_an_aim_without_a_floor_is_not_out_of_reach():
    assert verdict({"limit": 1.0, "met": False, "floors": {}}) == "not met"


def test_growth_beyond_the_floor_is_the_remaining_cost():
    marks = [
        {"turn": turn, "body_bytes": 1, "parse_us": {"objects": 0.0}, "targets": {"direct": seen(0.0), **costs}}
        for turn, costs in (
            (10, {"relay": seen(400.0), "floor": seen(600.0), "proxy memory": seen(1000.0)}),
            (200, {"relay": seen(500.0), "floor": seen(1400.0), "proxy memory": seen(2000.0)}),
        )
    ]
    (aim,) = aims({"growth": {"marks": marks, "redis_bytes_per_token": None}})
    assert (aim["figure"], aim["floors"]) == (2.0, {"floor": 2.333})
    rows = {row[0]: row[1:] for row in growth({"marks": marks}).rows}
    assert rows["last over first, beyond the floor"][-1] == "1.50"
    assert rows["last over first, beyond the bare relay"][-3:] == ["", "4.50", "2.50"]

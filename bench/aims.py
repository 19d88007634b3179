"""The project's cost targets, and whether a run meets them.

Next to each figure are the floors' figures for the same aim: `bench/floor.py` only carries the bytes, `bench/proven.py` also verifies and
keeps the tokens, and so does `bench/named.py` with the plugin. An aim that a floor misses is out of reach: no Python program that does
this work can be faster.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from bench.figures import counts, growth_beyond
from bench.loads import FEW
from bench.targets import FLOOR, FLOOR_NAMED, FLOOR_PROVEN, PLUGIN

Aim = dict[str, Any]


def aims(found: dict[str, Any]) -> list[Aim]:
    """Each aim that this run can judge: its text, the figure, the limit, `met`; `floors`: the floors' figures, if they ran."""
    parts: dict[str, Callable[[Any], Iterator[Aim]]] = {
        "cost": _cost,
        "load": _load,
        "growth": _growth,
        "rollouts": _rollouts,
        "streams": _streams,
        "stored": lambda one: iter([_most("memory: stored bytes a token", one["bytes_per_token"], 10.0, "B")]),
        "start_s": lambda walls: iter([_most("start to ready, no local tokenizer", statistics.median(walls), 1.0, "s")]),
    }
    return [aim for part, read in parts.items() if part in found for aim in read(found[part])]


FLOORS = (FLOOR, FLOOR_PROVEN, FLOOR_NAMED)


def verdict(aim: Aim) -> str:
    """`met`; `out of reach` if a floor misses it too; or `not met`."""
    if aim["met"]:
        return "met"
    missed = any(value < aim["limit"] if aim.get("least") else value > aim["limit"] for value in aim["floors"].values())
    return "out of reach" if missed else "not met"


STOCK_FLOORS = (FLOOR, FLOOR_PROVEN)
"""The floors that send all ids, as a stock engine needs them."""


def _most(words: str, value: float, limit: float, unit: str, all_: dict[str, float] | None = None, *, plugin: bool = False) -> Aim:
    """An aim that is met by figures up to the limit; `all_`: the same figure of all targets, including the floors."""
    floors = {name: round(all_[name], 3) for name in ((FLOOR_NAMED,) if plugin else STOCK_FLOORS) if name in all_} if all_ else {}
    return {"aim": words, "figure": round(value, 3), "limit": limit, "unit": unit, "met": value <= limit, "floors": floors}


def _least(words: str, value: float, limit: float, unit: str, all_: dict[str, float] | None = None) -> Aim:
    return {**_most(words, value, limit, unit, all_), "least": True, "met": value >= limit}


def _of_one_process(values: dict[str, Any]) -> list[str]:
    return [name for name in values if name.startswith("proxy") and " x" not in name]


def _over(values: dict[str, float], base: str) -> dict[str, float]:
    """Each value as a multiple of one of them; empty if that one is missing."""
    return {name: value / values[base] for name, value in values.items()} if base in values else {}


def _cost(rows: list[dict[str, Any]]) -> Iterator[Aim]:
    for row in rows:
        seen, direct = row["targets"], row["targets"]["direct"]
        ratios = _over({name: one["cpu_us"] for name, one in seen.items()}, "relay")
        added = {q: {name: (one[f"p{q}_us"] - direct["p50_us"]) / 1000 for name, one in seen.items()} for q in (50, 99)}
        for name in _of_one_process(ratios):
            if row["case"] == "141 KB":
                yield _most(f"141 KB, {name}: CPU over the bare relay's", ratios[name], 1.6, "x", ratios)
                for q, limit in ADDED.items():
                    yield _most(f"141 KB, {name}: added p{q}", added[q][name], limit, "ms", added[q])
            elif row["case"] == "141 KB, 500 chunks":
                yield _most(f"141 KB, 500 chunks, {name}: CPU over the bare relay's", ratios[name], 1.25, "x", ratios)


ADDED = {50: 1.0, 99: 5.0}
"""Percentile and limit, ms."""

BUSY = {"proxy memory": 1_200.0, PLUGIN: 900.0}
"""CPU of a call of 141 KB on a busy core, µs."""

CHUNKS = "141 KB, 500 chunks of 10 ms"


def _load(rows: list[dict[str, Any]]) -> Iterator[Aim]:
    for row in rows:
        words = f"{row['shape']}, {row['connections']} at once"
        if row["shape"] == "141 KB" and 1 < row["connections"] <= FEW:
            yield from _busy(words, _medians(row["targets"], lambda run: run["cpu_us"]))
        if row["shape"] == CHUNKS and 1 < row["connections"] <= FEW:
            ratios = _over(_medians(row["targets"], lambda run: run["cpu_us"]), "relay")
            for name in _of_one_process(ratios):
                yield _most(f"{words}, {name}: CPU over the bare relay's", ratios[name], 1.25, "x", ratios)
        if row["shape"] == "141 KB" and row["connections"] == 1:
            yield from _back_to_back(row["targets"])
        if row["shape"] == "141 KB" and row["connections"] > 1 and "litellm" in row["targets"]:
            ratios = _over(_medians(row["targets"], lambda run: run["calls_per_s"]), "litellm")
            for name in _of_one_process(ratios):
                yield _least(f"{words}, one core, {name}: calls per s over LiteLLM's", ratios[name], 40.0, "x", ratios)


def _busy(words: str, cpus: dict[str, float]) -> Iterator[Aim]:
    for name, limit in BUSY.items():
        if name in cpus:
            yield _most(f"{words}, {name}: CPU a call", cpus[name], limit, "µs", cpus, plugin=name == PLUGIN)
    if "proxy redis" in cpus and "proxy memory" in cpus:
        yield _most(f"{words}, proxy redis: CPU over proxy memory's", cpus["proxy redis"] / cpus["proxy memory"], 1.25, "x")


def _medians(targets: dict[str, list[dict[str, Any]]], what: Callable[[dict[str, Any]], float]) -> dict[str, float]:
    """The median over the runs that count; targets without such runs are omitted."""
    good = {name: [what(run) for run in runs if counts(run)] for name, runs in targets.items()}
    return {name: statistics.median(values) for name, values in good.items() if values}


def _back_to_back(targets: dict[str, list[dict[str, Any]]]) -> Iterator[Aim]:
    """Added latency of consecutive calls: caches are warm, which they are not when targets alternate."""
    direct = statistics.median(run["latency_us"][50] for run in targets["direct"])
    walls = {q: _medians(targets, lambda run: run["latency_us"][q]) for q in ADDED}  # noqa: B023 - called at once
    added = {q: {name: (value - direct) / 1000 for name, value in each.items()} for q, each in walls.items()}
    for name in _of_one_process(added[50]):
        for q, limit in ADDED.items():
            yield _most(f"141 KB, one after the other, {name}: added p{q}", added[q][name], limit, "ms", added[q])


def _growth(grown: dict[str, Any]) -> Iterator[Aim]:
    marks = grown["marks"]
    words = f"turn {marks[-1]['turn']} over turn {marks[0]['turn']}"
    beyond = {name: growth_beyond(marks, name, "objects") for name in marks[0]["targets"] if name.startswith("proxy") or name in FLOORS}
    for name in _of_one_process(beyond):
        yield _most(f"{words}, {name}: CPU beyond reading the body", beyond[name], 1.2, "x", beyond)
    if grown["redis_bytes_per_token"]:
        yield _most("redis: stored bytes a token", grown["redis_bytes_per_token"], 10.0, "B")


def _rollouts(runs: list[dict[str, Any]]) -> Iterator[Aim]:
    rates: dict[str, list[float]] = {}
    for run in runs:
        if run["target"].startswith("proxy") and counts(run):
            rates.setdefault(run["target"], []).append(run["calls_per_s"])
    if rates:
        name, best = max(((name, statistics.median(each)) for name, each in rates.items()), key=lambda pair: pair[1])
        yield _least(f"32 sessions at once, {name}: turns per s", best, 1000.0, "1/s")


def _streams(runs: list[dict[str, Any]]) -> Iterator[Aim]:
    for run in (run for run in runs if run["target"] == "proxy memory"):
        words = f"{run['streams']:,} streams at once in one process"
        short = run["streams"] < run["wanted"]
        yield _most(f"{words}: errors", run["errors"] + run["unfinished"] + len(run["torn"]), 0, "")
        yield _most(f"{words}: slowest over median", run["slowest_over_median"] or 99.0, 3.0, "x")
        memory = (run["idle_bytes"] + run["bytes_per_stream"] * run["wanted"]) / 2**30
        yield _most(f"{words}: memory" + (f", what {run['wanted']:,} would take" if short else ""), memory, 3.0, "GiB")

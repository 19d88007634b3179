"""The project's cost targets, and whether a run meets them.

Next to each figure are the floors' figures for the same aim: `bench/floor.py` only carries the bytes, `bench/proven.py` also verifies and
keeps the tokens, and so does `bench/named.py` with the plugin. An aim that a floor misses is out of reach: no Python program that does
this work can be faster.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from bench.figures import counts, growth_beyond
from bench.targets import FLOOR, FLOOR_NAMED, FLOOR_PROVEN, PLUGIN, PROXY, PROXY_REDIS

Aim = dict[str, Any]


def aims(found: dict[str, Any]) -> list[Aim]:
    """Each aim that this run can judge: its text, the figure, the limit, `met`; `floors`: the floors' figures, if they ran."""
    parts: dict[str, Callable[[Any], Iterator[Aim]]] = {
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


CHUNKS = "141 KB, 500 chunks of 10 ms"
OVER_RELAY = {
    ("1 KB", 64): {PROXY: 3.8, PROXY_REDIS: 4.6},
    ("141 KB", 16): {PROXY: 5.5, PLUGIN: 4.5},
    (CHUNKS, 64): {PROXY: 1.25, PROXY_REDIS: 1.25},
}
"""The most that CPU a call may be over the bare relay's: shape and rollouts at once → target → ratio."""
OVER_LITELLM = {("1 KB", 64): 14.0, ("141 KB", 16): 9.0}
"""The least that calls a second may be over LiteLLM's, each on one core."""


def _load(rows: list[dict[str, Any]]) -> Iterator[Aim]:
    for row in rows:
        where, targets = (row["shape"], row["connections"]), row["targets"]
        words = f"{row['shape']}, {row['connections']} at once"
        cpu = _over(_medians(targets, lambda run: run["cpu_us"]), "relay")
        for name, limit in OVER_RELAY.get(where, {}).items():
            if name in cpu:
                yield _most(f"{words}, {name}: CPU over the bare relay's", cpu[name], limit, "x", cpu, plugin=name == PLUGIN)
        rates = _over(_medians(targets, lambda run: run["calls_per_s"]), "litellm")
        if where in OVER_LITELLM and PROXY in rates:
            yield _least(f"{words}, {PROXY}: calls per s over LiteLLM's", rates[PROXY], OVER_LITELLM[where], "x", rates)


def _medians(targets: dict[str, list[dict[str, Any]]], what: Callable[[dict[str, Any]], float]) -> dict[str, float]:
    """The median over the runs that count; targets without such runs are omitted."""
    good = {name: [what(run) for run in runs if counts(run)] for name, runs in targets.items()}
    return {name: statistics.median(values) for name, values in good.items() if values}


def _growth(grown: dict[str, Any]) -> Iterator[Aim]:
    marks = grown["marks"]
    words = f"turn {marks[-1]['turn']} over turn {marks[0]['turn']}"
    beyond = {name: growth_beyond(marks, name, "objects") for name in marks[0]["targets"] if name.startswith("proxy") or name in FLOORS}
    for name in _of_one_process(beyond):
        yield _most(f"{words}, {name}: CPU beyond reading the body", beyond[name], 1.1, "x", beyond)
    if grown["redis_bytes_per_token"]:
        yield _most("redis: stored bytes a token", grown["redis_bytes_per_token"], 10.0, "B")


def _rollouts(runs: list[dict[str, Any]]) -> Iterator[Aim]:
    rates = [run["calls_per_s"] for run in runs if run["target"] == PROXY and counts(run)]
    if rates:
        yield _least(f"32 sessions at once, {PROXY}: turns per s", statistics.median(rates), 1500.0, "1/s")


def _streams(runs: list[dict[str, Any]]) -> Iterator[Aim]:
    for run in (run for run in runs if run["target"] == PROXY):
        words = f"{run['streams']:,} streams at once in one process"
        short = run["streams"] < run["wanted"]
        yield _most(f"{words}: errors", run["errors"] + run["unfinished"] + len(run["torn"]), 0, "")
        yield _most(f"{words}: slowest over median", run["slowest_over_median"] or 99.0, 3.0, "x")
        memory = (run["idle_bytes"] + run["bytes_per_stream"] * run["wanted"]) / 2**30
        yield _most(f"{words}: memory" + (f", what {run['wanted']:,} would take" if short else ""), memory, 3.0, "GiB")

"""Turns the results of a run into figures that can be compared with another run's.

A figure's name is a path: part, shape, target, measure. Ratios to the bare relay of the same run are compared with the baseline wherever
it was made; absolute ones (`absolute`) only on the same kind of machine.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from bench.machine import same
from bench.stats import Better, compare, figure

Figures = dict[str, dict[str, Any]]
BEYOND = {"in all": None, "beyond reading the body": "objects", "beyond the bare relay": "relay", "beyond the floor": "floor"}
"""What is subtracted from a call's CPU before late and early calls are compared: nothing, a way of reading the body, a target's CPU."""


class Series(NamedTuple):
    """A figure's repetitions."""

    name: str
    values: Sequence[float]
    unit: str
    better: Better = "lower"
    absolute: bool = False


def figures(found: dict[str, Any]) -> Figures:
    """All figures of a run, by name."""
    parts: dict[str, Callable[[Any], Iterator[Series]]] = {
        "cost": _cost,
        "growth": _growth,
        "load": _load,
        "rollouts": _rollouts,
        "streams": lambda runs: (Series(f"streams/{run['target']}/bytes per stream", [run["bytes_per_stream"]], "B") for run in runs),
        "exports": lambda rows: (Series(f"exports/{row['target']}/p50 over busy neighbour", [row["p50_ratio"]], "x") for row in rows),
        "stored": lambda one: iter([Series("stored/memory/bytes per token", [one["bytes_per_token"]], "B")]),
        "start_s": lambda walls: iter([Series("start/seconds to ready", walls, "s", absolute=True)]),
    }
    seen = [one for part, read in parts.items() if part in found for one in read(found[part])]
    return {one.name: figure(one.values, one.unit, one.better) | ({"absolute": True} if one.absolute else {}) for one in seen if one.values}


def _cost(rows: list[dict[str, Any]]) -> Iterator[Series]:
    for row in rows:
        relay, direct = row["targets"].get("relay"), row["targets"]["direct"]
        for name, seen in row["targets"].items():
            where = f"cost/{row['case']}/{name}"
            if name == "direct":
                continue
            if relay:
                base = statistics.median(relay["cpu_blocks"])
                yield Series(f"{where}/CPU over relay", [value / base for value in seen["cpu_blocks"]], "x")
            yield Series(f"{where}/added p50", [value - direct["p50_us"] for value in seen["p50_blocks"]], "us", absolute=True)
            yield Series(f"{where}/CPU", seen["cpu_blocks"], "us", absolute=True)


def _growth(grown: dict[str, Any]) -> Iterator[Series]:
    for name in grown["marks"][0]["targets"]:
        if name.startswith("proxy"):
            yield Series(f"growth/{name}/last over first turn", [growth_beyond(grown["marks"], name, "objects")], "x")
    if grown["redis_bytes_per_token"]:
        yield Series("stored/redis/bytes per token", [grown["redis_bytes_per_token"]], "B")


LEAST_CALLS = 20
"""A run with too few answered calls, or with sessions that were not continued, yields no figure."""


def counts(run: dict[str, Any]) -> bool:
    return int(run["calls"]) >= LEAST_CALLS and not run["torn"]


def _load(rows: list[dict[str, Any]]) -> Iterator[Series]:
    for row in rows:
        where = f"load/{row['shape']} x{row['connections']}"
        relay = row["targets"].get("relay", ())
        for name, runs in row["targets"].items():
            yield Series(f"{where}/{name}/calls per s", [run["calls_per_s"] for run in runs if counts(run)], "1/s", "higher", absolute=True)
            if name != "direct":
                ratios = [mine["cpu_us"] / its["cpu_us"] for mine, its in zip(runs, relay, strict=False) if counts(mine) and counts(its)]
                yield Series(f"{where}/{name}/CPU over relay", ratios, "x")


def _rollouts(runs: list[dict[str, Any]]) -> Iterator[Series]:
    rates = defaultdict(list)
    for run in filter(counts, runs):
        rates[run["target"]].append(run["calls_per_s"])
    for name, values in rates.items():
        yield Series(f"rollouts/{name}/turns per s", values, "1/s", "higher", absolute=True)


def growth_beyond(marks: Sequence[dict[str, Any]], name: str, what: str | None) -> float:
    """CPU of the late call over that of the early one, each less what reading the body costs, or what another target takes (`BEYOND`)."""

    def beyond(mark: dict[str, Any]) -> float:
        others = {other: seen["cpu_us"] for other, seen in mark["targets"].items()}
        rest = {None: 0.0, **others, **mark["parse_us"]}
        return float(mark["targets"][name]["cpu_us"] - rest[what])

    return round(beyond(marks[-1]) / beyond(marks[0]), 3)


def verdicts(now: Figures, machine: dict[str, Any], baseline: dict[str, Any]) -> dict[str, str]:
    """Compares each figure with the baseline's: `worse`, `better`, `same`, `new`; absolute ones only on the same kind of machine."""
    comparable = same(machine, baseline["machine"])
    then = baseline["figures"]
    return {name: compare(one, then.get(name)) for name, one in now.items() if comparable or not one.get("absolute")}

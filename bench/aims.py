"""What the project wants to be true of its cost, and whether a run showed it."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from bench.figures import counts, growth_beyond

Aim = dict[str, Any]


def aims(found: dict[str, Any]) -> list[Aim]:
    """Each aim that this run can judge: its words, the figure, the limit, `met`."""
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


def _most(words: str, value: float, limit: float, unit: str) -> Aim:
    return {"aim": words, "figure": round(value, 3), "limit": limit, "unit": unit, "met": value <= limit}


def _least(words: str, value: float, limit: float, unit: str) -> Aim:
    return {"aim": words, "figure": round(value, 3), "limit": limit, "unit": unit, "least": True, "met": value >= limit}


def _cost(rows: list[dict[str, Any]]) -> Iterator[Aim]:
    for row in rows:
        seen, direct = row["targets"], row["targets"]["direct"]
        for name in [n for n in seen if n.startswith("proxy")]:
            ratio = seen[name]["cpu_us"] / seen["relay"]["cpu_us"]
            if row["case"] == "141 KB":
                yield _most(f"141 KB, {name}: CPU over the bare relay's", ratio, 1.6, "x")
                yield _most(f"141 KB, {name}: added p50", (seen[name]["p50_us"] - direct["p50_us"]) / 1000, 1.0, "ms")
                yield _most(f"141 KB, {name}: added p99", (seen[name]["p99_us"] - direct["p50_us"]) / 1000, 5.0, "ms")
            elif row["case"] == "141 KB, 500 chunks":
                yield _most(f"141 KB, 500 chunks, {name}: CPU over the bare relay's", ratio, 1.25, "x")


SATURATED = {"141 KB": 1.6, "141 KB, 500 chunks of 10 ms": 1.25}


def _load(rows: list[dict[str, Any]]) -> Iterator[Aim]:
    for row in rows:
        limit = SATURATED.get(row["shape"])
        if limit and 1 < row["connections"] <= 64 and "relay" in row["targets"]:
            cpus = {name: [run["cpu_us"] for run in runs if counts(run)] for name, runs in row["targets"].items()}
            for name in [n for n, each in cpus.items() if n.startswith("proxy") and " x" not in n and each and cpus["relay"]]:
                words = f"{row['shape']}, {row['connections']} at once, {name}: CPU over the bare relay's"
                yield _most(words, statistics.median(cpus[name]) / statistics.median(cpus["relay"]), limit, "x")
        if row["shape"] == "141 KB" and row["connections"] == 1:
            yield from _back_to_back(row["targets"])
        if row["shape"] == "141 KB" and row["connections"] > 1 and "litellm" in row["targets"]:
            good = {name: [run["calls_per_s"] for run in runs if counts(run)] for name, runs in row["targets"].items()}
            rates = {name: statistics.median(each) for name, each in good.items() if each}
            for name in [n for n in rates if n.startswith("proxy") and " x" not in n and "litellm" in rates]:
                words = f"141 KB, {row['connections']} at once, one core, {name}: calls per s over LiteLLM's"
                yield _least(words, rates[name] / rates["litellm"], 25.0, "x")


def _back_to_back(targets: dict[str, list[dict[str, Any]]]) -> Iterator[Aim]:
    """Added latency where one call follows the other: caches are warm, as they are not where targets take turns."""
    direct = statistics.median(run["latency_us"][50] for run in targets["direct"])
    for name, runs in targets.items():
        good = [run["latency_us"] for run in runs if counts(run)]
        if name.startswith("proxy") and " x" not in name and good:
            for q, limit in ((50, 1.0), (99, 5.0)):
                value = (statistics.median(walls[q] for walls in good) - direct) / 1000
                yield _most(f"141 KB, one after the other, {name}: added p{q}", value, limit, "ms")


def _growth(grown: dict[str, Any]) -> Iterator[Aim]:
    marks = grown["marks"]
    for name in [n for n in marks[0]["targets"] if n.startswith("proxy")]:
        words = f"turn {marks[-1]['turn']} over turn {marks[0]['turn']}, {name}: CPU beyond reading the body"
        yield _most(words, growth_beyond(marks, name, "objects"), 1.3, "x")
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

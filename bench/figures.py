"""Turns the results of a run into figures that can be compared with another run's, and judges the project's aims.

A figure's name is a path: part, shape, target, measure. `absolute`: it is compared only with one of the same kind of machine.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from bench.run import same_machine
from bench.stats import Better, compare, figure
from bench.talk import TURNS
from bench.targets import FLOOR, FLOOR_NAMED, FLOOR_PROVEN, PLUGIN, PROXY, PROXY_REDIS

Aim = dict[str, Any]
BEYOND = {"in all": None, "beyond reading the body": "objects", "beyond the bare relay": "relay", "beyond the floor": "floor"}
"""What is subtracted from a call's CPU before late and early calls are compared: nothing, a way of reading the body, a target's CPU."""
FLOORS = (FLOOR, FLOOR_PROVEN, FLOOR_NAMED)
LEAST_CALLS = 20
"""A run with too few answered calls, or with sessions that were not continued, yields no figure."""


def counts(run: dict[str, Any]) -> bool:
    return int(run["calls"]) >= LEAST_CALLS and not run["torn"]


def middle(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The repetition with the median of calls per second."""
    return sorted(runs, key=lambda run: float(run["calls_per_s"]))[len(runs) // 2]


class Figures(dict[str, dict[str, Any]]):
    """All figures of a run, by name."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__()
        for row in found.get("cost", ()):
            self._add_cost(row)
        for row in found.get("load", ()):
            self._add_load(row)
        if grown := found.get("growth"):
            for name in (name for name in grown["marks"][0]["targets"] if name.startswith("proxy")):
                self._add(f"growth/{name}/last over first turn", [growth_beyond(grown["marks"], name, "objects")], "x")
            self._add("stored/redis/bytes per token", [one for one in [grown["redis_bytes_per_token"]] if one], "B")
        rates = defaultdict(list)
        for run in filter(counts, found.get("rollouts", ())):
            rates[run["target"]].append(run["calls_per_s"])
        for name, values in rates.items():
            self._add(f"rollouts/{name}/turns per s", values, "1/s", "higher", absolute=True)
        for run in found.get("streams", ()):
            self._add(f"streams/{run['target']}/bytes per stream", [run["bytes_per_stream"]], "B")
        for row in found.get("exports", ()):
            self._add(f"exports/{row['target']}/p50 over busy neighbour", [row["p50_ratio"]], "x")
        if "stored" in found:
            self._add("stored/memory/bytes per token", [found["stored"]["bytes_per_token"]], "B")
        self._add("start/seconds to ready", found.get("start_s", ()), "s", absolute=True)

    def _add(self, name: str, values: Sequence[float], unit: str, better: Better = "lower", **absolute: bool) -> None:
        """Adds a figure with these repetitions, if there are any."""
        if values:
            self[name] = figure(values, unit, better) | absolute

    def _add_cost(self, row: dict[str, Any]) -> None:
        relay, direct = row["targets"].get("relay"), row["targets"]["direct"]
        for name, seen in row["targets"].items():
            where = f"cost/{row['case']}/{name}"
            if name == "direct":
                continue
            if relay:
                base = statistics.median(relay["cpu_blocks"])
                self._add(f"{where}/CPU over relay", [value / base for value in seen["cpu_blocks"]], "x")
            self._add(f"{where}/added p50", [value - direct["p50_us"] for value in seen["p50_blocks"]], "us", absolute=True)
            self._add(f"{where}/CPU", seen["cpu_blocks"], "us", absolute=True)

    def _add_load(self, row: dict[str, Any]) -> None:
        relay = row["targets"].get("relay", ())
        for name, runs in row["targets"].items():
            where = f"load/{row['shape']} x{row['connections']}/{name}"
            self._add(f"{where}/calls per s", [run["calls_per_s"] for run in runs if counts(run)], "1/s", "higher", absolute=True)
            if name != "direct":
                ratios = [mine["cpu_us"] / its["cpu_us"] for mine, its in zip(runs, relay, strict=False) if counts(mine) and counts(its)]
                self._add(f"{where}/CPU over relay", ratios, "x")


def growth_beyond(marks: Sequence[dict[str, Any]], name: str, what: str | None) -> float:
    """CPU of the late call over that of the early one, each less what reading the body costs, or what another target takes (`BEYOND`)."""

    def beyond(mark: dict[str, Any]) -> float:
        others = {other: seen["cpu_us"] for other, seen in mark["targets"].items()}
        rest = {None: 0.0, **others, **mark["parse_us"]}
        return float(mark["targets"][name]["cpu_us"] - rest[what])

    return round(beyond(marks[-1]) / beyond(marks[0]), 3)


def verdicts(now: dict[str, dict[str, Any]], machine: dict[str, Any], baseline: dict[str, Any]) -> dict[str, str]:
    """Compares each figure with the baseline's: `worse`, `better`, `same`, `new`; absolute ones only on the same kind of machine."""
    comparable = same_machine(machine, baseline["machine"])
    then = baseline["figures"]
    return {name: compare(one, then.get(name)) for name, one in now.items() if comparable or not one.get("absolute")}


# --- Aims.

OVER_RELAY = {
    ("1 KB", 64): {PROXY: 3.8, PROXY_REDIS: 4.6},
    ("141 KB", 16): {PROXY: 5.5, PLUGIN: 4.5},
    ("141 KB, 500 chunks of 10 ms", 64): {PROXY: 1.25, PROXY_REDIS: 1.25},
}
"""The most that CPU a call may be over the bare relay's: shape and rollouts at once → target → ratio."""
OVER_LITELLM = {("1 KB", 64): 14.0, ("141 KB", 16): 9.0}
"""The least that calls a second may be over LiteLLM's, each on one core."""
LEAST_ENTRIES = {PROXY: 487, PROXY_REDIS: 576, PLUGIN: 487}
"""The least Python functions that a call of a target enters (docs/decisions/0074)."""
_ENTERED = {PROXY: "memory, 1 KB", PROXY_REDIS: "Redis, 1 KB", PLUGIN: "plugin, 141 KB"}
"""Target → the case of `entries` that says how many a call enters; a longer history enters no more."""
INTERPRETER = 0.76
"""The most of a call's CPU that the interpreter takes: 74 to 76 % at 1 KB, 62 to 63 % at 141 KB (perf, AMD EPYC; 76 % on an Intel Xeon)."""
_FIRST = {"141 KB": "first call, 200 messages"}
"""Shape → the case for the first call of a session, where it enters more than a later one."""


def aims(found: dict[str, Any]) -> list[Aim]:
    """Each aim that this run can judge.

    It has the aim's text, the figure, the limit, and `met`; `floors`: the floors' figures for it, if they ran; `entries`: how many
    functions a call might enter to meet it (`_entries_left`), and `least_entries`, if `entries` ran.
    """
    counted = {case: entries["all"] for case, entries in found.get("entries", {}).items()}
    entered = {name: counted[case] for name, case in _ENTERED.items()} if counted else {}
    first = {shape: counted[case] for shape, case in _FIRST.items() if case in counted}
    return [*_load_aims(found.get("load", ()), entered, first), *_other_aims(found, entered)]


def verdict(aim: Aim) -> str:
    """`met`, `out of reach` or `not met`.

    It is out of reach if a floor misses it too, as then no Python program that does this work can meet it; or if a call might enter fewer
    functions than the least that it needs.
    """
    if aim["met"]:
        return "met"
    missed = any(value < aim["limit"] if aim.get("least") else value > aim["limit"] for value in aim["floors"].values())
    return "out of reach" if missed or ("entries" in aim and aim["entries"] < aim["least_entries"]) else "not met"


def _most(words: str, value: float, limit: float, unit: str, all_: dict[str, float] | None = None, *, plugin: bool = False) -> Aim:
    """An aim that is met by figures up to the limit; `all_`: the same figure of all targets; with `plugin` its own floor counts."""
    floors = {name: round(all_[name], 3) for name in FLOORS if name in all_ and (name == FLOOR_NAMED) == plugin} if all_ else {}
    return {"aim": words, "figure": round(value, 3), "limit": limit, "unit": unit, "met": value <= limit, "floors": floors}


def _least(words: str, value: float, limit: float, unit: str, all_: dict[str, float] | None = None) -> Aim:
    return {**_most(words, value, limit, unit, all_), "least": True, "met": value >= limit}


def _entries_left(aim: Aim, name: str, entered: dict[str, int], first: int | None = None) -> Aim:
    """Adds how many functions a call of a target might enter to meet an aim, if all else costs what it costs.

    `first`: how many the first of `TURNS` calls enters, if not as many as the others. The functions of a call share what the interpreter
    takes of its CPU (`INTERPRETER`), whatever the interpreter does besides entering them. So the result is too high, if anything.
    """
    if not entered:
        return aim
    mean = entered[name] if first is None else (first + (TURNS - 1) * entered[name]) / TURNS
    share = aim["figure"] / aim["limit"] if aim.get("least") else aim["limit"] / aim["figure"]
    return aim | {"entries": round(entered[name] - mean * (1 - share) / INTERPRETER), "least_entries": LEAST_ENTRIES[name]}


def _medians(targets: dict[str, list[dict[str, Any]]], what: str) -> dict[str, float]:
    """The median of each target's runs that count."""
    good = {name: [run[what] for run in runs if counts(run)] for name, runs in targets.items()}
    return {name: statistics.median(values) for name, values in good.items() if values}


def _over(medians: dict[str, float], base: str) -> dict[str, float]:
    """Each target's figure as a multiple of one target's; empty if that one is missing."""
    return {name: value / medians[base] for name, value in medians.items()} if base in medians else {}


def _load_aims(rows: Sequence[dict[str, Any]], entered: dict[str, int], first: dict[str, int]) -> Iterator[Aim]:
    for row in rows:
        where, words = (row["shape"], row["connections"]), f"{row['shape']}, {row['connections']} at once"
        ratios, whole = _over(_medians(row["targets"], "cpu_us"), "relay"), {} if "chunks" in row["shape"] else entered
        for name, limit in OVER_RELAY.get(where, {}).items():
            if name in ratios:
                aim = _most(f"{words}, {name}: CPU over the bare relay's", ratios[name], limit, "x", ratios, plugin=name == PLUGIN)
                yield _entries_left(aim, name, whole, first.get(row["shape"]))
        rates = _over(_medians(row["targets"], "calls_per_s"), "litellm")
        if where in OVER_LITELLM and PROXY in rates:
            aim = _least(f"{words}, {PROXY}: calls per s over LiteLLM's", rates[PROXY], OVER_LITELLM[where], "x", rates)
            yield _entries_left(aim, PROXY, whole, first.get(row["shape"]))


def _other_aims(found: dict[str, Any], entered: dict[str, int]) -> Iterator[Aim]:
    if grown := found.get("growth"):
        marks = grown["marks"]
        words = f"turn {marks[-1]['turn']} over turn {marks[0]['turn']}"
        beyond = {name: growth_beyond(marks, name, "objects") for name in marks[0]["targets"] if name != "direct"}
        for name, value in beyond.items():
            if name.startswith("proxy") and " x" not in name:
                yield _most(f"{words}, {name}: CPU beyond reading the body", value, 1.1, "x", beyond)
        if grown["redis_bytes_per_token"]:
            yield _most("redis: stored bytes a token", grown["redis_bytes_per_token"], 10.0, "B")
    rates = _medians({PROXY: [run for run in found.get("rollouts", ()) if run["target"] == PROXY]}, "calls_per_s")
    if PROXY in rates:
        yield _entries_left(_least(f"32 sessions at once, {PROXY}: turns per s", rates[PROXY], 1500.0, "1/s"), PROXY, entered)
    for run in (run for run in found.get("streams", ()) if run["target"] == PROXY):
        words = f"{run['streams']:,} streams at once in one process"
        short = f", what {run['wanted']:,} would take" if run["streams"] < run["wanted"] else ""
        yield _most(f"{words}: errors", run["errors"] + run["unfinished"] + len(run["torn"]), 0, "")
        yield _most(f"{words}: slowest over median", run["slowest_over_median"] or 99.0, 3.0, "x")
        yield _most(f"{words}: memory{short}", (run["idle_bytes"] + run["bytes_per_stream"] * run["wanted"]) / 2**30, 3.0, "GiB")
    if "stored" in found:
        yield _most("memory: stored bytes a token", found["stored"]["bytes_per_token"], 10.0, "B")
    if "start_s" in found:
        yield _most("start to ready, no local tokenizer", statistics.median(found["start_s"]), 1.0, "s")

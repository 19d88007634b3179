"""The tables of a run: `python -m bench.page bench/out/T.json` writes docs/performance.md, its pictures and bench/results.json."""

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from bench import plots
from bench.figures import BEYOND, FLOORS, growth_beyond, middle, verdict, verdicts
from bench.run import described
from bench.tables import DOCS, Table, write_page
from bench.targets import FLOOR, FLOOR_LOCAL, FLOOR_NAMED

CASES = {"1 KB", "141 KB", "1 MB", "141 KB, 500 chunks"}
LOADS = {("1 KB", 64), ("1 KB", 1_024), ("141 KB", 16), ("141 KB", 64), ("1 MB", 16), ("141 KB, 500 chunks of 10 ms", 64)}
LEFT_OUT = {FLOOR, FLOOR_LOCAL, FLOOR_NAMED}
"""What the page shows of the cases and loads, and targets that it does not show there. The raw figures have all."""


def ms(us: float) -> str:
    return f"{us / 1000:.2f}" if abs(us) < 10_000 else f"{us / 1000:.0f}"


def wrong(runs: Sequence[dict[str, Any]]) -> str:
    """How many calls failed, and whether sessions were not as they should be."""
    torn = sum(len(run["torn"]) for run in runs)
    return f"{sum(run['errors'] for run in runs)}" + (f", {torn} sessions torn" if torn else "")


def latencies(run: dict[str, Any], *percentiles: int) -> list[str]:
    """Percentiles of a run's latency, in ms; zeros if no call was answered."""
    walls = run["latency_us"] or [0.0] * 101
    return [ms(walls[q]) for q in percentiles]


def tables(found: dict[str, Any]) -> dict[str, Table]:
    """All tables of a run, by the name of their part; parts that did not run are omitted."""
    makers = (entries, cost, growth, load, open_loop, rollouts, streams, exports)
    named = {make.__name__.partition("_")[0]: make for make in makers}
    return {part: make(found[part]) for part, make in named.items() if part in found}


def entries(found: dict[str, dict[str, int]]) -> Table:
    rows = [[title, *(f"{seen[what]:,}" for what in ("all", "ours", "c"))] for title, seen in found.items()]
    return Table("Functions that a call enters", ["call", "Python functions", "ours", "calls of C functions"], rows)


def cost(rows: list[dict[str, Any]]) -> Table:
    out = []
    for row in rows:
        direct, relay = row["targets"]["direct"], row["targets"].get("relay")
        for name, seen in row["targets"].items():
            own = name != "direct"
            ratio = f"{seen['cpu_us'] / relay['cpu_us']:.2f}" if relay and own else ""
            added = [ms(seen[what] - direct["p50_us"]) if own else "" for what in ("p50_us", "p99_us")]
            cpus = [f"{seen['cpu_us']:.0f}" if own else "", ratio, f"{seen['engine_cpu_us']:.0f}", f"{seen['store_cpu_us']:.0f}"]
            out.append([row["case"] if not own else "", name, str(seen["n"]), ms(seen["p50_us"]), *added, *cpus])
    head = ["call", "target", "n", "p50 ms", "added p50", "added p99", "CPU µs", "over relay", "engine CPU", "store CPU"]
    caption = (
        "added: over the direct p50, ms; a stream's latency is that of its first byte and the lag of its last one, its pauses left out"
    )
    return Table("One call at a time", head, out, caption, left=2)


def growth(grown: dict[str, Any]) -> Table:
    marks = grown["marks"]
    names = list(marks[0]["targets"])[1:]
    rows = []
    for mark in marks:
        cells = [f"{mark['targets'][name]['cpu_us']:.0f}" if name in mark["targets"] else "" for name in names]
        rows.append([f"turn {mark['turn']}", f"{mark['body_bytes'] / 1000:.0f}", f"{mark['parse_us']['objects']:.0f}", *cells])
    for words, what in BEYOND.items():
        # beyond something: for the proxy, and for the floors except beyond the floor itself
        shown = [name for name in names if what is None or name.startswith("proxy") or (name.startswith(FLOOR) and what != FLOOR)]
        if what is None or what in marks[0]["parse_us"] or what in names:
            cells = [f"{growth_beyond(marks, name, what):.2f}" if name in shown else "" for name in names]
            rows.append([f"last over first, {words}", "", "", *cells])
    return Table("One session that grows: CPU µs per call", ["", "body KB", "reading it", *names], rows)


def load(rows: list[dict[str, Any]]) -> Table:
    out = []
    for row in rows:
        title = f"{row['shape']} x{row['connections']:,}"
        relay = row["targets"].get("relay")
        for name, runs in row["targets"].items():
            rates, one = [run["calls_per_s"] for run in runs], middle(runs)
            cpu = statistics.median(run["cpu_us"] for run in runs)
            over = f"{cpu / statistics.median(run['cpu_us'] for run in relay):.2f}" if relay and name != "direct" else ""
            spread = f"±{(max(rates) - min(rates)) / 2:.0f}" if len(rates) > 1 else ""
            limit = one["limited_by"] if name != "direct" else "generator and engine"
            cells = [f"{statistics.median(rates):,.0f}", spread, *latencies(one, 50, 99), f"{cpu:.0f}", over]
            out.append([title, name, *cells, f"{one['busy']['target']:.0%}", limit, f"{one['peak_bytes'] / 2**20:.0f}", wrong(runs)])
            title = ""
    head = ["call x at once", "target", "calls/s", "", "p50 ms", "p99 ms", "CPU µs", "over relay", "busy", "limited by", "MiB", "errors"]
    caption = "a target of one process has one core, all else shares the others; x2 share all cores with engine and generator"
    return Table("Closed loop: each rollout asks again as soon as it was answered", head, out, caption, left=2)


def open_loop(found: dict[str, Any]) -> Table:
    rows = [
        [f"{run['rate']:,.0f}", run["target"], f"{run['calls_per_s']:,.0f}", *latencies(run, 50, 90, 99, 100), wrong([run])]
        for run in found["runs"]
    ]
    head = ["calls/s due", "target", "answered/s", "p50 ms", "p90", "p99", "max", "errors"]
    caption = f"141 KB; latency from the moment a call was due; one proxy core can carry {found['capacity']:,.0f} calls/s"
    return Table("Open loop: calls arrive at random", head, rows, caption, left=2)


def rollouts(runs: list[dict[str, Any]]) -> Table:
    rows = []
    for name in dict.fromkeys(run["target"] for run in runs):
        mine = [run for run in runs if run["target"] == name]
        one, rates = middle(mine), [run["calls_per_s"] for run in mine]
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}" if len(mine) > 1 else ""
        rows.append([name, f"{one['calls_per_s']:,.0f}", spread, *latencies(one, 50, 99), f"{one['cpu_us']:.0f}", wrong(mine)])
    caption = "all cores, shared with engine and generator; miles publishes 58 turns/s with one process and 477 with 16 (issue 1660)"
    return Table("32 sessions at once, each from nothing", ["target", "turns/s", "", "p50 ms", "p99 ms", "CPU µs", "errors"], rows, caption)


def streams(runs: list[dict[str, Any]]) -> Table:
    paced = f"{runs[0]['chunks']} chunks, one each {runs[0]['pace_ms'] / 1000:g} s; lag: the last event's way from engine to reader"
    wanted = [run["wanted"] for run in runs if run["streams"] < run["wanted"]]
    short = f"; {wanted[0]:,} were wanted, the limit of open files allows fewer: two for each stream" if wanted else ""
    columns = [
        ("target", lambda run: run["target"]),
        ("streams", lambda run: f"{run['streams']:,}"),
        ("in flight", lambda run: f"{run['peak']:,}"),
        ("median s", lambda run: f"{run['latency_us'][50] / 1e6:.1f}" if run["latency_us"] else ""),
        ("slowest s", lambda run: f"{run['latency_us'][100] / 1e6:.1f}" if run["latency_us"] else ""),
        ("ratio", lambda run: run["slowest_over_median"]),
        ("longest pause s", lambda run: f"{run['pause_us'][99] / 1e6:.1f}" if run.get("pause_us") else ""),
        ("lag p50 ms", lambda run: run["lag_p50_ms"]),
        ("lag max", lambda run: run["lag_max_ms"]),
        ("MiB", lambda run: f"{run['peak_bytes'] / 2**20:,.0f}"),
        ("KiB each", lambda run: f"{run['bytes_per_stream'] / 1024:.0f}"),
        ("busy", lambda run: f"{run['busy']['target']:.0%}"),
        ("errors", lambda run: f"{run['errors'] + run['unfinished']}{', torn' if run['torn'] else ''}"),
    ]
    return Table.of("Streams in flight", runs, columns, paced + short)


def exports(rows: list[dict[str, Any]]) -> Table:
    out = []
    for row in rows:
        cells = [ms(row[where][what]) for where in ("alone", "beside_busy", "beside_export") for what in ("p50_us", "p99_us")]
        out.append([row["target"], f"{row['tokens']:,}", f"{row['answer_bytes'] / 1e6:.1f}", *cells, f"{row['p50_ratio']:.2f}"])
    head = ["target", "tokens", "answer MB", "alone p50", "p99", "busy neighbour p50", "p99", "export p50", "p99", "export/busy"]
    caption = "busy neighbour: next to a process that only keeps one core busy, as fetcher and worker do"
    return Table("1 KB calls while a large rollout is fetched without a pause, ms", head, out, caption)


def aim_table(aims: list[dict[str, Any]]) -> Table:
    columns = [
        ("aim", lambda aim: aim["aim"]),
        ("figure", lambda aim: f"{aim['figure']:g} {aim['unit']}"),
        ("limit", lambda aim: f"{'≥' if aim.get('least') else '≤'} {aim['limit']:g} {aim['unit']}"),
        ("", verdict),
        *((name, lambda aim, name=name: f"{aim['floors'][name]:g} {aim['unit']}" if name in aim["floors"] else "") for name in FLOORS),
        ("functions left", lambda aim: f"{aim['entries']}, needs {aim['least_entries']}" if "entries" in aim and not aim["met"] else ""),
    ]
    return Table.of("Aims", aims, columns)


def compared(found: dict[str, Any], baseline: dict[str, Any]) -> Table:
    """Figures that changed by more than the noise of both runs."""
    changes = verdicts(found["figures"], found["machine"], baseline)
    rows = []
    for name, change in sorted(changes.items(), key=lambda item: item[1], reverse=True):
        if change in {"worse", "better"}:
            pair = (found["figures"][name], baseline["figures"][name])
            rows.append([change, name, *(f"{one['median']:g} ± {one['spread']:g} {one['unit']}" for one in pair)])
    same = sum(change == "same" for change in changes.values())
    caption = f"{same} figures are as they were; a change counts when it is more than both runs wavered, and 5 %"
    return Table("Against bench/baseline.json", ["", "figure", "now", "then"], rows, caption, left=2)


def show(found: dict[str, Any], baseline: dict[str, Any] | None, console: Console) -> None:
    against = [compared(found, baseline)] if baseline else []
    for table in [*tables(found).values(), *against, aim_table(found["aims"])]:
        table.print(console)


def came_from(found: dict[str, Any]) -> str:
    machine = found["machine"]
    versions = ", ".join(f"{name} {release}" for name, release in machine["versions"].items() if release)
    skipped = "".join(f" Without {name}: {reason}." for name, reason in found["skipped"].items())
    return (
        f"{machine['date']}: {described(machine)}; {versions}; tokenizer of `rerender`: {machine['tokenizer']}; "
        f"load average before it {machine['load_average'][0]}; {machine['open_files']:,} open files a process; "
        f"{found['seconds'] // 60} minutes.{skipped}"
    )


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"targets": {name: seen for name, seen in row["targets"].items() if name not in LEFT_OUT}}


def parts(found: dict[str, Any]) -> dict[str, str]:
    """The parts of the page that a run changes."""
    shown = dict(found)
    if "cost" in found:
        shown["cost"] = [_shown(row) for row in found["cost"] if row["case"] in CASES]
    if "load" in found:
        shown["load"] = [_shown(row) for row in found["load"] if (row["shape"], row["connections"]) in LOADS]
    if "growth" in found:
        shown["growth"] = found["growth"] | {"marks": list(map(_shown, found["growth"]["marks"]))}
    own = {"machine": came_from(found), "aims": aim_table(found["aims"]).markdown()}
    return own | {name: table.markdown() for name, table in tables(shown).items()}


if __name__ == "__main__":
    plots.draw(write_page("performance.md", parts, lambda _: "results.json"), DOCS / "images")

"""Shows the results of `bench.gain` and `bench.gain_load` as tables and pictures, and writes docs/gain.md from them.

    python -m bench.gain_report bench/out/gain-<time>.json       # or gain-load-<time>.json

writes the tables into the page (between `<!-- name -->` and `<!-- /name -->`), draws docs/images/gain.svg, and keeps the raw figures
as bench/gain.json or bench/gain_load.json.
"""

import operator
import statistics
import sys
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from bench.page import DOCS, RESULTS, markdown, written
from bench.plots import draw_gain
from bench.report import Shown, print_table

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = DOCS / "gain.md"
WORDS = {"loop": "agent, in its loop", "follow-up": "agent, the user speaks again", "chat": "chat"}


class Point(NamedTuple):
    """The calls of one kind at one mark through one target."""

    kind: str
    drift: bool
    mark: int
    target: str
    n: int
    ttft_ms: float
    least: float
    most: float
    prompt_tokens: int
    computed: int
    hit_rate: float
    api_cpu_ms: float
    proxy_cpu_ms: float


def points(found: dict[str, Any]) -> list[Point]:
    """Every measured kind of call, in the order of the tables."""
    groups = defaultdict[tuple[str, bool, int, str], list[dict[str, Any]]](list)
    for record in found["calls"]:
        if record["kind"] in WORDS:
            groups[record["kind"], bool(record["drift"]), record["mark"], record["target"]].append(record)
    kinds = list(WORDS)
    return [_point(*key, groups[key]) for key in sorted(groups, key=lambda key: (kinds.index(key[0]), not key[1], *key[2:]))]


def _point(kind: str, drift: bool, mark: int, target: str, records: list[dict[str, Any]]) -> Point:
    walls = [record["ttft_ms"] for record in records]
    queries, hits = (sum(record[name] for record in records) for name in ("queries", "hits"))
    prompt, api, proxy = (statistics.median(one[name] for one in records) for name in ("prompt_tokens", "api_cpu_ms", "proxy_cpu_ms"))
    times = statistics.median(walls), min(walls), max(walls)
    computed = round((queries - hits) / len(records))
    return Point(kind, drift, mark, target, len(walls), *times, round(prompt), computed, hits / queries if queries else 0.0, api, proxy)


def first_tokens(found: dict[str, Any], kind: str, *, drift: bool) -> Shown:
    """One table: a kind of call, with drift or without; every target's row has its ratio to the direct one."""
    wanted = [point for point in points(found) if (point.kind, point.drift) == (kind, drift)]
    direct = {point.mark: point.ttft_ms for point in wanted if point.target == "direct"}
    rows = []
    for point in wanted:
        own = point.target != "direct"
        prompt = [f"{point.prompt_tokens:,}", f"{100 * point.hit_rate:.1f} %", f"{point.computed:,}"]
        spread = f"{point.least:,.0f} to {point.most:,.0f}" if point.n > 1 else ""
        faster = f"{direct[point.mark] / point.ttft_ms:.1f}" if own and point.mark in direct else ""
        cpus = [f"{point.api_cpu_ms:.1f}", f"{point.proxy_cpu_ms:.1f}" if own else ""]
        rows.append(["" if own else f"{point.mark:,}", point.target, str(point.n), *prompt, f"{point.ttft_ms:,.0f}", spread, faster, *cpus])
    head = ["history", "target", "n", "prompt", "found cached", "computed", "first token ms", "from, to", "times faster"]
    title = f"{WORDS[kind]}; {'replies drift' if drift else 'no drift'}"
    return Shown(title, [*head, "API server CPU ms", "proxy CPU ms"], rows, left=2)


def bodies(rows: list[dict[str, Any]]) -> Shown:
    """What the body of a call costs the API server. Savings are medians of pairs: calls that were sent one after the other."""
    out = []
    for row in rows:
        cpus = {name: body["api_cpu_ms"] for name, body in row["bodies"].items()}
        kinds = [cpus[name] for name in ("messages", "ids", "prefix")]
        cells = [f"{statistics.median(values):.1f} ({min(values):.1f})" for values in kinds]
        saved = [statistics.median(map(operator.sub, more, less)) for more, less in pairwise(kinds)]
        out.append([f"{row['tokens']:,}", f"{row['messages']:,}", *cells, *(f"{value:.1f}" for value in saved)])
    head = ["prompt", "messages", "messages ms", "ids ms", "prefix ms", "saved by ids", "saved by prefix"]
    caption = "CPU of vLLM's API server from the call to its first event; median (least)"
    return Shown("What a body costs the API server", head, out, caption, left=0)


def load(rows: list[dict[str, Any]]) -> Shown:
    """Calls per second, first tokens and CPU, by the length of the history."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "history": lambda row: f"{row['tokens']:,}" if row["target"] == "direct" else "",
        "target": lambda row: str(row["target"]),
        "n": lambda row: f"{row['calls']:,}",
        "calls/s": lambda row: f"{row['calls_per_s']:.1f}",
        "first token p50 ms": lambda row: f"{row['ttft_p50_ms']:,.0f}",
        "p99 ms": lambda row: f"{row['ttft_p99_ms']:,.0f}",
        "API server CPU ms": lambda row: f"{row['api_cpu_ms']:.1f}",
        "calls/s of one API server": lambda row: f"{1000 / row['api_cpu_ms']:.0f}",
        "CPU ms in front of it": lambda row: "" if row["target"] == "direct" else f"{row['front_cpu_ms']:.1f}",
        "found cached": lambda row: f"{100 * row['found_cached']:.1f} %",
    }
    lengths = [*dict.fromkeys(row["tokens"] for row in rows)]
    ordered = sorted(rows, key=lambda row: lengths.index(row["tokens"]))
    caption = "calls/s of one API server: what its CPU allows on a core of its own"
    return Shown("32 sessions at once", [*columns], [[cell(row) for cell in columns.values()] for row in ordered], caption, left=2)


def workload(rows: list[dict[str, Any]]) -> Shown:
    """Share of the prompts that was found in the prefix cache, for each recorded program, and over all."""
    names = list(dict.fromkeys(row["target"] for row in rows))
    out = []
    for harness in [*dict.fromkeys(row["harness"] for row in rows), "all"]:
        mine = [row for row in rows if harness in {row["harness"], "all"}]
        of = {name: [row for row in mine if row["target"] == name] for name in names}
        shares = [f"{100 * sum(row['hits'] for row in of[name]) / sum(row['queries'] for row in of[name]):.1f} %" for name in names]
        computed = [f"{sum(row['queries'] - row['hits'] for row in of[name]):,}" for name in names]
        out.append([harness, str(sum(row["calls"] for row in of[names[0]])), *shares, *computed])
    head = ["program", "calls", *(f"{name}: found cached" for name in names), *(f"{name}: computed" for name in names)]
    return Shown("Recorded agents", head, out)


def tables(found: dict[str, Any]) -> dict[str, Shown]:
    """All tables of a run of `bench.gain` or of `bench.gain_load`, by the name of their place in the page."""
    if "load" in found:
        return {"load": load(found["load"]), "workload": workload(found["workload"])}
    kinds = {
        f"{kind} {words}": first_tokens(found, kind, drift=drift) for kind in WORDS for words, drift in (("drift", True), ("same", False))
    }
    return {name: shown for name, shown in kinds.items() if shown.rows} | {"bodies": bodies(found["bodies"])}


def came_from(found: dict[str, Any]) -> str:
    """Machine, model and versions, in a line."""
    machine = found["machine"]
    return (
        f"{machine['date']}: {found.get('gpu') or 'no GPU'}, {machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB, "
        f"{machine['system']}, Python {machine['python']}; vLLM {found['vllm']}, tokencache {machine['versions']['tokencache']}; "
        f"model: {found['model']}; tokenizer: {found.get('tokenizer', 'its own')}; load average before it {machine['load_average'][0]}; "
        f"{found['seconds'] / 60:.0f} minutes."
    )


def show(found: dict[str, Any], console: Console) -> None:
    """Prints all tables."""
    for shown in tables(found).values():
        print_table(shown, console)
    for name, why in found.get("skipped", {}).items():
        console.print(f"without {name}: {why}")


def parts(found: dict[str, Any]) -> dict[str, str]:
    """The parts of the page that a run changes."""
    machine = "load machine" if "load" in found else "machine"
    return {machine: came_from(found)} | {name: markdown(shown) for name, shown in tables(found).items()}


def main() -> None:
    of_load = "gain-load-" in sys.argv[-1] or "gain_load" in sys.argv[-1]
    found = written("bench.gain_report", PAGE, RESULTS.with_name("gain_load.json" if of_load else "gain.json"), parts)
    if not of_load:
        draw_gain(points(found), WORDS, DOCS / "images")


if __name__ == "__main__":
    main()

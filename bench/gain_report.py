"""Shows the results of `bench.gain` and `bench.gain_load` as tables and pictures, and writes docs/gain.md from them.

    python -m bench.gain_report bench/out/gain-<time>.json       # or gain-load-<time>.json

writes the tables into the page (between `<!-- name -->` and `<!-- /name -->`), draws docs/images/gain.svg, and keeps the raw figures
as bench/gain.json or bench/gain_load.json.
"""

import operator
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from bench.page import markdown, written
from bench.report import Shown, print_table

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
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
    groups: dict[tuple[int, bool, int, str], list[dict[str, Any]]] = {}
    kinds = list(WORDS)
    for record in found["calls"]:
        if record["kind"] in WORDS:
            key = (kinds.index(record["kind"]), not record["drift"], record["mark"], record["target"])
            groups.setdefault(key, []).append(record)
    return [_point(kinds[kind], not same, mark, target, groups[kind, same, mark, target]) for kind, same, mark, target in sorted(groups)]


def _point(kind: str, drift: bool, mark: int, target: str, records: list[dict[str, Any]]) -> Point:
    walls = [record["ttft_ms"] for record in records]
    queries, hits = (sum(record[name] for record in records) for name in ("queries", "hits"))
    middle = {name: statistics.median(record[name] for record in records) for name in ("prompt_tokens", "api_cpu_ms", "proxy_cpu_ms")}
    return Point(
        kind,
        drift,
        mark,
        target,
        len(walls),
        statistics.median(walls),
        min(walls),
        max(walls),
        round(middle["prompt_tokens"]),
        round((queries - hits) / len(records)),
        hits / queries if queries else 0.0,
        middle["api_cpu_ms"],
        middle["proxy_cpu_ms"],
    )


def first_tokens(found: dict[str, Any], kind: str, *, drift: bool) -> Shown:
    """One table: a kind of call, with drift or without; every target's row has its ratio to the direct one."""
    rows = []
    wanted = [point for point in points(found) if (point.kind, point.drift) == (kind, drift)]
    direct = {point.mark: point.ttft_ms for point in wanted if point.target == "direct"}
    for point in wanted:
        base = direct.get(point.mark)
        own = point.target != "direct"
        rows.append(
            [
                "" if own else f"{point.mark:,}",
                point.target,
                str(point.n),
                f"{point.prompt_tokens:,}",
                f"{100 * point.hit_rate:.1f} %",
                f"{point.computed:,}",
                f"{point.ttft_ms:,.0f}",
                f"{point.least:,.0f} to {point.most:,.0f}" if point.n > 1 else "",
                f"{base / point.ttft_ms:.1f}" if own and base else "",
                f"{point.api_cpu_ms:.1f}",
                f"{point.proxy_cpu_ms:.1f}" if own else "",
            ]
        )
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
    lengths = dict.fromkeys(row["tokens"] for row in rows)
    out = [_of_load(row) for tokens in lengths for row in rows if row["tokens"] == tokens]
    head = ["history", "target", "n", "calls/s", "first token p50 ms", "p99 ms", "API server CPU ms", "calls/s of one API server"]
    caption = "calls/s of one API server: what its CPU allows on a core of its own"
    return Shown("32 sessions at once", [*head, "CPU ms in front of it", "found cached"], out, caption, left=2)


def _of_load(row: dict[str, Any]) -> list[str]:
    direct = row["target"] == "direct"
    return [
        f"{row['tokens']:,}" if direct else "",
        row["target"],
        f"{row['calls']:,}",
        f"{row['calls_per_s']:.1f}",
        f"{row['ttft_p50_ms']:,.0f}",
        f"{row['ttft_p99_ms']:,.0f}",
        f"{row['api_cpu_ms']:.1f}",
        f"{1000 / row['api_cpu_ms']:.0f}",
        "" if direct else f"{row['front_cpu_ms']:.1f}",
        f"{100 * row['found_cached']:.1f} %",
    ]


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
    shown = {}
    for kind in WORDS:
        for drift in (True, False):
            table = first_tokens(found, kind, drift=drift)
            if table.rows:
                shown[f"{kind} {'drift' if drift else 'same'}"] = table
    return shown | {"bodies": bodies(found["bodies"])}


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
    found = written("bench.gain_report", PAGE, HERE / ("gain_load.json" if of_load else "gain.json"), parts)
    if not of_load:
        from bench.gain_plot import draw  # noqa: PLC0415 - matplotlib is for who writes pages

        draw(points(found), DOCS / "images")


if __name__ == "__main__":
    main()

"""Shows the results of `bench.gain_load` as tables, and writes them into docs/gain.md.

    python -m bench.gain_load_report bench/out/gain-load-<time>.json

writes the tables into the page and keeps the raw figures as bench/gain_load.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.gain_report import PAGE, came_from
from bench.page import markdown, replaced
from bench.report import Shown

RESULTS = Path(__file__).parent / "gain_load.json"


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
    """All tables of a run, by the name of their place in the page."""
    return {"load": load(found["load"]), "workload": workload(found["workload"])}


def show(found: dict[str, Any], console: Console) -> None:
    """Prints all tables."""
    for shown in tables(found).values():
        table = Table(title=shown.title, caption=shown.caption or None)
        for n, name in enumerate(shown.head):
            table.add_column(name, justify="left" if n < shown.left else "right")
        for row in shown.rows:
            table.add_row(*row)
        console.print(table)
    for name, why in found["skipped"].items():
        console.print(f"without {name}: {why}")


def page(text: str, found: dict[str, Any]) -> str:
    """The page with the tables of a run in their places.

    Raises:
        ValueError: The page lacks the place of a table.
    """
    text = replaced(text, "load machine", came_from(found))
    for name, shown in tables(found).items():
        text = replaced(text, name, markdown(shown))
    return text


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.gain_load_report", description="Write a run's tables into docs/gain.md.")
    asked.add_argument("raw", type=Path, help="bench/out/gain-load-<time>.json")
    raw = asked.parse_args().raw
    found = json.loads(raw.read_text())
    PAGE.write_text(page(PAGE.read_text(), found))
    if raw.resolve() != RESULTS.resolve():
        RESULTS.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    print("docs/gain.md, bench/gain_load.json")


if __name__ == "__main__":
    main()

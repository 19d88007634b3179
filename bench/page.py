"""Writes docs/performance.md, its pictures and bench/results.json from a run's raw figures: `python -m bench.page bench/out/T.json`."""

from typing import Any

from bench import plots
from bench.report import aim_table, tables
from bench.run import described
from bench.tables import DOCS, write_page
from bench.targets import FLOOR, FLOOR_LOCAL, FLOOR_NAMED

CASES = {"1 KB", "141 KB", "1 MB", "141 KB, 500 chunks"}
LOADS = {("1 KB", 64), ("1 KB", 1_024), ("141 KB", 16), ("141 KB", 64), ("1 MB", 16), ("141 KB, 500 chunks of 10 ms", 64)}
LEFT_OUT = {FLOOR, FLOOR_LOCAL, FLOOR_NAMED}
"""What the page shows of the cases and loads, and targets that it does not show there. The raw figures have all."""


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

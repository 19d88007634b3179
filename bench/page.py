"""Writes docs/performance.md from a run's raw figures.

    python -m bench.page bench/out/<time>.json

writes the tables into the page (between `<!-- name -->` and `<!-- /name -->`), draws docs/images/bench-*.svg, and keeps the raw
figures as bench/results.json.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench import plots
from bench.aims import CHUNKS
from bench.report import Shown, aim_rows, tables
from bench.targets import FLOOR, FLOOR_LOCAL, FLOOR_NAMED

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PAGE = DOCS / "performance.md"
RESULTS = HERE / "results.json"


def markdown(shown: Shown) -> str:
    """A table in Markdown, figures right-aligned."""
    rule = "|".join("---" if n < shown.left else "--:" for n in range(len(shown.head)))
    lines = [f"| {' | '.join(shown.head)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in shown.rows)]
    return "\n".join([*lines, "", shown.caption + "."] if shown.caption else lines)


def replaced(text: str, name: str, inner: str) -> str:
    """The text with the part between the marks of this name replaced.

    Raises:
        ValueError: The page lacks these marks, or has them more than once.
    """
    found, count = re.subn(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", lambda m: f"{m[1]}{inner}\n{m[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page needs <!-- {name} --> and <!-- /{name} --> once, it has them {count} times")
    return found


def came_from(found: dict[str, Any]) -> str:
    machine = found["machine"]
    versions = ", ".join(f"{name} {release}" for name, release in machine["versions"].items() if release)
    words = (
        f"{machine['date']}: {machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB, {machine['system']}, "
        f"Python {machine['python']}; {versions}; tokenizer of `rerender`: {machine['tokenizer']}; "
        f"load average before it {machine['load_average'][0]}; {machine['open_files']:,} open files a process; "
        f"{found['seconds'] // 60} minutes."
    )
    skipped = "".join(f" Without {name}: {reason}." for name, reason in found["skipped"].items())
    return words + skipped


def written(prog: str, page: Path, results: Path, parts: Callable[[dict[str, Any]], Mapping[str, str]]) -> dict[str, Any]:
    """Writes the parts of a page from the run that the command line names, and keeps its raw figures. Returns these."""
    asked = argparse.ArgumentParser(prog=f"python -m {prog}", description=f"Write docs/{page.name} from a run's raw figures.")
    asked.add_argument("raw", type=Path, help="bench/out/<time>.json")
    raw = asked.parse_args().raw
    found: dict[str, Any] = json.loads(raw.read_text())
    page.write_text(filled(page.read_text(), parts(found)))
    if raw.resolve() != results.resolve():
        results.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    print(f"docs/{page.name}, bench/{results.name}")
    return found


def filled(text: str, parts: Mapping[str, str]) -> str:
    """The page with its parts replaced. Raises the errors of `replaced`."""
    for name, inner in parts.items():
        text = replaced(text, name, inner)
    return text


CASES = {"1 KB", "141 KB", "1 MB", "141 KB, 500 chunks"}
LOADS = {("1 KB", 64), ("1 KB", 1_024), ("141 KB", 16), ("141 KB", 64), ("1 MB", 16), (CHUNKS, 64)}
LEFT_OUT = {FLOOR, FLOOR_LOCAL, FLOOR_NAMED}
"""What the page shows of the cases and loads, and targets that it does not show there. The raw figures have all."""


def abridged(found: dict[str, Any]) -> dict[str, Any]:
    """The run with what the page shows."""

    def shown(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"targets": {name: seen for name, seen in row["targets"].items() if name not in LEFT_OUT}, "impossible": {}}

    kept: dict[str, Callable[[Any], Any]] = {
        "cost": lambda rows: [shown(row) for row in rows if row["case"] in CASES],
        "load": lambda rows: [shown(row) for row in rows if (row["shape"], row["connections"]) in LOADS],
        "growth": lambda grown: grown | {"marks": list(map(shown, grown["marks"]))},
    }
    return found | {part: keep(found[part]) for part, keep in kept.items() if part in found}


def _parts(found: dict[str, Any]) -> dict[str, str]:
    own = {"machine": came_from(found), "aims": markdown(aim_rows(found))}
    return own | {name: markdown(shown) for name, shown in tables(abridged(found)).items()}


if __name__ == "__main__":
    for name in plots.draw(written("bench.page", PAGE, RESULTS, _parts), DOCS / "images"):
        print(f"docs/images/{name}")

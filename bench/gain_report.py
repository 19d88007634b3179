"""Shows the results of `bench.gain` as tables and pictures, and writes docs/gain.md from them.

    python -m bench.gain_report bench/out/gain-<time>.json

writes the tables into the page (between `<!-- name -->` and `<!-- /name -->`), draws docs/images/gain.svg, and keeps the raw figures
as bench/gain.json.
"""

import argparse
import json
import operator
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.page import markdown, replaced
from bench.report import Shown

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PAGE = DOCS / "gain.md"
RESULTS = HERE / "gain.json"
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


def tables(found: dict[str, Any]) -> dict[str, Shown]:
    """All tables of a run, by the name of their place in the page."""
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
        table = Table(title=shown.title, caption=shown.caption or None)
        for n, name in enumerate(shown.head):
            table.add_column(name, justify="left" if n < shown.left else "right")
        for row in shown.rows:
            table.add_row(*row)
        console.print(table)


def page(text: str, found: dict[str, Any]) -> str:
    """The page with the tables of a run in their places.

    Raises:
        ValueError: The page lacks the place of a table.
    """
    text = replaced(text, "machine", came_from(found))
    for name, shown in tables(found).items():
        text = replaced(text, name, markdown(shown))
    return text


def main() -> None:
    asked = argparse.ArgumentParser(prog="python -m bench.gain_report", description="Write docs/gain.md from a run's raw figures.")
    asked.add_argument("raw", type=Path, help="bench/out/gain-<time>.json")
    raw = asked.parse_args().raw
    found = json.loads(raw.read_text())
    PAGE.write_text(page(PAGE.read_text(), found))
    from bench.gain_plot import draw  # noqa: PLC0415 - matplotlib is for who writes pages

    draw(points(found), DOCS / "images")
    if raw.resolve() != RESULTS.resolve():
        RESULTS.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    print("docs/gain.md, docs/images/gain.svg, bench/gain.json")


if __name__ == "__main__":
    main()

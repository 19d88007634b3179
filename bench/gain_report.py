"""The tables and the picture of `bench.gain` and `bench.gain_load`: `python -m bench.gain_report bench/out/gain-T.json`.

It writes docs/gain.md, and keeps the raw figures as bench/gain.json, or gain_load.json.
"""

import operator
import statistics
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from bench.plots import draw_gain
from bench.run import described
from bench.tables import DOCS, Table, write_page

WORDS = {"loop": "agent, in its loop", "follow-up": "agent, the user speaks again", "chat": "chat"}


def points(found: dict[str, Any]) -> list[SimpleNamespace]:
    """Every measured kind of call (the calls of one kind at one mark through one target), in the order of the tables."""
    groups = defaultdict[tuple[str, bool, int, str], list[dict[str, Any]]](list)
    for record in found["calls"]:
        if record["kind"] in WORDS:
            groups[record["kind"], bool(record["drift"]), record["mark"], record["target"]].append(record)
    kinds = list(WORDS)
    return [_point(*key, groups[key]) for key in sorted(groups, key=lambda key: (kinds.index(key[0]), not key[1], *key[2:]))]


def _point(kind: str, drift: bool, mark: int, target: str, records: list[dict[str, Any]]) -> SimpleNamespace:
    walls = [record["ttft_ms"] for record in records]
    queries, hits = (sum(record[name] for record in records) for name in ("queries", "hits"))
    medians = {name: statistics.median(one[name] for one in records) for name in ("ttft_ms", "prompt_tokens", "api_cpu_ms", "proxy_cpu_ms")}
    cached = {"computed": round((queries - hits) / len(records)), "hit_rate": hits / queries if queries else 0.0}
    of = {"kind": kind, "drift": drift, "mark": mark, "target": target, "n": len(walls), "least": min(walls), "most": max(walls)}
    return SimpleNamespace(**of, **medians, **cached)


def first_tokens(found: dict[str, Any], kind: str, *, drift: bool) -> Table:
    """One table: a kind of call, with drift or without; every target's row has its ratio to the direct one."""
    wanted = [point for point in points(found) if (point.kind, point.drift) == (kind, drift)]
    direct = {point.mark: point.ttft_ms for point in wanted if point.target == "direct"}
    columns = [
        ("history", lambda one: f"{one.mark:,}" if one.target == "direct" else ""),
        ("target", lambda one: one.target),
        ("n", lambda one: one.n),
        ("prompt", lambda one: f"{round(one.prompt_tokens):,}"),
        ("found cached", lambda one: f"{100 * one.hit_rate:.1f} %"),
        ("computed", lambda one: f"{one.computed:,}"),
        ("first token ms", lambda one: f"{one.ttft_ms:,.0f}"),
        ("from, to", lambda one: f"{one.least:,.0f} to {one.most:,.0f}" if one.n > 1 else ""),
        ("times faster", lambda one: f"{direct[one.mark] / one.ttft_ms:.1f}" if one.target != "direct" and one.mark in direct else ""),
        ("API server CPU ms", lambda one: f"{one.api_cpu_ms:.1f}"),
        ("proxy CPU ms", lambda one: f"{one.proxy_cpu_ms:.1f}" if one.target != "direct" else ""),
    ]
    return Table.of(f"{WORDS[kind]}; {'replies drift' if drift else 'no drift'}", wanted, columns, left=2)


def bodies(rows: list[dict[str, Any]]) -> Table:
    """What the body of a call costs the API server. Savings are medians of pairs: calls that were sent one after the other."""
    out = []
    for row in rows:
        kinds = [row["bodies"][name]["api_cpu_ms"] for name in ("messages", "ids", "prefix")]
        cells = [f"{statistics.median(values):.1f} ({min(values):.1f})" for values in kinds]
        saved = [f"{statistics.median(map(operator.sub, more, less)):.1f}" for more, less in pairwise(kinds)]
        out.append([f"{row['tokens']:,}", f"{row['messages']:,}", *cells, *saved])
    head = ["prompt", "messages", "messages ms", "ids ms", "prefix ms", "saved by ids", "saved by prefix"]
    caption = "CPU of vLLM's API server from the call to its first event; median (least)"
    return Table("What a body costs the API server", head, out, caption, left=0)


def load(rows: list[dict[str, Any]]) -> Table:
    """Calls per second, first tokens and CPU, by the length of the history."""
    columns = [
        ("history", lambda row: f"{row['tokens']:,}" if row["target"] == "direct" else ""),
        ("target", lambda row: row["target"]),
        ("n", lambda row: row["calls"]),
        ("calls/s", lambda row: f"{row['calls_per_s']:.1f}"),
        ("first token p50 ms", lambda row: f"{row['ttft_p50_ms']:,.0f}"),
        ("p99 ms", lambda row: f"{row['ttft_p99_ms']:,.0f}"),
        ("API server CPU ms", lambda row: f"{row['api_cpu_ms']:.1f}"),
        ("calls/s of one API server", lambda row: f"{1000 / row['api_cpu_ms']:.0f}"),
        ("CPU ms in front of it", lambda row: "" if row["target"] == "direct" else f"{row['front_cpu_ms']:.1f}"),
        ("found cached", lambda row: f"{100 * row['found_cached']:.1f} %"),
    ]
    lengths = [*dict.fromkeys(row["tokens"] for row in rows)]
    caption = "calls/s of one API server: what its CPU allows on a core of its own"
    return Table.of("32 sessions at once", sorted(rows, key=lambda row: lengths.index(row["tokens"])), columns, caption, left=2)


def workload(rows: list[dict[str, Any]]) -> Table:
    """Share of the prompts that was found in the prefix cache, for each recorded program, and over all."""
    names = list(dict.fromkeys(row["target"] for row in rows))
    out = []
    for harness in [*dict.fromkeys(row["harness"] for row in rows), "all"]:
        mine = [[row for row in rows if row["target"] == name and harness in {row["harness"], "all"}] for name in names]
        sums = [{what: sum(row[what] for row in some) for what in ("calls", "queries", "hits")} for some in mine]
        shares = [f"{100 * one['hits'] / one['queries']:.1f} %" for one in sums]
        out.append([harness, str(sums[0]["calls"]), *shares, *(f"{one['queries'] - one['hits']:,}" for one in sums)])
    head = ["program", "calls", *(f"{name}: found cached" for name in names), *(f"{name}: computed" for name in names)]
    return Table("Recorded agents", head, out)


def tables(found: dict[str, Any]) -> dict[str, Table]:
    """All tables of a run of `bench.gain` or of `bench.gain_load`, by the name of their place in the page."""
    if "load" in found:
        return {"load": load(found["load"]), "workload": workload(found["workload"])}
    columns = {f"{kind} {words}": (kind, words == "drift") for kind in WORDS for words in ("drift", "same")}
    kinds = {name: first_tokens(found, kind, drift=drift) for name, (kind, drift) in columns.items()}
    return {name: table for name, table in kinds.items() if table.rows} | {"bodies": bodies(found["bodies"])}


def came_from(found: dict[str, Any]) -> str:
    """Machine, model and versions, in a line."""
    machine = found["machine"]
    return (
        f"{machine['date']}: {found.get('gpu') or 'no GPU'}, {described(machine)}; vLLM {found['vllm']}, tokencache "
        f"{machine['versions']['tokencache']}; model: {found['model']}; tokenizer: {found.get('tokenizer', 'its own')}; "
        f"load average before it {machine['load_average'][0]}; {found['seconds'] / 60:.0f} minutes."
    )


def show(found: dict[str, Any], console: Console) -> None:
    """Prints all tables."""
    for table in tables(found).values():
        table.print(console)
    for name, why in found.get("skipped", {}).items():
        console.print(f"without {name}: {why}")


def parts(found: dict[str, Any]) -> dict[str, str]:
    """The parts of the page that a run changes."""
    machine = "load machine" if "load" in found else "machine"
    return {machine: came_from(found)} | {name: table.markdown() for name, table in tables(found).items()}


if __name__ == "__main__":
    found = write_page("gain.md", parts, lambda found: "gain_load.json" if "load" in found else "gain.json")
    if "calls" in found:
        draw_gain(points(found), WORDS, DOCS / "images")

"""The table, and whether the aims are met."""

from typing import Any

from rich.console import Console
from rich.table import Table

AIM_ADDED_P50_US, AIM_GROWTH, AIM_BYTES = 1000.0, 1.5, 10.0


def added(row: dict[str, Any], path: str, which: str = "p50_us") -> float:
    return float(row[path][which] - row["direct"][which])


def growth_beyond(low: dict[str, Any], high: dict[str, Any], what: str) -> float:
    """CPU of the late call over that of the early one, each less what reading the body costs (or what the relay takes)."""

    def beyond(mark: dict[str, Any]) -> float:
        rest = {"nothing": 0.0, "relay": mark["relay"]["cpu_us"], **mark["parse_us"]}
        return float(mark["proxy"]["cpu_us"] - rest[what])

    return beyond(high) / beyond(low)


def aims(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each aim with its figure."""
    out = []
    for row in found["cases"]:
        if row["case"] == "141 KB":
            for which, words in (("p50_us", "all calls"), ("calm_p50_us", "calm third")):
                figure = added(row, "proxy", which) / 1000
                out.append(_aim(f"141 KB, {row['store']}: added p50, {words}", figure, AIM_ADDED_P50_US / 1000, "ms"))
    for grown in found["growth"]:
        low, high = grown["marks"][0], grown["marks"][-1]
        name = f"turn {high['turn']} / turn {low['turn']}, {grown['store']}: CPU beyond parsing"
        out.append(_aim(name, growth_beyond(low, high, "objects"), AIM_GROWTH, "x"))
        if "bytes_per_token" in grown:
            out.append(_aim(f"{grown['store']}: stored bytes a token", grown["bytes_per_token"], AIM_BYTES, "B"))
    counted = found.get("memory_store")
    if counted:
        out.append(_aim("memory: stored bytes a token", counted["bytes_per_token"], AIM_BYTES, "B"))
    return out


def _aim(name: str, figure: float, limit: float, unit: str) -> dict[str, Any]:
    return {"aim": name, "figure": round(figure, 2), "limit": limit, "unit": unit, "met": figure <= limit}


def show(found: dict[str, Any], baseline: dict[str, Any] | None) -> None:
    console = Console(width=160)
    console.print(_cases(found, baseline))
    console.print(_growth(found))
    console.print(_exports(found))
    for name, words in (("plain", "as it is"), ("with_ids", "with 32k ids in and out")):
        one = {key.removeprefix(name + "_"): value for key, value in found["engine_alone"].items() if key.startswith(name)}
        console.print(
            f"mock engine alone, 141 KB {words}: p50 {one['p50_us'] / 1000:.2f} ms, {one['calls_per_s']:.0f} calls/s on one connection, "
            f"{one['cpu_us']:.0f} us CPU; the bare relay before it: +{one['relay_added_p50_us'] / 1000:.2f} ms, "
            f"{one['relay_cpu_us']:.0f} us CPU"
        )
    table = Table("aim", "figure", "limit", "", title="Aims")
    for aim in aims(found):
        verdict = "[green]met[/]" if aim["met"] else "[red]not met[/]"
        table.add_row(aim["aim"], f"{aim['figure']:.2f} {aim['unit']}", f"{aim['limit']:g} {aim['unit']}", verdict)
    console.print(table)


def _cases(found: dict[str, Any], baseline: dict[str, Any] | None) -> Table:
    table = Table(title="Calls at concurrency 1: added = difference to a direct call of the same body, same run (ms; CPU in us per call)")
    for name in (
        "case",
        "store",
        "n",
        "direct p50",
        "relay +p50",
        "calm",
        "proxy +p50",
        "calm",
        "+p99",
        "CPU relay",
        "CPU proxy",
        "proxy/relay",
    ):
        table.add_column(name, justify="left" if name in {"case", "store"} else "right")
    table.add_column("CPU engine", justify="right")
    table.add_column("then", justify="right")
    before = {(row["case"], row["store"]): row for row in (baseline or {}).get("cases", ())}
    for row in found["cases"]:
        old = before.get((row["case"], row["store"]))
        table.add_row(
            row["case"],
            row["store"],
            str(row["n"]),
            f"{row['direct']['p50_us'] / 1000:.2f}",
            f"{added(row, 'relay') / 1000:.2f}",
            f"{added(row, 'relay', 'calm_p50_us') / 1000:.2f}",
            f"{added(row, 'proxy') / 1000:.2f}",
            f"{added(row, 'proxy', 'calm_p50_us') / 1000:.2f}",
            f"{(row['proxy']['p99_us'] - row['direct']['p50_us']) / 1000:.2f}",
            f"{row['relay']['cpu_us']:.0f}",
            f"{row['proxy']['cpu_us']:.0f}",
            f"{row['proxy']['cpu_us'] / row['relay']['cpu_us']:.2f}",
            f"{row['proxy']['engine_cpu_us']:.0f}",
            f"{old['proxy']['cpu_us'] / old['relay']['cpu_us']:.2f}" if old else "-",
        )
    table.caption = (
        "calm: over the third of calls whose processes waited least for a core; +p99: over the direct p50; "
        "then: proxy/relay in baseline.json; a stream's latency is first byte + last byte's lag, its pauses left out."
    )
    return table


def _growth(found: dict[str, Any]) -> Table:
    table = Table(title="One growing session: 200 sampled and about 200 new tokens a turn (CPU in us per call)")
    for name in ("store", "turn", "body KB", "parse", "CPU relay", "CPU proxy", "proxy +p50 ms", "store CPU"):
        table.add_column(name, justify="left" if name == "store" else "right")
    for grown in found["growth"]:
        for mark in grown["marks"]:
            table.add_row(
                grown["store"],
                str(mark["turn"]),
                f"{mark['body_bytes'] / 1000:.0f}",
                f"{mark['parse_us']['split']:.0f} / {mark['parse_us']['objects']:.0f}",
                f"{mark['relay']['cpu_us']:.0f}",
                f"{mark['proxy']['cpu_us']:.0f}",
                f"{added(mark, 'proxy') / 1000:.2f}",
                f"{mark['proxy']['store_cpu_us']:.0f}",
            )
        low, high = grown["marks"][0], grown["marks"][-1]
        ratios = ", ".join(
            f"{growth_beyond(low, high, what):.2f} {words}"
            for what, words in (("nothing", "in all"), ("objects", "beyond parsing"), ("relay", "beyond the bare relay"))
        )
        table.add_row(grown["store"], f"{high['turn']}/{low['turn']}", "", "", "", ratios, "", "", end_section=True)
    table.caption = "parse: members and messages found / Python objects made, in this process"
    return table


def _exports(found: dict[str, Any]) -> Table:
    table = Table(title="1 KB calls while a large rollout is fetched without a pause (ms)")
    for name in (
        "store",
        "tokens",
        "answer MB",
        "n",
        "alone p50",
        "p99",
        "busy neighbour p50",
        "p99",
        "export p50",
        "p99",
        "max",
        "export/busy p50",
        "p99",
    ):
        table.add_column(name, justify="left" if name == "store" else "right")
    for row in found.get("exports", ()):
        shown = [f"{row[where][what] / 1000:.2f}" for where in ("alone", "beside_busy", "beside_export") for what in ("p50_us", "p99_us")]
        most = f"{row['beside_export']['max_us'] / 1000:.2f}"
        ratios = (f"{row['p50_ratio']:.2f}", f"{row['p99_ratio']:.2f}")
        table.add_row(row["store"], f"{row['tokens']:,}", f"{row['answer_bytes'] / 1e6:.1f}", str(row["n"]), *shown, most, *ratios)
    table.caption = "busy neighbour: beside a process that only keeps one core busy, as fetcher and worker do"
    return table

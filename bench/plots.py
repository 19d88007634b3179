"""Draws the bench's pictures: latency percentiles, calls per second by concurrent rollouts, cost by length of history.

A target has the same colour in all of them. SVG without a date and with fixed ids, so that the same figures draw the same file.
"""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

COLOURS = {
    "direct": "#8c8c8c",
    "nginx": "#b89b5e",
    "relay": "#3b76af",
    "floor": "#6fb1d6",
    "floor local": "#a9d3e8",
    "floor proven": "#2f9e9e",
    "floor named": "#63c7b2",
    "proxy memory": "#c8413b",
    "proxy memory, plugin": "#8e1f1a",
    "proxy redis": "#e08a3c",
    "proxy memory x2": "#7b2d5b",
    "proxy redis x2": "#b4649a",
    "rerender": "#4f8f5b",
    "litellm": "#222222",
}
STYLE = {
    "svg.hashsalt": "bench",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def draw(found: dict[str, Any], folder: Path) -> list[str]:
    """Draws the pictures for which the run has figures; returns the names of the files.

    `bench-latency.svg` (closed loop), `bench-open.svg`, `bench-throughput.svg`, `bench-growth.svg`.
    """
    makers: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
        "bench-latency.svg": ("load", _latency),
        "bench-throughput.svg": ("load", _throughput),
        "bench-open.svg": ("open", _open),
        "bench-growth.svg": ("growth", _growth),
    }
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, (part, make) in makers.items():
        if part in found:
            with mpl.rc_context(STYLE):
                make(found)
                plt.savefig(folder / name, metadata={"Date": None})
                plt.close("all")
            written.append(name)
    return written


def _middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return sorted(runs, key=lambda run: run["calls_per_s"])[len(runs) // 2]


def _percentiles(axes: "Axes", name: str, latency: list[float], style: str = "-") -> None:
    """Latency over the fraction of calls that are slower, logarithmic: 50 % at the left, 99 % at the right."""
    shown = range(1, 100)
    axes.plot([100 / (100 - q) for q in shown], [latency[q] / 1000 for q in shown], style, color=COLOURS.get(name), label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([1, 2, 10, 100], ["0", "50", "90", "99"])
    axes.set_xlabel("percentile of calls")
    axes.set_ylabel("latency, ms")


def _latency(found: dict[str, Any]) -> None:
    rows = [row for row in found["load"] if row["shape"] == "141 KB" and row["connections"] <= 64]
    _, all_axes = plt.subplots(1, len(rows), figsize=(4.2 * len(rows), 3.6), squeeze=False)
    for axes, row in zip(all_axes[0], rows, strict=True):
        for name, runs in row["targets"].items():
            if runs and _middle(runs)["latency_us"]:
                _percentiles(axes, name, _middle(runs)["latency_us"])
        axes.set_title(f"141 KB, {row['connections']} at once")
    all_axes[0][-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))


def _throughput(found: dict[str, Any]) -> None:
    shapes = [s for s in ("1 KB", "141 KB") if sum(row["shape"] == s for row in found["load"]) > 0]
    _, all_axes = plt.subplots(1, len(shapes), figsize=(4.2 * len(shapes), 3.6), squeeze=False)
    for axes, shape in zip(all_axes[0], shapes, strict=True):
        rows = [row for row in found["load"] if row["shape"] == shape]
        for name, colour in COLOURS.items():
            points = [(row["connections"], [run["calls_per_s"] for run in row["targets"].get(name, ())]) for row in rows]
            points = [(at, rates) for at, rates in points if rates]
            if points:
                axes.plot([at for at, _ in points], [statistics.median(r) for _, r in points], "o-", ms=3, color=colour, label=name)
                axes.fill_between(
                    [at for at, _ in points], [min(r) for _, r in points], [max(r) for _, r in points], color=colour, alpha=0.15
                )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(shape)
        axes.set_xlabel("rollouts at once")
        axes.set_ylabel("calls a second")
    all_axes[0][-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))


def _open(found: dict[str, Any]) -> None:
    runs = found["open"]["runs"]
    rates = sorted({run["rate"] for run in runs})
    _, all_axes = plt.subplots(1, len(rates), figsize=(3.2 * len(rates), 3.4), squeeze=False, sharey=True)
    for axes, rate in zip(all_axes[0], rates, strict=True):
        for run in (run for run in runs if run["rate"] == rate):
            if run["latency_us"]:
                _percentiles(axes, run["target"], run["latency_us"])
        axes.set_title(f"{rate:,.0f} calls/s")
    all_axes[0][-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))


def _growth(found: dict[str, Any]) -> None:
    marks = found["growth"]["marks"]
    _, all_axes = plt.subplots(1, 2, figsize=(8.4, 3.6))
    for axes, shown, title in zip(
        all_axes,
        (set(COLOURS) - {"rerender", "litellm", "direct"}, set(COLOURS) - {"direct"}),
        ("", "with rerender and LiteLLM"),
        strict=True,
    ):
        for name, colour in COLOURS.items():
            points = [(mark["turn"], mark["targets"][name]["cpu_us"] / 1000) for mark in marks if name in mark["targets"]]
            if name in shown and points:
                axes.plot(*zip(*points, strict=True), "o-", ms=3, color=colour, label=name)
        axes.set_xlabel("turn of one session")
        axes.set_ylabel("CPU a call, ms")
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.legend()

"""Draws the pictures of the pages: latency percentiles, calls per second by concurrent rollouts, cost by length of history, first tokens.

A target has the same colour in all of them. SVG without a date and with fixed ids, so that the same figures draw the same file.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from bench.figures import middle

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
GAIN_COLOURS = {"direct": "#8c8c8c", "proxy": "#c8413b", "proxy --tokenizer": "#e08a3c", "proxy, plugin": "#222222"}
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


def draw(found: dict[str, Any], folder: Path) -> None:
    """Draws the pictures for which the run has figures."""
    makers = [("bench-latency", "load", _latency), ("bench-throughput", "load", _throughput)]
    for name, part, make in [*makers, ("bench-open", "open", _open), ("bench-growth", "growth", _growth)]:
        if part in found:
            _save(folder / f"{name}.svg", make, found[part])


def draw_gain(seen: list[Any], titles: dict[str, str], folder: Path) -> None:
    """Draws gain.svg: a column for each kind of call, times above, hit rates below; without drift the lines are dashed."""
    _save(folder / "gain.svg", _gain, seen, titles)


def _save(file: Path, make: Callable[..., None], *figures: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        make(*figures)
        plt.savefig(file, metadata={"Date": None})
        plt.close("all")
    print(f"docs/images/{file.name}")


def _columns(count: int, width: float, height: float, **more: Any) -> list[Any]:
    """Empty diagrams, side by side."""
    return list(plt.subplots(1, count, figsize=(width * count, height), squeeze=False, **more)[1][0])


def _percentiles(axes: Any, name: str, latency: list[float]) -> None:
    """Latency over the fraction of calls that are slower, logarithmic: 50 % at the left, 99 % at the right."""
    shown = range(1, 100)
    axes.plot([100 / (100 - q) for q in shown], [latency[q] / 1000 for q in shown], "-", color=COLOURS.get(name), label=name)
    axes.set(xscale="log", yscale="log", xlabel="percentile of calls", ylabel="latency, ms")
    axes.set_xticks([1, 2, 10, 100], ["0", "50", "90", "99"])


def _legend(axes: Any) -> None:
    """To the right of the last diagram."""
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))


def _latency(load: list[dict[str, Any]]) -> None:
    rows = [row for row in load if row["shape"] == "141 KB" and row["connections"] <= 64]
    columns = _columns(len(rows), 4.2, 3.6)
    for axes, row in zip(columns, rows, strict=True):
        for name, runs in row["targets"].items():
            if runs and middle(runs)["latency_us"]:
                _percentiles(axes, name, middle(runs)["latency_us"])
        axes.set_title(f"141 KB, {row['connections']} at once")
    _legend(columns[-1])


def _throughput(load: list[dict[str, Any]]) -> None:
    shapes = [shape for shape in ("1 KB", "141 KB") if any(row["shape"] == shape for row in load)]
    columns = _columns(len(shapes), 4.2, 3.6)
    for axes, shape in zip(columns, shapes, strict=True):
        for name, colour in COLOURS.items():
            rows = [row for row in load if row["shape"] == shape and row["targets"].get(name)]
            points = {row["connections"]: [run["calls_per_s"] for run in row["targets"][name]] for row in rows}
            if points:
                rates = points.values()
                axes.plot([*points], [*map(statistics.median, rates)], "o-", ms=3, color=colour, label=name)
                axes.fill_between([*points], [*map(min, rates)], [*map(max, rates)], color=colour, alpha=0.15)
        axes.set(xscale="log", yscale="log", title=shape, xlabel="rollouts at once", ylabel="calls a second")
    _legend(columns[-1])


def _open(found: dict[str, Any]) -> None:
    rates = sorted({run["rate"] for run in found["runs"]})
    columns = _columns(len(rates), 3.2, 3.4, sharey=True)
    for axes, rate in zip(columns, rates, strict=True):
        for run in found["runs"]:
            if run["rate"] == rate and run["latency_us"]:
                _percentiles(axes, run["target"], run["latency_us"])
        axes.set_title(f"{rate:,.0f} calls/s")
    _legend(columns[-1])


def _growth(grown: dict[str, Any]) -> None:
    slow = ["rerender", "litellm"]
    for axes, without, title in zip(_columns(2, 4.2, 3.6), (["direct", *slow], ["direct"]), ("", "with rerender and LiteLLM"), strict=True):
        for name, colour in COLOURS.items():
            points = [(mark["turn"], mark["targets"][name]["cpu_us"] / 1000) for mark in grown["marks"] if name in mark["targets"]]
            if name not in without and points:
                axes.plot(*zip(*points, strict=True), "o-", ms=3, color=colour, label=name)
        axes.set(xlabel="turn of one session", ylabel="CPU a call, ms", title=title)
        axes.set_ylim(bottom=0)
        axes.legend()


def _gain(seen: list[Any], titles: dict[str, str]) -> None:
    kinds = [kind for kind in titles if any(point.kind == kind for point in seen)]
    marks = sorted({point.mark // 1000 for point in seen})
    _, axes = plt.subplots(2, len(kinds), figsize=(3.6 * len(kinds) + 1.6, 5.6), squeeze=False, sharex=True, sharey="row")
    for kind, above, below in zip(kinds, *axes, strict=True):
        for target, colour in GAIN_COLOURS.items():
            for drift, style in ((True, "o-"), (False, "o--")):
                line = [point for point in seen if (point.kind, point.target, point.drift) == (kind, target, drift)]
                if not line:
                    continue
                at, look = [point.mark / 1000 for point in line], {"ms": 3, "color": colour}
                above.plot(at, [point.ttft_ms for point in line], style, label=f"{target}{'' if drift else ', no drift'}", **look)
                above.fill_between(at, [point.least for point in line], [point.most for point in line], color=colour, alpha=0.15)
                below.plot(at, [100 * point.hit_rate for point in line], style, **look)
        above.set(title=titles[kind], xscale="log", yscale="log")
        above.set_xticks(marks, [f"{mark}k" for mark in marks])
        above.minorticks_off()
        below.set(ylim=(0, 103), xlabel="tokens of history")
    axes[0][0].set_ylabel("first token after, ms")
    axes[1][0].set_ylabel("found in the prefix cache, %")
    axes[0][0].legend(loc="upper left")

"""Draws the picture of `bench.gain`: time to the first token, and prefix cache hits, over the length of the history."""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from bench.gain_report import WORDS, Point
from bench.plots import COLOURS, STYLE

_COLOURS = {
    "direct": COLOURS["direct"],
    "proxy": COLOURS["proxy memory"],
    "proxy --tokenizer": COLOURS["proxy redis"],
    "proxy, plugin": COLOURS["litellm"],
}


def draw(seen: list[Point], folder: Path) -> None:
    """Draws gain.svg: a column for each kind of call, times above, hit rates below; without drift the lines are dashed."""
    kinds = [kind for kind in WORDS if any(point.kind == kind for point in seen)]
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        _, axes = plt.subplots(2, len(kinds), figsize=(3.6 * len(kinds) + 1.6, 5.6), squeeze=False, sharex=True, sharey="row")
        for n, kind in enumerate(kinds):
            for target, colour in _COLOURS.items():
                for drift, style in ((True, "o-"), (False, "o--")):
                    line = [point for point in seen if (point.kind, point.target, point.drift) == (kind, target, drift)]
                    if not line:
                        continue
                    label = f"{target}{'' if drift else ', no drift'}"
                    at = [point.mark / 1000 for point in line]
                    axes[0][n].plot(at, [point.ttft_ms for point in line], style, ms=3, color=colour, label=label)
                    axes[0][n].fill_between(at, [point.least for point in line], [point.most for point in line], color=colour, alpha=0.15)
                    axes[1][n].plot(at, [100 * point.hit_rate for point in line], style, ms=3, color=colour, label=label)
            axes[0][n].set_title(WORDS[kind])
            axes[0][n].set_xscale("log")
            axes[0][n].set_yscale("log")
            marks = sorted({point.mark // 1000 for point in seen})
            axes[0][n].set_xticks(marks, [f"{mark}k" for mark in marks])
            axes[0][n].minorticks_off()
            axes[1][n].set_ylim(0, 103)
            axes[1][n].set_xlabel("tokens of history")
        axes[0][0].set_ylabel("first token after, ms")
        axes[1][0].set_ylabel("found in the prefix cache, %")
        axes[0][0].legend(loc="upper left")
        plt.savefig(folder / "gain.svg", metadata={"Date": None})
        plt.close("all")

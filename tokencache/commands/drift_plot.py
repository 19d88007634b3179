"""Draws drift as a picture with a row for each harness and model: what drifted, what that would have cost, and why.

The background is transparent and all colors are of medium brightness, so the picture is legible on light and dark pages. Needs matplotlib
(extra `plot`), which draws without a screen.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tokencache.trajectories.drift_rates import DriftRates

_INK = "#7d8590"
_DRIFT, _BREAKS, _LOST = "#4c8eda", "#9a78d0", "#e0743c"
_DOT = 150
"""Area of a dot for 100 % of the turns, in square points."""
_ROW, _MARGIN, _BARS, _CAUSE, _NAMES = 0.42, 1.9, 4.6, 0.62, 2.4
"""Sizes in inches: a row, the margin above and below the rows, the bars, a column of causes, the names."""


def draw(rows: Sequence[DriftRates], path: Path, title: str = "") -> None:
    """Draw the rows to a file. Its ending selects the format (.svg, .png, .pdf).

    Raises:
        ValueError: matplotlib does not know the ending.
    """
    causes = sorted({name for row in rows for name in row.causes}, key=lambda name: (-sum(name in row.causes for row in rows), name))
    wide = max(len(causes), 1) * _CAUSE
    size = (_NAMES + _BARS + 0.4 + wide, _MARGIN + _ROW * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    figure.patch.set_alpha(0)
    bars, dots = figure.subplots(1, 2, sharey=True, width_ratios=[_BARS, wide])
    _bars(bars, rows)
    _causes(dots, rows, causes)
    for axes in (bars, dots):
        axes.patch.set_alpha(0)
        axes.tick_params(colors=_INK, labelcolor=_INK, length=0, labelsize=9)
        for edge in axes.spines.values():
            edge.set_visible(False)
    if title:
        figure.suptitle(title, color=_INK, fontsize=11, x=0.01, ha="left")
    figure.savefig(path, transparent=True, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def _bars(axes: Axes, rows: Sequence[DriftRates]) -> None:
    kinds = (
        ("turns whose prompt drifted", _DRIFT, [(row.drifted, row.measured) for row in rows]),
        ("continuing turns that break", _BREAKS, [(row.text_only_sequences - row.whole_sequences, row.continuing) for row in rows]),
        ("trainable tokens lost", _LOST, [(row.trainable_tokens_lost, row.trainable_tokens) for row in rows]),
    )
    height = 0.26
    for n, (label, color, parts) in enumerate(kinds):
        values = [100 * part / whole if whole else 0.0 for part, whole in parts]
        places = [place + (n - 1) * height for place in range(len(rows))]
        axes.barh(places, values, height * 0.86, color=color, label=label)
        for place, value, (_, whole) in zip(places, values, parts, strict=True):
            axes.text(value + 1, place, f"{value:.0f}" if whole else "not measured", va="center", color=_INK, fontsize=7)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 108)
    axes.set_xlabel("%, with text alone", color=_INK, fontsize=9)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=1, frameon=False, labelcolor=_INK, fontsize=8, borderaxespad=0.2)


def _causes(axes: Axes, rows: Sequence[DriftRates], causes: Sequence[str]) -> None:
    """Draw a dot for each cause of each row, with the share of the turns as its area."""
    spots = [
        (x, y, row.causes[name].turns / row.measured) for y, row in enumerate(rows) for x, name in enumerate(causes) if name in row.causes
    ]
    axes.scatter([x - 0.18 for x, _, _ in spots], [y for _, y, _ in spots], s=[_DOT * share for _, _, share in spots], color=_DRIFT)
    for x, y, share in spots:
        axes.text(x + 0.12, y, f"{100 * share:.0f}", va="center", fontsize=8, color=_INK)
    for y in range(len(rows)):
        axes.axhline(y, color=_INK, linewidth=0.4, alpha=0.35, zorder=0)
    axes.set_xlim(-0.6, max(len(causes), 1) - 0.4)
    axes.set_xticks(range(len(causes)), causes, rotation=45, ha="left", rotation_mode="anchor")
    axes.xaxis.tick_top()
    axes.set_xlabel("% of turns that drifted for this cause", color=_INK, fontsize=9)

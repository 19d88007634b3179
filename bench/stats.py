"""The bench's statistics: quantiles, and *figures*, the stored form of a number: the median of its repetitions, and their spread."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

Better = Literal["lower", "higher"]
Verdict = Literal["same", "worse", "better", "new"]

LEAST_CHANGE = 0.05
"""Share of a figure below which a difference counts as none, however quiet the machine was."""


def percentile(ordered: Sequence[float], q: float) -> float:
    """The nearest-rank percentile of sorted values: the smallest that at least `q` percent do not exceed; no interpolation."""
    if not ordered:
        raise ValueError("no values")
    return ordered[max(0, min(len(ordered) - 1, math.ceil(len(ordered) * q / 100) - 1))]


def quantiles(values: Sequence[float]) -> list[float]:
    """The percentiles 0, 1, … 100 of values in any order; empty for none."""
    ordered = sorted(values)
    return [percentile(ordered, q) for q in range(101)] if ordered else []


def trimmed(values: Sequence[float]) -> float:
    """The mean without the upper and lower tenth."""
    ordered = sorted(values)
    cut = len(ordered) // 10
    return statistics.fmean(ordered[cut : len(ordered) - cut] or ordered)


def blocks(values: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Cuts values into `count` runs of consecutive ones: repetitions of one long measurement."""
    size = max(1, len(values) // count)
    return [values[at : at + size] for at in range(0, size * min(count, len(values)), size)]


def figure(values: Sequence[float], unit: str, better: Better = "lower") -> dict[str, Any]:
    """The median of repetitions and half the distance of the outermost, to four digits: more are never significant here."""
    middle, spread = (float(f"{value:.4g}") for value in (statistics.median(values), (max(values) - min(values)) / 2))
    return {"median": middle, "spread": spread, "n": len(values), "unit": unit, "better": better}


def compare(now: dict[str, Any], then: dict[str, Any] | None) -> Verdict:
    """Whether a figure is worse or better than an earlier one by more than the noise of both."""
    if then is None:
        return "new"
    change = now["median"] - then["median"]
    band = max(now["spread"] + then["spread"], LEAST_CHANGE * abs(then["median"]))
    if abs(change) <= band:
        return "same"
    return "worse" if (change > 0) == (now["better"] == "lower") else "better"


def us(seconds: float) -> float:
    """Microseconds, to a tenth."""
    return round(seconds * 1e6, 1)

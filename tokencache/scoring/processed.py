"""Tests whether values are those of the distribution after temperature and top-p, though they are said to be the model's own.

Scoring returns the model's own log probabilities l. After a temperature T, a token has l / T - log N, where N is the sum of exp(l / T) over
the tokens that top-p, top-k and min-p keep. The k likeliest tokens of a place give bounds of N: the others have the rest of the
probability, and none has more than the least likely of the k. So a value after processing lies between two bounds, and for a model that
is sure of its next token they are close together.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokencache.dialects.chat.sampling import bending

_VOCABULARY = 2.0**18
"""No model has more tokens."""
_SHARE, _CLOSER = 0.99, 0.5
_FEWEST = 8
_TOLERANCE = 1e-4
_MODELLED = frozenset({"temperature", "top_p", "top_k", "min_p"})
_NEEDED = ("temperature", "top_p", "top_k")
"""What must be recorded to be neutral: an engine may have other defaults (`generation_config.json`)."""


class Processing(NamedTuple):
    """What a sampler does to a distribution; the defaults change nothing. `top_k` 0: all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def not_neutral(sampling: Mapping[str, Any]) -> str:
    """Return which recorded parameter changes the distribution, or may; `""` if it is the model's own."""
    for name in _NEEDED:
        if sampling.get(name) is None:
            return f"{name} is not recorded"
    return bending(sampling)


def processing_of(sampling: Mapping[str, Any]) -> Processing:
    """Return what recorded parameters do. Temperature 0 is greedy: vLLM then does not divide by it."""
    value = {name: sampling[name] for name in _MODELLED if sampling.get(name) is not None}
    return Processing(
        float(value.get("temperature", 1.0)) or 1.0,
        float(value.get("top_p", 1.0)),
        max(int(value.get("top_k", 0)), 0),
        float(value.get("min_p", 0.0)),
    )


def explains(recorded: Sequence[float], own: Sequence[float], top: Sequence[Sequence[float]], processing: Processing) -> bool:
    """Whether processing explains how recorded values differ from the model's own.

    Args:
        recorded: the recorded log probabilities of a span.
        own: those of the model, for the same tokens.
        top: those of the likeliest tokens at each place, the likeliest first.
        processing: what the sampler did.

    Returns:
        True if nearly all recorded values lie within their bounds, and that is no accident: differences of the opposite sign do not, or
        the values after processing scatter less around the recorded ones than the model's own do.
    """
    if processing == Processing() or len(recorded) < _FEWEST:
        return False
    bounds = [_bounds(value, likeliest, processing) for value, likeliest in zip(own, top, strict=True)]
    inside = sum(low <= value <= high for value, (low, _, high) in zip(recorded, bounds, strict=True))
    mirrored = sum(low <= 2 * b - a <= high for a, b, (low, _, high) in zip(recorded, own, bounds, strict=True))
    around_own = statistics.pstdev(a - b for a, b in zip(recorded, own, strict=True))
    around_estimate = statistics.pstdev(a - estimate for a, (_, estimate, _) in zip(recorded, bounds, strict=True))
    n = len(recorded)
    return inside >= _SHARE * n and (mirrored < _CLOSER * n or around_estimate < _CLOSER * around_own)


def _bounds(own: float, likeliest: Sequence[float], processing: Processing) -> tuple[float, float, float]:
    """Return the lowest possible value of a token after processing, an estimate, and the highest possible value."""
    t, (top_p, top_k) = processing.temperature, processing[1:3]
    known = [*likeliest, *([own] if own < likeliest[-1] else [])]
    rest = max(1.0 - math.fsum(map(math.exp, known)), 0.0)
    least = likeliest[-1]
    flat = rest * math.exp(least * (1 / t - 1))  # the rest as tokens of the least probability: the most for t < 1, the least for t > 1
    spread = rest ** (1 / t) * _VOCABULARY ** (1 - 1 / t)  # the rest, spread evenly over a whole vocabulary: the opposite
    total = math.fsum(math.exp(value / t) for value in known)
    low, high = total + min(flat, spread), total + max(flat, spread)
    estimate = total + t * flat
    if 0 < top_k <= len(likeliest):
        low = high = estimate = math.fsum(math.exp(value / t) for value in likeliest[:top_k])
    kept = max(top_p * low, math.exp(likeliest[0] / t), math.exp(own / t)) if top_p < 1.0 or processing.min_p else low
    if processing.min_p:
        kept = max(math.exp(likeliest[0] / t), math.exp(own / t))
    estimate *= (1.0 + top_p) / 2
    return own / t - math.log(high) - _TOLERANCE, own / t - math.log(estimate), own / t - math.log(kept) + _TOLERANCE

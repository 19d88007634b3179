"""What is measured between recorded and recomputed log probabilities, and the engine's own noise.

An engine is compared with itself first: it samples a few replies, and scores them at once. In float32 both values are usually equal. In
bfloat16 they are not (vLLM 0.32 on CPU: 0.06 at most, 0.0002 to 0.0035 in the mean of a reply), because the sizes of the matrix products
differ. Single tokens differ by chance; the mean over a turn is what shows other weights.
"""

import itertools
import math
from collections.abc import Iterable, Sequence

import msgspec

_MEAN_FACTOR, _WINDOW_FACTOR = 3.0, 1.5
BOUNDS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Upper bounds of the parts of a histogram; the first holds the values that are exactly 0, and one part more holds all others."""


class Difference(msgspec.Struct, frozen=True):
    """Recorded minus recomputed log probabilities over a span.

    Attributes:
        max, mean: of the absolute differences. `bias`: the mean of the differences themselves.
        first: place of the first token that differs at all, from 0; -1 if none does.
    """

    tokens: int
    max: float
    mean: float
    bias: float
    first: int


def difference(recorded: Sequence[float], recomputed: Sequence[float]) -> Difference:
    """Compare two runs of log probabilities of the same length, at least 1."""
    values = [a - b for a, b in zip(recorded, recomputed, strict=True)]
    absolute = [abs(value) for value in values]
    n = len(values)
    first = next((place for place, value in enumerate(absolute) if value), -1)
    return Difference(n, max(absolute), math.fsum(absolute) / n, math.fsum(values) / n, first)


class NoiseFloor(msgspec.Struct, frozen=True):
    """How much an engine differs from itself. `replies`: the absolute differences of each reply that it sampled and scored."""

    replies: list[list[float]] = []

    @property
    def max(self) -> float:
        """The largest difference."""
        return max(itertools.chain.from_iterable(self.replies), default=0.0)

    @property
    def mean(self) -> float:
        """The largest mean of a reply."""
        return max((math.fsum(reply) / len(reply) for reply in self.replies if reply), default=0.0)

    def limit(self, tokens: int) -> float:
        """Return the largest mean over so many tokens that may be noise.

        It is three times the mean of the noisiest reply. Short spans vary more: at least one and a half times the largest mean over as
        many neighbouring tokens of a reply.
        """
        windows = (
            math.fsum(reply[at : at + tokens]) / min(tokens, len(reply))
            for reply in self.replies
            if reply
            for at in range(max(len(reply) - tokens, 0) + 1)
        )
        return max(_MEAN_FACTOR * self.mean, _WINDOW_FACTOR * max(windows, default=0.0))


def histogram(values: Iterable[float]) -> list[int]:
    """Count absolute differences: one number for each of `BOUNDS`, and one for those above the last."""
    counts = [0] * (len(BOUNDS) + 1)
    for value in values:
        counts[next((place for place, bound in enumerate(BOUNDS) if value <= bound), len(BOUNDS))] += 1
    return counts

"""Counts which policy versions sampled the tokens of a rollout, and how far they lag behind the current one.

A token counts for a version only if that is certain. Other tokens are counted as mixed (the weights changed, or may have changed, while
they were sampled) or belong to no count (nothing is known). Their lag is not known, so they pass no limit of lag.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tokencache.core.outcome import LatestTurn
from tokencache.core.turn import Turn, TurnMark
from tokencache.core.weights import MIXED, Announced, WeightSpan, in_order, lag, read_spans


class VersionCounts(msgspec.Struct, frozen=True):
    """The policy versions of sampled tokens.

    Attributes:
        versions: number of tokens of each version, in the order in which they were sampled first.
        mixed: number of tokens that one of several versions sampled.
        order: the same versions from the oldest to the newest; empty if their order is not known.
        oldest, newest: the first and the last of them; `""` if there are none.
    """

    versions: dict[str, int] = {}
    mixed: int = 0
    order: list[str] = []

    @property
    def oldest(self) -> str:
        """See the attributes."""
        return self.order[0] if self.order else ""

    @property
    def newest(self) -> str:
        """See the attributes."""
        return self.order[-1] if self.order else ""


class LagLimit(msgspec.Struct, frozen=True):
    """How many versions tokens may lag behind the current one.

    Attributes:
        most: the largest lag.
        current: the current version; `""` if it is not known.
        history: the announced versions, the newest last (`core.weights.lag`).
    """

    most: int
    current: str
    history: tuple[Announced, ...] = ()

    def lag(self, versions: Mapping[str, int], tokens: int) -> int | None:
        """Return the lag of the oldest of some tokens; `None` if it is not known of all. Without tokens it is 0.

        Args:
            versions: number of tokens of each version.
            tokens: number of all tokens, those of no certain version included.
        """
        lags = [lag(version, self.current, self.history) for version in versions]
        known = [one for one in lags if one is not None]
        return max(known, default=0) if len(known) == len(lags) and sum(versions.values()) == tokens else None


def count_versions(turns: Iterable[Turn], history: Sequence[Announced] = ()) -> VersionCounts:
    """Count the versions of the tokens that the policy chose in turns. `history`: the announced versions, which tell the order of names."""
    counts = Counter[str]()
    for turn in turns:
        if TurnMark.NOT_TRAINABLE in turn.marks:
            continue
        for span in spans_of(turn):
            forced = sum(max(0, min(end, span.end) - max(start, span.start)) for start, end in turn.forced)
            counts[span.version] += span.end - span.start - forced
    mixed = counts.pop(MIXED, 0)
    counts = +counts  # without versions of which every token was forced
    return VersionCounts(dict(counts), mixed, in_order(counts, history))


def spans_of(turn: Turn | LatestTurn) -> list[WeightSpan]:
    """Return the spans of a turn's completion with their versions; empty if nothing is known of them."""
    tokens = turn.completion_tokens
    whole_is_mixed = [WeightSpan(MIXED, 0, tokens)] if turn.version_source and turn.versions and tokens else []
    return read_spans(turn.versions, tokens) or whole_is_mixed

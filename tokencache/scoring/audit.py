"""Decides which recorded tokens can be audited with an engine, and what explains a difference.

A token can be audited only with the weights that sampled it, and only if its recorded log probability is the model's own: `raw`, or of a
call that changed nothing (temperature 1, no top-p, no masks). Everything else is listed with the reason, never left out in silence.

A difference has one `Cause`, as far as the record shows it: the first that fits.

`cache` is told apart from `weights` by the rest of the record. The turn continues a history of another version, and no salt kept the
prefix cache apart. And either other spans of its version have no difference, or all that differ have such a history.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from tokencache.core.turn import UNTRAINED, TurnMark
from tokencache.core.weights import MIXED, read_spans
from tokencache.scoring.differences import Difference
from tokencache.scoring.processed import not_neutral
from tokencache.scoring.request import unscorable
from tokencache.trajectories.values import Sequence as TokenSequenceValue
from tokencache.trajectories.values import Trajectory, TurnSpan


class Cause(StrEnum):
    """What explains a difference; `MEANING` has it in words. In the order in which they are tried."""

    IDS = "ids"
    MODE = "mode"
    CACHE = "cache"
    ADAPTER = "adapter"
    WEIGHTS = "weights"
    UNKNOWN = "unknown"


MEANING = {
    Cause.IDS: "the engine used other ids than were recorded: its tokenizer or template is not that of the rollout",
    Cause.MODE: "recorded after temperature, top-p or top-k, but marked as the model's own: the engine's --logprobs-mode changed",
    Cause.CACHE: "the prompt was computed by older weights: the prefix cache was not emptied, and no salt kept it apart",
    Cause.ADAPTER: "the adapter has other values than when it sampled: it was replaced in place, or its file was overwritten",
    Cause.WEIGHTS: "the engine has other weights than those that sampled",
    Cause.UNKNOWN: "no known cause fits",
}
"""Each cause in words."""

_FORCED = "a thinking budget forced these tokens"


class AuditSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a turn that one version sampled.

    Attributes:
        start, end: half-open range of the completion's tokens.
        at: place of `start` in the tokens of the sequence.
        recorded: their recorded log probabilities.
        sampling, kind: the parameters that were sent, and what the values are said to be (`TurnSpan.logprob_kind`).
        created: when the call began, Unix time in seconds.
        history: whether a token before it in its sequence was sampled by another version, and no salt kept the prefix cache apart.
    """

    session: str
    sequence: str
    turn: str
    model: str
    version: str
    start: int
    end: int
    at: int
    recorded: list[float]
    sampling: Mapping[str, Any]
    kind: str
    created: float
    history: bool = False


class NotAudited(msgspec.Struct, frozen=True):
    """Tokens of a turn that cannot be audited, and why. `start` and `end` as in `AuditSpan`."""

    session: str
    turn: str
    start: int
    end: int
    reason: str


class AuditedSpan(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one span.

    Attributes:
        difference: recorded against recomputed; `None` if the engine used other ids.
        limit: the largest mean that may be noise.
        mode: whether processing explains the difference (`processed.explains`).
    """

    span: AuditSpan
    difference: Difference | None
    limit: float = 0.0
    mode: bool = False

    @property
    def clean(self) -> bool:
        """Whether the difference is noise."""
        return self.difference is not None and self.difference.mean <= self.limit


def plan(rollout: Trajectory, *, version: str | None) -> tuple[list[AuditSpan], list[NotAudited]]:
    """Find what can be audited of a rollout.

    Args:
        rollout: the rollout.
        version: the version of the weights that the engine holds; `None` audits every version.
    """
    spans: list[AuditSpan] = []
    left_out: list[NotAudited] = []
    for sequence in rollout.sequences:
        media = unscorable(sequence)
        before: list[str] = []
        for turn in sequence.turns:
            count = turn.completion[1] - turn.completion[0]
            whole = media or _obstacle(turn)
            if sequence.overlong == "masked":
                whole = whole or "a limit of length masked its sequence, so the export has no log probabilities"
            parts = _parts(turn, count)
            for start, end, named, forced in _by_choice(turn, parts):
                reason = whole or (_FORCED if forced else _other_version(turn, named, version))
                if reason:
                    left_out.append(NotAudited(rollout.session, turn.turn, start, end, reason))
                elif start < end:
                    spans.append(_span(rollout, sequence, turn, (start, end, named), before))
            before += [named for _, _, named in parts] or [""]
    return spans, left_out


def _parts(turn: TurnSpan, count: int) -> list[tuple[int, int, str]]:
    """Return the spans of a turn with their versions: those that are recorded, or one with the version `""`."""
    return [(span.start, span.end, span.version) for span in read_spans(turn.weight_versions, count)] or [(0, count, "")]


def _by_choice(turn: TurnSpan, parts: Iterable[tuple[int, int, str]]) -> Iterator[tuple[int, int, str, bool]]:
    """Split the parts of a turn at the tokens that were forced: their recorded values are 0.0. Adds whether a part was forced."""
    for start, end, version in parts:
        at = start
        for first, last in sorted(turn.forced):
            first, last = max(first, at), min(last, end)  # noqa: PLW2901
            if first < last:
                if at < first:
                    yield at, first, version, False
                yield first, last, version, True
                at = last
        if at < end or start == end:
            yield at, end, version, False


def _span(
    rollout: Trajectory, sequence: TokenSequenceValue, turn: TurnSpan, part: tuple[int, int, str], before: Sequence[str]
) -> AuditSpan:
    start, end, version = part
    at = turn.completion[0] + start
    return AuditSpan(
        session=rollout.session,
        sequence=sequence.id,
        turn=turn.turn,
        model=turn.model,
        version=version,
        start=start,
        end=end,
        at=at,
        recorded=sequence.logprobs[at : at + end - start],
        sampling=turn.sampling,
        kind=turn.logprob_kind,
        created=turn.created,
        history=turn.kv != "exact" and any(other != version for other in before),
    )


def _obstacle(turn: TurnSpan) -> str:
    """Return why no token of a turn can be audited; `""` if they can."""
    if TurnMark.NOT_TRAINABLE in turn.marks:
        return "its model is not trained"
    if not UNTRAINED.isdisjoint(turn.marks) or not turn.logprobs_hash:
        return "it has no log probabilities"
    if TurnMark.STALE_KV in turn.marks:
        return f"it is marked {TurnMark.STALE_KV}: {TurnMark.STALE_KV.meaning}"
    changed = "" if turn.logprob_kind == "raw" else not_neutral(turn.sampling)
    if changed:
        return f"its log probabilities are {turn.logprob_kind or 'of an unknown kind'}, and {changed}"
    return ""


def _other_version(turn: TurnSpan, named: str, version: str | None) -> str:
    """Return why the engine's weights are not known to be those of a span; `""` if they are."""
    if named == MIXED:
        return "which version sampled each token is not certain"
    if version is None:
        return ""
    if not named:
        return "its version is not known (--any-version audits it)"
    if named != version:
        return f"version {named} sampled it, and the engine has {version}"
    if turn.prompt_version not in {"", named}:
        return f"its prompt was computed with version {turn.prompt_version}"
    return ""


def causes(results: Sequence[AuditedSpan], adapters: Iterable[str]) -> dict[int, Cause]:
    """Find the cause of each difference. `adapters`: the models that are LoRA adapters.

    Returns:
        Place in `results` → cause, for each that is not clean.
    """
    loras = frozenset(adapters)
    groups: dict[tuple[str, str], list[AuditedSpan]] = {}
    for result in results:
        groups.setdefault((result.span.model, result.span.version), []).append(result)
    return {
        place: _cause(result, groups[result.span.model, result.span.version], loras)
        for place, result in enumerate(results)
        if not result.clean
    }


def _cause(result: AuditedSpan, group: Sequence[AuditedSpan], adapters: frozenset[str]) -> Cause:
    span = result.span
    if result.difference is None:
        return Cause.IDS
    if result.mode:
        return Cause.MODE
    clean = [other for other in group if other.clean]
    if span.history and (clean or all(other.span.history for other in group)):
        return Cause.CACHE
    replaced = Cause.ADAPTER if span.model in adapters else Cause.WEIGHTS
    if not clean:
        return replaced
    first, last = min(other.span.created for other in clean), max(other.span.created for other in clean)
    return replaced if not first <= span.created <= last else Cause.UNKNOWN

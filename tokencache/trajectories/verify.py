"""Checks an exported trajectory from the export alone.

An exported file may have been written by an old version, cut, merged, edited or damaged. The checks detect this because an export is
redundant: every turn has hashes of its ids and log probabilities, ranges must be adjacent, and every count can be repeated.

===========  =========================================================================================================
`aligned`    ids, mask and log probabilities have the same length, and the turns divide it in order and without gaps
`trained`    mask 1 exactly on tokens that were sampled with log probabilities, in sequences that neither a limit of length nor
             a format for trainers (of an invalid rollout) masked; log probabilities are finite and at most 0 there, and 0.0 elsewhere
`hashes`     the recorded hashes of every prefix, of every completion and of its log probabilities are those of the tokens
`media`      the images and other media of a sequence are in its prompts, in order and apart, and have a digest or none; a branch
             has those of its parent's prefix
`lineage`    a turn with a parent comes after all tokens of that parent, in the same sequence or in one that branches off, and the same
             model sampled both
`anchors`    the replies that a `resplice` names are at the positions that it names
`links`      the turns that a link names exist, and its sources ended before the turn that received their text
`once`       each turn and each sequence occurs once
`labels`     `start`, `reason`, `parent`, `root`, `continued`, `tools` agree with the turns
`figures`    figures, weights and lengths agree with the sequences
`complete`   agrees with the incidents, and `valid` with it and the outcome
===========  =========================================================================================================

A limit of length (`lengths`) or the choice of a model may leave turns out. Then the export names them, and checks that need them are
skipped.

`NOT_CHECKED` lists what an export cannot show. No function here raises an exception for a wrong trajectory.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

import msgspec
import xxhash

from tokencache.core import ids
from tokencache.core.incidents import IncidentKind
from tokencache.core.outcome import OutcomeKind
from tokencache.core.turn import UNTRAINED, TurnMark, hash_ids, hash_logprobs
from tokencache.trajectories.values import Sequence, Trajectory, TurnSpan

Range = tuple[int, int]
"""A half-open range of a sequence's tokens."""

NOT_CHECKED = (
    "that the engine received and sampled exactly these ids (an export does not hold the engine's own log)",
    "that a spliced prompt decodes to what the template renders (this needs the template)",
    "anything but the tokens and labels of an export without a digest (written by an older version)",
    "the log probabilities of a turn without logprobs_hash (recorded by an older version), except that they are numbers of at most 0",
)

AROUND = 10
"""Number of tokens that are shown on either side of a failed check."""

_SHOWN = 6
"""Number of ids that are shown of a long range."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_STARTS = ("root", "branch", "resplice", "plain")
_WEIGHT_SLACK = 1e-9


class CheckFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A check that failed, and where.

    Attributes:
        check: the name of the check.
        words: what is wrong.
        token: index of the first wrong token in the sequence; `None` if the failure is not about tokens.
        around: the wrong ids in brackets, with their neighbours: `… 11 12 [13] 14 15 …`.
    """

    session: str
    check: str
    words: str
    sequence: str = ""
    turn: str = ""
    token: int | None = None
    around: str = ""

    def __str__(self) -> str:
        named = (("session", self.session), ("sequence", self.sequence), ("turn", self.turn), ("token", self.token))
        where = ", ".join(f"{what} {name}" for what, name in named if name is not None and name != "")
        return f"{where}{': ' * bool(where)}{self.words} ({self.check})" + (f"\n    {self.around}" if self.around else "")


def verify(trajectory: Trajectory) -> list[CheckFailure]:
    """Check a trajectory. An empty list means that every check passed.

    The failures are in the order of the table in the module docstring, so that the first one is nearest to the cause. If the ranges of a
    sequence are wrong, its tokens are not checked further.
    """
    found: list[CheckFailure] = []
    sound = []
    for sequence in trajectory.sequences:
        if not any(_aligned(sequence)):
            sound.append(sequence)
        found += verify_sequence(sequence)
    located = _locate(trajectory)
    found += [
        *_lineage(trajectory, located, sound),
        *_anchors(located, sound, _left_out(trajectory)),
        *_links(trajectory, located),
        *_once(trajectory),
        *_labels(trajectory, located),
    ]
    found += [*_figures(trajectory), *_complete(trajectory)]
    return [msgspec.structs.replace(one, session=trajectory.session) for one in found]


def verify_sequence(sequence: Sequence, *, masked: bool = False) -> list[CheckFailure]:
    """Check a sequence by itself: `aligned`, and if that holds `trained`, `hashes` and `media`.

    With `masked`, none of its tokens may be trained: a limit of length masked it, or a format for trainers, because the rollout is invalid
    or the places of its images are not known.
    """
    masked = masked or sequence.overlong == "masked"
    return [*_aligned(sequence)] or [*_trained(sequence, masked=masked), *_hashes(sequence, masked=masked), *_media(sequence)]


def around(token_ids: list[int], start: int, end: int) -> str:
    """Show the ids of a range in brackets, with ten ids on either side. A long range is shortened in the middle."""
    first, last = max(0, start - AROUND), min(len(token_ids), end + AROUND)
    inside = [str(i) for i in token_ids[start:end]]
    if len(inside) > _SHOWN:
        inside = [*inside[: _SHOWN // 2], "…", *inside[-_SHOWN // 2 :]]
    parts = [str(i) for i in token_ids[first:start]] + [f"[{' '.join(inside)}]"] + [str(i) for i in token_ids[end:last]]
    return " ".join([*(["…"] if first else []), *parts, *(["…"] if last < len(token_ids) else [])])


def holes(trajectory: Trajectory) -> Counter[str]:
    """Count the incidents that make a trajectory incomplete, by kind."""
    return Counter(incident.kind for incident in trajectory.incidents if incident.hole)


def _torn(trajectory: Trajectory) -> bool:
    """Whether the records did not fit together. Then there are no sequences, and the figures count turns that are missing."""
    return not trajectory.sequences and IncidentKind.TORN_RECORD in holes(trajectory)


class _Located(NamedTuple):
    """A turn and the sequence that holds it."""

    sequence: Sequence
    turn: TurnSpan


def _left_out(trajectory: Trajectory) -> Collection[str]:
    """Return the ids of the turns that a limit left out."""
    limits = (trajectory.figures.overlong, trajectory.figures.stale, trajectory.figures.models)
    return {turn for figures in limits if figures is not None for turn in figures.turns}


def _locate(trajectory: Trajectory) -> dict[str, _Located]:
    return {turn.turn: _Located(sequence, turn) for sequence in trajectory.sequences for turn in sequence.turns}


def _failure(check: str, words: str, sequence: Sequence, turn: TurnSpan | None = None, where: Range | int | None = None) -> CheckFailure:
    """Make a failure; `verify` adds the session. `where` is a range of tokens, or one token."""
    span = (where, where + 1) if isinstance(where, int) else where
    return CheckFailure(
        session="",
        check=check,
        words=words,
        sequence=sequence.id,
        turn=turn.turn if turn else "",
        token=span[0] if span else None,
        around=around(sequence.token_ids, *span) if span else "",
    )


def _aligned(s: Sequence) -> Iterator[CheckFailure]:
    sizes = (len(s.token_ids), len(s.loss_mask), len(s.logprobs))
    if len(set(sizes)) != 1:
        yield _failure("aligned", f"{sizes[0]} token ids, {sizes[1]} mask entries and {sizes[2]} log probabilities", s)
    if not s.turns:
        yield _failure("aligned", "has no turn", s)
    at = 0
    for turn in s.turns:
        (start, middle), (again, end) = turn.prompt, turn.completion
        if start != at or again != middle or not start <= middle <= end:
            yield _failure("aligned", f"prompt {turn.prompt} and completion {turn.completion} do not continue at token {at}", s, turn)
            return
        if (middle, end - again) != (turn.prompt_tokens, turn.completion_tokens):
            recorded = f"recorded were {turn.prompt_tokens} and {turn.completion_tokens}"
            yield _failure("aligned", f"prompt ends at {middle} and completion has {end - again} tokens, {recorded}", s, turn)
        at = end
    if s.turns and at != sizes[0]:
        yield _failure("aligned", f"its turns end at token {at}, its ids end at {sizes[0]}", s)


def _trained(s: Sequence, *, masked: bool) -> Iterator[CheckFailure]:
    """Check mask and log probabilities. Only the first wrong token of each prompt and completion is reported."""
    for turn in s.turns:
        trained = int(not masked and UNTRAINED.isdisjoint(turn.marks))
        sampled = "token of a masked sequence" if masked else _SAMPLED[trained]
        at = turn.completion[0]
        forced = {at + i for start, end in turn.forced for i in range(max(start, 0), min(end, turn.completion_tokens))}
        for (start, end), all_, words in ((turn.prompt, 0, "context token"), (turn.completion, trained, sampled)):
            for i in range(start, end):
                mask, what = (0, "forced token") if i in forced else (all_, words)
                value = s.logprobs[i]
                if s.loss_mask[i] != mask:
                    yield _failure("trained", f"{what} has loss mask {s.loss_mask[i]}", s, turn, i)
                    break
                if not (math.isfinite(value) and value <= 0.0 if mask else value == 0.0):
                    yield _failure("trained", f"{what} has log probability {value}", s, turn, i)
                    break


_SAMPLED = ("token that was sampled without log probabilities", "sampled token")


def _hashes(s: Sequence, *, masked: bool) -> Iterator[CheckFailure]:
    prefix = xxhash.xxh3_128()
    same = True
    for turn in s.turns:
        try:
            new, sampled = ids.pack(s.token_ids[slice(*turn.prompt)]), ids.pack(s.token_ids[slice(*turn.completion)])
        except OverflowError:
            yield _failure("hashes", "an id is not an int32", s, turn)
            return
        prefix.update(new)
        prefix.update(sampled)
        genuine = hash_ids(sampled).hex() == turn.completion_hash
        if not genuine:
            yield _failure("hashes", f"tokens {_range(turn.completion)} are not those that were sampled", s, turn, turn.completion)
        if same and prefix.hexdigest() != turn.prefix_hash:
            same = False  # the hashes of all later turns differ too
            if genuine:
                yield _failure("hashes", f"tokens {_range(turn.prompt)} are not the prompt from which it was sampled", s, turn, turn.prompt)
        if turn.logprobs_hash and not masked and TurnMark.NOT_TRAINABLE not in turn.marks and not _same_logprobs(s, turn):
            words = f"the log probabilities of tokens {_range(turn.completion)} are not those that were recorded"
            yield _failure("hashes", words, s, turn, turn.completion)


def _media(s: Sequence) -> Iterator[CheckFailure]:
    at = 0
    for n, medium in enumerate(s.media, 1):
        name, where = f"medium {n}", (medium.start, medium.end)
        if not (at <= medium.start < medium.end <= len(s.token_ids)):
            yield _failure("media", f"{name} has the tokens {_range(where)}, but must be after token {at} and before {len(s.token_ids)}", s)
            return
        at = medium.end
        sampled = next((turn for turn in s.turns if turn.completion[0] < medium.end and medium.start < turn.completion[1]), None)
        if sampled is not None:
            yield _failure("media", f"{name} has tokens that were sampled", s, sampled, where)
        if medium.sha256 and not _SHA256.fullmatch(medium.sha256):
            yield _failure("media", f"the digest of {name} is not a SHA-256: {medium.sha256[:80]!r}", s, where=where)


def _same_logprobs(s: Sequence, turn: TurnSpan) -> bool:
    return hash_logprobs(ids.pack_logprobs(s.logprobs[slice(*turn.completion)])).hex() == turn.logprobs_hash


def _range(span: Range) -> str:
    return f"{span[0]} to {span[1]}"


def _lineage(trajectory: Trajectory, located: dict[str, _Located], sound: Collection[Sequence]) -> Iterator[CheckFailure]:
    left_out = _left_out(trajectory)
    for s in trajectory.sequences:
        before: TurnSpan | None = None
        for turn in s.turns:
            parent = located.get(turn.parent or "")
            if (turn.parent is not None) != (turn.match in {"continue", "branch"}):
                yield _failure("lineage", f"has match {turn.match} and {'a' if turn.parent else 'no'} parent", s, turn)
            elif before is not None and turn.parent != before.turn:
                yield _failure("lineage", f"follows turn {before.turn}, but its parent is {turn.parent}", s, turn)
            elif turn.parent is not None and parent is None and turn.parent not in left_out:
                yield _failure("lineage", f"its parent {turn.parent} is in no sequence", s, turn)
            elif turn.origin is not None and turn.origin not in located and turn.origin not in left_out:
                yield _failure("lineage", f"turn {turn.origin}, from which it took its context, is in no sequence", s, turn)
            if parent is not None and parent.turn.model and turn.model and parent.turn.model != turn.model:
                words = f"was sampled by {turn.model}, but extends turn {turn.parent}, which {parent.turn.model} sampled"
                yield _failure("lineage", words, s, turn)
            if parent is not None and TurnMark.ENGINE_DISAGREES in parent.turn.marks:
                yield _failure("lineage", f"extends turn {turn.parent}, which is marked {TurnMark.ENGINE_DISAGREES}", s, turn)
            if before is None and parent is not None and parent.sequence is not s and s in sound and parent.sequence in sound:
                yield from _branched(s, turn, parent)
            before = turn


def _branched(s: Sequence, turn: TurnSpan, parent: _Located) -> Iterator[CheckFailure]:
    """Check that a branch repeats all tokens of its parent, which is in another sequence."""
    end = parent.turn.completion[1]
    whole, own = parent.sequence.token_ids[:end], s.token_ids[: turn.prompt[1]][:end]
    if own != whole:
        words = f"differs from the prefix of its parent {turn.parent} (sequence {parent.sequence.id}) here"
        yield _failure("lineage", words, s, turn, _first_difference(own, whole))
    elif [medium for medium in s.media if medium.start < end] != [medium for medium in parent.sequence.media if medium.start < end]:
        words = f"has other media than the prefix of its parent {turn.parent} (sequence {parent.sequence.id})"
        yield _failure("media", words, s, turn)


def _first_difference(own: list[int], other: list[int]) -> int:
    """Return the first index at which two lists differ: at most the length of the shorter one."""
    return next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other)))


def _anchors(located: dict[str, _Located], sound: Collection[Sequence], left_out: Collection[str]) -> Iterator[CheckFailure]:
    for s in sound:
        for turn in s.turns:
            for anchor in turn.anchors:
                source = located.get(anchor.turn)
                if source is None and anchor.turn in left_out:
                    continue
                if source is None:
                    yield _failure("anchors", f"names turn {anchor.turn}, which is in no sequence", s, turn)
                elif not 0 <= anchor.start <= anchor.end <= turn.prompt[1]:
                    yield _failure("anchors", f"the anchor of turn {anchor.turn} ends after the prompt", s, turn)
                elif source.sequence in sound:
                    here = s.token_ids[anchor.start : anchor.end]
                    sampled = source.sequence.token_ids[slice(*source.turn.completion)][anchor.offset :]
                    if here != sampled[: len(here)]:
                        at = anchor.start + _first_difference(here, sampled)
                        yield _failure("anchors", f"is not what turn {anchor.turn} sampled", s, turn, at)


def _links(trajectory: Trajectory, located: dict[str, _Located]) -> Iterator[CheckFailure]:
    left_out = _left_out(trajectory)
    for link in trajectory.links:
        received = located.get(link.turn)
        if received is not None and not 0 <= link.message < received.turn.messages:
            words = f"a link names message {link.message} of its request, which has {received.turn.messages}"
            yield _failure("links", words, received.sequence, received.turn)
        if not link.sources:
            yield CheckFailure(session="", check="links", words="a link names no turn that sampled its text", turn=link.turn)
        for name in (link.turn, *link.sources):
            if name not in located and name not in left_out:
                yield CheckFailure(session="", check="links", words="a link names this turn, which is in no sequence", turn=name)
        for source in (located[name] for name in link.sources if name in located):
            if received is not None and source.turn.created + source.turn.seconds > received.turn.created:
                words = f"ended after turn {link.turn} began, which is linked as the receiver of its text"
                yield _failure("links", words, source.sequence, source.turn)


def _once(trajectory: Trajectory) -> Iterator[CheckFailure]:
    turns = Counter(turn.turn for sequence in trajectory.sequences for turn in sequence.turns)
    for turn, n in turns.items():
        if n > 1:
            yield CheckFailure(session="", check="once", words=f"occurs {n} times", turn=turn)
    for sequence, n in Counter(sequence.id for sequence in trajectory.sequences).items():
        if n > 1:
            yield CheckFailure(session="", check="once", words=f"occurs {n} times", sequence=sequence)


def _labels(trajectory: Trajectory, located: dict[str, _Located]) -> Iterator[CheckFailure]:
    parents = {turn.parent for sequence in trajectory.sequences for turn in sequence.turns}
    root_of: dict[str, str] = {}
    left_out = _left_out(trajectory)
    for s in trajectory.sequences:
        if not s.turns:
            continue
        first = s.turns[0]
        orphan = (first.parent or first.origin) in left_out  # the turns that remain do not show its parent and root
        parent = located.get(first.parent or first.origin or "")
        root = s.root if orphan else root_of.get(parent.sequence.id if parent else "", s.id)  # a parent comes before its branches
        root_of[s.id] = root
        labels: dict[str, tuple[object, object]] = {
            "id": (s.id, first.turn),
            "start": (s.start, "branch" if first.match == "continue" else first.match),
            "reason": (s.reason, first.reason),
            "parent": (s.parent, parent.sequence.id if parent else s.parent if orphan else None),
            "root": (s.root, root if s.root else ""),  # older versions wrote none
            "continued": (s.continued, any(turn.turn in parents for turn in s.turns) or (s.continued and bool(left_out))),
            "tools": (s.tools, first.tools),
        }
        for name, (label, actual) in labels.items():
            if label != actual:
                yield _failure("labels", f"has {name} {label!r}, its turns show {actual!r}", s)
        if s.start not in _STARTS:
            yield _failure("labels", f"starts with {s.start!r}, which is not one of {', '.join(_STARTS)}", s)


def _figures(t: Trajectory) -> Iterator[CheckFailure]:
    trainable = [sum(1 for mask in s.loss_mask if mask == 1) for s in t.sequences]
    total = sum(trainable)
    for s, own in zip(t.sequences, trainable, strict=True):
        if (s.tokens, s.trainable_tokens) != (len(s.token_ids), own):
            words = f"counts {s.tokens} tokens and {s.trainable_tokens} trainable tokens, there are {len(s.token_ids)} and {own}"
            yield _failure("figures", words, s)
        share = own / total if total else 0.0
        if not abs(s.weight - share) <= _WEIGHT_SLACK:  # also true if the weight is NaN
            yield _failure("figures", f"has weight {s.weight}, its share of the trainable tokens is {share}", s)
    incidents = Counter(incident.kind for incident in t.incidents)
    counts: dict[str, tuple[object, object]] = {"incidents": (t.figures.incidents, dict(incidents))}
    if not _torn(t):
        turns = [turn for s in t.sequences for turn in s.turns]
        sampled = sum(turn.completion_tokens for turn in turns)
        counts |= {
            "calls": (t.figures.calls, len({turn.call for turn in turns})),
            "turns": (t.figures.turns, len(turns)),
            "sequences": (t.figures.sequences, len(t.sequences)),
            "trainable_tokens": (t.figures.trainable_tokens, total),
            "masked_tokens": (t.figures.masked_tokens, sum(len(s.token_ids) for s in t.sequences) - total),
            "untrainable_tokens": (t.figures.untrainable_tokens, sampled - total),
            "versions": (t.figures.versions, dict(sum((Counter(s.versions) for s in t.sequences), Counter()))),
            "mixed_tokens": (t.figures.mixed_tokens, sum(s.mixed_tokens for s in t.sequences)),
            "matches": (t.figures.matches, dict(Counter(turn.match for turn in turns))),
            "forgiven": (t.figures.forgiven, dict(Counter(rule for turn in turns for rule in turn.forgiven))),
        }
    for name, (figure, actual) in counts.items():
        if figure != actual:
            yield CheckFailure(session="", check="figures", words=f"{name} are {figure}, the export has {actual}")


def _complete(t: Trajectory) -> Iterator[CheckFailure]:
    missing = holes(t)
    if t.complete == bool(missing):
        why = f"incidents report missing data: {', '.join(missing)}" if missing else "no incident reports missing data"
        yield CheckFailure(session="", check="complete", words=f"complete is {str(t.complete).lower()}, but {why}")
    if not t.valid and t.complete and t.outcome == OutcomeKind.OK:
        yield CheckFailure(session="", check="complete", words="valid is false, but it is complete and its outcome is ok")

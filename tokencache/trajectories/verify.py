"""Verify: what must hold of an exported trajectory, checked with nothing but the export.

A file may have been written by an old version, cut, merged, edited or damaged since it left the proxy. All of this shows,
for an export says the same thing more than once: every turn carries the hashes of its ids and of its log probabilities,
every range has a neighbour, every figure can be counted again.

===========  =========================================================================================================
`aligned`    ids, mask and log probabilities have one length, which the turns part in order and without a gap
`trained`    mask 1 on what was sampled with log probabilities, and nowhere else; log probabilities at most 0 there, 0.0
             elsewhere, all of them numbers
`hashes`     ids and log probabilities are those that were recorded: the hashes of every prefix, of every completion and of
             its log probabilities, computed again
`lineage`    a turn with a parent stands behind all its tokens, in the same sequence or, branching off, in another
`anchors`    the replies that a `resplice` names stand where it says
`once`       each turn and each sequence is there once
`labels`     `start`, `reason`, `parent`, `root`, `continued`, `tools` say what the turns say
`figures`    the figures, weights and lengths are those of the sequences
`complete`   is what the incidents say
===========  =========================================================================================================

What no export can show is in `NOT_CHECKED`. Nothing here raises for a trajectory that is wrong, however wrong.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

import msgspec
import xxhash

from tokencache.core import ids
from tokencache.core.match import DISAGREED
from tokencache.core.turn import hash_ids, hash_logprobs
from tokencache.trajectories.values import Sequence, Trajectory, TurnSpan

Range = tuple[int, int]
"""A half-open range of a sequence's tokens."""

NOT_CHECKED = (
    "that the engine saw and said these very ids (its own books are not in an export)",
    "that a spliced prompt reads as the template renders it (this needs the template)",
    "the log probabilities of a turn without logprobs_hash (an older version recorded it), beyond being numbers that are at most 0",
)

AROUND = 10
"""So many tokens are shown on either side of a break."""

_WITHIN = 6
_STARTS = ("root", "branch", "resplice", "plain")
_WEIGHT_SLACK = 1e-9


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that does not hold, and where.

    Attributes:
        check: which of the checks found it.
        token: index in the sequence of the first token concerned; `None` where it concerns no token.
        around: the ids there in brackets, with their neighbours: `… 11 12 [13] 14 15 …`.
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
        return f"{where}: {self.words} ({self.check})" + (f"\n    {self.around}" if self.around else "")


def verify(trajectory: Trajectory) -> list[Break]:
    """Check a trajectory; an empty list says that all holds.

    They come in the order of the table above, so the first is the nearest to the cause: where the ranges of a sequence's
    turns are wrong already, its tokens are not looked at further.
    """
    found: list[Break] = []
    sound = []
    for sequence in trajectory.sequences:
        broken = [*_aligned(sequence)]
        if not broken:
            sound.append(sequence)
            broken += [*_trained(sequence), *_hashes(sequence)]
        found += broken
    homes = _homes(trajectory)
    found += [*_lineage(trajectory, homes, sound), *_anchors(homes, sound), *_once(trajectory), *_labels(trajectory, homes)]
    found += [*_figures(trajectory), *_complete(trajectory)]
    return [msgspec.structs.replace(one, session=trajectory.session) for one in found]


def around(token_ids: list[int], start: int, end: int) -> str:
    """Show the ids of a range in brackets, with ten on either side; of a long range its ends."""
    before, behind = max(0, start - AROUND), min(len(token_ids), end + AROUND)
    within = [str(i) for i in token_ids[start:end]]
    if len(within) > _WITHIN:
        within = [*within[: _WITHIN // 2], "…", *within[-_WITHIN // 2 :]]
    parts = [str(i) for i in token_ids[before:start]] + [f"[{' '.join(within)}]"] + [str(i) for i in token_ids[end:behind]]
    return " ".join([*(["…"] if before else []), *parts, *(["…"] if behind < len(token_ids) else [])])


def holes(trajectory: Trajectory) -> Counter[str]:
    """Count the incidents that make a trajectory incomplete, by kind."""
    return Counter(incident.kind for incident in trajectory.incidents if incident.hole)


def _torn(trajectory: Trajectory) -> bool:
    """Whether the records could not be put together: then no sequence came, and the figures speak of turns that are not here."""
    return not trajectory.sequences and "torn-record" in holes(trajectory)


class _Home(NamedTuple):
    """Where a turn stands: its sequence, and the turn itself."""

    sequence: Sequence
    turn: TurnSpan


def _homes(trajectory: Trajectory) -> dict[str, _Home]:
    return {turn.turn: _Home(sequence, turn) for sequence in trajectory.sequences for turn in sequence.turns}


def _at(check: str, words: str, sequence: Sequence, turn: TurnSpan | None = None, where: Range | int | None = None) -> Break:
    """Make a break; the session is put in later. `where` is a range of tokens, or one."""
    span = (where, where + 1) if isinstance(where, int) else where
    return Break(
        session="",
        check=check,
        words=words,
        sequence=sequence.id,
        turn=turn.turn if turn else "",
        token=span[0] if span else None,
        around=around(sequence.token_ids, *span) if span else "",
    )


def _aligned(s: Sequence) -> Iterator[Break]:
    sizes = (len(s.token_ids), len(s.loss_mask), len(s.logprobs))
    if len(set(sizes)) != 1:
        yield _at("aligned", f"{sizes[0]} token ids, {sizes[1]} mask entries and {sizes[2]} log probabilities", s)
    if not s.turns:
        yield _at("aligned", "holds no turn", s)
    at = 0
    for turn in s.turns:
        (start, middle), (again, end) = turn.prompt, turn.completion
        if start != at or again != middle or not start <= middle <= end:
            yield _at("aligned", f"prompt {turn.prompt} and completion {turn.completion} do not go on from token {at}", s, turn)
            return
        if (middle, end - again) != (turn.prompt_tokens, turn.completion_tokens):
            words = f"prompt ends at {middle} and completion has {end - again} tokens, recorded were {turn.prompt_tokens} and"
            yield _at("aligned", f"{words} {turn.completion_tokens}", s, turn)
        at = end
    if s.turns and at != sizes[0]:
        yield _at("aligned", f"its turns end at token {at}, its ids at {sizes[0]}", s)


def _trained(s: Sequence) -> Iterator[Break]:
    """Check mask and log probabilities; of each turn only the first token that is wrong is told."""
    for turn in s.turns:
        trained = int("no-logprobs" not in turn.marks)
        for (start, end), mask, words in ((turn.prompt, 0, "is context"), (turn.completion, trained, _SAMPLED[trained])):
            for i in range(start, end):
                value = s.logprobs[i]
                if s.loss_mask[i] != mask:
                    yield _at("trained", f"{words}, and has loss mask {s.loss_mask[i]}", s, turn, i)
                    break
                if not (math.isfinite(value) and value <= 0.0 if mask else value == 0.0):
                    yield _at("trained", f"{words}, and has log probability {value}", s, turn, i)
                    break


_SAMPLED = ("was sampled and its log probability is missing", "was sampled")


def _hashes(s: Sequence) -> Iterator[Break]:
    prefix = xxhash.xxh3_128()
    same = True
    for turn in s.turns:
        try:
            new, said = ids.pack(s.token_ids[slice(*turn.prompt)]), ids.pack(s.token_ids[slice(*turn.completion)])
        except OverflowError:
            yield _at("hashes", "an id is no int32", s, turn)
            return
        prefix.update(new)
        prefix.update(said)
        genuine = hash_ids(said).hex() == turn.completion_hash
        if not genuine:
            yield _at("hashes", f"tokens {_range(turn.completion)} are not those that were sampled", s, turn, turn.completion)
        if same and prefix.hexdigest() != turn.prefix_hash:
            same = False  # and so will be those of all turns behind it
            if genuine:
                yield _at("hashes", f"tokens {_range(turn.prompt)} are not those that it was sampled behind", s, turn, turn.prompt)
        if turn.logprobs_hash and not _same_logprobs(s, turn):
            words = f"the log probabilities of tokens {_range(turn.completion)} are not those that were recorded"
            yield _at("hashes", words, s, turn, turn.completion)


def _same_logprobs(s: Sequence, turn: TurnSpan) -> bool:
    return hash_logprobs(ids.pack_logprobs(s.logprobs[slice(*turn.completion)])).hex() == turn.logprobs_hash


def _range(span: Range) -> str:
    return f"{span[0]} to {span[1]}"


def _lineage(trajectory: Trajectory, homes: dict[str, _Home], sound: Collection[Sequence]) -> Iterator[Break]:
    for s in trajectory.sequences:
        before: TurnSpan | None = None
        for turn in s.turns:
            home = homes.get(turn.parent or "")
            if (turn.parent is not None) != (turn.match in {"continue", "branch"}):
                yield _at("lineage", f"is a {turn.match} and has {'a' if turn.parent else 'no'} parent", s, turn)
            elif before is not None and turn.parent != before.turn:
                yield _at("lineage", f"stands behind turn {before.turn}, its parent is {turn.parent}", s, turn)
            elif turn.parent is not None and home is None:
                yield _at("lineage", f"its parent {turn.parent} is in no sequence", s, turn)
            elif turn.origin is not None and turn.origin not in homes:
                yield _at("lineage", f"the turn {turn.origin} that it took its context from is in no sequence", s, turn)
            if home is not None and DISAGREED in home.turn.marks:
                yield _at("lineage", f"goes on from turn {turn.parent}, which is marked {DISAGREED}", s, turn)
            if before is None and home is not None and home.sequence is not s and s in sound and home.sequence in sound:
                yield from _branched(s, turn, home)
            before = turn


def _branched(s: Sequence, turn: TurnSpan, home: _Home) -> Iterator[Break]:
    """Check that a branch repeats all tokens of its parent, which stand in another sequence."""
    end = home.turn.completion[1]
    whole, own = home.sequence.token_ids[:end], s.token_ids[: turn.prompt[1]][:end]
    if own != whole:
        at = next((i for i, (a, b) in enumerate(zip(own, whole, strict=False)) if a != b), len(own))
        yield _at("lineage", f"leaves the prefix of its parent {turn.parent} (sequence {home.sequence.id}) here", s, turn, at)


def _anchors(homes: dict[str, _Home], sound: Collection[Sequence]) -> Iterator[Break]:
    for s in sound:
        for turn in s.turns:
            for anchor in turn.anchors:
                home = homes.get(anchor.turn)
                if home is None:
                    yield _at("anchors", f"names turn {anchor.turn}, which is in no sequence", s, turn)
                elif not 0 <= anchor.start <= anchor.end <= turn.prompt[1]:
                    yield _at("anchors", f"the anchor of {anchor.turn} lies beyond the prompt", s, turn)
                elif home.sequence in sound and (at := _strays(s, (anchor.start, anchor.end), home)) is not None:
                    yield _at("anchors", f"is not what turn {anchor.turn} sampled", s, turn, at)


def _strays(s: Sequence, span: Range, home: _Home) -> int | None:
    """Find the first token of an anchor that its turn did not sample."""
    stands, said = s.token_ids[slice(*span)], home.sequence.token_ids[slice(*home.turn.completion)]
    if len(stands) > len(said):
        return span[0] + len(said)
    return next((span[0] + i for i, (a, b) in enumerate(zip(stands, said, strict=False)) if a != b), None)


def _once(trajectory: Trajectory) -> Iterator[Break]:
    turns = Counter(turn.turn for sequence in trajectory.sequences for turn in sequence.turns)
    for turn, n in turns.items():
        if n > 1:
            yield Break(session="", check="once", words=f"is there {n} times", turn=turn)
    for sequence, n in Counter(sequence.id for sequence in trajectory.sequences).items():
        if n > 1:
            yield Break(session="", check="once", words=f"is there {n} times", sequence=sequence)


def _labels(trajectory: Trajectory, homes: dict[str, _Home]) -> Iterator[Break]:
    parents = {turn.parent for sequence in trajectory.sequences for turn in sequence.turns}
    root_of: dict[str, str] = {}
    for s in trajectory.sequences:
        if not s.turns:
            continue
        first = s.turns[0]
        home = homes.get(first.parent or first.origin or "")
        root = root_of[s.id] = root_of.get(home.sequence.id if home else "", s.id)  # a parent stands before its branches
        told: dict[str, tuple[object, object]] = {
            "id": (s.id, first.turn),
            "start": (s.start, "branch" if first.match == "continue" else first.match),
            "reason": (s.reason, first.reason),
            "parent": (s.parent, home.sequence.id if home else None),
            "root": (s.root, root if s.root else ""),  # an older version wrote none
            "continued": (s.continued, any(turn.turn in parents for turn in s.turns)),
            "tools": (s.tools, first.tools),
        }
        for name, (says, is_so) in told.items():
            if says != is_so:
                yield _at("labels", f"says {name} {says!r}, its turns say {is_so!r}", s)
        if s.start not in _STARTS:
            yield _at("labels", f"starts with {s.start!r}, which is none of {', '.join(_STARTS)}", s)


def _figures(t: Trajectory) -> Iterator[Break]:
    trainable = [sum(1 for mask in s.loss_mask if mask == 1) for s in t.sequences]
    total = sum(trainable)
    for s, own in zip(t.sequences, trainable, strict=True):
        if (s.tokens, s.trainable_tokens) != (len(s.token_ids), own):
            words = f"says {s.tokens} tokens and {s.trainable_tokens} trainable ones, there are {len(s.token_ids)} and {own}"
            yield _at("figures", words, s)
        share = own / total if total else 0.0
        if not abs(s.weight - share) <= _WEIGHT_SLACK:  # a weight that is no number is wrong, too
            yield _at("figures", f"has weight {s.weight}, its share of the trainable tokens is {share}", s)
    incidents = Counter(incident.kind for incident in t.incidents)
    counted: dict[str, tuple[object, object]] = {"incidents": (t.figures.incidents, dict(incidents))}
    if not _torn(t):
        turns = [turn for s in t.sequences for turn in s.turns]
        sampled = sum(turn.completion_tokens for turn in turns)
        counted |= {
            "calls": (t.figures.calls, len({turn.call for turn in turns})),
            "turns": (t.figures.turns, len(turns)),
            "sequences": (t.figures.sequences, len(t.sequences)),
            "trainable_tokens": (t.figures.trainable_tokens, total),
            "masked_tokens": (t.figures.masked_tokens, sum(len(s.token_ids) for s in t.sequences) - total),
            "untrainable_tokens": (t.figures.untrainable_tokens, sampled - total),
            "matches": (t.figures.matches, dict(Counter(turn.match for turn in turns))),
            "forgiven": (t.figures.forgiven, dict(Counter(rule for turn in turns for rule in turn.forgiven))),
        }
    for name, (says, is_so) in counted.items():
        if says != is_so:
            yield Break(session="", check="figures", words=f"{name} are {says}, the export holds {is_so}")


def _complete(t: Trajectory) -> Iterator[Break]:
    missing = holes(t)
    if t.complete == bool(missing):
        why = f"incidents say that something is missing: {', '.join(missing)}" if missing else "no incident says what is missing"
        yield Break(session="", check="complete", words=f"complete is {str(t.complete).lower()}, and {why}")

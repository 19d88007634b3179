"""The window: a sequence's tokens, a few at a time, and what each of them is.

A sequence of a hundred thousand tokens is held packed, as the store keeps it, and unpacked where somebody looks. What its
tokens are is said in *runs*, ranges of one kind:

=========  ==========================================================================================================
`prompt`   what the first turn was given: the harness's words, as the template writes them
`earlier`  a reply within that prompt which an earlier sequence sampled and trains; here it is context (`branch`)
`anchor`   the same in an edited context: a recognised reply that stands with its exact ids (`resplice`)
`tail`     what stands between two replies: end of turn, new messages, generation prompt
`sampled`  sampled by the policy in this sequence: mask 1
`unscored` sampled, too, but without log probabilities: mask 0
=========  ==========================================================================================================
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from tokencache.api.viewer.outline import scored
from tokencache.core import ids
from tokencache.core.turn import Tokens, Turn, hash_ids

Kind = Literal["prompt", "earlier", "anchor", "tail", "sampled", "unscored"]


class Run(msgspec.Struct, frozen=True):
    """Tokens of one kind, a half-open range; `turn` is who sampled them, or whose prompt they are in."""

    start: int
    end: int
    kind: Kind
    turn: str


class Line(msgspec.Struct, frozen=True):
    """A sequence laid out: its packed ids, its runs, and the log probabilities of the turns in it, packed."""

    turns: tuple[Turn, ...]
    packed: bytes
    runs: tuple[Run, ...]
    logprobs: Mapping[str, bytes]

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return ids.count(self.packed)

    def ids(self, start: int, end: int) -> list[int]:
        """The ids of a range."""
        return ids.unpack(self.packed[start * ids.ID_BYTES : end * ids.ID_BYTES])

    def values(self, start: int, end: int) -> list[float | None]:
        """The log probabilities of a range; `None` for every token with mask 0."""
        found: list[float | None] = [None] * (end - start)
        for turn in self.turns:
            first, last = turn.prompt_tokens, turn.prompt_tokens + turn.completion_tokens
            if first < end and last > start and scored(turn):
                low, high = max(first, start), min(last, end)
                found[low - start : high - start] = ids.unpack_logprobs(self.logprobs[turn.id])[low - first : high - first]
        return found


def lay_out(line: Sequence[Turn], packed: bytes, tokens: Mapping[str, Tokens], turns: Mapping[str, Turn]) -> Line:
    """Lay out a sequence.

    Args:
        line: its turns, each continuing the one before.
        packed: the ids of the last one's prefix.
        tokens: the tokens of each turn.
        turns: all turns of the session, by id.

    Raises:
        ValueError: the prefix is not that of each turn: the records are torn.
    """
    for turn in line:
        if hash_ids(ids.head(packed, turn.prompt_tokens + turn.completion_tokens)) != turn.prefix_hash:
            raise ValueError(f"turn {turn.id}: the ids that are stored are not those that were recorded")
    runs: list[Run] = []
    for turn in line:
        at = runs[-1].end if runs else 0
        if runs:
            _add(runs, at, turn.prompt_tokens, "tail", turn.id)
        else:
            _first(runs, turn, packed, turns)
        _add(runs, turn.prompt_tokens, turn.prompt_tokens + turn.completion_tokens, "sampled" if scored(turn) else "unscored", turn.id)
    return Line(tuple(line), packed, tuple(runs), {turn.id: tokens[turn.id].logprobs for turn in line})


def _first(runs: list[Run], turn: Turn, packed: bytes, turns: Mapping[str, Turn]) -> None:
    """Part the prompt of a sequence's first turn: what was sampled elsewhere, and everything else."""
    at = 0
    for start, end, kind, whose in sorted(_replies(turn, packed, turns)):
        if start >= at and end <= turn.prompt_tokens:
            _add(runs, at, start, "prompt", turn.id)
            _add(runs, start, end, kind, whose)
            at = end
    _add(runs, at, turn.prompt_tokens, "prompt", turn.id)


def _replies(turn: Turn, packed: bytes, turns: Mapping[str, Turn]) -> list[tuple[int, int, Kind, str]]:
    """The replies that stand within a prompt with their exact ids: in front those of the turns that it goes on from."""
    found: list[tuple[int, int, Kind, str]] = [(anchor.start, anchor.end, "anchor", anchor.turn) for anchor in turn.anchors]
    before = turns.get(turn.parent or turn.origin or "")
    while before is not None:
        end = before.prompt_tokens + before.completion_tokens
        if end <= turn.prompt_tokens and hash_ids(ids.head(packed, end)) == before.prefix_hash:  # of an origin not all may stand
            found.append((before.prompt_tokens, end, "earlier", before.id))
        before = turns.get(before.parent or before.origin or "")
    return found


def _add(runs: list[Run], start: int, end: int, kind: Kind, turn: str) -> None:
    if end > start:
        runs.append(Run(start, end, kind, turn))

"""Finds the turns that a session shares with a fork of it, and marks them as not the fork's own."""

from collections.abc import Sequence

import msgspec

from tokencache.core.turn import Turn, TurnMark


def turns_to_share(turns: Sequence[Turn], last: str) -> list[Turn]:
    """Return the records of a fork after the turn `last`: this turn, and all that its prompt and its request refer to.

    They have the mark `shared` and no log probabilities, so the fork does not train their tokens (`TurnMark.SHARED`).

    Args:
        turns: the turns of the session, in the order in which they were recorded.
        last: the id of the turn after which the fork begins.

    Raises:
        KeyError: there is no such turn.
    """
    by_id = {turn.id: turn for turn in turns}
    needed, left = set(), [by_id[last].id]
    while left:
        turn = by_id[left.pop()]
        needed.add(turn.id)
        named = {turn.parent, turn.origin, turn.base, turn.context_base, *(anchor.turn for anchor in turn.anchors)}
        left += [name for name in named if name is not None and name in by_id and name not in needed]
    return [_shared(turn) for turn in turns if turn.id in needed]


def _shared(turn: Turn) -> Turn:
    marks = turn.marks if TurnMark.SHARED in turn.marks else (*turn.marks, TurnMark.SHARED)
    return msgspec.structs.replace(turn, marks=marks, logprobs_hash=b"", logprob_kind="")

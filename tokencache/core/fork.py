"""Finds the turns that a session shares with a fork of it, and marks them as not the fork's own."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from tokencache.core.turn import Turn, TurnMark


def turns_to_share(turns: Sequence[Turn], last: str) -> list[Turn]:
    """Return the records of a fork after the turn `last`: this turn, and all that its prompt, its request and its storage refer to.

    They have the mark `shared` and no log probabilities, so the fork does not train their tokens (`TurnMark.SHARED`). Those that only the
    storage refers to, such as a retry that was discarded, have the mark `not-in-history`, too: no call of the fork continues them.

    Args:
        turns: the turns of the session, in the order in which they were recorded.
        last: the id of the turn after which the fork begins.

    Raises:
        KeyError: there is no such turn.
    """
    by_id = {turn.id: turn for turn in turns}
    history = _reached(by_id, last, _in_history)
    needed = _reached(by_id, last, lambda turn: (*_in_history(turn), turn.base, turn.context_base))
    return [_shared(turn, in_history=turn.id in history) for turn in turns if turn.id in needed]


def _in_history(turn: Turn) -> tuple[str | None, ...]:
    return turn.parent, turn.origin, *(anchor.turn for anchor in turn.anchors)


def _reached(turns: Mapping[str, Turn], first: str, named_by: Callable[[Turn], Iterable[str | None]]) -> set[str]:
    """Return the ids of the turns that a turn refers to, directly or through others, and its own."""
    found, left = set[str](), [first]
    while left:
        found.add(name := left.pop())
        left += [other for other in named_by(turns[name]) if other is not None and other in turns and other not in found]
    return found


def _shared(turn: Turn, *, in_history: bool) -> Turn:
    marks = [mark for mark in turn.marks if mark not in {TurnMark.SHARED, TurnMark.NOT_IN_HISTORY}]
    marks += [TurnMark.SHARED] if in_history else [TurnMark.SHARED, TurnMark.NOT_IN_HISTORY]
    return msgspec.structs.replace(turn, marks=tuple(marks), logprobs_hash=b"", logprob_kind="")

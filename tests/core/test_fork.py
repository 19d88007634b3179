"""Which turns a fork shares, and which of them are in its history."""

import pytest

from tokencache.core.fork import turns_to_share
from tokencache.core.turn import Anchor, Turn

SESSION = [
    Turn(id="root", call="1", match="root"),
    Turn(id="discarded", call="2", match="continue", parent="root", base="root"),
    Turn(id="retry", call="3", match="continue", parent="root", base="discarded", context_base="root", marks=("aborted",)),
    Turn(id="edited", call="4", match="resplice", anchors=(Anchor("retry", 1, 2),), base="discarded"),
    Turn(id="later", call="5", match="continue", parent="edited", base="edited"),
]


def marked(turns):
    return {turn.id: turn.marks for turn in turns}


@pytest.mark.parametrize("last", ["retry", "edited"])
def test_what_only_the_storage_refers_to_is_shared_and_is_not_in_the_history(last):
    shared = marked(turns_to_share(SESSION, last))
    assert shared == {
        "root": ("shared",),
        "discarded": ("shared", "not-in-history"),
        "retry": ("aborted", "shared"),
    } | ({"edited": ("shared",)} if last == "edited" else {})


def test_a_fork_of_a_fork_has_the_marks_once_and_a_turn_after_which_it_begins_is_in_its_history():
    fork = turns_to_share(SESSION, "retry")
    assert marked(turns_to_share(fork, "retry")) == marked(fork)
    assert marked(turns_to_share(fork, "discarded")) == {"root": ("shared",), "discarded": ("shared",)}


def test_a_turn_that_does_not_exist_is_refused():
    with pytest.raises(KeyError):
        turns_to_share(SESSION, "missing")

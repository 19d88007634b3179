"""Replies in a resplice: their place, their exact ids, and the generation prompts before them."""

import pytest

from tokencache.core import ids
from tokencache.core.splice import fill

STOP, OTHER, OPENER = 9, 7, 2


@pytest.mark.parametrize(
    ("reply", "prompt", "end"),
    [
        ([3, 4, STOP], [1, OPENER, 3, 4, STOP, 5, 6], 5),  # it ends as the template ends a turn
        ([3, 4], [1, OPENER, 3, 4, STOP, 5, 6], 4),  # it was cut: the template ends it
        ([3, 4, OTHER], [1, OPENER, 3, 4, STOP, 5, 6], 4),  # it stopped elsewhere: that id is the template's, and the reply ends before it
    ],
)
def test_a_reply_has_its_sampled_ids_and_no_others(reply, prompt, end):
    joined, spans = fill([ids.pack([1]), ids.pack([STOP, 5, 6])], [ids.pack([OPENER])], [ids.pack(reply)], {STOP, OTHER})
    assert ids.unpack(joined) == prompt
    assert spans == [(2, end)]
    assert prompt[2:end] == reply[: end - 2]


def test_each_reply_follows_the_generation_prompt_that_it_was_sampled_after():
    pieces = [ids.pack([1]), ids.pack([STOP, 5]), ids.pack([STOP, 6, OPENER])]
    joined, spans = fill(pieces, [ids.pack([OPENER]), ids.pack([OPENER, 8])], [ids.pack([30]), ids.pack([40])], {STOP})
    assert ids.unpack(joined) == [1, OPENER, 30, STOP, 5, OPENER, 8, 40, STOP, 6, OPENER]
    assert spans == [(2, 3), (7, 8)]

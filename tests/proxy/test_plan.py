"""Planning: where a recognised reply stands in a respliced prompt."""

import pytest

from tokencache.core import ids
from tokencache.core.evidence import Standing
from tokencache.core.turn import Anchor, Turn
from tokencache.proxy.plan import _filled

STOP, OTHER, OPENER = 9, 7, 2


@pytest.mark.parametrize(
    ("reply", "prompt", "end"),
    [
        ([3, 4, STOP], [1, OPENER, 3, 4, STOP, 5, 6], 5),  # it ends as the template ends a turn
        ([3, 4], [1, OPENER, 3, 4, STOP, 5, 6], 4),  # it was cut: the template ends it
        ([3, 4, OTHER], [1, OPENER, 3, 4, STOP, 5, 6], 4),  # it stopped elsewhere: that id is the template's, and the anchor ends before it
    ],
)
def test_an_anchor_holds_what_was_sampled_and_nothing_else(reply, prompt, end):
    said = Standing(1, Turn(id="t", call="c", match="root"), 0, len(reply))
    pieces = [ids.pack([1]), ids.pack([STOP, 5, 6])]
    joined, (stands,) = _filled(pieces, [ids.pack([OPENER])], [(said, ids.pack(reply))], {STOP, OTHER})
    assert ids.unpack(joined) == prompt
    assert stands.anchor == Anchor("t", 2, end, 1)
    assert prompt[2:end] == reply[: end - 2]


def test_each_reply_stands_behind_the_generation_prompt_it_was_sampled_behind():
    turn = Turn(id="t", call="c", match="root")
    replies = [(Standing(place, turn, 0, 1), ids.pack([said])) for place, said in ((1, 30), (3, 40))]
    pieces = [ids.pack([1]), ids.pack([STOP, 5]), ids.pack([STOP, 6, OPENER])]
    joined, stands = _filled(pieces, [ids.pack([OPENER]), ids.pack([OPENER, 8])], replies, {STOP})
    assert ids.unpack(joined) == [1, OPENER, 30, STOP, 5, OPENER, 8, 40, STOP, 6, OPENER]
    assert [(stand.start, stand.end) for stand in stands] == [(2, 3), (7, 8)]

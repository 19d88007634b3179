"""Planning: where a recognised reply stands in a respliced prompt."""

from types import SimpleNamespace

import pytest

from tokencache.core import ids
from tokencache.core.turn import Anchor
from tokencache.dialects.chat.call import read_chat
from tokencache.dialects.chat.growth import Bodies
from tokencache.proxy.plan import Planner

STOP, OTHER = 9, 7
CALL = read_chat(b'{"model":"m","messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}', Bodies())


class Tails:
    async def tail(self, ask):
        return ids.pack([STOP, 5, 6])


@pytest.mark.parametrize(
    ("reply", "prompt", "end"),
    [
        ([3, 4, STOP], [1, 2, 3, 4, STOP, 5, 6], 5),  # it ends as the template ends a turn
        ([3, 4], [1, 2, 3, 4, STOP, 5, 6], 4),  # it was cut: the template ends it
        ([3, 4, OTHER], [1, 2, 3, 4, STOP, 5, 6], 4),  # it stopped elsewhere: that id is the template's, and the anchor ends before it
    ],
)
async def test_an_anchor_holds_what_was_sampled_and_nothing_else(reply, prompt, end):
    model = SimpleNamespace(tails=Tails(), stop_ids={STOP, OTHER})
    anchors = [Anchor("t", 2, 2 + len(reply))]
    joined = await Planner._behind(CALL, ids.pack([1, 2, *reply]), 2, 2, model=model, anchors=anchors)
    assert ids.unpack(joined) == prompt
    assert anchors == [Anchor("t", 2, end)]
    assert prompt[2:end] == reply[: end - 2]

"""A turn is continued only after the prompt that it was sampled after: not if the engine used another, nor if two prompts are possible."""

import msgspec
import pytest

from tokencache.core import evidence
from tokencache.core.chain import build_conversation, turn_keys
from tokencache.core.match import Hit, match
from tokencache.core.messages import Message, digest
from tokencache.core.reasons import Reason
from tokencache.core.rules import STRICT
from tokencache.core.turn import Turn, TurnMark

ASKED, SERVED, NEXT = Message("user", "one"), Message("assistant", "OK"), Message("user", "two")
CONVERSATION = build_conversation(b"", [ASKED])
TURN = Turn(
    id="t1",
    call="c1",
    match="root",
    served=SERVED,
    prefix_hash=b"prompt 1, reply",
    completion_hash=b"reply",
    position_key=CONVERSATION.chain[-1],
    judged=evidence.judged_hash(CONVERSATION, 1, STRICT, {}),
    before=evidence.preceding_hash(CONVERSATION, 1),
    messages=1,
)
TWIN = msgspec.structs.replace(TURN, id="t2", call="c2")


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([TURN], ("continue", "", "t1")),
        ([msgspec.structs.replace(TURN, marks=(TurnMark.ENGINE_DISAGREES,))], ("plain", Reason.ENGINE_DISAGREES, None)),
        ([TURN, TWIN], ("continue", "", "t1")),
        ([TURN, msgspec.structs.replace(TWIN, prefix_hash=b"prompt 2, reply")], ("resplice", Reason.CONTEXT_EDITED, None)),
        ([TURN, msgspec.structs.replace(TWIN, prefix_hash=b"other", completion_hash=b"other")], ("plain", Reason.AMBIGUOUS_REPLY, None)),
    ],
)
def test_which_turn_is_continued(turns, expected):
    hits = {key: [Hit(turn) for turn in turns] for key in turn_keys(CONVERSATION, SERVED, digest(SERVED))}
    found = match(build_conversation(b"", [ASKED, SERVED, NEXT]), hits, turns={turn.id: turn for turn in turns})
    assert (found.kind, found.reason, found.parent and found.parent.id) == expected

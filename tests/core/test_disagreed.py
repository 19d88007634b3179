"""A turn whose prompt the engine did not use is in the record, and no later call continues it."""

import pytest

from tokencache.core import evidence
from tokencache.core.chain import build_conversation, turn_keys
from tokencache.core.match import Hit, match
from tokencache.core.messages import Message, digest
from tokencache.core.reasons import Reason
from tokencache.core.rules import STRICT
from tokencache.core.turn import Turn, TurnMark

ASKED, SERVED, NEXT = Message("user", "one"), Message("assistant", "OK"), Message("user", "two")


@pytest.mark.parametrize(
    ("marks", "expected"),
    [((), ("continue", "", "t1")), ((TurnMark.ENGINE_DISAGREES,), ("plain", Reason.ENGINE_DISAGREES, None))],
)
def test_a_turn_after_another_prompt_is_not_continued(marks, expected):
    asked = build_conversation(b"", [ASKED])
    turn = Turn(
        id="t1",
        call="c1",
        match="root",
        served=SERVED,
        prefix_hash=b"p",
        completion_hash=b"c",
        position_key=asked.chain[-1],
        judged=evidence.judged_hash(asked, 1, STRICT, {}),
        before=evidence.preceding_hash(asked, 1),
        messages=1,
        marks=marks,
    )
    hits = {key: [Hit(turn)] for key in turn_keys(asked, SERVED, digest(SERVED))}
    found = match(build_conversation(b"", [ASKED, SERVED, NEXT]), hits, turns={"t1": turn})
    assert (found.kind, found.reason, found.parent and found.parent.id) == expected

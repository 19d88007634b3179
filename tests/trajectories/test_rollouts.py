"""The rollouts that the tests of this room share are what they say, and break none of the invariants."""

import msgspec
import pytest

from tests.support import invariants
from tests.trajectories.rollouts import ROLLOUTS, SESSIONS, linear, text, torn, turn_of
from tokencache.core import ids


@pytest.mark.parametrize("name", SESSIONS)
def test_the_proxy_could_have_recorded_each_session(name):
    records = SESSIONS[name]
    assert invariants.audit(records.turns, records.tokens) == []
    made = ROLLOUTS[name]
    assert "torn-record" not in made.figures.incidents
    for turn in records.turns:
        if records.contexts[turn.id]:
            assert len(made.contexts[turn.id].messages) == turn.messages
            assert bool(made.contexts[turn.id].tools) == bool(turn.tools)
        assert all(a.end - a.start == turn_of(made, a.turn).completion_tokens for a in turn.anchors)


def test_the_sessions_have_the_shapes_of_their_names():
    def shape(name):
        return [(s.start, len(s.turns), s.continued, s.parent) for s in ROLLOUTS[name].sequences]

    assert shape("linear") == [("root", 3, True, None)]
    assert shape("thrown-away") == [("root", 3, True, None), ("branch", 1, False, "t0")]
    assert shape("sub-agent") == [("root", 1, False, None), ("root", 2, True, None), ("root", 2, True, None)]
    assert shape("respliced") == [("root", 2, True, None), ("resplice", 2, True, "t0")]
    assert shape("aborted") == [("root", 2, True, None), ("branch", 1, False, "t0")]
    assert shape("unrecognized") == [("root", 1, False, None), ("plain", 1, False, None)]
    assert shape("choices") == [("root", 1, False, None), ("root", 2, True, None)]
    assert shape("empty") == shape("lost") == []
    assert [name for name, made in ROLLOUTS.items() if not made.complete] == ["aborted", "lost"]


def test_respliced_replies_keep_their_exact_ids():
    made = ROLLOUTS["respliced"]
    first = made.sequences[1].turns[0]
    for anchor in first.turn.anchors:
        own = SESSIONS["respliced"].tokens[anchor.turn].completion
        assert made.sequences[1].token_ids[anchor.start : anchor.end] == ids.unpack(own)


def test_ids_decode_to_the_conversation():
    (line,) = ROLLOUTS["linear"].sequences
    assert "<tool_call>" in text(line.token_ids)
    assert text(line.token_ids).endswith("<think>Only b.py.</think>There is no a.py.<|end|>")


def test_torn_records_have_no_sequences():
    made = torn()
    assert not made.complete
    assert made.sequences == ()
    assert msgspec.to_builtins(made.figures)["incidents"] == {"torn-record": 1}
    assert linear().records().turns

"""Harness rules from outside the package: registered, they recognize what a harness of their own does to replies."""

import msgspec
import pytest

from tokencache.adapters.schema import Mutations
from tokencache.core.chain import build_conversation, lookup_keys, turn_keys
from tokencache.core.match import Hit, match
from tokencache.core.messages import Message, ToolCall, digest
from tokencache.core.reasons import Reason
from tokencache.core.rules import RULES, Leniency, Rule, register
from tokencache.core.turn import Turn
from tokencache.core.verdict import judge

SHOUTING = Rule(
    name="shouting",
    kind="harness",
    verdict="rewritten",
    harnesses=("Toy",),
    what="the text in capitals",
    source="tests/core/test_toy_rule.py",
    part="text",
    rewrites_text=str.upper,
)
UNNOTED = Rule(
    name="unnoted",
    kind="harness",
    verdict="rewritten",
    harnesses=("Toy",),
    what="the member `note` is not returned",
    source="tests/core/test_toy_rule.py",
    explains_member=lambda _, member, served, echoed: member == "note" and isinstance(served, str) and echoed is msgspec.UNSET,
)
TOY = Leniency(harness_rules=frozenset({"shouting"}))
SERVED, ECHOED = Message("assistant", "It is done."), Message("assistant", "IT IS DONE.")
ASKED = Message("user", "Do it.")


@pytest.fixture(autouse=True)
def _registered():
    register(SHOUTING)
    register(UNNOTED)
    yield
    del RULES["shouting"], RULES["unnoted"]


def test_the_rule_explains_the_reply():
    verdict = judge(SERVED, ECHOED, TOY)
    assert (verdict.kind, verdict.rules, verdict.supplied) == ("rewritten", ("shouting",), True)
    assert judge(SERVED, Message("assistant", "IT IS NOT."), TOY).kind == "foreign"


@pytest.mark.parametrize(
    ("served", "echoed", "supplied"),
    [
        ('{"cmd": "ls", "note": "x"}', '{"cmd": "ls"}', True),
        ('{"note": "x"}', "{}", True),
        ('{"cmd": "ls", "note": "x"}', '{"note": "x"}', False),
        ('{"cmd": "ls", "note": "x"}', '{"cmd": "l"}', False),
        ('{"cmd": "ls", "note": 1}', '{"cmd": "ls"}', False),
        ('{"cmd": "ls"}', '{"cmd": "ls", "note": "x"}', False),
    ],
)
def test_a_rule_sees_the_member_that_a_harness_drops(served, echoed, supplied):
    toy = Leniency(harness_rules=frozenset({"unnoted"}))
    ours, theirs = (Message("assistant", calls=(ToolCall("call_1", "bash", arguments),)) for arguments in (served, echoed))
    assert judge(ours, theirs, toy).supplied is supplied
    assert not judge(ours, theirs).supplied


def test_the_rule_applies_only_where_the_adapter_names_it():
    assert Mutations(("shouting",)).rules == ("shouting",)
    assert not judge(SERVED, ECHOED).supplied
    assert not judge(SERVED, ECHOED, Leniency(off=frozenset({"shouting"}), harness_rules=TOY.harness_rules)).supplied


@pytest.mark.parametrize(("leniency", "kind", "reason"), [(TOY, "continue", ""), (Leniency(), "plain", Reason.UNRECOGNISED_REPLY)])
def test_a_history_with_the_rewritten_reply_continues_its_turn(leniency, kind, reason):
    asked = build_conversation(b"scope", [ASKED])
    turn = Turn(id="t", call="c", match="root", served=SERVED, messages=1, position_key=asked.chain[-1])
    known = {key: [Hit(turn)] for key in turn_keys(asked, SERVED, digest(SERVED), leniency=leniency)}
    history = build_conversation(b"scope", [ASKED, ECHOED, Message("user", "And now?")])
    found = match(history, {key: known.get(key, ()) for key in lookup_keys(history)}, leniency)
    assert (found.kind, found.reason) == (kind, reason)
    assert found.applied_rules == (("shouting",) if kind == "continue" else ())

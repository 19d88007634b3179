"""Matching, in a world that knows the truth: a match may be missing, it is never wrong."""

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokencache.core import invariants
from tokencache.core import match as matching
from tokencache.core.canonical import Call, Message, digest
from tokencache.core.chain import converse
from tokencache.core.lineage import sequences
from tokencache.core.match import Hit, keys_of_turn, match, wanted
from tokencache.core.turn import Turn
from tokencache.core.verdict import judge

from .settings import FEW
from .world import WrongMatchError, play


@FEW
@given(st.randoms(use_true_random=False))
def test_no_match_is_ever_wrong_and_all_invariants_hold(rng):
    world = play(rng)
    assert invariants.audit(world.turns, world.tokens) == []
    assert invariants.engine_agrees(world.turns, world.tokens, world.books) == []
    built = sequences(world.turns, world.tokens)
    trained = sum(sum(s.loss_mask) for s in built)
    assert trained == sum(t.completion_tokens for t in world.turns if "no-logprobs" not in t.marks)


def test_every_result_every_reason_and_every_rule_occurs():
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += play(random.Random(seed), 25).seen
    assert {"root", "continue", "branch", "resplice", "plain"} <= set(seen)
    assert {"ambiguous-reply", "rewritten-reply", "foreign-reply", "unrecognised-reply", "context-edited"} <= set(seen)
    assert {"content-shape", "whitespace", "args-json", "inline-think", "reasoning-dropped", "tool-ids"} <= set(seen)
    assert seen["continue"] > seen["plain"]


def _ignoring_ambiguity(echoed, hits, *, in_place):
    genuine = [f for f in (matching._Found(h, judge(h.turn.served, echoed)) for h in hits) if f.verdict.kind != "rewritten"]
    return genuine[0] if genuine else None


def _ignoring_reasoning(served, echoed):
    return judge(served, Message(echoed.role, echoed.text, None, echoed.calls))


def _ignoring_ids(served, echoed):
    if len(served.calls) != len(echoed.calls):
        return judge(served, echoed)
    calls = tuple(msgspec.structs.replace(theirs, id=ours.id) for ours, theirs in zip(served.calls, echoed.calls, strict=True))
    return judge(served, msgspec.structs.replace(echoed, calls=calls))


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("_choose", _ignoring_ambiguity),
        ("judge", _ignoring_reasoning),
        ("judge", _ignoring_ids),
        ("_unique", list),
    ],
)
def test_the_truth_convicts_a_careless_matcher(monkeypatch, name, mutant):
    monkeypatch.setattr(matching, name, mutant)
    with pytest.raises(WrongMatchError):  # noqa: PT012 - which session it is does not matter
        for seed in range(200):
            play(random.Random(seed))


def _turn(name, served, prefix=None):
    said = prefix or name.encode()
    return Turn(id=name, call=name, match="root", served=served, prefix_hash=said, completion_hash=said)


class _Index(dict):
    def add(self, turn, *context, scope=b""):
        for key in keys_of_turn(converse(scope, context), turn.served, digest(turn.served)):
            self.setdefault(key, []).append(Hit(turn))
        return turn

    def match(self, *history, scope=b""):
        return match(converse(scope, history), self)


U1, U2, U3 = (Message("user", text) for text in ("one", "two", "three"))
OK = Message("assistant", "OK")


def test_a_retry_with_other_tokens_is_ambiguous_and_one_with_the_same_is_not():
    index = _Index()
    index.add(_turn("a", OK, b"same"), U1)
    index.add(_turn("b", OK, b"same"), U1)
    assert index.match(U1, OK, U2).parent.id == "a"
    index.add(_turn("c", OK), U1)
    assert index.match(U1, OK, U2)[:2] == ("plain", "ambiguous-reply")


def test_reasoning_sent_back_tells_siblings_apart():
    index = _Index()
    index.add(_turn("a", Message("assistant", "OK", "this way")), U1)
    index.add(_turn("b", Message("assistant", "OK", "that way")), U1)
    assert index.match(U1, Message("assistant", "OK", "that way"), U2).parent.id == "b"
    assert index.match(U1, OK, U2).reason == "ambiguous-reply"
    assert index.match(U1, Message("assistant", "OK", "no way"), U2).reason == "rewritten-reply"


def test_ids_tell_siblings_apart():
    def reply(name):
        return Message("assistant", None, None, (Call(name, "bash", "{}"),))

    index = _Index()
    index.add(_turn("a", reply("c1")), U1)
    index.add(_turn("b", reply("c2")), U1)
    assert index.match(U1, reply("c2"), Message("tool", "x", answers="c2")).parent.id == "b"
    assert index.match(U1, reply("c3"), Message("tool", "x", answers="c3")).reason == "ambiguous-reply"


def test_an_id_that_two_calls_share_once_sanitised_tells_nothing():
    def reply(name):
        return Message("assistant", None, None, (Call(name, "bash", "{}"),))

    index = _Index()
    index.add(_turn("a", reply("bash.0")), U1)
    index.add(_turn("b", reply("bash_0")), U1)
    assert index.match(U1, reply("bash_0"), U2).reason == "ambiguous-reply"
    assert index.match(U1, reply("bash.0"), U2).parent.id == "a"


def test_an_ambiguous_reply_leaves_the_certain_one_before_it():
    index = _Index()
    index.add(_turn("a", OK), U1)
    index.add(_turn("b", Message("assistant", "so")), U1, OK, U2)
    index.add(_turn("c", Message("assistant", "so")), U1, OK, U2)
    found = index.match(U1, OK, U2, Message("assistant", "so"), U3)
    assert (found.kind, found.parent.id, found.at, found.reason) == ("continue", "a", 2, "ambiguous-reply")


def test_edited_context_keeps_the_replies():
    index = _Index()
    one = index.add(_turn("a", OK), U1)
    two = index.add(_turn("b", Message("assistant", "so")), U1, OK, U2)
    system = Message("system", "new")
    found = index.match(system, U1, OK, U2, two.served, U3)
    assert (found.kind, found.parent, found.anchors) == ("resplice", None, ((2, one), (4, two)))
    pruned = index.match(U1, OK, Message("user", "pruned"), two.served, U3)
    assert (pruned.kind, pruned.parent, pruned.at, pruned.anchors) == ("resplice", one, 2, ((3, two),))
    assert index.match(U1, OK, U2, two.served, U3, scope=b"other tools").kind == "resplice"


def test_out_of_its_context_a_call_is_known_by_its_id_and_a_blank_reply_not_at_all():
    call = Message("assistant", None, None, (Call("c1", "bash", '{"a": 1}'),))
    index = _Index()
    index.add(_turn("a", call), U1)
    index.add(_turn("b", Message("assistant", "")), U2)
    twin = Message("assistant", None, None, (Call("c2", "bash", '{"a": 1}'),))
    assert index.match(U3, call, U2).kind == "resplice"
    assert index.match(U3, twin, U2).reason == "foreign-reply"
    assert index.match(U3, Message("assistant", None), U2).reason == "foreign-reply"


def test_tool_results_swapped_are_another_conversation():
    call = Message("assistant", None, None, (Call("c1", "bash", "{}"), Call("c2", "bash", "{}")))
    first, second = Message("tool", "x", answers="c1"), Message("tool", "y", answers="c2")
    crossed = Message("tool", "x", answers="c2"), Message("tool", "y", answers="c1")
    index = _Index()
    index.add(_turn("a", call), U1)
    index.add(_turn("b", OK), U1, call, first, second)
    assert index.match(U1, call, first, second, OK, U2).parent.id == "b"
    assert index.match(U1, call, *crossed, OK, U2).kind == "resplice"


def test_the_deepest_key_is_asked_for_first():
    conversation = converse(b"", [U1, OK, U2, OK, U3])
    keys = wanted(conversation)
    assert keys[0] == b"c" + conversation.chain[4]
    assert keys[2] == b"c" + conversation.chain[2]
    assert len(keys) == 4


def test_chains_are_of_one_scope_and_one_order():
    assert converse(b"a", [U1]).chain[-1] != converse(b"b", [U1]).chain[-1]
    assert converse(b"", [U1, U2]).chain[-1] != converse(b"", [U2, U1]).chain[-1]
    assert converse(b"", [U1, U2, U3]).chain[:3] == converse(b"", [U1, U2]).chain
    assert converse(b"", [U1], [digest(U1)]) == converse(b"", [U1])


def test_a_call_id_of_the_same_make_is_another_call():
    ours, theirs = "chatcmpl-tool-b9b31a93f1b87adf", "chatcmpl-tool-a4e07940f23e6c33"
    served = Message("assistant", calls=(Call(ours, "bash", "{}"),))
    assert judge(served, Message("assistant", calls=(Call(theirs, "bash", "{}"),))).kind == "rewritten"
    renumbered = judge(served, Message("assistant", calls=(Call("call_0", "bash", "{}"),)))
    assert (renumbered.kind, renumbered.rules, renumbered.ids_kept) == ("equivalent", ("tool-ids",), False)


def test_a_reply_is_not_known_under_another_model():
    one = converse(b"", [U1], voice=b"a")
    keys = keys_of_turn(one, OK, digest(OK))
    assert keys[1] in wanted(converse(b"", [U2, OK, U3], voice=b"a"))
    assert keys[1] not in wanted(converse(b"", [U2, OK, U3], voice=b"b"))

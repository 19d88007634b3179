"""Matching, in a world that knows the truth: a match may be missing, it is never wrong."""

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.settings import FEW, MANY
from tests.core.world import HABITS, WrongMatchError, play
from tests.support import invariants
from tests.support.pairwise import some
from tokencache.core import evidence
from tokencache.core import match as matching
from tokencache.core.added_text import with_stop_string
from tokencache.core.chain import CHAIN_KEY, POSITION_KEY, aborted_key, aborted_turn_keys, build_conversation, lookup_keys, turn_keys
from tokencache.core.evidence import ReturnedIdHashes
from tokencache.core.lineage import sequences
from tokencache.core.match import Hit, match
from tokencache.core.messages import Message, ToolCall, context_digest, digest
from tokencache.core.rules import STRICT, Leniency
from tokencache.core.turn import Turn
from tokencache.core.verdict import Cut, Verdict, delivered_prefix, judge, pack_cuts, unpack_cuts


@FEW
@given(st.randoms(use_true_random=False))
def test_no_match_is_ever_wrong_and_all_invariants_hold(rng):
    world = play(rng)
    assert invariants.audit(world.turns, world.tokens) == []
    assert invariants.engine_agrees(world.turns, world.tokens, world.ground_truth) == []
    built = sequences(world.turns, world.tokens)
    trained = sum(sum(s.loss_mask) for s in built)
    assert trained == sum(t.completion_tokens for t in world.turns if "no-logprobs" not in t.marks)


@pytest.mark.whole
def test_every_result_every_reason_and_every_rule_occurs():
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += play(random.Random(seed), 25).seen
    assert {"root", "continue", "branch", "resplice", "plain"} <= set(seen)
    assert {"ambiguous-reply", "rewritten-reply", "foreign-reply", "unrecognised-reply", "context-edited"} <= set(seen)
    assert {"content-shape", "whitespace", "args-json", "inline-think", "reasoning-dropped", "tool-ids"} <= set(seen)
    assert {"interrupted", "inside-token", "cd-prefix", "coerced-values", "markup-removed"} <= set(seen)
    assert seen["continue"] > seen["plain"]


def _ignoring_ambiguity(echoed, judged):
    return [found for found in judged if found.verdict.supplied][:1]


def _ignoring_reasoning(turn, echoed, leniency):
    return judge(turn.served, Message(echoed.role, echoed.text, None, echoed.calls), leniency)


def _ignoring_ids(turn, echoed, leniency):
    served = turn.served
    if len(served.calls) != len(echoed.calls):
        return judge(served, echoed, leniency)
    calls = tuple(msgspec.structs.replace(theirs, id=ours.id) for ours, theirs in zip(served.calls, echoed.calls, strict=True))
    return judge(served, msgspec.structs.replace(echoed, calls=calls), leniency)


def _trusting_ids(turn, echoed, leniency):
    known = {call.id for call in turn.served.calls} & {call.id for call in echoed.calls}
    return Verdict("same") if known else judge(turn.served, echoed, leniency)


def _forgiving_without_a_vouch(turn, echoed, leniency):
    return judge(turn.served, echoed, Leniency(harness_rules=HABITS))


def _trusting_handles(self, i, hits):
    handle = self.handles.get(i, "")
    trusted = [matching._Found(hit, Verdict("same")) for hit in hits if handle and hit.turn.handle == handle]
    return trusted or [matching._Found(hit, judge(hit.turn.served, self.conversation.messages[i], self.leniency)) for hit in hits]


def _taking_the_beginning_for_the_whole(turn, echoed, leniency):
    part = delivered_prefix(turn, echoed, leniency)
    cuts = unpack_cuts(turn.cuts)
    return part and part._replace(text=turn.served.content or "", after=cuts[-1].after)


def _ignoring_white_space_and_ids(conversation, place, hashed=evidence.preceding_hash):
    canonical = tuple(map(digest, conversation.messages))
    return hashed(msgspec.structs.replace(conversation, digests=canonical, exacts=canonical), place)


@pytest.mark.parametrize(
    ("name", "mutant"),
    some(
        [
            ("_choose", _ignoring_ambiguity),
            ("judge_reply", _ignoring_reasoning),
            ("judge_reply", _ignoring_ids),
            ("judge_reply", _trusting_ids),
            ("judge_reply", _forgiving_without_a_vouch),
            ("_Finder._judged", _trusting_handles),
            ("delivered_prefix", _taking_the_beginning_for_the_whole),
            ("may_be_delivered", lambda turn, echoed: False),
            ("_unsure", lambda conversation, anchors: ()),
            ("_interchangeable", lambda turns, *, in_place: True),
            ("_Finder.was_judged", lambda self, turn, i: True),
            ("_Finder._evident", lambda self, i, genuine: genuine),
            ("ReturnedIdHashes.names", lambda self, turn: True),
            ("_Finder._by_tokens", lambda self, i, judged: []),
            ("evidence.preceding_hash", _ignoring_white_space_and_ids),
        ],
        5,
    ),
)
def test_the_truth_convicts_a_careless_matcher(monkeypatch, name, mutant):
    monkeypatch.setattr(f"tokencache.core.match.{name}", mutant)
    with pytest.raises(WrongMatchError):  # noqa: PT012 - which session it is does not matter
        for seed in range(400):
            play(random.Random(seed))


def _turn(name, served, prefix=None):
    said = prefix or name.encode()
    return Turn(id=name, call=name, match="root", served=served, prefix_hash=said, completion_hash=said)


def _answering(conversation, turn, leniency, parent=None):
    """A turn as it is recorded that answers a conversation, with the replies of its parent's prompt and the parent's own."""
    until = len(conversation.messages)
    return msgspec.structs.replace(
        turn,
        match="continue" if parent else "root",
        parent=parent and parent.id,
        position_key=conversation.chain[-1],
        judged=evidence.judged_hash(conversation, until, leniency, {}),
        foreign=evidence.foreign_hash(conversation, parent.messages + 1 if parent else 0, until, (), parent.foreign if parent else b""),
        before=evidence.preceding_hash(conversation, until),
        messages=until,
    )


class _Index(dict):
    """What was recorded, by its keys, and asked for as the planner asks."""

    def __init__(self, leniency=STRICT):
        super().__init__()
        self.leniency = leniency
        self.turns = {}

    def add(self, turn, *context, scope=b"", voice=b"", aborted=False, parent=None):
        conversation = build_conversation(scope, context, model=voice)
        turn = self.turns[turn.id] = _answering(conversation, turn, self.leniency, parent)
        restored = with_stop_string(turn.served, turn.stop_reason)
        keys = turn_keys(conversation, turn.served, digest(turn.served), handle=turn.handle, leniency=self.leniency, restored=restored)
        if turn.sampling.get("stop"):
            keys = (*keys, POSITION_KEY + conversation.chain[-1])
        for key in aborted_turn_keys(conversation) if aborted else keys:
            self.setdefault(key, []).append(Hit(turn))
        return turn

    def match(self, *history, scope=b"", voice=b"", handles=None, echoed=None):
        conversation = build_conversation(scope, history, model=voice)
        found = match(conversation, self, self.leniency, handles or {}, echoed=echoed or {})
        if not found.turns_wanted:
            return found
        return match(conversation, self, self.leniency, handles or {}, self.turns, echoed=echoed or {})


C1, C2, C3 = ("call_7d1e40aa", "toolu_93bf21c0", "call-5a0c88d7")  # of different makes
S1 = Message("system", "new")
U1, U2, U3 = (Message("user", text) for text in ("one", "two", "three"))
OK = Message("assistant", "OK")


ROLES = st.sampled_from([U1, U2, OK, Message("assistant", ""), Message("assistant", None, None, (ToolCall(C1, "bash", "{}"),))])


@MANY
@given(st.lists(ROLES, max_size=6), st.sets(st.integers(0, 5)), st.booleans())
def test_where_nothing_was_found_no_reply_is_looked_at_and_the_result_is_the_same(history, named, looked_up):
    told, handles = build_conversation(b"", history), {i: "h" for i in named if i < len(history)}
    nothing = {key: [] for key in lookup_keys(told, handles=handles)} if looked_up else {}
    elsewhere = {b"another's": [Hit(_turn("a", OK))]}  # never asked for, and enough to make every reply be looked at
    for leniency in (Leniency(), Leniency(harness_rules=HABITS)):
        assert match(told, nothing, leniency, handles) == match(told, nothing | elsewhere, leniency, handles)


def test_a_retry_with_other_tokens_is_ambiguous_and_one_with_the_same_is_not():
    index = _Index()
    index.add(_turn("a", OK, b"same"), U1)
    index.add(_turn("b", OK, b"same"), U1)
    assert index.match(U1, OK, U2).parent.id == "a"
    index.add(_turn("c", OK), U1)
    assert index.match(U1, OK, U2)[:2] == ("plain", "ambiguous-reply")


def test_reasoning_sent_back_distinguishes_siblings():
    index = _Index()
    index.add(_turn("a", Message("assistant", "OK", "this way")), U1)
    index.add(_turn("b", Message("assistant", "OK", "that way")), U1)
    assert index.match(U1, Message("assistant", "OK", "that way"), U2).parent.id == "b"
    assert index.match(U1, OK, U2).reason == "ambiguous-reply"
    assert index.match(U1, Message("assistant", "OK", "no way"), U2).reason == "rewritten-reply"


def test_ids_tell_siblings_apart():
    def reply(name):
        return Message("assistant", None, None, (ToolCall(name, "bash", "{}"),))

    index = _Index()
    index.add(_turn("a", reply(C1)), U1)
    index.add(_turn("b", reply(C2)), U1)
    assert index.match(U1, reply(C2), Message("tool", "x", answers=C2)).parent.id == "b"
    assert index.match(U1, reply(C3), Message("tool", "x", answers=C3)).reason == "ambiguous-reply"


def test_an_id_that_two_calls_share_once_sanitised_is_no_evidence():
    def reply(name):
        return Message("assistant", None, None, (ToolCall(name, "bash", "{}"),))

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
    assert (found.kind, found.parent, found.anchors) == ("resplice", None, ((2, Hit(one)), (4, Hit(two))))
    pruned = index.match(U1, OK, Message("user", "pruned"), two.served, U3)
    assert (pruned.kind, pruned.parent, pruned.at, pruned.reason) == ("continue", one, 2, "foreign-reply"), "words alone"
    called = index.add(_turn("c", _bash(C1, "ls")), U1, OK, U2, two.served, U3, parent=two)
    pruned = index.match(U1, OK, Message("user", "pruned"), two.served, U3, called.served, Message("tool", "x", answers=C1))
    assert (pruned.kind, pruned.parent, pruned.at, pruned.anchors) == ("resplice", one, 2, ((5, Hit(called)),))
    assert index.match(U1, OK, U2, two.served, U3, scope=b"other tools").kind == "resplice"


def test_out_of_its_context_a_call_is_known_by_its_id_and_a_blank_reply_not_at_all():
    call = Message("assistant", None, None, (ToolCall(C1, "bash", '{"a": 1}'),))
    index = _Index()
    index.add(_turn("a", call), U1)
    index.add(_turn("b", Message("assistant", "")), U2)
    twin = Message("assistant", None, None, (ToolCall(C2, "bash", '{"a": 1}'),))
    assert index.match(U3, call, U2).kind == "resplice"
    assert index.match(U3, twin, U2).reason == "foreign-reply"
    assert index.match(U3, Message("assistant", None), U2).reason == "foreign-reply"


def test_tool_results_swapped_are_another_conversation():
    call = Message("assistant", None, None, (ToolCall(C1, "bash", "{}"), ToolCall(C2, "bash", "{}")))
    first, second = Message("tool", "x", answers=C1), Message("tool", "y", answers=C2)
    crossed = Message("tool", "x", answers=C2), Message("tool", "y", answers=C1)
    index = _Index()
    one = index.add(_turn("a", call), U1)
    index.add(_turn("b", OK), U1, call, first, second)
    assert index.match(U1, call, first, second, OK, U2).parent.id == "b"
    assert index.match(U1, call, *crossed, OK, U2)[:3] == ("continue", "foreign-reply", one)


def test_the_deepest_key_is_asked_for_first():
    conversation = build_conversation(b"", [U1, Message("assistant", "so"), U2, OK, U3])
    keys = lookup_keys(conversation)
    assert [key[:1] for key in keys] == [b"p", b"c", b"r"] * 2
    assert keys[1] == b"c" + conversation.chain[4]
    assert keys[4] == b"c" + conversation.chain[2]


def test_chains_are_of_one_scope_and_one_order():
    assert build_conversation(b"a", [U1]).chain[-1] != build_conversation(b"b", [U1]).chain[-1]
    assert build_conversation(b"", [U1, U2]).chain[-1] != build_conversation(b"", [U2, U1]).chain[-1]
    assert build_conversation(b"", [U1, U2, U3]).chain[:3] == build_conversation(b"", [U1, U2]).chain
    assert build_conversation(b"", [U1], [context_digest(U1)]) == build_conversation(b"", [U1])


def test_a_call_id_of_the_same_make_is_another_call():
    ours, theirs = "chatcmpl-tool-b9b31a93f1b87adf", "chatcmpl-tool-a4e07940f23e6c33"
    served = Message("assistant", calls=(ToolCall(ours, "bash", "{}"),))
    assert judge(served, Message("assistant", calls=(ToolCall(theirs, "bash", "{}"),))).kind == "foreign"
    renumbered = judge(served, Message("assistant", calls=(ToolCall("call_0", "bash", "{}"),)))
    assert (renumbered.kind, renumbered.rules, renumbered.ids_kept) == ("equivalent", ("tool-ids",), False)


def test_a_reply_is_not_known_under_another_model():
    one = build_conversation(b"", [U1], model=b"a")
    keys = turn_keys(one, OK, digest(OK))
    assert keys[1] in lookup_keys(build_conversation(b"", [U2, OK, U3], model=b"a"))
    assert keys[1] not in lookup_keys(build_conversation(b"", [U2, OK, U3], model=b"b"))


VLLM = "chatcmpl-tool-b9b31a93f1b87adf"
BARE, OTHER_BARE = "chatcmpltoolb9b31a93f1b87adf", "chatcmpltoola4e07940f23e6c33"


def test_the_letters_and_digits_of_a_random_id_are_the_id():
    """OpenClaw removes everything else, and moves its context to the end."""
    index = _Index()
    one = index.add(_turn("a", _bash(VLLM, "ls")), U1, U2)
    assert index.match(U1, U2, _bash(BARE, "ls"), Message("tool", "x", answers=BARE))[:3] == ("continue", "", one)
    moved = index.match(U1, _bash(BARE, "ls"), Message("tool", "x", answers=BARE), U2)
    assert (moved.kind, moved.anchors, moved.applied_rules) == ("resplice", ((1, Hit(one)),), ("tool-ids",))
    assert index.match(U1, _bash(BARE, "rm"), U2)[:2] == ("plain", "foreign-reply"), "an id does not make up for other arguments"
    for other in (OTHER_BARE, BARE[:-1], BARE + "0"):
        assert index.match(U1, _bash(other, "ls"), U2)[:2] == ("plain", "foreign-reply"), other


def test_the_letters_and_digits_of_another_call_are_not_a_renamed_id():
    index = _Index()
    index.add(_turn("a", _bash(VLLM, "ls")), U1)
    assert index.match(U1, _bash(OTHER_BARE, "ls"), U2)[:2] == ("plain", "foreign-reply")
    assert index.match(U1, _bash("x0", "ls"), U2).kind == "continue", "a number of the harness's own is"


def test_the_letters_and_digits_of_an_id_that_counts_prove_nothing():
    index = _Index()
    one = index.add(_turn("a", _bash("f1.0", "ls")), U1)
    two = index.add(_turn("b", _bash("f.10", "ls")), U2)
    assert index.match(U3, _bash("f10", "ls"), U2)[:2] == ("plain", "foreign-reply")
    assert [index.match(asked, _bash("f10", "ls"), U3).parent for asked in (U1, U2)] == [one, two], "their position does"


def _bash(name, command):
    return Message("assistant", None, None, (ToolCall(name, "Bash", f'{{"command": "{command}"}}'),))


CLAUDE = Leniency(harness_rules=frozenset({"cd-prefix"}))


def test_a_rewritten_call_is_known_in_its_place_and_out_of_it_by_its_id_alone():
    index = _Index(CLAUDE)
    one = index.add(_turn("a", _bash(C1, "cd /w && ls")), U1)
    assert index.match(U1, _bash(C1, "ls"), U2)[:3] == ("continue", "", one)
    assert index.match(U3, _bash(C1, "ls"), U2).anchors == ((1, Hit(one)),)
    assert index.match(U3, _bash(C2, "ls"), U2).kind == "plain"
    assert index.match(U1, _bash(C1, "rm"), U2)[:2] == ("plain", "foreign-reply")
    index.leniency = Leniency()
    assert index.match(U1, _bash(C1, "ls"), U2)[:2] == ("plain", "rewritten-reply")


def test_an_id_that_was_issued_to_another_turn_is_not_a_renamed_one():
    for leniency, expected in ((CLAUDE, "b"), (Leniency(), None)):
        index = _Index(leniency)
        index.add(_turn("a", _bash(C1, "ls")), U1)
        index.add(_turn("b", _bash(C2, "cd /w && ls")), U1)
        found = index.match(U1, _bash(C2, "ls"), U2)
        assert (found.parent.id if found.parent else None) == expected
        assert index.match(U1, _bash(C1, "ls"), U2).parent.id == "a"


def test_two_replies_that_a_rewriting_makes_alike_are_ambiguous():
    index = _Index(Leniency(harness_rules=frozenset({"markup-removed"})))
    index.add(_turn("a", OK), U1)
    assert index.match(U1, OK, U2).parent.id == "a"
    two = index.add(_turn("b", Message("assistant", "OK<tool_call>x</tool_call>")), U1)
    assert index.match(U1, OK, U2).reason == "ambiguous-reply"
    assert index.match(S1, U1, OK, U2).reason == "ambiguous-reply"
    assert index.match(U3, OK, U2).reason == "foreign-reply"
    assert index.match(U1, two.served, U2).parent.id == "b"


def test_a_handle_identifies_a_reply_but_not_its_content():
    index = _Index(CLAUDE)
    for name in "ab":
        index.add(msgspec.structs.replace(_turn(name, OK), handle=name * 32), U1)
    assert index.match(U1, OK, U2).reason == "ambiguous-reply"
    assert index.match(U1, OK, U2, handles={1: "b" * 32}).parent.id == "b"
    assert index.match(U3, OK, U2, handles={1: "b" * 32}).anchors[0][1].turn.id == "b"
    other = Message("assistant", "Got it.")
    assert index.match(U1, other, U2, handles={1: "b" * 32})[:2] == ("plain", "foreign-reply")
    assert index.match(U1, OK, U2, handles={1: "c" * 32})[:2] == ("plain", "foreign-reply")


def _left(name, text, cuts, **more):
    turn = _turn(name, Message("assistant", text, **more))
    return msgspec.structs.replace(turn, marks=("aborted",), cuts=pack_cuts([Cut(n, n + 1, end, 0) for n, end in enumerate(cuts)]))


def test_the_handle_or_the_ids_of_another_reply_are_not_those_of_an_interrupted_one():
    """The harness brought a whole reply here from a place with other tools, where an interrupted one had the same text."""
    index = _Index()
    index.add(msgspec.structs.replace(_left("a", "OK", [1, 2]), handle="a" * 32), U1, aborted=True)
    index.add(msgspec.structs.replace(_turn("b", OK), handle="b" * 32), U1, scope=b"other tools")
    assert index.match(U1, OK, U2, handles={1: "b" * 32}).anchors[0][1].turn.id == "b"
    assert index.match(U1, OK, U2, echoed={1: _ids(index.turns["b"])}).anchors[0][1].turn.id == "b"
    for handles in ({}, {1: "a" * 32}):
        assert index.match(U1, OK, U2, handles=handles)[:2] == ("continue", ""), "its own, or none"
    assert index.match(U1, OK, U2, echoed={1: ReturnedIdHashes(b"nobody's")})[:2] == ("continue", "")


def test_the_prefix_delivered_before_an_interrupt():
    index = _Index(CLAUDE)
    turn = index.add(_left("a", "One, two ", (3, 5, 8, 9)), U1, aborted=True)
    found = index.match(U1, Message("assistant", "One, two"), U2)
    assert (found.parent, found.delivered.text, found.delivered.after, found.applied_rules) == (turn, "One, two", 3, ("interrupted",))
    assert index.match(U1, Message("assistant", "One, t"), U2).delivered is None
    assert index.match(U1, Message("assistant", "One,"), U2).delivered.text == "One, "  # trimmed, and one event only can be meant
    assert index.match(U1, Message("assistant", " One, two\n"), U2)[:2] == ("plain", "unrecognised-reply")  # two events may be meant
    assert index.match(U1, Message("assistant", "One, two", "other thoughts"), U2).delivered is None
    index.add(_turn("b", Message("assistant", "One, two")), U1)
    assert index.match(U1, Message("assistant", "One, two"), U2).reason == "ambiguous-reply"
    assert index.match(S1, U1, Message("assistant", "One, two"), U2).reason == "ambiguous-reply"
    off = _Index(Leniency(off=frozenset({"interrupted"})))
    off.add(_left("a", "One, two", (3, 8)), U1, aborted=True)
    assert off.match(U1, Message("assistant", "One, two"), U2).kind == "plain"


@pytest.mark.parametrize(("text", "before", "in_doubt"), [("OK", U1, True), ("OK", U2, False), ("No", U1, False)])
@pytest.mark.parametrize("system", [(), (S1,)])
def test_a_reply_with_its_stop_string_may_be_an_interrupted_one_to_which_the_harness_added_it(system, text, before, in_doubt):
    """In its position, and in an edited context after the same message."""
    index = _Index()
    index.add(msgspec.structs.replace(_turn("a", OK), stop_reason="</s>"), U1)
    history = (*system, U1, Message("assistant", "OK</s>"), U2)
    assert index.match(*history).kind == ("resplice" if system else "continue")
    index.add(_left("b", f"{text}, and more", (2, 10)), before, aborted=True)
    assert (index.match(*history).reason == "ambiguous-reply") == in_doubt


@pytest.mark.parametrize(("before", "in_doubt"), [(U1, True), (U2, False)])
def test_a_reply_with_its_stop_string_may_be_one_to_which_the_harness_added_it_by_a_rule_that_is_switched_off(before, in_doubt):
    stop = {"stop": ["</s>"]}
    index = _Index(Leniency(off=frozenset({"reasoning-dropped"})))
    index.add(msgspec.structs.replace(_turn("a", OK), stop_reason="</s>", sampling=stop), U1)
    index.add(msgspec.structs.replace(_turn("b", Message("assistant", "OK", "Is it? Yes.")), sampling=stop), before)
    assert (index.match(U1, Message("assistant", "OK</s>"), U2).reason == "ambiguous-reply") == in_doubt


def test_who_left_asked_again_and_got_the_very_same_tokens_may_mean_either():
    index = _Index(CLAUDE)
    left = index.add(_left("a", "One, two", (3, 8)), U1, aborted=True)
    again = _turn("b", Message("assistant", "One, two"))
    index.add(msgspec.structs.replace(again, prefix_hash=left.prefix_hash), U1)
    assert index.match(U1, Message("assistant", "One, two"), U2)[:2] == ("continue", "")
    assert index.match(U1, Message("assistant", "One, two"), U2).parent.id == "b"


@pytest.mark.parametrize(
    ("left", "in_doubt"),
    [
        (("a", "  I see.", (1, 8)), True),
        (("a", "I see.", (6,)), False),
        (("a", None, (0,), ToolCall(C1, "Bash", "{")), True),
        (("a", None, ()), True),  # of its thinking, which it does not show
    ],
)
def test_an_empty_message_may_be_what_was_received_of_an_interrupted_reply(left, in_doubt):
    index, (name, text, cuts, *calls) = _Index(CLAUDE), left
    index.add(_turn("b", Message("assistant", None, "Is it? Yes.")), U1)
    assert index.match(U1, Message("assistant", " \n"), U2)[:2] == ("continue", "")
    index.add(_left(name, text, cuts, calls=tuple(calls)), U1, aborted=True)
    assert (index.match(U1, Message("assistant", " \n"), U2).reason == "ambiguous-reply") == in_doubt


def test_an_aborted_turn_is_not_taken_within_a_call():
    """But up to the first one, whose event has no text."""
    index = _Index(CLAUDE)
    turn = index.add(_left("a", "One, two", (3, 8, 0), calls=(ToolCall(C1, "Bash", "{"),)), U1, aborted=True)
    assert index.match(U1, Message("assistant", "One, two", None, (ToolCall(C1, "Bash", "{"),)), U2).kind == "plain"
    assert index.match(U1, Message("assistant", "One, t"), U2).kind == "plain"
    for text, after in (("One", 1), ("One, two", 2)):
        found = index.match(U1, Message("assistant", text), U2)
        assert (found.parent, found.delivered.text, found.delivered.after, found.delivered.calls) == (turn, text, after, 0)
    index.add(_turn("b", Message("assistant", "One, two")), U1)
    assert index.match(U1, Message("assistant", "One, two"), U2).reason == "ambiguous-reply"


def test_a_turn_that_the_harness_dropped_leaves_the_one_before_it():
    """Thinking only, or a format error: dropped, and the user asked once more; or the identical request was sent again."""
    index = _Index(CLAUDE)
    one = index.add(_turn("a", OK), U1)
    index.add(_turn("b", Message("assistant", None, "thinking only")), U1, OK, U2)
    assert index.match(U1, OK, U2, U3)[:4] == ("continue", "", one, 2)
    assert index.match(U1, OK, U2)[:4] == ("continue", "", one, 2)
    assert index.match(U1, OK, Message("user", "two\n\nnudge"))[2] == one


def test_rollback_and_parallel_agents_each_find_their_own():
    index = _Index(CLAUDE)
    index.add(_turn("a", OK), U1)
    index.add(_turn("b", Message("assistant", "so")), U1, OK, U2)
    index.add(_turn("c", OK), U2)
    index.add(_turn("d", Message("assistant", "sub")), U2, OK, U3)
    assert index.match(U1, OK, U3).parent.id == "a"
    assert index.match(U2, OK, U3, Message("assistant", "sub"), U1).parent.id == "d"
    assert index.match(U1, OK, U2, Message("assistant", "so"), U3).parent.id == "b"
    assert index.match(S1, U1, OK, U3, OK, U2).reason == "context-edited"
    assert index.match(U3, OK, U2).reason == "foreign-reply"


def test_after_a_compaction_the_summary_is_foreign_and_the_kept_tail_is_known():
    """OpenCode: the assistant's summary, then the last turns: two assistant's messages in a row. Claude Code: rewritten, too."""
    index = _Index(CLAUDE)
    kept = index.add(_turn("a", _bash(C1, "cd /w && ls")), U1)
    summary = Message("assistant", "we did much")
    found = index.match(U3, summary, _bash(C1, "ls"), Message("tool", "x", answers=C1))
    assert (found.kind, found.parent, found.anchors) == ("resplice", None, ((2, Hit(kept)),))
    merged = Message("assistant", "Got it. Thanks for the additional context!", None, _bash(C1, "cd /w && ls").calls)
    assert index.match(U3, merged, Message("tool", "x", answers=C1))[:2] == ("plain", "foreign-reply")


# --- what a digest does not show -----------------------------------------------------------------------------------------


def _thought(text, reasoning):
    return Message("assistant", text, reasoning)


def test_other_reasoning_beside_an_older_reply_is_found():
    index = _Index()
    one = index.add(_turn("a", _thought("OK", "this way")), U1)
    two = index.add(_turn("b", _thought("so", "because")), U1, one.served, U2, parent=one)
    for echoed in (one.served, OK):  # it came back whole, or left out
        assert index.match(U1, echoed, U2, two.served, U3)[:4] == ("continue", "", two, 4)
    edited = index.match(U1, _thought("OK", "no way"), U2, two.served, U3)
    assert (edited.kind, edited.parent, edited.anchors) == ("resplice", None, ((3, Hit(two)),)), "its words stand as the harness has them"


def test_a_rule_that_is_switched_off_is_not_relied_on_for_older_replies_either():
    index = _Index()
    one = index.add(_turn("a", _thought("OK", "this way")), U1)
    two = index.add(_turn("b", Message("assistant", "so")), U1, one.served, U2, parent=one)
    three = index.add(_turn("c", _bash(C1, "ls")), U1, one.served, U2, two.served, U3, parent=two)
    index.leniency = Leniency(off=frozenset({"reasoning-dropped"}))
    result = Message("tool", "x", answers=C1)
    assert index.match(U1, one.served, U2, two.served, U3, three.served, result)[:4] == ("continue", "", three, 6)
    silent = index.match(U1, OK, U2, two.served, U3, three.served, result)
    assert (silent.kind, silent.parent, silent.anchors) == ("resplice", None, ((3, Hit(two)), (5, Hit(three))))


def test_a_message_of_the_harnesss_own_is_context_reasoning_and_white_space_included():
    index = _Index()
    own = _thought("Like this.", "an example")
    one = index.add(_turn("a", OK), U1, own, U2)
    two = index.add(_turn("b", Message("assistant", "so")), U1, own, U2, OK, U3, parent=one)
    assert index.match(U1, own, U2, OK, U3, two.served, U1).parent == two
    for other in (_thought("Like this.", "another"), _thought("Like this.", None), _thought("Like this. ", "an example")):
        changed = index.match(U1, other, U2, OK, U3, two.served, U1)
        assert (changed.kind, changed.anchors) == ("resplice", ((3, Hit(one)), (5, Hit(two)))), other


def test_no_rule_applies_to_context():
    index = _Index()
    one = index.add(_turn("a", OK), U1)
    for context in (Message("user", "one "), Message("user", "one", parts=True)):
        assert index.match(context, OK, U2)[:2] == ("plain", "foreign-reply")
        assert index.match(S1, context, OK, U2)[:2] == ("plain", "foreign-reply")
    assert index.match(U1, OK, U2).parent == one
    assert index.match(S1, U1, OK, U2).anchors == ((2, Hit(one)),)
    results = [Message("tool", "x", answers=C1), Message("tool", "x", answers=C1, name="bash")]
    call = index.add(_turn("b", _bash(C1, "ls")), U3)
    two = index.add(_turn("c", Message("assistant", "so")), U3, call.served, results[0], parent=call)
    assert index.match(U3, call.served, results[0], two.served, U2).parent == two
    assert index.match(U3, call.served, results[1], two.served, U2).kind == "resplice", "only the name of the tool"
    for other in (Message("tool", "x", parts=True, answers=C1), Message("tool", "x", answers=C2), Message("tool", " x\n", answers=C1)):
        assert index.match(U3, call.served, other, two.served, U2)[:3] == ("continue", "foreign-reply", call)
        assert index.match(U1, _bash(C2, "ls"), other, two.served, U2)[:2] == ("plain", "foreign-reply"), "another agent's"
    own = Message("assistant", "ok")
    after = index.add(_turn("d", Message("assistant", "fine")), U2, own)
    assert index.match(S1, U2, own, after.served, U3).anchors == ((3, Hit(after)),)
    for other in (Message("assistant", " ok"), Message("assistant", "ok", parts=True), Message("assistant", "ok", "why")):
        assert index.match(S1, U2, other, after.served, U3)[:2] == ("plain", "foreign-reply")


# --- evidence out of context ------------------------------------------------------------------------------------------------


def test_few_shot_examples_are_not_replies():
    index = _Index()
    index.add(_turn("a", Message("assistant", "Yes.", "a secret of another agent")), Message("user", "Is 4 even?"))
    examples = [Message("user", "Is 2 even?"), Message("assistant", "Yes."), Message("user", "Is 8 even?")]
    assert index.match(*examples)[:2] == ("plain", "foreign-reply")


def test_replies_of_equal_words_under_other_template_arguments_are_seen_side_by_side():
    index = _Index()
    index.add(_turn("a", OK), U1, scope=b"thinking")
    index.add(_turn("b", OK), U1, scope=b"not thinking")
    assert index.match(U1, OK, U2, scope=b"thinking").parent.id == "a"
    assert index.match(S1, U1, OK, U2, scope=b"thinking").reason == "ambiguous-reply"
    assert index.match(U1, OK, U2, scope=b"other").reason == "ambiguous-reply"


def test_with_other_template_arguments_a_reply_is_known_by_what_precedes_it():
    index = _Index()
    one = index.add(_turn("a", OK), U1, scope=b"low")
    assert index.match(U1, OK, U2, scope=b"high").anchors == ((1, Hit(one)),), "that it is rendered alike is for the planner to prove"


def _poll(name, n):
    return Message("assistant", None, None, (ToolCall(name, "bash", '{"command": "ls"}'),)), Message("tool", "same", answers=name)


def test_rewritten_ids_in_an_edited_context_leave_words_and_order():
    """An agent that asks the same again and again, and a harness that writes other ids, and none beside results: their order decides."""
    index, history, parent = _Index(), [U1], None
    said, result = [], Message("tool", "same")
    for n in range(6):
        served, _ = _poll(f"functions.bash:{n}", n)
        parent = index.add(_turn(f"t{n}", served), *history, parent=parent)
        said.append(parent)
        history += [served, result]
    renamed = [Message("user", "one")]
    for n in range(6):
        renamed += [_poll(f"x{n}", n)[0], result]
    found = index.match(S1, *renamed, U2)
    assert [hit.turn.id for _, hit in found.anchors] == [turn.id for turn in said]
    apart = index.match(S1, U3, *renamed[3:], U2)  # which of them is gone?
    assert (apart.kind, apart.reason) == ("plain", "ambiguous-reply")


def test_a_later_history_shows_another_part_of_a_thought_that_was_cut():
    """The chain covers no reasoning: the prompt of the next turn has the part that came back then."""
    index = _Index()
    cuts = [Cut(n, n + 1, 0, end) for n, end in enumerate((3, 7))]
    cut = msgspec.structs.replace(_turn("a", Message("assistant", None, "One two")), marks=("aborted",), cuts=pack_cuts(cuts))
    cut = index.add(cut, U1, aborted=True)
    parts = [Message("assistant", "", thought) for thought in ("One", "One two", "")]
    two = index.add(_turn("b", Message("assistant", "so")), U1, parts[0], U2, parent=cut)
    assert index.match(U1, parts[0], U2, two.served, U3).parent == two
    found = index.match(U1, parts[1], U2, two.served, U3)
    assert (found.parent, found.delivered.text, found.anchors) == (cut, "One two", ((3, Hit(two)),))
    assert index.match(U1, parts[2], U2, two.served, U3).parent == two, "all of it left out, as the rule allows"


def test_an_id_that_counts_is_no_evidence_by_itself():
    index = _Index()
    served, result = _poll("functions.bash:0", 0)
    one = index.add(_turn("a", served), U1)
    two = index.add(_turn("b", _poll("functions.bash:1", 1)[0]), U1, served, result, parent=one)
    assert index.match(U3, served, result)[:2] == ("plain", "foreign-reply"), "the harness's own example may have the same"
    assert index.match(S1, U1, served, result).anchors == ((2, Hit(one)),)
    pruned = index.match(S1, U1, served, Message("tool", "[old]", answers=result.answers), two.served, U2)
    assert pruned.anchors == ((2, Hit(one)), (4, Hit(two))), "behind the same reply"


@pytest.mark.parametrize(("arguments", "in_doubt"), [('{"n": 5}', False), ('{"command":"ls"}', True), ('{"n": ', True), ("", True)])
def test_a_call_that_had_arrived_in_a_cut_stream_is_not_another_one_with_its_number(arguments, in_doubt):
    index = _Index()
    served, result = _poll("functions.bash:0", 0)
    one = index.add(_turn("a", served), U1)
    cut = (ToolCall("functions.bash:0", "bash", arguments), ToolCall("functions.bash:1", "bash", ""))
    index.add(_left("b", None, [1, 2], calls=cut), U3, aborted=True)
    assert index.match(S1, U1, served, result).anchors == (() if in_doubt else ((2, Hit(one)),))


def test_a_call_that_had_arrived_in_a_cut_stream_may_have_been_understood():
    index = _Index(Leniency(harness_rules=frozenset({"name-lowered"}), tools=frozenset({"bash"})))
    served, result = _poll("functions.bash:0", 0)
    index.add(_turn("a", served), U1)
    cut = (msgspec.structs.replace(served.calls[0], name="Bash"), ToolCall("functions.bash:1", "bash", ""))
    index.add(_left("b", None, [1, 2], calls=cut), U1, aborted=True)
    assert index.match(U1, served, result)[:2] == ("plain", "ambiguous-reply")


@pytest.mark.parametrize(("name", "numbered"), [("functions.bash:0", True), (C1, False)])
def test_for_a_call_with_a_number_cut_replies_are_looked_up(name, numbered):
    """It may be the beginning of one in any place; the id of another call tells it from all."""
    index = _Index()
    served, result = _poll(name, 0)
    index.add(_turn("a", served), U1)
    found = index.match(S1, U1, served, result)
    assert found.anchors
    assert (aborted_key(build_conversation(b"", [U1]).model_key) in found.unsure) == numbered


def test_two_calls_with_one_id_do_not_lose_each_other():
    index = _Index()
    first, second = (Message("assistant", None, None, (ToolCall("functions.bash:0", "bash", f'{{"n": {n}}}'),)) for n in (1, 2))
    result = Message("tool", "x", answers="functions.bash:0")
    one = index.add(_turn("a", first), U1)
    two = index.add(_turn("b", second), U1, first, result, parent=one)
    history = [U1, first, result, second, result]
    assert len(lookup_keys(build_conversation(b"", history))) == len(set(lookup_keys(build_conversation(b"", history))))
    assert index.match(*history).parent == two
    assert index.match(S1, *history).anchors == ((2, Hit(one)), (4, Hit(two)))


def test_equal_replies_of_equal_tokens_are_interchangeable():
    index = _Index()
    one = index.add(_turn("a", OK, b"same"), U1)
    two = index.add(_turn("b", OK, b"same"), U1, OK, U1, parent=one)
    found = index.match(S1, U1, OK, U1, OK, U2)
    assert [place for place, _ in found.anchors] == [2, 4]
    assert {hit.turn.id for _, hit in found.anchors} == {one.id, two.id}
    assert index.match(S1, U1, OK, U1, OK, U1, OK, U2).anchors == (), "one of the three is the harness's own, and nobody knows which"


def test_a_turn_that_a_switched_off_rule_bars_leaves_the_others_in_doubt():
    index = _Index(Leniency(off=frozenset({"reasoning-dropped"})))
    index.add(_turn("a", OK), U1)
    assert index.match(S1, U1, OK, U2).anchors != ()
    assert index.match(U1, OK, U2).kind == "continue"
    index.add(_turn("b", _thought("OK", "because")), U1)
    assert index.match(S1, U1, OK, U2).reason == "ambiguous-reply"
    assert index.match(U1, OK, U2)[:2] == ("plain", "ambiguous-reply"), "also in its position: the harness may have dropped the reasoning"


@pytest.mark.parametrize("arguments", ["[1]", "no JSON", '{"n": 1e400}', '{"n": -Infinity}'])
def test_a_reply_with_hidden_calls_and_one_without_are_told_apart_by_nothing(arguments):
    """After `MALFORMED_FUNCTION_CALL` a client asks again, and gets the same text without a call."""
    index = _Index()
    hidden = _turn("a", Message("assistant", "OK", None, (ToolCall(C1, "bash", arguments),)))
    index.add(msgspec.structs.replace(hidden, dialect="gemini"), U1)
    index.add(_turn("b", OK), U1)
    assert index.match(U1, OK, U2)[:2] == ("plain", "ambiguous-reply")


def test_a_call_without_arguments_is_not_hidden():
    index = _Index()
    shown = _turn("a", Message("assistant", "OK", None, (ToolCall(C1, "bash", " "),)))
    index.add(msgspec.structs.replace(shown, dialect="gemini"), U1)
    assert index.match(U1, OK, U2).kind == "plain"


def test_a_reply_with_hidden_calls_leaves_others_in_doubt_although_its_rule_is_switched_off():
    """After `MALFORMED_FUNCTION_CALL` a client asks again, and gets the same text. It may have kept either reply."""
    index = _Index(Leniency(off=frozenset({"calls-hidden"})))
    index.add(_turn("a", OK), U1)
    assert index.match(U1, OK, U2).kind == "continue"
    hidden = _turn("b", Message("assistant", "OK", None, (ToolCall(C1, "bash", "[1]"),)))
    index.add(msgspec.structs.replace(hidden, dialect="gemini"), U1)
    assert index.match(U1, OK, U2)[:2] == ("plain", "ambiguous-reply")


def test_a_rewritten_reply_may_be_another_turns_with_the_text_dropped():
    """CrewAI lowers names, and drops the text beside calls. Ids that count do not show which of them it did."""
    index = _Index(Leniency(harness_rules=frozenset({"name-lowered", "text-dropped"}), tools=frozenset({"bash"})))
    call = ToolCall("functions.bash:0", "bash", "{}")
    one = index.add(_turn("a", Message("assistant", None, None, (msgspec.structs.replace(call, name="Bash"),))), U1)
    history = (S1, U1, Message("assistant", None, None, (call,)), U2)
    assert index.match(*history).anchors == ((2, Hit(one)),)
    index.add(_turn("b", Message("assistant", "Yes.", None, (call,))), U3)
    assert index.match(*history)[:2] == ("plain", "ambiguous-reply")


def test_a_rewritten_reply_known_by_the_message_before_it_may_be_another_turns_that_said_just_this():
    index = _Index(Leniency(harness_rules=frozenset({"name-lowered"}), tools=frozenset({"bash"})))
    index.add(_turn("a", _calling("functions.bash:0", "Bash")), U1)
    index.add(_turn("b", _calling("functions.bash:0")), U3)
    assert index.match(S1, U1, _calling("functions.bash:0"), U2)[:2] == ("plain", "ambiguous-reply")


def test_a_rewritten_reply_that_followed_the_one_before_it_may_be_that_one_once_more():
    index = _Index(Leniency(harness_rules=frozenset({"name-lowered"}), tools=frozenset({"bash"})))
    served, result = _calling("functions.bash:0"), Message("tool", "x", answers="functions.bash:0")
    one = index.add(_turn("a", served), U1)
    index.add(_turn("b", _calling("functions.bash:0", "Bash")), U1, served, result, parent=one)
    other = Message("tool", "y", answers="functions.bash:0")
    assert index.match(S1, U1, served, other, served, other).anchors == ((2, Hit(one)),)


MORE = Message("assistant", "Yes.", None, (ToolCall("functions.bash:0", "bash", "{ }"), ToolCall("functions.bash:1", "look", "cut off")))


def test_a_rewritten_reply_may_be_what_is_left_of_another_ones_calls():
    """The harness executes the calls that it can read, and keeps only them."""
    index = _Index(Leniency(harness_rules=frozenset({"name-lowered"}), tools=frozenset({"bash"})))
    one = index.add(_turn("a", _calling("functions.bash:0", "Bash")), U1)
    assert index.match(S1, U1, _calling("functions.bash:0"), U2).anchors == ((2, Hit(one)),)
    index.add(_turn("b", MORE), U3, OK, U1)
    assert index.match(S1, U1, _calling("functions.bash:0"), U2)[:2] == ("plain", "ambiguous-reply")


def test_a_message_edited_into_another_ones_may_precede_what_is_left_of_a_replys_calls():
    index = _Index(Leniency(harness_rules=frozenset({"name-lowered"}), tools=frozenset({"bash"})))
    one, before = index.add(_turn("a", _calling("functions.bash:0", "Bash")), S1, U1), index.add(_turn("b", OK), U3)
    history = (U3, OK, U1, _calling("functions.bash:0"), U2)
    assert index.match(*history).anchors == ((3, Hit(one)),)
    index.add(_turn("c", MORE), U3, OK, U2, parent=before)
    found = index.match(*history)
    assert (found.parent, found.anchors, found.reason) == (before, (), "ambiguous-reply")


@pytest.mark.parametrize(("match_kind", "reasoning", "known"), [("plain", "hm", True), ("plain", None, False), ("continue", None, True)])
def test_reasoning_that_a_client_wrote_before_the_beginning_of_a_reply_must_still_be_there(match_kind, reasoning, known):
    """It is in the prompt after which the rest was sampled. Before a recorded reply that the client continued, it is the model's own."""
    index, whole = _Index(), _turn("a", Message("assistant", "I see. Done.", "hm"))
    turn = index.add(msgspec.structs.replace(whole, begun=7), U1)
    for key, hits in index.items():
        index[key] = [Hit(msgspec.structs.replace(hit.turn, match=match_kind)) for hit in hits]
    found = index.match(U1, Message("assistant", "I see. Done.", reasoning), U2)
    assert (found.parent.id if found.parent else found.reason) == (turn.id if known else "rewritten-reply")


@pytest.mark.parametrize("added", ["", " And more."])
def test_a_reply_without_the_clients_own_reasoning_may_still_be_that_one_and_not_another_with_its_text(added):
    index, said = _Index(), Message("assistant", f"I see. Done.{added}")
    index.add(_turn("a", said), U1)
    assert (index.match(U1, said, U2).kind, len(index.match(S1, U1, said, U2).anchors)) == ("continue", 1)
    begun = index.add(msgspec.structs.replace(_turn("b", Message("assistant", "I see. Done.", "hm")), begun=7), U1)
    plain = index.turns["b"] = msgspec.structs.replace(begun, match="plain")
    for key, hits in index.items():
        index[key] = [Hit(plain) if hit.turn.id == "b" else hit for hit in hits]
    assert index.match(S1, U1, said, U2)[:2] == ("plain", "ambiguous-reply")
    if not added:  # words are added to a reply in its position only if it had stop strings
        assert index.match(U1, said, U2)[:2] == ("plain", "ambiguous-reply")


@pytest.mark.parametrize(
    ("one", "other", "sent"),
    [
        ("functions.bash:0", "functions.bash:0", "functions.bash:0"),
        (C1, C2, C3),  # a renamed call
    ],
)
def test_a_reply_in_its_position_may_be_another_one_there_with_its_text_dropped(one, other, sent):
    """The look-up at the beginning of a call ends with the first known place, so the id of its call is not looked up."""
    index = _Index()
    index.add(_turn("a", _calling(one)), U1)
    index.add(_turn("b", _calling(other, text="No.")), U1)
    history = (U1, _calling(sent), U2)
    known = [POSITION_KEY + build_conversation(b"", [U1]).chain[-1], CHAIN_KEY + build_conversation(b"", history[:2]).chain[-1]]
    for key in index.keys() - known:
        del index[key]
    assert index.match(*history)[:2] == ("plain", "ambiguous-reply")


def test_a_random_id_distinguishes_the_replies_in_a_position():
    index = _Index()
    one = index.add(_turn("a", _calling(C1)), U1)
    index.add(_turn("b", _calling(C2, text="No.")), U1)
    assert index.match(U1, one.served, U2).parent == one


def test_a_message_edited_into_another_ones_does_not_make_its_reply_the_other_one():
    """Two agents got the same answer to results that differ in the id of the call; one of the ids is written like the other."""
    index, parents = _Index(), {}
    for agent, name in (("a", "functions_bash_0"), ("b", "functions.bash:0")):
        call = _calling("functions.bash:0", text=agent)
        parents[agent] = index.add(_turn(f"{agent}0", call), U1)
        result = Message("tool", "same", answers=name)
        index.add(_turn(f"{agent}1", OK), U1, call, result, parent=parents[agent])
    result = Message("tool", "same", answers="functions_bash_0")
    edited = index.match(S1, U1, _calling("functions_bash_0", text="b"), result, OK, U2)
    assert (edited.anchors, edited.reason) == (((2, Hit(parents["b"])),), "context-edited")
    kept = index.match(S1, U1, _calling("functions_bash_0", text="a"), result, OK, U2)
    assert [(place, hit.turn.id) for place, hit in kept.anchors] == [(2, "a0"), (4, "a1")]


def _calling(name, tool="bash", text=None):
    return Message("assistant", text, None, (ToolCall(name, tool, "{}"),))


@pytest.mark.parametrize(
    ("said", "other", "in_doubt"),
    [
        (Message("assistant", "Yes.\nObservation: a"), Message("assistant", "Yes."), True),
        (Message("assistant", "Yes.\nObservation: a"), Message("assistant", "No."), False),
        (_calling(C1), _calling(C2, text="Yes."), True),
        (_calling(C1), _calling(C2, "ls", text="Yes."), False),
    ],
)
def test_a_reply_known_by_the_message_before_it_may_be_another_one_after_that_message(said, other, in_doubt):
    """To which the harness added words, or whose text it dropped and whose call it renamed: no key finds that turn."""
    sent = msgspec.structs.replace(said, calls=tuple(msgspec.structs.replace(call, id=f"x{call.id[1:]}") for call in said.calls))
    for question, doubtful in ((U1, in_doubt), (U2, False)):
        index = _Index()
        one = index.add(_turn("a", said), U1)
        index.add(_turn("b", other), S1, U3, question)
        found = index.match(Message("system", "edited"), U1, sent, U3)
        assert (found.anchors, found.reason) == (((), "ambiguous-reply") if doubtful else (((2, Hit(one)),), "context-edited"))


def test_a_message_edited_into_another_ones_may_precede_a_reply_that_no_key_finds():
    """The harness added words to the reply, or changed its call in two ways. Another agent said just this, after the edited message."""
    words, yes = Message("assistant", "Yes. So it is."), Message("assistant", "Yes.")
    called, bash = _calling("functions.bash:0", "Bash", text="I look."), _calling("functions.bash:7")
    for said, other, sent in ((words, yes, words), (bash, called, _calling("n1"))):
        index = _Index(Leniency(tools=("bash",)))
        one, before = index.add(_turn("a", said), S1, U1), index.add(_turn("b", OK), U3)
        assert index.match(U3, OK, U1, sent, U2).anchors == ((3, Hit(one)),)
        index.add(_turn("c", other), U3, OK, U2, parent=before)
        found = index.match(U3, OK, U1, sent, U2)
        assert (found.parent, found.anchors, found.reason) == (before, (), "ambiguous-reply")


@pytest.mark.parametrize(("rest", "in_doubt"), [("", False), ("\n", True)])
def test_a_reply_is_not_its_own_beginning_that_the_client_wrote_otherwise(rest, in_doubt):
    """The client asked for the rest of the reply, and there was none: that call has no reply that could come back."""
    index = _Index()
    one = index.add(_turn("a", OK), U1)
    more = _turn("b", Message("assistant", f"OK {rest}"))
    index.add(msgspec.structs.replace(more, begun=3), U1)
    for key in [key for key in index if key[:1] in {b"c", b"r"}]:  # recorded without keys
        index[key] = [hit for hit in index[key] if hit.turn.id != "b"]
    assert index.match(S1, U1, OK, U2).anchors == (() if in_doubt else ((2, Hit(one)),))


def test_another_reply_after_the_same_message_leaves_no_doubt_about_an_id():
    index = _Index()
    one = index.add(_turn("a", _calling(C1)), U1)
    index.add(_turn("b", _calling(C2, text="Yes.")), U1)
    assert index.match(S1, U1, one.served, U2).anchors == ((2, Hit(one)),)


def _ids(turn):
    return ReturnedIdHashes(turn.prefix_hash, turn.completion_hash)


def test_token_ids_identify_one_of_equal_replies():
    index = _Index()
    turns = [index.add(_turn(name, OK), U1) for name in "abc"]
    assert index.match(U1, OK, U2)[:2] == ("plain", "ambiguous-reply")
    for turn in turns:
        assert index.match(U1, OK, U2, echoed={1: _ids(turn)}).parent == turn
        assert index.match(U1, OK, U2, echoed={1: ReturnedIdHashes(turn.prefix_hash)}).parent == turn, "the whole prefix is enough"
        assert index.match(S1, U1, OK, U2, echoed={2: _ids(turn)}).anchors == ((2, Hit(turn)),), "in an edited context, too"
        assert index.match(U3, OK, U2, echoed={1: _ids(turn)}).anchors == ((1, Hit(turn)),), "behind another message, too"


def test_unknown_token_ids_change_nothing():
    index = _Index()
    one = index.add(_turn("a", OK), U1)
    nobody = {1: ReturnedIdHashes(b"other", b"other")}
    assert index.match(U1, OK, U2, echoed=nobody).parent == one
    index.add(_turn("b", OK), U1)
    assert index.match(U1, OK, U2, echoed=nobody)[:2] == ("plain", "ambiguous-reply")
    parted = {1: ReturnedIdHashes(one.prefix_hash, b"other")}
    assert index.match(U1, OK, U2, echoed=parted).reason == "ambiguous-reply", "parted elsewhere: not what was sampled"


def test_token_ids_do_not_make_up_for_other_words():
    index = _Index()
    one, two = (index.add(_turn(name, _thought("OK", name)), U1) for name in "ab")
    assert index.match(U1, _thought("OK", "b"), U2, echoed={1: _ids(one)}).parent == two
    assert index.match(U1, _thought("OK", "c"), U2, echoed={1: _ids(one)})[:2] == ("plain", "rewritten-reply")
    assert index.match(U1, Message("assistant", "No"), U2, echoed={1: _ids(one)}).parent is None


def test_of_turns_with_the_named_tokens_the_one_that_nothing_continues_is_taken():
    index = _Index()
    turns = [index.add(_turn(name, OK, b"same"), U1) for name in "ab"]
    (key,) = [key for key in index if key[:1] == b"c"]
    index[key] = [Hit(turns[0], continued=True), Hit(turns[1])]
    assert index.match(U1, OK, U2).kind == "branch"
    found = index.match(U1, OK, U2, echoed={1: _ids(turns[0])})
    assert (found.kind, found.parent) == ("continue", turns[1]), "each of two rollouts goes on from a turn of its own"


def test_positions_of_replies_in_a_client_s_ids_are_not_recorded():
    """A turn that begins with such ids is gone on from while its history comes back in the same bytes, and not judged anew."""
    index = _Index()
    one = index.add(_turn("a", OK), U1)
    two = index.add(_turn("b", Message("assistant", "No")), U1, OK, U2, parent=one)
    client = msgspec.structs.replace(two, match="resplice", parent=None, reason="client-ids")
    assert evidence.placed_replies(client, {}) is None
    assert evidence.placed_replies(two, index.turns) is not None


@pytest.mark.parametrize(
    ("said", "again"),
    [(_calling(C1, text="I look."), _calling(C1, text="I look.")), (_calling(C1, text="I look."), _calling(C1)), (OK, OK)],
)
def test_a_reply_that_is_text_in_the_prompt_is_in_no_other_place(said, again):
    """The prompt of the turn that is continued has the reply as text. A harness that copies it does not send it back twice."""
    for copied in (True, False):
        index = _Index(Leniency(harness_rules=frozenset({"text-dropped"})))
        one = index.add(_turn("a", said), S1, U1)
        before = (U3, U1, said if copied else _calling(C2), U2)
        parent = index.add(_turn("b", Message("assistant", "so")), *before)
        found = index.match(*before, parent.served, U1, again, U2)
        assert (found.parent, found.anchors) == (parent, () if copied else ((6, Hit(one)),))


@pytest.mark.parametrize("named", ["handle", "token ids", "position", "id", "message before", "nothing"])
def test_a_reply_that_another_message_is_though_changed_is_not_its_copy(named):
    """The harness changed the reply, so that it is not recognized; another message says just what the model said, or has the same calls."""
    index = _Index(Leniency(harness_rules=frozenset({"text-dropped"}), tools=("bash",)))
    one, other = (Message("assistant", None, None, (ToolCall("functions.bash:0", name, "{}"),)) for name in ("Bash", "bash"))
    said = {"id": _calling(C1, text="I look."), "message before": one}.get(named, OK)
    turn = index.add(msgspec.structs.replace(_turn("a", said), handle="a" * 32), U1)
    changed = {"id": _calling(C1, text="No."), "message before": other}.get(named, Message("assistant", "No."))
    first, copy = () if named == "position" else (S1,), _calling(C1) if named == "id" else said
    handles, echoed = {2: turn.handle} if named == "handle" else {}, {2: _ids(turn)} if named == "token ids" else {}
    found = index.match(*first, U1, changed, U1, copy, U2, handles=handles, echoed=echoed)
    assert found.anchors == (((4, Hit(turn)),) if named == "nothing" else ())


def test_a_copy_before_a_reply_that_is_in_doubt_is_in_doubt_as_well():
    """After the copy, the reply may be another one with the same words, which followed it after another message: then that was edited."""
    index = _Index()
    one = index.add(_turn("a", OK), U2)
    assert index.match(S1, U2, OK, U2, OK, U3).anchors == ()
    index.add(_turn("b", OK), U2, OK, U1, parent=one)
    assert index.match(S1, U2, OK, U2, OK, U3).anchors == ()


@pytest.mark.parametrize("known", [True, False])
def test_after_a_reply_that_is_not_known_a_turn_sampled_after_as_many_messages_may_be_the_reply(known):
    """Its message may have been written otherwise, and be that of another turn now, which was sampled later."""
    index, yes = _Index(), Message("assistant", "Yes")
    before = index.add(_turn("a", yes), U1)
    one = index.add(_turn("b", OK), U3, U3, U3, U2)
    assert index.match(U1, yes, U2, OK, U3).anchors == ((3, Hit(one)),)
    index.add(_turn("c", OK), U3, Message("assistant", "No"), U1)
    first, place = ((U1, yes), before) if known else ((U3, Message("assistant", "No")), None)
    assert index.match(*first, U2, OK, U3)[2::2][:2] == (place, ((3, Hit(one)),) if known else ())


def test_the_first_reply_may_be_that_of_a_turn_sampled_after_as_many_messages():
    """A client that trims its messages may have made the message before one of them that of the other."""
    index = _Index()
    one = index.add(_turn("a", OK), U1)
    index.add(_turn("b", OK), U2, U2, U2)
    assert index.match(S1, U1, OK, U3).anchors == ((2, Hit(one)),)
    index.add(_turn("c", OK), S1, Message("user", "one "))
    assert index.match(S1, U1, OK, U3).anchors == ()


def test_a_turn_with_other_tokens_does_not_make_up_for_two_places_of_one():
    """Either place may be the turn that followed the reply before the second one. The other turn with its words is in one of them."""
    index, yes, no = _Index(), Message("assistant", "Yes"), Message("assistant", "No")
    before, other = index.add(_turn("a", yes), U1), index.add(_turn("b", no), U3)
    one = index.add(_turn("c", OK), U1, yes, U2, parent=before)
    index.add(_turn("d", OK), U3, no, U2, parent=other)
    assert index.match(S1, U3, yes, U1, yes, U2, OK, U3).anchors == ((4, Hit(before)), (6, Hit(one)))
    assert index.match(S1, U2, OK, U1, yes, U2, OK, U3).anchors == ((4, Hit(before)),)


def test_a_whole_reply_with_its_id_is_not_the_copy_of_a_changed_one():
    index, changed = _Index(), _calling(C1, text="No.")
    one = index.add(_turn("a", _calling(C1, text="I look.")), U1)
    assert index.match(S1, U1, changed, U1, one.served, U2).anchors == ((4, Hit(one)),)
    index.add(_turn("b", OK), U3, changed, U2)
    assert index.match(U3, changed, U2, OK, U1, one.served, U2).anchors == ((5, Hit(one)),), "the changed one is text in a prompt"


def test_a_rewritten_reply_in_its_position_is_not_it_if_the_whole_reply_is_another_message_with_its_handle():
    index = _Index(CLAUDE)
    one = index.add(msgspec.structs.replace(_turn("a", _bash("functions.bash:0", "cd /w && ls")), handle="a" * 32), U1)
    rewritten = _bash("functions.bash:0", "ls")
    assert index.match(U1, rewritten, U2).parent == one
    found = index.match(U1, rewritten, U2, one.served, U2, handles={3: one.handle})
    assert (found.parent, found.anchors) == (None, ((3, Hit(one)),))


def test_a_reply_without_its_text_is_not_in_its_position_if_the_whole_reply_is_another_message():
    """A harness that drops the text does not send it. An exact copy in its position cannot be told from the reply."""
    index = _Index(Leniency(harness_rules=frozenset({"text-dropped"})))
    one = index.add(_turn("a", _calling(C1, text="I look.")), U1)
    for again, after, anchors in [
        (_calling(C1), (), ()),
        (_calling(C1), (one.served, U2), ((3, Hit(one)),)),
        (_calling(C1), (_calling(C1, text="No."), U2), ()),
        (one.served, (one.served, U2), ()),
    ]:
        found = index.match(U1, again, U2, *after)
        assert (found.parent, found.anchors) == (None if anchors else one, anchors)


def test_replies_with_equal_tokens_after_different_prompts_are_known_by_their_position():
    """The same words were also said elsewhere, after the same message, in other tokens."""
    index = _Index()
    index.add(_turn("a", OK), S1, U1)
    for name in "bc":
        turn = msgspec.structs.replace(_turn(name, OK), prefix_hash=name.encode(), completion_hash=b"same")
        index.add(turn, U2, Message("assistant", "own"), U1)
    found = index.match(U2, Message("assistant", "own"), U1, OK, U3)
    assert (found.kind, [(place, hit.turn.id) for place, hit in found.anchors]) == ("resplice", [(3, "b")])


def test_of_replies_with_equal_tokens_the_one_whose_prompt_still_holds_is_continued():
    index = _Index()
    own = [_thought("Like this.", thought) for thought in ("an example", "another")]
    for name, example in zip("ab", own, strict=True):
        turn = msgspec.structs.replace(_turn(name, OK), prefix_hash=name.encode(), completion_hash=b"same")
        index.add(turn, U1, example, U2)
    for name, example in zip("ab", own, strict=True):
        assert index.match(U1, example, U2, OK, U3)[:3] == ("continue", "", index.turns[name])

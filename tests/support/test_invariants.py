"""Each checker is silent on what is right, and speaks up when its property is broken."""

import random

import msgspec
import pytest

from tests.core.forest import Forest, grow, line
from tests.core.world import decode, play
from tests.support import invariants
from tokencache.core import ids
from tokencache.core.lineage import sequences
from tokencache.core.turn import Anchor, Tokens


def told(found, *words):
    """Something was found, and it says where."""
    assert found
    assert all(any(word in sentence for sentence in found) for word in words), found


def checked(forest):
    return sequences(forest.turns, forest.tokens)


# extension


def test_extension_of_a_forest():
    for seed in range(20):
        forest = grow(random.Random(seed))
        assert invariants.extension(forest.turns, forest.tokens) == []


def test_extension_broken_by_a_token():
    forest = line(3)
    forest.change("t2", shared=8, delta=ids.pack([101, 0, 2, 50, 51]))
    told(
        invariants.extension(forest.turns, forest.tokens, session="r1"),
        "session r1: turn t2: leaves the prefix of its parent t1 at token 9 of 10",
    )


def test_extension_broken_by_a_prompt_that_ends_early():
    forest = line(2).change("t1", shared=3, delta=b"", prompt_tokens=3)
    told(invariants.extension(forest.turns, forest.tokens), "turn t1", "token 3 of 5")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"parent": "nobody"}, "parent nobody is not recorded"),
        ({"parent": None}, "is a continue and has no parent"),
        ({"match": "resplice"}, "is a resplice and has a parent"),
        ({"base": "nobody"}, "base nobody is not recorded"),
        ({"shared": 2}, "prompt and completion tokens"),
        ({"completion_tokens": 7}, "prompt and completion tokens"),
    ],
)
def test_extension_broken_by_records_that_do_not_fit(fields, word):
    forest = line(3).change("t1", **fields)
    told(invariants.extension(forest.turns, forest.tokens), "turn t1", word)


def test_extension_with_a_turn_missing_or_out_of_order():
    forest = line(3)
    told(invariants.extension([forest.turns[0], forest.turns[2]], forest.tokens), "turn t2")
    told(invariants.extension(forest.turns[::-1], forest.tokens), "turn t1")
    told(invariants.extension([*forest.turns, forest.turns[1]], forest.tokens), "recorded twice")
    del forest.tokens["t1"]
    told(invariants.extension(forest.turns, forest.tokens), "turn t1: its tokens are missing")


# apart


@pytest.mark.parametrize(
    "fields", [{}, {"parent": None, "match": "resplice", "origin": "t0"}, {"parent": None, "base": None, "context_base": "t0"}]
)
def test_apart_broken_by_another_model(fields):
    forest = line(2)
    assert invariants.apart(forest.turns) == []
    forest.change("t1", model="judge", **fields)
    told(invariants.apart(forest.turns), "turn t1 of judge: refers to turn t0")


# engine_agrees


def ground_truth(forest):
    return [(list(p), list(c), list(lp)) for p, c, lp in forest.ground_truth]


def test_engine_agrees_whatever_the_order():
    forest = line(3)
    assert invariants.engine_agrees(forest.turns, forest.tokens, ground_truth(forest)[::-1]) == []
    twins = Forest()
    for _ in range(2):
        twins.add([1], [2], logprobs=[-0.5])
    assert invariants.engine_agrees(twins.turns, twins.tokens, twins.ground_truth) == []


@pytest.mark.parametrize(
    ("part", "value", "word"),
    [
        (0, [0, 50, 51, 100, 9, 1, 50, 52], "this prompt of 8 tokens (the nearest shares 7)"),
        (1, [101, 10], "another completion from token 1 on"),
        (1, [101, 9, 9], "another completion from token 2 on"),
        (2, [-1.125, -1.2500000000000002], "other log probabilities"),
        (2, [-1.125], "other log probabilities"),
    ],
)
def test_engine_disagrees(part, value, word):
    forest = line(3)
    kept = ground_truth(forest)
    assert list(kept[1][part]) != value
    kept[1] = tuple(value if i == part else x for i, x in enumerate(kept[1]))
    told(
        invariants.engine_agrees(forest.turns, forest.tokens, kept, session="r1"),
        f"session r1: turn t1: {'none of the engine' if part == 0 else ''}",
        word,
        "engine's entry 1",
    )


def test_an_unrecorded_entry_and_a_turn_that_the_engine_never_made():
    forest = line(3)
    found = invariants.engine_agrees(forest.turns[:2], forest.tokens, ground_truth(forest))
    assert found == ["engine's entry 2: recorded by no turn (13 prompt and 2 completion tokens)"]
    told(invariants.engine_agrees(forest.turns, forest.tokens, ground_truth(forest)[:2]), "turn t2")
    told(invariants.engine_agrees(forest.turns, forest.tokens, []), "turn t0", "turn t1", "turn t2")
    told(invariants.engine_agrees(forest.turns, forest.tokens, ground_truth(forest) + ground_truth(forest)[:1]), "engine's entry 3")
    doubled = Forest()
    for _ in range(2):
        doubled.add([1], [2], logprobs=[-0.5])
    told(invariants.engine_agrees(doubled.turns, doubled.tokens, doubled.ground_truth[:1]), "turn t1")


def test_what_an_aborted_turn_and_one_without_log_probabilities_may_lack():
    forest = Forest()
    forest.add([1], [2, 3], marks=("aborted",))
    forest.add([4], [5], marks=("no-logprobs",), logprobs=[])
    kept = [([1], [2, 3, 4], [-0.125, -0.25, -0.5]), ([4], [5], [-0.5])]
    assert invariants.engine_agrees(forest.turns, forest.tokens, kept) == []
    forest.change("t0", marks=()).change("t1", marks=())
    told(invariants.engine_agrees(forest.turns, forest.tokens, kept), "turn t0", "turn t1")


def test_an_aborted_turn_does_not_take_the_entry_of_a_whole_one():
    forest = Forest()
    forest.add([1], [2], marks=("aborted",), logprobs=[-0.5])
    forest.add([1], [2], logprobs=[-0.5])
    assert invariants.engine_agrees(forest.turns, forest.tokens, [([1], [2], [-0.5]), ([1], [2, 3], [-0.5, -0.5])]) == []


# fidelity


PROMPT = [1, 200, 5, 3, 201, 202, 5, 2, 203, 5, 3]
"""<system> d <end> <assistant> [ef<end>] <user> g <end> <assistant>, with a model that said `ef`."""
RENDERED = "<system>d<end>\n<assistant>ef<end>\n<user>g<end>\n<assistant>"


def test_fidelity():
    assert decode(PROMPT) == RENDERED
    assert invariants.fidelity(PROMPT, [(4, 7)], decode, RENDERED, ["ef<end>\n"]) == []
    assert invariants.fidelity([*PROMPT[:4], 9, 9, 5, *PROMPT[7:]], [(4, 7)], decode, RENDERED, ["ef<end>\n"]) == []  # its own business
    assert invariants.fidelity(PROMPT, [], decode, RENDERED, []) == []
    assert invariants.fidelity([], [], decode, "", []) == []


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ([1, 207, *PROMPT[2:]], "at character 8: 'k"),
        ([*PROMPT[:7], 5, *PROMPT[7:]], "tokens 7 to 12: in the text before span 1, at character 35"),  # an end of turn twice
        (PROMPT[:7] + PROMPT[8:], "tokens 7 to 10"),  # a separator lost
        (PROMPT[:-1], "the rendering continues with '<assistant>'"),
        ([*PROMPT, 200], "'d'"),
        ([200, *PROMPT[1:]], "at character 0"),
    ],
)
def test_fidelity_broken(prompt, word):
    told(invariants.fidelity(prompt, [(4, 7)], decode, RENDERED, ["ef<end>\n"], session="r1"), "session r1", word)


def test_fidelity_broken_by_spans():
    told(invariants.fidelity(PROMPT, [(4, 7)], decode, RENDERED, []), "1 spans, and 0 replies")
    told(invariants.fidelity(PROMPT, [(4, 6)], decode, RENDERED, ["ef<end>\n"]), "tokens 6 to 11")
    told(invariants.fidelity(PROMPT, [(4, 7)], decode, RENDERED, ["other"]), "in the reply of span 0")
    told(invariants.fidelity(PROMPT, [(7, 4)], decode, RENDERED, [""]), "span 0 (7, 4)")
    told(invariants.fidelity(PROMPT, [(4, 70)], decode, RENDERED, [""]), "span 0 (4, 70)")
    told(invariants.fidelity(PROMPT, [(4, 7), (6, 8)], decode, RENDERED, ["ef<end>\n", ""]), "span 1 (6, 8)")


# trained_once


def test_trained_once():
    for seed in range(20):
        forest = grow(random.Random(seed))
        assert invariants.trained_once(checked(forest), forest.turns, forest.tokens) == []


def breaker(**change):
    """Break one list of the first sequence of a line at one place, or all of it."""

    def broken(built):
        fields = {name: f(list(getattr(built[0], name))) for name, f in change.items()}
        return [msgspec.structs.replace(built[0], **fields), *built[1:]]

    return broken


def put(at, value):
    def one(values):
        values[at] = value
        return values

    return one


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        (breaker(loss_mask=put(0, 1)), "token 0 was not sampled here"),
        (breaker(loss_mask=put(6, 1)), "token 6 was not sampled here"),
        (breaker(logprobs=put(6, -0.5)), "token 6 was not sampled here"),
        (breaker(loss_mask=put(8, 0)), "turn t1, tokens 8 to 10: mask is not 1 throughout"),
        (breaker(loss_mask=put(8, 2)), "mask is not 1 throughout"),
        (breaker(logprobs=put(9, -1.0)), "turn t1, tokens 8 to 10: not the log probabilities"),
        (breaker(logprobs=lambda v: [0.0, *v[:-1]]), "not the log probabilities"),
        (breaker(token_ids=put(9, 8)), "turn t1, tokens 8 to 10: not the tokens sampled"),
        (breaker(token_ids=put(0, 8)), "turn t0, tokens 3 to 5: comes after another prompt"),
        (breaker(token_ids=lambda v: v[:-1]), "turn t2, tokens 13 to 15: not the tokens"),
        (breaker(loss_mask=lambda v: v[:-1]), "turn t2"),
        (breaker(turns=lambda v: v[:-1]), "turn t2: is in 0 sequences"),
        (breaker(turns=lambda v: [*v, v[0]]), "turn t0: is in 2 sequences"),
        (lambda built: built * 2, "turn t0: is in 2 sequences"),
        (lambda built: [], "turn t1: is in 0 sequences"),
    ],
)
def test_trained_once_broken(broken, word):
    forest = line(3)
    told(invariants.trained_once(broken(checked(forest)), forest.turns, forest.tokens, session="r1"), "session r1", word)


def test_trained_once_with_an_unrecorded_turn():
    forest = line(3)
    told(invariants.trained_once(checked(forest), forest.turns[:2], forest.tokens), "turn t2: is in a sequence, and not recorded")


def test_log_probabilities_must_not_be_missing_in_silence():
    forest = line(3).change("t1", logprobs=b"")
    told(
        invariants.trained_once(checked(forest), forest.turns, forest.tokens),
        "turn t1",
        "0 log probabilities for 2 tokens, and the turn is not marked",
    )
    forest.change("t1", marks=("no-logprobs",))
    assert invariants.trained_once(checked(forest), forest.turns, forest.tokens) == []


def test_what_a_branch_repeats_is_not_trained_again():
    forest = line(2)
    forest.add([7], [8], "t0", match="branch")
    built = checked(forest)
    again = msgspec.structs.replace(built[1], loss_mask=[0, 0, 0, 1, 1, 0, 1])
    assert invariants.trained_once(built, forest.turns, forest.tokens) == []
    told(invariants.trained_once([built[0], again], forest.turns, forest.tokens), "sequence t2: token 3 was not sampled here")


# aligned


def test_aligned():
    for seed in range(20):
        assert all(invariants.aligned(sequence) == [] for sequence in checked(grow(random.Random(seed))))


def shifted(n, **spans):
    def one(turns):
        turns[n] = msgspec.structs.replace(turns[n], **spans)
        return turns

    return one


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        (breaker(loss_mask=lambda v: v[1:]), "15 tokens, 14 mask entries, 15 log probabilities"),
        (breaker(logprobs=lambda v: [*v, 0.0]), "16 log probabilities"),
        (breaker(token_ids=lambda v: v[:-1]), "14 tokens"),
        (breaker(loss_mask=put(3, 2)), "other than 0 and 1"),
        (breaker(turns=shifted(1, prompt=(6, 8))), "do not go on from token 5"),
        (breaker(turns=shifted(1, completion=(9, 10))), "do not go on from token 5"),
        (breaker(turns=shifted(1, prompt=(5, 9), completion=(9, 10))), "prompt ends at 9"),
        (
            breaker(turns=shifted(2, completion=(13, 14))),
            "completion has 1 tokens",
        ),
        (breaker(turns=lambda v: v[:-1]), "its turns end at token 10 of 15"),
        (breaker(turns=lambda v: [v[0], v[2]]), "turn t2"),
        (breaker(turns=lambda v: [v[1], v[0], v[2]]), "turn t1"),
    ],
)
def test_aligned_broken(broken, word):
    (sequence,) = broken(checked(line(3)))
    told(invariants.aligned(sequence, session="r1"), "session r1: sequence t0", word)


# linear


def test_linear():
    for seed in range(20):
        forest = grow(random.Random(seed))
        assert invariants.linear(forest.turns, forest.tokens) == []


def test_linear_broken_by_a_turn_that_stores_its_whole_prompt():
    forest = line(3)
    forest.change("t2", base=None, shared=0, delta=ids.head(forest.prefix["t2"], 13))
    assert invariants.extension(forest.turns, forest.tokens) == []
    assert invariants.linear(forest.turns, forest.tokens, session="r1") == ["session r1: turn t2: stores 13 prompt tokens, 3 are new"]


# anchored


def respliced(**fields):
    """Two turns of a line, and one whose prompt has the end of the first reply and the whole second."""
    forest = line(2)
    first, second = Anchor("t0", 1, 2, 1, 1), Anchor("t1", 3, 5, 3)
    prompt = [7, 9, 8, 101, 9, 6]
    forest.add(prompt, [55, 9])
    turn = forest.turns[-1]
    forest.turns[-1] = msgspec.structs.replace(turn, match="resplice", anchors=fields.get("anchors", (first, second)))
    return forest


def test_anchored():
    forest = respliced()
    assert invariants.anchored(forest.turns, forest.tokens) == []
    assert invariants.audit(forest.turns, forest.tokens) == []


@pytest.mark.parametrize(
    ("anchors", "word"),
    [
        ((Anchor("t0", 1, 2, 1, 0),), "is not what that turn sampled from token 0 on"),
        ((Anchor("t0", 1, 3, 1, 1),), "is not what that turn sampled from token 1 on"),
        ((Anchor("t1", 2, 4, 3),), "is not what that turn sampled from token 0 on"),
        ((Anchor("t1", 3, 5, 3), Anchor("t0", 4, 5, 1, 1)), "is not between"),
        ((Anchor("t1", 3, 9, 3),), "is not between"),
        ((Anchor("t9", 3, 5, 3),), "is not recorded"),
    ],
)
def test_anchored_broken(anchors, word):
    forest = respliced(anchors=anchors)
    told(invariants.anchored(forest.turns, forest.tokens, session="r1"), "session r1: turn t2", word)
    assert invariants.audit(forest.turns, forest.tokens)


# all together


def test_audit_of_a_session_that_was_played():
    world = play(random.Random(7))
    assert invariants.audit(world.turns, world.tokens) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"delta": ids.pack([1, 50, 52])},
        {"shared": 4},
        {"logprobs": b""},
        {"parent": None},
        {"completion": ids.pack([101])},
        {"base": None, "shared": 0, "delta": ids.pack([0, 50, 51, 100, 9, 1, 50, 51])},
    ],
)
def test_audit_and_ground_truth_reject_every_broken_record(fields):
    forest = line(3)
    kept = ground_truth(forest)
    forest.change("t1", **fields)
    assert invariants.audit(forest.turns, forest.tokens) or invariants.engine_agrees(forest.turns, forest.tokens, kept)


def test_audit_reports_what_it_cannot_build():
    forest = line(3)
    forest.tokens["t1"] = Tokens(b"", b"")
    told(invariants.audit(forest.turns, forest.tokens, session="r1"), "session r1: turn t1")

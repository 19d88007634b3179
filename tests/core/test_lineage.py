"""The turns of a session as sequences for a trainer."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.forest import Forest, grow, line
from tests.core.settings import MANY
from tests.support import invariants
from tokencache.core import ids
from tokencache.core.lineage import lineages, sequences
from tokencache.core.media import PlacedMedia
from tokencache.core.turn import Tokens, Turn, rebuild_prefix
from tokencache.store.encoding import pack, unpack


def names(forest):
    return [[turn.id for turn in of] for of in lineages(forest.turns)]


@MANY
@given(st.randoms(use_true_random=False))
def test_any_forest_is_trained_once_and_exactly(rng):
    forest = grow(rng)
    assert invariants.audit(forest.turns, forest.tokens) == []
    built = sequences(forest.turns, forest.tokens)
    assert sum(len(s.turns) for s in built) == len(forest.turns)
    pairs = sorted((t, p) for s in built for t, p, m in zip(s.token_ids, s.logprobs, s.loss_mask, strict=True) if m)
    assert pairs == sorted((t, p) for _, c, lp in forest.ground_truth if lp for t, p in zip(c, lp, strict=True))


@MANY
@given(st.randoms(use_true_random=False))
def test_every_prefix_is_rebuilt_from_deltas(rng):
    forest = grow(rng)
    lookup = {turn.id: (turn, forest.tokens[turn.id]) for turn in forest.turns}
    for turn, (prompt, completion, _) in zip(forest.turns, forest.ground_truth, strict=True):
        prefix = rebuild_prefix(lookup, turn.id)
        assert ids.unpack(prefix.prompt) == prompt
        assert ids.unpack(prefix.ids) == prompt + completion
        assert prefix.completion == len(completion)


def test_a_line_is_one_sequence():
    forest = line(3)
    (built,) = sequences(forest.turns, forest.tokens)
    assert (built.id, built.parent, built.start) == ("t0", None, "root")
    assert built.token_ids == [0, 50, 51, 100, 9, 1, 50, 51, 101, 9, 2, 50, 51, 102, 9]
    assert built.loss_mask == [0, 0, 0, 1, 1] * 3
    assert [span.completion for span in built.turns] == [(3, 5), (8, 10), (13, 15)]
    assert built.logprobs[3:5] == [-0.125, -0.25]
    assert built.logprobs[5:8] == [0.0] * 3


def test_a_line_stores_its_tokens_once():
    forest = line(40)
    stored = sum(len(t.delta) + len(t.completion) for t in forest.tokens.values())
    assert stored == len(forest.prefix["t39"])


def test_a_retry_whose_answer_was_thrown_away_is_a_sequence_of_its_own():
    forest = Forest()
    first = forest.add([1], [2])
    lost = forest.add([3], [4], first)
    kept = forest.add([3], [5], first)
    forest.add([6], [7], kept)
    assert names(forest) == [["t0", "t2", "t3"], [lost]]
    main, retry = sequences(forest.turns, forest.tokens)
    assert (retry.parent, retry.start) == (main.id, "branch")
    assert (retry.token_ids, retry.loss_mask) == ([1, 2, 3, 4], [0, 0, 0, 1])


def test_of_equal_children_the_first_recorded_is_the_heir():
    forest = Forest()
    first = forest.add([1], [2])
    forest.add([3], [4], first)
    forest.add([3], [5], first)
    assert names(forest) == [["t0", "t1"], ["t2"]]


@pytest.mark.parametrize("mark", ["aborted", "engine-aborted", "upstream-broke", "engine-error", "uncertain", "unanswered"])
def test_of_leaves_a_complete_reply_goes_before_one_that_broke_off(mark):
    forest = Forest()
    first = forest.add([1], [2])
    forest.add([3], [4], first, marks=(mark,))
    forest.add([3], [5], first)
    assert names(forest) == [["t0", "t2"], ["t1"]]


def test_the_line_that_the_harness_went_on_from_stays_whole_though_a_reply_in_it_was_interrupted():
    forest = Forest()
    first = forest.add([1], [2])
    cut = forest.add([3], [4], first, marks=("aborted",))
    forest.add([8], [9], first)  # a side call
    forest.add([6], [7], cut)
    assert names(forest) == [["t0", "t1", "t3"], ["t2"]]


def test_a_resplice_names_the_sequence_its_context_came_from():
    forest = line(2)
    forest.add([7, 7], [8], match="resplice", reason="context-edited", origin="t1")
    _, other = sequences(forest.turns, forest.tokens)
    assert (other.parent, other.start, other.reason) == ("t0", "resplice", "context-edited")


def test_a_turn_without_log_probabilities_is_context():
    forest = Forest()
    first = forest.add([1], [2, 2], marks=("no-logprobs",), logprobs=[])
    forest.add([3], [4], first)
    (built,) = sequences(forest.turns, forest.tokens)
    assert built.loss_mask == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("n", [0, 1, 2])
@pytest.mark.parametrize("member", ["completion", "delta"])
def test_torn_records_are_refused(n, member):
    forest = line(3)
    forest.change(f"t{n}", **{member: getattr(forest.tokens[f"t{n}"], member)[:-4]})
    with pytest.raises(ValueError, match=f"t{n}"):
        sequences(forest.turns, forest.tokens)


def test_a_turn_that_leaves_its_parent_is_refused():
    forest = line(2)
    forest.change("t1", shared=4, delta=ids.pack([5, 1, 50, 51]))
    with pytest.raises(ValueError, match="does not extend"):
        sequences(forest.turns, forest.tokens)


def test_missing_tokens_are_refused():
    forest = line(2)
    del forest.tokens["t1"]
    with pytest.raises(KeyError):
        sequences(forest.turns, forest.tokens)


def shot(start, name="a"):
    return PlacedMedia("image", name * 64, "image/png", start, 4)


def media_turn(name, *, base=None, shared=0, media=()):
    return Turn(id=name, call=name, match="root", base=base, shared=shared, media=tuple(media))


def test_a_sequence_has_the_media_of_its_last_prompt():
    first = media_turn("1", media=[shot(0)])
    last = msgspec.structs.replace(media_turn("2", media=[shot(0), shot(4, "b")]), match="continue", parent="1", base="1", prompt_tokens=8)
    tokens = {"1": Tokens(b"", b""), "2": Tokens(ids.pack([7] * 8), b"")}
    (sequence,) = sequences([first, last], tokens)
    assert sequence.media == (shot(0), shot(4, "b"))


def test_a_turn_without_media_is_stored_in_the_same_bytes_as_before_there_were_any():
    plain, seen = media_turn("1"), media_turn("1", media=[shot(2)])
    assert "media" not in msgspec.to_builtins(plain)
    assert unpack(pack(plain), Turn) == plain
    assert unpack(pack(seen), Turn) == seen

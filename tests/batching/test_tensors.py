"""Padded, packed and flattened rows: each array holds exactly what the rows hold, at their places."""

import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batching.made import random_rows, row
from tests.core.settings import SOME
from tokencache.batching.forest import build_forest
from tokencache.batching.tensors import as_torch, flatten, pack, pad, tree_mask


def advantages_of(rows):
    return [n + 0.5 for n in range(len(rows))]


def wanted(one, advantage):
    """What a row holds: tokens, positions, mask, log probabilities, advantages."""
    sequence = one.sequence
    spread = [advantage if mask else 0.0 for mask in sequence.loss_mask]
    return [sequence.token_ids, list(range(len(sequence.token_ids))), [bool(m) for m in sequence.loss_mask], sequence.logprobs, spread]


def parts(arrays, place):
    names = ("token_ids", "position_ids", "loss_mask", "logprobs", "advantages")
    return [getattr(arrays, name)[place].tolist() for name in names]


@SOME
@given(st.integers(0, 2**32), st.booleans())
def test_padded_rows_hold_what_the_rows_hold(seed, left):
    rows = random_rows(seed)
    advantages = advantages_of(rows)
    padded = pad(rows, advantages, pad_id=-7, left=left)
    for n, one in enumerate(rows):
        kept = padded.attention_mask[n]
        assert parts(padded, (n, kept)) == wanted(one, advantages[n])
        assert (padded.token_ids[n, ~kept] == -7).all()
        assert not padded.loss_mask[n, ~kept].any()
        own, size = len(one.sequence.token_ids), padded.token_ids.shape[1]
        assert kept.tolist() == ([False] * (size - own) + [True] * own if left else [True] * own + [False] * (size - own))


@SOME
@given(st.integers(0, 2**32), st.integers(0, 40) | st.none())
def test_packed_rows_hold_what_the_rows_hold(seed, room):
    rows = random_rows(seed)
    advantages = advantages_of(rows)
    longest = max((len(one.sequence.token_ids) for one in rows), default=0)
    most = None if room is None else longest + room
    packs = pack(rows, advantages, max_tokens=most)
    assert sorted(n for one in packs for n in one.rows.tolist()) == list(range(len(rows)))
    for one in packs:
        assert most is None or len(one.token_ids) <= most
        bounds = one.cu_seqlens.tolist()
        assert (bounds[0], bounds[-1]) == (0, len(one.token_ids))
        for n, start, end in zip(one.rows.tolist(), bounds[:-1], bounds[1:], strict=True):
            assert parts(one, slice(start, end)) == wanted(rows[n], advantages[n])


@SOME
@given(st.integers(0, 2**32))
def test_a_flat_forest_holds_what_the_rows_hold(seed):
    rows = random_rows(seed)
    advantages = advantages_of(rows)
    forest = build_forest(rows)
    flat = flatten(forest, advantages)
    for n, one in enumerate(rows):
        path = [i for start, end in forest.ranges(n) for i in range(start, end)]
        ids, positions, mask, logprobs, spread = wanted(one, advantages[n])
        assert flat.token_ids[path].tolist() == ids
        assert flat.position_ids[path].tolist() == positions
        own = [i for i, trained in zip(path, mask, strict=True) if trained]
        assert flat.loss_mask[own].all()
        assert flat.logprobs[own].tolist() == [value for value, trained in zip(logprobs, mask, strict=True) if trained]
        assert flat.advantages[own].tolist() == [value for value, trained in zip(spread, mask, strict=True) if trained]
    assert flat.loss_mask.sum() == sum(sum(one.sequence.loss_mask) for one in rows)
    assert not flat.advantages[~flat.loss_mask].any()


def test_types_of_the_arrays():
    rows = [row([1, 2], [0, 1])]
    assert [array.dtype.name for array in pad(rows)] == ["int64", "bool", "int64", "bool", "float32", "float32"]
    assert [array.dtype.name for array in pack(rows)[0]] == ["int64", "int64", "bool", "float32", "float32", "int32", "int64"]
    assert [array.dtype.name for array in flatten(build_forest(rows))] == ["int64"] * 4 + ["bool", "float32", "float32"]


def test_no_rows_make_empty_arrays():
    assert pad([]).token_ids.shape == (0, 0)
    assert pack([])[0].cu_seqlens.tolist() == [0]
    assert pack([], max_tokens=8) == []
    assert flatten(build_forest([])).token_ids.shape == (0,)


def test_the_mask_of_a_tree():
    rows = [row([5, 1], sequence="a"), row([5, 2, 3], sequence="b")]
    mask = tree_mask(flatten(build_forest(rows)))
    assert mask.astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]


def test_one_advantage_for_each_token():
    rows = [row([1, 2, 3], [0, 1, 1], logprobs=[0.0, -1.0, -1.0])]
    given_values = [[9.0, 0.25, 0.5]]
    for arrays in (pack(rows, given_values)[0], flatten(build_forest(rows), given_values)):
        assert arrays.advantages.tolist() == [0.0, 0.25, 0.5]


@pytest.mark.parametrize("make", [pad, pack])
def test_a_row_whose_lists_have_different_lengths_is_refused(make):
    cut = row([5, 6, 7], [0, 1, 1], logprobs=[0.0, -0.5])
    with pytest.raises(ValueError, match="sequence q: 3 tokens, 3 mask entries, 2 log probabilities"):
        make([cut, row([5, 8], [0, 1], sequence="r")])


@pytest.mark.parametrize("make", [pad, lambda rows: pack(rows)[0]])
def test_a_caller_may_mask_further_tokens(make):
    """They keep their log probabilities, which a loss does not read."""
    made = make([row([5, 6, 7], [0, 0, 1], logprobs=[0.0, -0.5, -0.25])])
    assert (made.loss_mask.ravel().tolist(), made.logprobs.ravel().tolist()) == ([0, 0, 1], [0.0, -0.5, -0.25])


def test_advantages_may_be_arrays():
    rows = [row([5, 6, 7], [0, 1, 1]), row([5, 8], [0, 1], sequence="r")]
    for_each_token = [np.array([9.0, 0.25, 0.5]), np.array([9.0, -1.0])]
    assert pad(rows, for_each_token).advantages.tolist() == [[0.0, 0.25, 0.5], [0.0, -1.0, 0.0]]
    assert pad(rows, np.array([2.0, -1.0])).advantages.tolist() == [[0.0, 2.0, 2.0], [0.0, -1.0, 0.0]]


@pytest.mark.parametrize("make", [pad, pack, lambda rows, advantages: flatten(build_forest(rows), advantages)])
@pytest.mark.parametrize(
    ("mask", "advantages", "words"),
    [
        ([0, 1], [], "0 advantages for 1 rows"),
        ([0, 1], [[0.5]], "1 advantages for 2 tokens"),
        ([0, 1], [float("nan")], "not a finite number"),
        ([1, 0], [0.5], "its first token is trained"),
    ],
)
def test_rows_and_advantages_that_do_not_fit_are_refused(make, mask, advantages, words):
    with pytest.raises(ValueError, match=words):
        make([row([1, 2], mask)], advantages)


def test_a_row_that_fits_into_no_pack_is_refused_not_cut():
    with pytest.raises(ValueError, match=r"sequence q has 3 tokens, a pack may have 2: .*max_length=2"):
        pack([row([1, 2, 3])], max_tokens=2)


def test_packs_are_filled():
    rows = [row([0] * n, sequence=f"q{n}") for n in (1, 4, 3, 2)]
    assert [one.rows.tolist() for one in pack(rows, max_tokens=5)] == [[1, 0], [2, 3]]


def test_torch_tensors_have_the_names_of_the_arrays(monkeypatch):
    """torch itself is used in `test_tree_loss`."""
    torch = types.SimpleNamespace(from_numpy=lambda array: ("tensor", array))
    monkeypatch.setitem(sys.modules, "torch", torch)
    padded = pad([row([1, 2], [0, 1])])
    tensors = as_torch(padded)
    assert list(tensors) == ["token_ids", "attention_mask", "position_ids", "loss_mask", "logprobs", "advantages"]
    assert all(tensors[name][1] is getattr(padded, name) for name in tensors)
    assert all(isinstance(array, np.ndarray) for _, array in tensors.values())


def test_without_numpy_the_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "tokencache.batching.tensors")
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ImportError, match=r"needs the extra 'batching'"):
        __import__("tokencache.batching.tensors")

"""Where sequences part: the tree of partings against the definition, applied to lists of ids."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokencache.api.viewer.groups import Parting, find_parting
from tokencache.core import ids

SEQUENCES = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=1), st.lists(st.sampled_from((1, 2, 258, 2**24 + 1)), max_size=6), min_size=1
)


def check(parting, sequences):
    """Sequences that are equal have no parting. Otherwise they share all tokens before it, and branches differ exactly in the next one."""
    if parting is None:
        assert len({tuple(tokens) for tokens in sequences.values()}) == 1, "sequences differ, but have no parting"
        return
    assert len({tuple(tokens[: parting.at]) for tokens in sequences.values()}) == 1, "sequences differ before their parting"
    following = [{tuple(sequences[name][parting.at : parting.at + 1]) for name in names} for names, _ in parting.branches]
    assert all(len(tokens) == 1 for tokens in following), "sequences of one branch differ at its parting"
    assert len(following) == len(set(itertools.chain(*following))) > 1, "two branches are equal at their parting"
    assert sorted(itertools.chain(*(names for names, _ in parting.branches))) == sorted(sequences), "a sequence is in no branch or in two"
    for names, then in parting.branches:
        check(then, {name: sequences[name] for name in names})


@given(SEQUENCES)
def test_partings_are_where_sequences_first_differ(sequences):
    check(find_parting({name: ids.pack(tokens) for name, tokens in sequences.items()}), sequences)


@pytest.mark.parametrize(
    ("parting", "words"),
    [
        (None, "have no parting"),
        (Parting(1, [(["a", "b"], None), (["c"], None)]), "differ before"),
        (Parting(0, [(["a", "b", "c"], None)]), "of one branch differ"),
        (Parting(0, [(["a"], None), (["b"], None), (["c"], None)]), "two branches are equal"),
        (Parting(0, [(["a"], None), (["c"], None)]), "in no branch"),
        (Parting(0, [(["a", "b"], None), (["c"], None)]), "have no parting"),
    ],
)
def test_the_checker_finds_wrong_partings(parting, words):
    with pytest.raises(AssertionError, match=words):
        check(parting, {"a": [1, 2], "b": [1, 3], "c": [2]})

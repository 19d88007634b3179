"""Edits change the messages that they name, in every turn that has the place, and nothing else."""

import random

import msgspec
import pytest

from tokencache.core.context_edits import Edit, edit_messages

RECORDED = [msgspec.Raw(b'{"role":"user","content":"%d"}' % n) for n in range(4)]


def texts(found):
    return [msgspec.json.decode(raw)["content"] for raw in found.messages]


def said(*words):
    return [{"role": "user", "content": word} for word in words]


@pytest.mark.parametrize(
    ("edits", "after", "applied"),
    [
        ([], "0 1 2 3", []),
        ([Edit(at=0, insert=said("a", "b"))], "a b 0 1 2 3", [0]),
        ([Edit(insert=said("a"))], "0 1 2 3 a", [0]),
        ([Edit(at=4, insert=said("a"))], "0 1 2 3 a", [0]),
        ([Edit(at=-1, insert=said("a"))], "0 1 2 a 3", [0]),
        ([Edit(at=-4, replace=said("a"))], "a 1 2 3", [0]),
        ([Edit(at=2, replace=said("a", "b"))], "0 1 a b 3", [0]),
        ([Edit(at=2, insert=said("a")), Edit(at=2, replace=said("b")), Edit(at=2, insert=said("c"))], "0 1 a c b 3", [0, 1, 2]),
        ([Edit(at=5, insert=said("a")), Edit(at=-5, insert=said("a")), Edit(at=4, replace=said("a"))], "0 1 2 3", []),
    ],
)
def test_an_edit_changes_the_place_that_it_names(edits, after, applied):
    found = edit_messages(edits, RECORDED)
    assert texts(found) == after.split()
    assert found.edits == applied


def test_every_message_that_stays_is_found_at_its_new_place():
    rng = random.Random(5)
    for _ in range(300):
        count = rng.randrange(1, 6)
        edits = [Edit(at=rng.randrange(count + 1), insert=said("new")) for _ in range(rng.randrange(3))]
        edits += [Edit(at=at, replace=said(*"xy"[: rng.randrange(1, 3)])) for at in rng.sample(range(count), rng.randrange(count))]
        rng.shuffle(edits)
        recorded = [msgspec.Raw(b'{"role":"user","content":"%d"}' % n) for n in range(count)]
        found = edit_messages(edits, recorded)
        replaced = {edit.at for edit in edits if edit.replace}
        for place, message in enumerate(recorded):
            assert (found.places[place] < 0) == (place in replaced)
            assert place in replaced or found.messages[found.places[place]] is message
        stays = [at for at in found.places if at >= 0]
        assert stays == sorted(stays)
        assert len(found.messages) == len(stays) + sum(len(edit.insert or edit.replace) for edit in edits)


def test_what_is_no_single_change_is_refused():
    for members in ({}, {"at": 1}, {"insert": said("a"), "replace": said("b"), "at": 0}, {"replace": said("a")}):
        with pytest.raises(ValueError, match=r"`insert` or `replace`|needs `at`"):
            Edit(**members)
    with pytest.raises(ValueError, match=r"`edits\[1\]` replaces the message at 3 of a turn, as `edits\[0\]` does"):
        edit_messages([Edit(at=3, replace=said("a")), Edit(at=-1, replace=said("b"))], RECORDED)
